"""The doctor on runs in which each fault was really caused (`tests/faults`), and on what damage makes of them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main
from keepstep.doctor.ends import ENDS
from keepstep.doctor.evidence import Quote
from keepstep.doctor.finding import NOTE, PROBLEM
from keepstep.doctor.rules import RULES, examine
from keepstep.processes import ProcessRef, boot_id, hostname
from keepstep.run import RunDir, write_json
from tests.faults.causes import FAULTS
from tests.faults.seen import DATA, TEXT, evidence_of, names, text_of

FAILED, EVENTS, METRICS = '"event": "failed"', "events.jsonl", "metrics.jsonl"
HEALTHY = ("healthy", "running")
EXPECTED: dict[str, tuple[str, str, str, str, str]] = {
    # name: (leading finding, severity, file, what the quoted text holds, what the remedy holds)
    "abandoned": ("stands_still", PROBLEM, "attempts/1.json", '"heartbeat": ', "same command again"),
    "budget_gone": ("budget_gone", PROBLEM, EVENTS, "SystemExit: judge", "retry.max_retries"),
    "clock_skew": ("clock_skew", NOTE, EVENTS, '"time": ', "chronyc tracking"),
    "damaged_checkpoint": ("damaged_checkpoint", NOTE, EVENTS, '"event": "checkpoint_rejected"', "rm -r"),
    "engine_killed": ("worker_lost", NOTE, EVENTS, "engine 0 died", "Nothing to do"),
    "engine_precision": ("stale_weights", PROBLEM, EVENTS, "differ by", "logprob_tolerance"),
    "fails_again": ("repeated_failure", PROBLEM, EVENTS, "SystemExit: cannot reach the judge", "Mend what"),
    "fenced": ("fenced", NOTE, EVENTS, "took the run over", "retry.lease_timeout_s"),
    "few_rows": ("few_rows", PROBLEM, "run.json", '"num_rows": 20', "data.train_batch_size"),
    "identical_responses": ("identical_responses", PROBLEM, METRICS, "rollout/identical_groups", "rollout.temperature"),
    "keys_do_not_match": ("keys_do_not_match", PROBLEM, EVENTS, "missing ['lm_head.weight']", "config.json"),
    "learning_rate_absurd": ("non_finite", PROBLEM, EVENTS, '"class": "non_finite"', "actor.optim.lr"),
    "learning_rate_jumps": ("jump_after_resume", PROBLEM, EVENTS, '"event": "resumed"', "resume_from_checkpoint"),
    "no_room": ("no_room", PROBLEM, EVENTS, "bytes free, the checkpoint needs", "keepstep prune"),
    "no_row_left": ("no_usable_rows", PROBLEM, EVENTS, "No row is left of 640", "data.max_prompt_length"),
    "optimizer_lost": ("jump_after_resume", PROBLEM, EVENTS, '"event": "resumed"', "resume_from_checkpoint"),
    "other_weights": ("other_policy", PROBLEM, EVENTS, '"class": "probe"', "resume.allow=[probe]"),
    "out_of_memory_on_resume": ("out_of_memory_on_resume", PROBLEM, EVENTS, FAILED, "free -h"),
    "port_in_use": ("port_in_use", PROBLEM, EVENTS, "is in use by process", "actor_rollout_ref.rollout.port"),
    "preempted": ("preempted", NOTE, EVENTS, '"event": "preempted"', "same command again"),
    "rank_hangs": ("no_answer", PROBLEM, EVENTS, FAILED, "timeouts.collective_s"),
    "rank_killed": ("worker_lost", PROBLEM, EVENTS, "rank 1 died", "same command again"),
    "replay_differs": ("replay_differs", PROBLEM, EVENTS, '"class": "exactness"', "keepstep plan"),
    "reward_infinite": ("reward_raised", PROBLEM, EVENTS, '"class": "reward"', "finite"),
    "reward_raises": ("reward_raised", PROBLEM, EVENTS, "ZeroDivisionError", "custom_reward_function.source"),
    "rewards_equal": ("rewards_equal", PROBLEM, METRICS, "zero_std_groups", "custom_reward_function"),
    "save_skipped": ("save_skipped", NOTE, EVENTS, '"event": "checkpoint_skipped"', "keepstep prune"),
    "store_gone": ("store_away", PROBLEM, EVENTS, '"class": "storage"', "uploads what is missing"),
    "store_refuses": ("store_refused", PROBLEM, EVENTS, "NoSuchBucket", "Create the bucket"),
    "writer_hangs": ("no_answer", PROBLEM, EVENTS, "no answer from writer within 4 s", "checkpoint.save_timeout_s"),
}


def test_every_fault_has_its_run():
    assert names() == sorted([*HEALTHY, *EXPECTED]) == sorted(fault.__name__ for fault in FAULTS)


@pytest.mark.parametrize("name", EXPECTED)
def test_leading_finding(name: str):
    """The first finding is the fault that was caused, with the line that shows it and the way out."""
    found = examine(evidence_of(name)).findings[0]
    leading, severity, file, text, remedy = EXPECTED[name]
    assert (found.id, found.severity) == (leading, severity)
    assert found.evidence[0].file == file and text in found.evidence[0].text
    assert remedy in found.remedy


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_have_no_finding(name: str):
    assert examine(evidence_of(name)).findings == ()


@pytest.mark.parametrize("name", [*HEALTHY, *EXPECTED])
def test_one_cause_is_not_told_twice(name: str):
    """At most one problem, with what stops the flow beside it: consequences are not causes."""
    problems = [found.id for found in examine(evidence_of(name)).findings if found.severity == PROBLEM]
    assert len(problems) == (0 if name in HEALTHY or EXPECTED[name][1] == NOTE else 1), problems


@pytest.mark.parametrize("name", [*HEALTHY, *EXPECTED])
def test_quotes_are_in_their_files(name: str):
    for found in examine(evidence_of(name)).findings:
        assert found.evidence
        for quote in found.evidence:
            assert is_there(DATA / name, quote), quote


def is_there(root: Path, quote: Quote) -> bool:
    path = root / quote.file
    if not quote.line:
        return path.exists()
    return quote.text in path.read_text(errors="replace").split("\n")[quote.line - 1]


@pytest.mark.parametrize("name", [*HEALTHY, *EXPECTED])
def test_text(name: str):
    """Word for word what a person reads."""
    assert text_of(name) == (DATA / name / TEXT).read_text()


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("learning_rate_jumps", "the scheduler was not restored; the learning rate was 0.0005 at step"),
        ("optimizer_lost", "the optimizer's state was not restored"),
    ],
)
def test_jump_names_the_part_that_did_not_come_back(name: str, which: str):
    """C32, C95, C101, C112: a resume that is not one."""
    assert which in examine(evidence_of(name)).findings[0].cause


def test_reward_that_falls_at_once_is_blamed_on_the_weights(tmp_path: Path):
    """C95: no step was trained twice, so the steps before and after are held against each other."""
    bad = {"actor/lr": 0.0005, "actor/ppo_kl": 0.002, "critic/rewards/mean": 0.1}
    copy = with_metrics(tmp_path, "learning_rate_jumps", lambda row: row | (bad if row["attempt"] == 2 else {}))
    cause = examine(evidence_of("learning_rate_jumps", copy)).findings[0].cause
    assert "weights, rewards or data are not those of before; the reward was 0.6543 at step 14" in cause


def test_stale_engine_is_told_from_other_weights(tmp_path: Path):
    """C109: the engine's log-probs drift from the trainer's."""
    bad = {"actor/lr": 0.0005, "critic/rewards/mean": 0.1, "rollout/logprob_gap_max": 0.3}
    copy = with_metrics(tmp_path, "learning_rate_jumps", lambda row: row | (bad if row["attempt"] == 2 else {}))
    assert (
        "the engine samples from stale weights" in examine(evidence_of("learning_rate_jumps", copy)).findings[0].cause
    )


def test_every_rule_is_asked_once():
    assert len(set(RULES)) == len(RULES) and set(ENDS) <= set(RULES)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["doctor", *arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    status, out, _ = command(capsys, str(DATA / "healthy"))
    assert status == 0 and "healthy: finished, at step 12 of 12; last verified checkpoint: step 12" in out
    status, out, _ = command(capsys, str(DATA / "damaged_checkpoint"))
    assert status == 0 and "note  damaged_checkpoint" in out
    status, out, _ = command(capsys, str(DATA / "rank_killed"))
    assert status == 1 and "PROBLEM  worker_lost" in out
    for nothing in (tmp_path, tmp_path / "nowhere"):
        status, out, err = command(capsys, str(nothing))
        assert status == 2 and not out and "is not the folder of a run" in err and "trainer.output_dir" in err


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]):
    status, out, _ = command(capsys, str(DATA / "port_in_use"), "--json")
    told = json.loads(out)
    assert status == 1 and list(told) == ["run", "state", "healthy", "findings"] and told["healthy"] is False
    first = told["findings"][0]
    assert list(first) == ["id", "severity", "cause", "evidence", "remedy", "explains"]
    assert first["id"] == "port_in_use" and first["explains"] == [2]
    assert set(first["evidence"][0]) == {"file", "line", "text"}


def test_living_run_is_not_reported_as_standing_still(tmp_path: Path):
    """C133: the same folder while its process lives, after it died, and on another host in time and too late."""
    copy = Path(shutil.copytree(DATA / "abandoned", tmp_path / "run"))
    record = json.loads((copy / "attempts/1.json").read_text())
    own = ProcessRef.current("controller")
    record["owner"] = {"host": hostname(), "pid": own.pid, "start_time": own.start_time, "boot_id": boot_id()}
    record["processes"] = []
    write_json(copy / "attempts/1.json", record)
    from keepstep.doctor.evidence import gather

    def states(**changed: Any) -> str:
        return examine(gather(RunDir.at(copy), **changed)).state.partition(",")[0]

    assert states() == "running as attempt 1"
    assert states(alive=lambda _: False) == "standing still since attempt 1"
    assert states(host="another", now=record["heartbeat"] + 10) == "running as attempt 1"
    assert states(host="another", now=record["heartbeat"] + 1000) == "standing still since attempt 1"


Change = Callable[[random.Random, Path], None]


def cut(chance: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)])


def garble(chance: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.randrange(1, 40)):
        if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
    path.write_bytes(bytes(data))


def vanish(_chance: random.Random, path: Path) -> None:
    path.unlink()


def become_a_folder(_chance: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


STRANGE: tuple[Any, ...] = (None, True, -1, 0, 1e308, 10**400, float("nan"), "", "text", [], [1], {}, {"a": {"b": 1}})


def retype(chance: random.Random, path: Path) -> None:
    """Other types in place of what stands, in a JSON file or in lines of one."""
    text = path.read_text(errors="replace")
    try:
        path.write_text(json.dumps(strange(chance, json.loads(text), 0.1)))
    except ValueError:
        lines = [strange_line(chance, line) for line in text.split("\n")]
        path.write_text("\n".join(lines))


def strange_line(chance: random.Random, line: str) -> str:
    try:
        return json.dumps(strange(chance, json.loads(line), 0.05))
    except ValueError:
        return line


def strange(chance: random.Random, value: Any, share: float) -> Any:
    if chance.random() < share:
        return chance.choice(STRANGE)
    if isinstance(value, dict):
        return {key: strange(chance, entry, share) for key, entry in value.items()}
    if isinstance(value, list):
        return [strange(chance, entry, share) for entry in value]
    return value


@pytest.mark.parametrize("seed", range(60))
def test_damage_never_stops_the_doctor(tmp_path: Path, seed: int):
    """Torn, garbled, missing and half-written files: there is always a report, and what it quotes is there."""
    chance = random.Random(seed)
    name = chance.choice(names())
    copy = Path(shutil.copytree(DATA / name, tmp_path / "run"))
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    for path in chance.sample(files, chance.randrange(1, 5)):
        change: Change = chance.choice([cut, garble, vanish, become_a_folder, retype, retype])
        change(chance, path)
    report = examine(evidence_of(name, copy))
    assert report.state
    for found in report.findings:
        assert found.cause and found.remedy
        assert all(quote.line == 0 or is_there(copy, quote) for quote in found.evidence), found


def test_damaged_record_is_named(tmp_path: Path):
    copy = Path(shutil.copytree(DATA / "healthy", tmp_path / "run"))
    (copy / "run.json").write_text('{"run_id": ')
    (found,) = examine(evidence_of("healthy", copy)).findings
    assert (found.id, found.severity) == ("unreadable", PROBLEM)
    assert found.evidence == (Quote("run.json", 0, "not a JSON object"),)


def test_torn_last_line_is_a_note(tmp_path: Path):
    copy = Path(shutil.copytree(DATA / "healthy", tmp_path / "run"))
    whole = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(whole + '{"time": "2026')
    (found,) = examine(evidence_of("healthy", copy)).findings
    assert (found.id, found.severity) == ("unreadable", NOTE)
    assert found.evidence == (Quote("metrics.jsonl", 13, '{"time": "2026'),)


def with_metrics(folder: Path, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A copy of a fixture whose rows of metrics.jsonl are changed."""
    copy = Path(shutil.copytree(DATA / name, folder / "run"))
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    return copy


