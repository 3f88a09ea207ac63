"""A policy whose layers are compiled, and what it comes to whichever sizes come first.

    python -m tests.integration.compiled_layers MODEL LAYOUT OPTIONS OUT.json

OPTIONS: any of checkpointing, bf16 and both (passes without gradients as well), joined by commas.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.utils
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist

from keepstep.actor.base_weights import BaseWeights
from keepstep.actor.batch import Batch, pack
from keepstep.actor.build import build_model
from keepstep.actor.forward import token_statistics
from keepstep.actor.shards import local
from keepstep.config.schema import FsdpConfig, ModelConfig

SIZES = [(8, 12), (3, 5), (300, 16), (5, 5)]
"""Rows and longest prompt of each batch; the C++ of a backed symbol is another one from 4096 tokens on."""


def policy(model_dir: str, layout: str, options: list[str], compiled: bool) -> torch.nn.Module:
    """On a CPU and one rank."""
    model = ModelConfig(path="-", enable_gradient_checkpointing="checkpointing" in options)
    fsdp = FsdpConfig(model_dtype="bf16" if "bf16" in options else "fp32")
    found = build_model(model_dir, model, fsdp, "cpu", 1, packed=layout != "padded", compiled=compiled)
    BaseWeights(Path(model_dir)).fill(dict(found.named_parameters()), 0, 1)
    return found


def batch_of(rows: int, longest: int) -> Batch:
    generator = np.random.default_rng(100 * rows + longest)
    prompts = [generator.integers(3, 60, int(generator.integers(1, longest))).tolist() for _ in range(rows // 2)] * 2
    prompts += [[4] * longest] * (rows % 2)
    responses = [generator.integers(3, 60, int(generator.integers(1, 4))).tolist() for _ in prompts]
    return pack(prompts, responses, [[0.0] * len(response) for response in responses], pad_id=0)


def outcome(model: torch.nn.Module, batch: Batch, layout: Any, both: bool) -> dict[str, torch.Tensor]:
    """Log-probs and gradients, and with `both` the log-probs of a pass without."""
    found: dict[str, torch.Tensor] = {}
    if both:
        with torch.no_grad():
            found["before"], _ = token_statistics(model, batch, temperature=1.0, layout=layout)
        model.reshard()  # type: ignore[operator]
    log_probs, entropies = token_statistics(model, batch, temperature=1.0, layout=layout)
    (log_probs.sum() + entropies.sum()).backward()
    found |= {name: local(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found | {"log_probs": log_probs.detach()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def sources() -> list[str]:
    """What has been handed to the C++ compiler so far; named by its content."""
    return sorted(path.name for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.cpp"))


def furthest(model: torch.nn.Module, plain: torch.nn.Module, layout: str, both: bool) -> float:
    """The greatest share by which a tensor differs from plain code's."""
    shares = []
    for size in SIZES:
        found, expected = (outcome(each, batch_of(*size), layout, both) for each in (model, plain))
        assert found.keys() == expected.keys()
        shares += [float((found[n] - expected[n]).norm() / (1e-6 + expected[n].norm())) for n in expected]
    return max(shares)


def main(model_dir: str, layout: str, options: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    both = "both" in options
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    orders: list[dict[str, Any]] = []
    for sizes in (SIZES, SIZES[::-1]):
        # Everything is compiled anew, as in another process; g++ alone remembers, by the content of its source.
        torch._dynamo.reset()
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            model = policy(model_dir, layout, options, compiled=True)
            found = {str(size): digest(outcome(model, batch_of(*size), layout, both)) for size in sizes}
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch._dynamo.utils.counters.clear()
        orders.append({"digests": found, "sources": sources(), "graphs": graphs})
    plain = policy(model_dir, layout, options, compiled=False)
    report = {"orders": orders, "furthest": furthest(model, plain, layout, both)}
    dist.destroy_process_group()
    return report


if __name__ == "__main__":
    Path(sys.argv[4]).write_text(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3].split(","))))
