"""From the kill to the next optimizer step, against the cold start of the whole job, on the quickstart.

    make bench-recovery

One run per way of dying. Every kill is timed by this process's clock, everything else by the run's own events:

- cold start: the command is started in an empty folder -> its first step is finished
- detection: kill -> the event that says so (`worker_lost` in place; the next attempt's `attempt_started` otherwise)
- recovery: kill -> the next step that is finished
- productive share: what the steps would take undisturbed / seconds from the first kill on, with a kill every ten steps

A killed command (flow, node) is started again by this process at once, as an automation would after its window of
silence, which is not in the figures. The Prefect and the S3 server run beside it all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.chaos import engine_digest
from keepstep.events.log import last_step_rows
from keepstep.platform import servers
from keepstep.processes import ProcessRef
from keepstep.run import PLATFORM_DIR
from tests.integration.driver import Driver, wait_until_gone

RESULTS = Path(__file__).parent / "results" / "recovery.json"
NUM_COLD_STARTS = 2
SETTINGS = ["trainer.save_freq=5", "trainer.test_freq=-1", "s3.upload_interval=1000", "retry.delays_s=[0]"]
IN_PLACE, ATTEMPT, SPARE = "in place", "new attempt", "in place, warm spare"
MODES = {
    IN_PLACE: [],
    ATTEMPT: ["recovery.in_place=false"],
    SPARE: ["recovery.warm_spare=true"],
}
CASES = [
    (IN_PLACE, "rank"), (SPARE, "rank"), (ATTEMPT, "rank"),
    (IN_PLACE, "engine"), (SPARE, "engine"), (ATTEMPT, "engine"),
    (ATTEMPT, "controller"), (ATTEMPT, "flow"), (ATTEMPT, "node"),
]  # fmt: skip


def seconds(event: dict[str, Any]) -> float:
    """Unix time of an event."""
    return datetime.fromisoformat(event["time"]).timestamp()


def first_after(driver: Driver, kinds: tuple[str, ...], moment: float) -> float:
    """Time of the first event of a kind after `moment`, awaited."""

    def found(events: list[dict[str, Any]]) -> list[float]:
        return [seconds(event) for event in events if event["event"] in kinds and seconds(event) > moment]

    return driver.wait_for(f"{kinds} after the kill", found, timeout_s=300)[0]


def strike(driver: Driver, victim: str) -> float:
    """Kill it; the moment. A command that is killed with it is started again."""
    if victim not in ("flow", "node"):
        moment = time.time()
        driver.kill(victim)
        return moment
    others = [ref for ref in driver.processes() if ref.role not in servers.ROLES]
    moment = time.time()
    driver.kill_command()
    for ref in others if victim == "node" else []:
        driver.kill_process(ref)
    driver.start()
    return moment


def cold_start(folder: Path, index: int) -> float:
    driver = Driver(folder / f"cold{index}", [*SETTINGS, "trainer.total_training_steps=2"])
    begin = time.time()
    driver.start()
    moment = first_after(driver, ("step",), begin)
    assert driver.wait(240) == 0, driver.tail()
    return moment - begin


def measure(folder: Path, mode: str, victim: str, num_kills: int) -> dict[str, Any]:
    """Kills of one kind, one after the other, each after a new verified step."""
    # The last spares come up within some twenty steps of the last kill.
    total = 10 * (num_kills + 1) + (20 if mode == SPARE else 0)
    name = f"{victim}-{list(MODES).index(mode)}"
    driver = Driver(folder / name, [*SETTINGS, *MODES[mode], f"trainer.total_training_steps={total}"])
    driver.start()
    detected, recovered = [], []
    begin = 0.0
    for number in range(1, num_kills + 1):
        driver.wait_for_verified(10 * number - 5, timeout_s=300)
        driver.wait_for_step(10 * number - 3, timeout_s=300)
        if mode == SPARE:
            wait_for_spares(driver)
        moment = strike(driver, victim)
        begin = begin or moment
        kinds = ("worker_lost",) if mode != ATTEMPT else ("attempt_started",)
        detected.append(first_after(driver, kinds, moment) - moment)
        recovered.append(first_after(driver, ("step",), moment) - moment)
    assert driver.wait(300) == 0, driver.tail()
    assert wait_until_gone(driver.own_processes()) == []
    return {
        "detected_s": [round(value, 2) for value in detected],
        "next_step_s": [round(value, 2) for value in recovered],
        "productive_share": round(productive_share(last_step_rows(driver.run.events), begin), 3),
    }


def productive_share(rows: dict[int, dict[str, Any]], begin: float) -> float:
    """Of the time from the first kill, at `begin`, to the last step: what the steps take that nothing disturbs.

    Args:
        rows: the last `step` event of every step.
    """
    # A step in which an engine is replaced lasts as long as that takes.
    step_s = statistics.median(row["seconds"] for row in rows.values())
    # The first of them was under way at the kill.
    num_steps = sum(seconds(row) > begin for row in rows.values()) - 1
    return float(num_steps * step_s / (max(seconds(row) for row in rows.values()) - begin))


def wait_for_spares(driver: Driver) -> None:
    """Until a living spare stands by for every role."""

    def standing_by(_events: list[dict[str, Any]]) -> bool:
        alive = [ref for ref in driver.processes() if ref.alive()]
        at_work = {ref.pid for ref in alive if ref.role != "spare"}
        return sum(ref.role == "spare" and ref.pid not in at_work for ref in alive) >= 3

    driver.wait_for("all spares", standing_by)


def write(results: dict[str, Any]) -> None:
    """What has been measured so far, as the newest result."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "engine": engine_digest(),
        "machine": {"cores": os.cpu_count(), "load_at_end": os.getloadavg()[0]},
        "results": results,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", type=int, default=range(len(CASES)), help="indices of the cases to run")
    parser.add_argument("--kills", type=int, default=3, help="kills of each kind")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ks-recovery-", dir="/tmp"))
    holder = ProcessRef.current("flow")
    starts: list[Callable[..., Any]] = [servers.object_store, servers.prefect_server]
    for start in starts:
        start(folder / PLATFORM_DIR, holder)
    try:
        cold = [cold_start(folder, index) for index in range(NUM_COLD_STARTS)]
        cold_s = statistics.median(cold)
        results: dict[str, Any] = {"cold_start_s": [round(value, 2) for value in cold]}
        for mode, victim in (CASES[index] for index in args.cases):
            found = measure(folder, mode, victim, args.kills)
            found["of_cold_start"] = round(statistics.median(found["next_step_s"]) / cold_s, 3)
            results.setdefault(victim, {})[mode] = found
            print(victim, mode, json.dumps(found), flush=True)
            write(results)
    finally:
        servers.release(folder / PLATFORM_DIR, holder)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
