"""Keepstep: GRPO training that survives preemption. The engine; it knows nothing of Prefect."""

__version__ = "0.2.0"
