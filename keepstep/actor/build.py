"""A sharded model without weights: made on the meta device, so that no rank ever holds it whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from keepstep.actor.compiled import compile_layers
from keepstep.actor.forward import ATTENTION, register_attention
from keepstep.actor.lora import add_adapters
from keepstep.config.schema import FsdpConfig, ModelConfig
from keepstep.errors import ConfigError


def build_model(
    model_dir: str,
    model: ModelConfig,
    fsdp: FsdpConfig,
    device: str,
    world_size: int,
    *,
    packed: bool,
    compiled: bool = False,
    offloaded: bool = False,
) -> torch.nn.Module:
    """The causal language model of a Hugging Face folder under FSDP2, computing on `device`, its parameters without
    values.

    Collective over the default process group.

    Args:
        packed: it will see packed sequences.
        compiled: its layers run through torch.compile.
        offloaded: its parameters, and with them gradients and moments, are in host memory.

    Raises:
        ConfigError: its attention cannot be had for packed sequences.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    _without_dropout(config)
    with torch.device("meta"):
        attention = _packed_attention(config, model_dir) if packed else "sdpa"
        found = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    found.config.use_cache = False
    if model.lora_rank:
        add_adapters(found, model)
    if model.enable_gradient_checkpointing:
        found.gradient_checkpointing_enable({"use_reentrant": False})
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if fsdp.model_dtype == "bf16"
        else MixedPrecisionPolicy()
    )
    if compiled:
        compile_layers(found.model.layers)
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if offloaded else OffloadPolicy()
    mesh = init_device_mesh(device, (world_size,))
    for part in (*found.model.layers, found):
        fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)
    found.to_empty(device="cpu" if offloaded else device)
    # Moved apart by `to_empty`, which knows of no ties.
    found.tie_weights()
    _fill_buffers(found, device)
    return found.train()


def _packed_attention(config: Any, model_dir: str) -> str:
    """What transformers knows the attention to packed sequences by.

    Raises:
        ConfigError: not all layers attend to everything before a token.
    """
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        raise ConfigError(
            f"{model_dir} has layers of {', '.join(sorted(others))}: its sequences cannot be packed.",
            "Leave out actor_rollout_ref.model.use_remove_padding and actor_rollout_ref.actor.use_prefix_grouper.",
        )
    register_attention()
    return ATTENTION


def _without_dropout(config: Any) -> None:
    """The engine samples without: with it the ratio of a first update would be something other than 1."""
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def _fill_buffers(model: torch.nn.Module, device: str) -> None:
    """What no checkpoint holds, the frequencies of rotary embeddings above all: transformers knows how it is made.

    FSDP moves parameters alone: buffers are on the device that computes.
    """
    for module in model.modules():
        if buffers := dict(module.named_buffers(recurse=False)):
            model._init_weights(module)  # type: ignore[operator]
            for name, value in buffers.items():
                setattr(module, name, value.to(device))
