"""Saves that are killed, starved of room, hung, or overtaken: always a good checkpoint left, never a half one taken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.checkpoint import layout
from keepstep.checkpoint.publish import sweep_temporaries
from keepstep.checkpoint.verify import verify
from keepstep.controller.supervision import classify
from keepstep.errors import NO_ROOM_ERRNOS, NoRoomError
from keepstep.processes import ProcessRef, hostname
from keepstep.run import RunDir, read_json
from tests.integration.driver import REPOSITORY, Driver, clean_environment, wait_until_gone
from tests.unit import builder

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NUM_KILLS = 50
KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
import numpy as np
from keepstep.checkpoint.publish import sweep_temporaries
from keepstep.checkpoint.verify import verify
from tests.unit import builder

builder.SHAPES = {"embed.weight": (1200, 600), "layer.weight": (900, 600), "norm.weight": (600,)}
run = builder.run_in(Path(sys.argv[1]))
generator = random.Random(int(sys.argv[2]))

def save(step):
    child = os.fork()
    if child == 0:
        try:
            builder.write(run, step, seed=1, reference_step=10 if step > 10 else None)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child

begin = time.monotonic()
os.waitpid(save(10), 0)
whole_s = time.monotonic() - begin
kept, report = [10], {"published": 0, "absent": 0, "leftovers": 0, "bad": []}
for number in range(int(sys.argv[3])):
    step = 20 + 10 * number
    child = save(step)
    time.sleep(generator.uniform(0, 1.1 * whole_s))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for standing in run.steps():
        verdict = verify(run.checkpoint(standing), expected_run_id="run-a", expected_step=standing)
        if not verdict.resumable:
            report["bad"].append([number, standing, verdict.reasons])
    if not set(kept) <= set(run.steps()):
        report["bad"].append([number, "lost", kept, run.steps()])
    report["published" if step in run.steps() else "absent"] += 1
    report["leftovers"] += len(sweep_temporaries(run, lambda: None))
    for old in run.steps()[1:-2]:
        import shutil; shutil.rmtree(run.checkpoint(old))
    kept = run.steps()
print(json.dumps(report))
"""


def test_writer_killed_at_fifty_instants(tmp_path: Path):
    """C35, C61, C65: whatever stands under a step's name is whole, and what stood before still stands."""
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), "7", str(NUM_KILLS)],
        capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["bad"] == []
    assert report["published"] + report["absent"] == NUM_KILLS
    # Kills that all came too early or too late would have tried nothing.
    assert report["absent"] >= 10 and report["leftovers"] >= 10, report


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem with room for one checkpoint and a half."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2600k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=30)


