"""docs/bring-your-own.md as it stands there: its files are written, and all is run that trains nothing."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pyarrow.parquet
import pytest

from keepstep.cli.main import main
from keepstep.config.load import load, validate
from keepstep.data.loader import EXTRA_INFO, GROUND_TRUTH, REWARD_MODEL
from keepstep.errors import RewardError
from keepstep.rewards.load import load_reward
from keepstep.rewards.scoring import Question, score_all
from tests.unit import documents, export_builder


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with the page's files, and a tiny model where the configuration looks for one."""
    documents.files_of_the_example(tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("make_data.py")
    return tmp_path


def rows(name: str) -> list[dict]:
    return pyarrow.parquet.read_table(f"data/{name}.parquet").to_pylist()


def test_the_data_have_the_columns_and_the_rows_of_the_page(example: Path):
    (count,) = re.findall(r"--expect-rows (\d+)", (documents.ROOT / "docs" / "bring-your-own.md").read_text())
    assert main(["dataset", "check", "data/train.parquet", "--expect-rows", count]) == 0
    assert len(rows("val")) == 64
    first = rows("train")[0]
    assert first.keys() == {"data_source", "prompt", REWARD_MODEL, EXTRA_INFO}
    word = re.search(r"Spell (\w+) backwards", first["prompt"][0]["content"])
    assert word and first[REWARD_MODEL][GROUND_TRUTH] == "".join(reversed(word[1]))


def test_the_reward_tells_answers_apart(example: Path):
    function = load_reward("compute_score", "reward.py")

    def score(text: str) -> dict:
        return function("mine/backwards", text, "elppa", {"length": 5})

    assert score(" Elppa\n") == {"score": 1.0, "right": True, "length": 5}
    assert [score(text)["score"] for text in ("elpxx", "", "apple")] == [0.3, 0.0, 0.1]
    assert all(function(row["data_source"], row[REWARD_MODEL][GROUND_TRUTH], row[REWARD_MODEL][GROUND_TRUTH],
                        row[EXTRA_INFO])["right"] for row in rows("val"))  # fmt: skip


def test_preflight_would_let_it_start(example: Path, capsys: pytest.CaptureFixture[str]):
    """Whole, with the sample of the reward and the dry run of the export, on the device that is here."""
    config = load("mine.yaml")
    assert validate(config) == []
    export_builder.write_base(example / config.actor_rollout_ref.model.path, export_builder.tiny_model())
    status = main(["preflight", "--config", "mine.yaml", "--json"])
    checks = {check["id"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {name: check for name, check in checks.items() if check["status"] == "fail"} == {} and status == 0
    assert checks["reward_sample"]["sentence"] == "scores the first row's own answer 1 and an empty text 0"
    assert checks["dataset"]["status"] == checks["export"]["status"] == "ok"
    assert not (example / "runs" / "backwards" / "run.json").exists(), "nothing is started"


def test_the_reward_of_the_rewards_page_is_one(tmp_path: Path):
    """docs/rewards.md: its other numbers become metrics."""
    text = (documents.ROOT / "docs" / "rewards.md").read_text()
    (function,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "reward.py").write_text(function)
    question = Question("mine", "an answer", "truth", {})
    (outcome,) = score_all(load_reward("compute_score", str(tmp_path / "reward.py")), [question], None, lambda _: None)
    assert not isinstance(outcome, RewardError) and outcome.value == 1.0
    assert outcome.parts == {"right": 1.0, "form": 0.5}
