"""Loading a configuration: files, overrides, refusals, cross-field checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.config.load import find, given_keys, load, resolve_total_steps, to_dotted, to_yaml, validate
from keepstep.config.schema import RunConfig
from keepstep.errors import EXIT_USAGE, ConfigError

MINIMAL = """
algorithm: {adv_estimator: grpo}
data: {train_files: a.parquet}
actor_rollout_ref: {model: {path: some/model}}
trainer: {output_dir: out}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return str(path)


def refusal(config: str | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(config, overrides)
    assert caught.value.exit_code == EXIT_USAGE
    text = str(caught.value)
    assert "pydantic" not in text and "Traceback" not in text
    return text


def test_no_file_is_the_quickstart() -> None:
    assert load() == load("quickstart")
    assert load().trainer.total_training_steps == 100
    assert load().actor_rollout_ref.model.path == "made:char-qwen3"


def test_the_estimator_is_stated_and_never_inferred(tmp_path: Path) -> None:
    path = tmp_path / "silent.yaml"
    path.write_text(MINIMAL.replace("algorithm: {adv_estimator: grpo}\n", ""))
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator: not set"):
        load(str(path))


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", "FSDP2"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size", "FSDP2"),
        ("actor_rollout_ref.model.use_liger", "not implemented"),
        ("actor_rollout_ref.rollout.sglang.mem_fraction", "vLLM"),
        ("trainer.default_local_dir", "trainer.output_dir"),
        ("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last"),
    ],
)
def test_settings_of_other_trainers_are_refused_by_name(minimal: str, key: str, part: str) -> None:
    """Model options that change the state dict, and sizes that this trainer does not have."""
    with pytest.raises(ConfigError) as raised:
        load(minimal, [f"{key}=2"])
    assert key in raised.value.message and part in raised.value.message


def test_keys_that_were_stated_survive_the_way_to_the_trainer(minimal: str) -> None:
    config = load(minimal, ["trainer.seed=7"])
    sent = RunConfig.model_validate_json(config.model_dump_json(exclude_unset=True))
    assert sent == config
    assert given_keys(sent) == given_keys(config)
    assert "trainer.seed" in given_keys(config) and "trainer.nnodes" not in given_keys(config)


def test_a_flag_adds_to_what_a_file_allows(minimal: str) -> None:
    """`--ignore_mismatched_sizes` beside `resume.allow` of the file."""
    Path(minimal).write_text(MINIMAL + "resume: {allow: [scheduler]}\n")
    assert load(minimal, ["resume.allow+=mismatched_sizes"]).resume.allow == ["scheduler", "mismatched_sizes"]
    assert load(minimal, ["data.train_files=a.parquet", "data.train_files+=b.parquet"]).data.train_files == [
        "a.parquet", "b.parquet"
    ]  # fmt: skip
    assert load(minimal, ["resume.allow=[probe]", "resume.allow+=exactness"]).resume.allow == ["probe", "exactness"]


def test_documented_defaults(minimal: str) -> None:
    config = load(minimal)
    assert config.trainer.save_freq == 20
    assert config.s3.upload_interval == 100
    assert (config.checkpoint.keep_last, config.checkpoint.keep_every) == (3, 100)
    assert config.resume.prefer_multiple == 100
    assert (config.retry.max_retries, config.retry.delays_s, config.retry.jitter) == (3, [2.0, 10.0, 30.0], 0.3)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("trainer.save_freq=7", lambda c: c.trainer.save_freq, 7),
        ("--trainer.save_freq=7", lambda c: c.trainer.save_freq, 7),
        ("+trainer.save_freq=7", lambda c: c.trainer.save_freq, 7),
        ("++trainer.save_freq=7", lambda c: c.trainer.save_freq, 7),
        ("trainer.test_freq=-1", lambda c: c.trainer.test_freq, -1),
        ("trainer.debug=True", lambda c: c.trainer.debug, True),
        ("data.train_files=[a,b]", lambda c: c.data.train_files, ["a", "b"]),
        ("data.train_files=['*.parquet',b]", lambda c: c.data.train_files, ["*.parquet", "b"]),
        ("data.train_files=*.parquet", lambda c: c.data.train_files, "*.parquet"),
        ("data.val_files=null", lambda c: c.data.val_files, None),
        ("data.train_files=s3://b/k=1.parquet", lambda c: c.data.train_files, "s3://b/k=1.parquet"),
        # YAML reads a number, a date and a truth value here; the setting is text.
        ("trainer.experiment_name=2024", lambda c: c.trainer.experiment_name, "2024"),
        ("trainer.experiment_name=2024-01-02", lambda c: c.trainer.experiment_name, "2024-01-02"),
        ("trainer.experiment_name=2024-13-45", lambda c: c.trainer.experiment_name, "2024-13-45"),
        ("trainer.experiment_name=on", lambda c: c.trainer.experiment_name, "on"),
        # YAML 1.1 takes an exponent without a point for text.
        ("actor_rollout_ref.actor.optim.lr=5e-7", lambda c: c.actor_rollout_ref.actor.optim.lr, 5e-7),
        ("actor_rollout_ref.actor.optim.betas=[0.8,0.9]", lambda c: c.actor_rollout_ref.actor.optim.betas, (0.8, 0.9)),
    ],
)
def test_override(override, read, value) -> None:
    assert read(load("quickstart", [override])) == value


