"""A small S3 server on loopback that does what a script of faults says, and otherwise behaves.

It knows objects (PUT, GET with ranges, HEAD, DELETE, ListObjectsV2), multipart uploads, SHA-256 checksums and
`If-None-Match: *`. Signatures are not looked at. Everything is kept in memory.
"""

from __future__ import annotations

import base64
import hashlib
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

RESET, RESET_ANSWER, LOST_ANSWER, HANG = "reset", "reset answer", "lost answer", "hang"
IGNORES_RANGE = "ignores range"
HANGS_UP = "hangs up"
"""After a whole answer, and without announcing it."""
REFUSES_EARLY = "refuses early"
"""Expired token, before the body is read."""
WRONG_BYTES, CUT_SHORT, FIRST_PART_ONLY, DAMAGED = "wrong bytes", "cut short", "first part only", "damaged"
ERRORS = {
    "SlowDown": 503, "InternalError": 500, "ExpiredToken": 403, "AccessDenied": 403, "PreconditionFailed": 412,
    "BadDigest": 400, "InvalidPart": 400, "NoSuchKey": 404, "NoSuchUpload": 404, "InvalidRange": 416,
}  # fmt: skip


def sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


@dataclass
class Fault:
    """What happens to the next `times` requests of `method` whose path and query contain `where`.

    kind: one of the constants above or an error code of S3.
    """

    kind: str
    method: str
    where: str = ""
    times: int = 1


@dataclass
class Stored:
    data: bytes
    checksum: str | None


@dataclass
class Upload:
    key: str
    parts: dict[int, Stored] = field(default_factory=dict)


