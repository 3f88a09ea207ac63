"""What the reward function is asked about a batch, while it comes in and afterwards."""

from __future__ import annotations

from keepstep.controller.rollouts import Questions
from keepstep.data.loader import Row
from keepstep.rollout.types import Response

ROWS = [Row(index, [1], f"prompt {index}", "numbers", str(index), {"row": index}) for index in range(2)]


def response(token: int) -> Response:
    return Response([token, token], [0.0, 0.0], True)


def test_each_question_is_made_once_and_belongs_to_its_group():
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(ids[0])
        return f"text {ids[0]}"

    questions = Questions(ROWS, group_size=3, decode=decode)
    early = questions.add({4: response(4), 2: response(2)})
    assert {place: (q.text, q.ground_truth) for place, q in early.items()} == {4: ("text 4", "1"), 2: ("text 2", "0")}
    # The rollout of an engine that was lost is made again: the same tokens, told once more.
    assert list(questions.add({2: response(2), 3: response(3)})) == [3]
    every = questions.of([response(token) for token in range(6)])
    assert [(q.text, q.ground_truth, q.extra_info["row"]) for q in every] == [
        ("text 0", "0", 0), ("text 1", "0", 0), ("text 2", "0", 0),
        ("text 3", "1", 1), ("text 4", "1", 1), ("text 5", "1", 1),
    ]  # fmt: skip
    assert every[4] is early[4] and every[2] is early[2]
    assert sorted(decoded) == [0, 1, 2, 3, 4, 5]
