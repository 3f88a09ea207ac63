"""Log-probabilities and entropies of tokens from logits, without a second copy of them in float32.

Shapes: B responses, T positions, a vocabulary of V. The softmax is worked out piece by piece, in the forward pass and
again in the backward pass; between them stand the logits as the model gave them and two numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CHUNK_ELEMENTS = 2**22
"""Logits that are worked on at once: 16 MiB in float32, a few times that with what is derived from them."""


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each token under softmax(logits / temperature).

    Args:
        logits: [B, T, V], any float type; position t predicts tokens[:, t].
        tokens: [B, T].

    Returns:
        [B, T] in float32 (float64 of float64).
    """
    return _TokenStatistics.apply(logits, tokens, temperature, False)[0]


def token_log_probs_and_entropy(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_log_probs` and `entropy` in one pass; both [B, T] and differentiable."""
    return _TokenStatistics.apply(logits, tokens, temperature, True)


def entropy(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Entropy in nats of softmax(logits / temperature), [B, T, V] -> [B, T]: -sum_v p_v ln p_v."""
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return token_log_probs_and_entropy(logits, tokens, temperature)[1]


class _TokenStatistics(torch.autograd.Function):
    """With p = softmax(z), z = logits / temperature: ln p_token and H(p).

    d ln p_token / dz_v = [v is token] - p_v, and dH / dz_v = -p_v ln p_v - p_v H.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normalizers = torch.empty(tokens.shape, dtype=_wide_type(logits), device=logits.device)
        log_probs, entropies = torch.empty_like(normalizers), torch.zeros_like(normalizers)
        for piece in _pieces(logits.shape):
            scaled = _scaled(logits[piece], temperature)
            normalizers[piece] = scaled.logsumexp(-1)
            log_probs[piece] = scaled.gather(-1, tokens[piece].unsqueeze(-1)).squeeze(-1) - normalizers[piece]
            if with_entropy:
                probs = (scaled - normalizers[piece].unsqueeze(-1)).exp_()
                entropies[piece] = torch.special.entr(probs).sum(-1)
        ctx.save_for_backward(logits, tokens, normalizers, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_log_probs: torch.Tensor | None, of_entropies: torch.Tensor | None) -> tuple[Any, ...]:
        logits, tokens, normalizers, entropies = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for piece in _pieces(logits.shape):
            probs = (_scaled(logits[piece], ctx.temperature) - normalizers[piece].unsqueeze(-1)).exp_()
            found = torch.zeros_like(probs)
            if of_entropies is not None:
                found += torch.special.entr(probs).addcmul_(probs, entropies[piece].unsqueeze(-1), value=-1)
                found *= of_entropies[piece].unsqueeze(-1)
            if of_log_probs is not None:
                upstream, index = of_log_probs[piece].unsqueeze(-1), tokens[piece].unsqueeze(-1)
                found.addcmul_(probs, upstream, value=-1)
                # Not scatter_add_, whose order on a GPU is not fixed.
                found.scatter_(-1, index, found.gather(-1, index) + upstream)
            gradient[piece] = found.div_(ctx.temperature)
        return gradient, None, None, None


def _wide_type(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    wide = logits.to(_wide_type(logits))
    return wide if temperature == 1.0 else wide / temperature


def _pieces(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Slices over rows and positions of [B, T, V] of at most CHUNK_ELEMENTS logits each, or one position of one row."""
    num_rows, num_positions, vocabulary = shape
    positions = max(1, min(num_positions, CHUNK_ELEMENTS // vocabulary))
    rows = max(1, CHUNK_ELEMENTS // (positions * vocabulary))
    for row in range(0, num_rows, rows):
        for position in range(0, num_positions, positions):
            yield slice(row, row + rows), slice(position, position + positions)
