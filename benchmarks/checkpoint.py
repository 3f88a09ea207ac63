"""What a save costs training, against the ways that one would otherwise save, all in one run.

    python -m benchmarks.checkpoint [--folder DIR]

Two FSDP2 ranks under Ray train a model of 100 M parameters (random weights, random tokens). Measured, each several
times in turn: the step that saves (Keepstep's `Saver.save`, in steady state); a blocking `torch.save` of one file, as
layout `full` has it, and of every rank's own shards, neither made durable; `torch.distributed.checkpoint.async_save` of
the same state; and the training time around them.
Then: write bandwidth against `dd` with fsync, verification against hashing alone, process time of the commands that
only look. Writes results/checkpoint.json and checkpoint.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.commands import BAR_S, measure, record
from keepstep.actor.environment import rank_environment
from keepstep.actor.spec import RankSpec
from keepstep.attempts import Attempt
from keepstep.checkpoint.digest import READ_BYTES, SMALLEST_PART_BYTES
from keepstep.config.load import load, to_yaml
from keepstep.controller.cluster import LOCAL_ENVIRONMENT
from keepstep.controller.groups import RankGroup
from keepstep.controller.saver import SaveContext, Saver
from keepstep.controller.state import TrainState
from keepstep.controller.supervision import Supervisor
from keepstep.controller.workers import RankWorker, WriterWorker
from keepstep.controller.writers import FullWriter
from keepstep.events.log import EventLog, read_jsonl
from keepstep.run import RunDir, write_json

RESULTS = Path(__file__).parent / "results" / "checkpoint.json"
NUM_RANKS = 2
NUM_ROUNDS = 5
STEPS_BETWEEN = 2
STALL_BAR, VERIFY_BAR = 0.05, 0.90


class BenchRank(RankWorker):
    """A rank that can also train on random tokens and save in other ways."""

    def train(self, num_steps: int) -> float:
        """Seconds of forward, backward and update on a few random tokens."""
        import torch

        rank, begin = self._rank, time.monotonic()
        for _ in range(num_steps):
            tokens = torch.randint(0, 1000, (1, 32))
            rank.model(input_ids=tokens).logits.float().logsumexp(-1).mean().backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        return time.monotonic() - begin

    def blocking_save(self, path: str) -> float:
        """Seconds of `torch.save` of this rank's own shards of model and optimizer."""
        import torch

        begin = time.monotonic()
        torch.save(self._shards(), f"{path}-{self._rank.spec.rank}.pt")
        return time.monotonic() - begin

    def gathered_save(self, path: str) -> float:
        """Seconds of what writes one file: gather every tensor, `torch.save` on the first rank, the others wait."""
        import torch
        import torch.distributed as dist

        begin = time.monotonic()
        whole: dict[str, Any] = {}
        for name, tensor in _flat(self._shards()).items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self._rank.spec.rank == 0:
                whole[name] = full
        if self._rank.spec.rank == 0:
            torch.save(whole, f"{path}.pt")
        dist.barrier()
        return time.monotonic() - begin

    def async_save(self, path: str) -> float:
        """Seconds until `torch.distributed.checkpoint.async_save` returns; its upload goes on in a thread."""
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        if not hasattr(self, "_group"):
            self._group = dist.new_group(backend="gloo")
        begin = time.monotonic()
        self._pending = dcp.async_save(self._shards(), checkpoint_id=path, process_group=self._group)
        return time.monotonic() - begin

    def wait_for_async_save(self) -> float:
        begin = time.monotonic()
        self._pending.result()
        return time.monotonic() - begin

    def _shards(self) -> dict[str, Any]:
        rank = self._rank
        params = dict(rank.model.named_parameters())
        moments = {name: dict(rank.optimizer.state[param]) for name, param in params.items()}
        return {"model": {name: param.detach() for name, param in params.items()}, "optimizer": moments}


def _flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


