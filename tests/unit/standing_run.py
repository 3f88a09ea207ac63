"""A run on disk with its record and one checkpoint, without training: for what is checked before a start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from keepstep.config.load import load
from keepstep.config.schema import RunConfig
from keepstep.preflight.start import Start, prepare
from keepstep.run import RunDir, write_json
from tests.unit import builder


@dataclass(frozen=True)
class Standing:
    run: RunDir
    model: Path
    data: Path

    def overrides(self, *more: str) -> list[str]:
        """The settings of the first start, and what a later one gives on top."""
        return [
            f"trainer.output_dir={self.run.root}",
            f"actor_rollout_ref.model.path={self.model}",
            f"data.train_files={self.data}",
            "data.val_files=null",
            "s3.embedded=false",
            "trainer.total_training_steps=60",
            "trainer.test_freq=-1",
            *more,
        ]

    def config(self, *more: str) -> RunConfig:
        return load("quickstart", self.overrides(*more))

    def prepare(self, *more: str) -> Start:
        return prepare(self.config(*more))

    def content(self) -> dict[str, tuple[int, bytes]]:
        """Every file of the run's folder with its time and bytes."""
        files = (path for path in self.run.root.rglob("*") if path.is_file() and not path.is_symlink())
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def make_model(folder: Path, weights: bytes = b"w" * 64) -> Path:
    """What passes for a model as long as nobody loads it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def make_data(path: Path, num_rows: int = 640) -> Path:
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"{number}+1="}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        }
        for number in range(num_rows)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def make(folder: Path, *more: str, step: int | None = 20) -> Standing:
    """A first start with `more` settings, as far as its record goes, and a checkpoint of `step`."""
    found = Standing(RunDir.at(folder / "run"), make_model(folder / "model"), make_data(folder / "train.parquet"))
    start = found.prepare(*more)
    record = {
        "run_id": "run-a",
        "contract": start.terms,
        "model": {"path": str(found.model), "files": start.model_files},
        "dataset": start.dataset,
        "waivers": [],
    }
    write_json(found.run.record, record)
    if step is not None:
        builder.write(found.run, step)
    return found
