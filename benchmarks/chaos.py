"""Whole runs under a seeded schedule of faults; each must end as the undisturbed run.

    make chaos N=5 SEED=1

A schedule is a function of its seed: a list of faults, each struck so many seconds after the one before, or at the next
event of a kind (a save, a verification, an upload, a recovery that has begun). Victims are chosen by the run's own
record. Whenever the command has ended otherwise than done, the same command is started again, as a person would, or the
automation.

Faults: SIGKILL, SIGSTOP (for good, or for some seconds) and SIGTERM of one or two processes by role; the whole node;
the run's folder lost; the Prefect or the S3 server killed; the filesystem full for some seconds (where a tmpfs can be
mounted). All runs share the two servers.

Each seed appends one line to benchmarks/results/chaos.jsonl, with the commit and a digest of the engine's sources. A
seed that fails prints itself and replays with N=1. SIGTERM lets the schedule that runs be the last one.

Concurrency: one run at a time, and this process alone; a fault that ends by itself (a pause, a full disk) is awaited
here. Whatever is waited for has a time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keepstep.checkpoint.history import uploaded_steps, verified_steps
from keepstep.checkpoint.verify import verify
from keepstep.platform import guard, servers
from keepstep.processes import ProcessRef
from keepstep.run import PLATFORM_DIR, read_json
from tests.integration.compare import differences
from tests.integration.driver import Driver, wait_until_gone

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "chaos.jsonl"
ENGINE = ("keepstep", "flows", "tasks", "configs", "requirements-cpu.lock")
TIME_LIMITS = [
    # Longer than anything legitimate here, even next to other work.
    "timeouts.start_s=150", "s3.final_timeout_s=60", "timeouts.step_s=60", "timeouts.collective_s=30",
    "checkpoint.save_timeout_s=60", "checkpoint.verify_timeout_s=60",
]  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """The run that is tormented."""

    total_steps: int
    upload_interval: int
    overrides: list[str]


SHORT = Setup(
    24, 6,
    ["trainer.total_training_steps=24", "trainer.save_freq=3", "trainer.test_freq=8", "checkpoint.keep_last=50",
     "s3.upload_interval=6", "retry.delays_s=[0.2]", "retry.max_retries=8"],
)  # fmt: skip
KILLED = ("rank", "rank", "engine", "engine", "controller", "writer", "verifier", "uploader", "ray", "flow")
STOPPED = ("rank", "engine", "writer", "verifier", "uploader", "controller")
ASKED = ("flow", "flow", "controller", "rank", "engine", "writer")
MOMENTS = ("checkpoint_saved", "checkpoint_verified", "upload_progress", "worker_lost", "attempt_started", "resumed")
LONGEST_WAIT_S = 30.0
LONGEST_PAUSE_S = 12.0
PATIENCE_S = 60.0
TIME_LIMIT_S = 900.0
ROOM_BYTES = 600 * 2**20
NO_ROOM = ("no room", "mib are needed")
"""What a run says of a full disk, and a start that is refused for it."""


@dataclass(frozen=True)
class Fault:
    """One strike. `at` is a kind of event, or nothing: then it comes `wait_s` seconds after the one before."""

    kind: str
    """kill, stop, pause, term, node, disk, full, prefect-server or object-store."""
    victims: tuple[str, ...]
    wait_s: float
    at: str
    lasts_s: float


def schedule(seed: int, *, can_fill: bool) -> list[Fault]:
    """Faults of a seed: two to four, at any moment of start-up, training, saving, uploading or recovery. Pure."""
    draw = random.Random(seed)
    kinds = ["kill"] * 8 + ["pause"] * 2 + ["stop", "term", "term", "node", "disk", "prefect-server", "object-store"]
    kinds += ["full"] if can_fill else []
    faults = [_draw_fault(draw, draw.choice(kinds)) for _ in range(draw.randint(2, 4))]
    lost = Fault("kill", (draw.choice(("rank", "engine")),), round(draw.uniform(0.5, LONGEST_WAIT_S), 2), "", 0.0)
    # A recovery has to be begun before something can strike it.
    return [f for fault in faults for f in ([lost, fault] if fault.at == "worker_lost" else [fault])]


def _draw_fault(draw: random.Random, kind: str) -> Fault:
    roles = {"kill": KILLED, "pause": STOPPED, "stop": STOPPED[:-1], "term": ASKED}.get(kind, ())
    num = draw.choice((1, 1, 1, 2)) if roles else 0
    at = draw.choice(MOMENTS) if draw.random() < 0.4 else ""
    wait_s = round(draw.uniform(0.0, 1.0) if at else draw.uniform(0.5, LONGEST_WAIT_S), 2)
    return Fault(
        kind, tuple(draw.choice(roles) for _ in range(num)), wait_s, at, round(draw.uniform(1, LONGEST_PAUSE_S), 1)
    )


class Torment:
    """One run under its faults."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.hits: list[str] = []
        self._deadline = time.monotonic() + TIME_LIMIT_S
        self._stopped: list[ProcessRef] = []

    def to_the_end(self, faults: list[Fault]) -> None:
        """Strike all faults, then let the run end; raises AssertionError when it does not end well in time."""
        self.driver.start()
        for fault in faults:
            if not self._moment(fault):
                break
            self.hits.append(self._strike(fault))
        while (status := self.driver.wait(self._deadline - time.monotonic())) != 0:
            self._start_again(status)

    def _moment(self, fault: Fault) -> bool:
        """Wait for the fault's moment; False: the run has ended before it."""
        seen = self._count(fault.at)
        end = min(self._deadline, time.monotonic() + (LONGEST_WAIT_S if fault.at else fault.wait_s))
        while time.monotonic() < end and not (fault.at and self._count(fault.at) > seen):
            if not self._runs():
                return False
            time.sleep(0.05)
        if fault.at:
            time.sleep(fault.wait_s)
        return True

    def _runs(self) -> bool:
        """Whether the run has still to end; a command that a fault has ended is started again."""
        if (status := self._status()) == 0:
            return False
        if status is not None:
            self._start_again(status)
        return True

    def _count(self, kind: str) -> int:
        return sum(event["event"] == kind for event in self.driver.events()) if kind else 0

    def _status(self) -> int | None:
        assert self.driver.process is not None
        return self.driver.process.poll()

    def _start_again(self, status: int) -> None:
        """What a person would do, or the automation; only for ends that the faults explain."""
        full = status == 1 and any(words in self.driver.tail().lower() for words in NO_ROOM)
        held = status == 5 and bool(self._stopped)
        storage = status == 6
        if not (status in (75, -signal.SIGKILL, -signal.SIGTERM) or full or held or storage):
            raise AssertionError(f"ended with {status} after {self.hits}\n{self.driver.tail()}")
        if time.monotonic() > self._deadline:
            raise AssertionError(f"no end within {TIME_LIMIT_S:.0f} s after {self.hits}\n{self.driver.tail()}")
        if held:
            time.sleep(1.0)
        self.driver.start()

    def _strike(self, fault: Fault) -> str:
        act: dict[str, Callable[[Fault], str]] = {
            "node": self._node, "disk": self._disk, "full": self._fill,
            servers.PREFECT_SERVER: self._server, servers.OBJECT_STORE: self._server,
        }  # fmt: skip
        return act.get(fault.kind, self._signal)(fault)

    def _signal(self, fault: Fault) -> str:
        """kill, stop, pause or term, of every victim that lives."""
        victims = [ref for index, role in enumerate(fault.victims) if (ref := self._victim(role, index)) is not None]
        number = {"kill": signal.SIGKILL, "term": signal.SIGTERM}.get(fault.kind, signal.SIGSTOP)
        for ref in victims:
            _send(ref, number)
        if fault.kind == "pause":
            time.sleep(fault.lasts_s)
            for ref in victims:
                _send(ref, signal.SIGCONT)
        elif fault.kind == "stop":
            self._stopped += victims
        return f"{fault.kind} {', '.join(ref.role for ref in victims) or 'nobody'}{f' at {fault.at}' * bool(fault.at)}"

    def _victim(self, role: str, index: int) -> ProcessRef | None:
        if role == "flow":
            assert self.driver.process is not None
            return ProcessRef.of(self.driver.process.pid, "flow")
        end = min(self._deadline, time.monotonic() + PATIENCE_S)
        while time.monotonic() < end and self._runs():
            # Verifiers and uploaders live for a moment only; a start takes its time to make the others.
            if alive := [ref for ref in self.driver.processes(role) if ref.alive()]:
                return alive[index % len(alive)]
            time.sleep(0.01)
        return None

    def _node(self, _fault: Fault) -> str:
        """A machine that loses power: nothing gets to clean up; its servers are not on it."""
        victims = [ref for ref in self.driver.processes() if ref.role not in servers.ROLES]
        self.driver.kill_command()
        for ref in victims:
            _send(ref, signal.SIGKILL)
        self.driver.start()
        return "node"

    def _disk(self, fault: Fault) -> str:
        """The node and its disk are gone; what is in the store stays. Nothing is there before the first upload."""
        driver = self.driver
        if not uploaded_steps(driver.run):
            return "disk not lost: nothing is in the store yet"
        everything = driver.own_processes()
        driver.kill_command()
        for ref in everything:
            _send(ref, signal.SIGKILL)
        assert wait_until_gone(everything) == []
        driver.history += driver.events()
        shutil.rmtree(driver.run.root)
        driver.start()
        return "disk"

    def _server(self, fault: Fault) -> str:
        record = guard.read_record(guard.record_path(self.driver.run.platform, fault.kind))
        if record is None:
            return f"no {fault.kind}"
        _send(ProcessRef.from_record(record["server"]), signal.SIGKILL)
        return fault.kind

    def _fill(self, fault: Fault) -> str:
        """Not a byte of room for some seconds."""
        ballast = self.driver.output_dir.parent / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**20))
        time.sleep(fault.lasts_s)
        ballast.unlink()
        return f"full for {fault.lasts_s} s"


