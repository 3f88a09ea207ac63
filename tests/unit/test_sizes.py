"""docs/sizes.md: every number of its tables, computed anew from the models' shapes and the shipped configurations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from keepstep.config.load import load
from keepstep.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sizes.md").read_text()
GSM8K_ROWS = 7473
GB = 1e9
SHAPES = {
    "Qwen3-0.6B": {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Of their published config.json; both have 8 key-value heads, heads of 128 and a vocabulary of 151,936."""
NAMES = ("single-gpu", "qwen3-8b-gsm8k-8gpu", "qwen3-8b-gsm8k-kuberay-preemptible")


def rows(first: str) -> list[str]:
    """Cells of the table row that begins with `first`, of each table that has one."""
    found = re.findall(rf"^\| {re.escape(first)} \| (.*) \|$", TEXT, re.MULTILINE)
    assert found, first
    return found


def gigabytes(cells: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) GB(?!/)", cells)]


@pytest.fixture(scope="module")
def parameters() -> dict[str, int]:
    """Parameters of each model, counted on one that is built without values."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    found = {}
    for name, shapes in SHAPES.items():
        config = Qwen3Config(num_key_value_heads=8, head_dim=128, vocab_size=151936, **shapes)
        with torch.device("meta"):
            found[name] = sum(value.numel() for value in AutoModelForCausalLM.from_config(config).parameters())
    return found


def model_of(config: RunConfig) -> str:
    return Path(config.actor_rollout_ref.model.path).name


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_a_model(parameters: dict[str, int], name: str):
    (cells,) = rows(name)
    assert cells.split(" | ")[0] == f"{parameters[name]:,}"
    assert gigabytes(cells) == [round(share * parameters[name] / GB, 2) for share in (12, 4, 2, 4)]


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_a_configuration(parameters: dict[str, int], name: str):
    config = load(name)
    count, ranks = parameters[model_of(config)], config.world_size
    cells = rows(f"`{name}`")[0]
    assert cells.split(" | ")[0] == str(ranks)
    engine = 2 * count / config.actor_rollout_ref.rollout.tensor_model_parallel_size
    expected = [16 * count / ranks, 4 * count / ranks, engine, 12 * count / config.trainer.nnodes]
    assert gigabytes(cells) == [round(value / GB, 2) for value in expected]


@pytest.mark.parametrize("nodes", [1, 4])
def test_memory_of_a_host_that_holds_the_parameters(parameters: dict[str, int], nodes: int):
    (cells,) = rows(f"Qwen3-8B, {nodes} node" + "s" * (nodes > 1))
    expected = [share * parameters["Qwen3-8B"] / nodes for share in (16 + 12, 4)]
    assert gigabytes(cells) == [round(value / GB, 2) for value in expected]


@pytest.mark.parametrize("name", NAMES)
def test_disk_and_traffic_of_a_configuration(parameters: dict[str, int], name: str):
    config = load(name)
    count, trainer, kept = parameters[model_of(config)], config.trainer, config.checkpoint
    steps = trainer.total_epochs * GSM8K_ROWS // config.data.train_batch_size
    saves = {*range(trainer.save_freq, steps + 1, trainer.save_freq), steps}
    # save_freq divides upload_interval, so each multiple has a save of its own.
    uploads = {*range(config.s3.upload_interval, steps + 1, config.s3.upload_interval), steps}
    on_disk = kept.keep_last + kept.keep_best + steps // kept.keep_every + 1.2
    cells = rows(f"`{name}`")[1]
    assert [int(cell) for cell in cells.split(" | ")[:3]] == [steps, len(saves), len(uploads)]
    expected = [(12 * on_disk + 4) * count, (12 * len(uploads) + 4) * count]
    assert gigabytes(cells) == [round(value / GB, 1) for value in expected]


def test_the_volume_of_the_cluster_holds_its_configuration():
    size = yaml.safe_load((ROOT / "deployments" / "values.yaml").read_text())["storage"]["size"]
    assert int(size.removesuffix("Gi")) * 1024**3 > gigabytes(rows(f"`{NAMES[2]}`")[1])[0] * GB


def test_times_follow_from_their_bandwidths(parameters: dict[str, int]):
    count = parameters["Qwen3-8B"]
    expected = {
        "training stands still for a save": 12 * count / 8 / 20e9,
        "a save behind the loop, `full`": 12 * count / 2e9,
        "a save behind the loop, `sharded`": 12 * count / 4 / 2e9,
        "the same onto one NFS server": 12 * count / 1e9,
        "its verification": 12 * count / 2e9,
        "an upload": 12 * count / 1e9,
        "a resume from the store": 16 * count / 1e9,
    }
    for what, seconds in expected.items():
        assert rows(what)[0].split(" | ")[-1] == f"{seconds:.1f} s", what
