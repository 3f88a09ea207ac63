"""`keepstep preflight`: every check that a start makes, and those that only look; one that fails hides no other.

| id | what |
|---|---|
| settings … room | what every start checks: `start.STEPS` |
| told | the settings that config.yaml or a log tells of, where the run's record is lost or foreign |
| lease | nobody else trains this run |
| processes | what earlier attempts left running, by their own records |
| port, gpu_memory, shared_folder, clock, compiler | on every node of the job (`preflight.node`) |
| store_writes | the store takes an object, refuses a second under the same key, and gives it back |
| reward_sample | the reward function scores the first row, within a time limit, in a process of its own |
| export | config, generation config and tokenizer of the model load and can be written out |
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.attempts import claim, leftovers
from keepstep.config.load import leaves, load
from keepstep.config.schema import RunConfig
from keepstep.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    ConfigError,
    HeldError,
    KeepstepError,
    RewardError,
    StorageError,
    StorageRefusedError,
    last_line,
)
from keepstep.preflight import contract, node
from keepstep.preflight.foreign_log import settings_in
from keepstep.preflight.lease import holder
from keepstep.preflight.model import model_folder
from keepstep.preflight.start import STEPS, Start, Step
from keepstep.processes import terminate
from keepstep.run import RunDir

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"
SAMPLE_TIMEOUT_S = 60.0
EXPORT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Check:
    """What one check says."""

    id: str
    status: str
    """ok, warn, fail or skipped."""
    sentence: str
    remedy: str = ""
    exit_code: int = EXIT_DONE
    node: str = ""
    """Where it was made, when not here."""
    error: KeepstepError | None = None
    """What a failed check raised here."""

    def to_record(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "error"}


@dataclass
class WarnError(Exception):
    """Not as it should be, and no reason not to start."""

    sentence: str
    remedy: str = ""


class SkipError(Exception):
    """There is nothing to check, or no way to; the text says why."""


OnNodes = Callable[[node.Request], list[Check]]


def examine(
    config: RunConfig, *, on_nodes: OnNodes | None = None, heavy: Sequence[Step] | None = None, log: str | None = None
) -> tuple[list[Check], Start]:
    """All checks in their order, and what they found; writes nothing into the run.

    Args:
        on_nodes: asks every node of the job; None: this machine alone.
        heavy: which of `HEAVY`, each a process of its own, are made as well; None: all.
        log: a log of the run, which may be verl's.
    """
    start = Start(config, RunDir.at(config.trainer.output_dir))
    told = Step("told", lambda found: _told(found, log))
    checks: list[Check] = []
    try:
        for step in [*STEPS, told, *LOOKS, *(HEAVY if heavy is None else heavy)]:
            checks += _make(step, start, {check.id for check in checks if check.status in (FAIL, SKIPPED)})
        checks += _ask_nodes(on_nodes or _here, config, start.run)
    finally:
        if start.remote is not None:
            start.remote.close()
    return checks, start


def refusal(checks: list[Check]) -> KeepstepError | None:
    """The first failure for which a start would be refused; of a kind that waiting may cure only if there is no other.
    Pure.

    What earlier attempts left holds ports and memory, and is ended by the start itself: then neither counts here.
    """
    left = any(check.id == "processes" and check.status == WARN for check in checks)
    passing = {"port", "gpu_memory"} if left else set()
    errors = []
    for check in checks:
        if check.status == FAIL and check.id not in passing:
            error = check.error or ConfigError(check.sentence, check.remedy)
            error.exit_code = check.exit_code or error.exit_code
            errors.append(error)
    return next((error for error in errors if not error.retry), next(iter(errors), None))


def exit_code(checks: list[Check]) -> int:
    """0 where a start would go through, else that of what it would be refused for. Pure."""
    error = refusal(checks)
    return EXIT_DONE if error is None else error.exit_code


def _ask_nodes(on_nodes: OnNodes, config: RunConfig, run: RunDir) -> list[Check]:
    """The answers of the nodes; a cluster that cannot be asked is one more check that fails."""
    try:
        return on_nodes(node.request(config, run))
    except KeepstepError as error:
        return [Check("nodes", FAIL, error.message, error.remedy, error.exit_code, error=error)]
    except Exception as error:
        # Ray's own errors have many roots.
        line = last_line(error)
        return [Check("nodes", FAIL, f"{config.ray.address}: {type(error).__name__}: {line}", "", EXIT_FAILED)]


def _make(step: Step, start: Start, failed: set[str]) -> list[Check]:
    """The check, and a warning for each doubt that it met on its way."""
    missing = [needed for needed in step.needs if needed in failed]
    if missing:
        return [Check(step.id, SKIPPED, f"says nothing without {', '.join(missing)}")]
    known = len(start.warnings)
    try:
        check = Check(step.id, OK, step.act(start))
    except SkipError as reason:
        check = Check(step.id, SKIPPED, str(reason))
    except WarnError as doubt:
        check = Check(step.id, WARN, doubt.sentence, doubt.remedy)
    except KeepstepError as error:
        check = Check(step.id, FAIL, error.message, error.remedy, error.exit_code, error=error)
    except Exception as error:
        # Our own bug in one check must not hide the others, and one that only looks must not refuse a start.
        status = FAIL if step in STEPS else WARN
        check = Check(step.id, status, f"the check itself failed: {type(error).__name__}: {error}", "", EXIT_FAILED)
    return [check, *(Check(step.id, WARN, warning) for warning in start.warnings[known:])]


def _here(request: node.Request) -> list[Check]:
    return [replace(Check(**answer), node="") for answer in node.answers(request)]


def _told(start: Start, log: str | None) -> str:
    """Against config.yaml or a log; where the run has its record, the contract says more."""
    config = start.config
    if log is None and (start.existing is not None or not start.run.config.is_file()):
        raise SkipError("the contract is compared" if start.existing else "a first start: nothing tells of another")
    source = Path(log) if log else start.run.config
    if not source.is_file():
        raise ConfigError(f"--log: {log} is not a file.", "Give a log of the run.")
    then = settings_in(source.read_text(errors="replace")) if log else _settings_of(load(str(source)))
    now = _settings_of(config)
    drifts = contract.compare(then, {key: now[key] for key in then if key in now}, contract.stated(config))
    compared = sum(key in now and contract.class_of(key) != contract.FREE for key in then)
    if not compared:
        raise ConfigError(f"{source} tells of no setting.", "It needs Keepstep's `key=value` lines, or verl's config.")
    # A first start that was killed before its record leaves its config.yaml, which binds nobody.
    if log:
        contract.enforce(drifts, config.resume.allow, f"The run of {source}")
    if drifts:
        raise WarnError("\n".join([f"{source} tells of other settings:", *contract.table(drifts)]))
    return f"{compared} settings are as {source} tells"


def _settings_of(config: RunConfig) -> dict[str, Any]:
    return dict(leaves(config.model_dump(mode="json")))


def _lease(start: Start) -> str:
    verdict = holder(start.run, start.config.retry)
    if not verdict.open:
        raise HeldError(
            f"{start.run.root} is held: {verdict.reason}.", "Wait for it, end it, or give another trainer.output_dir."
        )
    return verdict.reason


def _processes(start: Start) -> str:
    if not holder(start.run, start.config.retry).open:
        raise SkipError("the run is being trained: its processes are no leftovers")
    left = leftovers(start.run)
    if not left:
        return "no earlier attempt left a process"
    names = ", ".join(f"{ref.role} {ref.pid}" for ref in left[:8]) + (", …" if len(left) > 8 else "")
    raise WarnError(
        f"{len(left)} processes of earlier attempts still run: {names}",
        "They hold memory and ports: end them with --clean; a start ends them as well.",
    )


def _store_writes(start: Start) -> str:
    if not start.config.s3_enabled:
        raise SkipError("no store is configured")
    if start.remote is None:
        raise SkipError("the store does not answer: local checkpoints are enough to go on from")
    store, key = start.remote.store, f"preflight/{uuid.uuid4().hex}"
    content = b"keepstep preflight"
    try:
        store.put_bytes(key, content, if_absent=True)
        again = store.put_bytes(key, content, if_absent=True)
        read = store.get_bytes(key)
    except StorageRefusedError:
        raise
    except StorageError as error:
        # It may pass, and a run goes on without its store for a while.
        raise WarnError(error.message, error.remedy) from None
    finally:
        with contextlib.suppress(StorageError):
            store.delete(key)
    if again:
        raise ConfigError(
            f"{store.where} does not honour conditional writes (If-None-Match): it took a second object under one key.",
            "Two machines could both own the run. Use a store that honours them.",
        )
    if read != content:
        raise StorageError(f"{store.where} gave back {len(read or b'')} other bytes than it was given.", "Look at it.")
    return f"{start.remote.store.where}: writes, conditional writes, reads and deletes"


def _reward_sample(start: Start) -> str:
    config = start.config
    request = {
        "file": next(entry["path"] for entry in start.dataset["files"] if entry["rows"]),
        "reward": config.custom_reward_function.model_dump(),
        "reward_fn_key": config.data.reward_fn_key,
    }
    answer = _ask("keepstep.preflight.reward_sample", request, SAMPLE_TIMEOUT_S, "The reward function")
    if "problem" in answer:
        if config.reward_model.on_error == "zero" and start.existing is not None:
            # As in training: a judge that is away for a moment must not keep a run from coming back. At a run's first
            # start it is as likely a function that never scores anything.
            raise WarnError(answer["problem"], "Such responses score 0 (reward_model.on_error).")
        raise RewardError(answer["problem"], answer["remedy"])
    return f"scores the first row's own answer {answer['score']:g} and an empty text {answer['empty']:g}"


def _export(start: Start) -> str:
    folder = model_folder(start.config.actor_rollout_ref.model.path, start.run)
    if not (folder / "config.json").is_file():
        raise SkipError("the made model is gone: the run's checkpoints hold its files")
    answer = _ask("keepstep.export.dry_run", {"model": str(folder)}, EXPORT_TIMEOUT_S, "The dry run of the export")
    if "problem" in answer:
        raise ConfigError(answer["problem"], answer["remedy"])
    return "config, generation config and tokenizer can be written out"


def _ask(module: str, request: dict[str, Any], timeout_s: float, what: str) -> dict[str, Any]:
    """Answer of `python -m module`, to which the request goes as JSON: user code and heavy imports stay out of here."""
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        message = f"{what} did not answer within {timeout_s:.0f} s."
        raise WarnError(message, "See whether it waits for something: while training there is no such limit.") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise KeepstepError(
            f"{what} ended with {done.returncode}: {last_line(done.stderr)}", f"Try it: {' '.join(command)}"
        )
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


LOOKS: tuple[Step, ...] = (
    Step("lease", _lease, ("output_dir",)),
    Step("processes", _processes, ("output_dir",)),
    Step("store_writes", _store_writes, ("store",)),
)
REWARD_SAMPLE = Step("reward_sample", _reward_sample, ("dataset", "reward"))
EXPORT = Step("export", _export, ("model",))
HEAVY = (REWARD_SAMPLE, EXPORT)
"""Those that import transformers or call the reward function."""


def clean(run: RunDir, lease_timeout_s: float) -> list[str]:
    """End what earlier attempts left, with all that they started; what was ended, for a person.

    Raises:
        HeldError: somebody trains this run.
    """
    # One listing for both: an attempt that begins in between is nobody's leftover.
    newest = max(run.attempt_numbers(), default=0)
    verdict = claim(run, newest, lease_timeout_s)
    if not verdict.open:
        raise HeldError(f"{run.root} is held: {verdict.reason}.", "Nothing was ended.")
    return [f"{ref.role} {ref.pid}" for ref in terminate(leftovers(run, before=newest + 1))]