@pytest.fixture
def large_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of 1.3 MB."""
    monkeypatch.setattr(builder, "SHAPES", {"embed.weight": (150, 400), "layer.weight": (80, 300)})


def test_no_room_is_told_before_the_save(small_disk: Path, large_state: None):
    """C43: found and needed; nothing is begun, and what stands stays good."""
    run = builder.run_in(small_disk)
    builder.write(run, 10)
    with pytest.raises(NoRoomError, match=r"Saving step 20: .* has \d+ bytes free, the checkpoint needs \d+"):
        builder.write(run, 20)
    assert run.steps() == [10] and verify(run.checkpoint(10)).resumable
    assert sweep_temporaries(run, lambda: None) == []


def test_disk_that_fills_during_the_save(small_disk: Path, large_state: None, monkeypatch: pytest.MonkeyPatch):
    """C37, C43: another process takes the room after the check; the half save gives its room back."""
    from keepstep.checkpoint import writer

    run = builder.run_in(small_disk)
    builder.write(run, 10)
    before = shutil.disk_usage(small_disk).free
    monkeypatch.setattr(writer, "ROOM", 0.1)
    with pytest.raises(OSError, match="No space left"):
        builder.write(run, 20)
    assert run.steps() == [10] and verify(run.checkpoint(10)).resumable
    assert shutil.disk_usage(small_disk).free >= before - 65536


def test_quota_is_no_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """C44: errno 122 comes where `df` shows room, in the middle of torch.save, which answers with another error."""
    import errno

    from keepstep.checkpoint.digest import HashingWriter

    def refuse(self: HashingWriter, data: bytes) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    run = builder.run_in(tmp_path)
    builder.write(run, 10)
    monkeypatch.setattr(HashingWriter, "write", refuse)
    with pytest.raises(OSError, match="quota") as caught:
        builder.write(run, 20)
    assert caught.value.errno in NO_ROOM_ERRNOS and isinstance(classify(caught.value, "saving"), NoRoomError)
    assert run.steps() == [10] and sweep_temporaries(run, lambda: None) == []


def test_temporary_folder_lies_beside_its_target(tmp_path: Path):
    """C37: also where checkpoints/ is a link to another filesystem, the rename crosses none."""
    run = builder.run_in(tmp_path)
    elsewhere = Path("/dev/shm") / f"keepstep-test-{os.getpid()}"
    elsewhere.mkdir()
    try:
        run.root.mkdir()
        run.checkpoints.symlink_to(elsewhere)
        builder.write(run, 10)
        assert verify(run.checkpoint(10)).resumable and (elsewhere / "step_10").is_dir()
    finally:
        shutil.rmtree(elsewhere)


TRAIN = ["trainer.save_freq=5", "trainer.test_freq=-1", "s3.embedded=false", "checkpoint.keep_last=50"]


def hang_the_writer(driver: Driver, last_saved: int) -> None:
    """C29: the limit of a save is its own, its message names the writer and the step, and another attempt can help."""
    driver.overrides += ["checkpoint.save_timeout_s=4"]
    driver.start()
    driver.wait_for_verified(last_saved + 5)
    (writer,) = driver.processes("writer")
    os.kill(writer.pid, signal.SIGSTOP)
    assert driver.wait(120) == 1, driver.tail()
    outcome = read_json(driver.run.attempt(2))["outcome"]
    assert (outcome["class"], outcome["retry"]) == ("no_progress", True)
    assert "saving step" in outcome["message"] and "writer" in outcome["message"]
    assert wait_until_gone(driver.all_processes()) == []


def test_full_disk_is_skipped_by_policy_and_never_at_the_end(workspace: Path):
    """C43: training goes on past saves that found no room; the last one is not given up; with room it is saved again.

    Then the writer hangs.
    """
    folder = workspace / "full"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(folder)]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        overrides = [*TRAIN, "trainer.total_training_steps=42", "checkpoint.on_no_room=skip"]
        driver = Driver(folder / "run", overrides, command="train")
        driver.log = workspace / "full.log"
        driver.start()
        driver.wait_for_verified(5)
        filler = folder / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(folder).free - 2_000_000))
        assert driver.wait(120) == 1, driver.tail()
        events = [(event["event"], event.get("step")) for event in driver.events()]
        saved = [step for kind, step in events if kind == "checkpoint_saved"]
        skipped = [step for kind, step in events if kind == "checkpoint_skipped"]
        assert skipped and sorted([*saved, *skipped]) == list(range(5, 41, 5))
        assert ("step", 42) in events
        failed = driver.events()[-1]
        assert (failed["event"], failed["class"]) == ("failed", "no_room") and "bytes free" in failed["message"]
        assert "is NOT saved (checkpoint.on_no_room=skip)" in driver.run.train_log(1).read_text()
        filler.unlink()
        hang_the_writer(driver, max(saved))
        assert all(verify(driver.run.checkpoint(step)).resumable for step in driver.run.steps())
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def stop_all(refs: list[ProcessRef], number: int) -> None:
    for ref in refs:
        if ref.alive():
            os.kill(ref.pid, number)


def contents(run: RunDir) -> dict[str, bytes]:
    """Everything that a stale attempt could spoil."""
    files = {str(path): (path / layout.MANIFEST).read_bytes() for path in map(run.checkpoint, run.steps())}
    pointers = {path.name: path.read_bytes() for path in run.checkpoints.glob("*.txt")}
    return files | pointers | {"latest": os.readlink(run.latest_link).encode(), "result": run.result.read_bytes()}


def test_suspended_attempt_wakes_up_fenced(workspace: Path):
    """C146: suspended during its save, taken for dead, woken after another has finished the run: it spoils nothing.

    The first attempt runs under another host name on the same folder, as on a shared filesystem: nobody here can end
    its processes, and only its silence shows.
    """
    if os.geteuid() != 0:
        pytest.skip("a host name of its own takes root")
    settings = [
        *TRAIN,
        "trainer.total_training_steps=24",
        "trainer.save_freq=3",
        "retry.lease_timeout_s=4",
        "retry.heartbeat_s=0.5",
    ]
    stale = Driver(workspace / "fenced", settings, command="train")
    arguments = [sys.executable, "-m", "keepstep.cli.main", "train", "--config", "quickstart",
                 f"trainer.output_dir={stale.output_dir}", *settings]  # fmt: skip
    script = 'hostname elsewhere && exec "$@"'
    with stale.log.open("ab") as log:
        stale.process = subprocess.Popen(
            ["unshare", "--uts", "sh", "-c", script, "sh", *arguments], stdout=log, stderr=log, env=clean_environment()
        )
    stale.wait_for_verified(3)
    _, interrupted = stale.stop_writer_in_a_save()
    recorded = stale.processes()
    # Under their recorded host name they would count as processes that cannot be looked at from here.
    processes = [replace(ref, host=hostname()) for ref in recorded]
    stop_all(processes, signal.SIGSTOP)
    try:
        assert {ref.host for ref in recorded} == {"elsewhere"}
        assert interrupted not in stale.run.steps()
        fresh = Driver(stale.output_dir, [*settings, "actor_rollout_ref.rollout.port=20214"], command="train")
        fresh.log = workspace / "fresh.log"
        stale.wait_for("the lease runs out", lambda _: lease_is_silent(stale.run, 4))
        assert fresh.run_to_end() == 0, fresh.tail()
        resumed = [event for event in fresh.events() if event["event"] == "resumed"]
        assert [event["attempt"] for event in resumed] == [2] and resumed[0]["step"] < interrupted
        before = contents(fresh.run)
        assert str(fresh.run.checkpoint(24)) in before
    finally:
        stop_all(processes, signal.SIGCONT)
    try:
        assert stale.wait(90) != 0
        assert wait_until_gone(processes) == []
    finally:
        stop_all(processes, signal.SIGKILL)
    assert contents(fresh.run) == before
    assert all(verify(fresh.run.checkpoint(step)).resumable for step in fresh.run.steps())
    after = [event for event in fresh.events() if event["attempt"] == 1]
    assert after[-1]["event"] != "checkpoint_saved", after[-1]
    assert read_json(fresh.run.attempt(1))["outcome"] is None, "a fenced attempt writes nothing"


def lease_is_silent(run: RunDir, timeout_s: float) -> bool:
    return time.time() - read_json(run.attempt(1))["heartbeat"] > timeout_s
