"""A hundred thousand changed frames, against the parsers that read them. None may be taken for a message, and none may do more than be refused."""

from __future__ import annotations

import contextlib
import io
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from phalanx.checkpointing.replicas.replica_server import Connection
from phalanx.events import frames
from phalanx.events.frames import Handshake, MessageSealer, Refused

KEY, OTHER = b"k" * 32, b"o" * 32
MESSAGES = [
    {"message": "ControllerAlive", "term": 3, "recorded": 12},
    {"op": "add", "key": "copies", "value": 1},
    {"message": "Beats", "beats": {str(rank): [1, 2, 0.25, "forward"] for rank in range(8)}},
]
"""Each is the second one of its connection, so that there is one before it to be played again."""


def receive(sealer: MessageSealer, data: bytes) -> tuple[list[dict[str, object]], bool]:
    """What a receiver takes from these bytes, and whether it has refused them: reads as `control/channel` and `parallel/store` do."""
    messages = []
    try:
        while len(data) >= frames.HEADER:
            size = sealer.size(data[: frames.HEADER])
            if len(data) < frames.HEADER + size:
                break
            messages.append(sealer.open(data[frames.HEADER : frames.HEADER + size]))
            data = data[frames.HEADER + size :]
    except Refused:
        return messages, True
    return messages, False


class Frames:
    """The frames of connections that somebody on the way has seen."""

    def __init__(self, message: dict[str, object]):
        ours = MessageSealer(KEY, client=True)
        self.first, self.second, self.third = (ours.pack(each) for each in ({"n": 0}, message, {"n": 2}))
        back, foreign = MessageSealer(KEY, client=False), MessageSealer(OTHER, client=True)
        self.back = [back.pack({"n": 0}), back.pack(message)]
        self.foreign = [foreign.pack({"n": 0}), foreign.pack(message)]


def flip(draw: random.Random, data: bytes, count: int = 1) -> bytes:
    changed = bytearray(data)
    while bytes(changed) == data:
        for _ in range(count):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def other_length(draw: random.Random, seen: Frames) -> bytes:
    size = len(seen.second) - frames.HEADER - frames.SEAL
    length = draw.choice([0, size - 1, size + 1, frames.MAX_MESSAGE, frames.MAX_MESSAGE + 1, 2**32 - 1])
    return length.to_bytes(4, "big") + seen.second[4:]


def spliced(draw: random.Random, seen: Frames) -> bytes:
    other = draw.choice([seen.first, seen.third, seen.back[1], seen.foreign[1]])
    cut = draw.randrange(1, min(len(other), len(seen.second)))
    return seen.second[:cut] + other[cut:]


CHANGES: dict[str, Callable[[random.Random, Frames], bytes]] = {
    "a bit": lambda draw, seen: flip(draw, seen.second),
    "several bits": lambda draw, seen: flip(draw, seen.second, draw.randrange(2, 40)),
    "a byte less": lambda draw, seen: seen.second[: (cut := draw.randrange(len(seen.second)))] + seen.second[cut + 1 :],
    "a byte more": lambda draw, seen: seen.second[: (cut := draw.randrange(len(seen.second)))] + draw.randbytes(1) + seen.second[cut:],
    "another length": other_length,
    "another frame's end": spliced,
    "noise": lambda draw, seen: draw.randbytes(draw.choice([frames.HEADER, 100, 1000])),
    "played again": lambda draw, seen: seen.first,
    "left out": lambda draw, seen: seen.third,
    "of the other direction": lambda draw, seen: draw.choice(seen.back),
    "of another connection": lambda draw, seen: draw.choice(seen.foreign),
}  # fmt: skip


def test_every_changed_message_is_refused() -> None:
    draw, outcomes = random.Random(0), Counter[str]()
    seen = [Frames(message) for message in MESSAGES]
    for number in range(103_000):
        name = draw.choice(list(CHANGES))
        at = seen[number % len(seen)]
        changed = CHANGES[name](draw, at)
        if changed == at.second or changed.startswith(at.second):  # the byte more came last, or was equal to its neighbor
            continue
        sealer = MessageSealer(KEY, client=False)
        # What follows on the connection fills up whatever the receiver may wait for.
        messages, refused = receive(sealer, at.first + changed + at.third * 10)
        assert messages == [{"n": 0}] and refused, (name, number)
        outcomes[name] += 1
    assert min(outcomes.values()) > 5000 and outcomes.total() >= 100_000, outcomes
    for at, message in zip(seen, MESSAGES, strict=True):
        unchanged = receive(MessageSealer(KEY, client=False), at.first + at.second + at.third)
        assert unchanged == ([{"n": 0}, message, {"n": 2}], False)


