"""The resume contract: every setting has a class, every drift its message, and a refused start changes nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main
from keepstep.config.load import load, settings, to_yaml
from keepstep.errors import EXIT_CONTRACT, CheckpointError, ConfigError, ContractError, DataError
from keepstep.preflight import contract
from keepstep.preflight.complete import complete_result
from keepstep.preflight.contract import CONFIRM, FATAL, FIELDS, FREE, NOTE, Drift, class_of, compare, enforce, table
from keepstep.run import read_json, write_json
from tests.unit import standing_run
from tests.unit.standing_run import Standing

REPOSITORY = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "contract.txt"
DERIVED = {
    "model.fingerprint", "init_from.fingerprint", "custom_reward_function.source",
    "code.keepstep", "code.layout_version", "code.torch", "code.transformers", "code.vllm",
}  # fmt: skip
SECTIONS = {"export", "checkpoint", "s3", "resume", "retry", "recovery", "timeouts", "ray"}


def first_terms() -> dict[str, Any]:
    config = load("quickstart")
    return contract.terms(config, model_fingerprint="a" * 64, total_steps=100, init_from_fingerprint="b" * 64)


def another(value: Any) -> Any:
    """A value of the same kind that is not this one."""
    match value:
        case bool():
            return not value
        case int():
            return value + 3
        case float():
            return value * 2 + 0.25
        case str():
            return "c" * 64 if len(value) == 64 else f"{value}-other"
        case list():
            return [another(item) for item in value] or ["given-now"]
        case None:
            return "given-now"
    raise AssertionError(value)


def test_every_setting_has_a_class_and_every_line_of_the_table_is_a_setting():
    known = set(settings())
    for key in known:
        class_of(key)
    assert set(FIELDS) - DERIVED - SECTIONS <= known
    assert set(FIELDS.values()) == {FATAL, CONFIRM, NOTE, FREE}
    for section in SECTIONS:
        assert FIELDS[section] == FREE


def test_the_table_in_the_documents_is_the_one_that_the_code_reads():
    text = (REPOSITORY / "docs" / "resume.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (fatal|confirm|note|free) \|", text, re.M)
    assert dict(rows) == FIELDS
    assert len(rows) == len(FIELDS)


def test_each_field_changed_once():
    """C113, C119: the message of every drift, reviewed as text: field, then, now, class, what to do."""
    then = first_terms()
    lines = []
    for field, drift_class in FIELDS.items():
        if drift_class == FREE:
            assert field not in then
            continue
        now = then | {field: another(then[field])}
        (drift,) = compare(then, now)
        assert (drift.field, drift.drift_class) == (field, drift_class)
        assert (drift.then, drift.now) == (then[field], now[field])
        _, row = table([drift])
        for part in (field, contract.show(drift.then), contract.show(drift.now), drift_class):
            assert part in row
        lines.append(re.sub(" {2,}", " | ", row.strip()))
        if drift_class in (FATAL, CONFIRM):
            with pytest.raises(ContractError, match=re.escape(field)):
                enforce([drift], [], "The run")
        assert (enforce([drift], [field], "The run") == [drift]) if drift_class == CONFIRM else True
        if drift_class == FATAL:
            with pytest.raises(ContractError):
                enforce([drift], [field], "The run")
    # What a version is changes with every release.
    lines = [line for line in lines if not line.startswith("code.")]
    lines = [re.sub(r"[0-9a-f]{12}…", "<digest>…", line) for line in lines]
    assert "\n".join(lines) + "\n" == GOLDEN.read_text()


def test_library_versions_are_noted():
    then = first_terms()
    drifts = compare(then, then | {"code.torch": "3.0", "code.vllm": "9.9"})
    assert [(drift.field, drift.drift_class) for drift in drifts] == [("code.torch", NOTE), ("code.vllm", NOTE)]
    assert enforce(drifts, [], "The run") == []


def free_changes() -> list[str]:
    return [
        "trainer.experiment_name=other", "trainer.project_name=other", "trainer.save_freq=50", "trainer.total_epochs=9",
        "checkpoint.keep_last=9", "checkpoint.best_metric=other", "s3.upload_interval=7", "retry.max_retries=9",
        "resume.policy=latest", "timeouts.step_s=9", "data.val_batch_size=3", "actor_rollout_ref.rollout.port=20100",
        "ray.object_store_bytes=314572801",
    ]  # fmt: skip


@pytest.mark.parametrize("change", free_changes())
def test_harmless_settings_may_change(change: str):
    """C121: e.g. a log's name."""
    then = contract.terms(load("quickstart"), model_fingerprint="m", total_steps=100)
    now = contract.terms(load("quickstart", [change]), model_fingerprint="m", total_steps=100)
    assert compare(then, now) == []


