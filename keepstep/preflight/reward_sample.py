"""Scores one row with the run's reward function, in a process of its own: user code may hang, exit or print.

python -m keepstep.preflight.reward_sample < request.json     the last line of the output is the answer
"""

from __future__ import annotations

import json
import sys
from typing import Any

from keepstep.data.loader import EXTRA_INFO, GROUND_TRUTH, REWARD_MODEL
from keepstep.data.spec import open_file
from keepstep.errors import KeepstepError, RewardError
from keepstep.rewards.load import load_reward
from keepstep.rewards.scoring import Question, score_all


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """{"score": of the first row's own ground truth, "empty": of no text}, or {"problem", "remedy"}."""
    row = first_row(request["file"])
    truth: Any = (row[REWARD_MODEL] or {}).get(GROUND_TRUTH)
    source, extra = row[request["reward_fn_key"]], row.get(EXTRA_INFO) or {}
    try:
        function = load_reward(request["reward"]["name"], request["reward"]["path"])
        questions = [Question(source, text, truth, extra) for text in (str(truth), "")]
        scores = []
        for outcome in score_all(function, questions, None, lambda _: None):
            if isinstance(outcome, RewardError):
                raise outcome
            scores.append(outcome.value)
        return {"score": scores[0], "empty": scores[1]}
    except KeepstepError as error:
        return {"problem": error.message, "remedy": error.remedy}


def first_row(file: str) -> dict[str, Any]:
    import pyarrow.parquet

    with open_file(file) as handle:
        batch = next(pyarrow.parquet.ParquetFile(handle).iter_batches(batch_size=1))
    found: dict[str, Any] = batch.to_pylist()[0]
    return found


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
