"""A checkpoint of adapters (LoRA) as the model that it stands for: the base's tensors with them added."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keepstep.actor.base_weights import BaseWeights
from keepstep.actor.shards import LORA_A as A
from keepstep.actor.shards import LORA_B as B
from keepstep.checkpoint.safetensors_headers import SafetensorsFile
from keepstep.errors import CheckpointError
from keepstep.export.weights import Policy, Shape, Weights


def merged(policy: Policy, base: Path | None, model: dict[str, Any], checkpoint: Path) -> Policy:
    """The policy itself, or, where it is adapters, base + (alpha / rank) B A.

    Args:
        base: folder of the base model; None: it is not known or gone.
        model: settings of `actor_rollout_ref.model`.

    Raises:
        CheckpointError: adapters, and their base is not there.
    """
    if not any(name.endswith((A, B)) for name in policy.weights.shapes()):
        return policy
    if base is None:
        raise CheckpointError(
            f"{checkpoint} holds adapters, and their base model {model.get('path')} is not there.",
            "Put it where actor_rollout_ref.model.path of the checkpoint's config.yaml says.",
        )
    scale = model["lora_alpha"] / model["lora_rank"]
    return replace(policy, weights=AdaptedWeights(policy.weights, base, scale))


class AdaptedWeights:
    """Tensors of the base by its names, each with its adapter added when it is read."""

    def __init__(self, adapters: Weights, base: Path, scale: float) -> None:
        self._adapters, self._scale = adapters, scale
        self._base = BaseWeights(base)
        self._shapes: dict[str, Shape] = {}
        for path in sorted(base.glob("*.safetensors")):
            with path.open("rb") as file:
                self._shapes |= {name: shard.shape for name, shard in SafetensorsFile(file).shards.items()}
        targets = {name.removesuffix(A) + ".weight" for name in adapters.shapes() if name.endswith(A)}
        if unknown := sorted(targets - self._shapes.keys()):
            raise CheckpointError(
                f"{base} lacks {len(unknown)} of {len(targets)} tensors that the adapters belong to: {unknown[0]} …",
                "Is it the model that this run began with?",
            )
        self._adapted = targets

    def shapes(self) -> dict[str, Shape]:
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, float32."""
        base = self._base.tensors([name])[name]
        if name not in self._adapted:
            return base
        module = name.removesuffix(".weight")
        return base + self._scale * (self._adapters.read(module + B) @ self._adapters.read(module + A))
