"""Rollouts that are kept to be read by people: rollouts/step_<step>.parquet."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FILE = "step_{step}.parquet"


@dataclass(frozen=True)
class Sample:
    """One response."""

    split: Literal["train", "val"]
    prompt: str
    """As the model saw it, chat template and all."""
    response: str
    ground_truth: str
    reward: float
    advantage: float | None
    """In training only."""


def write_samples(folder: Path, step: int, samples: list[Sample]) -> None:
    """Whole or not at all; a step that is trained again writes the same again."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        [("step", pyarrow.int64())]
        + [(name, pyarrow.string()) for name in ("split", "prompt", "response", "ground_truth")]
        + [(name, pyarrow.float64()) for name in ("reward", "advantage")]
    )
    folder.mkdir(exist_ok=True)
    target = folder / FILE.format(step=step)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    table = pyarrow.Table.from_pylist([{"step": step, **asdict(sample)} for sample in samples], schema)
    pyarrow.parquet.write_table(table, temporary)
    os.replace(temporary, target)
