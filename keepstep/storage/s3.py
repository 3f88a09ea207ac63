"""An S3 store through s3fs: bounded memory, every part checked on both sides, every wait limited.

The bytes of parts go over plain connections, both ways, for which s3fs's client has signed (`storage.plain_http`): in
benchmarks/s3 that is what makes transfers cheaper than s3fs's own, digests included. Where they do not lead to the
store, the client moves the bytes itself.

Memory: at most `MAX_CONCURRENT_PARTS` parts at a time, each moved in blocks of about 1 MiB, whatever its size.
Retries: botocore's and s3fs's own are off, since they multiply (a hung server held a part for minutes); each request
has `TRIES` tries within `REQUEST_TIMEOUT_S`.
Evidence: a part's SHA-256 is computed from what is read, compared with the manifest's before the upload completes, and
handed to the server, which refuses other bytes. A server that merely echoes what it is given is found by a probe with
a wrong checksum, and then each object is read back instead.
Going on: a multipart upload that was interrupted stays on the server, and the next upload of the same content takes its
parts over: those whose SHA-256 the server recorded, or whose ETag is the MD5 of the local part where it lists no
SHA-256 (with SSE-KMS an ETag is no MD5: such parts are sent again). Complete names every part's SHA-256 and the
confirmation that follows covers the whole, so a part taken over wrongly cannot pass.
No object is replaced: every object becomes visible on condition that its key is free, so that a stale process that
wakes up late cannot put its bytes over newer ones.

One thread at a time: requests run on an event loop of the calling thread, so Ctrl-C and SIGTERM cancel an upload in
order (its parts are aborted on the server).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from keepstep.checkpoint.digest import FileDigest
from keepstep.errors import NO_ROOM_ERRNOS, NoRoomError, StorageError, StorageRefusedError
from keepstep.storage.bandwidth import Bandwidth
from keepstep.storage.parts import FilePart, PartSink, check_size, holds_part, open_part, part_span
from keepstep.storage.plain_http import PlainHttp, UnexpectedAnswerError, leads_through_proxy
from keepstep.storage.protocol import DamagedObjectError, ObjectInfo, OnBytes, ignore_bytes

T = TypeVar("T")

MAX_CONCURRENT_PARTS = 8
TRIES = 5
REQUEST_TIMEOUT_S = 300.0
ABORT_TIMEOUT_S = 10.0
SIGNALS_SEEN_EVERY_S = 0.5
READ_BYTES = 1 << 20
PRESIGNED_S = 3600

_MISSING = {"NoSuchKey", "404", "NotFound", "NoSuchUpload"}
_EXISTS = {"PreconditionFailed", "412", "ConditionalRequestConflict"}
_BAD_DIGEST = {"BadDigest", "XAmzContentChecksumMismatch"}
# Answers to Complete that come again as long as its parts are the same.
_SPOILED = {"InvalidPart", "InvalidPartOrder", "BadDigest", "EntityTooSmall", "InvalidRequest"}
_REFUSED = {
    "AccessDenied", "403", "Forbidden", "AllAccessDisabled", "AccountProblem", "InvalidAccessKeyId", "InvalidToken",
    "ExpiredToken", "TokenRefreshRequired", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "NoSuchBucket",
    "InvalidBucketName", "PermanentRedirect", "301", "IllegalLocationConstraintException",
    "AuthorizationHeaderMalformed", "MethodNotAllowed", "405",
}  # fmt: skip
# Client-side refusals, by name: their module is imported late.
_REFUSED_TYPES = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
    "ParamValidationError", "InvalidRegionError", "UnauthorizedSSOTokenError", "SSOTokenLoadError",
}  # fmt: skip


class _MissingError(Exception):
    """No such object."""


class _ExistsError(Exception):
    """The key exists and the request was conditional."""


class _Received:
    """The body of an answer, as the client reads it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data