def test_the_later_override_wins() -> None:
    assert load(None, ["trainer.seed=1", "trainer.seed=2"]).trainer.seed == 2


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("trainer.save_freqs", "trainer.save_freq"),
        ("trainer.sav_freq", "trainer.save_freq"),
        ("save_freq", "trainer.save_freq"),
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.actor.learning.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("data.val_file", "data.val_files"),
    ],
)
def test_unknown_key_names_the_nearest(given: str, nearest: str) -> None:
    assert f"{given} is not a setting; the nearest is {nearest}\n" in refusal(None, f"{given}=1")


def test_unknown_key_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text(MINIMAL + "resume: {prefer_multiples: 10}\nretries: {max: 3}\n")
    text = refusal(str(path))
    assert "resume.prefer_multiples is not a setting; the nearest is resume.prefer_multiple" in text
    assert "retries is not a setting" in text


@pytest.mark.parametrize("key", ["s3.access_key", "s3.secret_access_key", "s3.key"])
def test_secrets_have_no_setting(key: str) -> None:
    text = refusal(None, f"{key}=hunter2")
    assert f"{key} is not a setting" in text
    assert "hunter2" not in text


def test_a_section_is_not_a_setting() -> None:
    assert "trainer.optim is not a setting" in refusal(None, "trainer.optim=1")
    assert "checkpoint is a section, not a setting" in refusal(None, "checkpoint=full")


def test_every_bad_value_is_named_at_once() -> None:
    text = refusal(
        None,
        "trainer.save_freq=ten",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=0",
        "actor_rollout_ref.actor.fsdp_config.param_offload=gpu",
        "actor_rollout_ref.rollout.temperature=0",
        "actor_rollout_ref.actor.optim.lr=nan",
        "retry.delays_s=[1,soon]",
        "data.train_files={a: 1}",
    )
    for part in (
        "trainer.save_freq='ten'",
        "algorithm.adv_estimator='gae': Input should be 'grpo', 'dr_grpo', 'rloo' or 'grpo_passk'",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=0: Input should be greater than 0",
        "actor_rollout_ref.actor.fsdp_config.param_offload='gpu': Input should be a valid boolean",
        "actor_rollout_ref.rollout.temperature=0: Input should be greater than 0",
        "actor_rollout_ref.actor.optim.lr='nan': Input should be a finite number",
        "retry.delays_s='soon'",
        "data.train_files={'a': 1}",
    ):
        assert part in text


def test_missing_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("trainer:\n")
    text = refusal(str(path))
    for key in ("data.train_files", "actor_rollout_ref.model.path", "trainer.output_dir"):
        assert f"{key}: not set" in text


@pytest.mark.parametrize("override", ["save", "trainer.seed", "=3", "--debugging", "a b=3"])
def test_what_is_no_setting_is_refused(override: str) -> None:
    assert f"{override}: not understood" in refusal(None, override)


def test_a_list_that_is_no_yaml_is_not_taken_for_a_name() -> None:
    assert "the value is not YAML" in refusal(None, "data.train_files=[*.parquet]")


@pytest.mark.parametrize("content", ["- a\n", "just text", "a: [b", "\xff\xfe"])
def test_a_file_that_is_no_mapping(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content.encode("latin-1"))
    assert str(path) in refusal(str(path))


def test_a_file_that_is_not_there() -> None:
    text = refusal("no/such/file.yaml")
    assert "no/such/file.yaml" in text and "quickstart" in text


def test_a_path_comes_before_a_packaged_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    assert load("quickstart").trainer.output_dir == "out"
    assert find("quickstart") == Path("quickstart")


TRICKY = [
    "trainer.experiment_name='null'",
    "data.train_files=['a b', '2024', 'x: y', '#z']",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "s3.prefix='true'",
    "trainer.output_dir='  spaces '",
    "resume.allow=[trainer.device]",
]


def test_dotted_lines_load_to_the_same() -> None:
    config = load(None, TRICKY)
    assert config.trainer.experiment_name == "null"
    assert load("quickstart", to_dotted(config)) == config


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = load(None, TRICKY)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(str(path)) == config


