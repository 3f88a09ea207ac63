"""Scoring batches: policies, limits, async functions, a pool of processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.schema import RewardFunctionConfig, RewardModelConfig
from keepstep.errors import RewardError, WorkerDiedError
from keepstep.processes import ProcessRef, start_time
from keepstep.rewards.load import load_reward
from keepstep.rewards.scoring import Question, Scorer

REPOSITORY = Path(__file__).parents[2]
FILE = """
import asyncio, os, signal, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise KeyError("oops")
    if solution_str == "hang":
        time.sleep(60)
    if solution_str == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "pid":
        return os.getpid()
    if ground_truth and ground_truth.startswith("/"):
        with open(ground_truth, "a") as calls:
            calls.write(solution_str)
    return {"score": len(solution_str), "right": solution_str == ground_truth, "note": "text"}

async def judge(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "slow":
        raise TimeoutError("the judge did not answer")
    await asyncio.sleep(60 if solution_str == "hang" else 0)
    return {"score": 1.0, "doubt": float("nan") if solution_str == "unsure" else 0.5, "huge": 10**400}

async def together(data_source, solution_str, ground_truth, extra_info=None):
    await MEETING.arrive(solution_str)
    return float(solution_str)
"""


def questions(*texts: str) -> list[Question]:
    return [Question("source", text, "abc", {}) for text in texts]


@pytest.fixture
def source(tmp_path: Path) -> RewardFunctionConfig:
    path = tmp_path / "reward.py"
    path.write_text(FILE)
    return RewardFunctionConfig(path=str(path))


def scorer_of(source: RewardFunctionConfig, **settings: Any) -> Scorer:
    return Scorer(load_reward(source.name, source.path), RewardModelConfig(**settings), source)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_scores_come_in_order_and_parts_are_averaged(source: RewardFunctionConfig, num_workers: int):
    scorer = scorer_of(source, num_workers=num_workers)
    texts = ["a" * length for length in range(1, 30)] + ["abc"]
    assert scorer.score(questions(*texts), lambda: None) == [len(text) for text in texts]
    # "aaa" is as long, but it is not the answer; text is no number.
    assert scorer.take_metrics() == {"right/mean": 1 / 30}
    assert scorer.take_metrics() == {}
    scorer.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failure_stops_or_scores_zero_and_is_counted(source: RewardFunctionConfig, num_workers: int):
    with pytest.raises(RewardError, match="'raise' to a row of 'source': KeyError") as caught:
        scorer_of(source, num_workers=num_workers).score(questions("ab", "raise"), lambda: None)
    assert "on_error=zero" in caught.value.remedy
    lenient = scorer_of(source, on_error="zero", num_workers=num_workers)
    assert lenient.score(questions("ab", "raise", "abc"), lambda: None) == [2.0, 0.0, 3.0]
    assert lenient.take_metrics() == {"right/mean": 0.5, "num_errors": 1.0}
    lenient.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_response_has_a_limit_of_its_own(source: RewardFunctionConfig, num_workers: int):
    """The one that hangs scores 0, those after it count."""
    scorer = scorer_of(source, on_error="zero", timeout_s=0.3, num_workers=num_workers)
    assert scorer.score(questions("hang", "abc"), lambda: None) == [0.0, 3.0]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    scorer.close()


def test_the_time_limits_of_an_async_function_are_its_own(source: RewardFunctionConfig):
    """A client of a judge raises TimeoutError by itself, with or without a limit here."""
    judge = source.model_copy(update={"name": "judge"})
    for timeout_s in (None, 30.0):
        with pytest.raises(RewardError, match="TimeoutError: the judge did not answer"):
            scorer_of(judge, timeout_s=timeout_s).score(questions("ab", "slow"), lambda: None)
    with pytest.raises(RewardError, match=r"no result within 0.2 s \(reward_model.timeout_s\)"):
        scorer_of(judge, timeout_s=0.2).score(questions("ab", "hang"), lambda: None)


def test_a_part_that_is_no_number_is_left_out(source: RewardFunctionConfig):
    """It is a diagnostic: neither the step nor the run may end over it."""
    scorer = scorer_of(source.model_copy(update={"name": "judge"}))
    assert scorer.score(questions("sure", "unsure"), lambda: None) == [1.0, 1.0]
    assert scorer.take_metrics() == {"doubt/mean": 0.5}


def test_what_was_begun_is_scored_once(source: RewardFunctionConfig, tmp_path: Path):
    calls = tmp_path / "calls"

    def asked() -> list[Question]:
        return [Question("source", text, str(calls), {}) for text in "abcde"]

    scorer, batch = scorer_of(source, num_workers=1), asked()
    scorer.begin({3: batch[3], 1: batch[1]})
    scorer.begin({4: batch[4]})
    assert scorer.score(batch, lambda: None) == [1.0] * 5
    assert sorted(calls.read_text()) == list("abcde")
    # A step that was broken off leaves what it began behind; the same texts may have other right answers now.
    scorer.begin({0: batch[0]})
    assert scorer.score(asked(), lambda: None) == [1.0] * 5
    assert calls.read_text().count("a") == 3
    assert scorer.take_metrics() == {"right/mean": 0.0}
    scorer.close()


def test_without_a_pool_nothing_is_begun(source: RewardFunctionConfig, tmp_path: Path):
    calls = tmp_path / "calls"
    scorer = scorer_of(source)
    assert not scorer.in_background
    scorer.begin({0: Question("source", "a", str(calls), {})})
    assert not calls.exists()


def test_a_worker_that_dies_over_what_was_begun_ends_the_attempt(source: RewardFunctionConfig):
    scorer = scorer_of(source, num_workers=1)
    batch = questions("die", "abc")
    scorer.begin({0: batch[0]})
    with pytest.raises(WorkerDiedError, match="scores responses died"):
        scorer.score(batch, lambda: None)
    scorer.close()


def test_async_functions_wait_side_by_side(source: RewardFunctionConfig):
    """All are under way before the first is done; one that takes too long is cut off."""
    arrived: list[str] = []

    async def together(solution_str: str, **_rest: Any) -> float:
        arrived.append(solution_str)
        while len(arrived) < 3:
            await asyncio.sleep(0.001)
        if solution_str == "2":
            await asyncio.sleep(60)
        return float(solution_str)

    scorer = Scorer(together, RewardModelConfig(on_error="zero", timeout_s=0.3), source)
    assert scorer.score(questions("1", "2", "3"), lambda: None) == [1.0, 0.0, 3.0]


def test_a_worker_that_dies_ends_the_attempt_and_the_next_batch_has_a_new_pool(source: RewardFunctionConfig):
    scorer = scorer_of(source, num_workers=1)
    with pytest.raises(WorkerDiedError, match="scores responses died"):
        scorer.score(questions("die"), lambda: None)
    assert scorer.score(questions("abc"), lambda: None) == [3.0]
    scorer.close()


def test_scoring_ends_when_the_attempt_should(source: RewardFunctionConfig):
    class AskedError(Exception):
        pass

    def check() -> None:
        raise AskedError

    for num_workers in (0, 1):
        scorer = scorer_of(source, num_workers=num_workers)
        with pytest.raises(AskedError):
            scorer.score(questions("abc"), check)
        scorer.close()


def test_workers_die_with_their_parent(source: RewardFunctionConfig):
    """Nothing is left of a pool whose parent was killed."""
    script = (
        "import os, signal\n"
        "from keepstep.config.schema import *\n"
        "from keepstep.rewards.scoring import *\n"
        "if __name__ == '__main__':\n"
        f"    source = RewardFunctionConfig(path={source.path!r})\n"
        "    scorer = Scorer(lambda: 0, RewardModelConfig(num_workers=1), source)\n"
        "    print(int(scorer.score([Question('', 'pid', '', {})], lambda: None)[0]), flush=True)\n"
        "    signal.pause()\n"
    )
    path = Path(source.path or "").with_name("parent.py")
    path.write_text(script)
    parent = subprocess.Popen([sys.executable, str(path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    worker = ProcessRef("scorer", pid, start_time(pid) or 0, ProcessRef.current("x").host)
    assert worker.alive()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    deadline = time.monotonic() + 10
    while worker.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not worker.alive()
