"""Connections among the agents of a run, and from its ranks to them: whoever does not know the run's token is sent away before
anything they say is looked at. Used by `control/agent`; `events/frames` says what travels, and holds the blocking half.

Strangers can neither stop nor slow it: at most so many who have not proved themselves are kept, each for seconds, each with 64 bytes
read from it; where more come, whoever has been here longest without a proof is sent away.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from phalanx.events import frames
from phalanx.events.frames import Address, Refused

MAX_UNPROVEN = 64
"""Connections without a proof that are kept at a time."""
_UNREAD = 32 << 20  # bytes waiting for a reader, after which it is taken for dead
_FAREWELL = 2.0  # seconds in which what was sent before a connection was closed can still leave

OnRefused = Callable[[str, str], None]


class Channel:
    """To somebody who has proved to know the run's token."""

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], seals: frames.MessageSealer, address: str):
        self.address = address
        """host:port of the other side, for messages."""
        self.on_nonsense: OnRefused | None = None
        """Told address and reason where the other side says what nobody who knows the token would say."""
        (self._reader, self._writer), self._seals = streams, seals
        self._head: bytes | None = None
        self._ended: str | None = None

    async def send(self, message: dict[str, Any]) -> None:
        """Returns when the system has taken most of what was sent before; ConnectionError where the connection has ended."""
        self._write(message)
        try:
            await self._writer.drain()
        except OSError as error:
            raise self._end(f"the connection ended ({error})") from None

    def post(self, message: dict[str, Any]) -> None:
        """Queue it and never wait. Whether the connection still lives is for who receives to find out."""
        with suppress(ConnectionError):
            self._write(message)

    def _write(self, message: dict[str, Any]) -> None:
        if self._ended is not None:
            raise ConnectionError(f"{self.address}: {self._ended}")
        if self._writer.transport.is_closing():
            raise self._end("the connection ended")
        self._writer.write(self._seals.pack(message))
        if self._writer.transport.get_write_buffer_size() > _UNREAD:
            self._writer.transport.abort()
            raise self._end(f"it has left {_UNREAD >> 20} MiB unread")

    async def receive(self) -> dict[str, Any]:
        """The next message; ConnectionError where the connection ended or its bytes make no sense. May be cancelled and called again."""
        if self._ended is not None:
            raise ConnectionError(f"{self.address}: {self._ended}")
        try:
            if self._head is None:
                self._head = await self._reader.readexactly(frames.HEADER)
            body = await self._reader.readexactly(self._seals.size(self._head))
            message = self._seals.open(self._head, body)
        except Refused as error:
            if self.on_nonsense is not None:
                self.on_nonsense(self.address, str(error))
            self._writer.transport.abort()
            self._end(str(error))
            raise Refused(f"{self.address}: {error}") from None
        except (asyncio.IncompleteReadError, OSError) as error:
            self._writer.transport.abort()
            reason = "" if isinstance(error, asyncio.IncompleteReadError) else f" ({error})"
            raise self._end(f"the connection ended{reason}") from None
        self._head = None
        return message

    def _end(self, reason: str) -> ConnectionError:
        if self._ended is None:
            self._ended = reason
        return ConnectionError(f"{self.address}: {self._ended}")

    def close(self) -> None:
        """What was sent before still leaves, where the other side takes it soon."""
        self._end("the connection was closed here")
        transport = self._writer.transport
        if not transport.is_closing():
            transport.close()
            if transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(_FAREWELL, transport.abort)


async def connect(address: Address, token: str, timeout: float = frames.HANDSHAKE_SECONDS) -> Channel:
    """To a listener; Refused where either does not know the token of the other. One that is crowded by strangers is asked again."""
    async with asyncio.timeout(timeout):
        while True:
            try:
                return await _greeted(address, token)
            except Refused:
                raise
            except ConnectionResetError:
                await asyncio.sleep(frames.retry_delay())