def test_a_setting_that_is_left_out_is_compared_by_its_default():
    then = first_terms()
    field = "actor_rollout_ref.rollout.n"
    drifts = compare(then | {field: 4}, then, given=frozenset())
    (drift,) = drifts
    assert not drift.given
    (_, row) = table(drifts)
    assert "8 (not given, the default)" in row and " 4 " in row


@pytest.mark.parametrize(("schedule", "drift_class"), [("constant", CONFIRM), ("cosine", FATAL)])
def test_total_steps_depend_on_the_schedule(schedule: str, drift_class: str):
    """C113: a longer cosine is another curve; a constant rate goes on as before."""
    then = first_terms() | {"actor_rollout_ref.actor.optim.lr_scheduler_type": schedule}
    (drift,) = compare(then, then | {"trainer.total_training_steps": 200})
    assert (drift.then, drift.now, drift.drift_class) == (100, 200, drift_class)


def test_both_parallel_sizes_are_named():
    """C119: saved with one tensor-parallel size, asked for with another."""
    field = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    with pytest.raises(ContractError) as raised:
        enforce([Drift(field, 1, 2, CONFIRM)], [], "The run")
    assert re.search(rf"{re.escape(field)} +1 +2 +confirm", raised.value.message)
    assert f"resume.allow=[{field}]" in raised.value.remedy


def test_a_record_of_an_older_release_is_compared_as_far_as_it_goes():
    now = first_terms()
    older = {"trainer.seed": now["trainer.seed"], "actor_rollout_ref.rollout.n": 3}
    assert [drift.field for drift in compare(older, now)] == ["actor_rollout_ref.rollout.n"]


def test_a_setting_that_an_older_record_does_not_have_was_its_default(tmp_path: Path):
    standing = standing_run.make(tmp_path)
    record = read_json(standing.run.record)
    del record["contract"]["data.train_max_samples"]
    # Older releases kept no digest of a function that is named by a dotted path.
    record["contract"]["custom_reward_function.source"] = ""
    write_json(standing.run.record, record)
    assert standing.prepare().waived == []
    with pytest.raises(ContractError, match=r"data\.train_max_samples +-1 +100 +fatal"):
        standing.prepare("data.train_max_samples=100")


