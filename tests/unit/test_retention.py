"""Which checkpoints stay: the rules by hand-written tables, then on a disk."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from keepstep.attempts import Attempt
from keepstep.checkpoint import layout
from keepstep.checkpoint.inventory import decide_for, entries, freed_bytes, retire
from keepstep.checkpoint.plan import plan
from keepstep.checkpoint.publish import point
from keepstep.checkpoint.retention import Decision, Entry, Rules, best_steps, decide
from keepstep.checkpoint.verify import verify
from keepstep.cli.main import main
from keepstep.config.schema import CheckpointConfig
from keepstep.events.log import EventLog, read_jsonl
from keepstep.run import RunDir, write_json
from tests.architecture.test_light_commands import resolved_config
from tests.unit import builder

NO_FENCE = lambda: None  # noqa: E731


def deleted(steps: list[int], *, metrics: dict[int, float] | None = None, **changes: Any) -> list[int]:
    sets = {name: frozenset(changes.pop(name, ())) for name in ("waiting", "in_use", "pinned")}
    rules = Rules(**({"keep_last": 1, "keep_every": 100} | changes))
    found = decide([Entry(step, (metrics or {}).get(step), 10) for step in steps], rules, **sets)
    assert sorted([*found.kept, *found.deleted]) == sorted(set(steps))
    return list(found.deleted)


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        ([20, 40, 60, 80], {"keep_last": 3}, [20]),
        ([80, 100, 120, 140, 160], {"keep_last": 2}, [80, 120]),
        ([9900, 9950, 10050], {}, [9950]),  # C56: numeric order; 9900 is a multiple
        ([9950, 10050, 10150], {"keep_last": 2}, [9950]),
        ([20, 40, 60], {"waiting": {20}}, [40]),
        ([20, 40, 60], {"in_use": {40}}, [20]),
        ([20, 40, 60], {"pinned": {20, 40}}, []),
        ([20], {}, []),
        ([], {"keep_last": 3}, []),
        ([0, 20, 40], {}, [0, 20]),
        # C50: 25 is saved while 30 stands
        ([20, 25, 30], {"keep_last": 2}, [20]),
        # C55, C58: best at 50 survives to 600 with keep_last 1 or 3
        ([50, 590, 600], {"keep_best": 1, "metrics": {50: 0.9, 590: 0.1, 600: 0.2}}, [590]),
        ([50, 550, 570, 590, 610], {"keep_last": 3, "keep_best": 1, "metrics": {50: 0.9}}, [550]),
        ([50, 60, 70, 80], {"keep_best": 2, "metrics": {50: 0.9, 60: 0.3, 70: 0.5}}, [60]),
        ([50, 60, 70], {"keep_best": 1, "metrics": {50: 0.9, 60: 0.3}, "higher_is_better": False}, [50]),
        # C86: nothing was validated at a save: no best, no error
        ([50, 60, 70], {"keep_best": 1}, [50, 60]),
    ],
)
def test_rules(steps: list[int], options: dict[str, Any], expected: list[int]):
    """C46, C50, C55, C56, C58, C86: the union of all rules, in numeric order."""
    assert deleted(steps, **options) == expected


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({100: 0.5, 200: 0.5}, 200),  # C85: of equals the later one
        ({100: 0.8, 200: 0.3}, 100),
        ({100: 0.8, 200: math.nan}, 100),  # C88: NaN never wins
        ({100: math.nan, 200: math.nan}, None),
        ({100: None, 200: 0.1}, 200),  # C86: missing ranks last
        ({100: -math.inf, 200: None}, 100),
    ],
)
def test_best(metrics: dict[int, float | None], expected: int | None):
    """C85, C86, C88."""
    found = best_steps([Entry(step, metric) for step, metric in metrics.items()], 1)
    assert found == ([] if expected is None else [expected])


def test_over_the_limit_the_newest_the_newest_multiple_and_the_best_stay():
    """Everything else goes, oldest first, also what is not in the store yet, until the rest fits."""
    steps, metrics = [100, 150, 200, 210, 220, 230], {150: 0.9, 220: 0.8}
    limited = {"keep_last": 3, "keep_best": 2, "metrics": metrics, "waiting": {200, 210}}
    assert deleted(steps, **limited) == []
    assert deleted(steps, **limited, max_disk_bytes=60) == []
    assert deleted(steps, **limited, max_disk_bytes=59) == [100]
    assert deleted(steps, **limited, max_disk_bytes=40) == [100, 210]
    assert deleted(steps, **limited, max_disk_bytes=1) == [100, 210, 220]
    assert deleted(steps, **limited, max_disk_bytes=1, in_use={220}, pinned={100}) == [210]


def test_reasons_are_told():
    rules = Rules(keep_last=2, keep_every=100, max_disk_bytes=15)
    found = decide([Entry(100, None, 10), Entry(110, None, 10), Entry(120, None, 10)], rules, waiting=frozenset({110}))
    assert found.kept == {120: ["newest", "newest 2"], 100: ["newest multiple of 100", "multiple of 100"]}
    assert found.deleted == {110: "over checkpoint.max_disk_bytes (was kept as: newest 2, not in the store yet)"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Six verified steps, best at 10; the reference is shared."""
    run = builder.run_in(tmp_path)
    events = EventLog(run.events, 1)
    for step in (10, 20, 30, 40, 50, 60):
        state = builder.request(run, step).trainer_state | {"metrics": {"val/reward/mean": 1 / step}}
        builder.write(run, step, reference_step=10 if step > 10 else None, trainer_state=state)
        events.emit("checkpoint_verified", step=step)
    events.close()
    write_json(run.record, {"run_id": "run-a", "dataset": {}, "contract": {"trainer.total_training_steps": 1000}})
    run.config.write_text(resolved_config(run))
    return run


