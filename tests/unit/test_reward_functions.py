"""The rewards that ship."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from keepstep.errors import RewardError
from keepstep.rewards import by_data_source, gsm8k, gsm8k_shaped, math, think_format
from keepstep.rewards.boxed import last_boxed
from keepstep.rewards.load import load_reward
from keepstep.rewards.scoring import Question, score

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She sold 48/2 = 24 clips.\n#### 72", 72.0),
        ("#### 10\nNo, wait.\n#### 1,234", 1234.0),
        ("#### -5", -5.0),
        ("####$18.50", 18.5),
        ("The answer is 72.", 72.0),
        ("It costs $1,250.75 in all.", 1250.75),
        ("From 3 to 12, so \\boxed{9} apples in 2 days", 9.0),
        ("#### none", None),
        ("I do not know", None),
        ("", None),
        ("2,5", 5.0),
    ],
)
def test_the_last_number_of_gsm8k(text: str, answer: float | None):
    assert gsm8k.answer_of(text) == answer


def test_gsm8k_scores_numbers_and_not_their_spelling():
    assert gsm8k.compute_score("", "so #### 1000.0", "work\n#### 1,000") == 1.0
    assert gsm8k.compute_score("", "so 1000", "1000") == 1.0
    assert gsm8k.compute_score("", "so 100", "1000") == 0.0
    assert gsm8k.compute_score("", "nothing", "nothing") == 0.0, "no answer is no right answer"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so #### 72", {"score": 1.0, "right": 1.0, "marked": 1.0}),
        ("so 72", {"score": 0.9, "right": 1.0, "marked": 0.0}),
        ("so #### $1,000.50", {"score": 0.1, "right": 0.0, "marked": 1.0}),
        ("so #### none", {"score": 0.0, "right": 0.0, "marked": 0.0}),
    ],
)
def test_a_marked_answer_is_worth_something(text: str, expected: dict[str, float]):
    assert gsm8k_shaped.compute_score("", text, "72") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\fbox{x^{2}}", "x^{2}"),
        ("\\boxed{never closed", None),
        ("\\boxed{7}, that is \\boxed{never closed", "7"),
        ("set {1} and } stray, \\boxed{a \\fbox{b}}", "b"),
        ("no box", None),
    ],
)
def test_the_last_box(text: str, content: str | None):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("thus \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("thus $\\boxed{\\dfrac{14}{3}}$", "\\frac{14}{3}", 1.0),
        ("thus \\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("thus \\boxed{\\{1, 2\\}}", "\\{2, 1\\}", 1.0),
        ("thus \\boxed{\\frac{1}{3}}", "0.5", 0.0),
        ("no idea", "0.5", 0.0),
        ("thus \\boxed{}", "0.5", 0.0),
        ("so \\boxed{4}", "It is clear that \\boxed{4}.", 1.0),
    ],
)
def test_mathematical_equality(text: str, truth: str, expected: float):
    assert math.compute_score("lighteval/MATH", text, truth) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think> so <answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<answer>c</answer><think>a</think>", 0.0),
        ("c", 0.0),
    ],
)
def test_the_form_of_thinking_and_answering(text: str, expected: float):
    assert think_format.compute_score("", text, "") == expected


def test_the_data_source_decides_which_reward():
    by_name = load_reward("keepstep.rewards.by_data_source")
    assert by_name is by_data_source.compute_score
    assert by_name("openai/gsm8k", "#### 5", "5", {}) == 1.0
    assert by_name("math_dapo", "\\boxed{0.5}", "1/2", {}) == 1.0
    assert by_name("keepstep/arithmetic", "5 ", "5", {}) == 1.0
    assert isinstance(score(by_name, Question("unknown/source", "", "", {})), RewardError)


@pytest.mark.skipif(not DATA.is_dir(), reason="the GSM8K files are not beside this checkout")
def test_every_solution_of_gsm8k_is_its_own_answer():
    """7,473 and 1,319 real solutions against their answers; none scores for the next question but by equal numbers."""
    import pyarrow.parquet

    for name in ("train", "test"):
        table = pyarrow.parquet.read_table(DATA / f"{name}.parquet").to_pylist()
        solutions = [row["extra_info"]["answer"] for row in table]
        truths = [row["reward_model"]["ground_truth"] for row in table]
        right = [gsm8k.compute_score("", *pair) for pair in zip(solutions, truths, strict=True)]
        assert set(right) == {1.0} and len(right) > 1000
        others = zip(solutions, truths[1:], itertools.pairwise(truths), strict=False)
        for solution, other, (one, two) in others:
            equal = float(one.replace(",", "")) == float(two.replace(",", ""))
            assert gsm8k.compute_score("", solution, other) == equal
