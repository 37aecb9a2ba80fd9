"""The store in which ranks meet, kept by the controller's agent (`control/store_server`): torch's own interface, over connections on which
both sides have proved the run's token. Made by `parallel/mesh`. When the generation is over, whoever waits in here is told at once.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.events import frames
from phalanx.events.frames import Address, BlockingChannel

_GRACE = 10.0  # seconds beyond a question's own time, after which the other side is taken for dead


class ControlStore(dist.Store):
    """One generation's keys. From any thread: each question has a connection to itself while it waits, and connections are kept.

    ConnectionError says that the generation is over or the store is out of reach, dist.DistStoreError that nobody came in time.
    """

    timeout: timedelta  # torch's own, which `set_timeout` sets, through a PrefixStore too

    def __init__(self, address: Address, token: str, generation: int, timeout: float):
        super().__init__()
        self._address, self._token, self._generation = (address[0], int(address[1])), token, generation
        self._idle: list[BlockingChannel] = []
        self._lock = threading.Lock()
        self.set_timeout(timedelta(seconds=timeout))

    # The names below are torch's: those of its Python interface, and those by which its C++ code asks a store made in Python.

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(op="set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask(op="add", key=key, value=value))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(op="append", key=key, value=_text(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return _bytes(self._ask(op="compare_set", key=key, expected=_text(expected), value=_text(desired)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(op="check", keys=keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask(op="wait", keys=keys, timeout=(timeout or self.timeout).total_seconds())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [_bytes(value) for value in self._ask(op="get", keys=keys, timeout=self.timeout.total_seconds())]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._ask(op="set", keys=keys, values=[_text(value) for value in values])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(op="delete", key=key))

    def num_keys(self) -> int:
        return int(self._ask(op="count"))

    def has_extended_api(self) -> bool:
        return True

    deleteKey, getNumKeys = delete_key, num_keys

    def _ask(self, **question: Any) -> Any:
        with self._lock:
            channel = self._idle.pop() if self._idle else None
        try:
            if channel is None:
                channel = frames.open_channel(self._address, self._token, frames.CONTROL)
                channel.send({"store": self._generation})
            channel.send(question)
            answer = channel.receive(question.get("timeout", 0.0) + _GRACE)
        except OSError as error:
            if channel is not None:
                channel.close()
            where = f"the store of generation {self._generation} at {frames.format_address(self._address)}"
            raise ConnectionError(f"{where} is out of reach: {error}") from None
        except BaseException:  # an interrupt in the middle: the answer would be taken for the next one's
            if channel is not None:
                channel.close()
            raise
        if answer.get("over"):
            channel.close()
            raise ConnectionError(str(answer["error"]))
        with self._lock:
            self._idle.append(channel)
        if "error" in answer:
            raise dist.DistStoreError(str(answer["error"]))
        return answer["value"]

    def close(self) -> None:
        """Leave: what is asked afterwards opens new connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def __del__(self) -> None:
        for channel in self._idle:
            channel.close()


def _text(value: str | bytes) -> str:
    """Bytes as JSON can carry them."""
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


def _bytes(text: Any) -> bytes:
    return str(text).encode("latin-1")
