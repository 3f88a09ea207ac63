"""Environment of a rank's process, set before it starts. Light: whoever starts ranks need not import torch."""

from __future__ import annotations


def rank_environment(device: str) -> dict[str, str]:
    common = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    # torch.compile would keep a pool of processes that nobody here knows of.
    common |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # More threads than cores make two busy ranks many times slower; one thread also fixes the order of sums.
    return common | ({"OMP_NUM_THREADS": "1"} if device == "cpu" else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
