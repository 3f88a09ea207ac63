"""The bytes of parts over plain HTTP connections, each moved by a thread.

Through the store's client a part costs more in copies and wake-ups of the event loop than in hashing. Here a thread
moves it between file and socket through one buffer, without the interpreter lock. The client still signs, and says
what an answer means: it is handed the store's answer to a part that was sent, and asks again itself where a read had
another answer than the bytes (`UnexpectedAnswerError`).
"""

from __future__ import annotations

import asyncio
import http.client
import select
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from keepstep.storage.parts import FilePart, PartSink

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
TRANSFER_TIMEOUT_S = 60.0
BUFFER_BYTES = 1 << 20


class UnexpectedAnswerError(Exception):
    """Not the bytes that were asked for, or no way to them from here; the client's own request says why."""


@dataclass(frozen=True)
class Answer:
    """What the store said to a part that was sent."""

    status: int
    headers: dict[str, str]
    body: bytes


class PlainHttp:
    """Open connections, each used by one thread at a time. Belongs to one event loop.

    Cancelling a transfer ends its connection, which wakes its thread with an error.

    Raises:
        UnexpectedAnswerError: the server or its certificate wants the client's own request.
        OSError, http.client.HTTPException: the connection failed; asking again may help.
    """

    def __init__(self) -> None:
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}

    async def read(self, url: str, start: int, length: int, sink: PartSink) -> None:
        """Hand `length` bytes of the object from `start` on to `sink`."""
        await self._use(url, lambda connection, target: _receive(connection, target, start, length, sink))

    async def send(self, url: str, headers: Mapping[str, str], part: FilePart) -> Answer:
        """PUT a part.

        Raises:
            LocalFileError: it cannot be read any more.
        """
        return await self._use(url, lambda connection, target: _send(connection, target, headers, part))

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def _use(self, url: str, act: Callable[[http.client.HTTPConnection, str], T]) -> T:
        """`act` on a connection to where `url` leads and on what is asked for there, in a thread."""
        address = urlsplit(url)
        host, target = f"{address.scheme}://{address.netloc}", f"{address.path}?{address.query}"
        connection = self._take(host)
        if connection is None:
            connection = await asyncio.to_thread(_connect, address.scheme, address.netloc)
        try:
            result = await asyncio.to_thread(_close_on_error, connection, act, target)
        except asyncio.CancelledError:
            _wake(connection)
            raise
        self._idle.setdefault(host, []).append(connection)
        return result

    def _take(self, host: str) -> http.client.HTTPConnection | None:
        idle = self._idle.get(host, [])
        while idle:
            connection = idle.pop()
            if _is_open(connection):
                return connection
            connection.close()
        return None


def leads_through_proxy(url: str) -> bool:
    """Whether the environment sends this address through a proxy."""
    address = urlsplit(url)
    return address.scheme in getproxies() and not proxy_bypass(address.netloc)


def _connect(scheme: str, host: str) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    connection = kind(host, timeout=CONNECT_TIMEOUT_S)
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        raise UnexpectedAnswerError(str(error)) from error
    connection.sock.settimeout(TRANSFER_TIMEOUT_S)
    return connection


def _is_open(connection: http.client.HTTPConnection) -> bool:
    """An idle connection that has something to read was ended by the server: a try spent on it would fail."""
    if connection.sock is None:
        return False
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return not waiting.poll(0)


def _close_on_error(
    connection: http.client.HTTPConnection, act: Callable[[http.client.HTTPConnection, str], T], target: str
) -> T:
    try:
        return act(connection, target)
    except BaseException:
        connection.close()
        raise


def _wake(connection: http.client.HTTPConnection) -> None:
    """Have the thread that uses this connection fail. It closes it: its number must not be another's meanwhile."""
    try:
        # Not the method of a TLS socket: that one turns TLS off first, and the thread would send on in clear.
        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
    except (OSError, TypeError):
        # Its thread was quicker.
        pass


def _receive(connection: http.client.HTTPConnection, target: str, start: int, length: int, sink: PartSink) -> None:
    headers = {"Range": f"bytes={start}-{start + length - 1}"} if length else {}
    connection.request("GET", target, headers=headers)
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


def _send(connection: http.client.HTTPConnection, target: str, headers: Mapping[str, str], part: FilePart) -> Answer:
    connection.putrequest("PUT", target, skip_accept_encoding=True)
    for name, value in headers.items():
        # The body follows at once: `_send_body` looks for a refusal when it breaks off.
        if name.lower() != "expect":
            connection.putheader(name, value)
    connection.endheaders()
    try:
        _send_body(connection.sock, part)
    except ConnectionError as error:
        # A server that refuses may hang up before it has read all; what it said is there to be read.
        try:
            refusal = _answer(connection)
        except (OSError, http.client.HTTPException):
            raise error from None
        connection.close()
        if refusal.status < 300:
            raise
        return refusal
    return _answer(connection)


def _send_body(sock: socket.socket, part: FilePart) -> None:
    # Not by sendfile: it took as much CPU as this, and knows no TLS.
    part.seek(0)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while count := part.readinto(buffer):
        sock.sendall(buffer[:count])


def _answer(connection: http.client.HTTPConnection) -> Answer:
    with connection.getresponse() as answer:
        return Answer(answer.status, dict(answer.getheaders()), answer.read())
