"""Log-probs of finished responses while others are sampled: begun early, and the same as of the whole batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from keepstep.actor.batch import Batch, pack
from keepstep.controller.ahead import LogProbsAhead
from keepstep.rollout.types import Response

PROMPTS = [[3 + row, 4] for row in range(12)]
DEALT = [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 10, 11]]


def responses(seed: int) -> dict[int, Response]:
    draw = random.Random(seed)
    return {
        row: Response([draw.randrange(50) for _ in range(draw.randint(1, 9))], [0.0] * 9, True)
        for row in range(len(PROMPTS))
    }


def of(rows: list[int], found: list[Response]) -> Batch:
    scores = [response.log_probs[: len(response.token_ids)] for response in found]
    return pack([PROMPTS[row] for row in rows], [response.token_ids for response in found], scores, pad_id=0)


class Ranks:
    """As a forward pass in its last bits, each value depends on all the rows that it is worked out with."""

    def __init__(self) -> None:
        self.begun: list[list[Batch]] = []
        self.num_answered = 10**6

    def begin_log_probs(self, shards: list[Batch]) -> list[dict[str, np.ndarray]]:
        self.begun.append(shards)
        return [
            {"old": shard.mask * float(shard.tokens.sum()), "ref": shard.mask * float(shard.lengths.max())}
            for shard in shards
        ]

    def have_log_probs(self, _begun: Any) -> bool:
        self.num_answered -= 1
        return self.num_answered >= 0

    def end_log_probs(self, begun: Any) -> Any:
        return begun


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [1, 2, 4, 64])
def test_in_whatever_order_responses_come_the_log_probs_are_those_of_the_whole_batch(seed: int, size: int):
    found = responses(seed)
    batch = of(list(range(12)), [found[row] for row in range(12)])
    late = LogProbsAhead(Ranks(), DEALT, size, of)
    late.add(found)
    waited = late.of(batch)

    ranks, order = Ranks(), list(found)
    random.Random(seed).shuffle(order)
    ahead = LogProbsAhead(ranks, DEALT, size, of)
    while order:
        some, order = order[: 1 + seed], order[1 + seed :]
        # An engine that was lost tells of what it had finished again.
        ahead.add({row: found[row] for row in [*some, *some[:1]]})
    values = ahead.of(batch)
    assert len(ranks.begun) == -(-6 // size), "each micro-batch once"
    assert values.keys() == waited.keys() == {"old", "ref"}
    for name in values:
        assert values[name].shape == batch.mask.shape
        assert np.array_equal(values[name], waited[name])


def test_a_micro_batch_is_begun_when_its_last_response_is_there_on_every_rank():
    found, ranks = responses(0), Ranks()
    ahead = LogProbsAhead(ranks, DEALT, 2, of)
    ahead.add({row: found[row] for row in (0, 1, 2, 3, 4, 9)})
    assert ranks.begun == [], "row 5, the second rank's, is not there"
    ahead.add({5: found[5]})
    assert [[shard.tokens[0, 0] for shard in begun] for begun in ranks.begun] == [[3, 7]]
    ahead.add({8: found[8], 10: found[10], 11: found[11]})
    assert [begun[0].tokens[0, 0] for begun in ranks.begun] == [3, 11], "the third before the second"


def test_ranks_have_no_more_before_them_than_they_work_off():
    """What they have cannot be taken back, and the last save within a grace comes after it."""
    found, ranks = responses(1), Ranks()
    batch = of(list(range(12)), [found[row] for row in range(12)])
    ahead = LogProbsAhead(ranks, DEALT, 1, of)
    ranks.num_answered = 0
    ahead.add(found)
    ahead.add({})
    assert len(ranks.begun) == 2, "they answer nothing"
    ranks.num_answered = 2
    ahead.add({})
    assert len(ranks.begun) == 6, "twice the two that they answered"
    assert ahead.of(batch).keys() == {"old", "ref"} and len(ranks.begun) == 6

    slow = Ranks()
    slow.num_answered = 0
    ahead = LogProbsAhead(slow, DEALT, 1, of)
    ahead.add(found)
    ahead.of(batch)
    assert len(slow.begun) == 6, "the rest at the end"