def num_struck(hits: list[str]) -> int:
    """Faults that found their victim; a schedule without any proves nothing. Pure."""
    return sum(not ("nobody" in hit or hit.startswith(("no ", "disk not lost"))) for hit in hits)


def _send(ref: ProcessRef, number: int) -> None:
    if ref.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(ref.pid, number)


def violations(driver: Driver, reference: Driver, setup: Setup) -> list[str]:
    """Broken promises of a finished run."""
    run, last = driver.run, setup.total_steps
    found = differences(run.checkpoint(last), reference.run.checkpoint(last))
    if driver.rewards() != reference.rewards():
        found.append("rewards per step differ")
    steps = set(run.steps())
    found += [
        f"step {step} counts as verified and is not good"
        for step in sorted(verified_steps(run) & steps)
        if not verify(run.checkpoint(step)).resumable
    ]
    folders_lost = bool(driver.history)
    found += [
        f"milestone {step} is lost"
        for step in range(setup.upload_interval, last + 1, setup.upload_interval)
        if step not in steps and step not in uploaded_steps(run) and not folders_lost
    ]
    if read_json(run.result)["uploaded"] != last:
        found.append("the last step is not in the store")
    found += overlaps([*driver.history, *driver.events()])
    found += [f"left over: {ref.role} {ref.pid}" for ref in wait_until_gone(driver.own_processes())]
    return found + litter(driver)


