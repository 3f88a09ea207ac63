"""Moving checkpoints to a store and back, against s3fs's own `put` and `get` and against boto3, with their defaults.

    python -m benchmarks.s3 [--gb 2] [--rounds 3]

Every client sends and fetches the same files to and from a null server (`benchmarks.null_s3`) in a process of its
own, one client after the other, in rounds; the medians are reported. Keepstep's figures include its digests both ways
and the fsync of what it fetches. Beside it: what a niced upload takes from a loop that computes, and what a plan over
10,000 stored checkpoints asks for. Writes benchmarks/results/s3.json and s3.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepstep.checkpoint import layout, manifest
from keepstep.checkpoint.digest import FileDigest, digest_file
from keepstep.checkpoint.plan import plan
from keepstep.run import RunDir
from keepstep.storage.remote import RemoteRun, object_key, step_key
from keepstep.storage.s3 import S3Store
from tests.unit.s3_stub import Stored, Stub, sha256

RESULTS = Path(__file__).parent / "results"
CLIENTS = ("keepstep", "s3fs", "boto3")
NUM_FILES = 8
NUM_REMOTE = 10_000
BARS = {"cpu": 0.6, "memory": 0.15, "speed": 1.5}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
TIMEOUT_S = 600.0
STEPS_S = 45.0
"""Longest time of computing beside an upload, which a busy machine may starve."""

Record = dict[str, Any]


# What the children do


def transfer(client: str, way: str, url: str, source: Path, target: Path) -> Record:
    """Move every file of `source` by one client and say what it took of this process."""
    files = sorted(source.iterdir())
    act = {"keepstep": _keepstep, "s3fs": _s3fs, "boto3": _boto3}[client](way, url, source, files, target)
    before, begin = _cpu_seconds(), time.monotonic()
    act()
    wall_s, cpu_s = time.monotonic() - begin, _cpu_seconds() - before
    return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _keepstep(way: str, url: str, source: Path, files: list[Path], target: Path) -> Callable[[], None]:
    # A checkpoint's digests are known before its upload: they are in its manifest.
    records = json.loads(source.with_suffix(".json").read_text())
    digests = {name: FileDigest.from_record(found) for name, found in records.items()}
    # Made out here as the other clients are: imports are not measured, the first connection is.
    made = S3Store("bucket", "run", endpoint_url=url, key="k", secret="s")

    def act() -> None:
        with made as store:
            for file in files:
                if way == "upload":
                    store.put_file(file, file.name, digests[file.name])
                else:
                    store.get_file(file.name, target / file.name, digests[file.name])

    return act


def _s3fs(way: str, url: str, _source: Path, files: list[Path], target: Path) -> Callable[[], None]:
    import s3fs

    fs = s3fs.S3FileSystem(endpoint_url=url, key="k", secret="s")
    keys, here = [f"bucket/s3fs/{file.name}" for file in files], [str(file) for file in files]
    there = [str(target / file.name) for file in files]
    return (lambda: fs.put(here, keys)) if way == "upload" else (lambda: fs.get(keys, there))


def _boto3(way: str, url: str, _source: Path, files: list[Path], target: Path) -> Callable[[], None]:
    import boto3

    client = boto3.client("s3", endpoint_url=url)

    def act() -> None:
        for file in files:
            if way == "upload":
                client.upload_file(str(file), "bucket", f"boto3/{file.name}")
            else:
                client.download_file("bucket", f"boto3/{file.name}", str(target / file.name))

    return act


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def plan_remote(url: str, folder: Path) -> Record:
    """A resume plan for a run whose folder is gone, over what the store holds."""
    with S3Store("bucket", "run", endpoint_url=url, key="k", secret="s") as store:
        begin, before = time.monotonic(), _cpu_seconds()
        found = plan(
            RunDir.at(folder / "gone"),
            policy="prefer_multiple",
            prefer_multiple=100,
            max_rewind_steps=None,
            remote=RemoteRun(store, "bucket", "run"),
            expected_run_id="run-a",
        )
        return {"step": found.step, "wall_s": time.monotonic() - begin, "cpu_s": _cpu_seconds() - before}


# What the parent does


@contextmanager
def null_server(folder: Path, niceness: int = 0) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.null_s3", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(niceness)) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def child(*arguments: str, niceness: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.s3", "--child", *arguments],
        stdout=subprocess.PIPE, text=True, env={**os.environ, **CREDENTIALS}, preexec_fn=lambda: os.nice(niceness),
    )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> Record:
    stdout, _ = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        raise RuntimeError(f"a case ended with {process.returncode}")
    found: Record = json.loads(stdout)
    return found


def make_files(folder: Path, num_bytes: int) -> Path:
    """Incompressible files under `files/` and their digests in `files.json`."""
    source = folder / "files"
    source.mkdir()
    for number in range(NUM_FILES):
        with (source / f"file-{number}").open("wb") as file:
            for _ in range(num_bytes // NUM_FILES // (1 << 20)):
                file.write(os.urandom(1 << 20))
    digests = {path.name: digest_file(path).to_record() for path in source.iterdir()}
    source.with_suffix(".json").write_text(json.dumps(digests))
    return source


def measure_transfers(folder: Path, source: Path, rounds: int) -> Record:
    """Medians over `rounds` of every client, both ways."""
    gb = sum(path.stat().st_size for path in source.iterdir()) / 1e9
    found: dict[str, list[Record]] = {}
    target = folder / "back"
    with null_server(source) as url:
        for _ in range(rounds):
            for way in ("upload", "restore"):
                for client in CLIENTS:
                    target.mkdir()
                    one = answer(child("transfer", client, way, url, str(source), str(target)))
                    found.setdefault(f"{way} {client}", []).append(one)
                    if way == "restore":
                        check_equal(source, target)
                    shutil.rmtree(target)
    return {
        name: {
            "wall_s": round(statistics.median(one["wall_s"] for one in ones), 2),
            "gb_per_s": round(gb / statistics.median(one["wall_s"] for one in ones), 3),
            "cpu_s_per_gb": round(statistics.median(one["cpu_s"] for one in ones) / gb, 2),
            "peak_mb": round(statistics.median(one["peak_bytes"] for one in ones) / 1e6),
            "walls_s": [round(one["wall_s"], 2) for one in ones],
        }
        for name, ones in found.items()
    }


def check_equal(source: Path, target: Path) -> None:
    """A client that dropped bytes would be quick."""
    for path in source.iterdir():
        subprocess.run(["cmp", str(path), str(target / path.name)], check=True, timeout=TIMEOUT_S)


def ratios(transfers: Record) -> Record:
    """Keepstep against each other client: CPU and memory (less is better), speed (more is better)."""
    found = {}
    for way in ("upload", "restore"):
        ours = transfers[f"{way} keepstep"]
        for other in CLIENTS[1:]:
            theirs = transfers[f"{way} {other}"]
            found[f"{way} vs {other}"] = {
                "cpu": round(ours["cpu_s_per_gb"] / theirs["cpu_s_per_gb"], 2),
                "memory": round(ours["peak_mb"] / theirs["peak_mb"], 2),
                "speed": round(theirs["wall_s"] / ours["wall_s"], 2),
            }
    return found


def measure_steps(source: Path) -> Record:
    """Median time of a step that computes on all cores: alone, beside a niced upload, alone again."""
    import numpy as np

    matrix = np.random.default_rng(0).random((1200, 1200), dtype=np.float32)

    def step() -> float:
        begin = time.monotonic()
        for _ in range(4):
            matrix @ matrix
        return time.monotonic() - begin

    def alone() -> list[float]:
        return [step() for _ in range(60)]

    step()
    before = alone()
    beside: list[float] = []
    with null_server(source, niceness=19) as url:
        process = child("transfer", "keepstep", "upload", url, str(source), str(source), niceness=19)
        deadline = time.monotonic() + STEPS_S
        while process.poll() is None and time.monotonic() < deadline:
            beside.append(step())
        process.kill()
        process.communicate()
    after = alone()
    idle_s = statistics.median(before + after)
    return {
        "idle_ms": round(idle_s * 1e3, 2),
        "while_uploading_ms": round(statistics.median(beside) * 1e3, 2),
        "ratio": round(statistics.median(beside) / idle_s, 3),
        "num_steps_while_uploading": len(beside),
    }


def measure_plan(folder: Path) -> Record:
    files = {
        **dict.fromkeys(layout.required_files(), b"x" * 100),
        layout.CONFIG: b"a: 1\n",
    }
    digests = {}
    for name, data in files.items():
        path = folder / "small"
        path.write_bytes(data)
        digests[name] = digest_file(path)
    with Stub() as stub:
        for step in range(20, 20 * NUM_REMOTE + 20, 20):
            found = manifest.build(
                run_id="run-a", attempt=1, step=step, world_size=1, required=list(layout.required_files()),
                files=digests, tensors={}, metrics={}, nonfinite={},
            )  # fmt: skip
            for name, data in files.items():
                stub.objects[f"run/{object_key(step, name, digests[name])}"] = Stored(data, sha256(data))
            stub.objects[f"run/{step_key(step, layout.MANIFEST)}"] = Stored(found, sha256(found))
        result = answer(child("plan", stub.url, str(folder)))
        result |= {
            "num_checkpoints": NUM_REMOTE,
            "num_objects": len(stub.objects),
            "num_list_requests": stub.count("GET", "list-type=2"),
            "num_manifests_read": stub.count("GET", layout.MANIFEST),
            "num_requests": len(stub.requests),
        }
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in result.items()}


def table(results: Record) -> str:
    """The results for a reader."""
    lines = [
        f"# Uploads and restores of {results['gb']} GB, null server",
        "",
        f"Medians of {results['rounds']} rounds; load average {results['load_average']} on {os.cpu_count()} cores.",
        "CPU and memory of the client process. Keepstep's include SHA-256 of every byte.",
        *_warning(results),
        "",
        "| | wall s | GB/s | CPU s/GB | peak MB |",
        "|---|---|---|---|---|",
    ]
    for name, one in results["transfers"].items():
        lines.append(f"| {name} | {one['wall_s']} | {one['gb_per_s']} | {one['cpu_s_per_gb']} | {one['peak_mb']} |")
    lines += ["", "| Keepstep against | CPU | memory | speed |", "|---|---|---|---|"]
    for name, one in results["ratios"].items():
        cells = [_judged(one[kind], kind, barred=name.endswith("s3fs")) for kind in ("cpu", "memory", "speed")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    steps, planned = results["steps"], results["plan"]
    lines += [
        "",
        f"A step that computes on all cores: {steps['idle_ms']} ms alone, {steps['while_uploading_ms']} ms beside a "
        f"niced upload (ratio {steps['ratio']}).",
        "",
        f"A plan over {planned['num_checkpoints']} stored checkpoints ({planned['num_objects']} objects): "
        f"{planned['num_list_requests'] - 1} pages of one listing and one of the chosen step, "
        f"{planned['num_manifests_read']} manifest read, {planned['num_requests']} requests in all, "
        f"{planned['wall_s']} s, {planned['cpu_s']} s of CPU (a stub in Python answers).",
        "",
    ]
    return "\n".join(lines)


def _warning(results: Record) -> list[str]:
    busy = results["load_average"] > (os.cpu_count() or 1)
    return ["Other work held the cores meanwhile: wall times and the step's ratio are noise."] if busy else []


def _judged(value: float, kind: str, barred: bool) -> str:
    if not barred:
        return str(value)
    met = value >= BARS[kind] if kind == "speed" else value <= BARS[kind]
    return f"{value} (bar {'≥' if kind == 'speed' else '≤'} {BARS[kind]}: {'met' if met else 'missed'})"


def scratch_root(num_bytes: int) -> str:
    """Memory where it has room, so that no disk is measured."""
    memory = Path("/dev/shm")
    enough = memory.is_dir() and shutil.disk_usage(memory).free > 4 * num_bytes
    return str(memory) if enough else tempfile.gettempdir()


def measure(gb: float, rounds: int) -> Record:
    num_bytes = int(gb * 1e9)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=scratch_root(num_bytes)) as name:
        folder = Path(name)
        source = make_files(folder, num_bytes)
        transfers = measure_transfers(folder, source, rounds)
        return {
            "gb": gb,
            "rounds": rounds,
            "load_average": round(load, 1),
            "transfers": transfers,
            "ratios": ratios(transfers),
            "bars_vs_s3fs": BARS,
            "steps": measure_steps(source),
            "plan": measure_plan(folder),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, *rest = args.child
        if kind == "plan":
            found = plan_remote(rest[0], Path(rest[1]))
        else:
            client, way, url, source, target = rest
            found = transfer(client, way, url, Path(source), Path(target))
        print(json.dumps(found))
        return
    results = measure(args.gb, args.rounds)
    # Not at the top: it imports torch, which would count as every client's memory.
    from benchmarks.commands import record

    record(results, RESULTS / "s3.json")
    text = table(results)
    (RESULTS / "s3.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
