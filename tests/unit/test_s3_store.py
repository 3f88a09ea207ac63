"""Decisions of the S3 store, without a server."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from keepstep.checkpoint.digest import FileDigest
from keepstep.errors import StorageError, StorageRefusedError
from keepstep.storage import s3
from keepstep.storage.bandwidth import Bandwidth
from keepstep.storage.parts import part_span
from keepstep.storage.remote import object_key
from keepstep.storage.s3 import S3Store, same_tree

MIB = 1024**2


def server_error(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "secret-text"}}, "PutObject")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> S3Store:
    async def no_wait(_seconds: float) -> None:
        return None

    monkeypatch.setattr(s3.asyncio, "sleep", no_wait)
    return S3Store("bucket", "prefix", endpoint_url="http://127.0.0.1:9", key="k", secret="s")


def answering(*answers: Any) -> Any:
    """A stand-in for s3fs's request method: raises or returns its answers in order."""
    remaining = list(answers)

    async def call(_method: str, **_arguments: Any) -> Any:
        answer = remaining.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    call.remaining = remaining  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize(
    ("reported", "tree", "same"),
    [
        ("aaa=", "aaa=", True),
        ("aaa=-3", "aaa=-3", True),
        ("aaa=", "aaa=-3", True),  # a store that leaves the count out
        ("aaa=-2", "aaa=-3", False),
        ("bbb=-3", "aaa=-3", False),
        ("aaa=-3", "aaa=", False),
    ],
)
def test_reported_checksum_against_tree(reported: str, tree: str, same: bool) -> None:
    assert same_tree(reported, tree) is same


def test_spans_cover_the_file() -> None:
    digest = FileDigest(40 * MIB, 16 * MIB, ["00" * 32] * 3, "")
    assert [part_span(digest, number) for number in range(3)] == [
        (0, 16 * MIB),
        (16 * MIB, 16 * MIB),
        (32 * MIB, 8 * MIB),
    ]


@pytest.mark.parametrize("failure", [server_error("SlowDown"), server_error("InternalError"), ConnectionResetError()])
def test_one_transient_failure_is_tried_again(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """C166."""
    monkeypatch.setattr(store._fs, "_call_s3", answering(failure, {"ContentLength": 3}))
    info = store.head("key")
    assert info is not None
    assert info.size == 3


def test_tries_end(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    call = answering(*[EndpointConnectionError(endpoint_url="http://x")] * 10)
    monkeypatch.setattr(store._fs, "_call_s3", call)
    with pytest.raises(StorageError, match="EndpointConnectionError") as caught:
        store.head("key")
    assert len(call.remaining) == 10 - s3.TRIES
    assert caught.value.retry


@pytest.mark.parametrize(
    "failure",
    [server_error("AccessDenied"), server_error("ExpiredToken"), server_error("NoSuchBucket"), NoCredentialsError()],
)
def test_refusal_is_final_and_quotes_no_server_text(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    call = answering(failure, {"ContentLength": 3})
    monkeypatch.setattr(store._fs, "_call_s3", call)
    with pytest.raises(StorageRefusedError) as caught:
        store.head("key")
    assert len(call.remaining) == 1
    assert "secret-text" not in str(caught.value)
    assert not caught.value.retry


def test_hung_request_ends(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_method: str, **_arguments: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(store._fs, "_call_s3", hang)
    monkeypatch.setattr(s3, "REQUEST_TIMEOUT_S", 0.05)
    with pytest.raises(StorageError, match="TimeoutError"):
        store.head("key")


def test_bug_of_ours_is_not_taken_for_a_storage_failure(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store._fs, "_call_s3", answering(KeyError("bug")))
    with pytest.raises(KeyError):
        store.head("key")


def test_existing_key_with_a_condition_says_so(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store._fs, "_call_s3", answering(server_error("PreconditionFailed")))
    assert store.put_bytes("key", b"data", if_absent=True) is False


def test_bandwidth_is_shared_and_an_idle_time_is_not_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> list[float]:
        limit = Bandwidth(20.0)
        waits = [await limit.take(1), *await asyncio.gather(*[limit.take(2) for _ in range(3)])]
        await asyncio.sleep(0.6)
        return [*waits, await limit.take(1)]

    waits = asyncio.run(scenario())
    assert waits == pytest.approx([0, 0.05, 0.15, 0.25, 0], abs=0.045)


def test_no_limit_waits_for_nothing() -> None:
    assert asyncio.run(Bandwidth(None).take(10**12)) == 0


def test_reference_key_follows_content_and_other_files_their_step() -> None:
    digest = FileDigest.from_parts(40 * MIB, 16 * MIB, ["00" * 32, "11" * 32, "22" * 32])
    raw = hashlib.sha256(bytes.fromhex("00" * 32 + "11" * 32 + "22" * 32)).hexdigest()
    for step in (1, 2):
        assert object_key(step, "ref/pytorch_model.bin", digest) == f"shared/{raw}-3"
        assert object_key(step, "actor/pytorch_model.bin", digest) == f"checkpoints/step_{step}/actor/pytorch_model.bin"
    small = FileDigest.from_parts(1, 16 * MIB, ["ab" * 32])
    assert object_key(1, "ref/model/x.safetensors", small) == "shared/" + "ab" * 32
