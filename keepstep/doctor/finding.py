"""What a rule answers with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from keepstep.doctor.evidence import Quote

PROBLEM, NOTE = "problem", "note"


@dataclass(frozen=True)
class Finding:
    """One cause.

    severity: `problem` stands in the way now; `note` was overcome, or is worth knowing.
    explains: the attempts whose end this is the cause of; a later rule does not explain them again.
    """

    id: str
    severity: str
    cause: str
    evidence: tuple[Quote, ...]
    remedy: str
    explains: frozenset[int] = frozenset()

    def to_record(self) -> dict[str, Any]:
        record = asdict(self) | {"explains": sorted(self.explains)}
        return record