FATAL_CHANGES = {
    "algorithm.adv_estimator": "rloo",
    "algorithm.norm_adv_by_std_in_grpo": "false",
    "algorithm.use_kl_in_reward": "true",
    "algorithm.kl_penalty": "k3",
    "algorithm.kl_ctrl.kl_coef": "0.5",
    "algorithm.filter_groups.enable": "true",
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": "3.0",
    "algorithm.mask_truncated": "true",
    "actor_rollout_ref.model.lora_rank": "8",
    "actor_rollout_ref.model.lora_alpha": "32",
    "actor_rollout_ref.model.target_modules": "[q_proj]",
    "actor_rollout_ref.rollout.stop": "[END]",
    "actor_rollout_ref.ref.refresh_freq": "10",
    "data.prompt_key": "question",
    "data.reward_fn_key": "source",
    "data.train_batch_size": "32",
    "data.max_prompt_length": "32",
    "data.max_response_length": "8",
    "data.filter_overlong_prompts": "false",
    "data.train_max_samples": "100",
    "data.val_max_samples": "10",
    "data.shuffle": "false",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "64",
    "actor_rollout_ref.actor.ppo_epochs": "2",
    "actor_rollout_ref.actor.clip_ratio": "0.3",
    "actor_rollout_ref.actor.clip_ratio_low": "0.1",
    "actor_rollout_ref.actor.clip_ratio_high": "0.28",
    "actor_rollout_ref.actor.clip_ratio_c": "3.0",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
    "actor_rollout_ref.actor.kl_loss_type": "mse",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "reward_model.overlong_buffer.enable": "true",
    "reward_model.overlong_buffer.len": "2",
    "reward_model.overlong_buffer.penalty_factor": "0.5",
    "actor_rollout_ref.actor.use_kl_loss": "false",
    "actor_rollout_ref.actor.kl_loss_coef": "0.5",
    "actor_rollout_ref.actor.entropy_coeff": "0.1",
    "actor_rollout_ref.actor.grad_clip": "2.0",
    "actor_rollout_ref.actor.optim.lr": "1e-5",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "1",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "0.1",
    "actor_rollout_ref.actor.optim.weight_decay": "0.5",
    "actor_rollout_ref.actor.optim.betas": "[0.8,0.9]",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "bf16",
    "actor_rollout_ref.rollout.n": "4",
    "actor_rollout_ref.rollout.temperature": "0.7",
    "actor_rollout_ref.rollout.dtype": "bfloat16",
    "custom_reward_function.name": "keepstep.rewards.exact_match.compute_score",
    "trainer.seed": "7",
}
"""Every fatal setting that has another value to give."""
ONE_VALUE = {
    "algorithm.kl_ctrl.type", "actor_rollout_ref.rollout.name", "model.fingerprint", "init_from.fingerprint",
}  # fmt: skip


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Standing:
    return standing_run.make(tmp_path_factory.mktemp("standing"))


def test_no_fatal_setting_is_left_out_here():
    assert {field for field, drift_class in FIELDS.items() if drift_class == FATAL} == {*FATAL_CHANGES, *ONE_VALUE}


@pytest.mark.parametrize("field", FATAL_CHANGES)
def test_a_fatal_drift_stops_the_start_and_changes_nothing(
    standing: Standing, field: str, capsys: pytest.CaptureFixture[str]
):
    """C118: through the real command; the run's folder is the same to the byte, and to the time of every file."""
    before = standing.content()
    status = main(["train", *standing.overrides(f"{field}={FATAL_CHANGES[field]}")])
    printed = capsys.readouterr()
    assert standing.content() == before
    if field in ("data.prompt_key", "data.reward_fn_key"):
        # There is no such column, which is said first.
        assert status == 4 and FATAL_CHANGES[field] in printed.err
        return
    assert status == EXIT_CONTRACT, printed.err
    assert re.search(rf"^  {re.escape(field)} +\S+.* fatal ", printed.err, re.M), printed.err


def test_the_same_settings_pass(standing: Standing):
    start = standing.prepare()
    assert (start.plan.step, start.waived, start.warnings) == (20, [], [])


def test_a_confirmed_change_is_waived(standing: Standing):
    change = "trainer.total_training_steps=80"
    with pytest.raises(ContractError, match=r"trainer.total_training_steps +60 +80 +confirm"):
        standing.prepare(change)
    start = standing.prepare(change, "resume.allow=[trainer.total_training_steps]")
    assert [drift.field for drift in start.waived] == ["trainer.total_training_steps"]


def test_same_path_other_content(tmp_path: Path):
    """C118: the files that differ are named."""
    standing = standing_run.make(tmp_path)
    (standing.model / "model.safetensors").write_bytes(b"x" * 64)
    (standing.model / "added.json").write_text("{}")
    with pytest.raises(ContractError) as raised:
        standing.prepare()
    assert f"model {standing.model} (the same path): added.json is new; model.safetensors has other content" in (
        raised.value.message
    )


