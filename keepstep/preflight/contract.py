"""The resume contract: what a run recorded at its first start, and what a later start may change.

`FIELDS` is the table. `fatal` stops; `confirm` stops unless `resume.allow` names the field, and then the promise of
exact bytes is waived in writing. A field that is not here may change freely.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.errors import ContractError
from keepstep.preflight.device import resolve_device

FATAL, CONFIRM = "fatal", "confirm"
EXACTNESS = "exactness"
"""Name in `resume.allow` that waives the comparison of a replayed step with the standing one."""

FIELDS: dict[str, str] = {
    "model.fingerprint": FATAL,
    "algorithm.adv_estimator": FATAL,
    "algorithm.norm_adv_by_std_in_grpo": FATAL,
    "data.train_batch_size": FATAL,
    "data.max_prompt_length": FATAL,
    "data.max_response_length": FATAL,
    "data.filter_overlong_prompts": FATAL,
    "data.shuffle": FATAL,
    "data.prompt_key": FATAL,
    "actor_rollout_ref.rollout.n": FATAL,
    "actor_rollout_ref.rollout.temperature": FATAL,
    "actor_rollout_ref.rollout.dtype": FATAL,
    "actor_rollout_ref.actor.ppo_mini_batch_size": FATAL,
    "actor_rollout_ref.actor.ppo_epochs": FATAL,
    "actor_rollout_ref.actor.clip_ratio": FATAL,
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
    "actor_rollout_ref.actor.fsdp_config.model_dtype": FATAL,
    "custom_reward_function.name": FATAL,
    "custom_reward_function.source": CONFIRM,
    "data.reward_fn_key": FATAL,
    "trainer.seed": FATAL,
    "trainer.total_training_steps": CONFIRM,
    "trainer.nnodes": CONFIRM,
    "trainer.n_gpus_per_node": CONFIRM,
    "trainer.device": CONFIRM,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": CONFIRM,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": CONFIRM,
    "checkpoint.layout": CONFIRM,
}


@dataclass(frozen=True)
class Drift:
    """One field that is not what it was."""

    field: str
    then: Any
    now: Any
    drift_class: str


def terms(config: RunConfig, *, model_fingerprint: str, total_steps: int) -> dict[str, Any]:
    """The contract's fields with their values of this start."""
    values = config.model_dump(mode="json")
    found: dict[str, Any] = {}
    for field in FIELDS:
        if field == "model.fingerprint":
            found[field] = model_fingerprint
        elif field == "trainer.total_training_steps":
            found[field] = total_steps
        elif field == "trainer.device":
            found[field] = resolve_device(config.trainer.device)
        elif field == "custom_reward_function.source":
            found[field] = _source_digest(config.custom_reward_function.path)
        else:
            value: Any = values
            for key in field.split("."):
                value = value[key]
            found[field] = value
    return found


def _source_digest(path: str | None) -> str:
    """SHA-256 of a reward's file; empty for a dotted path, whose package has its own version."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else ""


def compare(then: dict[str, Any], now: dict[str, Any]) -> list[Drift]:
    """Fields whose values differ. A field that one side does not have (another version) is skipped. Pure."""
    schedule_depends_on_total = now.get("actor_rollout_ref.actor.optim.lr_scheduler_type") != "constant"
    drifts = []
    for field, drift_class in FIELDS.items():
        if field in then and field in now and then[field] != now[field]:
            if field == "trainer.total_training_steps" and schedule_depends_on_total:
                drift_class = FATAL
            drifts.append(Drift(field, then[field], now[field], drift_class))
    return drifts


def enforce(drifts: list[Drift], allow: list[str], where: str, other_way_out: str = "") -> list[Drift]:
    """Return the waived drifts, or raise.

    Raises:
        ContractError: a fatal drift, or one that `allow` does not name; the message is the table of them.
    """
    refused = [drift for drift in drifts if drift.drift_class == FATAL or drift.field not in allow]
    if not refused:
        return drifts
    lines = [f"{where} was started with other settings:"]
    lines += [f"  {drift.field}: then {drift.then!r}, now {drift.now!r} ({drift.drift_class})" for drift in refused]
    confirmable = [drift.field for drift in refused if drift.drift_class == CONFIRM]
    if len(confirmable) == len(refused):
        remedy = (
            f"Set them back, or accept the change with resume.allow=[{','.join(confirmable)}] (waives exact bytes)."
        )
    else:
        remedy = "Set them back, or give this start a trainer.output_dir of its own."
    raise ContractError("\n".join(lines), remedy + other_way_out)
