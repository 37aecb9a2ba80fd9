"""The rendezvous store of a generation, served by the controller's agent over connections on which both sides have proved the run's
token. `parallel/mesh` makes it. When the generation ends, waiting calls fail at once.
"""

from __future__ import annotations

import secrets
from collections import deque
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from phalanx.events import frames
from phalanx.events.frames import Address, BlockingChannel

_GRACE = 10.0  # seconds beyond a request's own timeout, after which the server counts as dead


class ControlStore(dist.Store):
    """The keys of one generation. Any thread may use it: each request has a connection of its own, and connections are reused.

    Raises ConnectionError if the generation is over or the store is unreachable, dist.DistStoreError if a wait times out.
    """

    timeout: timedelta  # torch's own, which `set_timeout` sets, through a PrefixStore too

    def __init__(self, address: Address, token: str, generation: int, timeout: float):
        super().__init__()
        self._address, self._token, self._generation = (address[0], int(address[1])), token, generation
        self._idle: deque[BlockingChannel] = deque()  # threads share it without a lock
        self._name, self._numbers = secrets.token_hex(8), count()
        self.set_timeout(timedelta(seconds=timeout))

    # The names below are torch's: of its Python interface, and of its C++ code's calls to a store written in Python.

    def set(self, key: str, value: str | bytes) -> None:
        self._request(op="set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        return int(self._request(op="add", key=key, value=value))

    def append(self, key: str, value: str | bytes) -> None:
        self._request(op="append", key=key, value=_text(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return _bytes(self._request(op="compare_set", key=key, expected=_text(expected), value=_text(desired)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._request(op="check", keys=keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._request(op="wait", keys=keys, timeout=(timeout or self.timeout).total_seconds())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [_bytes(value) for value in self._request(op="get", keys=keys, timeout=self.timeout.total_seconds())]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._request(op="set", keys=keys, values=[_text(value) for value in values])

    def delete_key(self, key: str) -> bool:
        return bool(self._request(op="delete", key=key))

    def num_keys(self) -> int:
        return int(self._request(op="count"))

    def has_extended_api(self) -> bool:
        return True

    deleteKey, getNumKeys = delete_key, num_keys

    def _request(self, **request: Any) -> Any:
        request["id"] = f"{self._name}-{next(self._numbers)}"
        try:
            channel = self._connect()
            try:
                answer = self._ask(channel, request)
            except ConnectionError:
                # Once more on a new connection. The server remembers by the id what it has done already.
                self.close()
                answer = self._ask(self._connect(), request)
        except OSError as error:
            where = f"the store of generation {self._generation} at {frames.format_address(self._address)}"
            raise ConnectionError(f"{where} is out of reach: {error}") from None
        if answer.get("over"):
            raise ConnectionError(str(answer["error"]))
        if "error" in answer:
            raise dist.DistStoreError(str(answer["error"]))
        return answer["value"]

    def _connect(self) -> BlockingChannel:
        with suppress(IndexError):
            return self._idle.pop()
        channel = BlockingChannel(self._address, self._token, frames.CONTROL)
        channel.send({"store": self._generation})
        return channel

    def _ask(self, channel: BlockingChannel, request: dict[str, Any]) -> dict[str, Any]:
        try:
            channel.send(request)
            answer = channel.receive(request.get("timeout", 0.0) + _GRACE)
        except BaseException:  # an interrupt too: the next request would read this answer
            channel.close()
            raise
        if answer.get("over"):
            channel.close()
        else:
            self._idle.append(channel)
        return answer

    def close(self) -> None:
        """Close idle connections. Later requests open new ones."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    __del__ = close


def _text(value: str | bytes) -> str:
    """Bytes as text for JSON."""
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


def _bytes(text: Any) -> bytes:
    return str(text).encode("latin-1")