def found_in(copy: Path, name: str) -> list[tuple[str, str]]:
    return [(found.id, found.severity) for found in examine(evidence_of(name, copy)).findings]


def test_groups_that_agree_only_at_the_end_are_no_problem(tmp_path: Path):
    """A policy that has learnt its task answers alike: that is not broken sampling."""
    copy = with_metrics(
        tmp_path, "healthy", lambda row: row | {"rollout/identical_groups": 1.0 if row["step"] > 8 else 0.1}
    )
    assert found_in(copy, "healthy") == [("identical_responses", NOTE)]


def test_rewards_that_agree_only_at_the_end_are_no_problem(tmp_path: Path):
    copy = with_metrics(
        tmp_path, "healthy", lambda row: row | {"critic/rewards/zero_std_groups": 1.0 if row["step"] > 8 else 0.1}
    )
    assert found_in(copy, "healthy") == [("rewards_equal", NOTE)]


def test_equal_rewards_show_without_their_own_metric(tmp_path: Path):
    """Runs of releases that did not write the share of groups without difference."""
    new = ("critic/rewards/zero_std_groups", "rollout/identical_groups")
    copy = with_metrics(tmp_path, "rewards_equal", lambda row: {k: v for k, v in row.items() if k not in new})
    assert found_in(copy, "rewards_equal") == [("rewards_equal", PROBLEM)]


