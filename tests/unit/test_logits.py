"""Log-probs and entropies from logits: against plain loops in float64, and in memory."""

import math
import random

import pytest
import torch

from keepstep.algorithm import logits as algorithm
from tests.unit import by_loops


def rows_of_logits(num_rows: int, num_positions: int, vocabulary: int) -> list[list[list[float]]]:
    rng = random.Random(7)
    return [by_loops.random_rows(rng, [vocabulary] * num_positions, -4.0, 4.0) for _ in range(num_rows)]


def test_log_probs_of_known_odds():
    # Odds 1:2:5 are probabilities 1/8, 2/8, 5/8.
    logits = torch.tensor([[[math.log(1), math.log(2), math.log(5)]]])
    found = algorithm.token_log_probs(logits, torch.tensor([[2]]))
    assert math.isclose(found.item(), math.log(5 / 8), rel_tol=1e-6)


def test_temperature_flattens():
    # At temperature 2 odds 1:4 become 1:2.
    logits = torch.tensor([[[math.log(1), math.log(4)]]], dtype=torch.float64)
    found = algorithm.token_log_probs(logits, torch.tensor([[0]]), temperature=2.0)
    assert math.isclose(found.item(), math.log(1 / 3), rel_tol=1e-12)


def test_entropy_of_a_uniform_choice():
    assert math.isclose(algorithm.entropy(torch.zeros(1, 1, 4)).item(), math.log(4), rel_tol=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 20, 45, 2**22])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_against_loops_however_it_is_cut(monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float):
    """3 rows of 4 positions over 5 words, cut into single positions, runs of positions, and rows."""
    monkeypatch.setattr(algorithm, "CHUNK_ELEMENTS", chunk)
    rows = rows_of_logits(3, 4, 5)
    tokens = torch.tensor([[0, 4, 2, 2], [1, 1, 3, 0], [4, 0, 1, 2]])
    found = algorithm.token_log_probs_and_entropy(torch.tensor(rows, dtype=torch.float64), tokens, temperature)
    for row in range(3):
        for position in range(4):
            probs = by_loops.distribution(rows[row][position], temperature)
            log_prob = math.log(probs[tokens[row, position]])
            assert math.isclose(found[0][row, position].item(), log_prob, rel_tol=1e-12)
            expected = by_loops.entropy(rows[row][position], temperature)
            assert math.isclose(found[1][row, position].item(), expected, rel_tol=1e-12)


@pytest.mark.parametrize("chunk", [1, 12, 2**22])
def test_gradients_against_finite_differences(monkeypatch: pytest.MonkeyPatch, chunk: int):
    """A weighted sum of log-probs and entropies at temperature 0.7, differentiated numerically in plain loops."""
    monkeypatch.setattr(algorithm, "CHUNK_ELEMENTS", chunk)
    rows, tokens, temperature = rows_of_logits(2, 3, 4), [[3, 0, 1], [2, 2, 0]], 0.7
    weights = [[0.3, -1.2, 2.0], [0.0, 0.8, -0.4]]

    def total(flat: list[list[float]]) -> float:
        found = 0.0
        for index, values in enumerate(flat):
            row, position = divmod(index, 3)
            log_prob = math.log(by_loops.distribution(values, temperature)[tokens[row][position]])
            found += weights[row][position] * (log_prob + 0.5 * by_loops.entropy(values, temperature))
        return found

    logits = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    log_probs, entropies = algorithm.token_log_probs_and_entropy(logits, torch.tensor(tokens), temperature)
    ((log_probs + 0.5 * entropies) * torch.tensor(weights, dtype=torch.float64)).sum().backward()
    expected = by_loops.numerical_gradient(total, [values for row in rows for values in row])
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.flatten(0, 1), torch.tensor(expected).double(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_alone(which: int):
    """Only log-probs or only entropies may be asked for: torch's own softmax gives the same gradient."""
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    tokens = torch.tensor([[0, 1, 2], [4, 3, 3]])
    algorithm.token_log_probs_and_entropy(mine, tokens)[which].sum().backward()
    log_softmax = other.log_softmax(-1)
    both = (log_softmax.gather(-1, tokens.unsqueeze(-1)), -(log_softmax.exp() * log_softmax).sum(-1))
    both[which].sum().backward()
    torch.testing.assert_close(mine.grad, other.grad)


def test_bf16_logits_are_worked_on_in_float32():
    """Values of bf16 logits as of the same logits in float32, and the gradient in bf16; a bf16 softmax is 1e-2 off."""
    logits = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    tokens = torch.randint(100, (2, 3), generator=torch.Generator().manual_seed(2))
    log_probs, entropies = algorithm.token_log_probs_and_entropy(logits, tokens)
    assert log_probs.dtype == entropies.dtype == torch.float32
    for found, row, position in ((log_probs, 0, 1), (log_probs, 1, 2)):
        probs = by_loops.distribution(logits[row, position].double().tolist(), 1.0)
        assert math.isclose(found[row, position].item(), math.log(probs[tokens[row, position]]), rel_tol=1e-6)
    (log_probs + entropies).sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    # log-probs: the gradient sums to zero over the vocabulary, up to the rounding of 100 bf16 numbers.
    assert logits.grad.float().sum(-1).abs().max() < 0.05


def test_words_that_cannot_be_sampled():
    """Logits of -inf (padding of the vocabulary) neither make the entropy NaN nor get a gradient."""
    logits = torch.tensor([[[0.0, -math.inf, 0.0]]], dtype=torch.float64, requires_grad=True)
    log_probs, entropies = algorithm.token_log_probs_and_entropy(logits, torch.tensor([[0]]))
    assert math.isclose(entropies.item(), math.log(2), rel_tol=1e-12)
    (log_probs + entropies).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[[0.5, 0.0, -0.5]]], dtype=torch.float64))


def test_large_logits_stay_finite():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    log_probs, entropies = algorithm.token_log_probs_and_entropy(logits, torch.tensor([[1]]))
    assert (log_probs.item(), entropies.item()) == (-2e4, 0.0)
    (log_probs + entropies).sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[[-1.0, 1.0, 0.0]]]


def test_a_part_of_the_logits_that_is_not_contiguous():
    """What the ranks hand over: all positions but the last of [B, L, V]."""
    whole = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tokens = torch.randint(4, (3, 4), generator=torch.Generator().manual_seed(2))
    found = algorithm.token_log_probs(whole[:, :-1], tokens)
    assert torch.equal(found, algorithm.token_log_probs(whole[:, :-1].contiguous(), tokens))
    found.sum().backward()
    assert whole.grad is not None
    assert whole.grad[:, -1].abs().max() == 0
    assert whole.grad[:, :-1].abs().min() > 0


def test_what_is_held_between_forward_and_backward(monkeypatch: pytest.MonkeyPatch):
    """Of [tokens, vocabulary] only the logits themselves are saved, in their own type, and pieces are small."""
    monkeypatch.setattr(algorithm, "CHUNK_ELEMENTS", 1000)
    saved: list[torch.Tensor] = []
    logits = torch.zeros(4, 50, 100, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.zeros(4, 50, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        algorithm.token_log_probs_and_entropy(logits, tokens, temperature=0.5)
    large = [tensor for tensor in saved if tensor.numel() >= logits.numel()]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]
    largest = max(logits[piece].numel() for piece in algorithm._pieces(logits.shape))
    assert largest == 1000
