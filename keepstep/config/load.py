"""From a YAML file and `key=value` overrides to a checked configuration, and back to text."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from keepstep.config.elsewhere import elsewhere
from keepstep.config.schema import RunConfig, Section
from keepstep.errors import ConfigError

DEFAULT = "quickstart"
_PACKAGE = Path(__file__).resolve().parent
# A checkout has the files beside the package, a wheel inside it.
_FOLDERS = (_PACKAGE.parents[1] / "configs", _PACKAGE / "files")
_OVERRIDE = re.compile(r"(?:--|\+{0,2})([A-Za-z_][\w.]*)(\+?)=(.*)", re.DOTALL)


def load(config: str | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a start.

    Args:
        config: path of a YAML file or name of a packaged one; None is the quickstart.
        overrides: `a.b.c=value`, also written `--a.b.c=value` or `+a.b.c=value`; values are YAML, later ones win;
            `a.b.c+=value` adds to a list.

    Raises:
        ConfigError: no such file, not YAML, unknown keys (each with the nearest known one), or values of a wrong kind.
    """
    path = find(config or DEFAULT)
    given = _flatten(_read(path), str(path))
    for override in overrides:
        key, value, adds = _parse_override(override)
        given[key] = [*_listed(given.get(key)), value] if adds else value
    _refuse_unknown(given)
    try:
        return RunConfig.model_validate(_nest(given))
    except ValidationError as error:
        raise ConfigError(
            f"Configuration {path}{' with what was given beside it' if overrides else ''}:\n  "
            + "\n  ".join(_problems(error)),
            "Correct these values.",
        ) from None


def _listed(value: Any) -> list[Any]:
    """What `+=` adds to: a list, or what stands where a list might."""
    return value if isinstance(value, list) else [] if value is None else [value]


def as_overrides(parameters: dict[str, Any]) -> list[str]:
    """A deployment's settings as they would be written on the command line, where a text is what YAML makes of it."""
    return [f"{key}={_as_typed(value)}" for key, value in parameters.items()]


def _as_typed(value: Any) -> str:
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def find(name: str) -> Path:
    """The file that `name` stands for: a path, else a packaged configuration."""
    if Path(name).is_file():
        return Path(name)
    packaged = {path.stem: path for folder in reversed(_FOLDERS) for path in folder.glob("*.yaml")}
    if name in packaged:
        return packaged[name]
    raise ConfigError(f"--config {name}: no such file.", f"Give a YAML file or one of: {', '.join(sorted(packaged))}.")


def to_dotted(config: RunConfig) -> list[str]:
    """Every setting as `key=value`, in the schema's order; each line is a valid override."""
    return [f"{key}={_text(value)}" for key, value in leaves(config.model_dump(mode="json"))]


def to_yaml(config: RunConfig) -> str:
    """YAML that loads to the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def given_keys(config: RunConfig) -> frozenset[str]:
    """Dotted keys of the settings that were stated, in a file or on the command line; the others are defaults."""
    return frozenset(key for key, _ in leaves(config.model_dump(mode="json", exclude_unset=True)))


def without_asked_checkpoint(config: RunConfig) -> RunConfig:
    """`trainer.resume_from_checkpoint` holds for the first attempt of a start; later ones go on from what it saved."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"resume_from_checkpoint": None})})


def without_what_holds_once(config: RunConfig) -> RunConfig:
    """Nor does `resume.allow` hold for another start: what it has allowed is in the run's record."""
    config = without_asked_checkpoint(config)
    return config.model_copy(update={"resume": config.resume.model_copy(update={"allow": []})})


def resolve_total_steps(config: RunConfig, num_rows: int) -> int:
    """Steps of the run: `trainer.total_training_steps`, else what `trainer.total_epochs` passes over the rows give.

    Args:
        num_rows: of the training files; `data.train_max_samples` may leave fewer.

    Raises:
        ConfigError: that is not even one step.
    """
    trainer, batch = config.trainer, config.data.train_batch_size
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    cap = config.data.train_max_samples
    num_rows = num_rows if cap < 0 else min(num_rows, cap)
    total = trainer.total_epochs * num_rows // batch
    if total < 1:
        raise ConfigError(
            f"{trainer.total_epochs} epochs (trainer.total_epochs) of {num_rows} rows are less than one batch of "
            f"{batch} (data.train_batch_size).",
            "Set a smaller data.train_batch_size, more epochs, or trainer.total_training_steps.",
        )
    return total


