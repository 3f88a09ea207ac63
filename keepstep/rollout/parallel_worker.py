"""Imported by vLLM in every worker process of a tensor-parallel engine (`worker_extension_cls`), before its model."""

from __future__ import annotations

from keepstep.rollout import parallel, weight_transfer

weight_transfer.register()
parallel.end_with_engine()


class ParallelWorker:
    """Adds nothing to vLLM's worker: the import is what it is for."""
