"""`keepstep dataset check` of 1,000 parquet files with 10^8 rows, against pyarrow and DuckDB counting the same.

    python -m benchmarks.dataset --duckdb FOLDER        FOLDER: where DuckDB is installed, for this benchmark only

Each count is a process of its own, from its start to its exit, as a user would run it; the contenders take turns.
Writes benchmarks/results/dataset.json and dataset.md. The bar: seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from benchmarks.commands import record

RESULTS = Path(__file__).parent / "results"
NUM_FILES = 1000
ROWS_PER_FILE = 100_000
NUM_ROUNDS = 7

PYARROW = """
import glob, sys
import pyarrow.dataset
print(pyarrow.dataset.dataset(sorted(glob.glob(sys.argv[1]))).count_rows())
"""
DUCKDB = """
import glob, sys
sys.path.insert(0, sys.argv[2])
import duckdb
files = sorted(glob.glob(sys.argv[1]))
print(duckdb.execute("SELECT count(*) FROM read_parquet(?)", [files]).fetchone()[0])
"""

Record = dict[str, Any]


def make_files(folder: Path) -> str:
    """Files with the columns that training reads, in three row groups each; returns their glob.

    All rows of a file are the same, so that only the footers have a size worth speaking of.
    """
    row = {
        "data_source": "made",
        "prompt": [{"role": "user", "content": "1+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    one = pyarrow.Table.from_pylist([row])
    first = folder / "0000.parquet"
    table = one.take(pyarrow.array([0] * ROWS_PER_FILE))
    pyarrow.parquet.write_table(table, first, row_group_size=ROWS_PER_FILE // 3 + 1)
    for number in range(1, NUM_FILES):
        shutil.copyfile(first, folder / f"{number:04}.parquet")
    return str(folder / "*.parquet")


def run(arguments: list[str]) -> Record:
    """Wall and CPU seconds of one process that must count every row."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True, timeout=600)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if str(NUM_FILES * ROWS_PER_FILE) not in done.stdout:
        raise RuntimeError(f"{arguments[:3]} did not count {NUM_FILES * ROWS_PER_FILE} rows: {done.stdout[-200:]}")
    return {"wall_s": wall, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure(duckdb: str) -> Record:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        files = make_files(Path(name))
        contenders = {
            "keepstep": [
                "-m", "keepstep.cli.main", "dataset", "check", files,
                "--expect-rows", str(NUM_FILES * ROWS_PER_FILE),
            ],
            "pyarrow": ["-c", PYARROW, files],
            "duckdb": ["-c", DUCKDB, files, duckdb],
        }  # fmt: skip
        rounds = [{who: run(arguments) for who, arguments in contenders.items()} for _ in range(NUM_ROUNDS + 1)]
        bytes_per_file = (Path(name) / "0000.parquet").stat().st_size
    # The first round brings the files and the libraries into the page cache.
    medians = {
        who: {key: round(statistics.median(found[who][key] for found in rounds[1:]), 2) for key in ("wall_s", "cpu_s")}
        for who in contenders
    }
    return {
        "num_files": NUM_FILES,
        "num_rows": NUM_FILES * ROWS_PER_FILE,
        "bytes_per_file": bytes_per_file,
        "rounds": NUM_ROUNDS,
        "load_average": round(load, 1),
        "pyarrow_version": pyarrow.__version__,
        "duckdb_version": next(Path(duckdb).glob("duckdb-*.dist-info")).name.split("-")[1].removesuffix(".dist"),
        "seconds": medians,
        "keepstep_against": {
            who: {key: round(medians["keepstep"][key] / medians[who][key], 2) for key in ("wall_s", "cpu_s")}
            for who in ("pyarrow", "duckdb")
        },
    }


def table(found: Record) -> str:
    seconds, ratios = found["seconds"], found["keepstep_against"]
    names = {
        "keepstep": "`keepstep dataset check`",
        "pyarrow": f"pyarrow {found['pyarrow_version']}, `dataset(files).count_rows()`",
        "duckdb": f"DuckDB {found['duckdb_version']}, `SELECT count(*) FROM read_parquet([...])`",
    }
    lines = [
        f"# Counting {found['num_rows']:,} rows in {found['num_files']:,} files",
        "",
        f"Whole processes, medians of {found['rounds']} rounds in turns, files in the page cache; load average "
        f"{found['load_average']} at the start.",
        "Keepstep checks each footer, its digest and its schema as well, in a process apart from the command's.",
        "",
        "| | wall s | CPU s | Keepstep's wall against it | CPU |",
        "|---|---|---|---|---|",
    ]
    for who, name in names.items():
        against = ratios.get(who, {"wall_s": 1.0, "cpu_s": 1.0})
        values = (seconds[who]["wall_s"], seconds[who]["cpu_s"], against["wall_s"], against["cpu_s"])
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--duckdb", required=True, metavar="FOLDER", help="where DuckDB is installed")
    found = measure(parser.parse_args().duckdb)
    record(found, RESULTS / "dataset.json")
    text = table(found)
    (RESULTS / "dataset.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