class BenchWriter(WriterWorker):
    def peak_bytes(self) -> int:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_model(folder: Path) -> int:
    """Random weights of 100 M parameters; returns their number."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from keepstep.quickstart.char_qwen3 import build_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16000, hidden_size=768, intermediate_size=2048, num_hidden_layers=14, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=128, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class Bench:
    """Ranks, saver and their run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_params = make_model(folder / "model")
        self.run = RunDir.at(folder / "run")
        settings = [f"trainer.output_dir={self.run.root}", f"trainer.n_gpus_per_node={NUM_RANKS}", "s3.embedded=false",
                    "checkpoint.keep_last=1", "checkpoint.keep_best=0"]  # fmt: skip
        self.config = load("quickstart", settings)
        os.environ.update(LOCAL_ENVIRONMENT)
        ray.init(address="local", include_dashboard=False, num_cpus=NUM_RANKS + 1, log_to_driver=False)
        self.attempt = Attempt.acquire(self.run, others=[], lease_timeout_s=90, heartbeat_s=2)
        write_json(self.run.record, {"run_id": "bench"})
        self.events = EventLog(self.run.events, 1)
        self.supervisor = Supervisor(lambda: None)
        self.ranks = self._start_ranks()
        self.saver = self._start_saver()
        self.state = TrainState(num_updates=0)

    def close(self) -> None:
        self.saver.close()
        ray.shutdown()
        self.attempt.close({"status": "finished"})

    def all(self, method: str, *arguments: Any) -> float:
        """The slowest rank's seconds: the others wait for it in the next collective."""
        calls = [(f"rank {r}", getattr(actor, method).remote(*arguments)) for r, actor in enumerate(self.ranks.actors)]
        return max(self.supervisor.gather(calls, 600, method))

    def train(self, num_steps: int = STEPS_BETWEEN) -> float:
        begin = time.monotonic()
        self.all("train", num_steps)
        self.state.global_step += num_steps
        self.state.train_dataset_offset += num_steps
        self.state.num_updates += num_steps
        return time.monotonic() - begin

    def save(self) -> float:
        """Seconds for which the loop stands still."""
        begin = time.monotonic()
        self.saver.save(self.state, self.ranks)
        return time.monotonic() - begin

    def _start_ranks(self) -> RankGroup:
        actor = self.config.actor_rollout_ref.actor.model_copy(update={"use_kl_loss": False})
        specs = [
            RankSpec(
                rank,
                NUM_RANKS,
                "cpu",
                str(self.folder / "model"),
                str(self.folder / "model"),
                self.config.actor_rollout_ref.model,
                actor,
                self.config.actor_rollout_ref.ref,
                1.0,
                1000,
                1,
                120.0,
                correction=self.config.algorithm.rollout_correction,
                max_response_length=32,
                needs_reference=False,
                needs_old_log_probs=True,
            )
            for rank in range(NUM_RANKS)
        ]
        actors = [
            ray.remote(BenchRank)
            .options(num_cpus=1, runtime_env={"env_vars": rank_environment("cpu") | {"PYTHONPATH": os.getcwd()}})
            .remote()
            for _ in specs
        ]
        built = [(f"rank {spec.rank}", a.build.remote(spec)) for spec, a in zip(specs, actors, strict=True)]
        identities = self.supervisor.gather(built, self.config.timeouts.start_s, "starting the ranks")
        ranks = RankGroup(actors, identities, self.supervisor, self.config.timeouts)
        ranks.connect()
        ranks.load_initial(str(self.folder / "model"))
        return ranks

    def _start_saver(self) -> Saver:
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        self.writer = ray.remote(BenchWriter).options(num_cpus=0, runtime_env={"env_vars": environment}).remote()
        host = self.supervisor.gather([("writer", self.writer.identity.remote())], 60, "starting")[0]["host"]
        context = SaveContext(
            run=self.run, run_id="bench", config=self.config, config_yaml=to_yaml(self.config),
            model_files=str(self.folder / "model"), num_rows=10**9, has_reference=False, total_steps=10**6,
            resumed_step=None,
        )  # fmt: skip
        writers = FullWriter(self.writer, host, self.supervisor)
        return Saver(context, self.attempt, self.events, None, lambda: writers, writers)