def litter(driver: Driver) -> list[str]:
    """Temporary folders that outlived their attempt."""
    run = driver.run
    known = {f"step_{step}" for step in run.steps()} | {"latest", "latest.txt", "best", "best.txt"}
    found = [path for path in run.checkpoints.iterdir() if path.name not in known]
    # Also of attempts in a folder that was lost.
    temporary = run.temporary(0)
    found += temporary.parent.glob(temporary.name.removesuffix("0") + "*")
    return [f"left over: {path}" for path in found]


def overlaps(events: list[dict[str, Any]]) -> list[str]:
    """Attempts that trained or published after a newer one had begun to. Pure."""
    newest, found = 0, []
    for event in events:
        if event["event"] not in ("step", "checkpoint_saved", "checkpoint_verified", "resumed"):
            continue
        if event["attempt"] < newest:
            found.append(f"attempt {event['attempt']}: {event['event']} {event.get('step')} after attempt {newest}")
        newest = max(newest, event["attempt"])
    return found


@contextlib.contextmanager
def small_filesystem(folder: Path) -> Iterator[bool]:
    """A tmpfs on `folder`, so that it can be filled; False: none is to be had here."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(folder)], check=False, capture_output=True
    )
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def engine_digest() -> str:
    """Of the sources that decide how a run goes: results of one digest belong together."""
    tree = subprocess.run(["git", "ls-files", "-s", *ENGINE], cwd=REPOSITORY, capture_output=True, check=True).stdout
    hashed = subprocess.run(
        ["git", "hash-object", "--stdin"], input=tree, cwd=REPOSITORY, capture_output=True, check=True
    )
    return hashed.stdout.decode()[:12]


def one(seed: int, folder: Path, reference: Driver, setup: Setup) -> dict[str, Any]:
    """The result of a seed, with what it violated. `folder` holds the platform that all runs share."""
    begin = time.monotonic()
    with small_filesystem(folder / f"seed{seed}") as can_fill:
        (folder / f"seed{seed}" / PLATFORM_DIR).symlink_to(folder / PLATFORM_DIR)
        faults = schedule(seed, can_fill=can_fill)
        torment = Torment(Driver(folder / f"seed{seed}" / "run", setup.overrides + TIME_LIMITS))
        record: dict[str, Any] = {"seed": seed, "faults": [asdict(fault) for fault in faults]}
        try:
            torment.to_the_end(faults)
            record["violations"] = violations(torment.driver, reference, setup)
            record["attempts"] = read_json(torment.driver.run.result)["attempts"]
            record["steps_lost"] = read_json(torment.driver.run.result)["steps_lost"]
        except AssertionError as error:
            # A traceback in it need not say where this checkout lies.
            record["violations"] = [str(error).replace(f"{sys.prefix}/", "").replace(f"{REPOSITORY}/", "")]
            torment.driver.kill_command()
        record["hits"], record["struck"] = torment.hits, num_struck(torment.hits)
        record["wall_s"] = round(time.monotonic() - begin, 1)
        if record["violations"] and can_fill:
            # The small filesystem goes with the schedule: what is needed to understand the failure stays.
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(folder / f"seed{seed}", folder / f"failed{seed}", symlinks=True)
    if not record["violations"]:
        shutil.rmtree(folder / f"seed{seed}", ignore_errors=True)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ks-chaos-", dir="/tmp"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    state = {"commit": commit.stdout.strip(), "engine": engine_digest()}
    holder = ProcessRef.current("flow")
    servers.object_store(folder / PLATFORM_DIR, holder)
    servers.prefect_server(folder / PLATFORM_DIR, holder)
    reference = Driver(folder / "reference", SHORT.overrides)
    assert reference.run_to_end() == 0, reference.tail()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    num_run = num_failed = num_unharmed = 0
    for seed in range(args.seed, args.seed + args.num):
        if asked:
            break
        num_run += 1
        record = {"date": datetime.now(UTC).date().isoformat(), **state, **one(seed, folder, reference, SHORT)}
        num_failed += bool(record["violations"])
        num_unharmed += not record["struck"]
        with RESULTS.open("a") as results:
            results.write(json.dumps(record) + "\n")
        print(json.dumps({key: value for key, value in record.items() if key != "faults"}), flush=True)
    print(f"{num_run - num_failed} of {num_run} schedules passed; {num_unharmed} of all struck nobody")
    if num_failed:
        print(f"runs that failed are kept in {folder}")
    for role in servers.ROLES:
        record = guard.read_record(guard.record_path(folder / PLATFORM_DIR, role))
        servers.release(folder / PLATFORM_DIR, holder)
        wait_until_gone([ProcessRef.from_record(record["server"])] if record else [])
    if not num_failed:
        shutil.rmtree(folder)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
