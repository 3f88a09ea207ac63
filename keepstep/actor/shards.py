"""One rank's part of the training state as plain numpy arrays, and the way back.

FSDP2 shards every parameter along dimension 0 in the manner of `torch.chunk`: rank r holds chunk r, later ranks may
hold nothing. Concatenating the ranks' arrays in order gives the full tensor, with no collective.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from keepstep.actor.host_buffer import HostBuffer, SharedMemory, Slot, view

OPTIMIZER_TENSORS = ("exp_avg", "exp_avg_sq")
LORA_A, LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"
Shapes = dict[str, tuple[int, ...]]


@dataclass
class RankSnapshot:
    """Host copy of one rank's state. Arrays are this rank's shards along dimension 0."""

    rank: int
    params: dict[str, Any]
    """Array by name (in shared form: its `Slot`)."""
    shapes: Shapes
    """Full shape by name."""
    optimizer: dict[str, dict[str, Any]]
    """AdamW's state by parameter name: `step` a scalar array, the others arrays (in shared form: their `Slot`s)."""
    param_groups: list[dict[str, Any]]
    scheduler: dict[str, Any]
    rng: dict[str, Any]
    memory: SharedMemory | None = None
    """Shared form: where the slots lie. None: the arrays are here."""


@dataclass
class ReferenceSnapshot:
    """Host copy of one rank's shards of the frozen reference."""

    params: dict[str, np.ndarray]
    shapes: Shapes


def take_snapshot(
    rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, buffer: HostBuffer, **small: Any
) -> RankSnapshot:
    """Copy this rank's shards of policy and optimizer into `buffer`; `small` are the other fields.

    Raises:
        AttributeError: a parameter is no DTensor: FSDP has it gathered, and its shards would not add up.
    """
    params = trained(model)
    tensors = {name: local(param) for name, param in params.items()}
    held = {name: optimizer.state[param] for name, param in params.items() if param in optimizer.state}
    tensors |= {f"{key}/{name}": local(state[key]) for name, state in held.items() for key in OPTIMIZER_TENSORS}
    slots = buffer.fill(tensors)
    moments = {name: {key: slots[f"{key}/{name}"] for key in OPTIMIZER_TENSORS} for name in held}
    steps = {name: state["step"].to("cpu", copy=True).numpy() for name, state in held.items()}
    return RankSnapshot(
        rank=rank,
        params={name: slots[name] for name in params},
        shapes=full_shapes(model),
        optimizer={name: {"step": steps[name], **moments[name]} for name in held},
        param_groups=optimizer_names(model, optimizer),
        memory=buffer.shared(),
        **small,
    )


def open_snapshot(snapshot: RankSnapshot) -> RankSnapshot:
    """The same with arrays in place of slots; nothing is copied.

    Raises:
        FileNotFoundError: the rank that holds the memory is gone.
    """
    if snapshot.memory is None:
        return snapshot
    memory = snapshot.memory.open()
    resolve: Callable[[Any], Any] = lambda value: view(memory, value) if isinstance(value, Slot) else value  # noqa: E731
    return replace(
        snapshot,
        params={name: resolve(slot) for name, slot in snapshot.params.items()},
        optimizer={
            name: {key: resolve(value) for key, value in state.items()} for name, state in snapshot.optimizer.items()
        },
        memory=None,
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, not copied."""
    # Without gradients DTensor hands its part out; with them, each call goes through autograd, which for hundreds of
    # tensors takes as long as their copy.
    with torch.no_grad():
        return tensor.to_local().detach()  # type: ignore[attr-defined]


def reference_snapshot(reference: torch.nn.Module) -> ReferenceSnapshot:
    params = {name: local(param).to("cpu", copy=True).numpy() for name, param in reference.named_parameters()}
    return ReferenceSnapshot(params, {name: tuple(param.shape) for name, param in reference.named_parameters()})


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a policy, by name: the adapters where there are some, else all parameters."""
    every: dict[str, torch.Tensor] = dict(model.named_parameters())
    return {name: param for name, param in every.items() if name.endswith((LORA_A, LORA_B))} or every


def full_shapes(model: torch.nn.Module) -> Shapes:
    return {name: tuple(param.shape) for name, param in trained(model).items()}


def own_chunk(full: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """This rank's chunk of a full tensor along dimension 0; may be empty."""
    return full[own_rows(full.shape[0], rank, world_size)]


def own_rows(num_rows: int, rank: int, world_size: int) -> slice:
    """Where this rank's chunk along dimension 0 begins and ends, as FSDP2 and `torch.chunk` cut; may be empty."""
    share = -(-num_rows // world_size)
    return slice(min(rank * share, num_rows), min((rank + 1) * share, num_rows))


def check_names(params: Collection[str], names: set[str]) -> None:
    """
    Raises:
        KeyError: `names` are not exactly the model's parameters (both differences are named).
    """
    if set(params) != names:
        missing, unexpected = sorted(set(params) - names), sorted(names - set(params))
        raise KeyError(f"state dict does not match the model: missing {missing[:5]}, unexpected {unexpected[:5]}")


def copy_chunks(targets: dict[str, torch.Tensor], full: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
    """Copy this rank's part of full tensors into sharded ones of the same names; plain targets are copied whole."""
    with torch.no_grad():
        for name, target in targets.items():
            if not hasattr(target, "to_local"):
                target.copy_(full[name])
                continue
            chunk, destination = own_chunk(full[name], rank, world_size), local(target)
            if destination.shape != chunk.shape:
                raise ValueError(
                    f"{name}: shard of shape {tuple(destination.shape)} against {tuple(chunk.shape)} in the checkpoint"
                )
            destination.copy_(chunk)


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


def optimizer_targets(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, names: set[str]
) -> dict[str, torch.Tensor]:
    """Fresh AdamW state for every parameter that `names` (`state.<parameter>.<key>`) has, as tensors to be filled.

    A parameter that never got a gradient has no state in the checkpoint, and gets none.
    """
    targets: dict[str, torch.Tensor] = {}
    for name, param in trained(model).items():
        if f"state.{name}.step" not in names:
            continue
        state: dict[str, torch.Tensor] = {"step": torch.zeros((), dtype=torch.float32)}
        state |= {key: torch.zeros_like(param, requires_grad=False) for key in OPTIMIZER_TENSORS}
        optimizer.state[param] = state
        targets |= {f"state.{name}.{key}": value for key, value in state.items()}
    return targets


def restore_param_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Hyper-parameters as they were; which parameters belong to a group is the model's matter."""
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: copy.deepcopy(value) for key, value in values.items() if key != "params"})