def decision(run: RunDir, **changes: Any):
    verified = changes.pop("verified", run.steps())
    settings = CheckpointConfig(**({"keep_last": 2} | changes))
    return decide_for(run, settings, run_id="run-a", verified=verified, waiting=frozenset(), in_use=frozenset())


def test_reads_the_disk(run: RunDir):
    """C46, C59: what a person deleted, or an earlier process wrote, is seen; nothing is remembered."""
    shutil.rmtree(run.checkpoint(40))
    found = decision(run)
    assert list(found.deleted) == [20, 30]
    assert (sorted(found.kept), found.best) == ([10, 50, 60], 10)


def test_only_verified_steps_count(run: RunDir):
    """C52: two incomplete newer folders neither count as kept ones nor are deleted."""
    for step in (70, 80):
        run.checkpoint(step).mkdir()
    found = decision(run)
    assert list(found.deleted) == [20, 30, 40]
    found = decision(run, verified=[10, 20, 30])
    assert sorted([*found.kept, *found.deleted]) == [10, 20, 30]


def test_only_what_this_run_wrote_is_deleted(run: RunDir, tmp_path: Path):
    """C53: a checkpoint of another run that lies here stays."""
    other = RunDir.at(tmp_path / "other")
    builder.write(other, 25, run_id="run-b")
    shutil.copytree(other.checkpoint(25), run.checkpoint(25))
    assert 25 not in decision(run).deleted
    assert [entry.step for entry in entries(run, [20, 25], "run-a", "m")] == [20]


def test_shared_reference_is_not_counted_as_freed(run: RunDir):
    whole = sum(path.stat().st_size for path in run.checkpoint(20).rglob("*") if path.is_file())
    assert freed_bytes(run.checkpoint(20)) == whole - (run.checkpoint(20) / layout.REF).stat().st_size


def test_best_survives_a_resume(run: RunDir):
    """C88: the best comes from the checkpoints themselves, so a later, lower value does not replace it."""
    state = builder.request(run, 70).trainer_state | {"metrics": {"val/reward/mean": 0.01}}
    builder.write(run, 70, reference_step=10, trainer_state=state)
    found = decision(run)
    assert found.best == 10 and found.kept[10] == ["best", "best 1"]


