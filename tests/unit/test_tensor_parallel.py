"""What `tensor_model_parallel_size` must divide, before any GPU is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.errors import ConfigError
from keepstep.preflight import device
from keepstep.preflight.model import check_tensor_parallel

QWEN3_8B = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288}
SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("model", "size", "problem"),
    [
        (QWEN3_8B, 1, ""),
        (QWEN3_8B, 2, ""),
        (QWEN3_8B, 16, ""),
        (QWEN3_8B, 3, "num_attention_heads 32, num_key_value_heads 8"),
        (QWEN3_8B, 64, "num_attention_heads 32"),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536},
            2,
            "num_attention_heads 9, num_key_value_heads 3",
        ),
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}, 6, "num_key_value_heads 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 90}, 4, "intermediate_size 90"),
        ({"num_attention_heads": 8}, 4, ""),
        ({"text_config": {"num_attention_heads": 8}}, 3, "num_attention_heads 8"),
        ({"num_attention_heads": 8, "num_key_value_heads": None}, 3, "num_attention_heads 8"),
    ],
)
def test_it_divides_the_model(tmp_path: Path, model: dict[str, Any], size: int, problem: str):
    """vLLM's rules: heads and the inner size are divided; key-value heads are divided or, where fewer, repeated."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    if not problem:
        check_tensor_parallel(size, tmp_path)
        return
    with pytest.raises(ConfigError) as raised:
        check_tensor_parallel(size, tmp_path)
    assert raised.value.message == f"{SIZE}={size} does not divide the model of {tmp_path}: {problem}."


@pytest.mark.parametrize(("size", "gpus", "taken"), [(2, 8, True), (8, 8, True), (3, 8, False), (16, 8, False)])
def test_on_gpus_it_divides_those_of_a_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, gpus: int, taken: bool
):
    settings = [f"trainer.n_gpus_per_node={gpus}", f"{SIZE}={size}", "recovery.warm_spare=false"]
    device.check_device(load("quickstart", [*settings, "trainer.device=cpu"]))
    monkeypatch.setattr(device, "_CUDA_CONTROL", tmp_path)
    on_gpus = load("quickstart", [*settings, "trainer.device=cuda"])
    if taken:
        device.check_device(on_gpus)
        return
    with pytest.raises(ConfigError, match=f"{SIZE}={size} does not divide trainer.n_gpus_per_node={gpus}"):
        device.check_device(on_gpus)