class S3Store:
    """`keepstep.storage.protocol.ObjectStore` over S3.

    Args:
        bucket, prefix: the root of all keys.
        endpoint_url: None is AWS.
        key, secret: explicit credentials (embedded store); None: the standard AWS chain.
        put_options: S3 parameters of everything that is stored (`StorageClass`, `ServerSideEncryption`, …).
        max_bandwidth: bytes per second over all parts, both ways; None: no limit.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        key: str | None = None,
        secret: str | None = None,
        put_options: Mapping[str, str] | None = None,
        max_bandwidth: float | None = None,
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        self.endpoint = endpoint_url or "AWS"
        self._options = {"endpoint_url": endpoint_url, "key": key, "secret": secret}
        self._region = region
        self._put_options: dict[str, Any] = dict(put_options or {})
        self._bandwidth = Bandwidth(max_bandwidth)
        self._plain: PlainHttp | None = PlainHttp()
        self._runner = asyncio.Runner()
        self._checked: bool | None = None
        self._fs = self._connect(sign_payload=False)

    @property
    def where(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def close(self) -> None:
        if self._plain is not None:
            self._plain.close()

        async def end() -> None:
            if self._fs._s3 is not None:
                await self._fs._s3.close()

        self._runner.run(end())
        self._runner.close()

    def __enter__(self) -> S3Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put_file(self, path: Path, key: str, digest: FileDigest, on_bytes: OnBytes = ignore_bytes) -> None:
        self._run(self._put_file(path, key, digest, on_bytes))

    def get_file(self, key: str, path: Path, digest: FileDigest, on_bytes: OnBytes = ignore_bytes) -> None:
        try:
            self._run(self._get_file(key, path, digest, on_bytes))
        except OSError as error:
            if error.errno not in NO_ROOM_ERRNOS:
                raise
            raise NoRoomError(f"No room for {path}: {error.strerror}.", "Free space, start again.") from error

    def put_bytes(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            self._run(self._put_object(key, data, hashlib.sha256(data).digest(), **condition))
        except _ExistsError:
            return False
        return True

    def get_bytes(self, key: str) -> bytes | None:
        try:
            return self._run(self._get_object(key))
        except _MissingError:
            return None

    def head(self, key: str) -> ObjectInfo | None:
        return self._run(self._head(key))

    def confirms(self, key: str, digest: FileDigest) -> bool:
        return self._run(self._confirms(key, digest))

    def list_objects(self, prefix: str) -> list[tuple[str, int]]:
        return self._run(self._list(prefix))

    def delete(self, key: str) -> None:
        try:
            self._run(self._call("delete_object", key))
        except _MissingError:
            # Some stores say so; the others answer as if it had been there.
            pass

    def abort_unfinished(self, prefix: str, keep: Callable[[str], bool] = lambda key: False) -> int:
        return self._run(self._abort_unfinished(prefix, keep))

    # Requests

    def _connect(self, *, sign_payload: bool) -> Any:
        import s3fs
        from aiobotocore.session import AioSession

        session = AioSession()
        for operation in ("PutObject", "UploadPart"):
            session.register(f"before-send.s3.{operation}", self._send_plainly)
        config: dict[str, Any] = {
            "connect_timeout": 5,
            "read_timeout": 60,
            # Addresses signed in the older way are refused for encrypted objects.
            "signature_version": "s3v4",
            "max_pool_connections": 2 * MAX_CONCURRENT_PARTS,
            "retries": {"mode": "standard", "max_attempts": 0},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"payload_signing_enabled": sign_payload},
        }
        if self._options["key"] is not None:
            # The embedded store is on this host: no proxy on the way, whatever the environment says.
            config["proxies"] = {}
        fs = s3fs.S3FileSystem(
            **self._options,
            session=session,
            client_kwargs={"region_name": self._region} if self._region else {},
            config_kwargs=config,
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        # A class attribute of s3fs: its constructor takes `retries` and ignores it.
        fs.retries = 1
        return fs

    def _run(self, request: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(_attentive(request))

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    async def _call(
        self, method: str, key: str | None, tries: int = TRIES, final: Collection[str] = (), **arguments: Any
    ) -> Any:
        if key is not None:
            arguments["Key"] = self._name(key)
        body = arguments.get("Body", b"")

        async def request() -> Any:
            if isinstance(body, FilePart):
                body.seek(0)
            return await self._fs._call_s3(method, Bucket=self.bucket, **arguments)

        return await self._persist(request, f"{method} of {self.where}/{key or ''}", tries, len(body), final)

    async def _persist(
        self,
        request: Callable[[], Awaitable[T]],
        what: str,
        tries: int = TRIES,
        num_bytes: int = 0,
        final: Collection[str] = (),
    ) -> T:
        """Await `request` again while trying again can help.

        Args:
            num_bytes: go over the wire at each try.
            final: error codes that are an answer, not a failure to get one.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + REQUEST_TIMEOUT_S
        for number in range(tries):
            # Waiting for one's turn is no failure of the store.
            deadline += await self._bandwidth.take(num_bytes)
            try:
                async with asyncio.timeout_at(deadline):
                    return await request()
            except Exception as error:
                if not _is_storage(error):
                    raise
                code = _code(error)
                if code in _MISSING:
                    raise _MissingError(what) from error
                if code in _EXISTS:
                    raise _ExistsError(what) from error
                if code in _REFUSED or code in _REFUSED_TYPES:
                    raise self._refused(what, code) from error
                if number + 1 == tries or code in final or loop.time() >= deadline:
                    raise self._failed(what, code) from error
                await asyncio.sleep(0.2 * 2**number)
        raise AssertionError("unreachable")

    def _refused(self, what: str, code: str) -> StorageRefusedError:
        credentials = (
            "Check the credentials (standard AWS chain: environment, profile, instance role) and that they may list, "
            f"get, put, delete and abort uploads in bucket {self.bucket!r} under {self.prefix!r}."
        )
        remedies = {
            "NoSuchBucket": f"Create the bucket {self.bucket!r} or correct s3.bucket and s3.endpoint_url.",
            "ParamValidationError": f"Correct s3.bucket ({self.bucket!r}) and s3.prefix ({self.prefix!r}).",
        }
        return StorageRefusedError(
            f"The object store at {self.endpoint} refused {what}: {code}.",
            remedies.get(code, credentials),
        )

    def _failed(self, what: str, code: str) -> StorageError:
        return StorageError(
            f"The object store at {self.endpoint} failed in {what}: {code}.",
            "Is it up and reachable from here? The same command goes on where it stopped.",
        )

    # Objects

    async def _put_object(self, key: str, data: bytes | FilePart, sha256: bytes, **condition: Any) -> None:
        await self._call("put_object", key, Body=data, ChecksumSHA256=_base64(sha256), **self._put_options, **condition)

    async def _get_object(self, key: str) -> bytes:
        async def request() -> bytes:
            response = await self._fs._call_s3("get_object", Bucket=self.bucket, Key=self._name(key))
            async with response["Body"] as body:
                return bytes(await body.read())

        return await self._persist(request, f"get_object of {self.where}/{key}")

    async def _head(self, key: str) -> ObjectInfo | None:
        try:
            found = await self._call("head_object", key, ChecksumMode="ENABLED")
        except _MissingError:
            return None
        return ObjectInfo(int(found["ContentLength"]), found.get("ChecksumSHA256"))

    async def _confirms(self, key: str, digest: FileDigest) -> bool:
        found = await self._head(key)
        if found is None or found.size != digest.size:
            return False
        if await self._head_proves() and found.checksum_sha256 is not None:
            return same_tree(found.checksum_sha256, digest.tree)
        return await self._reads_back(key, digest)

    async def _head_proves(self) -> bool:
        """Whether the checksum that a HEAD tells was checked by the store when the object came."""
        try:
            return await self._store_checks()
        except StorageRefusedError:
            # Who may only read cannot ask; everything is read then.
            self._checked = False
            return False

    async def _reads_back(self, key: str, digest: FileDigest) -> bool:
        limit = asyncio.Semaphore(MAX_CONCURRENT_PARTS)

        async def same(number: int) -> bool:
            async with limit:
                return await self._stream_part(key, digest, number, None) == digest.parts[number]

        return all(await _gather([same(number) for number in range(len(digest.parts))]))

    async def _stream_part(self, key: str, digest: FileDigest, number: int, handle: int | None) -> str:
        """Hex SHA-256 of a part of an object, written to its place in the open file `handle` as it arrives."""
        start, length = part_span(digest, number)
        whole = len(digest.parts) == 1

        async def request() -> str:
            sink = PartSink(handle, start)
            if not await self._read_plainly(key, start, length, sink):
                sink = PartSink(handle, start)
                await self._read_by_client(key, None if whole else start, length, sink)
            return sink.hexdigest()

        return await self._persist(request, f"get_object of {self.where}/{key}", num_bytes=length)

    async def _read_plainly(self, key: str, start: int, length: int, sink: PartSink) -> bool:
        """False: only the client's own request can tell."""
        await self._fs.set_session()
        client = await self._fs.get_s3(self.bucket)
        address = {"Bucket": self.bucket, "Key": self._name(key)}
        url = await client.generate_presigned_url("get_object", Params=address, ExpiresIn=PRESIGNED_S)
        plain = self._plain_to(url)
        if plain is None:
            return False
        try:
            await plain.read(url, start, length, sink)
        except UnexpectedAnswerError:
            return False
        return True

    async def _send_plainly(self, request: Any, **_: Any) -> Any:
        """Answer to a request that the client has signed and is about to send; None: it sends it itself."""
        plain, part = self._plain_to(request.url), request.body
        if plain is None or not isinstance(part, FilePart):
            return None
        try:
            answer = await plain.send(request.url, request.headers, part)
        except UnexpectedAnswerError:
            return None
        from aiobotocore.awsrequest import AioAWSResponse

        return AioAWSResponse(request.url, answer.status, answer.headers, _Received(answer.body))

    def _plain_to(self, url: str) -> PlainHttp | None:
        """None: the way to the store leads through a proxy."""
        if self._plain is not None and self._options["key"] is None and leads_through_proxy(url):
            self._plain = None
        return self._plain

    async def _read_by_client(self, key: str, start: int | None, length: int, sink: PartSink) -> None:
        span = {} if start is None else {"Range": f"bytes={start}-{start + length - 1}"}
        response = await self._fs._call_s3("get_object", Bucket=self.bucket, Key=self._name(key), **span)
        async with response["Body"] as body:
            # Never past the part: a server that sends more must not write over the next one.
            while length > 0 and (block := await body.read(min(READ_BYTES, length))):
                await asyncio.to_thread(sink.take, block)
                length -= len(block)

    async def _store_checks(self) -> bool:
        """Whether this endpoint refuses wrong checksums; where it does not, its HEAD proves nothing. Asked once."""
        if self._checked is None:
            key = f".probe-{uuid.uuid4().hex}"
            try:
                wrong = _base64(bytes(32))
                await self._call(
                    "put_object", key, final=_BAD_DIGEST, Body=b"probe", ChecksumSHA256=wrong, **self._put_options
                )
            except StorageRefusedError:
                raise
            except StorageError as error:
                # Only an answer about the content counts: an unreachable store has not refused anything.
                if _code(error.__cause__) not in _BAD_DIGEST:
                    raise
                self._checked = True
            else:
                await self._call("delete_object", key)
                self._checked = False
                await self._fs._s3.close()
                # The signature of the body is then the only check on the wire.
                self._fs = self._connect(sign_payload=True)
        return self._checked

    async def _put_file(self, path: Path, key: str, digest: FileDigest, on_bytes: OnBytes) -> None:
        await self._store_checks()
        check_size(path, digest)
        try:
            if len(digest.parts) == 1:
                with await asyncio.to_thread(open_part, path, digest, 0) as part:
                    await self._put_object(key, part, bytes.fromhex(digest.parts[0]), IfNoneMatch="*")
                on_bytes(digest.size)
            else:
                await self._put_parts(path, key, digest, on_bytes)
        except _ExistsError:
            # After a lost answer it is ours; else another process was quicker, and the confirmation says with what.
            pass
        except _MissingError as error:
            raise self._failed(f"the upload of {self.where}/{key}", "NoSuchUpload") from error
        if not await self._confirms(key, digest):
            raise StorageError(
                f"{self.where}/{key} is not what was uploaded ({path}).",
                "The store damaged it or somebody else writes to this prefix; the same command uploads it again.",
            )

    async def _put_parts(self, path: Path, key: str, digest: FileDigest, on_bytes: OnBytes) -> None:
        upload, there = await self._take_up(path, key, digest)
        limit = asyncio.Semaphore(MAX_CONCURRENT_PARTS)

        async def put(number: int) -> dict[str, Any]:
            checksum: dict[str, Any] = {
                "ChecksumSHA256": _base64(bytes.fromhex(digest.parts[number])),
                "PartNumber": number + 1,
            }
            async with limit:
                if number in there:
                    etag = there[number]
                else:
                    with await asyncio.to_thread(open_part, path, digest, number) as part:
                        etag = (await self._call("upload_part", key, Body=part, **upload, **checksum))["ETag"]
            on_bytes(part_span(digest, number)[1])
            return {"ETag": etag, **checksum}

        try:
            parts = await _gather([put(number) for number in range(len(digest.parts))])
            await self._complete(key, digest, upload, parts)
        except BaseException as error:
            if not self._goes_on(error):
                # The first error is the one to report, also when the abort fails with the store.
                await asyncio.shield(self._abort(key, upload))
            raise

    def _goes_on(self, error: BaseException) -> bool:
        """Whether the next upload of the same file can use the parts that are on the server."""
        if not self._checked or (isinstance(error, StorageError) and _code(error.__cause__) in _SPOILED):
            return False
        return isinstance(error, asyncio.CancelledError) or (isinstance(error, StorageError) and error.retry)

    async def _take_up(self, path: Path, key: str, digest: FileDigest) -> tuple[dict[str, Any], dict[int, str]]:
        """(the upload to go on with, ETags of its parts that need not be sent again by their index)."""
        unfinished = [upload for found, upload in await self._unfinished(key) if found == key]
        listed = [(await self._usable(path, key, digest, upload), upload) for upload in unfinished]
        there, best = max(listed, key=lambda entry: len(entry[0]), default=({}, {}))
        for upload in unfinished:
            if not there or upload != best:
                await self._abort(key, upload)
        if there:
            return best, there
        created = await self._call("create_multipart_upload", key, ChecksumAlgorithm="SHA256", **self._put_options)
        return {"UploadId": created["UploadId"]}, {}

    async def _usable(self, path: Path, key: str, digest: FileDigest, upload: dict[str, Any]) -> dict[int, str]:
        """ETags, by index, of the parts of an unfinished upload that hold what the manifest says."""
        if not self._checked:
            return {}
        try:
            parts = await self._pages(
                "list_parts", key, "Parts", {"NextPartNumberMarker": "PartNumberMarker"}, **upload
            )
        except _MissingError:
            return {}
        usable: dict[int, str] = {}
        for part in parts:
            number = part["PartNumber"] - 1
            if number < len(digest.parts) and part["Size"] == part_span(digest, number)[1]:
                recorded, etag = part.get("ChecksumSHA256"), part["ETag"]
                same = recorded == _base64(bytes.fromhex(digest.parts[number]))
                if same or (not recorded and await asyncio.to_thread(holds_part, path, digest, number, etag)):
                    usable[number] = etag
        return usable

    async def _complete(
        self, key: str, digest: FileDigest, upload: dict[str, Any], parts: list[dict[str, Any]]
    ) -> None:
        try:
            await self._call(
                "complete_multipart_upload", key, **upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
            )
        except _MissingError as error:
            # A retry after a lost answer finds the upload gone because it was completed.
            if not await self._confirms(key, digest):
                raise self._failed(f"complete_multipart_upload of {self.where}/{key}", "NoSuchUpload") from error

    async def _abort(self, key: str, upload: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._call("abort_multipart_upload", key, tries=1, **upload)
        except (StorageError, _MissingError, TimeoutError):
            pass

    async def _get_file(self, key: str, path: Path, digest: FileDigest, on_bytes: OnBytes) -> None:
        limit = asyncio.Semaphore(MAX_CONCURRENT_PARTS)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        goes_on = os.fstat(handle).st_size > 0

        async def get(number: int) -> None:
            async with limit:
                if goes_on and await asyncio.to_thread(holds_part, path, digest, number):
                    on_bytes(part_span(digest, number)[1])
                    return
                found = await self._stream_part(key, digest, number, handle)
                if found != digest.parts[number]:
                    # Once more: it may have been damaged on the way.
                    found = await self._stream_part(key, digest, number, handle)
                if found != digest.parts[number]:
                    raise DamagedObjectError(
                        f"{self.where}/{key}: part {number} has SHA-256 {found[:12]}…, "
                        f"expected {digest.parts[number][:12]}….",
                        "The object is damaged or was replaced; another step of the run may be whole.",
                    )
                on_bytes(part_span(digest, number)[1])

        try:
            await _gather([get(number) for number in range(len(digest.parts))])
            os.ftruncate(handle, digest.size)
            await asyncio.to_thread(os.fsync, handle)
        except _MissingError as error:
            raise DamagedObjectError(
                f"{self.where}/{key} is not there.", "Another step of the run may be whole."
            ) from error
        finally:
            os.close(handle)

    async def _list(self, prefix: str) -> list[tuple[str, int]]:
        marks = {"NextContinuationToken": "ContinuationToken"}
        entries = await self._pages("list_objects_v2", None, "Contents", marks, Prefix=self._name(prefix))
        skip = len(self._name(""))
        return [(entry["Key"][skip:], int(entry["Size"])) for entry in entries]

    async def _unfinished(self, prefix: str) -> list[tuple[str, dict[str, Any]]]:
        """(key, upload) of every unfinished multipart upload under `prefix`."""
        marks = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
        entries = await self._pages("list_multipart_uploads", None, "Uploads", marks, Prefix=self._name(prefix))
        skip = len(self._name(""))
        return [(entry["Key"][skip:], {"UploadId": entry["UploadId"]}) for entry in entries]

    async def _pages(
        self, method: str, key: str | None, field: str, marks: Mapping[str, str], **arguments: Any
    ) -> list[dict[str, Any]]:
        """`field` of every page of a listing; `marks` names what one answer says and the next request repeats."""
        found: list[dict[str, Any]] = []
        page: dict[str, Any] = {}
        while True:
            answer = await self._call(method, key, **arguments, **page)
            found += answer.get(field, [])
            following = {marks[mark]: answer[mark] for mark in marks if answer.get(mark)}
            if not answer.get("IsTruncated") or not following or following == page:
                return found
            page = following

    async def _abort_unfinished(self, prefix: str, keep: Callable[[str], bool]) -> int:
        unfinished = [entry for entry in await self._unfinished(prefix) if not keep(entry[0])]
        for key, upload in unfinished:
            await self._abort(key, upload)
        return len(unfinished)


def same_tree(reported: str, tree: str) -> bool:
    """Whether a reported SHA-256 is `tree`; some stores leave the `-<count>` of the composite form out."""
    return reported == tree or ("-" not in reported and reported == tree.partition("-")[0])


async def _attentive(request: Coroutine[Any, Any, T]) -> T:
    """The request, in a loop that never sleeps for long.

    A signal that arrives in the moment before the loop falls asleep, or in another thread, does not wake it: Python
    looks for it when the loop next wakes, and while a transfer hangs that may be a minute later.
    """

    loop = asyncio.get_running_loop()
    waking: asyncio.TimerHandle

    def look_up() -> None:
        nonlocal waking
        waking = loop.call_later(SIGNALS_SEEN_EVERY_S, look_up)

    waking = loop.call_later(SIGNALS_SEEN_EVERY_S, look_up)
    try:
        return await request
    finally:
        waking.cancel()


async def _gather(requests: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; at the first error the others are cancelled and awaited before it is raised."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _is_storage(error: Exception) -> bool:
    """s3fs raises translated OSErrors and raw botocore and aiohttp errors, which are not OSErrors.

    A disk that has no room for a download is this machine's matter.
    """
    if isinstance(error, OSError) and error.errno in NO_ROOM_ERRNOS:
        return False
    module = type(error).__module__.partition(".")[0]
    return module in ("botocore", "aiobotocore", "aiohttp", "http") or isinstance(error, OSError | TimeoutError)


def _code(error: BaseException | None) -> str:
    """The store's error code, else the name of the error's class. Never the text, which may carry request details."""
    for candidate in (error, getattr(error, "__cause__", None)):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return str(response["Error"].get("Code", "error"))
    return type(error).__name__
