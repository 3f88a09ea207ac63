"""Decoder layers through torch.compile, so that what a call runs is a function of that call alone.

torch.compile as it comes is not: it compiles the first sizes that it meets for themselves and the next ones for all,
and sizes that it has seen decide about kernels. A resumed attempt meets other sizes first. Here

- sizes that differ between calls are unbacked symbols from the first call on: the compiler cannot look at them, and
  where it weighs one kernel against another they count as `HINTS`; a size of 1 is always a case of its own;
- nothing is measured to choose a kernel, and nothing that was compiled gives way to something else later;
- a layer is compiled whole or the run stops: there is no quiet fall-back to plain code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from keepstep.errors import ConfigError, first_line

HINTS = {"rows": 5, "tokens": 67, "length": 29}
"""What sizes count as; primes, so that none seems to be a multiple of another."""
DIMENSIONS: dict[str, dict[int, str]] = {
    "hidden_states": {0: "rows", 1: "tokens"},
    "position_embeddings": {0: "rows", 1: "tokens"},
    "position_ids": {0: "rows", 1: "tokens"},
    "cache_position": {0: "tokens"},
    "attention_mask": {0: "rows", 2: "tokens", 3: "tokens"},
    "places": {0: "rows", 1: "length"},
    "owners": {0: "tokens"},
}
"""By argument of a decoder layer: the dimensions whose sizes differ between calls."""
MOST_GRAPHS = 64
"""Of one kind of layer: with and without gradients, sizes of 1."""
WAY_OUT = "Leave out actor_rollout_ref.actor.use_torch_compile."


def compile_layers(layers: torch.nn.ModuleList) -> None:
    """Compile each layer's forward pass; all layers of a kind share their graphs. Names of parameters stay the same."""
    for layer in layers:
        kind: Any = type(layer)
        layer.forward = functools.partial(_call, _compiled(kind), layer)


@functools.cache
def _compiled(kind: Any) -> Callable[..., Any]:
    return torch.compile(  # type: ignore[call-overload]
        kind.forward,
        fullgraph=True,
        # Else a second size would make a symbol of what the first one fixed.
        dynamic=False,
        recompile_limit=MOST_GRAPHS,
        options={"deterministic": True},
    )


def _call(compiled: Callable[..., Any], layer: torch.nn.Module, hidden_states: torch.Tensor, **rest: Any) -> Any:
    for name, value in {"hidden_states": hidden_states, **rest}.items():
        _mark(name, value)
    try:
        return compiled(layer, hidden_states, **rest)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise ConfigError(f"{type(layer).__name__} cannot be compiled: {first_line(error)}", WAY_OUT) from error


def _mark(name: str, value: Any) -> None:
    """Make symbols of a layer's argument.

    Raises:
        ConfigError: nothing is known of its sizes.
    """
    if isinstance(value, tuple | list):
        for part in value:
            _mark(name, part)
    elif isinstance(value, torch.Tensor):
        if name not in DIMENSIONS:
            raise ConfigError(f"A decoder layer takes {name}, and what its sizes mean is not known here.", WAY_OUT)
        for dim, size in DIMENSIONS[name].items():
            if value.shape[dim] > 1:
                torch._dynamo.decorators.mark_unbacked(value, dim, hint_override=HINTS[size], shape_id=size, min=2)
