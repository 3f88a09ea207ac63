"""Random kills of a whole run, each schedule from its seed; the end must be that of the undisturbed run.

    make chaos N=5 SEED=1

A schedule is a list of (seconds to wait, victim). Victims are chosen by the run's own record. When the command itself
is killed, the same command is started again. Each seed appends one line to benchmarks/results/chaos.jsonl, with the
commit; a seed that fails prints itself and replays with N=1.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keepstep.checkpoint.history import verified_steps
from keepstep.checkpoint.verify import verify
from keepstep.run import read_json
from tests.integration.compare import differences
from tests.integration.driver import Driver, wait_until_gone

RESULTS = Path(__file__).parent / "results" / "chaos.jsonl"
TOTAL_STEPS = 24
OVERRIDES = [
    f"trainer.total_training_steps={TOTAL_STEPS}", "trainer.save_freq=3", "trainer.test_freq=8",
    "checkpoint.keep_last=50", "s3.upload_interval=6", "retry.delays_s=[0.2]",
]  # fmt: skip
VICTIMS = ("rank", "rank", "engine", "controller", "writer", "verifier", "uploader", "flow", "node", "disk")
LONGEST_WAIT_S = 35.0
TIME_LIMIT_S = 900.0


@dataclass(frozen=True)
class Fault:
    wait_s: float
    victim: str
    index: int


def schedule(seed: int) -> list[Fault]:
    """Faults of a seed: three to six, at any moment of start-up, training, saving, uploading or recovery."""
    generator = random.Random(seed)
    return [
        Fault(generator.uniform(0.5, LONGEST_WAIT_S), generator.choice(VICTIMS), generator.randrange(2))
        for _ in range(generator.randint(3, 6))
    ]


def strike(driver: Driver, fault: Fault) -> str:
    """Commit one fault; says what it hit. The command is started again when it is gone."""
    if fault.victim in ("flow", "node", "disk"):
        victims = [ref for ref in driver.processes() if ref.alive()]
        driver.kill_command()
        if fault.victim == "node":
            for ref in victims:
                driver.kill_process(ref)
        if fault.victim == "disk" and driver.run.uploads.is_dir() and any(driver.run.uploads.iterdir()):
            wait_until_gone(victims)
            driver.history += driver.events()
            shutil.rmtree(driver.run.root)
        driver.start()
        return fault.victim
    alive = [ref for ref in driver.processes(fault.victim) if ref.alive()]
    if not alive:
        return f"no {fault.victim}"
    driver.kill_process(alive[fault.index % len(alive)])
    return fault.victim


def torment(driver: Driver, faults: list[Fault]) -> list[str]:
    """Run to the end under the faults; raises AssertionError when it does not end well in time."""
    deadline = time.monotonic() + TIME_LIMIT_S
    hits = []
    driver.start()
    for fault in faults:
        assert driver.process is not None
        try:
            driver.process.wait(timeout=fault.wait_s)
            break
        except subprocess.TimeoutExpired:
            hits.append(strike(driver, fault))
    while (status := driver.wait(deadline - time.monotonic())) != 0:
        raise AssertionError(f"ended with {status}\n{driver.tail()}")
    return hits


def violations(driver: Driver, reference: Driver) -> list[str]:
    """Broken promises of a finished run."""
    found = differences(driver.run.checkpoint(TOTAL_STEPS), reference.run.checkpoint(TOTAL_STEPS))
    if driver.rewards() != reference.rewards():
        found.append("rewards per step differ")
    found += [f"step {step} does not verify" for step in sorted(verified_steps(driver.run))
              if step in driver.run.steps() and not verify(driver.run.checkpoint(step)).resumable]  # fmt: skip
    if read_json(driver.run.result)["uploaded"] != TOTAL_STEPS:
        found.append("the last step is not in the store")
    found += [f"left over: {ref.role} {ref.pid}" for ref in wait_until_gone(driver.all_processes())]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ks-chaos-", dir="/tmp"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    reference = Driver(folder / "reference", OVERRIDES)
    assert reference.run_to_end() == 0, reference.tail()
    num_failed = 0
    for seed in range(args.seed, args.seed + args.num):
        begin, driver = time.monotonic(), Driver(folder / f"seed{seed}", OVERRIDES)
        record: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip()}
        record |= {"seed": seed, "faults": [fault.victim for fault in schedule(seed)]}
        try:
            record["hits"] = torment(driver, schedule(seed))
            record["violations"] = violations(driver, reference)
        except AssertionError as error:
            record["violations"] = [str(error)]
        record["wall_s"] = round(time.monotonic() - begin, 1)
        num_failed += bool(record["violations"])
        with RESULTS.open("a") as results:
            results.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
        if not record["violations"]:
            shutil.rmtree(driver.output_dir)
    print(f"{args.num - num_failed} of {args.num} schedules passed; runs that failed are kept in {folder}")
    if not num_failed:
        shutil.rmtree(folder)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
