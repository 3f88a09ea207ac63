"""An S3 server that costs nearly nothing: it swallows what it is sent and sends what lies in a folder.

    python -m benchmarks.null_s3 FOLDER

Prints its port. Bodies are read into one buffer and forgotten, objects are sent by `sendfile` from
`FOLDER/<last part of the key>`, so that the client is what is measured. HEAD tells what the last upload of the key said
of itself. Bodies under 1 KiB are hashed, which is enough to refuse a probe with a wrong checksum.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

BUFFER_BYTES = 1 << 20
SMALL_BYTES = 1024


class NullServer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, tuple[int, str]] = {}
        """Key -> (bytes, SHA-256 as S3 says it)."""
        self.parts: dict[str, dict[int, tuple[int, str]]] = {}
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)

    def serve(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        rest = b""
        try:
            while (request := _read_head(connection, rest)) is not None:
                rest = self._answer(connection, buffer, *request)
        except OSError:
            pass
        finally:
            connection.close()

    def _answer(
        self, connection: socket.socket, buffer: memoryview, line: str, headers: dict[str, str], rest: bytes
    ) -> bytes:
        """Serve one request; returns what was read of the next one."""
        method, target, _ = line.split(" ")
        length = int(headers.get("content-length", 0))
        if headers.get("expect"):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body, rest = _swallow(connection, buffer, rest, length)
        url = urlsplit(target)
        key = unquote(url.path).removeprefix("/bucket").removeprefix("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        given = headers.get("x-amz-checksum-sha256", "")
        if method == "GET" and key:
            self._send_object(connection, key, headers.get("range"))
        elif method == "HEAD":
            self._send_head(connection, key)
        elif body is not None and given and base64.b64encode(hashlib.sha256(body).digest()).decode() != given:
            _send(connection, 400, "<Error><Code>BadDigest</Code></Error>")
        else:
            _send(connection, 200, self._act(method, key, query, given, length))
        return rest

    def _act(self, method: str, key: str, query: dict[str, str], given: str, length: int) -> str:
        if method == "PUT" and "partNumber" in query:
            self.parts[query["uploadId"]][int(query["partNumber"])] = (length, given)
        elif method == "PUT":
            self.objects[key] = (length, given)
        elif method == "POST" and "uploads" in query:
            self.parts[key] = {}
            return f"<I><Bucket>bucket</Bucket><Key>{key}</Key><UploadId>{key}</UploadId></I>"
        elif method == "POST":
            parts = [self.parts[query["uploadId"]][number] for number in sorted(self.parts[query["uploadId"]])]
            raw = b"".join(base64.b64decode(checksum) for _, checksum in parts)
            tree = f"{base64.b64encode(hashlib.sha256(raw).digest()).decode()}-{len(parts)}"
            self.objects[key] = (sum(size for size, _ in parts), tree if raw else "")
            return f"<C><Key>{key}</Key><ETag>e</ETag></C>"
        elif method == "GET" and "list-type" in query:
            return self._list(query.get("prefix", ""))
        elif method == "DELETE":
            self.objects.pop(key, None)
        return "<R><IsTruncated>false</IsTruncated></R>"

    def _list(self, prefix: str) -> str:
        folder = prefix.rstrip("/")
        entries = "".join(
            f"<Contents><Key>{folder}/{path.name}</Key><Size>{path.stat().st_size}</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for path in sorted(self.folder.iterdir())
            if f"{folder}/{path.name}".startswith(prefix)
        )
        return f"<R><IsTruncated>false</IsTruncated>{entries}</R>"

    def _send_head(self, connection: socket.socket, key: str) -> None:
        path = self.folder / key.rpartition("/")[2]
        size, checksum = self.objects.get(key, (path.stat().st_size if path.is_file() else -1, ""))
        status = "404 Not Found" if size < 0 else "200 OK"
        told = f"x-amz-checksum-sha256: {checksum}\r\n" if checksum else ""
        dated = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
        connection.sendall(
            f"HTTP/1.1 {status}\r\nContent-Length: {max(size, 0)}\r\n{dated}{told}ETag: e\r\n\r\n".encode()
        )

    def _send_object(self, connection: socket.socket, key: str, span: str | None) -> None:
        with (self.folder / key.rpartition("/")[2]).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            numbers = re.fullmatch(r"bytes=(\d+)-(\d*)", span or "")
            first, last = (int(numbers[1]), int(numbers[2] or size - 1)) if numbers else (0, size - 1)
            last = min(last, size - 1)
            status = f"206 Partial Content\r\nContent-Range: bytes {first}-{last}/{size}" if numbers else "200 OK"
            connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {last + 1 - first}\r\nETag: e\r\n\r\n".encode())
            while first <= last:
                first += os.sendfile(connection.fileno(), file.fileno(), first, last + 1 - first)


def _read_head(connection: socket.socket, rest: bytes) -> tuple[str, dict[str, str], bytes] | None:
    """(request line, headers by lower-case name, what was read beyond); None: the client is gone."""
    data = rest
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    return line, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}, rest


def _swallow(connection: socket.socket, buffer: memoryview, rest: bytes, length: int) -> tuple[bytes | None, bytes]:
    """Read a body; (it, if it is small, else None; what was read beyond)."""
    if length <= SMALL_BYTES:
        while len(rest) < length:
            rest += connection.recv(length - len(rest))
        return rest[:length], rest[length:]
    left = length - len(rest)
    while left > 0:
        count = connection.recv_into(buffer, min(left, len(buffer)))
        if not count:
            raise ConnectionError
        left -= count
    return None, b""


def _send(connection: socket.socket, status: int, inside: str) -> None:
    data = f'<?xml version="1.0"?>{inside}'.encode()
    connection.sendall(f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\nETag: e\r\n\r\n".encode() + data)


if __name__ == "__main__":
    server = NullServer(Path(sys.argv[1]))
    print(server.listener.getsockname()[1], flush=True)
    server.serve()
