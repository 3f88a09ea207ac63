"""What a writer tells of the files that it wrote. Light half."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from keepstep.checkpoint.digest import FileDigest


@dataclass
class Written:
    """Files by path inside the checkpoint, with what the manifest says of them."""

    files: dict[str, FileDigest] = field(default_factory=dict)
    tensors: dict[str, list[list[Any]]] = field(default_factory=dict)
    """[[name, dtype, shape], …] per file."""
    nonfinite: dict[str, int] = field(default_factory=dict)
    """Values that are not finite, per file."""

    def add(self, other: Written) -> None:
        self.files |= other.files
        self.tensors |= other.tensors
        self.nonfinite |= other.nonfinite
