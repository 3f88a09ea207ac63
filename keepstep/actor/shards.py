"""One rank's part of the training state as plain numpy arrays, and the way back.

FSDP2 shards every parameter along dimension 0 in the manner of `torch.chunk`: rank r holds chunk r, later ranks may
hold nothing. Concatenating the ranks' arrays in order gives the full tensor, with no collective.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

OPTIMIZER_TENSORS = ("exp_avg", "exp_avg_sq")


@dataclass
class RankSnapshot:
    """Host copy of one rank's state. Arrays are this rank's shards along dimension 0."""

    rank: int
    params: dict[str, np.ndarray]
    optimizer: dict[str, dict[str, np.ndarray]]
    param_groups: list[dict[str, Any]]
    scheduler: dict[str, Any]
    rng: dict[str, Any]


def host_copy(tensor: torch.Tensor) -> np.ndarray:
    """A copy of this rank's shard in host memory that no later update touches.

    Raises:
        AttributeError: the tensor is no DTensor: FSDP has it gathered, and its shards would not add up.
    """
    return tensor.detach().to_local().to("cpu", copy=True).numpy()  # type: ignore[attr-defined]


def own_chunk(full: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """This rank's chunk of a full tensor along dimension 0; may be empty."""
    chunks = full.chunk(world_size, dim=0)
    return chunks[rank] if rank < len(chunks) else full[:0]


def load_full(model: torch.nn.Module, state: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
    """Copy this rank's part of full tensors into a sharded model.

    Raises:
        KeyError: names of the two do not match (both differences are named).
    """
    params = dict(model.named_parameters())
    if params.keys() != state.keys():
        missing, unexpected = sorted(params.keys() - state.keys()), sorted(state.keys() - params.keys())
        raise KeyError(f"state dict does not match the model: missing {missing[:5]}, unexpected {unexpected[:5]}")
    with torch.no_grad():
        for name, param in params.items():
            _copy(param, state[name], rank, world_size)


def optimizer_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's parameter groups with names in place of tensors."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def optimizer_shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, np.ndarray]]:
    """AdamW's state of this rank by parameter name; `step` is a scalar array."""
    return {
        name: {
            "step": optimizer.state[param]["step"].to("cpu", copy=True).numpy(),
            **{key: host_copy(optimizer.state[param][key]) for key in OPTIMIZER_TENSORS},
        }
        for name, param in model.named_parameters()
        if param in optimizer.state
    }


def load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any], rank: int, world_size: int
) -> None:
    """Restore AdamW's state and hyper-parameters from full tensors keyed by parameter name."""
    for name, param in model.named_parameters():
        if name not in saved["state"]:
            continue
        entry = saved["state"][name]
        state: dict[str, torch.Tensor] = {"step": entry["step"].clone()}
        for key in OPTIMIZER_TENSORS:
            state[key] = torch.zeros_like(param)
            _copy(state[key], entry[key], rank, world_size)
        optimizer.state[param] = state
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: copy.deepcopy(value) for key, value in values.items() if key != "params"})


def _copy(target: torch.Tensor, full: torch.Tensor, rank: int, world_size: int) -> None:
    destination = target.detach().to_local()  # type: ignore[attr-defined]
    chunk = own_chunk(full, rank, world_size)
    if destination.shape != chunk.shape:
        raise ValueError(f"shard of shape {tuple(destination.shape)} against {tuple(chunk.shape)} in the checkpoint")
    destination.copy_(chunk)