def test_other_path_same_content_is_noted(tmp_path: Path):
    standing = standing_run.make(tmp_path)
    moved = tmp_path / "moved"
    shutil.move(standing.model, moved)
    (warning,) = standing.prepare(f"actor_rollout_ref.model.path={moved}").warnings
    assert str(standing.model) in warning and str(moved) in warning and "noted" in warning


def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with acme/tiny in it."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--acme--tiny"
    snapshot = standing_run.make_model(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_hub_id_is_the_folder_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same content under its hub id: noted."""
    hub_cache(tmp_path, monkeypatch)
    standing = standing_run.make(tmp_path)
    (warning,) = standing.prepare("actor_rollout_ref.model.path=acme/tiny").warnings
    assert "acme/tiny now" in warning


def test_a_hub_id_that_is_not_cached_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub_cache(tmp_path, monkeypatch)
    standing = standing_run.make(tmp_path)
    with pytest.raises(ConfigError) as raised:
        standing.prepare("actor_rollout_ref.model.path=acme/other")
    assert f"this run was started with {standing.model}" in raised.value.message
    assert "hf download acme/other" in raised.value.remedy


@pytest.mark.parametrize("below", ["", "actor", "tokenizer"])
def test_a_checkpoint_is_not_a_model(standing: Standing, below: str):
    """C124: what is meant is a resume or a warm start, and both are named."""
    folder = standing.run.checkpoint(20) / below
    with pytest.raises(ContractError) as raised:
        standing.prepare(f"actor_rollout_ref.model.path={folder}")
    assert "is a checkpoint of this run, not a model" in raised.value.message
    assert f"trainer.resume_from_checkpoint={standing.run.checkpoint(20)}" in raised.value.remedy
    assert f"trainer.init_from={standing.run.checkpoint(20)}" in raised.value.remedy


def test_a_changed_reward_file_needs_a_yes(tmp_path: Path):
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**_):\n    return 1.0\n")
    given = f"custom_reward_function.path={reward}"
    standing = standing_run.make(tmp_path, given)
    reward.write_text("def compute_score(**_):\n    return 0.0\n")
    with pytest.raises(ContractError, match=r"custom_reward_function\.source"):
        standing.prepare(given)
    (waived,) = standing.prepare(given, "resume.allow=[custom_reward_function.source]").waived
    assert waived.field == "custom_reward_function.source"


# warm start


def test_a_warm_start_is_another_verb(tmp_path: Path, standing: Standing):
    """C5, C124: weights of a checkpoint begin a new run at step 0; a resume is never meant by it."""
    source = standing.run.checkpoint(20)
    fresh = standing_run.make(tmp_path / "fresh", f"trainer.init_from={source}", step=None)
    start = fresh.prepare(f"trainer.init_from={source}")
    assert (start.plan.step, start.init_from) == (None, source)
    # It is begun with again until something is saved, so it is looked at again.
    weights = source / "actor" / "pytorch_model.bin"
    content = weights.read_bytes()
    weights.write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
    with pytest.raises(CheckpointError, match=r"init_from.*pytorch_model\.bin"):
        fresh.prepare(f"trainer.init_from={source}")
    weights.write_bytes(content)
    empty = tmp_path / "no-checkpoint"
    empty.mkdir()
    for given in (empty, standing.run.checkpoint(99)):
        with pytest.raises(ContractError, match=r"init_from\.fingerprint"):
            fresh.prepare(f"trainer.init_from={given}")
    # Not given again, it is what the run recorded; another one is another run.
    assert fresh.prepare().init_from == source
    other = standing_run.make(tmp_path / "other", step=40)
    with pytest.raises(ContractError, match=r"init_from\.fingerprint"):
        fresh.prepare(f"trainer.init_from={other.run.checkpoint(40)}")


def test_a_warm_start_needs_whole_weights(tmp_path: Path):
    standing = standing_run.make(tmp_path)
    weights = standing.run.checkpoint(20) / "actor" / "pytorch_model.bin"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(Exception, match=r"trainer\.init_from.*pytorch_model\.bin"):
        standing.prepare(f"trainer.output_dir={tmp_path / 'new'}", f"trainer.init_from={standing.run.checkpoint(20)}")


def test_weights_alone_are_no_resume(tmp_path: Path):
    """C5: where only an export stands, a resume says so."""
    standing = standing_run.make(tmp_path)
    export = standing_run.make_model(tmp_path / "export")
    with pytest.raises(Exception, match="cannot be resumed from"):
        standing.prepare(f"trainer.resume_from_checkpoint={export}")


def test_a_warm_start_and_a_resume_are_not_asked_for_together(standing: Standing):
    with pytest.raises(ConfigError, match=r"trainer\.init_from begins a new run"):
        standing.prepare("trainer.init_from=/a", "trainer.resume_from_checkpoint=/b")


# a lost scheduler


def test_a_lost_scheduler_is_an_error_that_can_be_waived(tmp_path: Path):
    """C115: never rebuilt silently, and never at another step than the checkpoint's."""
    standing = standing_run.make(tmp_path)
    (standing.run.checkpoint(20) / "actor" / "scheduler.pt").unlink()
    with pytest.raises(Exception, match=r"actor/scheduler\.pt") as raised:
        standing.prepare()
    assert "resume.allow=[scheduler] rebuilds it at the global step" in raised.value.remedy
    plan = standing.prepare("resume.allow=[scheduler]").plan
    assert (plan.step, plan.rebuild_scheduler) == (20, True)
    assert "its scheduler is lost and rebuilt at the global step" in plan.describe()[-1]
    # Of the last step it would stay lost: nothing is saved any more.
    last = "trainer.total_training_steps=20"
    with pytest.raises(CheckpointError, match=r"actor/scheduler\.pt"):
        standing.prepare(last, "resume.allow=[scheduler,trainer.total_training_steps]")


def test_a_stray_file_beside_a_scheduler_is_no_lost_scheduler(tmp_path: Path):
    standing = standing_run.make(tmp_path)
    (standing.run.checkpoint(20) / "actor" / "scheduler.pt.bak").write_text("")
    with pytest.raises(CheckpointError, match=r"scheduler\.pt\.bak"):
        standing.prepare("resume.allow=[scheduler]")


@pytest.mark.parametrize("name", ["actor/optimizer.pt", "trainer_state.json"])
def test_a_lost_optimizer_or_state_cannot_be_waived(tmp_path: Path, name: str):
    """C4, C101: with or without the waiver, and also beside a lost scheduler."""
    standing = standing_run.make(tmp_path)
    (standing.run.checkpoint(20) / name).unlink()
    (standing.run.checkpoint(20) / "actor" / "scheduler.pt").unlink()
    with pytest.raises(Exception, match=re.escape(name)):
        standing.prepare("resume.allow=[scheduler]")


def test_another_layout_version_names_both(tmp_path: Path):
    """C103, C104: which release wrote it, and what this one reads."""
    standing = standing_run.make(tmp_path)
    record = read_json(standing.run.record)
    record["contract"]["code.layout_version"] = 0
    record["contract"]["code.keepstep"] = "0.0.9"
    write_json(standing.run.record, record)
    warnings = standing.prepare().warnings
    assert any("code.layout_version: 0 at the first start, 1 now" in warning for warning in warnings)
    assert any("code.keepstep: 0.0.9 at the first start" in warning for warning in warnings)


# complete


def finish(standing: Standing, step: int) -> None:
    write_json(standing.run.result, {"final_step": step, "target_step": step, "uploaded": None})
    standing.run.config.write_text(to_yaml(standing.config(f"trainer.total_training_steps={step}")))


def test_a_complete_run_is_complete_for_the_same_start_only(tmp_path: Path):
    """C121: libraries may be newer by then; a longer run that was agreed to and did not get far is not complete."""
    standing = standing_run.make(tmp_path, "trainer.total_training_steps=20")
    finish(standing, 20)
    same = standing.config("trainer.total_training_steps=20")
    assert complete_result(same) is not None
    assert complete_result(standing.config("trainer.total_training_steps=20", "trainer.seed=7")) is None
    record = read_json(standing.run.record)
    record["contract"]["code.torch"] = "1.0"
    write_json(standing.run.record, record)
    assert complete_result(same) is not None
    record["contract"]["trainer.total_training_steps"] = 30
    write_json(standing.run.record, record)
    assert complete_result(standing.config("trainer.total_training_steps=30")) is None
    assert complete_result(standing.config("trainer.total_training_steps=20", "trainer.debug=true")) is None


def test_other_data_is_refused_with_what_the_position_would_mean(standing: Standing, tmp_path: Path):
    """C2, C16: rows then and now, and which rows would come again."""
    other = standing_run.make_data(tmp_path / "other.parquet", num_rows=50)
    with pytest.raises(DataError) as raised:
        standing.prepare(f"data.train_files={other}")
    assert "640 rows expected, 50 found" in raised.value.message
    # builder's checkpoint of step 20 has handed out 80 rows.
    assert "80" in raised.value.message


# what people type


def test_a_run_is_not_shortened(standing: Standing):
    """Step 20 stands: a goal of 10 could only be missed."""
    before = standing.content()
    with pytest.raises(ConfigError, match="has a checkpoint of step 20, and a run of 10 steps is asked for"):
        standing.prepare("trainer.total_training_steps=10", "resume.allow=[trainer.total_training_steps]")
    assert standing.content() == before


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("total_training_steps", "the nearest is trainer.total_training_steps"),
        ("trainer.total_trainings_steps", "the nearest is trainer.total_training_steps"),
        ("trainer.seed", "trainer.seed is fatal: its change is never accepted"),
        ("optimizer", "'optimizer' is no field of the contract"),
        ("trainer.save_freq", "may change freely"),
    ],
)
def test_a_waiver_that_means_nothing_is_refused(standing: Standing, name: str, part: str):
    with pytest.raises(ConfigError) as raised:
        standing.prepare(f"resume.allow=[{name}]")
    assert part in raised.value.message


