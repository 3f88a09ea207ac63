"""Low-rank adapters (LoRA, arXiv:2106.09685) on a frozen model, by PEFT's own layers.

The policy is W + (alpha / r) B A; with its adapters off it is the reference, so none is held beside it. Checkpoints
hold the adapters alone, the engine gets merged weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from keepstep.actor.gathering import gathered
from keepstep.actor.shards import LORA_A as A
from keepstep.actor.shards import LORA_B as B
from keepstep.actor.shards import copy_chunks
from keepstep.config.schema import ModelConfig

BASE = ".base_layer.weight"


def add_adapters(model: torch.nn.Module, config: ModelConfig) -> None:
    """Put adapters beside the target modules and freeze everything else; on the device that the model is on."""
    from peft import LoraConfig, inject_adapter_in_model

    settings = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=config.target_modules, task_type="CAUSAL_LM"
    )
    # Injected, not wrapped: all names stay the model's own.
    inject_adapter_in_model(settings, model)


def initialise(model: torch.nn.Module, seed: int, rank: int, world_size: int) -> None:
    """A uniform as PEFT draws it, B zero; a function of seed and name, whatever the number of ranks."""
    for name, param in model.named_parameters():
        if name.endswith(B):
            with torch.no_grad():
                param.zero_()
        elif name.endswith(A):
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
            full = torch.empty(param.shape)
            torch.nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
            copy_chunks({name: param}, {name: full}, rank, world_size)


def base_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the base model's files hold, by the names that they have there."""
    return {_base_name(name): param for name, param in model.named_parameters() if not name.endswith((A, B))}


def merged(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors of W + (alpha / r) B A by the base model's names on rank 0, nothing elsewhere.

    A collective that every rank has to exhaust.
    """
    params = dict(model.named_parameters())
    adapters = dict(gathered({name: param for name, param in params.items() if name.endswith((A, B))}))
    for name, full in gathered({name: param for name, param in params.items() if not name.endswith((A, B))}):
        module = name.removesuffix(BASE)
        if module + A in adapters:
            scaling = model.get_submodule(module).scaling["default"]  # type: ignore[index]
            full = full + scaling * (adapters[module + B] @ adapters[module + A])
        yield _base_name(name), full


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """The base model: the reference."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _base_name(name: str) -> str:
    """What a parameter beside an adapter is called in the base model's files."""
    return name.replace(".base_layer.", ".")