def measure_saves(bench: Bench) -> dict[str, Any]:
    """Stalls, and the training time that is lost around a save, interleaved."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    bench.train(2)
    first_stall_s = bench.save()
    bench.saver.wait()
    for number in range(NUM_ROUNDS):
        note("steps_alone_s", bench.train())
        note("stall_keepstep_s", bench.save())
        note("steps_beside_keepstep_s", bench.train())
        note("rest_keepstep_s", bench.saver.wait())
        note("stall_torch_save_s", bench.all("blocking_save", str(bench.folder / "blocking")))
        note("stall_gathered_torch_save_s", bench.all("gathered_save", str(bench.folder / "gathered")))
        note("stall_dcp_async_s", bench.all("async_save", str(bench.folder / f"dcp-{number}")))
        note("steps_beside_dcp_async_s", bench.train())
        note("rest_dcp_async_s", bench.all("wait_for_async_save"))
        shutil.rmtree(bench.folder / f"dcp-{number}")
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"first_stall_s": first_stall_s, "all": found, **medians}


def measure_bandwidth(bench: Bench) -> dict[str, Any]:
    """End-to-end bytes per second of the saves against `dd` with fsync of the same number of bytes."""
    saves = [e for e in read_jsonl(bench.run.events) if e["event"] == "checkpoint_saved"]
    num_bytes = saves[-1]["num_bytes"]
    bench.train(1)
    bench.save()
    bench.saver.wait()
    quiet = [e for e in read_jsonl(bench.run.events) if e["event"] == "checkpoint_saved"][-1]
    source = max(bench.run.checkpoint(bench.run.steps()[-1]).rglob("*"), key=lambda path: path.stat().st_size)
    dd: list[float] = []
    for _ in range(3):
        target, copied, begin = bench.folder / "dd", 0, time.monotonic()
        while copied < num_bytes:
            count = min(source.stat().st_size, num_bytes - copied)
            subprocess.run(
                ["dd", f"if={source}", f"of={target}", "bs=16M", "conv=fsync,notrunc", "oflag=append",
                 "iflag=count_bytes", f"count={count}", "status=none"],
                check=True,
            )  # fmt: skip
            copied += count
        dd.append(time.monotonic() - begin)
        target.unlink()
    dd_s = statistics.median(dd)
    return {"num_bytes": num_bytes, "save_behind_the_loop_s": quiet["write_s"], "dd_fsync_s": dd_s,
            "share_of_dd_bandwidth": dd_s / quiet["write_s"]}  # fmt: skip


def hash_alone(paths: list[Path]) -> float:
    """Seconds of SHA-256 over the same parts with all cores, reading from the disk as verification does."""

    def one(job: tuple[Path, int]) -> None:
        path, offset = job
        digest, end = hashlib.sha256(), offset + SMALLEST_PART_BYTES
        with path.open("rb") as file:
            file.seek(offset)
            while offset < end and (block := file.read(READ_BYTES)):
                digest.update(block)
                offset += len(block)

    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.monotonic()
    jobs = [(path, offset) for path in paths for offset in range(0, path.stat().st_size, SMALLEST_PART_BYTES)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(one, jobs))
    return time.monotonic() - begin


def measure_verify(bench: Bench) -> dict[str, Any]:
    from keepstep.checkpoint.verify import verify

    folder = bench.run.checkpoint(bench.run.steps()[-1])
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    alone, whole = [], []
    for _ in range(5):
        alone.append(hash_alone(paths))
        verdict = verify(folder)
        assert verdict.resumable, verdict.reasons
        whole.append(verdict.seconds)
    hash_s, verify_s = statistics.median(alone), statistics.median(whole)
    size = verdict.num_bytes
    return {"num_bytes": size, "hash_alone_s": hash_s, "verify_s": verify_s, "speed_ratio": hash_s / verify_s,
            "verify_gb_per_s": size / verify_s / 1e9, "read_from": verdict.read_from}  # fmt: skip


def summary(saves: dict[str, Any], bandwidth: dict[str, Any], verification: dict[str, Any]) -> dict[str, Any]:
    stall = saves["stall_keepstep_s"]
    return {
        "stall_vs_torch_save_of_one_file": stall / saves["stall_gathered_torch_save_s"],
        "stall_vs_torch_save_of_own_shards": stall / saves["stall_torch_save_s"],
        "stall_vs_torch_save_bar": STALL_BAR,
        "stall_vs_dcp_async": stall / saves["stall_dcp_async_s"],
        "steps_beside_a_save_vs_alone": saves["steps_beside_keepstep_s"] / saves["steps_alone_s"],
        "steps_beside_dcp_async_vs_alone": saves["steps_beside_dcp_async_s"] / saves["steps_alone_s"],
        "share_of_dd_bandwidth": bandwidth["share_of_dd_bandwidth"],
        "verify_vs_hashing_alone": verification["speed_ratio"],
        "verify_vs_hashing_alone_bar": VERIFY_BAR,
    }


def table(results: dict[str, Any]) -> str:
    """The results for a reader, each with its bar."""
    ratios, saves, written, read = (results[key] for key in ("ratios", "saves", "bandwidth", "verification"))

    def judged(value: float, bar: float, at_most: bool) -> str:
        met = value <= bar if at_most else value >= bar
        return f"{value:.3f} (bar {'≤' if at_most else '≥'} {bar}: {'met' if met else 'missed'})"

    one_file, own = ratios["stall_vs_torch_save_of_one_file"], ratios["stall_vs_torch_save_of_own_shards"]
    rows = [
        ("stall per save, Keepstep", f"{saves['stall_keepstep_s']:.3f} s", ""),
        ("against a blocking torch.save of one file", f"{saves['stall_gathered_torch_save_s']:.3f} s",
         judged(one_file, STALL_BAR, at_most=True)),
        ("against a blocking torch.save of own shards", f"{saves['stall_torch_save_s']:.3f} s",
         judged(own, STALL_BAR, at_most=True)),
        ("against torch.distributed.checkpoint.async_save", f"{saves['stall_dcp_async_s']:.3f} s",
         f"{ratios['stall_vs_dcp_async']:.3f}"),
        ("steps beside a save, against steps alone", f"{saves['steps_beside_keepstep_s']:.2f} s",
         f"{ratios['steps_beside_a_save_vs_alone']:.3f}"),
        ("steps beside async_save, against steps alone", f"{saves['steps_beside_dcp_async_s']:.2f} s",
         f"{ratios['steps_beside_dcp_async_vs_alone']:.3f}"),
        ("save behind the loop, against dd with fsync", f"{written['save_behind_the_loop_s']:.2f} s",
         f"{ratios['share_of_dd_bandwidth']:.3f} of its bandwidth"),
        ("verification, against hashing alone", f"{read['verify_s']:.2f} s ({read['verify_gb_per_s']:.2f} GB/s)",
         judged(ratios["verify_vs_hashing_alone"], VERIFY_BAR, at_most=False)),
    ]  # fmt: skip
    for name, key in (("verify --quick", "verify_quick_s"), ("plan", "plan_s"), ("ls", "ls_s")):
        seconds = results["commands"][key]
        rows.append((f"process time of {name}", f"{seconds:.2f} s", judged(seconds, BAR_S, at_most=True)))
    head = [
        f"# Saves of {written['num_bytes'] / 1e9:.2f} GB ({results['num_params'] / 1e6:.0f} M parameters, AdamW)",
        "",
        f"Medians of {NUM_ROUNDS} rounds in one run; two ranks use up {len(os.sched_getaffinity(0))} cores.",
        "torch's own saves are not made durable; Keepstep's is, behind the loop. No digest is computed in a rank: the",
        "writer hashes what it writes. Verification reads from the disk.",
        "",
        "| | time | ratio |",
        "|---|---|---|",
    ]
    tail = [
        "",
        f"Peak memory of the writer: {results['writer_peak_bytes'] / written['num_bytes']:.2f} times the state.",
        "",
    ]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows), *tail])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp") / f"keepstep-bench-{os.getpid()}")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True)
    bench = None
    try:
        bench = Bench(folder)
        saves, bandwidth = measure_saves(bench), measure_bandwidth(bench)
        writer = bench.supervisor.gather([("writer", bench.writer.peak_bytes.remote())], 60, "peak memory")[0]
        verification = measure_verify(bench)
    finally:
        if bench is not None:
            bench.close()
        shutil.rmtree(folder, ignore_errors=True)
    ratios = summary(saves, bandwidth, verification)
    results = {
        "num_params": bench.num_params,
        "ratios": ratios,
        "saves": saves,
        "bandwidth": bandwidth,
        "verification": verification,
        "writer_peak_bytes": writer,
        "commands": measure(),
    }
    record(_rounded(results), RESULTS)
    RESULTS.with_suffix(".md").write_text(table(results))
    print(json.dumps(_rounded({"ratios": ratios}), indent=2))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return round(value, 4) if isinstance(value, float | np.floating) else value


if __name__ == "__main__":
    sys.exit(main())
