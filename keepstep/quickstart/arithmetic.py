"""The arithmetic data set: single-digit additions as parquet in verl's columns."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

NUM_TRAIN_ROWS = 640
ALPHABET = "0123456789+="


def problems() -> list[tuple[str, str]]:
    """All 100 single-digit additions as (prompt, answer)."""
    return [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]


def train_rows() -> list[dict[str, Any]]:
    """640 rows drawn from the 100 problems with a fixed seed: ten steps of 64 prompts are one epoch."""
    generator = random.Random(20240601)
    drawn = [generator.choice(problems()) for _ in range(NUM_TRAIN_ROWS)]
    return [_row("train", index, prompt, answer) for index, (prompt, answer) in enumerate(drawn)]


def val_rows() -> list[dict[str, Any]]:
    """Each problem once."""
    return [_row("val", index, prompt, answer) for index, (prompt, answer) in enumerate(problems())]


def write(folder: Path) -> None:
    """Write train.parquet and val.parquet into `folder`, each whole or not at all."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train.parquet", train_rows()), ("val.parquet", val_rows())):
        temporary = folder / f".{name}.tmp-{os.getpid()}"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
        temporary.replace(folder / name)


def _row(split: str, index: int, prompt: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "keepstep/arithmetic",
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }
