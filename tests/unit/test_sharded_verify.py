"""Layout `sharded`, as torch.distributed.checkpoint writes it: headers, and shards that make whole tensors."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from keepstep.checkpoint import layout
from keepstep.checkpoint.safetensors_headers import SafetensorsFile, Shard
from keepstep.checkpoint.shard_cover import cover_problems
from keepstep.checkpoint.tensor_headers import HeaderError
from keepstep.checkpoint.verify import verify
from tests.unit.forging import forge, reseal, unsealed

FIRST, SECOND = (f"{{}}/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2))
MODEL = [name.format(layout.ACTOR_SHARDS) for name in (FIRST, SECOND)]


@pytest.fixture
def folder(sharded_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded_checkpoint, tmp_path / "step_20"))


def first_reason(folder: Path, quick: bool = False) -> str:
    verdict = verify(folder, quick=quick)
    assert verdict.state == "rejected"
    return verdict.reasons[0]


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any], data: bytes | None = None) -> bytes:
    """The file with another header before the same bytes."""
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:end])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    return struct.pack("<Q", len(text)) + text + (raw[end:] if data is None else data)


def test_a_good_one(sharded_checkpoint: Path):
    verdict = verify(sharded_checkpoint)
    assert (verdict.state, verdict.step, verdict.epoch, verdict.reasons) == ("verified", 20, 1, [])
    assert verify(sharded_checkpoint, quick=True).ok


def test_the_number_of_shards_is_the_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """C70: 2 ranks by the manifest, whatever this machine and this process have."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert verify(folder).ok
    reseal(folder, world_size=16)
    assert "has 2 parts of 16 ranks, none of rank 2" in first_reason(folder)


@pytest.mark.parametrize("role", layout.SHARD_DIRS)
@pytest.mark.parametrize("shard", [FIRST, SECOND])
def test_a_missing_shard_is_named(folder: Path, role: str, shard: str):
    """C70, C74."""
    (folder / shard.format(role)).unlink()
    assert first_reason(folder) == f"{shard.format(role)}: missing"


@pytest.mark.parametrize("shard", [FIRST, SECOND])
def test_a_shard_that_the_manifest_forgot(folder: Path, shard: str):
    """A writer that lost one rank's files in every role: what is left fits together, and is not the whole."""
    manifest = unsealed(folder)
    for role in layout.SHARD_DIRS:
        (folder / shard.format(role)).unlink()
        manifest["files"].pop(shard.format(role))
        manifest["required"].remove(shard.format(role))
    reseal(folder, **manifest)
    assert "has 1 parts of 2 ranks, none of rank" in first_reason(folder)


def test_a_role_that_the_manifest_forgot(folder: Path):
    manifest = unsealed(folder)
    for name in [name for name in manifest["files"] if layout.shard_dir(name) == layout.OPTIMIZER_SHARDS]:
        manifest["files"].pop(name)
        manifest["required"].remove(name)
        (folder / name).unlink()
    reseal(folder, **manifest)
    assert first_reason(folder) == "manifest.json: lists no shard of actor/optimizer"


@pytest.mark.parametrize("name", [layout.SCHEDULER, layout.PARAM_GROUPS, layout.TRAINER_STATE, MODEL[1]])
def test_every_file_is_required(folder: Path, name: str):
    manifest = unsealed(folder)
    manifest["required"].remove(name)
    reseal(folder, **manifest)
    assert first_reason(folder) == f"manifest.json: does not require {name}"


@pytest.mark.parametrize("role", layout.SHARD_DIRS)
def test_shards_under_each_others_names(folder: Path, role: str):
    """First the digests say it, then, under a manifest that fits, the rows that each rank must hold."""
    first, second = folder / FIRST.format(role), folder / SECOND.format(role)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert first_reason(folder).startswith(f"{FIRST.format(role)}: ")
    manifest = unsealed(folder)
    files = manifest["files"]
    mine, other = files[FIRST.format(role)], files[SECOND.format(role)]
    mine["tensors"], other["tensors"] = other["tensors"], mine["tensors"]
    reseal(folder, **manifest)
    # A reference may have been written by another number of ranks: there the offsets alone count, and they are right.
    if role != layout.REF_SHARDS:
        assert first_reason(folder).startswith((FIRST.format(role), SECOND.format(role)))


def test_an_optimizer_of_another_model(folder: Path):
    """C101: names and shapes of the moments are those of the parameters."""
    manifest = unsealed(folder)
    for name in (FIRST.format(layout.OPTIMIZER_SHARDS), SECOND.format(layout.OPTIMIZER_SHARDS)):
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"norm.weight", b"norm.height"))
        for entry in manifest["files"][name]["tensors"]:
            entry[0] = entry[0].replace("norm.weight", "norm.height")
    reseal(folder, **manifest)
    assert "is of no parameter of the model" in first_reason(folder)


def test_an_optimizer_of_another_step(folder: Path):
    """C101: AdamW's own counters must be the trainer's."""
    state = json.loads((folder / layout.TRAINER_STATE).read_text())
    forge(folder, layout.TRAINER_STATE, json.dumps(state | {"num_updates": 4}).encode())
    assert first_reason(folder) == "actor/optimizer: has counted 3 updates, the trainer's state 4"


