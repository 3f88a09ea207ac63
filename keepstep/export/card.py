"""The model card of an export: which run and step it is, and how that was trained. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

SETTINGS = (
    "algorithm.adv_estimator", "actor_rollout_ref.rollout.n", "data.train_batch_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef",
    "data.max_prompt_length", "data.max_response_length", "trainer.seed",
)  # fmt: skip
"""Of the run's configuration: what makes it this training and no other."""


def model_card(origin: Mapping[str, Any], config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """README.md of an export.

    Args:
        origin: what `keepstep_export.json` holds.
        config: the run's resolved configuration; empty: not known.
        metrics: taken at this step.
    """
    base = PurePosixPath(str(_setting(config, "actor_rollout_ref.model.path") or "")).name.removeprefix("made:")
    name = _setting(config, "trainer.experiment_name") or "a policy"
    front = ["---", *([f"base_model: {base}"] if base else []), "library_name: transformers"]
    tags = ["tags: [grpo, reinforcement-learning, keepstep]"] if origin["run_id"] else []
    front += ["pipeline_tag: text-generation", *tags, "---", ""]
    step = "an unknown step" if origin["step"] is None else f"step {origin['step']}"
    title = f"# {name}, {step}\n"
    trained = f"Trained with GRPO by Keepstep{f' from {base}' if base else ''}.\n"
    intro = trained if origin["run_id"] else "Exported by Keepstep from a checkpoint of another trainer.\n"
    rows = [(key, value) for key, value in origin.items() if value is not None]
    rows += [(key, found) for key in SETTINGS if (found := _setting(config, key)) is not None]
    rows += [(key, f"{value:.6g}") for key, value in sorted(metrics.items()) if isinstance(value, int | float)]
    table = ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]
    return "\n".join([*front, title, intro, *table, ""])


def _setting(config: Mapping[str, Any], key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
