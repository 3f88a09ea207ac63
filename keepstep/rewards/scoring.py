"""Scoring a batch of responses: in this process or in a pool, by plain or async functions, with a limit for each.

Concurrency: used by the loop's thread. With `num_workers` a pool of processes scores parts of the batch, those that
`begin` brings while others are still sampled; the loop waits for all of them in `score` and looks in between whether
the attempt should end. A worker dies with the process that started it.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from keepstep.config.schema import RewardFunctionConfig, RewardModelConfig
from keepstep.errors import RewardError, WorkerDiedError
from keepstep.rewards.load import RewardFunction, load_reward

POLL_S = 0.5
PARTS_PER_WORKER = 4
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


@dataclass(frozen=True)
class Question:
    """A response and what it is scored by."""

    data_source: str
    text: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Score:
    value: float
    parts: dict[str, float]
    """The other numbers of a dict that the function returned."""


Outcome = Score | RewardError


class Scorer:
    """The run's reward function at work."""

    def __init__(self, function: RewardFunction, settings: RewardModelConfig, source: RewardFunctionConfig) -> None:
        """
        Args:
            source: where the workers of a pool find the same function.
        """
        self.current: Question | None = None
        """What is being scored in this process."""
        self._function, self._settings, self._source = function, settings, source
        self._pool: ProcessPoolExecutor | None = None
        self._begun: dict[int, tuple[Question, Future[list[Outcome]], int]] = {}
        """By place in the batch: what the pool was given, what it will answer, and where in that answer."""
        self._scores: list[Score] = []
        self._num_errors = 0

    @property
    def in_background(self) -> bool:
        """Whether `begin` has somebody to give its questions to."""
        return self._settings.num_workers > 0

    def begin(self, questions: dict[int, Question]) -> None:
        """Have the pool score these, by their places in the batch that `score` is asked for next; nothing is awaited.

        `score` must be given the very same objects.
        """
        if self.in_background:
            # A pool that is broken is met again, and told of, in `score`.
            with suppress(BrokenProcessPool):
                self._submit(questions)

    def score(self, questions: Sequence[Question], check: Callable[[], None]) -> list[float]:
        """One reward per response, in order.

        Args:
            check: called every now and then; raises to end the scoring.

        Raises:
            RewardError: the function failed, and `reward_model.on_error` is `stop`.
            WorkerDiedError: a process of the pool died.
        """
        found = self._here(questions, check) if self._settings.num_workers == 0 else self._in_pool(questions, check)
        errors = [outcome for outcome in found if isinstance(outcome, RewardError)]
        if errors and self._settings.on_error == "stop":
            raise errors[0]
        scores = [Score(0.0, {}) if isinstance(outcome, RewardError) else outcome for outcome in found]
        self._num_errors += len(errors)
        self._scores += scores
        return [score.value for score in scores]

    def take_metrics(self) -> dict[str, float]:
        """Means of the parts, and the number of failures where they score 0, since this was last asked."""
        names = sorted({name for score in self._scores for name in score.parts})
        found = {
            f"{name}/mean": float(np.mean([score.parts[name] for score in self._scores if name in score.parts]))
            for name in names
        }
        if self._settings.on_error == "zero":
            found["num_errors"] = float(self._num_errors)
        self._scores, self._num_errors = [], 0
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _here(self, questions: Sequence[Question], check: Callable[[], None]) -> list[Outcome]:
        def beginning(question: Question | None) -> None:
            self.current = question
            check()

        return score_all(self._function, questions, self._settings.timeout_s, beginning)

    def _in_pool(self, questions: Sequence[Question], check: Callable[[], None]) -> list[Outcome]:
        asked = dict(enumerate(questions))
        try:
            # By identity: what was begun in a step that was broken off stands here still.
            self._submit({place: q for place, q in asked.items() if self._begun.get(place, (None,))[0] is not q})
            answers = [self._begun[place][1:] for place in asked]
            waiting = {future for future, _ in answers}
            while waiting:
                check()
                _, waiting = wait(waiting, timeout=POLL_S)
            return [future.result()[index] for future, index in answers]
        except BrokenProcessPool as error:
            self.close()
            raise WorkerDiedError(
                "A process that scores responses died.", "Memory is the usual cause: lower reward_model.num_workers."
            ) from error
        finally:
            self._begun = {}

    def _submit(self, questions: dict[int, Question]) -> None:
        """Give them to the pool in parts, several for each worker."""
        workers = self._settings.num_workers
        if self._pool is None:
            context, source = multiprocessing.get_context("spawn"), self._source
            self._pool = ProcessPoolExecutor(workers, context, _begin, (source.name, source.path))
        places = list(questions)
        size = max(1, -(-len(places) // (workers * PARTS_PER_WORKER)))
        for first in range(0, len(places), size):
            part = places[first : first + size]
            future = self._pool.submit(_score_part, [questions[place] for place in part], self._settings.timeout_s)
            self._begun |= {place: (questions[place], future, index) for index, place in enumerate(part)}


def score_all(
    function: RewardFunction,
    questions: Sequence[Question],
    timeout_s: float | None,
    beginning: Callable[[Question | None], None],
) -> list[Outcome]:
    """One outcome per response, in order; those of an async function are worked on at the same time.

    In the main thread of a process: the limit is an alarm, and verifiers set such too.

    Args:
        timeout_s: longest time for one of them.
        beginning: told each question before it is scored; None every now and then.
    """
    if inspect.iscoroutinefunction(function):
        return asyncio.run(_score_together(function, questions, timeout_s, beginning))
    found = []
    for question in questions:
        beginning(question)
        found.append(score(function, question, timeout_s))
    return found


def score(function: RewardFunction, question: Question, timeout_s: float | None = None) -> Outcome:
    """One response's reward. A dict carries it under `score`, as in verl."""
    try:
        with _limit(timeout_s):
            return _to_score(function(**_arguments(question)))
    except Exception as error:
        return _failure(function, question, error)


async def _score_together(
    function: RewardFunction,
    questions: Sequence[Question],
    timeout_s: float | None,
    beginning: Callable[[Question | None], None],
) -> list[Outcome]:
    async def one(question: Question) -> Outcome:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = await function(**_arguments(question))
            return _to_score(result)
        except Exception as error:
            # The function may have time limits of its own, whose error is its own matter.
            return _failure(function, question, _too_long(timeout_s) if limit.expired() else error)

    tasks = [asyncio.create_task(one(question)) for question in questions]
    waiting = set(tasks)
    while waiting:
        beginning(None)
        _, waiting = await asyncio.wait(waiting, timeout=POLL_S)
    return [task.result() for task in tasks]


def _arguments(question: Question) -> dict[str, Any]:
    return {
        "data_source": question.data_source,
        "solution_str": question.text,
        "ground_truth": question.ground_truth,
        "extra_info": question.extra_info,
    }


def _to_score(result: Any) -> Score:
    value = float(result["score"] if isinstance(result, dict) else result)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    rest = result.items() if isinstance(result, dict) else ()
    # A part is a diagnostic: one that is no number must not end the run.
    return Score(value, {str(key): float(part) for key, part in rest if key != "score" and _is_number(part)})


def _is_number(part: Any) -> bool:
    try:
        return isinstance(part, bool | int | float) and math.isfinite(part)
    except OverflowError:
        return False


def _failure(function: RewardFunction, question: Question, error: Exception) -> RewardError:
    where = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
    return RewardError(
        f"The reward function {where} failed on the response {question.text[:60]!r} to a row of "
        f"{question.data_source!r}: {type(error).__name__}: {error}.",
        "Mend the function; a reward is a finite number, or a dict with `score`. Or: reward_model.on_error=zero.",
    )


def _too_long(timeout_s: float | None) -> TimeoutError:
    return TimeoutError(f"no result within {timeout_s:g} s (reward_model.timeout_s)")


@contextmanager
def _limit(timeout_s: float | None) -> Iterator[None]:
    if timeout_s is None:
        yield
        return

    def late(_number: int, _frame: FrameType | None) -> None:
        raise _too_long(timeout_s)

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


_FUNCTION: RewardFunction | None = None


def _begin(name: str, path: str | None) -> None:
    """In a worker of the pool, before its first part."""
    global _FUNCTION
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    # The terminal sends Ctrl-C to all; whether to end is the trainer's matter.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _FUNCTION = load_reward(name, path)


def _score_part(questions: list[Question], timeout_s: float | None) -> list[Outcome]:
    assert _FUNCTION is not None, "the pool's initializer has run"
    return score_all(_FUNCTION, questions, timeout_s, lambda _: None)
