"""Digests by parts against hashlib and S3's published rule."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from keepstep.checkpoint.digest import MOST_PARTS, FileDigest, HashingWriter, digest_file, part_size_for

MIB = 1024**2


def expected_digest(content: bytes, part_size: int) -> FileDigest:
    """S3: one part is base64(sha256(content)); several are base64(sha256(of the raw part digests)) and their count."""
    parts = [content[i : i + part_size] for i in range(0, len(content), part_size)] or [b""]
    raw = [hashlib.sha256(part).digest() for part in parts]
    if len(raw) == 1:
        tree = base64.b64encode(raw[0]).decode()
    else:
        tree = base64.b64encode(hashlib.sha256(b"".join(raw)).digest()).decode() + f"-{len(raw)}"
    return FileDigest(len(content), part_size, [digest.hex() for digest in raw], tree)


@pytest.mark.parametrize("size", [0, 1, 16 * MIB - 1, 16 * MIB, 16 * MIB + 1, 40 * MIB])
def test_file_and_writer_agree_with_the_rule(tmp_path: Path, size: int):
    content = bytes(range(251)) * (size // 251 + 1)
    content = content[:size]
    path = tmp_path / "file"
    with path.open("wb") as file:
        writer = HashingWriter(file)
        for begin in range(0, size, 7 * MIB + 3):
            writer.write(content[begin : begin + 7 * MIB + 3])
        writer.flush()
    expected = expected_digest(content, 16 * MIB)
    assert path.read_bytes() == content
    assert writer.digest() == expected
    assert digest_file(path) == expected
    assert FileDigest.from_record(expected.to_record()) == expected


def test_known_value():
    """SHA-256 of the empty string (FIPS 180-4 test vector)."""
    assert expected_digest(b"", 16 * MIB).parts == ["e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]


@pytest.mark.parametrize(
    "size,part_mib",
    [
        (0, 16),
        (9000 * 16 * MIB, 16),
        (9000 * 16 * MIB + 1, 32),
        (9000 * 32 * MIB, 32),
        (10**12, 128),
    ],
)
def test_part_size_doubles_until_the_parts_fit(size: int, part_mib: int):
    assert part_size_for(size) == part_mib * MIB
    assert -(-size // part_size_for(size)) <= MOST_PARTS