def test_a_torn_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    standing = standing_run.make(tmp_path)
    standing.run.config.write_text(to_yaml(standing.config()))
    standing.run.record.write_bytes(standing.run.record.read_bytes()[:700])
    for command in (["train", *standing.overrides()], ["plan", str(standing.run.root)]):
        assert main(command) == EXIT_CONTRACT
        printed = capsys.readouterr().err
        assert f"{standing.run.record} is damaged" in printed and "Traceback" not in printed


def test_one_checkpoint_that_is_asked_for_says_what_that_gives_up(tmp_path: Path):
    standing = standing_run.make(tmp_path)
    standing_run.builder.write(standing.run, 40, reference_step=20)
    plan = standing.prepare(f"trainer.resume_from_checkpoint={standing.run.checkpoint(20)}").plan
    assert plan.describe()[-1] == "resumes at step 20 (local, verified, asked for; newest is 40: 20 steps given up)"
    with pytest.raises(CheckpointError, match="holds all checkpoints"):
        standing.prepare(f"trainer.resume_from_checkpoint={standing.run.checkpoints}")


def test_a_warm_start_needs_no_optimizer(tmp_path: Path):
    """A lost optimizer ends the resume, not the use of the weights."""
    standing = standing_run.make(tmp_path)
    (standing.run.checkpoint(20) / "actor" / "optimizer.pt").unlink()
    start = standing.prepare(
        f"trainer.output_dir={tmp_path / 'new'}", f"trainer.init_from={standing.run.checkpoint(20)}"
    )
    assert (start.plan.step, start.init_from) == (None, standing.run.checkpoint(20))


@pytest.mark.parametrize(
    ("setting", "part"),
    [("s3.endpoint_url=http://a:1", "s3.bucket is not"), ("ray.address=10.0.0.1:6379", "http://HEAD:8265")],
)
def test_half_an_address_is_refused(standing: Standing, setting: str, part: str):
    with pytest.raises(ConfigError) as raised:
        standing.prepare(setting)
    assert part in raised.value.message
