"""The key-value store where the ranks of one generation rendezvous, like torch's TCPStore. The agent of the controller serves it; ranks use it
through `parallel/store`. When the generation is over, every waiting rank gets an error at once, with the reason.

A request is {"op": …, "key" or "keys", "value", "timeout"}; values are bytes as latin-1 text. The response has "value", or "error" together
with "over" (the generation has ended) or "late" (timeout). Operations behave like those of torch's own store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from phalanx.control.channel import Channel

Message = dict[str, Any]


class KeyValueStore:
    """The store of one generation, for one event loop."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._over: str | None = None
        self._operations: dict[str, Callable[[Message], Any]] = {
            "set": self._set,
            "add": self._add,
            "append": self._append,
            "compare_set": self._compare_set,
            "check": lambda message: all(key in self._values for key in _keys(message)),
            "delete": lambda message: self._values.pop(_text(message, "key"), None) is not None,
            "count": lambda message: len(self._values),
        }

    async def ask(self, message: Message) -> Message:
        """Answer one request, waiting for keys if needed. An invalid request gets an error as the answer."""
        answer = self.now(message)
        if answer is not None:
            return answer
        keys, seconds = _keys(message), _seconds(message)
        missing = await self._wait_for(keys, seconds)
        if missing is not None:
            return {"error": f"waited {seconds:g} s for {missing!r}, which nobody has set", "late": True}
        answer = self.now(message)
        assert answer is not None
        return answer

    def now(self, message: Message) -> Message | None:
        """Answer a request at once; None if it must wait for keys."""
        if self._over is not None:
            return {"error": self._over, "over": True}
        try:
            op = message.get("op")
            if op in ("get", "wait"):
                keys = _keys(message)
                _seconds(message)
                if not all(key in self._values for key in keys):
                    return None
                return {"value": [self._values[key] for key in keys] if op == "get" else True}
            if not isinstance(op, str) or op not in self._operations:
                return {"error": f"no such operation: {op!r}"}
            return {"value": self._operations[op](message)}
        except ValueError as error:
            return {"error": str(error)}

    def end(self, reason: str) -> None:
        """End the store: all waiting and future requests get this error. The first reason counts."""
        if self._over is None:
            self._over = reason
        self._values.clear()
        for key in list(self._waiting):
            self._wake(key)

    async def _wait_for(self, keys: list[str], seconds: float) -> str | None:
        """Wait until all keys are set; returns None, or the first missing key after the timeout. Returns early if the store ends."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        # Start with the first key after each wait: a key may have been deleted meanwhile.
        while self._over is None and (missing := next((key for key in keys if key not in self._values), None)) is not None:
            left = until - loop.time()
            if left <= 0:
                return missing
            woken = loop.create_future()
            self._waiting.setdefault(missing, set()).add(woken)
            try:
                await asyncio.wait([woken], timeout=left)
            finally:
                waiting = self._waiting.get(missing, set())
                waiting.discard(woken)
                if not waiting:
                    self._waiting.pop(missing, None)
        return None

    def _wake(self, key: str) -> None:
        for woken in self._waiting.pop(key, ()):
            if not woken.done():
                woken.set_result(None)

    def _put(self, key: str, value: str) -> None:
        self._values[key] = value
        if key in self._waiting:
            self._wake(key)

    def _set(self, message: Message) -> bool:
        values = message.get("values")
        if values is None:
            self._put(_text(message, "key"), _text(message, "value"))
            return True
        keys = _keys(message)
        if not isinstance(values, list) or len(values) != len(keys) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{len(keys)} keys need as many values")
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)
        return True

    def _add(self, message: Message) -> int:
        key, amount = _text(message, "key"), message.get("value")
        if not isinstance(amount, int):
            raise ValueError(f"{amount!r} cannot be added: it is no whole number")
        now = self._values.get(key, "0")
        try:
            total = int(now) + amount
        except ValueError:
            raise ValueError(f"{key!r} holds no number to add to") from None
        self._put(key, str(total))
        return total

    def _append(self, message: Message) -> bool:
        key = _text(message, "key")
        self._put(key, self._values.get(key, "") + _text(message, "value"))
        return True

    def _compare_set(self, message: Message) -> str:
        """Returns the value afterwards. As in torch's store, an empty expectation matches a missing key."""
        key, expected, desired = _text(message, "key"), _text(message, "expected"), _text(message, "value")
        now = self._values.get(key)
        if now is None and expected:
            return expected
        if now is None or now == expected:
            self._put(key, desired)
            return desired
        return now


def _text(message: Message, name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text")
    return value


def _keys(message: Message) -> list[str]:
    keys = message.get("keys")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("keys is no list of texts")
    return keys


def _seconds(message: Message) -> float:
    seconds = message.get("timeout")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        raise ValueError(f"timeout is {seconds!r}, not a number of seconds")
    return float(seconds)


async def serve(channel: Channel, stores: Mapping[int, KeyValueStore], first: Message | None = None) -> None:
    """Answer the requests of one connection in order until it ends. The first message, {"store": generation}, selects the store; `first` is
    that message if the caller has read it already."""
    first = first or await channel.receive()
    generation = first.get("store")
    store = stores.get(generation) if isinstance(generation, int) else None
    if store is None:
        store = KeyValueStore()
        store.end(f"generation {generation} is not, or no longer, met here")
    while True:
        request = await channel.receive()
        answer = store.now(request) or await _await_answer(channel, store.ask(request))
        await channel.send(answer)


async def _await_answer(channel: Channel, answer: Coroutine[Any, Any, Message]) -> Message:
    """Wait for an answer, unless the client disconnects meanwhile."""
    answering, disconnect = asyncio.create_task(answer), asyncio.create_task(channel.receive())
    try:
        await asyncio.wait([answering, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if disconnect.done():
            disconnect.result()
            raise ConnectionError(f"{channel.address} asked again before it was answered")
        return answering.result()
    finally:
        answering.cancel()
        disconnect.cancel()
        await asyncio.gather(answering, disconnect, return_exceptions=True)
