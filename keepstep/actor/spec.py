"""What a rank is told before it is built. Light: whoever starts ranks need not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.actor.layout import Layout
from keepstep.config.schema import ActorConfig, ModelConfig, RefConfig, RolloutCorrectionConfig


@dataclass(frozen=True)
class RankSpec:
    """Where a rank stands and what it trains."""

    rank: int
    world_size: int
    device: str
    model_dir: str
    """Config and tokenizer."""
    base_dir: str
    """The base model's weights, which adapters need in every attempt."""
    model: ModelConfig
    actor: ActorConfig
    ref: RefConfig
    temperature: float
    total_steps: int
    seed: int
    collective_timeout_s: float
    correction: RolloutCorrectionConfig
    max_response_length: int
    needs_reference: bool
    needs_old_log_probs: bool
    engines_sleep: bool
    """The GPU is an engine's as well, which wakes up for the weights: what no tensor holds is given back before."""

    @property
    def layout(self) -> Layout:
        return "grouped" if self.actor.use_prefix_grouper else "packed" if self.model.use_remove_padding else "padded"

    @property
    def backend(self) -> str:
        """Of the process group: what is in host memory has collectives of its own."""
        if self.device == "cpu":
            return "gloo"
        offloaded = self.actor.fsdp_config.param_offload or self.ref.fsdp_config.param_offload
        return "cpu:gloo,cuda:nccl" if offloaded else "nccl"