def validate(config: RunConfig) -> list[str]:
    """Check settings against each other; returns warnings.

    Raises:
        ConfigError: settings that contradict each other, all of them, each with both values and the way out.
    """
    problems = [
        *_check_batches(config),
        *_check_algorithm(config),
        *_check_frequencies(config),
        *_check_ranks(config),
    ]
    if "@" in (config.s3.endpoint_url or ""):
        # Without its value, which is the secret, and which config.yaml and the log would keep.
        problems.append("s3.endpoint_url carries credentials: give them to AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    elif config.s3.embedded and config.s3.endpoint_url is not None:
        problems.append(
            f"s3.embedded=true starts a server of its own, but s3.endpoint_url={config.s3.endpoint_url} names another: "
            "set s3.embedded=false or leave the endpoint out"
        )
    if config.s3.endpoint_url and not config.s3.bucket and not config.s3.embedded:
        problems.append("s3.endpoint_url is given and s3.bucket is not: nothing would be uploaded; name the bucket")
    if config.ray.address and not config.ray.address.startswith(("http://", "https://")):
        problems.append(
            f"ray.address={config.ray.address}: the address of the cluster's job server is needed, http://HEAD:8265"
        )
    if config.trainer.init_from and config.trainer.resume_from_checkpoint:
        problems.append(
            "trainer.init_from begins a new run from weights, trainer.resume_from_checkpoint goes on with this one: "
            "give one of them"
        )
    if problems:
        raise ConfigError("Settings that do not go together:\n  " + "\n  ".join(problems))
    return _warnings(config)


def _check_batches(config: RunConfig) -> Iterator[str]:
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    ranks = config.world_size
    if batch % mini:
        yield (
            f"data.train_batch_size={batch} is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}: "
            f"set the latter to a divisor of {batch}"
        )
    if mini % ranks:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} prompts cannot be dealt evenly to {ranks} ranks "
            f"(trainer.nnodes * trainer.n_gpus_per_node): make it a multiple of {ranks}"
        )
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    longest = config.data.max_prompt_length + config.data.max_response_length
    budgets = {
        "actor.ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        "ref.log_prob_max_token_len_per_gpu": ref.log_prob_max_token_len_per_gpu or longest,
    }
    for key, budget in budgets.items():
        if actor.use_dynamic_bsz and budget < longest:
            yield (
                f"actor_rollout_ref.{key}={budget} is less than one sequence may take, {longest} tokens "
                f"(data.max_prompt_length + data.max_response_length): give {longest} at least"
            )


def _check_algorithm(config: RunConfig) -> Iterator[str]:
    overlong, limit = config.reward_model.overlong_buffer, config.data.max_response_length
    if overlong.enable and overlong.len > limit:
        yield (
            f"reward_model.overlong_buffer.len={overlong.len} is longer than data.max_response_length={limit}: "
            f"give at most {limit}"
        )
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.n > 1 and val.temperature == 0:
        yield (
            f"actor_rollout_ref.rollout.val_kwargs.n={val.n} greedy responses are all the same: give "
            "val_kwargs.temperature, as 1.0, or one response"
        )
    if config.algorithm.adv_estimator == "grpo_passk" and config.actor_rollout_ref.rollout.n == 1:
        yield "algorithm.adv_estimator=grpo_passk compares the best response with the second: rollout.n of 2 at least"
    if config.algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        yield "algorithm.filter_groups.enable=true drops every group of one: rollout.n of 2 at least"


def _check_frequencies(config: RunConfig) -> Iterator[str]:
    trainer, ref, model = config.trainer, config.actor_rollout_ref.ref, config.actor_rollout_ref.model
    frequencies = {
        "trainer.save_freq": trainer.save_freq,
        "trainer.test_freq": trainer.test_freq,
        "actor_rollout_ref.ref.refresh_freq": ref.refresh_freq,
    }
    for key, value in frequencies.items():
        if value == 0 or value < -1:
            yield f"{key}={value}: a number of steps from 1, or -1"
    if ref.refresh_freq > 0 and model.lora_rank:
        yield (
            f"actor_rollout_ref.ref.refresh_freq={ref.refresh_freq}, but with actor_rollout_ref.model.lora_rank="
            f"{model.lora_rank} the reference is the base model: leave one of them out"
        )


def _check_ranks(config: RunConfig) -> Iterator[str]:
    fsdp, key = config.actor_rollout_ref.actor.fsdp_config, "actor_rollout_ref.actor.fsdp_config"
    if fsdp.optimizer_offload not in (None, fsdp.param_offload):
        yield (
            f"{key}.optimizer_offload={str(fsdp.optimizer_offload).lower()}, but {key}.param_offload="
            f"{str(fsdp.param_offload).lower()}: FSDP2 keeps AdamW's moments where the parameters are; leave the "
            "former out, or give both the same value"
        )
    lora_rank = config.actor_rollout_ref.model.lora_rank
    if config.actor_rollout_ref.actor.use_torch_compile and lora_rank:
        yield (
            f"actor_rollout_ref.actor.use_torch_compile=true, but actor_rollout_ref.model.lora_rank={lora_rank}: "
            "layers with adapters do not compile for sizes that the compiler cannot see; leave one of them out"
        )


