"""Some responses of some steps, from `rollouts/step_<N>.parquet` where the run keeps them.

python -m keepstep.report.samples FILE …     one JSON object a line: {"step", "samples": [...]} or {"step", "problem"}

Parquet is read in a process of its own: a torn file can end the process that looks at it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.errors import first_line
from keepstep.run import RunDir, parse_step

MAX_STEPS, MAX_SAMPLES, MAX_VAL_SAMPLES, MAX_CHARACTERS = 12, 4, 2, 1500
TIMEOUT_S = 60.0
COLUMNS = ("split", "prompt", "response", "ground_truth", "reward", "advantage")


@dataclass(frozen=True)
class Sample:
    """One response; numbers are None where the file has none."""

    split: str
    """`train` or `val`."""
    prompt: str
    response: str
    ground_truth: str
    reward: float | None
    advantage: float | None


@dataclass(frozen=True)
class StepSamples:
    """Some responses of one step, the best rewarded first; or why there are none."""

    step: int
    num_responses: int
    samples: tuple[Sample, ...]
    problem: str = ""


def read(run: RunDir) -> tuple[StepSamples, ...]:
    """Samples of at most `MAX_STEPS` steps: the first, the last, and those between at equal distances."""
    files = {step: path for path in run.rollouts.glob("*.parquet") if (step := parse_step(path.stem)) is not None}
    chosen = spread(sorted(files), MAX_STEPS)
    if not chosen:
        return ()
    command = [sys.executable, "-m", "keepstep.report.samples", *(str(files[step]) for step in chosen)]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False).stdout
    except subprocess.TimeoutExpired as late:
        answer = late.stdout or b""
    told = {found.step: found for line in answer.splitlines() if (found := _parse(line)) is not None}
    return tuple(told.get(step, StepSamples(step, 0, (), "cannot be read")) for step in chosen)


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of them at equal distances, the first and the last included."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def _parse(line: bytes) -> StepSamples | None:
    try:
        value = json.loads(line)
        samples = tuple(Sample(**sample) for sample in value["samples"])
        return StepSamples(value["step"], value["num_responses"], samples, value["problem"])
    except (ValueError, KeyError, TypeError):
        return None


def _choose(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best, the worst and some between them, by reward; of the training first."""
    ranked = sorted(rows, key=lambda row: -(_number(row.get("reward")) or 0.0))
    val = [row for row in ranked if row.get("split") == "val"]
    train = [row for row in ranked if row.get("split") != "val"]
    limits = ((train, MAX_SAMPLES), (val, MAX_VAL_SAMPLES))
    return [part[index] for part, most in limits for index in spread(range(len(part)), most)]


def _look(path: Path) -> dict[str, Any]:
    import pyarrow
    import pyarrow.parquet

    answer: dict[str, Any] = {"step": parse_step(path.stem), "num_responses": 0, "samples": []}
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in COLUMNS if name in file.schema_arrow.names]
            rows = file.read(columns=columns).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        return answer | {"problem": f"cannot be read: {first_line(error)}"}
    samples = [
        {
            "split": _text(row.get("split") or "train"),
            "prompt": _text(row.get("prompt")),
            "response": _text(row.get("response")),
            "ground_truth": _text(row.get("ground_truth")),
            "reward": _number(row.get("reward")),
            "advantage": _number(row.get("advantage")),
        }
        for row in _choose(rows)
    ]
    return answer | {"num_responses": len(rows), "samples": samples, "problem": ""}


def _text(value: Any) -> str:
    """A prompt or response as text; chat messages one below the other."""
    if isinstance(value, list):
        value = "\n".join(str(m.get("content", m)) if isinstance(m, dict) else str(m) for m in value)
    text = "" if value is None else str(value)
    rest = len(text) - MAX_CHARACTERS
    return text if rest <= 0 else f"{text[:MAX_CHARACTERS]}… ({rest} more characters)"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value == value else None


def main(paths: Iterable[str]) -> None:
    for path in paths:
        print(json.dumps(_look(Path(path))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
