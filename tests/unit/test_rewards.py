"""Finding reward functions, and what a failing one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.config.schema import RewardFunctionConfig
from keepstep.errors import ConfigError, RewardError
from keepstep.rewards.load import load_reward
from keepstep.rewards.scoring import Question, score

DEFAULT = RewardFunctionConfig().name


def call(function, text: str) -> float:
    found = score(function, Question("source", text, "12", {}))
    if isinstance(found, RewardError):
        raise found
    return found.value


def test_default_is_exact_match():
    function = load_reward(DEFAULT)
    assert (call(function, " 12 "), call(function, "1 2")) == (1.0, 0.0)


def test_file_with_and_without_a_name(tmp_path: Path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.25\n"
        "def other(data_source, solution_str, ground_truth, extra_info=None):\n    return {'score': 0.75, 'x': 1}\n"
    )
    assert call(load_reward(DEFAULT, str(path)), "a") == 0.25
    assert call(load_reward("other", str(path)), "a") == 0.75
    with pytest.raises(ConfigError, match=r"reward\.py has no function 'nofn'"):
        load_reward("nofn", str(path))


@pytest.mark.parametrize(
    ("name", "path"), [("no.such.function", None), ("compute_score", "/nowhere/reward.py"), ("json", None)]
)
def test_what_is_not_there_is_named(name: str, path: str | None):
    with pytest.raises(ConfigError, match="custom_reward_function") as caught:
        load_reward(name, path)
    assert (path or name) in caught.value.message


@pytest.mark.parametrize(
    "result",
    [
        "raise KeyError('oops')",
        "return None",
        "return {'points': 1}",
        "return float('nan')",
        "return {'score': float('inf')}",
    ],
)
def test_failing_function_is_named_and_not_retried(tmp_path: Path, result: str):
    path = tmp_path / "reward.py"
    path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {result}\n")
    with pytest.raises(RewardError, match=r"compute_score failed on the response '99' to a row of 'source'") as caught:
        call(load_reward(DEFAULT, str(path)), "99")
    assert not caught.value.retry
