"""What a resumed attempt says of itself, reviewed as text; and the probe that it makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.checkpoint.plan import ResumePlan
from keepstep.controller import resume_probe
from keepstep.controller.state import TrainState
from keepstep.controller.statement import Facts, debug_lines, schedule_finished, sentences
from keepstep.errors import ProbeError

FACTS = Facts(
    total_steps=1000,
    step=300,
    folder="runs/a/checkpoints/step_300",
    epoch=3,
    num_rows=7473,
    next_row=19200,
    lr_last=5e-7,
    lr_next=4.9e-7,
    optimizer_step=600,
    num_without_moments=0,
    num_ranks=8,
    num_saved_streams=8,
    streams_restored=True,
    has_cuda=True,
    probe_gap=0.0,
)
PLAN = ResumePlan(step=300, source="local", reason="multiple of 100", newest=340, steps_given_up=40)

EXPECTED = """\
resumed at step 300 of 1,000 from runs/a/checkpoints/step_300 (verified, multiple of 100; newest is 340: 40 steps given up)
epoch 3, next row 19,200 of the run: row 4,254 of 7,473 in this epoch
learning rate: 5e-07 in step 300, 4.9e-07 in step 301
optimizer: moments restored at its step 600
random streams restored on 8 ranks: python, numpy, torch, cuda; order of rows and sampling are functions of the seed and the step
engine: its state is never restored; it gets the policy's weights as version 300 before the first rollout
probe: the same prompts have the log-probs of the save (largest difference 0)
"""  # noqa: E501


def test_the_first_lines():
    """C82, C106: where it goes on, from what, and how many steps that gives up."""
    assert "\n".join(sentences(FACTS, PLAN)) + "\n" == EXPECTED


def test_what_is_not_restored_is_said():
    """C14, C125: streams of another number of ranks, and parameters without moments."""
    facts = replace(FACTS, num_ranks=4, streams_restored=False, num_without_moments=2, has_cuda=False, lr_last=None)
    text = "\n".join(sentences(facts, PLAN))
    assert "random streams NOT restored (python, numpy, torch): saved by 8 ranks, now 4" in text
    assert "2 parameters never got a gradient and begin with fresh moments" in text
    assert "learning rate: 4.9e-07 in step 301" in text


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"repair": True}, "its reference was damaged and is mended"),
        ({"rebuild_scheduler": True}, "its scheduler is rebuilt at the global step"),
        ({"source": "s3"}, "verified, fetched from the store"),
    ],
)
def test_how_it_was_had_is_said(changes: dict, part: str):
    assert part in sentences(FACTS, replace(PLAN, **changes))[0]


def test_a_schedule_that_has_ended():
    """C116: a rate of 0 looks as if all were well, and trains nothing."""
    assert schedule_finished(FACTS) is None
    finished = schedule_finished(replace(FACTS, lr_next=0.0))
    assert finished is not None and "the schedule finished at step 300" in finished
    assert finished in sentences(replace(FACTS, lr_next=0.0), PLAN)
    assert schedule_finished(replace(FACTS, lr_next=0.0, step=1000)) is None


def test_debug_lines():
    facts = replace(FACTS, step=40, epoch=2, optimizer_step=40, next_row=12800)
    assert debug_lines(facts) == [
        "[DEBUG] Resuming from step 40, epoch 2",
        "[DEBUG] Loaded actor optimizer with step 40",
        "[DEBUG] Dataloader offset set to 12800",
    ]


def test_every_counter_is_restored():
    """C122: whatever counts, and the probe with it."""
    state = TrainState(
        7, 448, 100, 14, 3584, {"critic/rewards/mean": 0.5}, {"prompts": [[1, 2]], "log_probs": [[-1.0]]}
    )
    restored = TrainState.from_record(state.to_record(num_rows=640))
    assert replace(restored, probe=state.probe) == state


# probe


def test_prompts_of_the_probe():
    prompts = [[1], [1, 2], list(range(400)), [3, 4, 5], [6, 7], [8, 9]]
    chosen = resume_probe.choose_prompts(prompts)
    assert chosen == [[1, 2], list(range(256)), [3, 4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("now", "gap"),
    [
        ([[-1.0, -2.0], [-0.5]], 0.0),
        ([[-1.0, -2.25], [-0.5]], 0.25),
        ([[-1.0, float("nan")], [-0.5]], float("inf")),
        ([[-1.0], [-0.5]], float("inf")),
        ([[-1.0, -2.0]], float("inf")),
    ],
)
def test_largest_gap(now: list[list[float]], gap: float):
    assert resume_probe.largest_gap([[-1.0, -2.0], [-0.5]], now) == gap


@pytest.mark.parametrize(
    ("precision", "gap", "good"), [("fp32", 9e-4, True), ("fp32", 2e-3, False), ("bf16", 0.05, True)]
)
def test_another_policy_is_refused(precision: str, gap: float, good: bool):
    """C32, C95: the bytes are as saved, the policy is not."""
    then = resume_probe.record([[1, 2]], [[-1.0]])
    if good:
        assert resume_probe.check(then, [[-1.0 - gap]], precision=precision, where="step_40") == pytest.approx(gap)
        return
    with pytest.raises(ProbeError) as raised:
        resume_probe.check(then, [[-1.0 - gap]], precision=precision, where="step_40")
    assert "step_40" in raised.value.message and "0.002 nats" in raised.value.message
    assert "resume.allow=[probe]" in raised.value.remedy
    assert not raised.value.retry
