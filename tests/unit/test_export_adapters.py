"""A checkpoint of adapters as the model that it stands for."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepstep.actor.lora import add_adapters
from keepstep.config.schema import ModelConfig
from keepstep.errors import CheckpointError
from keepstep.export.hugging_face import check_exportable, export
from tests.unit import export_builder as build
from tests.unit.test_export import loaded, logits

SETTINGS = {"lora_rank": 2, "lora_alpha": 6, "target_modules": "all-linear"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return build.write_base(tmp_path / "Tiny-Qwen3", build.tiny_model(seed=1))


@pytest.fixture
def policy() -> Any:
    """The base with adapters that do something."""
    model = build.tiny_model(seed=1)
    add_adapters(model, ModelConfig(path="-", **SETTINGS))
    torch.manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(torch.randn_like(param) * 0.3)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path, base: Path, policy: Any) -> Path:
    adapters = [(name, param) for name, param in policy.named_parameters() if param.requires_grad]
    assert adapters and all("lora_" in name for name, _ in adapters)
    held: Any = SimpleNamespace(named_parameters=lambda: iter(adapters))
    return build.write_checkpoint(tmp_path, held, base, **SETTINGS)


def test_the_export_computes_what_base_and_adapters_compute(tmp_path: Path, checkpoint: Path, policy: Any):
    """C175: as PEFT itself merges them, and as its layers compute beside each other."""
    check_exportable(checkpoint)
    report = export(checkpoint, tmp_path / "out")
    assert report["num_parameters"] == sum(p.numel() for p in build.tiny_model(seed=1).parameters())
    found = logits(loaded(tmp_path / "out"))
    torch.testing.assert_close(found, logits(policy), atol=2e-5, rtol=2e-5)
    assert (logits(build.tiny_model(seed=1)) - found).abs().max() > 0.1, "the adapters do something"
    exported = dict(loaded(tmp_path / "out").named_parameters())
    for name, module in policy.named_modules():
        if hasattr(module, "merge"):
            module.merge()
            torch.testing.assert_close(exported[f"{name}.weight"], module.base_layer.weight, atol=1e-6, rtol=1e-6)


def test_without_its_base_it_is_refused_with_the_way_out(tmp_path: Path, base: Path, checkpoint: Path):
    shutil.rmtree(base)
    with pytest.raises(CheckpointError, match=f"holds adapters, and their base model {base} is not there"):
        export(checkpoint, tmp_path / "out")


def test_another_base_is_refused_by_the_tensor(tmp_path: Path, base: Path, checkpoint: Path):
    shutil.rmtree(base)
    build.write_base(base, build.tiny_model(seed=1, num_hidden_layers=1))
    with pytest.raises(CheckpointError, match=r"lacks 7 of 14 tensors .* model\.layers\.1\.mlp\.down_proj"):
        export(checkpoint, tmp_path / "out")
