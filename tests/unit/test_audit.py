"""What an audit finds on a disk, what retention then may delete, and how several runs come to one end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keepstep import audit as auditing
from keepstep.attempts import Attempt
from keepstep.audit import AUDIT_ENDS, Look, RunAudit, audit, conclude, find_runs, look_at_disk, look_at_store, report
from keepstep.checkpoint import layout
from keepstep.checkpoint.verify import Verdict
from keepstep.config.load import load, to_yaml
from keepstep.events.log import EventLog, read_jsonl
from keepstep.run import RunDir, write_json
from tests.unit import builder

STEPS = (20, 40, 60, 80)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that ended: four verified steps of which its rules keep the newest two."""
    run = builder.run_in(tmp_path)
    for step in STEPS:
        builder.write(run, step)
    write_json(run.record, {"run_id": "run-a", "contract": {"trainer.total_training_steps": 80}})
    overrides = [f"trainer.output_dir={run.root}", "s3.embedded=false", "checkpoint.keep_last=2"]
    run.config.write_text(to_yaml(load("quickstart", [*overrides, "checkpoint.keep_best=0"])))
    events = EventLog(run.events, 1)
    for step in STEPS:
        events.emit("checkpoint_verified", step=step)
    events.close()
    return run


def damage(run: RunDir, step: int) -> None:
    """Flip one bit in the middle of the policy's weights."""
    path = run.checkpoint(step) / layout.ACTOR
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_sound_run_is_good_and_its_retention_is_applied(run: RunDir):
    found = audit(run)
    assert [(look.step, look.place) for look in found.looks] == [(step, "disk") for step in STEPS]
    assert found.bad == []
    assert run.steps() == [60, 80]
    assert [entry["step"] for entry in found.retired] == [20, 40]
    pruned = [event["step"] for event in read_jsonl(run.events) if event["event"] == "checkpoint_pruned"]
    assert pruned == [20, 40]


def test_a_flipped_bit_is_found_and_the_damaged_step_pushes_no_good_one_out(run: RunDir):
    """80 was good once. It no longer counts among the newest two, so 40 stays, and so does 80 itself as evidence."""
    damage(run, 80)
    found = audit(run)
    assert [look.step for look in found.bad] == [80]
    assert layout.ACTOR in found.bad[0].problems[0] and "SHA-256" in found.bad[0].problems[0]
    assert run.steps() == [40, 60, 80]


def test_a_step_that_is_retired_while_it_is_looked_at_is_no_finding(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    real = auditing.verify

    def gone(path: Path, **expected: object):  # type: ignore[no-untyped-def]
        if path.name == "step_40":
            path.rename(path.with_name("gone"))
        return real(path, **expected)

    monkeypatch.setattr(auditing, "verify", gone)
    assert [look.step for look in look_at_disk(run)] == [20, 60, 80]


def test_another_runs_checkpoint_under_the_name_of_a_step_is_found(run: RunDir):
    builder.write(run, 100, run_id="run-b")
    (look,) = [look for look in look_at_disk(run) if look.problems]
    assert look.step == 100 and "run-b" in look.problems[0]


def test_a_run_that_is_held_keeps_everything(run: RunDir):
    """The attempt retires after each save; two that delete would be one too many."""
    attempt = Attempt.acquire(run, others=[], lease_timeout_s=60.0, heartbeat_s=60.0)
    try:
        found = audit(run)
    finally:
        attempt.close({"status": "finished"})
    assert run.steps() == list(STEPS) and found.retired == []
    assert "left to it" in found.notes[0]
    assert audit(run).retired != []


class Store:
    """A run's side of a store in which steps 20 and 40 stand, of which another process retires one meanwhile."""

    def __init__(self, run: RunDir, retired: int | None) -> None:
        self.run, self.retired = run, retired

    def steps(self) -> list[int]:
        return [20, 40]

    def verify(self, step: int) -> Verdict:
        if step == self.retired:
            return Verdict(Path("s3"), "rejected", ["manifest.json is not there"], step)
        return Verdict(Path("s3"), "verified", [], step, num_bytes=7)

    def manifest_bytes(self, step: int) -> bytes | None:
        return None if step == self.retired else b"{}"


@pytest.mark.parametrize(
    ("retired", "record", "expected"),
    [
        (None, "here", {20: [], 40: [], 60: ["the store had confirmed it, and has no manifest of it now"]}),
        (40, "here", {20: [], 60: ["the store had confirmed it, and has no manifest of it now"]}),
        # Confirmed by the store of before, which is not the one that is configured now.
        (None, "another", {20: [], 40: []}),
    ],
)
def test_what_the_store_lost_is_told_from_what_was_retired(
    run: RunDir, retired: int | None, record: str, expected: dict[int, list[str]]
):
    config = load("quickstart", ["s3.embedded=false", "s3.bucket=here", "s3.prefix=p"])
    write_json(run.upload(60), {"step": 60, "bucket": record, "prefix": "p"})
    looks = look_at_store(config, run, Store(run, retired))  # type: ignore[arg-type]
    assert {look.step: look.problems for look in looks} == expected


def test_runs_are_found_by_folder_and_by_glob(run: RunDir, tmp_path: Path):
    (tmp_path / "no-run").mkdir()
    assert find_runs([str(tmp_path / "*"), str(run.root)]) == ([run], [])
    assert find_runs([str(tmp_path / "nothing" / "*")]) == ([], [])
    assert find_runs([str(tmp_path / "no-run"), str(run.root)]) == (
        [run],
        [f"{tmp_path / 'no-run'} is no run: it has no run.json"],
    )


GOOD = RunAudit("/runs/a", [Look(20, "disk", 10, []), Look(20, "store", 10, [])])
BAD = RunAudit("/runs/b", [Look(40, "store", 10, ["x: missing"]), Look(60, "disk", 10, ["y: empty"])])


@pytest.mark.parametrize(
    ("audits", "unanswered", "name", "sentence"),
    [
        ([GOOD], [], "Completed", "2 checkpoints of 1 runs are good"),
        ([], [], "Completed", "0 checkpoints of 0 runs are good"),
        ([GOOD, BAD], ["c: away"], "DamagedCheckpoints", "/runs/b: step 40 on the store: x: missing, and 1 more"),
        ([GOOD], ["c: away"], "AuditIncomplete", "c: away"),
    ],
)
def test_the_end_is_named_after_the_worst(audits: list[RunAudit], unanswered: list[str], name: str, sentence: str):
    assert conclude(audits, unanswered) == (name, sentence)
    assert name in AUDIT_ENDS


def test_the_report_names_everything_that_a_person_acts_on():
    pruned = RunAudit("/runs/c", [], [{"step": 5, "place": "disk", "reason": "no rule keeps it"}], ["held"])
    text = report([GOOD, BAD, pruned], ["d: away"])
    for line in (
        "| /runs/a | 20 | disk | 10 | good |",
        "- /runs/b, step 40 on the store: x: missing",
        "- d: away",
        "- /runs/c: step 5 deleted from the disk: no rule keeps it",
        "- /runs/c: held",
    ):
        assert line in text.splitlines()


def test_the_audit_is_light():
    """It stands in a flow's process while bytes are read; torch and the store's libraries have no part in it."""
    script = "import sys, keepstep.audit; print([n for n in ('torch', 'ray', 's3fs', 'prefect') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
