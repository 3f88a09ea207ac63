"""The one exception tree. Each class says how the command exits and out of which budget another attempt is made.

A message names what is wrong, where, what was found and what was expected; `remedy` is the way out.
Commands print both to stderr without a traceback. Anything that is not a `KeepstepError` is our bug and
keeps its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from typing import Self

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONTRACT = 3
EXIT_DATA = 4
EXIT_HELD = 5
EXIT_STORAGE = 6
EXIT_PREEMPTED = 75

NEVER = "never"
KILLS = "kills"
FAILURES = "failures"
ONCE = "once"
"""Budgets of a class: no other attempt; unlimited, but for five at one step; `retry.max_retries`; one, within those."""


def first_line(error: BaseException) -> str:
    """The first line of what an exception says that is not empty; where it says nothing, what it is."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def last_line(said: object) -> str:
    """The last line, that is not empty, of what a process or an exception says: tracebacks end with their cause."""
    nothing = type(said).__name__ if isinstance(said, BaseException) else "no word"
    return next((line.strip() for line in reversed(str(said).splitlines()) if line.strip()), nothing)


class KeepstepError(Exception):
    """Base of every error that Keepstep raises on purpose.

    Attributes:
        failure_class: name used in events, attempt records and retry decisions.
        exit_code: what the command exits with.
        budget: what another attempt after it is paid from (`keepstep.retry`).
        roles: the workers that it is about, as `rank 1` or `engine 0`; empty where it is about none or not known.
    """

    failure_class = "failed"
    exit_code = EXIT_FAILED
    budget = NEVER
    roles: frozenset[str] = frozenset()

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message

    @property
    def retry(self) -> bool:
        """Whether another attempt of the same command can succeed."""
        return self.budget != NEVER

    def of(self, roles: Iterable[str]) -> Self:
        """This error, with the workers that it is about."""
        self.roles = frozenset(roles)
        return self


class ConfigError(KeepstepError):
    """The command line, the configuration or the environment cannot work as given."""

    failure_class = "config"
    exit_code = EXIT_USAGE


class ContractError(KeepstepError):
    """The run recorded something at its first start that this start contradicts."""

    failure_class = "contract"
    exit_code = EXIT_CONTRACT


class ExactnessError(ContractError):
    """A replayed step gave other bytes than the standing, verified checkpoint of the same step."""

    failure_class = "exactness"


class DamagedFileError(ContractError, ValueError):
    """A file of the run's own bookkeeping is not what was written."""

    failure_class = "damaged_file"


class DataError(KeepstepError):
    """The data set is missing, damaged, or not the one that the run recorded."""

    failure_class = "data"
    exit_code = EXIT_DATA


class HeldError(KeepstepError):
    """Another live attempt holds the run."""

    failure_class = "held"
    exit_code = EXIT_HELD


class FencedError(HeldError):
    """A newer attempt took the run over: this one must stop without writing."""

    failure_class = "fenced"


class StorageError(KeepstepError):
    """The object store failed in a way that another try may cure."""

    failure_class = "storage"
    exit_code = EXIT_STORAGE
    budget = FAILURES


class StorageRefusedError(StorageError):
    """The object store said no (credentials, bucket, permissions): trying again cannot help."""

    failure_class = "storage_refused"
    budget = NEVER


class CheckpointError(KeepstepError):
    """A checkpoint cannot be used as asked."""

    failure_class = "checkpoint"


class DamagedStepError(CheckpointError):
    """A step that was verified is no more what was saved: the plan of another attempt mends it or sets it aside."""

    failure_class = "damaged_step"
    budget = FAILURES


class ProbeError(CheckpointError):
    """A loaded policy computes other log-probs than the saved one did."""

    failure_class = "probe"


NO_ROOM_ERRNOS = (28, 122)
"""ENOSPC, and EDQUOT, which strikes where `df` still shows room."""


def no_room_cause(error: BaseException) -> OSError | None:
    """The "no space" or "quota exceeded" that an error was raised for or while handling, if there is one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in NO_ROOM_ERRNOS:
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that host or device memory ran out, in the words of Python, torch, CUDA or the kernel."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = str(error).lower()
    return any(words in text for words in ("out of memory", "cannot allocate memory", "can't allocate memory"))


class NoRoomError(KeepstepError):
    """The filesystem is full or over quota."""

    failure_class = "no_room"


class Preempted(KeepstepError):  # noqa: N818  (an outcome, not a fault)
    """The attempt was asked to leave (SIGTERM, Ctrl-C, node drain) and left in order."""

    failure_class = "preempted"
    exit_code = EXIT_PREEMPTED
    budget = KILLS


class OrphanedError(KeepstepError):
    """The process that started this attempt is gone."""

    failure_class = "orphaned"
    budget = KILLS


class WorkerDiedError(KeepstepError):
    """A rank, an engine, a writer or the controller's process went away."""

    failure_class = "worker_died"
    budget = KILLS


class OutOfMemoryError(KeepstepError):
    """Host or device memory ran out."""

    failure_class = "out_of_memory"
    budget = ONCE


class NoProgressError(KeepstepError):
    """Something that should have answered within its time limit did not."""

    failure_class = "no_progress"
    budget = FAILURES


class NonFiniteError(KeepstepError):
    """A loss or a gradient is NaN or infinite: the same step would give the same again."""

    failure_class = "non_finite"


class RewardError(KeepstepError):
    """The reward function raised, or gave no number: the same response would do it again."""

    failure_class = "reward"


class NoSignalError(KeepstepError):
    """Dynamic sampling found too few groups whose rewards differ: the same prompts would give the same again."""

    failure_class = "no_signal"


class StaleWeightsError(KeepstepError):
    """The engine's log-probs are not the trainer's: it samples from other weights."""

    failure_class = "stale_weights"


class BugError(KeepstepError):
    """An unexpected exception inside the trainer; kept with its traceback in the log."""

    failure_class = "bug"
    budget = FAILURES


def classes() -> dict[str, type[KeepstepError]]:
    """Every class of the tree by its name in events and records."""

    def tree(cls: type[KeepstepError]) -> Iterator[type[KeepstepError]]:
        yield cls
        for child in cls.__subclasses__():
            yield from tree(child)

    return {cls.failure_class: cls for cls in tree(KeepstepError)}


def budget_of(failure_class: str) -> str:
    """The budget of a recorded class; one of another release's tree is a bug as far as this one knows."""
    return classes().get(failure_class, BugError).budget