async def _greeted(address: Address, token: str) -> Channel:
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, where = (await loop.getaddrinfo(*address, type=socket.SOCK_STREAM))[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, where)
        frames.set_socket_options(sock)
        answer, expected, key = frames.client_response(token, frames.CONTROL, await _exactly(sock, frames.NONCE))
        await loop.sock_sendall(sock, answer)
        frames.check_server(await _exactly(sock, frames.PROOF), expected, frames.format_address(address))
        return Channel(
            await asyncio.open_connection(sock=sock), frames.MessageSealer(key, asking=True), frames.format_address(address)
        )
    except BrokenPipeError as error:
        sock.close()
        raise ConnectionResetError(*error.args) from None
    except BaseException:
        sock.close()
        raise


async def _exactly(sock: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = await asyncio.get_running_loop().sock_recv(sock, size - len(found))
        if not part:
            raise ConnectionResetError("the connection ended")
        found += part
    return found


class Listener:
    """Admits whoever proves to know the token, each into a task of its own."""

    def __init__(self, sock: socket.socket, token: str, on_link: Callable[[Channel], Awaitable[None]], on_refused: OnRefused):
        self.address: Address = sock.getsockname()[:2]
        self._socket, self._token, self._on_link, self._on_refused = sock, token, on_link, on_refused
        self._greeting: dict[asyncio.Task[None], str] = {}  # addresses, the oldest first
        self._admitted: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(self._socket)
            except OSError:  # it gave up before it was accepted, or there are no descriptors left just now
                await asyncio.sleep(0.05)
                continue
            sock.setblocking(False)
            if len(self._greeting) >= MAX_UNPROVEN:
                oldest = next(iter(self._greeting))
                self._on_refused(self._greeting.pop(oldest), "it did not prove itself before many others came")
                oldest.cancel()
            address = frames.format_address(peer[:2])
            task = asyncio.create_task(self._greet(sock, address))
            self._greeting[task] = address
            task.add_done_callback(partial(self._gone, sock))
            await asyncio.sleep(0)  # else a flood, whose next connection is always there already, would keep all others waiting

    def _gone(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._greeting.pop(task, None)
        if task in self._admitted:  # and its link has closed it
            self._admitted.remove(task)
        else:
            sock.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a link's task failed", "exception": error, "task": task}
            )

    async def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            async with asyncio.timeout(frames.HANDSHAKE_SECONDS):
                key = await self._admit(sock)
        except Refused as error:
            self._on_refused(address, str(error))
            return
        except OSError as error:  # TimeoutError too
            self._on_refused(address, f"it did not answer the greeting ({str(error) or 'timed out'})")
            return
        task = asyncio.current_task()
        assert task is not None
        self._greeting.pop(task, None)
        self._admitted.add(task)
        link = Channel(await asyncio.open_connection(sock=sock), frames.MessageSealer(key, asking=False), address)
        link.on_nonsense = self._on_refused
        try:
            await self._on_link(link)
        except ConnectionError:  # its own end; whoever must know was told by `receive`
            pass
        finally:
            link.close()

    async def _admit(self, sock: socket.socket) -> bytes:
        frames.set_socket_options(sock)
        loop, ours = asyncio.get_running_loop(), secrets.token_bytes(frames.NONCE)
        await loop.sock_sendall(sock, ours)
        said = await _exactly(sock, frames.NONCE + frames.PROOF)
        try:
            proof, key = frames.check_client(self._token, frames.CONTROL, ours, said)
        except Refused:
            await loop.sock_sendall(sock, frames.REFUSAL)
            raise
        await loop.sock_sendall(sock, proof)
        return key

    async def close(self) -> None:
        """Nobody is admitted any more, and all links from here end."""
        tasks = [self._accepting, *self._greeting, *self._admitted]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()


async def listen(
    bind: str, token: str, on_link: Callable[[Channel], Awaitable[None]], on_refused: OnRefused, port: int = 0
) -> Listener:
    """On one interface. A link lives until `on_link` returns, which runs once for each at the same time; strangers and nonsense
    are told to `on_refused` by address and reason."""
    loop = asyncio.get_running_loop()
    assert bind, "an empty name would be every interface"
    family, kind, protocol, _, where = (await loop.getaddrinfo(bind, port, type=socket.SOCK_STREAM))[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(512)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return Listener(sock, token, on_link, on_refused)