def greet(client: Handshake, server: Handshake, change: Callable[[bytes], bytes]) -> list[bytes]:
    """A handshake with somebody between the two, who changes what both send; returns the keys of those who accept."""
    keys = []
    nonce, _ = next(server)
    next(client)
    try:
        answer, _ = client.send(change(nonce))
        proof, _ = server.send(change(answer))
        try:
            server.send(b"")
        except StopIteration as done:
            keys.append(done.value)
        client.send(change(proof))
    except StopIteration as done:
        keys.append(done.value)
    except Refused:
        pass
    return keys


def test_changed_handshakes_never_agree_on_a_key() -> None:
    draw, address = random.Random(1), ("10.0.0.1", 40000)

    def sides(
        token: str = "secret", use: bytes = frames.CONTROL, where: frames.Address = address
    ) -> tuple[Handshake, Handshake]:
        return frames.client_handshake("secret", frames.CONTROL, address), frames.server_handshake(token, use, where)

    keys = greet(*sides(), change=bytes)
    assert len(keys) == 2 and keys[0] == keys[1]
    accepted = 0
    for _ in range(5000):
        part = draw.randrange(3)

        def change(data: bytes, parts: list[int] = [part]) -> bytes:  # noqa: B006
            parts[0] -= 1
            return flip(draw, data) if parts[0] == -1 else data

        keys = greet(*sides(), change=change)
        assert len(keys) == (part == 2), "a server whose own proof was changed cannot know, but its client does"
        accepted += len(keys)
    assert accepted
    for other in ({"token": "guess"}, {"use": frames.REPLICAS}, {"where": ("10.0.0.2", 40000)}, {"where": ("10.0.0.1", 40001)}):
        assert greet(*sides(**other), change=bytes) == []  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def replica_stream() -> tuple[bytes, bytes]:
    """A message with three blocks after it, as they travel, and those blocks."""
    ours, theirs = socket.socketpair()
    payload = random.Random(2).randbytes((2 << 20) + 1000)
    received = bytearray()

    def read() -> None:
        while part := theirs.recv(1 << 20):
            received.extend(part)

    thread = threading.Thread(target=read)
    thread.start()
    with ours:
        Connection(ours, KEY, client=True).send({"op": "put"}, io.BytesIO(payload), 0, len(payload))
    thread.join()
    theirs.close()
    return bytes(received), payload


def take(data: bytes) -> bytes | None:
    """The blocks that a replica server takes from these bytes, through a real socket; None if it refuses them."""
    ours, theirs = socket.socketpair()

    def write() -> None:
        with ours, contextlib.suppress(OSError):
            ours.sendall(data)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        connection = Connection(theirs, KEY, client=False)
        message, length = connection.receive()
        assert message == {"op": "put"}
        return bytes(connection.receive_bytes(length))
    except Refused:
        return None
    finally:
        theirs.close()
        thread.join()


def test_every_changed_block_of_a_replica_is_refused(replica_stream: tuple[bytes, bytes]) -> None:
    stream, payload = replica_stream
    assert take(stream) == payload
    draw, block = random.Random(3), frames.SEAL + (1 << 20)
    begin = len(stream) - 2 * block - frames.SEAL - 1000
    one, two, rest = stream[begin : begin + block], stream[begin + block : begin + 2 * block], stream[begin + 2 * block :]
    for swapped in ([two, one, rest], [one, one, rest], [one, two[:-1], rest, b"x"], [one, bytes(block), rest]):
        assert take(stream[:begin] + b"".join(swapped)) is None
    for _ in range(150):
        place = draw.choice([draw.randrange(len(stream)), draw.randrange(begin), begin + draw.randrange(frames.SEAL)])
        changed = bytearray(stream)
        changed[place] ^= 1 << draw.randrange(8)
        assert take(bytes(changed)) is None


def test_shortened_streams_end_as_lost_connections(replica_stream: tuple[bytes, bytes]) -> None:
    for length in (0, 3, frames.HEADER, 200, 2 << 20):
        with pytest.raises(ConnectionError, match="ended during a message"):
            take(replica_stream[0][:length])