def test_latest_and_best_are_two_pointers(run: RunDir):
    """C83."""
    point(run.latest_link, run, 60, NO_FENCE)
    point(run.best_link, run, 10, NO_FENCE)
    assert (run.latest_link.readlink(), run.best_link.readlink()) == (Path("step_60"), Path("step_10"))
    assert (run.checkpoints / "best.txt").read_text() == "step_10\n"
    assert verify(run.best_link).step == 10


def test_open_files_do_not_hinder(run: RunDir):
    """C49: an upload that reads the folder goes on; the step is gone under its name at once."""
    with (run.checkpoint(20) / layout.ACTOR).open("rb") as held:
        told: list[int] = []
        retire(run, decision(run), NO_FENCE, lambda step, _: told.append(step))
        assert held.read(2) == b"PK"
    assert told == [20, 30, 40] and run.steps() == [10, 50, 60]


def test_a_step_that_is_gone_is_no_error(run: RunDir):
    """C59: deleted by hand between the decision and the act."""
    found = decision(run)
    shutil.rmtree(run.checkpoint(30))
    retire(run, found, NO_FENCE, lambda *_: None)
    assert run.steps() == [10, 50, 60]


def test_killed_between_deletion_and_event(run: RunDir):
    """C59: a pointer or an event that names a deleted step misleads nobody."""
    shutil.rmtree(run.checkpoint(60))
    point(run.latest_link, run, 60, NO_FENCE)
    found = plan(run, policy="latest", prefer_multiple=100, max_rewind_steps=None, expected_run_id="run-a")
    assert found.step == 50


def run_command(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_prune_says_what_would_go_and_then_does_it(run: RunDir, capsys):
    status, text, _ = run_command(capsys, "prune", str(run.root), "--dry-run")
    assert status == 0 and run.steps() == [10, 20, 30, 40, 50, 60]
    assert text.splitlines()[1].split() == ["step_20", "would", "go:", "no", "rule", "keeps", "it"]
    status, text, _ = run_command(capsys, "prune", str(run.root), "--json")
    assert status == 0 and run.steps() == [10, 40, 50, 60]
    assert list(json.loads(text)["deleted"]) == ["20", "30"]
    assert [event["step"] for event in read_jsonl(run.events) if event["event"] == "checkpoint_pruned"] == [20, 30]


def test_best_points_to_nothing_that_is_gone(run: RunDir, capsys):
    """After a prune as after a save; where no step that stays was validated there is no best."""
    run.best_link.symlink_to("step_20")
    assert run_command(capsys, "prune", str(run.root))[0] == 0
    assert not run.checkpoint(20).exists() and run.best_link.resolve().is_dir()
    best = int(run.best_link.readlink().name.removeprefix("step_"))
    retire(run, Decision(deleted={best: "no rule keeps it"}), lambda: None, lambda step, reason: None)
    assert not run.best_link.is_symlink() and not run.text_of(run.best_link).exists()


def test_pinned_steps_stay_for_ever(run: RunDir, capsys):
    assert run_command(capsys, "pin", str(run.root), "20")[0] == 0
    assert run_command(capsys, "prune", str(run.root))[0] == 0
    assert run.steps() == [10, 20, 40, 50, 60]
    assert run_command(capsys, "pin", str(run.root), "20", "--remove")[0] == 0
    assert run.pinned_steps() == frozenset() and run.unpinned_steps() == {20}
    assert run_command(capsys, "prune", str(run.root))[0] == 0
    assert run.steps() == [10, 40, 50, 60]
    status, _, error = run_command(capsys, "pin", str(run.root), "77")
    assert status == 1 and "has no step 77" in error


def test_prune_leaves_a_run_alone_that_is_at_work(run: RunDir, capsys):
    attempt = Attempt.acquire(run, others=[], lease_timeout_s=90, heartbeat_s=60)
    try:
        status, _, error = run_command(capsys, "prune", str(run.root))
        assert status == 5 and "is held" in error and len(run.steps()) == 6
        assert run_command(capsys, "prune", str(run.root), "--dry-run")[0] == 0
    finally:
        attempt.close({"status": "finished"})
