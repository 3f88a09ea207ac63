"""What the store's client makes of a server that fails in every way we know of. Never a false confirmation."""

from __future__ import annotations

import asyncio
import datetime
import errno
import hashlib
import ipaddress
import os
import select
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.digest import FileDigest
from keepstep.errors import NoRoomError, StorageError, StorageRefusedError
from keepstep.storage import s3
from keepstep.storage.parts import FilePart, PartSink, open_part
from keepstep.storage.plain_http import PlainHttp, leads_through_proxy
from keepstep.storage.protocol import DamagedObjectError, LocalFileError
from keepstep.storage.s3 import S3Store
from tests.unit import s3_stub
from tests.unit.s3_stub import Fault, Stored, Stub

PART = 64 * 1024
KEY = "checkpoints/step_1/actor/pytorch_model.bin"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    real_sleep = s3.asyncio.sleep

    async def short(seconds: float) -> None:
        await real_sleep(min(seconds, 0.01))

    monkeypatch.setattr(s3.asyncio, "sleep", short)
    with Stub() as found:
        yield found


@pytest.fixture
def store(stub: Stub) -> Iterator[S3Store]:
    with S3Store("bucket", "run", endpoint_url=stub.url, key="k", secret="s") as found:
        # The probe is behind it: faults are for what follows.
        found._run(found._store_checks())
        yield found


def make(path: Path, num_bytes: int, seed: int = 0) -> FileDigest:
    """A file and its digest, in small parts so that tests stay quick."""
    data = hashlib.shake_128(bytes([seed])).digest(num_bytes)
    path.write_bytes(data)
    parts = [hashlib.sha256(data[at : at + PART]).hexdigest() for at in range(0, max(num_bytes, 1), PART)]
    return FileDigest.from_parts(num_bytes, PART, parts)