@dataclass
class Stub:
    """The server. `with Stub(...) as stub`, then point a client to `stub.url`.

    Args:
        checks: False: it takes any checksum and says it back, as some stores do.
        lists_checksums: whether ListParts tells the parts' SHA-256.
        tls: certificate and key; None: plain HTTP.
    """

    checks: bool = True
    lists_checksums: bool = True
    honours_conditions: bool = True
    """False: it takes a second object under the same key all the same."""
    tls: ssl.SSLContext | None = None
    faults: list[Fault] = field(default_factory=list)
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """`METHOD /path?query` of every request, in order."""

    def __enter__(self) -> Stub:
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), type("Bound", (_Handler,), {"stub": self}))
        self._server.daemon_threads = True
        if self.tls:
            # The handshake is for the connection's own thread.
            self._server.socket = self.tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    def count(self, method: str, where: str = "") -> int:
        """Requests so far of this method whose path and query contain `where`."""
        return sum(line.startswith(f"{method} ") and where in line for line in self.requests)

    def fault(self, method: str, line: str) -> str | None:
        with self.lock:
            self.requests.append(f"{method} {line}")
            for fault in self.faults:
                if fault.times and fault.method == method and fault.where in line:
                    fault.times -= 1
                    return fault.kind
        return None


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that end early are what this server is for."""
        if not isinstance(sys.exception(), OSError | ValueError):
            super().handle_error(request, client_address)


class _RefusalError(Exception):
    """Ends a request with an error of S3."""

    def __init__(self, code: str) -> None:
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    stub: Stub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._serve("GET", self._get)

    def do_HEAD(self) -> None:
        self._serve("HEAD", self._head)

    def do_PUT(self) -> None:
        self._serve("PUT", self._put)

    def do_POST(self) -> None:
        self._serve("POST", self._post)

    def do_DELETE(self) -> None:
        self._serve("DELETE", self._delete)

    def _serve(self, method: str, act: Callable[[], None]) -> None:
        parts = urlsplit(self.path)
        self.key = unquote(parts.path.removeprefix("/bucket").removeprefix("/"))
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.kind = self.stub.fault(method, f"{unquote(parts.path)}?{parts.query}")
        length = int(self.headers.get("Content-Length") or 0)
        if self.kind == HANG:
            self.stub.closing.wait()
            return self._drop()
        if self.kind == REFUSES_EARLY:
            self.close_connection = True
            return self._send(403, _xml("Error", "<Code>ExpiredToken</Code>"))
        if self.kind == RESET:
            self.rfile.read(length // 2)
            return self._drop()
        self.body = self.rfile.read(length)
        try:
            if self.kind in ERRORS:
                raise _RefusalError(self.kind)
            act()
        except _RefusalError as answer:
            self._send(ERRORS[answer.code], _xml("Error", f"<Code>{answer.code}</Code><Message>secret-text</Message>"))

    def _drop(self) -> None:
        """Reset the connection."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()

    def _send(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None, length: int | None = None):
        if self.kind == LOST_ANSWER:
            return self._drop()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data) if length is None else length)} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        if self.kind == RESET_ANSWER:
            self.wfile.write(data[: len(data) // 2])
            return self._drop()
        self.wfile.write(data)
        if self.kind == HANGS_UP:
            self.close_connection = True
        return None

    # Objects

    def _stored(self) -> Stored:
        found = self.stub.objects.get(self.key)
        if found is None:
            raise _RefusalError("NoSuchKey")
        return found

    def _get(self) -> None:
        if not self.key:
            return self._uploads() if "uploads" in self.query else self._list()
        if "uploadId" in self.query:
            return self._parts()
        data = self._stored().data
        status, span = 200, self.headers.get("Range")
        if span and self.kind != IGNORES_RANGE:
            first, last = (int(number) for number in span.removeprefix("bytes=").split("-"))
            if first >= len(data):
                raise _RefusalError("InvalidRange")
            status, data = 206, data[first : last + 1]
        if self.kind == WRONG_BYTES and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if self.kind == CUT_SHORT:
            data = data[: len(data) // 2]
        return self._send(status, data)

    def _head(self) -> None:
        found = self._stored()
        wanted = self.headers.get("x-amz-checksum-mode") == "ENABLED" and found.checksum is not None
        headers = {"x-amz-checksum-sha256": found.checksum or ""} if wanted else {}
        self._send(200, headers=headers, length=len(found.data))

    def _put(self) -> None:
        given = self.headers.get("x-amz-checksum-sha256")
        if self.stub.checks and given is not None and given != sha256(self.body):
            raise _RefusalError("BadDigest")
        data = self.body[:-1] + bytes([self.body[-1] ^ 1]) if self.kind == DAMAGED else self.body
        stored = Stored(data, given)
        if "uploadId" in self.query:
            self._upload().parts[int(self.query["partNumber"])] = stored
        else:
            self._make(stored)
        headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"'}
        self._send(200, headers=headers | ({"x-amz-checksum-sha256": given} if given else {}))

    def _make(self, stored: Stored) -> None:
        """The object becomes visible, in one step."""
        with self.stub.lock:
            conditional = self.stub.honours_conditions and self.headers.get("If-None-Match") == "*"
            if conditional and self.key in self.stub.objects:
                raise _RefusalError("PreconditionFailed")
            self.stub.objects[self.key] = stored

    def _delete(self) -> None:
        if "uploadId" in self.query:
            self._upload()
            del self.stub.uploads[self.query["uploadId"]]
        else:
            self.stub.objects.pop(self.key, None)
        self._send(204)

    def _list(self) -> None:
        prefix = self.query.get("prefix", "")
        keys = sorted(key for key in self.stub.objects if key.startswith(prefix))
        after, most = self.query.get("continuation-token", ""), int(self.query.get("max-keys", 1000))
        page = [key for key in keys if key > after][:most]
        more = bool(page) and page[-1] != keys[-1]
        entries = ""
        for key in page:
            size = len(self.stub.objects[key].data)
            entries += f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size></Contents>"
        following = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        inside = f"<IsTruncated>{str(more).lower()}</IsTruncated>{following}{entries}"
        self._send(200, _xml("ListBucketResult", inside))

    # Multipart uploads

    def _upload(self) -> Upload:
        found = self.stub.uploads.get(self.query["uploadId"])
        if found is None:
            raise _RefusalError("NoSuchUpload")
        return found

    def _uploads(self) -> None:
        prefix = self.query.get("prefix", "")
        entries = "".join(
            f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{number}</UploadId></Upload>"
            for number, upload in self.stub.uploads.items()
            if upload.key.startswith(prefix)
        )
        self._send(200, _xml("ListMultipartUploadsResult", f"<IsTruncated>false</IsTruncated>{entries}"))

    def _parts(self) -> None:
        entries = ""
        for number, part in sorted(self._upload().parts.items()):
            checksum = f"<ChecksumSHA256>{part.checksum}</ChecksumSHA256>" if self.stub.lists_checksums else ""
            etag = f'"{hashlib.md5(part.data).hexdigest()}"'
            entries += f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag>"
            entries += f"<Size>{len(part.data)}</Size>{checksum}</Part>"
        self._send(200, _xml("ListPartsResult", f"<IsTruncated>false</IsTruncated>{entries}"))

    def _post(self) -> None:
        if "uploads" in self.query:
            with self.stub.lock:
                number = f"upload-{len(self.stub.requests)}"
                self.stub.uploads[number] = Upload(self.key)
            inside = f"<Bucket>bucket</Bucket><Key>{escape(self.key)}</Key><UploadId>{number}</UploadId>"
            return self._send(200, _xml("InitiateMultipartUploadResult", inside))
        upload = self._upload()
        named = {
            int(part.findtext("{*}PartNumber") or 0): part.findtext("{*}ChecksumSHA256")
            for part in ElementTree.fromstring(self.body).iterfind("{*}Part")
        }
        for number, checksum in named.items():
            part = upload.parts.get(number)
            if part is None or (self.stub.checks and checksum != part.checksum):
                raise _RefusalError("InvalidPart")
        parts = [upload.parts[number] for number in sorted(named)]
        raw = b"".join(base64.b64decode(part.checksum or "") for part in parts)
        if self.kind == FIRST_PART_ONLY:
            parts = parts[:1]
        self._make(Stored(b"".join(part.data for part in parts), f"{sha256(raw)}-{len(named)}"))
        del self.stub.uploads[self.query["uploadId"]]
        return self._send(200, _xml("CompleteMultipartUploadResult", f"<Key>{escape(self.key)}</Key>"))


def _xml(name: str, inside: str) -> bytes:
    return f'<?xml version="1.0"?><{name}>{inside}</{name}>'.encode()
