"""Makes the folders beside it with verl's own checkpoint manager: see README.md."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

WORLD_SIZE, NUM_STEPS = 2, 4


def build(kind: str) -> torch.nn.Module:
    """A model of a few thousand parameters, sharded over all ranks in the way that verl's FSDP workers do."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
    if kind == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    return FullyShardedDataParallel(
        model, device_mesh=mesh, use_orig_params=False, sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )  # fmt: skip


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler) -> None:
    for step in range(NUM_STEPS):
        tokens = torch.arange(16).view(2, 8) + step
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def work(rank: int, kind: str, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ["WORLD_SIZE"] = str(WORLD_SIZE)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    random.seed(rank)
    np.random.seed(rank)
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, constant)
    train(model, optimizer, scheduler)
    step_folder = folder / f"global_step_{NUM_STEPS}"
    manager = FSDPCheckpointManager(model, optimizer, scheduler)
    manager.save_checkpoint(str(step_folder / "actor"), global_step=NUM_STEPS)
    if rank == 0:
        # As verl's trainers do after the actor's part.
        loader = StatefulDataLoader(list(range(40)), batch_size=4)
        rows = iter(loader)
        for _ in range(NUM_STEPS):
            next(rows)
        torch.save(loader.state_dict(), step_folder / "data.pt")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(NUM_STEPS))
    dist.barrier()
    dist.destroy_process_group()


def constant(_: int) -> float:
    return 1.0


if __name__ == "__main__":
    for kind in ("fsdp2", "fsdp1"):
        mp.spawn(work, (kind, Path(sys.argv[1]) / kind), WORLD_SIZE)
