"""`keepstep train`: the trainer alone, in this process, without Prefect."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from keepstep.config.load import load, to_yaml, validate
from keepstep.config.schema import RunConfig
from keepstep.errors import EXIT_DONE, BugError, KeepstepError, NoRoomError, WorkerDiedError, no_room_cause
from keepstep.processes import ProcessRef


def main(args: argparse.Namespace, overrides: list[str]) -> int:
    """Train; a `KeepstepError` goes up to the caller, which prints it."""
    from keepstep.controller import launch

    if args.from_env:
        config = RunConfig.model_validate_json(os.environ[launch.CONFIG_VARIABLE])
    else:
        config = load(args.config, overrides)
        warn(config)
    if args.dry_run:
        print(to_yaml(config), end="")
        return EXIT_DONE
    if (result := completed(config)) is not None:
        if args.events_stdout:
            # A flow that lost the trainer's last word must hear it from the next attempt.
            _print_event({"event": "finished", "step": result["final_step"], "result": result})
        return EXIT_DONE
    if not args.from_env:
        alone(config)
        return EXIT_DONE
    from keepstep.controller.attempt import run_attempt

    flow = ProcessRef.from_record(json.loads(os.environ[launch.FLOW_VARIABLE]))
    listener = _print_event if args.events_stdout else _progress()
    told: list[str] = []
    try:
        run_attempt(
            config,
            flow=flow,
            listeners=[listener, lambda event: told.append(event["event"])],
            watch_stdin=args.watch_stdin,
        )
    except Exception as error:
        if args.events_stdout and not set(told) & set(launch.TERMINAL_EVENTS):
            # Whoever follows compares how attempts end, and would take an end without a word for a kill from outside.
            _print_event(launch.terminal_event(early_failure(error)))
        raise
    return EXIT_DONE


def early_failure(error: Exception) -> KeepstepError:
    """Our error for what ended an attempt before it had a record. Pure.

    A disk that answers wrongly for a moment is as a kill from outside: five tries, with pauses.
    """
    if isinstance(error, KeepstepError):
        return error
    if isinstance(error, OSError):
        kind = NoRoomError if no_room_cause(error) else WorkerDiedError
        return kind(f"The attempt did not begin: {type(error).__name__}: {error}")
    return BugError(f"{type(error).__name__}: {error}")


def alone(config: RunConfig) -> None:
    """One attempt for a person: in this process, or as a job of the configured cluster."""
    if config.ray.address:
        from keepstep.controller import launch

        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        launch.run_trainer(config, _progress(), stop)
        return
    from keepstep.controller.attempt import run_attempt

    run_attempt(config, listeners=[_progress()])
    if config.trainer.debug:
        print("One step was taken aside; nothing was written into the run.", file=sys.stderr)


def _progress() -> Callable[[dict[str, Any]], None]:
    from keepstep.cli.progress import ProgressPrinter

    return ProgressPrinter()


def warn(config: RunConfig) -> None:
    """Say what is doubtful before anything starts. Raises `ConfigError` on settings that do not go together."""
    for warning in validate(config):
        print(f"keepstep: warning: {warning}", file=sys.stderr)


def completed(config: RunConfig) -> dict[str, Any] | None:
    """result.json of a run that has reached its end, which is then said; else None."""
    from keepstep.preflight.complete import complete_result

    result = complete_result(config)
    if result is not None:
        print(
            f"{config.trainer.output_dir} is complete: "
            f"step {result['final_step']} of {result['target_step']}. Nothing to do."
        )
    return result


def _print_event(event: dict[str, Any]) -> None:
    from keepstep.controller.launch import EVENT_PREFIX

    # One write per line: the saver's and the uploader's threads print too.
    sys.stdout.write(EVENT_PREFIX + json.dumps(event) + "\n")
    sys.stdout.flush()
