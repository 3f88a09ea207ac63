"""Each kind of kill by itself, byte-identical: `make exact-<scenario>`. CI runs most of them as one sequence."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.checkpoint import layout
from keepstep.checkpoint.convert import convert
from tests.conftest import OVERRIDES, TOTAL_STEPS
from tests.integration.compare import differences
from tests.integration.driver import Driver, wait_until_gone

pytestmark = [pytest.mark.integration, pytest.mark.long]


def rank(driver: Driver) -> None:
    driver.wait_for_step(13)
    driver.kill("rank", 1)


def first_rank(driver: Driver) -> None:
    driver.wait_for_step(13)
    driver.kill("rank", 0)


def engine(driver: Driver) -> None:
    driver.wait_for_step(13)
    driver.kill("engine")


def hung_rank(driver: Driver) -> None:
    """It is never heard of again: its peer waits in the collective, the group is replaced."""
    driver.wait_for_step(13)
    os.kill(driver.processes("rank")[1].pid, signal.SIGSTOP)


def hung_engine(driver: Driver) -> None:
    driver.wait_for_step(13)
    os.kill(driver.processes("engine")[0].pid, signal.SIGSTOP)


def controller(driver: Driver) -> None:
    driver.wait_for_step(13)
    driver.kill("controller")


def writer(driver: Driver) -> None:
    driver.wait_for_step(13)
    victim, _ = driver.stop_writer_in_a_save()
    driver.kill_process(victim)


def flow(driver: Driver) -> None:
    driver.wait_for_step(13)
    driver.kill_command()
    assert wait_until_gone(driver.own_processes()) == []
    driver.start()


def epoch_end(driver: Driver) -> None:
    """Right after the checkpoint that lies on an epoch's end."""
    driver.wait_for("step 20 is verified", lambda events: ("checkpoint_verified", 20) in kinds(events))
    driver.kill("rank", 0)


def everything(driver: Driver) -> None:
    """A node that loses power: nothing gets to clean up."""
    driver.wait_for_step(13)
    driver.kill_command()
    for ref in driver.processes():
        if ref.alive() and ref.role not in ("object-store", "prefect-server"):
            driver.kill_process(ref)
    driver.start()


def store(driver: Driver) -> None:
    """C149: the folder is lost with all its checkpoints, and the model that was made for the run."""
    driver.wait_for("step 20 is in the store", lambda _: driver.run.upload(20).exists())
    driver.kill_command()
    assert wait_until_gone(driver.own_processes()) == []
    driver.history = driver.events()
    shutil.rmtree(driver.run.root)
    made_model = driver.run.platform / "made" / "char-qwen3"
    shutil.rmtree(made_model)
    driver.start()
    resumed = driver.wait_for("it goes on", lambda events: [e for e in events if e["event"] == "resumed"])
    assert resumed[-1]["step"] == 20
    assert any(event["event"] == "checkpoint_downloaded" for event in driver.events())
    assert not made_model.exists(), "the model was made again instead of taken from the run"


def after(events: list[dict], kind: str) -> list[dict]:
    """What came after the first event of a kind."""
    first = next((index for index, event in enumerate(events) if event["event"] == kind), len(events))
    return events[first:]


def kinds(events: list[dict]) -> set[tuple[str, int | None]]:
    return {(event["event"], event.get("step")) for event in events}


SCENARIOS = [rank, first_rank, engine, hung_rank, hung_engine, controller, writer, flow, epoch_end, everything, store]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_kill(workspace: Path, reference: Driver, scenario: Callable[[Driver], None]):
    hit = Driver(workspace / scenario.__name__, [*OVERRIDES, "timeouts.step_s=60", "timeouts.collective_s=20"])
    hit.start()
    scenario(hit)
    assert hit.wait(300) == 0, hit.tail()
    assert differences(hit.run.checkpoint(TOTAL_STEPS), reference.run.checkpoint(TOTAL_STEPS)) == []
    assert hit.rewards() == reference.rewards()
    assert wait_until_gone(hit.own_processes()) == []


def test_sharded(workspace: Path, reference: Driver):
    """Layout `sharded`, a rank and then a writer killed: the same training as the undisturbed run of layout `full`."""
    hit = Driver(workspace / "sharded", [*OVERRIDES, "checkpoint.layout=sharded"])
    hit.start()
    hit.wait_for_verified(10)
    hit.kill("rank", 1)
    hit.wait_for(
        "a save by the new ranks",
        lambda events: "checkpoint_saved" in [e["event"] for e in after(events, "recovered")],
    )
    hit.kill("writer", 1)
    assert hit.wait(240) == 0, hit.tail()
    assert any(event["event"] == "recovered" for event in hit.events())
    full = convert(hit.run.checkpoint(TOTAL_STEPS), workspace / f"step_{TOTAL_STEPS}", layout.FULL)
    assert differences(full, reference.run.checkpoint(TOTAL_STEPS)) == []
    assert hit.rewards() == reference.rewards()
    assert wait_until_gone(hit.own_processes()) == []
