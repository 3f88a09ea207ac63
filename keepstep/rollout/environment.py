"""Environment of an engine process; vLLM reads it on import, so it is set before the process starts."""

from __future__ import annotations

from keepstep.config.schema import RolloutConfig

PORTS_PER_ENGINE = 16


def engine_port(config: RolloutConfig, index: int) -> int:
    """First port of engine `index`: ranges of engines are disjoint."""
    return config.port + PORTS_PER_ENGINE * index


def engine_environment(config: RolloutConfig, device: str, index: int) -> dict[str, str]:
    """Variables for the process of engine `index`."""
    common = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_PORT": str(engine_port(config, index)),
    }
    if device != "cpu":
        return common
    return common | {
        # Two OpenMP threads next to another busy process are many times slower than one, and results would
        # depend on the batch.
        "OMP_NUM_THREADS": "1",
        # vLLM would give every worker process a NUMA node of its own, and ends where there are fewer.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Otherwise the first generate compiles sampler helpers for seconds, in spite of eager mode.
        "TORCH_COMPILE_DISABLE": "1",
    }