def test_dotted_lines_have_every_setting(minimal: str) -> None:
    lines = to_dotted(load(minimal))
    assert "trainer.seed=42" in lines
    assert "actor_rollout_ref.actor.optim.lr=1e-06" in lines
    assert "data.val_files=null" in lines
    assert "data.shuffle=true" in lines
    assert lines.index("algorithm.adv_estimator=grpo") < lines.index("data.train_files=a.parquet")


@pytest.mark.parametrize(
    ("overrides", "num_rows", "expected"),
    [
        (["trainer.total_training_steps=40"], 640, 40),
        (["trainer.total_training_steps=null", "trainer.total_epochs=3"], 640, 30),
        # Batches go across the ends of epochs, so the remainders of all epochs count together.
        (["trainer.total_training_steps=null", "trainer.total_epochs=2"], 96, 3),
        (["trainer.total_training_steps=null", "trainer.total_epochs=1"], 127, 1),
    ],
)
def test_total_steps(overrides: list[str], num_rows: int, expected: int) -> None:
    assert resolve_total_steps(load(None, overrides), num_rows) == expected


def test_not_one_step() -> None:
    config = load(None, ["trainer.total_training_steps=null"])
    with pytest.raises(ConfigError, match=r"1 epochs .* of 63 rows are less than one batch of 64"):
        resolve_total_steps(config, 63)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.train_batch_size=60"], ["data.train_batch_size=60", "ppo_mini_batch_size=32"]),
        (["trainer.n_gpus_per_node=3"], ["ppo_mini_batch_size=32", "3 ranks"]),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=3"], ["6 ranks"]),
        (["trainer.save_freq=0"], ["trainer.save_freq=0"]),
        (["trainer.save_freq=-2"], ["trainer.save_freq=-2"]),
        (["trainer.test_freq=0"], ["trainer.test_freq=0"]),
        (["actor_rollout_ref.ref.refresh_freq=0"], ["ref.refresh_freq=0"]),
        (
            ["actor_rollout_ref.ref.refresh_freq=5", "actor_rollout_ref.model.lora_rank=4"],
            ["refresh_freq=5", "lora_rank=4", "leave one of them out"],
        ),
        (
            ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"],
            ["optimizer_offload=true", "param_offload=false", "the same value"],
        ),
        (
            ["actor_rollout_ref.actor.use_torch_compile=true", "actor_rollout_ref.model.lora_rank=4"],
            ["use_torch_compile=true", "lora_rank=4", "leave one of them out"],
        ),
        (["actor_rollout_ref.rollout.val_kwargs.n=4"], ["val_kwargs.n=4", "val_kwargs.temperature"]),
        (["s3.endpoint_url=http://localhost:9000"], ["s3.embedded=true", "s3.endpoint_url=http://localhost:9000"]),
        (["trainer.save_freq=0", "data.train_batch_size=60"], ["trainer.save_freq=0", "data.train_batch_size=60"]),
    ],
)
def test_contradictions_are_refused(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load(None, overrides))
    for part in parts:
        assert part in str(caught.value)


def test_the_quickstart_has_no_warnings() -> None:
    assert validate(load()) == []


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("trainer.save_freq=30", "trainer.save_freq=30 does not divide resume.prefer_multiple=100"),
        ("trainer.save_freq=200", "trainer.save_freq=200 does not divide resume.prefer_multiple=100"),
        ("trainer.save_freq=-1", "trainer.save_freq=-1"),
        ("data.val_files=null", "data.val_files is not set"),
        ("actor_rollout_ref.rollout.n=1", "rollout.n=1"),
    ],
)
def test_warnings(override: str, part: str) -> None:
    """C40 for save_freq=-1."""
    (warning,) = validate(load(None, [override]))
    assert part in warning


def test_no_warning_where_multiples_are_not_preferred() -> None:
    assert validate(load(None, ["trainer.save_freq=30", "resume.policy=latest"])) == []


def test_a_token_budget_holds_the_longest_sequence(tmp_path: Path) -> None:
    """Only where micro-batches are cut by tokens; the other budget is as large by default."""
    path = tmp_path / "budget.yaml"
    path.write_text(MINIMAL)
    sizes = ["data.max_prompt_length=20", "data.max_response_length=30"]
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    load(str(path), [*sizes, f"{budget}=49"])
    dynamic = [*sizes, "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    validate(load(str(path), [*dynamic, f"{budget}=50"]))
    with pytest.raises(ConfigError, match=rf"{budget}=49 .* 50 tokens"):
        validate(load(str(path), [*dynamic, f"{budget}=49"]))
    with pytest.raises(ConfigError, match=r"ref\.log_prob_max_token_len_per_gpu=49 "):
        validate(load(str(path), [*dynamic, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=49"]))
