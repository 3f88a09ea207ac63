"""Files made to harm whoever looks at them: rejected with the reason, never executed, followed or waited for."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import resource
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint import files, layout, pickle_scan, strict_json
from keepstep.checkpoint.verify import Verdict, verify
from keepstep.cli.main import main
from tests.unit import builder
from tests.unit.forging import forge, reseal, unsealed, write_archive

VERL = Path(__file__).parents[1] / "data" / "verl" / "fsdp2"
TIB = 2**40


@pytest.fixture(autouse=True)
def in_bounded_time() -> Iterator[None]:
    """A hang ends the tests with a traceback. A signal's handler would wait for the C loop that hangs."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = builder.run_in(tmp_path_factory.mktemp("hostile-files"))
    builder.write(run, 20)
    return run.checkpoint(20)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "checkpoints" / "step_20")


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    shutil.copytree(VERL, tmp_path / "verl")
    return tmp_path / "verl" / "global_step_4"


def rejected(folder: Path, name: str, part: str = "", quick: bool = False) -> Verdict:
    """Verify; a reason must name this file and hold these words."""
    verdict = verify(folder, quick=quick)
    assert verdict.state == "rejected"
    assert any(reason.startswith(f"{name}: ") and part in reason for reason in verdict.reasons), verdict.reasons
    return verdict


# Pickles

CALL = b"cposix\nsystem\n(X\x07\x00\x00\x00touch aaR"
PICKLES = {
    "global": b"\x80\x02" + CALL + b".",
    "nested in a value": b"\x80\x02}X\x01\x00\x00\x00a]" + CALL + b"as.",
    "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93(X\x04\x00\x00\x00truetR.",
    "inst": b"\x80\x02(X\x04\x00\x00\x00trueiposix\nsystem\n.",
    "obj": b"\x80\x02(cposix\nsystem\nX\x04\x00\x00\x00trueo.",
    "newobj": b"\x80\x02csubprocess\nPopen\nX\x04\x00\x00\x00true\x85\x81.",
    "extension": b"\x80\x02\x82\x01.",
    "state of an object": b"\x80\x02ccollections\nOrderedDict\n)R}b.",
    "a second pickle": b"\x80\x02}.\x80\x02" + CALL + b".",
    "getattr": b"\x80\x02c__builtin__\ngetattr\n(ctorch\nSize\nX\x08\x00\x00\x00__init__tR.",
    "text protocol": b"cos\nsystem\n(S'true'\ntR.",
    "import by name": b"\x80\x02c__builtin__\neval\n(X\x04\x00\x00\x001+1\ntR.",
    "torn": b"\x80\x02}X\xff\xff\xff\x7f",
    "empty": b"",
}


@pytest.mark.parametrize("name", [layout.ACTOR, layout.OPTIMIZER, layout.SCHEDULER, layout.REF])
@pytest.mark.parametrize("kind", PICKLES)
def test_pickles_that_would_run_code(folder: Path, name: str, kind: str) -> None:
    """C62 and its kind: by every opcode that reaches code, in every file that is loaded, under digests that fit."""
    write_archive(folder / name, PICKLES[kind])
    reseal(folder)
    rejected(folder, name)
    rejected(folder, name, quick=True)


@pytest.mark.parametrize("kind", sorted(set(PICKLES) - {"state of an object"}))
def test_pickles_that_would_run_code_in_verls_files(verl: Path, kind: str) -> None:
    name = "actor/optim_world_size_2_rank_1.pt"
    write_archive(verl / name, PICKLES[kind])
    rejected(verl, name)


@pytest.mark.parametrize(
    "record", ["archive/constants.pkl", "archive/code/__torch__.py", "other/data.pkl", "archive/data/../x", "/data.pkl"]
)
def test_records_that_torch_save_does_not_write(folder: Path, record: str) -> None:
    """torch.load takes an archive with a constants.pkl for a program."""
    write_archive(folder / layout.ACTOR, b"\x80\x02}.", {record: PICKLES["global"]})
    reseal(folder)
    rejected(folder, layout.ACTOR, "which torch.save does not write")


