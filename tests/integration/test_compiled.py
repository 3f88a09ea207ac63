"""torch.compile: what runs for a call is a function of that call, whichever sizes came before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.driver import REPOSITORY
from tests.unit.export_builder import tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(
    ("layout", "options", "num_graphs"),
    [
        ("padded", "", 1),
        pytest.param("packed", "both", 2, marks=pytest.mark.long),
        # One more for the pass that is made again.
        pytest.param("grouped", "both,checkpointing", 3, marks=pytest.mark.long),
        pytest.param("padded", "both,bf16", 2, marks=pytest.mark.long),
    ],
)
def test_what_runs_does_not_depend_on_the_sizes_that_came_first(
    tmp_path: Path, layout: str, options: str, num_graphs: int
):
    """C32: a resumed attempt meets other sizes first. Forwards and backwards through the same batches: the same C++,
    and the same bytes of log-probs and gradients for each batch; and they are those of plain code, but for roundings.
    """
    found = report(tmp_path, layout, options)
    first, second = found["orders"]
    assert first["digests"] == second["digests"]
    assert first["sources"] and first["sources"] == second["sources"]
    # With gradients and without; one for all layers, and for all sizes.
    assert (first["graphs"], second["graphs"]) == (num_graphs, num_graphs)
    assert found["furthest"] < (0.1 if "bf16" in options else 1e-4)


def report(folder: Path, layout: str, options: str) -> dict[str, Any]:
    tiny_model(seed=9).save_pretrained(folder / "model")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.compiled_layers", folder / "model", layout, options, folder / "out"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "out").read_text())
    return found
