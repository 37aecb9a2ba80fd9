"""Connections between the agents of a run, and from its ranks to them, for asyncio. `events/frames` has the handshake, the format of messages
and the blocking half. Used by `control/agent`.

A peer without the run's token is refused before anything else is read from it. Strangers can neither stop nor slow the listener: it keeps a
limited number of unauthenticated connections, each for seconds and with 64 bytes read; beyond that the oldest is dropped.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from phalanx.events import frames
from phalanx.events.frames import Address, Refused

MAX_UNAUTHENTICATED = 64  # connections in the handshake at a time, if there are few nodes
_MAX_UNREAD = 32 << 20  # bytes that a peer may leave unread before it counts as dead
_LINGER = 2.0  # seconds in which queued messages can still be sent after close

OnRefused = Callable[[str, str], None]


class Channel:
    """A connection to an authenticated peer."""

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], sealer: frames.MessageSealer, address: str):
        self.address = address
        """host:port of the peer, for messages."""
        self.on_invalid: OnRefused | None = None
        """Called with address and reason if the peer sends something that no peer with the token sends."""
        (self._reader, self._writer), self._sealer = streams, sealer
        self._size: int | None = None
        """Of the message that is being received; None: before its header."""
        self._ended: str | None = None

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message, waiting while too much is queued. Raises ConnectionError if the connection has ended."""
        self._write(message)
        try:
            await self._writer.drain()
        except OSError as error:
            raise self._end(f"the connection ended ({error})") from None

    def post(self, message: dict[str, Any]) -> None:
        """Queue a message without waiting. A lost connection is noticed by `receive`."""
        with suppress(ConnectionError):
            self._write(message)

    def post_body(self, body: bytes) -> None:
        """As `post`, of a message that is encoded already."""
        with suppress(ConnectionError):
            self._write_body(body)

    def _write(self, message: dict[str, Any]) -> None:
        self._write_body(frames.to_body(message))

    def _write_body(self, body: bytes) -> None:
        if self._ended is not None:
            raise ConnectionError(f"{self.address}: {self._ended}")
        if self._writer.transport.is_closing():
            raise self._end("the connection ended")
        self._writer.write(self._sealer.pack_body(body))
        if self._writer.transport.get_write_buffer_size() > _MAX_UNREAD:
            self._writer.transport.abort()
            raise self._end(f"it has left {_MAX_UNREAD >> 20} MiB unread")

    async def receive(self) -> dict[str, Any]:
        """The next message. Raises ConnectionError if the connection ended, Refused if its bytes are invalid; nothing more is read then. May
        be cancelled and repeated."""
        if self._ended is not None:
            raise ConnectionError(f"{self.address}: {self._ended}")
        try:
            if self._size is None:
                self._size = self._sealer.size(await self._reader.readexactly(frames.HEADER))
            message = self._sealer.open(await self._reader.readexactly(self._size))
        except Refused as error:
            if self.on_invalid is not None:
                self.on_invalid(self.address, str(error))
            self._end(str(error))
            raise Refused(f"{self.address}: {error}") from None
        except (asyncio.IncompleteReadError, OSError) as error:
            self._writer.transport.abort()
            reason = "" if isinstance(error, asyncio.IncompleteReadError) else f" ({error})"
            raise self._end(f"the connection ended{reason}") from None
        self._size = None
        return message

    def _end(self, reason: str) -> ConnectionError:
        if self._ended is None:
            self._ended = reason
        return ConnectionError(f"{self.address}: {self._ended}")

    def close(self) -> None:
        """Close; queued messages are still sent if the peer reads them soon."""
        self._end("the connection was closed here")
        transport = self._writer.transport
        if not transport.is_closing():
            transport.close()
            if transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(_LINGER, transport.abort)


async def connect(address: Address, token: str, timeout: float = frames.HANDSHAKE_SECONDS) -> Channel:
    """Connect to a listener. Raises Refused if either side does not know the token. Retries if the listener is overloaded."""
    sock, key = await asyncio.to_thread(frames.connect, address, token, frames.CONTROL, timeout)
    streams = await asyncio.open_connection(sock=sock)
    return Channel(streams, frames.MessageSealer(key, client=True), frames.format_address(address))


async def _authenticate(sock: socket.socket, handshake: frames.Handshake) -> bytes:
    loop = asyncio.get_running_loop()
    frames.set_socket_options(sock)
    answer, size = next(handshake)
    try:
        while True:
            await loop.sock_sendall(sock, answer)
            answer, size = handshake.send(await _exactly(sock, size))
    except StopIteration as done:
        return bytes(done.value)


async def _exactly(sock: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = await asyncio.get_running_loop().sock_recv(sock, size - len(received))
        if not part:
            raise ConnectionResetError("the connection ended")
        received += part
    return received


class Listener:
    """Accepts authenticated connections on one interface, each in a task of its own."""

    def __init__(
        self,
        bind: str,
        token: str,
        on_channel: Callable[[Channel], Awaitable[None]],
        on_refused: OnRefused,
        ports: range | None = None,
        *,
        limit: int = MAX_UNAUTHENTICATED,
    ):
        """`on_channel` runs once for each connection, which is closed when it returns. `on_refused` is called with address and reason for
        refused peers and invalid messages. `ports`: take one of these. `limit`: connections in the handshake at a time."""
        self._socket = frames.listen(bind, ports)
        self._socket.setblocking(False)
        self.address: Address = self._socket.getsockname()[:2]
        self._token, self._on_channel, self._on_refused = token, on_channel, on_refused
        self._limit = limit
        self._handshakes: dict[asyncio.Task[None], str] = {}  # task to address, oldest first
        self._admitted: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(self._socket)
            except OSError:  # the client gave up, or there are no free descriptors
                await asyncio.sleep(0.05)
                continue
            sock.setblocking(False)
            if len(self._handshakes) >= self._limit:
                oldest = next(iter(self._handshakes))
                self._on_refused(self._handshakes.pop(oldest), "it did not prove itself before many others came")
                oldest.cancel()
            address = frames.format_address(peer[:2])
            task = asyncio.create_task(self._serve(sock, address))
            self._handshakes[task] = address
            task.add_done_callback(partial(self._on_done, sock))
            await asyncio.sleep(0)  # otherwise a flood of connections would keep all other tasks waiting

    def _on_done(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if task in self._admitted:  # its channel has closed the socket
            self._admitted.remove(task)
        else:
            sock.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a channel's task failed", "exception": error, "task": task}
            )

    async def _serve(self, sock: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(frames.HANDSHAKE_SECONDS):
                key = await _authenticate(sock, frames.server_handshake(self._token, frames.CONTROL, self.address))
        except OSError as error:  # includes Refused and TimeoutError
            greeting = f"it did not answer the greeting ({str(error) or 'timed out'})"
            self._on_refused(address, str(error) if isinstance(error, Refused) else greeting)
            return
        finally:
            self._handshakes.pop(task, None)  # at once, so that nobody is refused twice
        self._admitted.add(task)
        channel = Channel(await asyncio.open_connection(sock=sock), frames.MessageSealer(key, client=False), address)
        channel.on_invalid = self._on_refused
        try:
            await self._on_channel(channel)
        except ConnectionError:  # the connection ended; `receive` has reported invalid messages
            pass
        finally:
            channel.close()

    async def close(self) -> None:
        """Stop accepting and close all channels."""
        tasks = [self._accepting, *self._handshakes, *self._admitted]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
