"""Where faults are caused: runs of the quickstart, a few steps each, in a folder of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.run import RunDir, read_json, write_json
from tests.integration.driver import Driver, Event, clean_environment
from tests.unit.forging import reseal

START_TIMEOUT_S = 900


@dataclass(frozen=True)
class Lab:
    """`folder` holds the runs, their platform folder, reward files and data."""

    folder: Path
    port: int
    """First port of the engine: labs that work at the same time need other ones."""

    def driver(self, name: str, *overrides: str, steps: int = 8, save_freq: int = 2, command: str = "train") -> Driver:
        common = [
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={save_freq}",
            "trainer.test_freq=-1",
            "s3.embedded=false",
            "retry.delays_s=[0.2]",
            f"actor_rollout_ref.rollout.port={self.port}",
        ]
        return Driver(self.folder / name, [*common, *overrides], command=command)

    def reward(self, name: str, body: str) -> str:
        """The setting for a reward function with this body; it may count its calls by `next(calls)`."""
        path = self.folder / f"{name}_reward.py"
        path.write_text(
            "import itertools, sys\ncalls = itertools.count()\n\n\n"
            "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
            "    right = float(solution_str.strip() == str(ground_truth))\n"
            f"    {body}\n"
        )
        return f"custom_reward_function.path={path}"


def end(driver: Driver, *, status: int | None = None) -> None:
    """Wait for the command, whose exit status must be this one (any but 0 unless given)."""
    found = driver.wait(START_TIMEOUT_S)
    assert found == status if status is not None else found != 0, f"exit status {found}\n{driver.tail()}"


def wait_for_step(driver: Driver, step: int, attempt: int | None = None) -> None:
    driver.wait_for_step(step, attempt, timeout_s=START_TIMEOUT_S)


def wait_for_event(driver: Driver, kind: str, timeout_s: float = START_TIMEOUT_S, **fields: Any) -> None:
    def seen(events: list[Event]) -> bool:
        return any(
            event["event"] == kind and all(event.get(key) == value for key, value in fields.items()) for event in events
        )

    driver.wait_for(f"{kind} {fields}", seen, timeout_s)


def kill_everything(driver: Driver) -> None:
    """SIGKILL the command and every process that its attempt recorded, as the loss of a machine's power would."""
    assert driver.process is not None
    victims = driver.processes()
    driver.process.kill()
    for victim in victims:
        driver.kill_process(victim)
    driver.process.wait(timeout=30)


def leave(driver: Driver) -> None:
    """SIGTERM: save and leave."""
    assert driver.process is not None
    driver.process.send_signal(signal.SIGTERM)
    end(driver, status=75)


def start_as(driver: Driver, prefix: list[str], environment: dict[str, str] | None = None) -> None:
    """Start the command under another one, or with more environment."""
    settings = [f"trainer.output_dir={driver.output_dir}", *driver.overrides]
    command = [*prefix, sys.executable, "-m", "keepstep.cli.main", driver.command, "--config", "quickstart", *settings]
    with driver.log.open("ab") as log:
        driver.process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=clean_environment() | (environment or {})
        )


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A filesystem of its own; takes root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def rewrite(run: RunDir, step: int, name: str, change: Any) -> None:
    """Change the content of one tensor file of a checkpoint, and give it digests that fit."""
    import torch

    from keepstep.checkpoint.writer import write_torch

    path = run.checkpoint(step) / name
    value = torch.load(path, weights_only=True)
    change(value)
    path.unlink()
    write_torch(path, name, value)
    reseal(run.checkpoint(step))


def set_term(run: RunDir, field: str, value: Any) -> None:
    """Change what the run recorded of its first start."""
    record = read_json(run.record)
    record["contract"][field] = value
    write_json(run.record, record)


def scale_learning_rate(factor: float) -> Any:
    def change(state: dict[str, Any]) -> None:
        state["base_lrs"] = [lr * factor for lr in state["base_lrs"]]

    return change


def forget_second_moments(state: dict[str, Any]) -> None:
    for entry in state["state"].values():
        entry["exp_avg_sq"].zero_()


def flip_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))
