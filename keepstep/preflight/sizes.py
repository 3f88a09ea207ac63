"""The sizes and settings that a person wants to see before a start, as they are. Pure."""

from __future__ import annotations

from typing import Any

from keepstep.config.load import given_keys
from keepstep.config.schema import RunConfig


def parallel_sizes(config: RunConfig) -> list[str]:
    """The sizes by which the job is cut, each with whether it is given."""
    given = given_keys(config)
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    sizes = {
        "trainer.nnodes": config.trainer.nnodes,
        "trainer.n_gpus_per_node": config.trainer.n_gpus_per_node,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
    }
    named = [f"{key}={value}" + ("" if key in given else " (default)") for key, value in sizes.items()]
    return [f"{config.world_size} ranks", *named]


def grpo_settings(config: RunConfig) -> list[tuple[str, Any]]:
    """What makes the algorithm GRPO as it is run here."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return [
        ("algorithm.adv_estimator", config.algorithm.adv_estimator),
        ("actor_rollout_ref.rollout.n", rollout.n),
        ("actor_rollout_ref.actor.use_kl_loss", actor.use_kl_loss),
        ("actor_rollout_ref.actor.kl_loss_coef", actor.kl_loss_coef),
        ("actor_rollout_ref.actor.kl_loss_type", actor.kl_loss_type),
        ("actor_rollout_ref.actor.clip_ratio", actor.clip_ratio),
        ("actor_rollout_ref.actor.loss_agg_mode", actor.loss_agg_mode),
        ("actor_rollout_ref.rollout.temperature", rollout.temperature),
    ]
