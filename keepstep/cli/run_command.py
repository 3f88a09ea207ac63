"""`keepstep run`: the whole flow in this process. `keepstep ui`: the page of a platform folder's Prefect server.

Prefect reads its settings at import, so everything it must know is put into the environment before.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

from keepstep.checkpoint.history import uploaded_steps, verified_steps
from keepstep.cli.train_command import alone, completed, warn
from keepstep.config.load import leaves, load, to_yaml
from keepstep.config.schema import RunConfig
from keepstep.errors import EXIT_DONE, ConfigError, KeepstepError, Preempted
from keepstep.platform import servers, windows
from keepstep.preflight.complete import complete_result
from keepstep.preflight.folder import check_room
from keepstep.processes import ProcessRef
from keepstep.run import PLATFORM_DIR, RunDir, read_json

API_TIMEOUT_S = 20.0
PREFECT_DEFAULTS = {
    # Patience with an API that is away: 510 s in all, instead of 62.
    "PREFECT_CLIENT_MAX_RETRIES": str(windows.CLIENT_MAX_RETRIES),
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(windows.HEARTBEAT_S),
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # The terminal shows progress and one message per error; the page shows the logs.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL": "CRITICAL",
    "DO_NOT_TRACK": "1",
}


def main(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run the flow. Raises the `KeepstepError` with which it ended."""
    config = load(args.config, overrides)
    warn(config)
    if args.dry_run:
        print(to_yaml(config), end="")
        return EXIT_DONE
    if config.trainer.debug:
        # A look, not a run: nothing to schedule, nothing to retry.
        alone(config)
        return EXIT_DONE
    if completed(config) is not None:
        return EXIT_DONE
    run = RunDir.at(config.trainer.output_dir)
    os.environ.update({key: value for key, value in PREFECT_DEFAULTS.items() if key not in os.environ})
    check_room(run)
    _connect_prefect(run)
    result = _run_flow(config, flow_parameters(args.config, overrides, config))
    print(summary(run, result))
    return EXIT_DONE


def ui(args: argparse.Namespace) -> int:
    """Keep the Prefect server of a run, or of the folder that holds runs, until Ctrl-C."""
    given = Path(os.path.abspath(os.path.expanduser(args.path)))
    platform = next((p for p in (given / PLATFORM_DIR, given.parent / PLATFORM_DIR) if p.is_dir()), None)
    if platform is None or not given.is_dir():
        raise ConfigError(f"{given}: no run was started here or beside it.", "Give the folder of a run.")
    holder = ProcessRef.current("flow")
    info = servers.prefect_server(platform, holder)
    print(f"{info.url}\nCtrl-C ends it, unless a run or `keepstep up` uses it.", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        servers.release(platform, holder)
    return EXIT_DONE


def _connect_prefect(run: RunDir) -> None:
    """Use the configured Prefect API, else the embedded server, held by this process."""
    if url := os.environ.get("PREFECT_API_URL"):
        _check_api(url)
        return
    print("starting the Prefect server", file=sys.stderr, flush=True)
    info = servers.prefect_server(run.platform, ProcessRef.current("flow"))
    os.environ.update(info.env)
    print(f"Prefect page: {info.url}", file=sys.stderr, flush=True)


def _check_api(url: str) -> None:
    """Raise `ConfigError` when no Prefect API answers at `url`."""
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=API_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"PREFECT_API_URL={url} does not answer: {error}.",
            "Start that server, or unset PREFECT_API_URL to have one started beside the run.",
        ) from None


def _run_flow(config: RunConfig, parameters: dict[str, Any]) -> dict[str, Any]:
    from flows.grpo_train import grpo_train

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return grpo_train(**parameters)
    except KeyboardInterrupt:
        if (result := complete_result(config)) is not None:
            return result
        saved = max(verified_steps(RunDir.at(config.trainer.output_dir)), default=None)
        state = "nothing was saved yet" if saved is None else f"step {saved} is saved and verified"
        raise Preempted(f"Asked to leave: {state}.", "The same command goes on.") from None
    except KeepstepError:
        raise
    except Exception as error:
        # What counts is the run's own record: Prefect may be away when it is to be told of the end.
        result = complete_result(config)
        if result is None:
            _blame_prefect(os.environ["PREFECT_API_URL"], error)
            raise
        print(f"Prefect was not told of the end ({type(error).__name__}); the run is complete.", file=sys.stderr)
        return result


def _blame_prefect(url: str, error: Exception) -> None:
    """Raise `KeepstepError` when there is no Prefect server any more; else the failure is another."""
    try:
        _check_api(url)
    except ConfigError:
        raise KeepstepError(
            f"The Prefect server at {url} was lost, and the flow with it ({type(error).__name__}: {error}).",
            "What is saved stands. Once the server is back, or at once if it was started by this command: the same "
            "command goes on.",
        ) from error


def flow_parameters(config: str | None, overrides: list[str], loaded: RunConfig) -> dict[str, Any]:
    """The flow's parameters for a command line and what was `loaded` from it. A file's path is made absolute.

    Of what was added to a list, perhaps several times, the list that came of it is passed on.
    """
    name = config or "quickstart"
    if os.path.isfile(name):
        name = os.path.abspath(name)
    given = dict(_split(override) for override in overrides)
    added = {key.removesuffix("+") for key in given if key.endswith("+")}
    lists = {key: value for key, value in leaves(loaded.model_dump(mode="json")) if key in added}
    return {"config": name, "overrides": {key: value for key, value in given.items() if not key.endswith("+")} | lists}


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("-+").partition("=")
    return key, value


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def summary(run: RunDir, result: dict[str, Any]) -> str:
    """What a person wants to know at the end."""
    first, last = result["reward_first10"], result["reward_last10"]
    # After the loss of the folder the steps before it are known to nobody here.
    rewards = [] if first is None else [f"reward       {first:.3f} (first 10 steps) -> {last:.3f} (last 10)"]
    lines = [
        "",
        f"run          {run.root}",
        f"steps        {result['final_step']} of {result['target_step']}, {result['steps_lost']} trained again, "
        f"{result['attempts']} attempt(s)",
        *rewards,
        *(f"checkpoint   {_state(run, step)}" for step in _known_steps(run)),
        "resume       the same command (this run is complete: it will say so)",
        f"export       keepstep export {shlex.quote(result['final_checkpoint'])}",
        f"Prefect page keepstep ui {shlex.quote(str(run.root))}",
    ]
    return "\n".join(lines)


def _known_steps(run: RunDir) -> list[int]:
    return sorted({*run.steps(), *uploaded_steps(run)})


def _state(run: RunDir, step: int) -> str:
    local = "on disk" if run.checkpoint(step).is_dir() else "not on disk"
    remote = "not uploaded"
    if run.upload(step).is_file():
        record = read_json(run.upload(step))
        remote = f"in s3://{record['bucket']}/{record['prefix']}"
    return f"step_{step}: {local}, {remote}"