def test_schedule_that_has_ended(tmp_path: Path):
    """C116: the learning rate is 0 and the run goes on."""
    copy = with_metrics(tmp_path, "healthy", lambda row: row | ({"actor/lr": 0.0} if row["step"] > 8 else {}))
    assert found_in(copy, "healthy") == [("learning_rate_zero", PROBLEM)]


def test_resume_that_replays_the_same_numbers_is_healthy():
    """A resume is not suspicious by itself: what was trained twice agrees."""
    evidence = evidence_of("engine_killed")
    resumed = {row.step for row in evidence.of("resumed")}
    assert resumed and "jump_after_resume" not in {found.id for found in examine(evidence).findings}


def test_rounding_of_a_replay_is_no_jump(tmp_path: Path):
    """Other hardware rounds otherwise: a ten-thousandth is not a lost optimizer."""
    copy = with_metrics(
        tmp_path,
        "engine_killed",
        lambda row: row | {"actor/kl_loss": row["actor/kl_loss"] * (1 + 1e-4 * row["attempt"])},
    )
    assert "jump_after_resume" not in {name for name, _ in found_in(copy, "engine_killed")}


def test_memory_that_never_sufficed_is_not_blamed_on_the_resume(tmp_path: Path):
    copy = Path(shutil.copytree(DATA / "out_of_memory_on_resume", tmp_path / "run"))
    lines = [line for line in (copy / "events.jsonl").read_text().splitlines() if '"event": "step"' not in line]
    (copy / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert found_in(copy, "out_of_memory_on_resume")[0] == ("out_of_memory", PROBLEM)


def test_heartbeat_in_the_future_is_a_clock_that_is_wrong(tmp_path: Path):
    copy = Path(shutil.copytree(DATA / "abandoned", tmp_path / "run"))
    record = json.loads((copy / "attempts/1.json").read_text())
    write_json(copy / "attempts/1.json", record | {"heartbeat": record["heartbeat"] + 7200})
    assert ("clock_skew", PROBLEM) in found_in(copy, "abandoned")


def test_settings_come_from_the_configuration_where_the_log_is_gone(tmp_path: Path):
    copy = Path(shutil.copytree(DATA / "few_rows", tmp_path / "run"))
    shutil.rmtree(copy / "logs")
    found = examine(evidence_of("few_rows", copy)).findings[0]
    assert found.id == "few_rows" and found.evidence[1].file == "config.yaml"
    assert is_there(copy, found.evidence[1]) and found.evidence[1].text == "train_batch_size: 64"


def test_node_that_died_is_told_from_a_worker_that_died(tmp_path: Path):
    """C160: Ray's own words for it."""
    copy = Path(shutil.copytree(DATA / "rank_killed", tmp_path / "run"))
    words = "update: a worker died (The actor died because its node has died. Node Id: 5f)."
    record = json.loads((copy / "attempts/1.json").read_text())
    record["outcome"]["message"] = words
    write_json(copy / "attempts/1.json", record)
    assert found_in(copy, "rank_killed")[0] == ("node_lost", PROBLEM)


def test_every_finding_is_documented():
    text = (DATA.parents[2] / "docs" / "doctor.md").read_text()
    found = {finding.id for name in names() for finding in examine(evidence_of(name)).findings}
    assert {name for name in found if f"`{name}`" not in text} == set()