def endless() -> dict[str, bytes]:
    """Small pickles of values that have no end for whoever walks, prints or hashes them."""
    doubled = b"".join(b"(h%ch%ctq%c" % (i, i, i + 1) for i in range(60))
    dicts = b"".join(b"}(X\1\0\0\0ah%cX\1\0\0\0bh%cuq%c" % (i, i, i + 1) for i in range(60))
    tuples = b"\x80\x02)q\x00" + doubled
    return {
        "itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
        "a dict of doubled dicts": b"\x80\x02}q\x00" + dicts + b".",
        "doubled tuples as a key": tuples + b"}h\x3c}s.",
        "doubled tuples as a storage": tuples + b"Q.",
        "doubled tuples as a function": tuples + b")R.",
        "doubled tuples as a storage's key": tuples
        + b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nh\x3cX\x03\x00\x00\x00cpuK\x01tQ.",
        "many opcodes": b"\x80\x02" + b"]0" * 1024**2 + b"N.",
    }


@pytest.mark.parametrize("kind", endless())
def test_pickles_without_end(folder: Path, verl: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The real limit takes seconds to reach.
    monkeypatch.setattr(pickle_scan, "MAX_OPCODES", 100_000)
    write_archive(folder / layout.ACTOR, endless()[kind])
    reseal(folder)
    rejected(folder, layout.ACTOR)
    name = "actor/model_world_size_2_rank_0.pt"
    write_archive(verl / name, endless()[kind])
    rejected(verl, name)


# Archives


def test_compressed_members_are_refused(folder: Path) -> None:
    """A bomb: a hundred kilobytes that would be a hundred megabytes."""
    write_archive(folder / layout.ACTOR, b"\0" * 10**8, compression=zipfile.ZIP_DEFLATED)
    reseal(folder)
    assert (folder / layout.ACTOR).stat().st_size < 200_000
    rejected(folder, layout.ACTOR, "compressed")


def patched_directory(path: Path, patch: Callable[[bytearray, int], None]) -> bytes:
    """The archive with `patch(bytes, position of the first directory entry)` applied."""
    data = bytearray(path.read_bytes())
    patch(data, struct.unpack_from("<L", data, len(data) - 6)[0])
    return bytes(data)


ZIPS: dict[str, Callable[[bytearray, int], None]] = {
    "a record of 4 GB": lambda data, at: struct.pack_into("<LL", data, at + 20, 2**32 - 2, 2**32 - 2),
    "two sizes": lambda data, at: struct.pack_into("<L", data, at + 24, 1),
    "a record beyond the file": lambda data, at: struct.pack_into("<L", data, at + 42, 2**31),
    "encrypted": lambda data, at: struct.pack_into("<H", data, at + 8, 1),
    "another disk": lambda data, at: struct.pack_into("<H", data, len(data) - 18, 7),
    "a directory elsewhere": lambda data, at: struct.pack_into("<L", data, len(data) - 6, 1),
    "a directory of 4 GB": lambda data, at: struct.pack_into("<L", data, len(data) - 10, 2**32 - 2),
    "something before": lambda data, at: data.__setitem__(slice(0, 0), b"#!/bin/sh\n"),
    "something behind": lambda data, at: data.extend(b"x"),
    "fewer records": lambda data, at: struct.pack_into("<HH", data, len(data) - 14, 1, 1),
    "a comment": lambda data, at: (struct.pack_into("<H", data, len(data) - 2, 1), data.extend(b"x")),
}


@pytest.mark.parametrize("kind", ZIPS)
def test_zip_directories_that_lie(folder: Path, kind: str) -> None:
    forge(folder, layout.ACTOR, patched_directory(folder / layout.ACTOR, ZIPS[kind]))
    rejected(folder, layout.ACTOR)


def test_records_that_share_bytes(folder: Path) -> None:
    write_archive(folder / layout.ACTOR, b"\x80\x02}.", {f"archive/data/{i}": b"\0" * 64 for i in range(4)})
    data = bytearray((folder / layout.ACTOR).read_bytes())
    places = [at for at in range(len(data)) if data[at : at + 4] == b"PK\1\2"]
    data[places[2] + 42 : places[2] + 46] = data[places[1] + 42 : places[1] + 46]
    forge(folder, layout.ACTOR, bytes(data))
    rejected(folder, layout.ACTOR, "declares 64 bytes, which the file does not have")


def test_storages_without_bytes(folder: Path) -> None:
    """C62 (b): a tensor record of zero length parses, and holds nothing."""
    with zipfile.ZipFile(folder / layout.ACTOR) as archive:
        pickled = archive.read("archive/data.pkl")
        keys = [name for name in archive.namelist() if "/data/" in name and "/." not in name]
    write_archive(folder / layout.ACTOR, pickled, {f"archive/{key.partition('/')[2]}": b"" for key in keys})
    reseal(folder)
    rejected(folder, layout.ACTOR, "has 0 bytes, expected")


def test_a_storage_that_no_tensor_asks_for(folder: Path) -> None:
    write_archive(folder / layout.SCHEDULER, b"\x80\x02}.", {"archive/data/7": PICKLES["global"]})
    reseal(folder)
    rejected(folder, layout.SCHEDULER, "storage data/7 belongs to no tensor")


# Sizes


@pytest.mark.parametrize("name", [layout.MANIFEST, layout.TRAINER_STATE, layout.ACTOR, "tokenizer/config.json"])
def test_sparse_files_of_a_terabyte(folder: Path, name: str) -> None:
    os.truncate(folder / name, TIB)
    rejected(folder, name, str(TIB))


def test_foreign_sparse_files_in_little_memory(folder: Path, verl: Path) -> None:
    """As a command of its own, which may not take more than 512 MiB."""
    (folder / layout.MANIFEST).unlink()
    for path in (folder / layout.ACTOR, folder / layout.TRAINER_STATE, verl / "data.pt",
                 verl / "actor" / "fsdp_config.json", verl / "actor" / "model_world_size_2_rank_0.pt"):  # fmt: skip
        os.truncate(path, TIB)
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "verify", str(folder), str(verl), "--json"],
        capture_output=True, text=True, timeout=50,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29)),
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert done.returncode == 1 and [verdict["state"] for verdict in found] == ["rejected", "rejected"]
    named = {reason.partition(":")[0] for verdict in found for reason in verdict["reasons"]}
    assert {layout.ACTOR, layout.TRAINER_STATE, "data.pt", "actor/fsdp_config.json"} <= named


