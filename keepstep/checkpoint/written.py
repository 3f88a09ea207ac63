"""What a writer is asked to save, and what it tells of the files that it wrote. Light half."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import FileDigest


@dataclass
class SaveRequest:
    """What is saved beside the tensors."""

    run_root: str
    run_id: str
    attempt: int
    step: int
    world_size: int
    has_reference: bool
    reference_step: int | None
    """Published step of this run and layout whose `ref/` has the same content; None: the shards come along."""
    trainer_state: dict[str, Any]
    """Everything of trainer_state.json but the random streams."""
    config_yaml: str
    model_files: str
    """Folder with the small Hugging Face files: config, tokenizer, generation config."""
    engine_state: dict[str, Any]
    layout: str = layout.FULL
    waive_exactness: bool = False


@dataclass
class SaveResult:
    step: int
    outcome: str
    """`published`, or `replayed_equal` when a standing, verified checkpoint of the step has the same tensors."""
    num_bytes: int
    quarantined: str | None = None


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
