"""Links: who belongs here is admitted and heard in order; strangers, nonsense and those who never read are sent away, and only they."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from phalanx.control import channel as link_module
from phalanx.control.channel import MAX_UNAUTHENTICATED, Channel, Listener, connect
from phalanx.events import frames
from phalanx.events.frames import Refused

TOKEN = "a secret of the test"


async def echo(link: Channel) -> None:
    while True:
        await link.send(await link.receive())


@asynccontextmanager
async def listening(on_link: Callable[[Channel], Awaitable[None]] = echo) -> AsyncIterator[tuple[Listener, list[str]]]:
    """A listener, and the reasons of those it refused."""
    refused: list[str] = []
    listener = Listener("127.0.0.1", TOKEN, on_link, lambda address, reason: refused.append(reason))
    try:
        yield listener, refused
    finally:
        await listener.close()
        await asyncio.sleep(0.01)  # for transports to close in


async def soon(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def test_messages_go_both_ways_in_order() -> None:
    async def main() -> None:
        async with listening() as (listener, refused):
            link = await connect(listener.address, TOKEN)
            for number in range(50):
                link.post({"number": number, "text": "höher ⛰", "nothing": None})
            await link.send({"last": True, "big": "x" * (frames.MAX_MESSAGE - 100)})
            assert [(await link.receive())["number"] for _ in range(50)] == list(range(50))
            assert len((await link.receive())["big"]) == frames.MAX_MESSAGE - 100
            with pytest.raises(ValueError, match="at most 16777216"):
                await link.send({"big": "x" * frames.MAX_MESSAGE})
            await link.send({"still": "here"})
            assert await link.receive() == {"still": "here"}
            assert link.address == f"127.0.0.1:{listener.address[1]}"
            link.close()
            with pytest.raises(ConnectionError, match="closed here"):
                await link.send({})
            link.post({"never": "raises"})
            assert refused == []

    asyncio.run(main())


def test_a_receive_that_was_cancelled_in_the_middle_of_a_message_loses_nothing() -> None:
    async def main() -> None:
        client, server = socket.socketpair()
        seals = frames.MessageSealer(b"k" * 32, client=True)
        link = Channel(await asyncio.open_connection(sock=client), frames.MessageSealer(b"k" * 32, client=False), "there")
        message, sent = seals.pack({"a": 1}), 0
        for cut in (3, frames.HEADER, frames.HEADER + 4):  # in the head, after it, in the body
            server.sendall(message[sent:cut])
            sent = cut
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(link.receive(), 0.02)
        server.sendall(message[sent:])
        assert await link.receive() == {"a": 1}
        link.close()
        server.close()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_both_sides_must_know_the_token() -> None:
    async def main() -> None:
        async with listening() as (listener, refused):
            with pytest.raises(Refused, match="refused this one's token"):
                await connect(listener.address, "another secret")
            with pytest.raises(Refused, match="refused this one's token"):
                await asyncio.to_thread(frames.BlockingChannel, listener.address, "another secret", frames.CONTROL)
            with pytest.raises(Refused, match="refused this one's token"):  # a proof for replica servers is none here
                await asyncio.to_thread(frames.connect, listener.address, TOKEN, frames.REPLICAS)
            assert refused == ["it does not know the token of this run"] * 3

    asyncio.run(main())


def test_connection_that_is_redirected_to_another_member_of_the_run_is_refused() -> None:
    async def main() -> None:
        async with listening() as (listener, refused):
            sock = socket.create_connection(listener.address)
            elsewhere = frames.client_handshake(TOKEN, frames.CONTROL, ("10.0.0.1", 1))  # whom the client believes to speak to
            with sock, pytest.raises(Refused, match="refused this one's token"):
                await asyncio.to_thread(frames._authenticate, sock, elsewhere, time.monotonic() + 60)
            await soon(lambda: refused == ["it does not know the token of this run"])

    asyncio.run(main())


def test_impostor_server_learns_nothing_and_is_refused() -> None:
    heard = []

    def pretend(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(bytes(range(32)))
            heard.append(frames.receive_exactly(sock, 64, time.monotonic() + 60))
            sock.sendall(heard[0][32:])  # its own proof sent back to it is none
            heard.append(sock.recv(64))

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=pretend, args=(server,))
            thread.start()
            with pytest.raises(Refused, match="does not know the token"):
                await connect(server.getsockname(), TOKEN)
            await asyncio.to_thread(thread.join)

    asyncio.run(main())
    assert TOKEN.encode() not in heard[0] and heard[1] == b""


def test_blocking_client_and_asyncio_listener_interoperate() -> None:
    def ask(address: frames.Address) -> dict[str, Any]:
        channel = frames.BlockingChannel(address, TOKEN, frames.CONTROL)
        channel.send({"n": 1})
        answer = channel.receive(5.0)
        with pytest.raises(TimeoutError):
            channel.receive(0.05)
        channel.close()
        return answer

    async def main() -> None:
        async with listening() as (listener, _):
            assert await asyncio.to_thread(ask, listener.address) == {"n": 1}

    asyncio.run(main())


def _tampered(change: Callable[[list[bytes]], list[bytes]]) -> tuple[list[dict[str, Any]], list[str]]:
    """What a listener hears, and whom it refuses, where somebody on the way changes the three messages of a client."""
    heard: list[dict[str, Any]] = []

    async def hear(link: Channel) -> None:
        while True:
            heard.append(await link.receive())

    async def main() -> list[str]:
        async with listening(hear) as (listener, refused):
            sock, key = await asyncio.to_thread(frames.connect, listener.address, TOKEN, frames.CONTROL)
            other = await connect(listener.address, TOKEN)
            seals = frames.MessageSealer(key, client=True)
            with sock:
                for part in change([seals.pack({"n": number}) for number in range(3)]):
                    sock.sendall(part)
                sock.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):
                    assert await asyncio.to_thread(sock.recv, 1) == b""
            await other.send({"other": "unharmed"})
            await soon(lambda: {"other": "unharmed"} in heard)
            other.close()
            return refused

    refused = asyncio.run(main())
    return [message for message in heard if "n" in message], refused


SEAL = "it sent a message whose seal is not this connection's"


@pytest.mark.parametrize(
    ("change", "arrive", "reason"),
    [
        (lambda three: three, 3, None),
        (lambda three: [three[0], three[0], *three[1:]], 1, SEAL),  # repeated
        (lambda three: [three[1], three[0], three[2]], 0, SEAL),  # reordered
        (lambda three: [three[0], three[2]], 1, SEAL),  # left out
        (lambda three: [three[0], three[1][:-1] + b"!"], 1, SEAL),
        (lambda three: [three[0], bytes([255]) + three[1][1:]], 1, SEAL),  # another length
        (
            lambda three: [three[0], bytes([three[1][0], three[1][1] ^ 1]) + three[1][2:]],
            1,
            SEAL,
        ),  # one that would be waited for
        (lambda three: [frames.MessageSealer(b"k" * 32, client=True).pack({"n": 9}), *three], 0, SEAL),  # of another connection
        (lambda three: [three[0], three[1][:-2]], 1, None),  # ended in the middle: nobody's fault
    ],
)
def test_changed_bytes_end_that_connection_alone(
    change: Callable[[list[bytes]], list[bytes]], arrive: int, reason: str | None
) -> None:
    heard, refused = _tampered(change)
    assert heard == [{"n": number} for number in range(arrive)]
    assert refused == ([reason] if reason else [])


def test_sealed_but_invalid_messages_are_refused() -> None:
    for body, reason in ((b"[1]", "that is no table"), (b"{", "not JSON"), (b"[" * 100_000, "not JSON")):
        ours, theirs = frames.MessageSealer(b"k" * 32, client=True), frames.MessageSealer(b"k" * 32, client=False)
        length = len(body).to_bytes(4, "big")
        assert theirs.size(length + ours.seal(length)) == frames.SEAL + len(body)
        with pytest.raises(Refused, match=reason):
            theirs.open(ours.seal(body) + body)
    ours, theirs = frames.MessageSealer(b"k" * 32, client=True), frames.MessageSealer(b"k" * 32, client=False)
    length = (frames.MAX_MESSAGE + 1).to_bytes(4, "big")
    with pytest.raises(Refused, match="announced a message of 16777217 bytes"):
        theirs.size(length + ours.seal(length))


def test_reflected_messages_are_refused() -> None:
    seals = frames.MessageSealer(b"k" * 32, client=True)
    message = seals.pack({"n": 0})
    with pytest.raises(Refused, match="seal"):
        seals.size(message[: frames.HEADER])


def test_peer_that_never_reads_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_MAX_UNREAD", 1 << 20)
    links: list[Channel] = []

    async def keep(link: Channel) -> None:
        links.append(link)
        await link.receive()

    async def main() -> None:
        async with listening(keep) as (listener, _):
            deaf = await connect(listener.address, TOKEN)
            await soon(lambda: links)
            deaf._reader._transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(400):
                links[0].post({"text": "x" * 65536})
                await asyncio.sleep(0)
            with pytest.raises(ConnectionError, match="left 1 MiB unread"):
                await links[0].send({})
            deaf.close()

    asyncio.run(main())


def test_silent_strangers_do_not_block_authenticated_connections() -> None:
    async def main() -> None:
        async with listening() as (listener, refused):
            before = len(os.listdir("/proc/self/fd"))
            strangers = []
            try:
                for _ in range(5 * MAX_UNAUTHENTICATED):
                    strangers.append(socket.create_connection(listener.address))
                    await asyncio.sleep(0)
                await soon(lambda: len(refused) >= 4 * MAX_UNAUTHENTICATED)
                assert len(os.listdir("/proc/self/fd")) - before - len(strangers) <= MAX_UNAUTHENTICATED + 4
                async with asyncio.timeout(60):
                    links = [await connect(listener.address, TOKEN, 60) for _ in range(10)]
                    for link in links:
                        await link.send({"here": 1})
                        assert await link.receive() == {"here": 1}
                        link.close()
            finally:
                for stranger in strangers:
                    stranger.close()
            await soon(lambda: len(refused) == 5 * MAX_UNAUTHENTICATED)
            assert {reason.split(" (")[0] for reason in refused} == {
                "it did not prove itself before many others came",
                "it did not answer the greeting",
            }

    asyncio.run(main())


def test_silent_and_slow_strangers_are_refused_at_the_handshake_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "HANDSHAKE_SECONDS", 0.3)

    async def main() -> None:
        async with listening() as (listener, refused):
            pairs = [await asyncio.open_connection(*listener.address) for _ in ("silent", "slow")]
            async with asyncio.timeout(60):
                while len(refused) < 2:
                    pairs[1][1].write(b"x")  # a byte now and then is no progress
                    await asyncio.sleep(0.05)
            assert refused == ["it did not answer the greeting (timed out)"] * 2
            for _, writer in pairs:
                writer.close()

    asyncio.run(main())


def test_messages_posted_before_close_arrive_and_failing_tasks_are_reported() -> None:
    told: list[dict[str, Any]] = []

    async def wave(link: Channel) -> None:
        link.post({"good": "bye"})
        if (await link.receive()).get("fail"):
            raise KeyError("a bug of ours")
        link.post({"and": "good luck"})

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        async with listening(wave) as (listener, refused):
            for question, answers in (({}, [{"good": "bye"}, {"and": "good luck"}]), ({"fail": 1}, [{"good": "bye"}])):
                link = await connect(listener.address, TOKEN)
                await link.send(question)
                assert [await link.receive() for _ in answers] == answers
                with pytest.raises(ConnectionError, match="the connection ended"):
                    await link.receive()
            assert refused == [] and [repr(context["exception"]) for context in told] == ["KeyError('a bug of ours')"]

    asyncio.run(main())


def test_connection_refused_is_reported_at_once() -> None:
    async def main() -> None:
        async with listening() as (listener, _):
            address = listener.address
        with pytest.raises(ConnectionRefusedError):
            await connect(address, TOKEN)

    asyncio.run(main())
