"""Where a run stands in its data: one number, the same for any number of ranks, and never guessed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.actor.batch import deal
from keepstep.checkpoint import layout
from keepstep.checkpoint.plan import plan
from keepstep.checkpoint.verify import verify
from keepstep.config.load import load
from keepstep.controller.state import TrainState
from keepstep.data.order import permutation, rows_at
from keepstep.errors import CheckpointError, ConfigError
from tests.unit import builder
from tests.unit.forging import forge


def test_there_are_no_workers_whose_number_the_position_depends_on() -> None:
    """C14: saved with 2 loader workers, resumed with 4: there is no such setting, so no state of another shape."""
    with pytest.raises(ConfigError, match=r"data\.dataloader_num_workers"):
        load(None, ["data.dataloader_num_workers=4"])


@pytest.mark.parametrize("key", ["data.train_max_samples", "data.val_max_samples"])
def test_a_cap_is_a_number_of_rows(key: str) -> None:
    section, name = key.split(".")
    for value in (-1, 1, 50):
        assert getattr(getattr(load("quickstart", [f"{key}={value}"]), section), name) == value
    for value in ("0", "-2", "many"):
        with pytest.raises(ConfigError, match=key):
            load("quickstart", [f"{key}={value}"])


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_next_batch_of_a_capped_set_after_a_kill(shuffle: bool) -> None:
    """C1: 50 of 200 rows, no seed of the cap's own; every process draws anew, the next batch has the same rows."""
    script = (
        "from keepstep.data.order import rows_at, subset\n"
        f"drawn = subset(200, 50, seed=42, split='train', shuffle={shuffle})\n"
        f"print([drawn[at] for at in rows_at(32, 16, num_rows=50, seed=42, shuffle={shuffle})])"
    )
    starts = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    }  # fmt: skip
    assert len(starts) == 1
    rows = json.loads(starts.pop())
    assert len(rows) == 16 and all(0 <= row < 200 for row in rows)


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(
    num_mini_batches=st.integers(1, 5), group_size=st.integers(1, 4), share=st.integers(1, 4),
    world_sizes=st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12])),
)  # fmt: skip
def test_ranks_share_the_same_mini_batches(
    num_mini_batches: int, group_size: int, share: int, world_sizes: tuple[int, int]
) -> None:
    """C8, C14: joined in rank order, every mini-batch holds the same rows on any number of ranks, each row once."""
    mini_batch_size = 12 * share
    num_prompts = num_mini_batches * mini_batch_size
    joined = []
    for world_size in world_sizes:
        dealt = deal(num_prompts, group_size, mini_batch_size, world_size)
        assert len(dealt) == world_size
        joined.append([list(chain.from_iterable(rank[index] for rank in dealt)) for index in range(num_mini_batches)])
    assert joined[0] == joined[1]
    assert list(chain.from_iterable(joined[0])) == list(range(num_prompts * group_size))


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(
    num_rows=st.integers(1, 60), batch=st.integers(1, 40), seed=st.integers(0, 2**32), shuffle=st.booleans(),
    stops=st.lists(st.integers(0, 12), max_size=4).map(sorted),
)  # fmt: skip
def test_position_and_rows_after_any_resumes(
    num_rows: int, batch: int, seed: int, shuffle: bool, stops: list[int]
) -> None:
    """C8, C14: resumed anywhere from what a checkpoint keeps, on whatever: after 12 steps 12 batches, the same rows."""
    whole = rows_at(0, 12 * batch, num_rows=num_rows, seed=seed, shuffle=shuffle)
    state, rows = TrainState(), []
    for stop in [*stops, 12]:
        while state.global_step < stop:
            rows += rows_at(state.train_dataset_offset, batch, num_rows=num_rows, seed=seed, shuffle=shuffle)
            state.train_dataset_offset += batch
            state.global_step += 1
        state = TrainState.from_record(json.loads(json.dumps(state.to_record(num_rows))))
    assert (state.train_dataset_offset, rows) == (12 * batch, whole)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda state: state.pop("dataloader_state"), "dataloader_state is missing: nothing says which row comes next"),
        (lambda state: state.update(dataloader_state=None), "dataloader_state is missing"),
        (lambda state: state["dataloader_state"].pop("train_dataset_offset"), "train_dataset_offset is None"),
        (lambda state: state["dataloader_state"].update(train_dataset_offset=0), "0 is not 20 batches of one size"),
        (lambda state: state["dataloader_state"].update(train_dataset_offset=81), "81 is not 20 batches of one size"),
        (lambda state: state.update(num_train_rows=40), "epoch 1, expected 3 at row 80 of 40"),
        (lambda state: state.update(num_train_rows=0), "num_train_rows is 0"),
        (lambda state: state.update(epoch=0), "epoch 0, expected 1 or more"),
    ],
)
def test_a_position_that_is_missing_or_cannot_be(tmp_path: Path, change, part: str) -> None:
    """C4: an error, never a warning and row 0: the only checkpoint of a run, under digests that fit."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    state = json.loads((run.checkpoint(20) / layout.TRAINER_STATE).read_text())
    change(state)
    forge(run.checkpoint(20), layout.TRAINER_STATE, json.dumps(state).encode())
    (reason,) = verify(run.checkpoint(20)).reasons
    assert reason.startswith("trainer_state.json: ") and part in reason
    with pytest.raises(CheckpointError, match="none can be resumed from"):
        plan(run, policy="latest", prefer_multiple=100, max_rewind_steps=None)


def after_a_save(state: TrainState, num_rows: int) -> TrainState:
    """The counters as they come back from a checkpoint, in new processes."""
    return TrainState.from_record(json.loads(json.dumps(state.to_record(num_rows))))


def step(state: TrainState, batch: int, num_rows: int) -> list[int]:
    rows = rows_at(state.train_dataset_offset, batch, num_rows=num_rows, seed=42, shuffle=True)
    state.train_dataset_offset += batch
    state.global_step += 1
    return rows


def test_the_position_moves_on_after_a_resume() -> None:
    """C8: saved at 10, resumed, saved at 20: 20 batches, not the 10 of a loader that began before its state came."""
    state = TrainState()
    for _ in range(10):
        step(state, 4, 1000)
    assert state.train_dataset_offset == 40
    state = after_a_save(state, 1000)
    for _ in range(10):
        step(state, 4, 1000)
    assert state.to_record(1000)["dataloader_state"]["train_dataset_offset"] == 80


def test_a_second_resume_in_one_epoch() -> None:
    """C11: stopped after 30 batches, resumed, stopped after 10 more, resumed: the next batch is number 40."""
    num_rows, batch, state = 10_000, 8, TrainState()
    for stop in (30, 10):
        for _ in range(stop):
            step(state, batch, num_rows)
        state = after_a_save(state, num_rows)
    assert state.train_dataset_offset // batch == 40
    assert step(state, batch, num_rows) == [int(row) for row in permutation(num_rows, 42, 1)[320:328]]


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_around_the_end_of_an_epoch(stop: int) -> None:
    """C13: one step before, at, and one step after the boundary: the order of the uninterrupted run."""
    num_rows, batch = 20, 5
    whole, state = TrainState(), TrainState()
    expected = [step(whole, batch, num_rows) for _ in range(12)]
    found = [step(state, batch, num_rows) for _ in range(stop)]
    state = after_a_save(state, num_rows)
    found += [step(state, batch, num_rows) for _ in range(12 - stop)]
    assert found == expected
    assert sorted(chain(*expected[:4])) == sorted(chain(*expected[4:8])) == list(range(20))
    assert expected[:4] != expected[4:8]


def test_an_exhausted_set_begins_again_whole() -> None:
    """C10: 10 rows, exhausted once, saved, resumed: the next pass has 10 rows."""
    state = TrainState()
    for _ in range(2):
        step(state, 5, 10)
    state = after_a_save(state, 10)
    assert (state.train_dataset_offset, state.to_record(10)["epoch"]) == (10, 2)
    assert sorted(step(state, 5, 10) + step(state, 5, 10)) == list(range(10))


def test_what_a_run_records_agrees_with_itself() -> None:
    """The trainer's own record passes the check at, before and after an epoch's end, also with dynamic sampling."""
    from keepstep.checkpoint.trainer_state import counter_problems

    for step in range(1, 12):
        for num_batches in (step, 2 * step + 1):
            state = TrainState(step, num_batches * 8, num_gen_batches=num_batches)
            assert counter_problems(state.to_record(num_rows=24)) == []
        state = TrainState(step, step * 8, num_gen_batches=step - 1)
        assert counter_problems(state.to_record(num_rows=24)) != [], "every step takes a batch"
