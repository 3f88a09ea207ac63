"""From token ids to log-probs and entropies of the tokens that count, in any layout.

B rows of at most L tokens; [B, L-1] arrays speak at position t of token t+1. Only positions that the mask asks for go
through the vocabulary's matrix: prompts are most of the tokens, and their logits most of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from keepstep.actor.batch import Batch
from keepstep.actor.layout import Layout, lay_out
from keepstep.algorithm.logits import token_log_probs, token_log_probs_and_entropy

ATTENTION = "by_rows"
"""Name of `attend_by_rows` for transformers."""
Statistics = tuple[torch.Tensor, torch.Tensor]
OfTokens = Callable[[torch.Tensor, torch.Tensor], Statistics]
"""From logits and the tokens that they predict."""


def token_statistics(
    model: torch.nn.Module,
    batch: Batch,
    *,
    temperature: float,
    layout: Layout,
    device: str = "cpu",
    with_entropy: bool = True,
) -> Statistics:
    """(log-probs, entropies) under softmax(logits / temperature), [B, L-1] each, 0 where the batch's mask is 0.

    Args:
        model: a causal language model of transformers, on `device`; its attention is `ATTENTION` unless padded.
        with_entropy: else the entropies are 0, which saves going through the vocabulary twice more.
    """
    of_tokens = partial(_of_tokens, temperature=temperature, with_entropy=with_entropy)
    run = _padded if layout == "padded" else partial(_packed, layout=layout)
    if batch.mask.any():
        return run(model, batch, of_tokens, device)
    # Collectives of the other ranks wait for this forward pass, and for its backward pass.
    mask = np.zeros_like(batch.mask)
    mask[:, 0] = 1.0
    log_probs, entropies = run(model, batch.with_mask(mask), of_tokens, device)
    return log_probs * 0.0, entropies * 0.0


def _of_tokens(logits: torch.Tensor, tokens: torch.Tensor, temperature: float, with_entropy: bool) -> Statistics:
    if with_entropy:
        return token_log_probs_and_entropy(logits, tokens, temperature)
    log_probs = token_log_probs(logits, tokens, temperature)
    return log_probs, torch.zeros_like(log_probs)


def _padded(model: torch.nn.Module, batch: Batch, of_tokens: OfTokens, device: str) -> Statistics:
    tokens, wanted = _tensors(device, batch.tokens, batch.mask > 0)
    columns = wanted.any(dim=0).nonzero().flatten()
    first, last = int(columns[0]), int(columns[-1])
    keep = torch.arange(first, last + 1, device=device)
    # Right padding needs no attention mask in a causal model: no token that counts sees a padding token.
    logits = model(input_ids=tokens[:, : last + 1], logits_to_keep=keep, use_cache=False).logits
    found = of_tokens(logits, tokens[:, first + 1 : last + 2])
    around = (first, wanted.shape[1] - last - 1)
    log_probs, entropies = (torch.nn.functional.pad(values, around) * wanted for values in found)
    return log_probs, entropies


def _packed(model: torch.nn.Module, batch: Batch, of_tokens: OfTokens, device: str, layout: Layout) -> Statistics:
    packed, (rows, at) = lay_out(batch, layout), np.nonzero(batch.mask)
    tokens, positions, places, owners, keep, next_tokens, wanted = _tensors(
        device, packed.tokens, packed.positions, packed.places, packed.owners,
        packed.places[rows, at], batch.tokens[rows, at + 1], batch.mask > 0,
    )  # fmt: skip
    logits = model(
        input_ids=tokens.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        logits_to_keep=keep,
        use_cache=False,
        places=places,
        owners=owners,
    ).logits
    found = of_tokens(logits, next_tokens.unsqueeze(0))
    log_probs, entropies = (torch.zeros(wanted.shape, device=device).masked_scatter(wanted, v[0]) for v in found)
    return log_probs, entropies


def register_attention() -> None:
    """Make `ATTENTION` known to transformers.

    Not on import: the controller imports this module beside a thread that loads the tokenizer, and transformers cannot
    be imported by two threads at once.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend_by_rows)


def attend_by_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    places: torch.Tensor | None = None,
    owners: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers for packed sequences: each row to itself, side by side, as if nothing were packed.

    No mask of all tokens against all, and plain causal attention, for which every device has its best kernel.

    Args:
        query, key, value: [1, heads, S, head_dim].
        places, owners: of `keepstep.actor.layout.Packed`; without them nothing is packed.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if places is None or owners is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)
    query, key, value = (_select(each[0].transpose(0, 1), places).transpose(1, 2) for each in (query, key, value))
    found, _ = sdpa_attention_forward(module, query, key, value, None, **rest)
    return _select(found.flatten(0, 1), owners).unsqueeze(0), None


def _select(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return states.index_select(0, index.flatten()).unflatten(0, index.shape)


def _tensors(device: str, *arrays: np.ndarray) -> list[Any]:
    return [torch.tensor(array, device=device) for array in arrays]
