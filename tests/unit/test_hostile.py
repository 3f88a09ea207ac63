"""Well-sealed nonsense: a checkpoint whose author could write the manifest anew is judged, never crashed on."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import digest_file
from keepstep.checkpoint.manifest import seal
from keepstep.checkpoint.verify import REJECTED, VERIFIED, verify
from keepstep.run import RunDir
from tests.unit import builder

NONSENSE: list[Any] = [None, True, -1, 1.5, "", "x", "../x", [], [[]], [{}], {}, {"a": []}, 10**30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = builder.run_in(tmp_path_factory.mktemp("hostile"))
    builder.write(run, 20)
    return run.checkpoint(20)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places of every value below the root; of a list, the first entry stands for all."""
    children = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from nodes(child, (*path, key))


def variants(value: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any, dict[str, Any]]]:
    """(place, what stands there now, the whole) for every place, once without it and once with every nonsense."""
    for path in nodes(value):
        for nonsense in (KeyError, *NONSENSE):
            changed = copy.deepcopy(value)
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            if nonsense is KeyError:
                del parent[path[-1]]
            elif parent[path[-1]] == nonsense and type(parent[path[-1]]) is type(nonsense):
                continue
            else:
                parent[path[-1]] = nonsense
            yield path, nonsense, changed


def unsealed(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / layout.MANIFEST).read_bytes())
    del manifest["self"]
    return manifest


def test_resealed_manifest_is_judged(folder: Path, tmp_path: Path):
    """C62 and its kind: every value of the manifest missing or of another form, under a right `self`."""
    mutated = shutil.copytree(folder, tmp_path / "step_20")
    num_variants = 0
    for path, nonsense, changed in variants(unsealed(folder)):
        (mutated / layout.MANIFEST).write_bytes(seal(changed))
        verdict = verify(mutated, quick=True, expected_run_id="run-a")
        num_variants += 1
        # What a run does not depend on may hold another value; what the rollout folder holds may be unlisted.
        if path[0] in ("metrics", "attempt", "world_size") or layout.ENGINE_STATE in path or "tensors" in path:
            continue
        if path[-1] == "num_nonfinite" and nonsense == 10**30:
            continue
        assert verdict.state == REJECTED, (path, nonsense)
    assert num_variants > 1000


def test_resealed_trainer_state_is_judged(folder: Path, tmp_path: Path):
    """C62: every value of trainer_state.json missing or of another form, with digests that fit."""
    mutated = shutil.copytree(folder, tmp_path / "step_20")
    state = json.loads((folder / layout.TRAINER_STATE).read_bytes())
    num_rejected = 0
    for path, nonsense, changed in variants(state):
        (mutated / layout.TRAINER_STATE).write_text(json.dumps(changed))
        manifest = unsealed(folder)
        manifest["files"][layout.TRAINER_STATE] |= digest_file(mutated / layout.TRAINER_STATE).to_record()
        (mutated / layout.MANIFEST).write_bytes(seal(manifest))
        verdict = verify(mutated, quick=True)
        # Metrics are words to a resume.
        if path[0] == "metrics" and (len(path) > 1 or isinstance(nonsense, dict)):
            assert verdict.state == VERIFIED, (path, nonsense)
        else:
            assert verdict.state == REJECTED, (path, nonsense)
            assert verdict.reasons[0].startswith("trainer_state.json: "), verdict.reasons
            num_rejected += 1
    assert num_rejected > 200


def test_the_untouched_one_is_good(folder: Path):
    assert verify(folder).state == VERIFIED
    assert RunDir.at(folder.parent.parent).steps() == [20]
