"""A lost rank or engine is replaced within the attempt, and the run ends with the bytes of the undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.processes import ProcessRef
from keepstep.run import read_json
from tests.conftest import OVERRIDES, TOTAL_STEPS
from tests.integration.compare import differences
from tests.integration.driver import Driver, wait_until_gone

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def recovered(driver: Driver, number: int) -> None:
    driver.wait_for(f"{number} replacements", lambda events: sum(e["event"] == "recovered" for e in events) >= number)


def spares(driver: Driver) -> list[ProcessRef]:
    """Processes that stand by for a rank or an engine."""
    alive = [ref for ref in driver.processes() if ref.alive()]
    at_work = {ref.pid for ref in alive if ref.role != "spare"}
    return [ref for ref in alive if ref.role == "spare" and ref.pid not in at_work]


def test_lost_workers_are_replaced_in_place(workspace: Path, reference: Driver):
    """C100, C160: engine, rank, then both at once; one attempt, and only the steps since a checkpoint come again.

    After each the group meets and the engine has its weights before the next rollout: nobody waits for ever. The lost
    rank is replaced by processes that stood by.
    """
    settings = [*OVERRIDES, "s3.embedded=false", "recovery.warm_spare=true"]
    hit = Driver(workspace / "in_place", settings, command="train")
    hit.start()
    hit.wait_for_step(3)
    temporary = hit.run.temporary(1) / "tmp"
    assert list(temporary.iterdir()), "the engine's temporary files are the attempt's"
    engine = hit.kill("engine")
    recovered(hit, 1)
    hit.wait_for_step(6)
    before = [event["step"] for event in hit.events() if event["event"] == "step"]
    assert before == sorted(set(before)), "a lost engine costs no step"
    hit.wait_for_verified(10)
    hit.wait_for_step(12)
    hit.wait_for("spares of both ranks", lambda _: len(spares(hit)) >= 2)
    spare_pids = {ref.pid for ref in spares(hit)}
    ranks = [ref for ref in hit.processes("rank") if ref.alive()]
    hit.kill("rank", 1)
    recovered(hit, 2)
    assert wait_until_gone(ranks) == [], "all ranks of the group are replaced"
    assert {ref.pid for ref in hit.processes("rank") if ref.alive()} <= spare_pids
    hit.wait_for_verified(20)
    hit.wait_for_step(22)
    hit.kill("rank", 0)
    hit.kill("engine")
    assert hit.wait(240) == 0, hit.tail()
    lost = [event["role"] for event in hit.events() if event["event"] == "worker_lost"]
    assert lost[:2] == ["engine", "rank"] and sorted(lost[2:]) == ["engine", "rank"]
    resumed = [event["step"] for event in hit.events() if event["event"] == "resumed"]
    assert resumed == [10, 20]
    assert not engine.alive()
    result = read_json(hit.run.result)
    assert result["attempts"] == 1 and 0 < result["steps_lost"] < 10
    final, expected = hit.run.checkpoint(TOTAL_STEPS), reference.run.checkpoint(TOTAL_STEPS)
    assert differences(final, expected) == []
    assert hit.rewards() == reference.rewards()
    assert wait_until_gone(hit.own_processes()) == []
    assert not temporary.parent.exists()
