"""Where the ranks of one generation meet: a small table that the controller's agent keeps, and that a rank asks through
`parallel/store`. When the generation is over, everybody who waits in it is told at once, and why. Pure asyncio; used by `control/agent`.

A question is {"op": …, "key" or "keys", "value", "timeout"}; values are bytes written as latin-1 text. The answer has "value", or
"error" with "over" or "late" beside it where the generation has ended or the time has passed. Operations do what torch's own store does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from phalanx.control.channel import Channel

Message = dict[str, Any]


class KeyValueStore:
    """One generation's meeting place. For one event loop."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._over: str | None = None
        self._at_once: dict[str, Callable[[Message], Any]] = {
            "set": self._set,
            "add": self._add,
            "append": self._append,
            "compare_set": self._compare_set,
            "check": lambda message: all(key in self._values for key in _keys(message)),
            "delete": lambda message: self._values.pop(_text(message, "key"), None) is not None,
            "count": lambda message: len(self._values),
        }

    async def ask(self, message: Message) -> Message:
        """The answer to one question. Never raises for what the question says."""
        answer = self.now(message)
        if answer is not None:
            return answer
        keys, seconds = _keys(message), _seconds(message)
        missing = await self._come(keys, seconds)
        if missing is not None:
            return {"error": f"waited {seconds:g} s for {missing!r}, which nobody has set", "late": True}
        answer = self.now(message)
        assert answer is not None
        return answer

    def now(self, message: Message) -> Message | None:
        """The answer where nothing must be waited for, else None."""
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
            if not isinstance(op, str) or op not in self._at_once:
                return {"error": f"no such operation: {op!r}"}
            return {"value": self._at_once[op](message)}
        except ValueError as error:
            return {"error": str(error)}

    def end(self, reason: str) -> None:
        """Everybody who waits, and whoever asks from now on, is told so. The first reason stays."""
        if self._over is None:
            self._over = reason
        self._values.clear()
        for key in list(self._waiting):
            self._wake(key)

    async def _come(self, keys: list[str], seconds: float) -> str | None:
        """Wait until all keys are there: None, or the first that never came. Returns early where the generation ends."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        # From the first again after each wait: what was there may have been deleted meanwhile.
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
        """What is there afterwards. Where nothing was: as torch's store does it, an empty expectation is met by nothing."""
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


async def serve(link: Channel, stores: Mapping[int, KeyValueStore], first: Message | None = None) -> None:
    """Answer one connection's questions, one after the other, until it ends. Its first message, {"store": generation}, says which
    store; `first` is that message where the caller has read it already."""
    first = first or await link.receive()
    generation = first.get("store")
    store = stores.get(generation) if isinstance(generation, int) else None
    if store is None:
        store = KeyValueStore()
        store.end(f"generation {generation} is not, or no longer, met here")
    while True:
        question = await link.receive()
        answer = store.now(question) or await _patiently(link, store.ask(question))
        await link.send(answer)


async def _patiently(link: Channel, answer: Coroutine[Any, Any, Message]) -> Message:
    """An answer that may take long, unless whoever asked goes away meanwhile."""
    answering, leaving = asyncio.create_task(answer), asyncio.create_task(link.receive())
    try:
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            leaving.result()
            raise ConnectionError(f"{link.address} asked again before it was answered")
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)
