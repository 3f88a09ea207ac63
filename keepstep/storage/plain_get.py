"""Ranged reads over plain HTTP connections, for threads.

A download through the event loop costs more in copies and wake-ups than in hashing. Here a thread receives into one
buffer, which is hashed and written from there, all three without the interpreter lock. The store's own client still
signs (a presigned address), and answers for everything unusual: whatever is not the bytes asked for ends in
`UnexpectedAnswerError`, and the caller asks again through the client, which knows what the answer means.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from keepstep.storage.parts import PartSink

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
BUFFER_BYTES = 1 << 20


class UnexpectedAnswerError(Exception):
    """Not the bytes that were asked for, or no way to them from here; the client's own request says why."""


class PlainReader:
    """Open connections to one endpoint, each used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()

    def read(self, url: str, start: int, length: int, sink: PartSink) -> None:
        """Hand `length` bytes of the object from `start` on to `sink`.

        Raises:
            UnexpectedAnswerError: the server, a proxy or the certificate wants the client's own request.
            OSError, http.client.HTTPException: the connection failed; asking again may help.
        """
        address = urlsplit(url)
        connection = self._take(address)
        try:
            _receive(connection, address, start, length, sink)
        except BaseException:
            self._drop(connection)
            raise
        with self._lock:
            self._busy.discard(connection)
            self._idle.append(connection)

    def close(self) -> None:
        """End all connections; a thread that waits for bytes is woken with an error."""
        with self._lock:
            for connection in self._busy:
                try:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                except (OSError, AttributeError):
                    # Its thread was quicker.
                    pass
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _take(self, address: SplitResult) -> http.client.HTTPConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _connect(address)
        with self._lock:
            self._busy.add(connection)
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()


def leads_through_proxy(url: str) -> bool:
    """Whether the environment sends this address through a proxy."""
    address = urlsplit(url)
    return address.scheme in getproxies() and not proxy_bypass(address.netloc)


def _connect(address: SplitResult) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.netloc, timeout=CONNECT_TIMEOUT_S)
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        raise UnexpectedAnswerError(str(error)) from error
    connection.sock.settimeout(READ_TIMEOUT_S)
    return connection


def _receive(
    connection: http.client.HTTPConnection, address: SplitResult, start: int, length: int, sink: PartSink
) -> None:
    headers = {"Range": f"bytes={start}-{start + length - 1}"} if length else {}
    connection.request("GET", f"{address.path}?{address.query}", headers=headers)
    with connection.getresponse() as answer:
        if answer.status not in (200, 206) or answer.length != length:
            raise UnexpectedAnswerError(f"status {answer.status}, {answer.length} bytes")
        buffer = memoryview(bytearray(min(BUFFER_BYTES, max(1, length))))
        while length:
            count = answer.readinto(buffer[: min(length, len(buffer))])
            if not count:
                raise http.client.IncompleteRead(b"", length)
            sink.take(buffer[:count])
            length -= count
