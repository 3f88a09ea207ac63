"""Tiny real models, and checkpoints that hold them as their policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from keepstep.actor.shards import RankSnapshot, ReferenceSnapshot
from keepstep.checkpoint.convert import convert
from keepstep.checkpoint.writer import save
from keepstep.quickstart.char_qwen3 import build_tokenizer
from keepstep.run import RunDir, write_json
from tests.unit import builder

GENERATION = '{\n "temperature": 0.6,\n "top_p": 0.95,\n "do_sample": true\n}\n'
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="


def tiny_model(tied: bool = True, seed: int = 3, **changes: Any) -> Any:
    """A Qwen3 of a few thousand parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(seed)
    return _distinct(Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=tied, **(sizes | changes))))


def tiny_mixture() -> Any:
    """A Qwen3 whose layers are mixtures of four experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(4)
    return _distinct(
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=24,
                moe_intermediate_size=8,
                num_experts=4,
                num_experts_per_tok=2,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                tie_word_embeddings=False,
                max_position_embeddings=64,
            )
        )
    )


def _distinct(model: Any) -> Any:
    """No two elements alike, norms included, so that a mix-up shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def write_base(folder: Path, model: Any, generation: str | None = GENERATION) -> Path:
    """The model's Hugging Face folder, as its makers would publish it."""
    model.save_pretrained(folder)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(generation)
    return folder


def write_checkpoint(
    root: Path, model: Any, base: Path, step: int = 20, layout: str = "full", **model_settings: Any
) -> Path:
    """A verified checkpoint of a run below `root`, whose policy is `model`; two ranks wrote it."""
    run = RunDir.at(root / "run")
    if not run.has_record():
        write_json(run.record, {"run_id": "run-a"})
    shards = [_snapshot(model, rank) for rank in range(2)]
    config = {
        "actor_rollout_ref": {"model": {"path": str(base), **model_settings}, "rollout": {"n": 8}},
        "trainer": {"output_dir": str(run.root), "experiment_name": "mine", "seed": 42},
    }
    request = builder.request(run, step, model_files=str(base), config_yaml=yaml.safe_dump(config))
    save(request, shards, [ReferenceSnapshot(shard.params, shard.shapes) for shard in shards])
    found = run.checkpoint(step)
    return found if layout == "full" else convert(found, root / "sharded" / "checkpoints" / f"step_{step}", layout)


def _snapshot(model: Any, rank: int) -> RankSnapshot:
    full = {name: value.detach().numpy() for name, value in model.named_parameters()}
    params = {name: builder._chunk(value, rank, 2) for name, value in full.items()}
    small = builder.snapshots(0)[rank]
    optimizer = {
        name: {"step": small.optimizer["norm.weight"]["step"], "exp_avg": value, "exp_avg_sq": value * value}
        for name, value in params.items()
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(full)}]
    shapes = {name: value.shape for name, value in full.items()}
    return RankSnapshot(rank, params, shapes, optimizer, groups, {"last_epoch": 3}, small.rng)
