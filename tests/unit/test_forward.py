"""Log-probs and entropies of the tokens that count, padded and packed, against the model's own logits row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from keepstep.actor.batch import Batch, pack
from keepstep.actor.forward import ATTENTION, register_attention, token_statistics
from keepstep.actor.layout import Layout
from tests.unit.export_builder import tiny_model

TEMPERATURE = 0.7
ROWS = [
    ([3, 4, 5], [6, 7]), ([8], []), ([9, 10, 11, 12, 13], [14]), ([3, 4, 5], [8, 6, 6]), ([15], [16, 17, 18, 19, 20]),
    ([3, 4, 5], []), ([15], [16]), ([3, 4, 5], [6, 7]),
]  # fmt: skip
LAYOUTS: list[Layout] = ["padded", "packed", "grouped"]


@pytest.fixture(scope="module")
def model() -> Any:
    found = tiny_model(seed=9)
    register_attention()
    found.set_attn_implementation(ATTENTION)
    return found


def batch_of(rows: list[tuple[list[int], list[int]]]) -> Batch:
    prompts, responses = (list(part) for part in zip(*rows, strict=True))
    return pack(prompts, responses, [[0.0] * len(response) for response in responses], pad_id=0)


def statistics(model: Any, batch: Batch, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    return token_statistics(model, batch, temperature=TEMPERATURE, layout=layout)


def by_rows(model: Any, rows: list[tuple[list[int], list[int]]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Each sequence alone, without padding, in float64 from its logits on."""
    log_probs, entropies = np.zeros((len(rows), width)), np.zeros((len(rows), width))
    for row, (prompt, response) in enumerate(rows):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0].double() / TEMPERATURE
        for place, token in enumerate(response, len(prompt) - 1):
            distribution = logits[place].log_softmax(-1)
            log_probs[row, place] = distribution[token]
            entropies[row, place] = -(distribution.exp() * distribution).sum()
    return log_probs, entropies


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_has_the_log_prob_of_its_sequence_alone(model: Any, layout: Layout):
    """Neighbours, padding, an empty response and one-token prompts change nothing."""
    batch = batch_of(ROWS)
    found = statistics(model, batch, layout)
    for mine, expected in zip(found, by_rows(model, ROWS, batch.mask.shape[1]), strict=True):
        assert mine.shape == batch.mask.shape
        np.testing.assert_allclose(mine.detach().numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_sequences_alone(model: Any, layout: Layout):
    def gradients(parts: list[list[tuple[list[int], list[int]]]], layout: Layout) -> torch.Tensor:
        model.zero_grad()
        for part in parts:
            statistics(model, batch_of(part), layout)[0].sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    together, alone = gradients([ROWS], layout), gradients([[row] for row in ROWS], "padded")
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_nothing_counts_everything_is_zero_and_the_backward_pass_still_runs(model: Any, layout: Layout):
    """Other ranks wait for this one's passes, whatever it was dealt."""
    model.zero_grad()
    log_probs, entropies = statistics(model, batch_of([([5], []), ([6], [])]), layout)
    assert log_probs.tolist() == entropies.tolist() == [[0.0], [0.0]]
    log_probs.sum().backward()
    assert all(float(parameter.grad.abs().max()) == 0.0 for parameter in model.parameters())