def test_more_files_than_anybody_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 40)
    for number in range(60):
        (folder / f"{number}.txt").touch()
    verdict = verify(folder)
    assert "more than 40 files and folders" in verdict.reasons
    assert len(verdict.reasons) <= 51


def test_folders_nested_without_end(folder: Path) -> None:
    deep = folder
    for _ in range(1500):
        deep = deep / "d"
    # os.makedirs would recurse.
    subprocess.run(["mkdir", "-p", str(deep)], check=True)
    try:
        assert verify(folder).state in ("verified", "rejected")
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


# JSON

TEXTS = {
    "NaN": '{"a": NaN}',
    "infinite": '{"a": -Infinity}',
    "too large a number": '{"a": 1e999}',
    "twice the same key": '{"a": 1, "a": 1}',
    "a million levels": "[" * 10**6,
    "a million levels of objects": '{"a":' * 10**6,
    "a number of a million digits": '{"a": ' + "1" * 10**6 + "}",
    "a broken code point": '{"a\\ud800": 1, "a\\ud800": 2}',
    "many values": "[" + "[]," * (strict_json.MAX_VALUES // 2) + "[]]",
    "a late duplicate": "{" + ",".join(f'"{n}":0' for n in range(200_000)) + ',"199999":0}',
    "another encoding": '{"a": 1}'.encode("utf-16").decode("latin-1"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_json_that_readers_disagree_about(folder: Path, verl: Path, kind: str) -> None:
    content = TEXTS[kind].encode("latin-1")
    forge(folder, layout.TRAINER_STATE, content)
    rejected(folder, layout.TRAINER_STATE)
    (folder / layout.MANIFEST).write_bytes(content)
    rejected(folder, layout.MANIFEST)
    (verl / "actor" / "fsdp_config.json").write_bytes(content)
    rejected(verl, "actor/fsdp_config.json")


@pytest.mark.parametrize("first", ['"global_step": 20', '"metrics": {"a": 1e999}', '"extra": NaN'])
def test_a_sound_state_with_one_of_them_in_it(folder: Path, first: str) -> None:
    """Everything else is in order, so only the reading itself can say it."""
    content = (folder / layout.TRAINER_STATE).read_bytes()
    if "metrics" in first:
        content = content.replace(b'"metrics"', b'"others"')
    forge(folder, layout.TRAINER_STATE, b"{" + first.encode() + b"," + content.lstrip()[1:])
    (reason,) = rejected(folder, layout.TRAINER_STATE).reasons
    assert any(words in reason for words in ("duplicate key", "too large for a number", "NaN is not JSON"))


@pytest.mark.parametrize("target", ["../../manifest.json", "/etc/passwd", "..", "a/../../b", "a\\..\\b", ""])
def test_an_index_that_names_a_file_outside(folder: Path, target: str) -> None:
    """C62 (c)."""
    name = "tokenizer/model.safetensors.index.json"
    (folder / name).write_text(json.dumps({"weight_map": {"a": target}}))
    files_listed = unsealed(folder)["files"]
    reseal(folder, files=files_listed | {name: dict(files_listed[layout.CONFIG])})
    rejected(folder, name, "which is no file beside it")
    (folder / name).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    reseal(folder)
    assert verify(folder).state == "verified"


# What is no file


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    # The name of a socket is short.
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory() as short:
        listener.bind(f"{short}/s")
        os.rename(f"{short}/s", path)


def device(path: Path) -> None:
    try:
        # /dev/full: whoever opens and reads it never comes to an end.
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("making a device needs CAP_MKNOD")


def link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def inner_link(path: Path) -> None:
    path.symlink_to(Path(path.name).with_name("step_20"))


def directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [fifo, unix_socket, device, link, dangling_link, inner_link, directory])
@pytest.mark.parametrize("name", [layout.MANIFEST, layout.ACTOR, layout.TRAINER_STATE, "tokenizer/config.json"])
def test_what_is_no_file_is_never_opened(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink()
    make(folder / name)
    rejected(folder, name, "missing" if make is directory and name != layout.MANIFEST else "not a regular file")


@pytest.mark.parametrize("make", [fifo, unix_socket, device, link, dangling_link])
@pytest.mark.parametrize("name", ["data.pt", "actor/model_world_size_2_rank_0.pt", "actor/huggingface/config.json"])
def test_what_is_no_file_is_never_opened_in_verls_folders(verl: Path, name: str, make: Callable[[Path], None]) -> None:
    (verl / name).unlink()
    make(verl / name)
    rejected(verl, name, "not a regular file")


def test_a_folder_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "actor", tmp_path / "elsewhere")
    (folder / "actor").symlink_to(tmp_path / "elsewhere")
    rejected(folder, "actor", "a link out of the checkpoint")
    (tmp_path / "step_20").symlink_to(folder)
    assert verify(tmp_path / "step_20").reasons == ["not a folder"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "step_20").write_bytes(b"x")
    assert verify(tmp_path / "step_20").reasons == ["not a folder"]
    fifo(tmp_path / "step_40")
    assert verify(tmp_path / "step_40").reasons == ["not a folder"]


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that another user can enter."""
    place = Path(tempfile.mkdtemp(prefix="keepstep-test-"))
    place.chmod(0o755)
    yield place
    subprocess.run(["rm", "-rf", str(place)], check=True)


@pytest.mark.parametrize("name", [layout.MANIFEST, layout.ACTOR, layout.TRAINER_STATE, "actor"])
def test_what_cannot_be_read(good: Path, open_place: Path, name: str) -> None:
    folder = Path(shutil.copytree(good, open_place / "step_20"))
    (folder / name).chmod(0)
    # Root reads everything.
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        rejected(folder, f"{name}/" if name == "actor" else name, "cannot be read (Permission denied)")
    finally:
        os.seteuid(user)
        (folder / name).chmod(0o755)


# Words


@pytest.mark.parametrize("name", ["a\nb: verified", "\x1b[2J\x1b[31mred", "\u202etxt.exe", "broken-\udcff", "x" * 250])
def test_names_are_shown_and_not_obeyed(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file's name may hold what clears a terminal or forges a line of output."""
    (folder / name).touch()
    (reason,) = verify(folder).reasons
    assert reason.endswith("foreign file, the manifest does not list it")
    assert reason.isprintable() and reason.encode("utf-8")
    assert main(["verify", str(folder)]) == 1
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 2 and "\x1b" not in printed


def test_names_inside_files_are_shown_and_not_obeyed(folder: Path) -> None:
    pickled = pickle.dumps({"a": 1}, protocol=2)[:-1] + b"c\x1b[2J\nx\n0."
    write_archive(folder / layout.ACTOR, pickled)
    reseal(folder)
    (reason,) = rejected(folder, layout.ACTOR).reasons
    assert reason.isprintable()
