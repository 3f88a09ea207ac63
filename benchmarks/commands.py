"""Process time of the commands that only look, against an empty interpreter in the same run.

    python -m benchmarks.commands

Writes benchmarks/results/commands.json. The bar: `verify --quick`, `plan` and `ls` take at most 0.3 s each.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keepstep.config.load import load, to_yaml
from keepstep.run import write_json
from tests.unit import builder, standing_run

RESULTS = Path(__file__).parent / "results" / "commands.json"
HEALTHY = Path(__file__).parents[1] / "tests" / "data" / "doctor" / "healthy"
NUM_RUNS = 9
BAR_S = 0.3


def process_seconds(*arguments: str) -> float:
    """User and system time of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def median_seconds(*arguments: str) -> float:
    return round(statistics.median(process_seconds(*arguments) for _ in range(NUM_RUNS)), 3)


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = builder.run_in(Path(folder))
        for step in range(20, 220, 20):
            builder.write(run, step, reference_step=step - 20 if step > 20 else None)
        write_json(run.record, {"run_id": "run-a", "dataset": {"files": [], "num_rows": 640, "val_files": []}})
        run.config.write_text(to_yaml(load("quickstart", [f"trainer.output_dir={run.root}"])))
        keepstep = ("-m", "keepstep.cli.main")
        return {
            "empty_interpreter_s": median_seconds("-c", "pass"),
            "verify_quick_s": median_seconds(*keepstep, "verify", str(run.checkpoint(200)), "--quick"),
            "plan_s": median_seconds(*keepstep, "plan", str(run.root)),
            "ls_s": median_seconds(*keepstep, "ls", str(run.root)),
            "doctor_s": median_seconds(*keepstep, "doctor", str(HEALTHY)),
            "preflight_quick_s": median_seconds(
                *keepstep, "preflight", "--quick", *standing_run.make(Path(folder) / "standing").overrides()
            ),
            "bar_s": BAR_S,
            "num_checkpoints": 10,
            "num_runs": NUM_RUNS,
        }


def record(results: dict[str, Any], path: Path) -> None:
    """Write a benchmark's result file, the newest overwriting."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    write_json(
        path,
        {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit.stdout.strip(),
            "machine": machine,
            "results": results,
        },
    )


if __name__ == "__main__":
    found = measure()
    record(found, RESULTS)
    print(json.dumps(found, indent=2))
