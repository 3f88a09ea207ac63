"""The Ray actors: one process per role, each a thin shell around the engine part that it runs.

Imports of torch and vLLM stand inside the constructors, so the controller can name these classes without them.
"""

from __future__ import annotations

import os
import socket
from typing import Any


class Worker:
    """What every actor answers."""

    def identity(self) -> dict[str, Any]:
        """Where this process runs: {"pid", "start_time", "host"}."""
        from keepstep.processes import hostname, start_time

        return {"pid": os.getpid(), "start_time": start_time(os.getpid()), "host": hostname()}


class RankWorker(Worker):
    def __init__(self, spec: Any) -> None:
        from keepstep.actor.rank import Rank

        self._rank = Rank(spec)

    def rendezvous(self) -> tuple[str, int]:
        """An address on this node where the ranks can meet."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def connect(self, host: str, port: int) -> None:
        self._rank.connect(host, port)

    def load_initial(self, model_dir: str) -> None:
        self._rank.load_initial(model_dir)

    def load_checkpoint(self, folder: str, with_reference: bool) -> None:
        from pathlib import Path

        from keepstep.checkpoint.reader import read

        self._rank.load_checkpoint(read(Path(folder), with_reference=with_reference))

    def log_probs(self, batch: Any) -> Any:
        return self._rank.log_probs(batch)

    def update(self, batch: Any, log_probs: Any, mini_batches: Any) -> Any:
        return self._rank.update(batch, log_probs, mini_batches)

    def full_weights(self) -> Any:
        return self._rank.full_weights()

    def snapshot(self) -> Any:
        return self._rank.snapshot()

    def snapshot_reference(self) -> Any:
        return self._rank.snapshot_reference()

    def learning_rate(self) -> float:
        return self._rank.learning_rate()


class EngineWorker(Worker):
    def __init__(self, model_dir: str, config: Any, max_model_len: int, device: str) -> None:
        from keepstep.rollout.vllm_engine import VllmEngine

        self._engine = VllmEngine(model_dir, config, max_model_len=max_model_len, device=device)

    def update_weights(self, weights: Any, version: int) -> None:
        self._engine.update_weights(weights, version)

    def generate(self, requests: Any, version: int, max_tokens: int, temperature: float) -> Any:
        return self._engine.generate(requests, version=version, max_tokens=max_tokens, temperature=temperature)


class WriterWorker(Worker):
    def __init__(self) -> None:
        import keepstep.checkpoint.writer  # noqa: F401  (torch is imported before the first save, not during it)

    def save(self, request: Any, reference: list[Any], *snapshots: Any) -> Any:
        import ray

        from keepstep.checkpoint.writer import save

        # References inside a list arrive as references: the shards come once, at the first save only.
        shards = ray.get(reference, timeout=600) if reference else None
        return save(request, list(snapshots), shards)