@pytest.mark.parametrize("role", layout.SHARD_DIRS)
def test_damage_to_one_role_is_said_of_it_alone(folder: Path, role: str):
    """A damaged reference can be had elsewhere: then nothing else may be wrong, and all else was looked at."""
    path = folder / SECOND.format(role)
    path.write_bytes(path.read_bytes()[:-1] + b"\xee")
    assert [reason.partition(":")[0] for reason in verify(folder).reasons] == [SECOND.format(role)]


def test_tensors_are_held_against_the_manifest(folder: Path):
    manifest = unsealed(folder)
    manifest["files"][MODEL[0]]["tensors"][0][1] = "bfloat16"
    reseal(folder, **manifest)
    assert "the manifest lists ['bfloat16'" in first_reason(folder, quick=True)


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda header: [],
    "no offsets": lambda header: header["embed.weight"].pop("data_offsets") and None,
    "offsets of text": lambda header: header["embed.weight"].update(data_offsets=["0", "36"]),
    "a negative offset": lambda header: header["embed.weight"].update(data_offsets=[-36, 0]),
    "an offset beyond the file": lambda header: header["norm.weight"].update(data_offsets=[60, 2**50]),
    "a gap": lambda header: header["layer.weight"].update(data_offsets=[40, 64]),
    "an overlap": lambda header: header["layer.weight"].update(data_offsets=[32, 56]),
    "bytes of nobody": lambda header: header.pop("norm.weight") and None,
    "another length": lambda header: header["embed.weight"].update(shape=[3, 4]),
    "a huge shape": lambda header: header["embed.weight"].update(shape=[2**60, 2**60, 2**60]),
    "many dimensions": lambda header: header["embed.weight"].update(shape=[1] * 100_000),
    "a negative length": lambda header: header["embed.weight"].update(shape=[-3, -3]),
    "an unknown dtype": lambda header: header["embed.weight"].update(dtype="F4"),
    "a dtype that is no text": lambda header: header["embed.weight"].update(dtype=["F32"]),
    "sharding that is no JSON": lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="{"),
    "sharding of other tensors": lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="{}"),
    "sharding without offsets": lambda header: header["__metadata__"].update(DCP_SHARDING_INFO='{"embed.weight": 1}'),
    "metadata of numbers": lambda header: header["__metadata__"].update(format=1),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_that_lie(folder: Path, kind: str):
    forge(folder, MODEL[0], rewrite_header(folder / MODEL[0], HEADERS[kind]))
    assert first_reason(folder).startswith(f"{MODEL[0]}: ")


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}", struct.pack("<Q", 2) + b"\xff\xfe",
     struct.pack("<Q", 10**6) + b"[" * 10**6, struct.pack("<Q", 9) + b'{"a":NaN}',
     struct.pack("<Q", 13) + b'{"a":1,"a":1}'],
)  # fmt: skip
def test_headers_that_are_none(folder: Path, content: bytes):
    forge(folder, MODEL[0], content)
    assert first_reason(folder).startswith(f"{MODEL[0]}: ")


def test_bytes_behind_the_last_tensor(folder: Path):
    forge(folder, MODEL[0], (folder / MODEL[0]).read_bytes() + b"\0")
    assert "the tensors end at byte" in first_reason(folder)


def test_every_dtype_that_safetensors_writes(tmp_path: Path):
    dtypes = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    value = {name: torch.zeros(2, 3, dtype=getattr(torch, name)) for name in dtypes}
    save_file(value | {"scalar": torch.tensor(7.5), "empty": torch.zeros(0, 4)}, tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("rb") as file:
        header = SafetensorsFile(file)
        expected = [[name, name, [2, 3]] for name in dtypes] + [["empty", "float32", [0, 4]], ["scalar", "float32", []]]
        assert sorted(header.describe()) == sorted(expected)
        assert header.scalar("scalar") == 7.5
        with pytest.raises(HeaderError, match="expected one number"):
            header.scalar("float32")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 33])
def test_cover_agrees_with_torch_chunk(num_rows: int, world_size: int):
    """C8, C70: chunks of torch.chunk cover; without any one of them, or with one moved, they do not."""
    chunks = torch.arange(num_rows).chunk(world_size)
    shards = {}
    for rank in range(world_size):
        rows = chunks[rank] if rank < len(chunks) else torch.arange(0)
        begin = int(rows[0]) if len(rows) else num_rows
        path = f"m/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        shards[path] = {"a": Shard("float32", (len(rows), 2), (begin, 0), 0)}
    assert cover_problems(shards, world_size) == ({"a": (num_rows, 2)}, [])
    assert cover_problems(shards, None) == ({"a": (num_rows, 2)}, [])
    for path, tensors in shards.items():
        shard = tensors["a"]
        moved = {**shards, path: {"a": Shard("float32", shard.shape, (shard.begins[0] + 1, 0), 0)}}
        assert cover_problems(moved, world_size)[1]
        rest = {other: entry for other, entry in shards.items() if other != path}
        assert cover_problems(rest, world_size)[1] or not rest
