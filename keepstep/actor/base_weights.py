"""The weights of a Hugging Face folder, read by each rank for its own shards alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from keepstep.actor.shards import local, own_rows
from keepstep.errors import ConfigError


class BaseWeights:
    """Tensors by name over all safetensors files of a folder; nothing is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._file_of |= dict.fromkeys(file.keys(), path)

    def fill(self, params: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
        """Copy this rank's part of each tensor (`torch.chunk` along dimension 0); a tied copy in the files is left out.

        Raises:
            ConfigError: a parameter is not in the files, or has another shape there.
        """
        missing = sorted(params.keys() - self._file_of.keys())
        if missing:
            raise ConfigError(
                f"{self._folder} lacks {len(missing)} of {len(params)} tensors of its model: {', '.join(missing[:5])}.",
                "Give the whole model in actor_rollout_ref.model.path.",
            )
        with ExitStack() as stack, torch.no_grad():
            files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in set(self._file_of.values())}
            for name, param in params.items():
                self._copy(files[self._file_of[name]].get_slice(name), name, param, rank, world_size)

    def tensors(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Whole float32 tensors, those of `names` that there are, in that order."""
        found = {}
        for name in names:
            if name in self._file_of:
                with safe_open(self._file_of[name], framework="pt") as file:
                    found[name] = file.get_tensor(name).float()
        return found

    def _copy(self, stored: object, name: str, param: torch.Tensor, rank: int, world_size: int) -> None:
        shape = tuple(stored.get_shape())  # type: ignore[attr-defined]
        if shape != tuple(param.shape):
            raise ConfigError(
                f"{self._folder}: {name} has the shape {shape}, its config says {tuple(param.shape)}.",
                "Weights and config.json belong to different models.",
            )
        part = stored[own_rows(shape[0], rank, world_size) if shape else ...]  # type: ignore[index]
        local(param).copy_(part)
