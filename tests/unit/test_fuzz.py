"""Thousands of damaged checkpoints of both layouts: every one is rejected, none crashes, and a reason names the file.

Derandomized: the same mutations every time, and one that slips through is shrunk to its smallest form.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import layout
from keepstep.checkpoint.verify import REJECTED, WEIGHTS_ONLY, verify
from tests.unit import builder
from tests.unit.forging import reseal

RUN_ID = "run-a"
STEP = 20


@dataclass
class Checkpoint:
    """One that is mutated in place and put back; what other steps and runs hold under the same names."""

    folder: Path
    original: dict[str, bytes] = field(repr=False)
    others: list[dict[str, bytes]] = field(repr=False)

    @contextlib.contextmanager
    def changed(self, content: Mapping[str, bytes | None]) -> Iterator[None]:
        """These files have this content meanwhile, None: are not there."""
        touched = set(content) | {layout.MANIFEST}
        try:
            for name, data in content.items():
                self._write(name, data)
            yield
        finally:
            for name in touched:
                self._write(name, self.original.get(name))

    def _write(self, name: str, content: bytes | None) -> None:
        # A hard link to another step's file must not be written through.
        (self.folder / name).unlink(missing_ok=True)
        if content is not None:
            (self.folder / name).write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def full(place: Path, _: Path) -> Checkpoint:
    run = builder.run_in(place)
    builder.write(run, STEP)
    builder.write(run, 40)
    other = builder.run_in(place / "other")
    builder.write(other, STEP, seed=5, run_id="run-b")
    others = [contents(run.checkpoint(40)), contents(other.checkpoint(STEP))]
    return Checkpoint(run.checkpoint(STEP), contents(run.checkpoint(STEP)), others)


def sharded(place: Path, sharded_checkpoint: Path) -> Checkpoint:
    mine = Path(shutil.copytree(sharded_checkpoint, place / "a" / f"step_{STEP}"))
    # Another step of other tensors: every byte of them negated, under a manifest that fits.
    other = place / "b" / "step_40"
    shutil.copytree(mine, other)
    for path in other.rglob("*.safetensors"):
        raw = path.read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        path.write_bytes(raw[:begin] + bytes(byte ^ 0x80 for byte in raw[begin:]))
    state = other / layout.TRAINER_STATE
    state.write_bytes(state.read_bytes().replace(b'"global_step": 20', b'"global_step": 40'))
    reseal(other, step=40, run_id="run-b")
    return Checkpoint(mine, contents(mine), [contents(other)])


@pytest.fixture(scope="module", params=[full, sharded], ids=["full", "sharded"])
def checkpoint(request: pytest.FixtureRequest, sharded_checkpoint: Path) -> Iterator[Checkpoint]:
    # In memory where there is such a place: every verification reads past the page cache.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        found: Checkpoint = request.param(Path(place), sharded_checkpoint)
        assert verify(found.folder).resumable
        yield found
        assert verify(found.folder).resumable


def fuzzed(num: int):
    return settings(
        max_examples=num,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def assert_rejected(checkpoint: Checkpoint, *names: str) -> None:
    """And by a reason that names the file."""
    verdict = verify(checkpoint.folder, expected_run_id=RUN_ID, expected_step=STEP)
    assert verdict.state == REJECTED, names
    assert any(reason.startswith(f"{name}:") for reason in verdict.reasons for name in names), (names, verdict.reasons)


def name_of(checkpoint: Checkpoint, data: st.DataObject, key: str = "file") -> str:
    return data.draw(st.sampled_from(sorted(checkpoint.original)), label=key)


@fuzzed(500)
@given(data=st.data())
def test_flipped_bytes(checkpoint: Checkpoint, data: st.DataObject) -> None:
    """C61, C64, C74: anywhere in any file, one to eight bytes."""
    name = name_of(checkpoint, data)
    content = bytearray(checkpoint.original[name])
    places = st.tuples(st.integers(0, len(content) - 1), st.integers(1, 255))
    for position, mask in data.draw(st.lists(places, min_size=1, max_size=8, unique_by=lambda place: place[0])):
        content[position] ^= mask
    with checkpoint.changed({name: bytes(content)}):
        assert_rejected(checkpoint, name)


@fuzzed(300)
@given(data=st.data())
def test_cut_grown_and_moved_content(checkpoint: Checkpoint, data: st.DataObject) -> None:
    """C61, C62: truncated, a piece cut out, doubled or put elsewhere, something behind."""
    name = name_of(checkpoint, data)
    content = checkpoint.original[name]
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    kind = data.draw(st.sampled_from(["truncate", "cut", "double", "zero", "append"]))
    damaged = {
        "truncate": content[:begin],
        "cut": content[:begin] + content[end:],
        "double": content[:end] + content[begin:],
        "zero": content[:begin] + bytes(end - begin) + content[end:],
        "append": content + data.draw(st.binary(min_size=1, max_size=64)),
    }[kind]
    if damaged == content:
        return
    with checkpoint.changed({name: damaged}):
        assert_rejected(checkpoint, name)


@fuzzed(250)
@given(data=st.data())
def test_files_of_other_steps_runs_and_names(checkpoint: Checkpoint, data: st.DataObject) -> None:
    """C73: one to three files of another step, of another run, or of another name in this one."""
    sources = [*checkpoint.others, dict.fromkeys(checkpoint.original, b"")]
    changed: dict[str, bytes] = {}
    for _ in range(data.draw(st.integers(1, 3))):
        name = name_of(checkpoint, data)
        source = data.draw(st.sampled_from([*range(len(sources)), "another name"]))
        content = (
            checkpoint.original[name_of(checkpoint, data, "other")]
            if source == "another name"
            else sources[int(source)].get(name, b"")
        )
        if content != checkpoint.original[name]:
            changed[name] = content
    if not changed:
        return
    with checkpoint.changed(changed):
        # A manifest of another step or run makes every other file a wrong one.
        assert_rejected(checkpoint, *changed)


@fuzzed(150)
@given(data=st.data())
def test_missing_and_extra_files(checkpoint: Checkpoint, data: st.DataObject) -> None:
    """C62, C65: any files missing, the manifest among them, and any put beside them."""
    optional = {name for name in checkpoint.original if name.startswith(f"{layout.ROLLOUT_DIR}/")}
    missing = data.draw(st.sets(st.sampled_from(sorted(set(checkpoint.original) - optional)), max_size=4))
    letters = st.text("abc.-\n\x1b\u202e", min_size=1, max_size=12).filter(lambda text: text.strip("."))
    folders = st.sampled_from(["", "actor/", "tokenizer/", "ref/"])
    extra = data.draw(st.dictionaries(st.tuples(folders, letters).map("".join), st.binary(max_size=8), max_size=2))
    missing -= extra.keys()
    if not missing and not extra:
        return
    with checkpoint.changed(dict.fromkeys(missing) | extra):
        verdict = verify(checkpoint.folder)
        assert verdict.state in (REJECTED, WEIGHTS_ONLY)
        for name in missing if layout.MANIFEST not in missing else ():
            assert f"{name}: missing" in verdict.reasons


@fuzzed(40)
@given(step=st.integers(0, 10**9).filter(lambda step: step != STEP))
def test_renamed_steps(checkpoint: Checkpoint, step: int) -> None:
    """C73: a folder of this step under another's name."""
    renamed = checkpoint.folder.with_name(f"step_{step}")
    if renamed.exists():
        return
    os.rename(checkpoint.folder, renamed)
    try:
        verdict = verify(renamed)
        assert verdict.state == REJECTED
        assert verdict.reasons == [f"manifest.json: is of step {STEP}, the folder is step_{step}"]
    finally:
        os.rename(renamed, checkpoint.folder)


@fuzzed(400)
@given(data=st.data())
def test_headers_under_digests_that_fit(checkpoint: Checkpoint, data: st.DataObject) -> None:
    """Whoever can write the manifest anew can write other values; whatever he writes, nobody crashes on it.

    A changed value of a tensor is his to make. Where the file stays sound, the verdict may be good.
    """
    resumed = [name for name in sorted(checkpoint.original) if name.startswith(("actor/", "ref/", "trainer_state"))]
    name = data.draw(st.sampled_from(resumed))
    content = bytearray(checkpoint.original[name])
    # Where pickles, headers and directories are, not in the numbers.
    end = min(len(content), 700)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, end - 1) | st.integers(len(content) - end, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    with checkpoint.changed({name: bytes(content)}):
        reseal(checkpoint.folder)
        verdict = verify(checkpoint.folder, quick=True)
        assert verdict.state == REJECTED or not verdict.reasons
        if len(content) < len(checkpoint.original[name]):
            assert verdict.state == REJECTED
            assert any(reason.startswith(name) for reason in verdict.reasons), verdict.reasons
