"""Does the quickstart learn as TRL learns it? Five seeds each, the same model, questions and hyper-parameters.

    make bench-learning

Reward per step of both, what the last ten steps come to, and the step from which the mean of five reaches 0.9.
Writes results/learning.json and results/learning.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.train import QUICKSTART, header, keepstep, quickstart, trl

RESULTS = Path(__file__).parent / "results"
WIDTH, HEIGHT, MARGIN = 720, 360, 40
COLOURS = {"keepstep": "#0b6bcb", "trl": "#c4501b"}
WINDOW, GOAL = 5, 0.9
Curves = dict[str, list[list[float]]]


def summary(curves: list[list[float]]) -> dict[str, Any]:
    last = [statistics.fmean(curve[-10:]) for curve in curves]
    steps = [step_of(curve) for curve in curves]
    reached = [step for step in steps if step is not None]
    return {
        "last10_mean": round(statistics.fmean(last), 4),
        "last10_std": round(statistics.stdev(last), 4),
        "last10": [round(value, 4) for value in last],
        "steps_to_090": steps,
        "steps_to_090_mean": round(statistics.fmean(reached), 1) if reached else None,
    }


def step_of(curve: list[float]) -> int | None:
    """The first step whose mean with the four before it reaches the goal."""
    means = (statistics.fmean(curve[end - WINDOW : end]) for end in range(WINDOW, len(curve) + 1))
    return next((end for end, mean in enumerate(means, WINDOW) if mean >= GOAL), None)


def plot(curves: Curves) -> str:
    """Every seed faint, the mean of each trainer bold."""
    num_steps = max(len(curve) for each in curves.values() for curve in each)

    def line(values: list[float], colour: str, width: float, opacity: float) -> str:
        points = " ".join(
            f"{MARGIN + (WIDTH - 2 * MARGIN) * step / (num_steps - 1):.1f},"
            f"{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value:.1f}"
            for step, value in enumerate(values)
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"/>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4}" font-size="11" text-anchor="end">{value}</text>')
    for step in (1, *range(20, num_steps + 1, 20)):
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - 1) / (num_steps - 1)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 16}" font-size="11" text-anchor="middle">{step}</text>')
    for row, (who, each) in enumerate(curves.items()):
        parts += [line(curve, COLOURS[who], 1, 0.25) for curve in each]
        parts.append(line([statistics.fmean(values) for values in zip(*each, strict=True)], COLOURS[who], 2.5, 1))
        parts.append(f'<text x="{WIDTH - 150}" y="{HEIGHT - 90 + 18 * row}" fill="{COLOURS[who]}">{who}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" font-size="12" text-anchor="middle">step</text>')
    parts.append(f'<text x="{MARGIN}" y="20" font-size="12">reward of the quickstart, five seeds each</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ks-learning-", dir="/tmp"))
    model, rows = quickstart(folder)
    work = replace(QUICKSTART, num_steps=100)
    curves: Curves = {"keepstep": [], "trl": []}
    for seed in args.seeds:
        for who, train in (("keepstep", keepstep), ("trl", trl)):
            curves[who].append([round(row["mean_reward"], 4) for row in train(work, folder, model, rows, seed)])
    found = {who: summary(each) for who, each in curves.items()}
    record = header() | {"results": found, "seeds": args.seeds, "curves": curves}
    (RESULTS / "learning.json").write_text(json.dumps(record) + "\n")
    (RESULTS / "learning.svg").write_text(plot(curves))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
