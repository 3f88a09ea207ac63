"""A role's tensors in layout `sharded`: safetensors of torch.distributed.checkpoint, read slice by slice.

A rank reads what it holds and no more. Apart from `reader`, since its imports take a second that layout `full` need not
wait for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader


class _ShardReader(HuggingFaceStorageReader):
    """Reads headers where all shards are, and tensors from the staged copy of those that have one."""

    def __init__(self, path: Path, staged: Path | None) -> None:
        super().__init__(str(path))
        self._staged = staged

    def read_metadata(self) -> Any:
        found = super().read_metadata()
        for index, info in found.storage_data.items():
            copy = self._staged / Path(info.relative_path).name if self._staged else None
            if copy is not None and copy.exists():
                found.storage_data[index] = replace(info, relative_path=str(copy))
        return found


class ShardFolder:
    def __init__(self, path: Path, staged: Path | None = None) -> None:
        self._path, self._staged = path, staged
        self._found = self._reader().read_metadata().state_dict_metadata

    def names(self) -> set[str]:
        return set(self._found)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: Mapping[str, Any] = self._found
        return {name: tuple(info.size) for name, info in found.items()}

    def fill(self, targets: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
        # Every rank plans for itself from the headers: no collective, so a rank may load while others still import.
        with warnings.catch_warnings():
            # It warns that one process alone is meant, which is what `no_dist` says.
            warnings.simplefilter("ignore")
            dcp.load(dict(targets), storage_reader=self._reader(), no_dist=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        found: Mapping[str, Any] = self._found
        whole = {name: torch.empty(info.size, dtype=info.properties.dtype) for name, info in found.items()}
        self.fill(whole, 0, 1)
        return whole

    def _reader(self) -> _ShardReader:
        return _ShardReader(self._path, self._staged)