@pytest.fixture(params=[PART - 1, 3 * PART + 1], ids=["one part", "four parts"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, FileDigest]:
    return tmp_path / "file", make(tmp_path / "file", request.param)


def stored(stub: Stub) -> bytes | None:
    found = stub.objects.get(f"run/{KEY}")
    return found.data if found else None


TRANSIENT = [s3_stub.RESET, s3_stub.LOST_ANSWER, "SlowDown", "InternalError"]


@pytest.mark.parametrize("kind", TRANSIENT)
@pytest.mark.parametrize(
    ("method", "where"), [("PUT", KEY), ("HEAD", KEY), ("POST", "?uploads"), ("POST", "uploadId=")]
)
def test_transient_fault_of_an_upload_is_tried_again(
    stub: Stub, store: S3Store, file: tuple[Path, FileDigest], kind: str, method: str, where: str
) -> None:
    """C166, C172: also in the middle of a body, and when the answer to a request that took effect is lost."""
    path, digest = file
    stub.faults.append(Fault(kind, method, where, times=2))
    store.put_file(path, KEY, digest)
    assert stored(stub) == path.read_bytes()
    assert stub.faults[0].times == (2 if method == "POST" and len(digest.parts) == 1 else 0)
    # An upload whose begin was not answered is known to nobody: the sweep finds it.
    unanswered = 2 if where == "?uploads" and kind == s3_stub.LOST_ANSWER and len(digest.parts) > 1 else 0
    assert store.abort_unfinished("") == unanswered
    assert stub.uploads == {}


@pytest.mark.parametrize("kind", [*TRANSIENT, s3_stub.RESET_ANSWER, s3_stub.CUT_SHORT, s3_stub.WRONG_BYTES])
def test_transient_fault_of_a_download_is_tried_again(
    stub: Stub, store: S3Store, file: tuple[Path, FileDigest], tmp_path: Path, kind: str
) -> None:
    """C172: a part that broke off is hashed and written from its begin again."""
    path, digest = file
    store.put_file(path, KEY, digest)
    stub.faults.append(Fault(kind, "GET", KEY))
    store.get_file(KEY, tmp_path / "back", digest)
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert stub.faults[0].times == 0


@pytest.mark.parametrize("kind", [s3_stub.RESET, "SlowDown", "InternalError"])
def test_lasting_fault_ends_as_a_storage_error_that_may_pass(
    stub: Stub, store: S3Store, file: tuple[Path, FileDigest], kind: str
) -> None:
    path, digest = file
    stub.faults.append(Fault(kind, "PUT", KEY, times=10**6))
    with pytest.raises(StorageError) as caught:
        store.put_file(path, KEY, digest)
    assert caught.value.retry
    assert not isinstance(caught.value, StorageRefusedError)
    assert "secret-text" not in str(caught.value)
    assert stored(stub) is None


def test_hung_server_is_left_in_bounded_time(
    stub: Stub, store: S3Store, file: tuple[Path, FileDigest], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = file
    monkeypatch.setattr(s3, "REQUEST_TIMEOUT_S", 0.3)
    monkeypatch.setattr(s3, "ABORT_TIMEOUT_S", 0.3)
    stub.faults.append(Fault(s3_stub.HANG, "PUT", KEY, times=10**6))
    with pytest.raises(StorageError, match="TimeoutError"):
        store.put_file(path, KEY, digest)
    assert stored(stub) is None


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_expired_token_is_final_and_said(
    stub: Stub, store: S3Store, file: tuple[Path, FileDigest], tmp_path: Path, method: str
) -> None:
    path, digest = file
    if method == "GET":
        store.put_file(path, KEY, digest)
    stub.faults.append(Fault("ExpiredToken", method, KEY, times=10**6))
    with pytest.raises(StorageRefusedError, match="ExpiredToken") as caught:
        store.put_file(path, KEY, digest) if method == "PUT" else store.get_file(KEY, tmp_path / "back", digest)
    assert "credentials" in caught.value.remedy
    assert stub.uploads == {}, "C163: parts of an upload that cannot go on were left behind"


def test_short_object_of_several_parts_is_not_confirmed(stub: Stub, store: S3Store, tmp_path: Path) -> None:
    """C161: the server takes all parts, completes with the first one only and reports the whole's checksum."""
    digest = make(tmp_path / "file", 3 * PART)
    stub.faults.append(Fault(s3_stub.FIRST_PART_ONLY, "POST", "uploadId"))
    with pytest.raises(StorageError, match="not what was uploaded"):
        store.put_file(tmp_path / "file", KEY, digest)
    assert len(stored(stub) or b"") == PART
    assert not store.confirms(KEY, digest)


def test_download_of_a_damaged_object_is_final(
    stub: Stub, store: S3Store, file: tuple[Path, FileDigest], tmp_path: Path
) -> None:
    path, digest = file
    store.put_file(path, KEY, digest)
    stub.faults.append(Fault(s3_stub.WRONG_BYTES, "GET", KEY, times=10**6))
    with pytest.raises(DamagedObjectError, match="has SHA-256"):
        store.get_file(KEY, tmp_path / "back", digest)


def test_download_onto_a_full_disk_is_no_fault_of_the_store(
    stub: Stub, store: S3Store, file: tuple[Path, FileDigest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = file
    store.put_file(path, KEY, digest)

    def full(handle: int, block: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoRoomError, match="back: No space left"):
        store.get_file(KEY, tmp_path / "back", digest)


def test_object_that_is_shorter_than_its_manifest_is_damaged(stub: Stub, store: S3Store, tmp_path: Path) -> None:
    """C169, C161: a good-looking object without its end."""
    digest = make(tmp_path / "file", 3 * PART)
    store.put_file(tmp_path / "file", KEY, digest)
    whole = stub.objects[f"run/{KEY}"]
    stub.objects[f"run/{KEY}"] = Stored(whole.data[: 2 * PART + 5], whole.checksum)
    with pytest.raises(StorageError):
        store.get_file(KEY, tmp_path / "back", digest)
    assert not store.confirms(KEY, digest)


@pytest.mark.parametrize("num_bytes", [PART - 1, 3 * PART + 1])
def test_store_that_echoes_checksums_is_read_back(stub: Stub, tmp_path: Path, num_bytes: int) -> None:
    """C164: it stores other bytes than were sent and says the right checksum; only reading shows it."""
    stub.checks = False
    digest = make(tmp_path / "file", num_bytes)
    with S3Store("bucket", "run", endpoint_url=stub.url, key="k", secret="s") as store:
        store.put_file(tmp_path / "file", KEY, digest)
        assert stub.count("GET", KEY) == len(digest.parts)
        store.delete(KEY)
        stub.faults.append(Fault(s3_stub.DAMAGED, "PUT", KEY))
        with pytest.raises(StorageError, match="not what was uploaded"):
            store.put_file(tmp_path / "file", KEY, digest)
        assert not store.confirms(KEY, digest)
    assert not [key for key in stub.objects if ".probe" in key]


def test_store_that_checks_is_asked_by_head_alone(stub: Stub, store: S3Store, tmp_path: Path) -> None:
    digest = make(tmp_path / "file", 3 * PART)
    store.put_file(tmp_path / "file", KEY, digest)
    assert stub.count("GET", f"{KEY}?partNumber") == 0
    assert not [line for line in stub.requests if line.startswith("GET") and KEY in line and "upload" not in line]
    assert stub.count("HEAD", KEY) == 1


@pytest.mark.parametrize("lists_checksums", [True, False])
def test_upload_that_the_store_broke_off_goes_on_with_its_parts(
    stub: Stub, store: S3Store, tmp_path: Path, lists_checksums: bool
) -> None:
    """The parts that arrived are not sent again, known by their SHA-256 or, where it is not listed, by their MD5."""
    stub.lists_checksums = lists_checksums
    digest = make(tmp_path / "file", 3 * PART + 1)
    stub.faults.append(Fault("SlowDown", "PUT", "partNumber=3", times=s3.TRIES))
    with pytest.raises(StorageError, match="SlowDown"):
        store.put_file(tmp_path / "file", KEY, digest)
    (upload,) = stub.uploads.values()
    there = set(upload.parts)
    assert 1 <= len(there) <= 3
    stub.requests.clear()
    done: list[int] = []
    store.put_file(tmp_path / "file", KEY, digest, done.append)
    sent = {number for number in range(1, 5) if stub.count("PUT", f"partNumber={number}")}
    assert sent == {1, 2, 3, 4} - there
    assert sum(done) == 3 * PART + 1
    assert stored(stub) == (tmp_path / "file").read_bytes()
    assert stub.uploads == {}


def test_orphan_of_other_content_is_aborted_not_used(stub: Stub, store: S3Store, tmp_path: Path) -> None:
    """C152: another attempt's upload of the same key, whose parts have the right sizes and other bytes."""
    other, digest = make(tmp_path / "other", 3 * PART + 1, seed=1), make(tmp_path / "file", 3 * PART + 1)
    stub.faults.append(Fault("InternalError", "POST", "uploadId", times=s3.TRIES))
    with pytest.raises(StorageError):
        store.put_file(tmp_path / "other", KEY, other)
    assert len(stub.uploads) == 1
    store.put_file(tmp_path / "file", KEY, digest)
    assert stored(stub) == (tmp_path / "file").read_bytes()
    assert stub.uploads == {}


def test_parts_that_the_server_spoils_are_not_kept(stub: Stub, store: S3Store, tmp_path: Path) -> None:
    """Complete refuses them every time: going on with them would never end."""
    digest = make(tmp_path / "file", 3 * PART)
    stub.faults.append(Fault("InvalidPart", "POST", "uploadId", times=s3.TRIES))
    with pytest.raises(StorageError, match="InvalidPart"):
        store.put_file(tmp_path / "file", KEY, digest)
    assert stub.uploads == {}


@pytest.mark.parametrize("part", [0, 2])
def test_local_file_that_differs_leaves_nothing_behind(stub: Stub, store: S3Store, tmp_path: Path, part: int) -> None:
    """C163: the read fails half-way; the upload is aborted."""
    path = tmp_path / "file"
    digest = make(path, 3 * PART)
    data = bytearray(path.read_bytes())
    data[part * PART] ^= 1
    path.write_bytes(data)
    with pytest.raises(LocalFileError, match=f"part {part} "):
        store.put_file(path, KEY, digest)
    assert stub.uploads == {}
    assert stored(stub) is None


def test_object_of_another_process_is_not_replaced(
    stub: Stub, store: S3Store, file: tuple[Path, FileDigest], tmp_path: Path
) -> None:
    """A process that wakes up late puts nothing over what stands there by then; equal content is as good as its own."""
    path, digest = file
    newer = make(tmp_path / "newer", digest.size, seed=2)
    store.put_file(tmp_path / "newer", KEY, newer)
    with pytest.raises(StorageError, match="not what was uploaded"):
        store.put_file(path, KEY, digest)
    assert stored(stub) == (tmp_path / "newer").read_bytes()
    store.put_file(tmp_path / "newer", KEY, newer)


def test_manifest_whose_answer_was_lost_is_known_as_there(stub: Stub, store: S3Store) -> None:
    stub.faults.append(Fault(s3_stub.LOST_ANSWER, "PUT", "manifest.json"))
    assert store.put_bytes("manifest.json", b"ours", if_absent=True) is False
    assert store.get_bytes("manifest.json") == b"ours"


def test_listing_goes_over_all_pages(stub: Stub, store: S3Store) -> None:
    stub.objects |= {f"run/a/{number:05}": Stored(b"x" * (number % 3), None) for number in range(2500)}
    stub.objects["running/a/1"] = Stored(b"", None)
    assert store.list_objects("a/") == [(f"a/{number:05}", number % 3) for number in range(2500)]
    assert stub.count("GET", "list-type=2") == 3
    assert [key for key, _ in store.list_objects("")] == [f"a/{number:05}" for number in range(2500)]


def test_download_writes_nothing_past_a_part(
    stub: Stub, store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ignores ranges sends the whole object for every part."""
    digest = make(tmp_path / "file", 3 * PART)
    store.put_file(tmp_path / "file", KEY, digest)
    stub.faults.append(Fault(s3_stub.IGNORES_RANGE, "GET", KEY, times=10**6))
    written: list[tuple[int, int]] = []
    write = os.pwrite

    def recording(handle: int, block: bytes, offset: int) -> int:
        written.append((offset, offset + len(block)))
        return write(handle, block, offset)

    monkeypatch.setattr(os, "pwrite", recording)
    with pytest.raises(DamagedObjectError, match=r"part [12] "):
        store.get_file(KEY, tmp_path / "back", digest)
    assert written
    assert all(begin // PART == (end - 1) // PART for begin, end in written)


@pytest.mark.parametrize("plain", [True, False])
def test_download_through_either_way(
    stub: Stub, store: S3Store, file: tuple[Path, FileDigest], tmp_path: Path, plain: bool
) -> None:
    """Plain connections where they lead to the store; the client's own where a proxy stands between."""
    path, digest = file
    store.put_file(path, KEY, digest)
    with S3Store("bucket", "run", endpoint_url=stub.url, key="k", secret="s") as fresh:
        if not plain:
            fresh._plain = None
        fresh.get_file(KEY, tmp_path / "back", digest)
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert stub.count("GET", "X-Amz-Signature") == (len(digest.parts) if plain else 0)


def test_proxy_of_the_environment_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert leads_through_proxy("https://bucket.s3.amazonaws.com/key?X-Amz-Signature=1")
    assert not leads_through_proxy("https://inside.example/key")


def test_empty_file_comes_back(stub: Stub, store: S3Store, tmp_path: Path) -> None:
    digest = make(tmp_path / "file", 0)
    store.put_file(tmp_path / "file", KEY, digest)
    store.get_file(KEY, tmp_path / "back", digest)
    assert (tmp_path / "back").read_bytes() == b""


@pytest.mark.parametrize("plain", [True, False])
def test_upload_through_either_way_reads_blocks(
    stub: Stub, store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    """However large a part is, 1 MiB of it is in memory; also where the client sends it itself."""
    data = os.urandom(3 * 1024**2 + 1)
    (tmp_path / "file").write_bytes(data)
    digest = FileDigest.from_parts(len(data), len(data), [hashlib.sha256(data).hexdigest()])
    sizes: list[int] = []
    read = os.preadv

    def recording(handle: int, buffers: Any, offset: int) -> int:
        sizes.append(read(handle, buffers, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", recording)
    if not plain:
        store._plain = None
    # Tried again from its begin.
    stub.faults.append(Fault("InternalError", "PUT", KEY))
    store.put_file(tmp_path / "file", KEY, digest)
    assert stored(stub) == data
    assert stub.count("PUT", KEY) == 2
    assert max(sizes) <= 1024**2
    # Read once to compare and once for each try.
    assert sum(sizes) == 3 * len(data)


def test_plain_connections_are_kept(stub: Stub, store: S3Store, file: tuple[Path, FileDigest]) -> None:
    path, digest = file
    store.put_file(path, KEY, digest)
    assert store._plain is not None
    (first,) = store._plain._idle.values()
    assert 1 <= len(first) <= len(digest.parts)
    before = set(first)
    for number in range(3):
        store.put_file(path, f"again-{number}", digest)
    assert before & set(first)
    assert len(first) <= len(digest.parts)


def test_connection_that_the_server_ended_costs_no_try(stub: Stub) -> None:
    """After a pause all of them are gone; a part that met one after the other would run out of tries."""
    stub.objects[f"run/{KEY}"] = Stored(b"data", None)
    stub.faults.append(Fault(s3_stub.HANGS_UP, "GET", KEY))

    async def scenario() -> None:
        plain, url = PlainHttp(), f"{stub.url}/bucket/run/{KEY}"
        await plain.read(url, 0, 4, PartSink(None, 0))
        ((connection,),) = plain._idle.values()
        assert select.select([connection.sock], [], [], 10)[0]
        await plain.read(url, 0, 4, PartSink(None, 0))
        ((again,),) = plain._idle.values()
        assert again is not connection
        plain.close()

    asyncio.run(scenario())
    assert stub.count("GET", KEY) == 2


def test_refusal_before_the_body_is_read_is_heard(stub: Stub, store: S3Store, tmp_path: Path) -> None:
    """The server answers and hangs up while a part larger than all buffers is being sent."""
    data = bytes(32 * 1024**2)
    (tmp_path / "file").write_bytes(data)
    digest = FileDigest.from_parts(len(data), len(data), [hashlib.sha256(data).hexdigest()])
    stub.faults.append(Fault(s3_stub.REFUSES_EARLY, "PUT", KEY, times=10**6))
    with pytest.raises(StorageRefusedError, match="ExpiredToken"):
        store.put_file(tmp_path / "file", KEY, digest)
    assert stub.count("PUT", KEY) == 1


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda path: os.truncate(path, 5), LocalFileError, "ends before"),
        (flip_last_byte, StorageError, "BadDigest"),
    ],
    ids=["cut", "other byte"],
)
def test_file_that_changes_while_it_is_sent(
    stub: Stub,
    store: S3Store,
    file: tuple[Path, FileDigest],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    error: type[StorageError],
    says: str,
) -> None:
    """C163: it was whole when it was compared; the server is told the manifest's checksum and refuses other bytes."""
    path, digest = file

    def changing(path: Path, digest: FileDigest, number: int) -> FilePart:
        part = open_part(path, digest, number)
        if number == len(digest.parts) - 1:
            change(path)
        return part

    monkeypatch.setattr(s3, "open_part", changing)
    with pytest.raises(error, match=says):
        store.put_file(path, KEY, digest)
    assert stored(stub) is None
    assert stub.uploads == {}


@pytest.mark.parametrize("way", ["GET", "PUT"])
def test_cancelled_transfer_ends_its_thread(stub: Stub, tmp_path: Path, way: str) -> None:
    """The loop waits for its threads when it is closed: one left in a hung transfer would hold the process."""
    size = 64 * 1024**2
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", size)
    stub.faults.append(Fault(s3_stub.HANG, way, KEY))

    async def scenario() -> None:
        plain, url = PlainHttp(), f"{stub.url}/bucket/run/{KEY}"
        with FilePart(tmp_path / "file", 0, size) as part:
            sent = plain.send(url, {"Content-Length": str(size)}, part)
            task = asyncio.ensure_future(sent if way == "PUT" else plain.read(url, 0, PART, PartSink(None, 0)))
            while not stub.count(way, KEY):
                assert not task.done()
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert plain._idle == {}
        sent.close()

    begin = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("asleep", [False, True])
def test_ctrl_c_ends_an_upload_that_hangs(
    stub: Stub, store: S3Store, file: tuple[Path, FileDigest], asleep: bool
) -> None:
    """C172: at once, and the same upload goes on after it; also where the signal did not wake the loop."""
    path, digest = file
    stub.faults.append(Fault(s3_stub.HANG, "PUT", KEY))
    pressed: list[float] = []

    def press() -> None:
        until = time.monotonic() + 60
        while stub.faults[0].times and time.monotonic() < until:
            time.sleep(0.01)
        pressed.append(time.monotonic())
        if asleep:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        store.put_file(path, KEY, digest)
    thread.join(timeout=10)
    assert time.monotonic() - pressed[0] < 10
    store.put_file(path, KEY, digest)
    assert stored(stub) == path.read_bytes()


def certificate(path: Path) -> ssl.SSLContext:
    """A server's context with a new certificate of 127.0.0.1, which also lies at `path`."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret = path.with_suffix(".key")
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, secret)
    return context


@pytest.mark.parametrize("plain", [True, False])
def test_both_ways_over_tls(
    file: tuple[Path, FileDigest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    """Where only the client knows the certificate's authority, the client moves the bytes."""
    path, digest = file
    pem = tmp_path / "authority.pem"
    context = certificate(pem)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(pem))
    if plain:
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    with (
        Stub(tls=context) as stub,
        S3Store("bucket", "run", endpoint_url=stub.url, key="k", secret="s") as store,
    ):
        store.put_file(path, KEY, digest)
        store.get_file(KEY, tmp_path / "back", digest)
        assert store._plain is not None
        assert bool(store._plain._idle) is plain
        assert stored(stub) == path.read_bytes() == (tmp_path / "back").read_bytes()
