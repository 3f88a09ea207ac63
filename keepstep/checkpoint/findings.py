"""What a verification finds on its way: reasons, and what it learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from keepstep.checkpoint.files import printable
from keepstep.checkpoint.shard_cover import Shapes

MOST_REASONS = 50


@dataclass
class Findings:
    """Reasons as they are found, and what is learned on the way."""

    reasons: list[str] = field(default_factory=list)
    """Each one sentence that begins with the file's name, safe to print."""
    notes: list[str] = field(default_factory=list)
    """What could be said of a checkpoint that has no digests."""
    num_bytes: int = 0
    read_from: set[str] = field(default_factory=set)
    """Where the hashed bytes came from, over all files."""
    state: dict[str, Any] | None = None
    optimizer_steps: set[float] = field(default_factory=set)
    """Counters of updates in the optimizer's own state."""
    shapes: dict[str, Shapes] = field(default_factory=dict)
    """Full shapes of the tensors, by the file or the folder of shards that holds them."""
    missing: list[str] = field(default_factory=list)
    """A foreign folder: files that a resume would need and an export does not."""
    named: set[str] = field(default_factory=set)
    """Files that a reason was found against."""
    num_left_out: int = 0

    def reject(self, name: str, *reasons: str) -> None:
        """Note reasons against a file; "" is the checkpoint as a whole."""
        if reasons:
            self.named.add(name)
        for reason in reasons:
            if len(self.reasons) == MOST_REASONS:
                self.num_left_out += 1
            else:
                self.reasons.append(printable(f"{name}: {reason}" if name else reason))

    def is_named(self, prefix: str) -> bool:
        """Whether a reason was found against a file or folder whose name begins so."""
        return any(name.startswith(prefix) for name in self.named)

    def all_reasons(self) -> list[str]:
        return self.reasons + ([f"and {self.num_left_out} more reasons"] if self.num_left_out else [])
