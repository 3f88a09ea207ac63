"""A sharded model without weights: made on the meta device, so that no rank ever holds it whole."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from keepstep.actor.lora import add_adapters
from keepstep.config.schema import FsdpConfig, ModelConfig


def build_model(model_dir: str, model: ModelConfig, fsdp: FsdpConfig, device: str, world_size: int) -> torch.nn.Module:
    """The causal language model of a Hugging Face folder under FSDP2, its parameters on `device` and without values.

    Collective over the default process group.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir)
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
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
    mesh = init_device_mesh(device, (world_size,))
    for layer in found.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(found, mesh=mesh, mp_policy=policy)
    found.to_empty(device=device)
    # Moved apart by `to_empty`, which knows of no ties.
    found.tie_weights()
    _fill_buffers(found)
    return found.train()


def _fill_buffers(model: torch.nn.Module) -> None:
    """What no checkpoint holds, the frequencies of rotary embeddings above all: transformers knows how it is made."""
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)  # type: ignore[operator]
