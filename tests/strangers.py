"""Strangers on the ports of a run: what they send, and how. Imported as `strangers`."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.events import frames
from phalanx.events.frames import Address

TCP_RESET = struct.pack("ii", 1, 0)
Conversation = tuple[list[bytes], list[bytes]]


def recorded(address: Address, token: str, use: bytes, questions: list[dict[str, Any]]) -> Conversation:
    """What an honest client said, and what it was answered, part by part."""
    with socket.create_connection(address) as sock:
        until = time.monotonic() + 60
        said, heard = [], [frames.receive_exactly(sock, frames.NONCE, until)]
        handshake = frames.client_handshake(token, use, address)
        next(handshake)
        said.append(handshake.send(heard[0])[0])
        sock.sendall(said[0])
        heard.append(frames.receive_exactly(sock, frames.PROOF, until))
        try:
            handshake.send(heard[1])
        except StopIteration as done:
            seals = frames.MessageSealer(done.value, client=True)
        for part in map(seals.pack, questions):
            sock.sendall(part)
            said.append(part)
        sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(1 << 16):
            heard.append(part)
    return said, heard


def message(draw: random.Random, said: list[bytes], heard: list[bytes]) -> bytes:
    """A stranger's message: at random, or of a conversation that it has overheard, changed or not."""
    parts = list(draw.choice([said, said, heard]))
    kind = draw.randrange(9)
    if kind == 0:
        return draw.randbytes(draw.choice([0, 1, 31, 32, 63, 64, 65, 100, 1000, 100_000]))
    if kind == 1:
        return draw.choice(
            [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + draw.randbytes(200), b"SSH-2.0-x\r\n", b"\x80\x04\x95."]
        )
    if kind == 2:
        return draw.randbytes(64) + struct.pack("!I", draw.choice([0, 1, 1 << 24, 1 << 31, (1 << 32) - 1])) + draw.randbytes(99)
    if kind == 3:
        draw.shuffle(parts)
    if kind == 4:
        parts += parts  # repeated
    whole = bytearray(b"".join(parts))
    if kind in (5, 6):
        for _ in range(draw.choice([1, 1, 2, 10])):
            whole[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
    if kind == 7:
        del whole[draw.randrange(len(whole)) :]
    return bytes(whole)  # and where nothing was changed, a conversation played again


def attack(address: Address, count: int, draw: random.Random, conversation: Conversation, patience: float = 10.0) -> None:
    """That many strangers: some listen, some send and go, some reset, some stay half open, some send byte by byte."""
    staying: list[socket.socket] = []
    try:
        for _ in range(count):
            sock = socket.create_connection(address, timeout=patience)
            text, manner = message(draw, *conversation), draw.randrange(8)
            with suppress(OSError):
                if manner == 0:
                    frames.receive_exactly(sock, frames.NONCE, time.monotonic() + patience)
                if manner == 1:
                    for byte in text[:20]:
                        sock.send(bytes([byte]))
                else:
                    sock.sendall(text[:40] if manner == 4 else text)  # less than a greeting, and then silence
                if manner == 2:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, TCP_RESET)
                if manner == 3:
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
            if manner in (4, 5):
                staying.append(sock)
                sock = staying.pop(0) if len(staying) > 100 else None  # type: ignore[assignment]
            if sock is not None:
                sock.close()
    finally:
        for sock in staying:
            sock.close()


def leaks(token: str, pids: Iterable[int], folders: Iterable[Path]) -> list[str]:
    """Where a secret can be seen by others: arguments and environments of processes, and files that not only their owner can read."""
    found, secret = [], token.encode()
    for pid in pids:
        with suppress(OSError):  # a process that has ended
            found += [
                f"{name} of {pid}" for name in ("cmdline", "environ") if secret in Path(f"/proc/{pid}/{name}").read_bytes()
            ]
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file() and path.stat().st_mode & 0o077 and secret in path.read_bytes():
                    found.append(str(path))
    return found
