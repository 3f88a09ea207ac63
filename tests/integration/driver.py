"""Driving a real run from outside: start it, watch its events, choose a victim by the run's own record, kill it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from keepstep.attempts import newest_record
from keepstep.events.log import read_jsonl
from keepstep.platform import servers
from keepstep.processes import ProcessRef
from keepstep.run import RunDir, read_json

Event = dict[str, Any]
POLL_S = 0.02
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Driver:
    """One run folder and the command that works on it."""

    output_dir: Path
    overrides: list[str]
    command: str = "run"
    config: str = "quickstart"
    log: Path = field(init=False)
    process: subprocess.Popen[bytes] | None = None
    history: list[Event] = field(default_factory=list)
    """Events of a folder that was deleted since."""
    started: ClassVar[list[Driver]] = []
    """All whose command was started, by whatever test."""

    def __post_init__(self) -> None:
        self.run = RunDir.at(self.output_dir)
        self.log = self.output_dir.with_name(self.output_dir.name + ".log")

    def start(self) -> None:
        """Start the command; its output goes to a file beside the run."""
        settings = [f"trainer.output_dir={self.output_dir}", *self.overrides]
        arguments = [sys.executable, "-m", "keepstep.cli.main", self.command, "--config", self.config, *settings]
        if self.command == "make run":
            arguments = ["make", "-C", str(REPOSITORY), "run", f"ARGS={' '.join(settings)}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=clean_environment()
            )
        self.started.append(self)

    def wait(self, timeout_s: float) -> int:
        """Exit status of the command."""
        assert self.process is not None
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"{self.output_dir.name}: no end within {timeout_s} s\n{self.tail()}") from None

    def run_to_end(self, timeout_s: float = 240) -> int:
        self.start()
        return self.wait(timeout_s)

    def wait_for(self, what: str, condition: Callable[[list[Event]], Any], timeout_s: float = 150) -> Any:
        """First true value of `condition(events)`; fails when the command ends before, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := condition(self.events()):
                return found
            assert self.process is not None
            if self.process.poll() is not None and not condition(self.events()):
                raise AssertionError(f"ended with {self.process.returncode} before: {what}\n{self.tail()}")
            time.sleep(POLL_S)
        self.end()
        raise AssertionError(f"not within {timeout_s} s: {what}\n{self.tail()}")

    def wait_for_step(self, step: int, attempt: int | None = None, timeout_s: float = 150) -> None:
        """Wait until some attempt (or this one) has finished `step`."""

        def reached(events: list[Event]) -> bool:
            return any(
                event["event"] == "step" and event["step"] >= step and event["attempt"] == (attempt or event["attempt"])
                for event in events
            )

        self.wait_for(f"step {step}", reached, timeout_s)

    def wait_for_verified(self, step: int, timeout_s: float = 150) -> None:
        """Wait until `step` is published and verified: only then does a later attempt resume there."""
        self.wait_for(
            f"step {step} verified",
            lambda events: any(event["event"] == "checkpoint_verified" and event["step"] == step for event in events),
            timeout_s,
        )

    def events(self) -> list[Event]:
        return list(read_jsonl(self.run.events))

    def rewards(self) -> dict[int, float]:
        """Last reward of every step, over the folder's whole history."""
        return {e["step"]: e["reward"] for e in [*self.history, *self.events()] if e["event"] == "step"}

    def processes(self, role: str | None = None) -> list[ProcessRef]:
        """Processes of the newest attempt, from its own record."""
        record = newest_record(self.run)
        found = [ProcessRef.from_record(process) for process in record["processes"]] if record else []
        return [ref for ref in found if role is None or ref.role == role]

    def all_processes(self) -> list[ProcessRef]:
        """Processes of all attempts."""
        records = [read_json(self.run.attempt(number)) for number in self.run.attempt_numbers()]
        return [ProcessRef.from_record(process) for record in records for process in record["processes"]]

    def own_processes(self) -> list[ProcessRef]:
        """Processes of all attempts but for the servers, which others may hold."""
        return [ref for ref in self.all_processes() if ref.role not in servers.ROLES]

    def kill(self, role: str, index: int = 0) -> ProcessRef:
        """SIGKILL one living process of the newest attempt."""
        victim = [ref for ref in self.processes(role) if ref.alive()][index]
        self.kill_process(victim)
        return victim

    def kill_process(self, victim: ProcessRef) -> None:
        """SIGKILL exactly this process, unless it is gone."""
        if victim.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)

    def stop_writer_in_a_save(self, timeout_s: float = 120) -> tuple[ProcessRef, int]:
        """SIGSTOP the writer while its temporary folder stands; the writer and the step that it was writing."""
        (writer,) = self.processes("writer")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for entry in os.scandir(self.run.checkpoints):
                if not entry.name.startswith(".tmp-step_"):
                    continue
                os.kill(writer.pid, signal.SIGSTOP)
                # It may have been renamed between the look and the signal.
                if os.path.exists(entry.path):
                    return writer, int(entry.name.removeprefix(".tmp-step_").partition("-")[0])
                os.kill(writer.pid, signal.SIGCONT)
        raise AssertionError(f"no save was caught\n{self.tail()}")

    def kill_command(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=30)

    def end(self) -> None:
        """Kill the command where it still runs, also below `make`; a test that has failed leaves no run behind."""
        if self.process is None or self.process.poll() is not None:
            return
        for flow in self.processes("flow"):
            self.kill_process(flow)
        self.kill_command()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else "(no output)"


def clean_environment() -> dict[str, str]:
    """The caller's environment without what would point the command at another Prefect server or store."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "KEEPSTEP_", "AWS_"))}


def wait_until_gone(refs: list[ProcessRef], timeout_s: float = 30) -> list[ProcessRef]:
    """Those of `refs` that still live after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while any(ref.alive() for ref in refs) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [ref for ref in refs if ref.alive()]