def _warnings(config: RunConfig) -> list[str]:
    found = []
    save_freq, multiple = config.trainer.save_freq, config.resume.prefer_multiple
    if save_freq == -1:
        found.append("trainer.save_freq=-1: nothing is saved before the last step; a kill loses the whole run.")
    elif config.resume.policy == "prefer_multiple" and multiple % save_freq:
        found.append(
            f"trainer.save_freq={save_freq} does not divide resume.prefer_multiple={multiple}: "
            "few checkpoints, or none, will be multiples that a resume prefers."
        )
    if config.trainer.test_freq > 0 and not config.data.val_files:
        found.append(
            f"trainer.test_freq={config.trainer.test_freq}, but data.val_files is not set: nothing is validated."
        )
    if config.actor_rollout_ref.rollout.n == 1:
        found.append("actor_rollout_ref.rollout.n=1: a group of one has no advantage, so the policy does not learn.")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a mapping of sections is expected, found a {type(found).__name__}.")
    return found


def _parse_override(text: str) -> tuple[str, Any, bool]:
    """(key, value, whether the value is added to a list)."""
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text}: not understood.", "Write settings as key=value, e.g. trainer.save_freq=10.")
    key, adds, raw = match.groups()
    try:
        value = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError):
        if raw[:1] in ("[", "{"):
            raise ConfigError(
                f"{text}: the value is not YAML.", "Write a list as [a,b], and quote what begins with *."
            ) from None
        # A glob such as *.parquet is no YAML, and means itself.
        value = raw
    scalar = not isinstance(value, (str, list, dict, types.NoneType))
    # `trainer.experiment_name=2024` means the text, although YAML reads a number.
    return key, raw if scalar and str in _types(_known().get(key)) else value, bool(adds)


def _refuse_unknown(given: dict[str, Any]) -> None:
    unknown = [key for key in given if key not in _known()]
    if not unknown:
        return
    lines = []
    for key in unknown:
        refused = elsewhere(key)
        if refused:
            lines.append(f"{key}: {refused}")
            continue
        below = [known for known in _known() if known.startswith(f"{key}.")]
        nearest = _nearest(key)
        if below:
            lines.append(f"{key} is a section, not a setting; it has {', '.join(below[:3])}, …")
        else:
            lines.append(f"{key} is not a setting" + (f"; the nearest is {nearest}" if nearest else ""))
    raise ConfigError("Unknown settings:\n  " + "\n  ".join(lines), "See all of them: keepstep run --dry-run")


def _nearest(key: str) -> str | None:
    """The known key that was probably meant: the same name in another section, else the most similar spelling."""
    known = list(_known())
    same_end = [candidate for candidate in known if candidate.endswith(f".{_last(key)}")]
    if same_end:
        return max(same_end, key=lambda candidate: difflib.SequenceMatcher(None, key, candidate).ratio())
    similar = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if similar:
        return similar[0]
    by_end = {_last(candidate): candidate for candidate in known}
    ends = difflib.get_close_matches(_last(key), by_end, n=1, cutoff=0.7)
    return by_end[ends[0]] if ends else None


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _problems(error: ValidationError) -> list[str]:
    """One line per setting: the key, what was given, what is allowed."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        key = _key_of(problem["loc"])
        if problem["type"] == "missing":
            lines[key] = f"{key}: not set, and it has no default"
        elif key in lines:
            lines[key] += f", or: {problem['msg']}"
        else:
            lines[key] = f"{key}={problem['input']!r}: {problem['msg']}"
    return list(lines.values())


def _key_of(location: tuple[int | str, ...]) -> str:
    """The setting at an error's location; behind it stand branches of unions and list indices."""
    for length in range(1, len(location) + 1):
        key = ".".join(str(part) for part in location[:length])
        if key in _known():
            return key
    return ".".join(str(part) for part in location)


def defaults() -> dict[str, Any]:
    """Dotted key to default of every setting that has one."""
    return dict(_defaults(RunConfig, ""))


def _defaults(section: type[Section] | type[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _defaults(field.annotation, f"{prefix}{name}.")
        elif not field.is_required():
            yield f"{prefix}{name}", list(field.default) if isinstance(field.default, tuple) else field.default


def settings() -> list[str]:
    """The dotted keys of all settings, in the schema's order."""
    return list(_known())


def _known() -> dict[str, Any]:
    """Dotted key to type of every setting."""
    if not _KNOWN:
        _KNOWN.update(_settings(RunConfig, ""))
    return _KNOWN


_KNOWN: dict[str, Any] = {}


def _settings(section: type[Section] | type[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _settings(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation


def _types(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _flatten(values: dict[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested sections; an empty section has none."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        is_section = key not in _known() and any(known.startswith(f"{key}.") for known in _known())
        if is_section and isinstance(value, dict):
            found |= _flatten(value, where, f"{key}.")
        elif not (is_section and value is None):
            found[key] = value
    return found


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    # Sections without a default are there even when nothing in them is set, so that the error names the setting.
    nested: dict[str, Any] = {}
    for key in _known():
        *sections, name = key.split(".")
        level = nested
        for section in sections:
            level = level.setdefault(section, {})
        if key in flat:
            level[name] = flat[key]
    return nested


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf of nested dictionaries."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    """Plain where YAML reads it back as the same text, else JSON, which is YAML as well."""
    if isinstance(value, str):
        try:
            if yaml.safe_load(value) == value:
                return value
        except (yaml.YAMLError, ValueError):
            pass
    return json.dumps(value)
