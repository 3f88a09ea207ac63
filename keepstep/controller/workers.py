"""The Ray actors: one process per role, each a thin shell around the engine part that it runs.

Imports of torch and vLLM stand inside the constructors, so the controller can name these classes without them. Ranks
and engines are then built by a call of its own: between the two a process can stand by as a spare.
"""

from __future__ import annotations

import os
from typing import Any

WRITER_NICENESS = 5
FETCH_TIMEOUT_S = 600.0


class Worker:
    """What every actor answers."""

    def identity(self) -> dict[str, Any]:
        """Where this process runs, and its memory: {"pid", "start_time", "host", "node_id", "rss_bytes"}."""
        import ray

        from keepstep.processes import hostname, rss_bytes, start_time

        pid, node_id = os.getpid(), ray.get_runtime_context().get_node_id()
        return {
            "pid": pid,
            "start_time": start_time(pid),
            "host": hostname(),
            "node_id": node_id,
            "rss_bytes": rss_bytes(pid),
        }


class RankWorker(Worker):
    def __init__(self) -> None:
        # All that `build` and `connect` will import: a spare must have nothing left to wait for.
        from transformers import AutoModelForCausalLM  # noqa: F401

        import keepstep.actor.rank  # noqa: F401

    def build(self, spec: Any) -> dict[str, Any]:
        from keepstep.actor.rank import Rank

        self._rank = Rank(spec)
        return self.identity()

    def rendezvous(self) -> tuple[str, int]:
        import ray

        host = ray.util.get_node_ip_address()
        return host, self._rank.listen(host)

    def connect(self, host: str, port: int) -> None:
        self._rank.connect(host, port)

    def load_initial(self, model_dir: str) -> None:
        self._rank.load_initial(model_dir)

    def load_checkpoint(self, folder: str, staged: str | None, rebuild_scheduler_at: int | None) -> Any:
        return self._rank.load_checkpoint(folder, staged, rebuild_scheduler_at)

    def load_weights(self, folder: str, skip_mismatched: bool) -> list[str]:
        return self._rank.load_weights(folder, skip_mismatched)

    def probe(self, prompts: list[list[int]]) -> list[list[float]]:
        return self._rank.probe(prompts)

    def log_probs(self, batch: Any) -> Any:
        return self._rank.log_probs(batch)

    def update(self, batch: Any, log_probs: Any, mini_batches: Any) -> Any:
        return self._rank.update(batch, log_probs, mini_batches)

    def refresh_reference(self) -> None:
        self._rank.refresh_reference()

    def full_weights(self, dtype: str) -> Any:
        return self._rank.full_weights(dtype)

    def snapshot(self, shared: bool) -> Any:
        return self._rank.snapshot(shared)

    def snapshot_reference(self) -> Any:
        return self._rank.snapshot_reference()

    def learning_rate(self) -> float:
        return self._rank.learning_rate()


class EngineWorker(Worker):
    def __init__(self, config: Any, device: str) -> None:
        import keepstep.rollout.vllm_engine  # noqa: F401

        self._config, self._device = config, device

    def build(self, model_dir: str, max_model_len: int, can_sleep: bool) -> dict[str, Any]:
        from keepstep.rollout.vllm_engine import VllmEngine

        self._engine = VllmEngine(
            model_dir, self._config, max_model_len=max_model_len, device=self._device, can_sleep=can_sleep
        )
        return self.identity() | {"workers": self._engine.workers()}

    def update_weights(self, weights: Any, version: int) -> None:
        self._engine.update_weights(weights, version)

    def generate(self, requests: Any, version: int, max_tokens: int, temperature: float, slice_s: float | None) -> Any:
        self._engine.begin(requests, version=version, max_tokens=max_tokens, temperature=temperature)
        return self._engine.go_on(slice_s)

    def sleep(self) -> None:
        self._engine.sleep()

    def go_on(self, slice_s: float | None) -> Any:
        return self._engine.go_on(slice_s)


class WriterWorker(Worker):
    """The writer of layout `full`, or one of those of layout `sharded`."""

    def __init__(self) -> None:
        # Behind ranks and engine, which hold up the next step; a save holds up nothing before the next save.
        os.nice(WRITER_NICENESS)
        import keepstep.checkpoint.writer  # noqa: F401  (torch is imported before the first save, not during it)

        self._store: Any = None

    def save(self, request: Any, reference: list[Any], snapshots: list[Any]) -> Any:
        from keepstep.checkpoint.writer import save

        return save(request, self._fetch(snapshots), self._fetch(reference) or None)

    def rendezvous(self) -> tuple[str, int]:
        """Where the writers meet: at the first of them, which is asked."""
        import ray

        from keepstep.checkpoint.sharded import listen

        host = ray.util.get_node_ip_address()
        self._store = listen(host)
        return host, self._store.port

    def connect(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        from keepstep.checkpoint.sharded import ShardWriter

        self._shard_writer = ShardWriter(host, port, rank, world_size, timeout_s, self._store)

    def begin(self, request: Any, snapshot: list[Any], reference: list[Any]) -> None:
        """Make the folder in which all writers write; by the first of them alone."""
        from keepstep.checkpoint.writer import begin_sharded

        begin_sharded(request, self._fetch(snapshot)[0], self._fetch(reference) or None)

    def write_shards(self, request: Any, snapshot: list[Any], reference: list[Any]) -> Any:
        from keepstep.actor.shards import open_snapshot
        from keepstep.checkpoint.writer import temporary_folder

        opened = open_snapshot(self._fetch(snapshot)[0])
        return self._shard_writer.write(temporary_folder(request), opened, next(iter(self._fetch(reference)), None))

    def finish(self, request: Any, snapshots: list[Any], written: list[Any]) -> Any:
        """Publish what all writers wrote; by the first of them alone."""
        from keepstep.checkpoint.writer import finish_sharded

        return finish_sharded(request, self._fetch(snapshots), written)

    def discard(self, request: Any) -> None:
        """Give back the room of a save that failed."""
        from keepstep.checkpoint.writer import discard

        discard(request)

    def _fetch(self, references: list[Any]) -> list[Any]:
        """References inside a list arrive as references; what they stand for is on this node already, or comes now."""
        import ray

        return ray.get(references, timeout=FETCH_TIMEOUT_S)
