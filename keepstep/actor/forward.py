"""From token ids to log-probs and entropies of the tokens that count, rows padded or packed.

B rows of at most L tokens; [B, L-1] arrays speak at position t of token t+1. Only positions that the mask asks for go
through the vocabulary's matrix: prompts are most of the tokens, and their logits most of the memory.
"""

from __future__ import annotations

import torch

from keepstep.algorithm.logits import token_log_probs_and_entropy


def token_statistics(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    *,
    temperature: float,
    packed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) under softmax(logits / temperature), [B, L-1] each, 0 where the mask is 0.

    Args:
        model: a causal language model of transformers.
        tokens: [B, L], right-padded.
        lengths: [B], tokens of each row without its padding.
        mask: [B, L-1], not 0 where a value is wanted.
        packed: rows stand behind each other in one, and each attends to itself alone; else side by side, padded.
    """
    if not bool(mask.any()):
        # Collectives of the other ranks wait for this forward pass, and for its backward pass.
        mask = torch.zeros_like(mask).index_fill_(1, torch.tensor([0], device=mask.device), 1.0)
        found = token_statistics(model, tokens, lengths, mask, temperature=temperature, packed=packed)
        return found[0] * 0.0, found[1] * 0.0
    return (_packed if packed else _padded)(model, tokens, lengths, mask > 0, temperature)


def _padded(
    model: torch.nn.Module, tokens: torch.Tensor, _lengths: torch.Tensor, wanted: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = wanted.any(dim=0).nonzero().flatten()
    first, last = int(columns[0]), int(columns[-1])
    keep = torch.arange(first, last + 1, device=tokens.device)
    # Right padding needs no attention mask in a causal model: no token that counts sees a padding token.
    logits = model(input_ids=tokens[:, : last + 1], logits_to_keep=keep, use_cache=False).logits
    found = token_log_probs_and_entropy(logits, tokens[:, first + 1 : last + 2], temperature)
    around = (first, wanted.shape[1] - last - 1)
    log_probs, entropies = (torch.nn.functional.pad(values, around) * wanted for values in found)
    return log_probs, entropies


def _packed(
    model: torch.nn.Module, tokens: torch.Tensor, lengths: torch.Tensor, wanted: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    there = positions < lengths.unsqueeze(1)
    keep = torch.nn.functional.pad(wanted, (0, 1))[there].nonzero().flatten()
    # Positions that begin anew tell transformers where a row begins; beside a cache it would not look.
    logits = model(
        input_ids=tokens[there].unsqueeze(0),
        position_ids=positions[there].unsqueeze(0),
        logits_to_keep=keep,
        use_cache=False,
    ).logits
    found = token_log_probs_and_entropy(logits, tokens[:, 1:][wanted].unsqueeze(0), temperature)
    log_probs, entropies = (torch.zeros(wanted.shape, device=v.device).masked_scatter(wanted, v[0]) for v in found)
    return log_probs, entropies
