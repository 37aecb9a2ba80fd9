"""The key-value store where the ranks of one generation rendezvous, like torch's TCPStore. The agent of the controller serves it; ranks use it
through `parallel/store`. When the generation is over, every waiting rank gets an error at once, with the reason.

A request is {"op": …, "key" or "keys", "value", "timeout", "id"}; values are bytes as latin-1 text. The response has "value", or "error"
together with "over" (the generation has ended) or "late" (timeout). Operations behave like those of torch's own store. A client whose
connection ended repeats its request under the same id, and gets the answer that it has missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from phalanx.control.channel import Channel

Message = dict[str, Any]
_ONCE = ("add", "append", "compare_set", "delete")  # operations that a repetition would change
_MAX_ANSWERS = 65536  # a repetition comes within seconds


class KeyValueStore:
    """The store of one generation, for one event loop."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._over: str | None = None
        self._answers: dict[str, Message] = {}
        """Newest answers by the id of their request, of those that cannot simply be repeated."""

    async def ask(self, message: Message) -> Message:
        """Answer one request, waiting for keys if needed. An invalid request gets an error as the answer."""
        while (answer := self.now(message)) is None:
            missing = await self._wait_for(message["keys"], message["timeout"])
            if missing is not None:
                return {"error": f"waited {message['timeout']:g} s for {missing!r}, which nobody has set", "late": True}
        return answer

    def now(self, message: Message) -> Message | None:
        """Answer a request at once; None if it must wait for keys."""
        if self._over is not None:
            return {"error": self._over, "over": True}
        request = message.get("id")
        if isinstance(request, str) and request in self._answers:
            return self._answers[request]
        answer = self._apply(message)
        if isinstance(request, str) and answer is not None and message.get("op") in _ONCE:
            self._answers[request] = answer
            if len(self._answers) > _MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
        return answer

    def _apply(self, message: Message) -> Message | None:
        values = self._values
        match message:
            case {"op": "get" | "wait" as op, "keys": list(keys), "timeout": int() | float() as seconds} if (
                _all_text(keys) and seconds is not True and 0 <= seconds < 1e9
            ):
                if not all(key in values for key in keys):
                    return None
                return {"value": [values[key] for key in keys] if op == "get" else True}
            case {"op": "set", "keys": list(keys), "values": list(new)} if len(keys) == len(new) and _all_text(keys + new):
                for key, value in zip(keys, new, strict=True):
                    self._put(key, value)
                return {"value": True}
            case {"op": "set", "key": str(key), "value": str(value)}:
                self._put(key, value)
                return {"value": True}
            case {"op": "append", "key": str(key), "value": str(value)}:
                self._put(key, values.get(key, "") + value)
                return {"value": True}
            case {"op": "add", "key": str(key), "value": int(amount)}:
                try:
                    return {"value": int(self._put(key, str(int(values.get(key, "0")) + amount)))}
                except ValueError:
                    return {"error": f"{key!r} holds no number to add to"}
            case {"op": "compare_set", "key": str(key), "expected": str(expected), "value": str(desired)}:
                # Answered with the value afterwards. As in torch's store, an empty expectation matches a missing key.
                matches = values.get(key, "") == expected
                return {"value": self._put(key, desired) if matches else values.get(key, expected)}
            case {"op": "check", "keys": list(keys)} if _all_text(keys):
                return {"value": all(key in values for key in keys)}
            case {"op": "delete", "key": str(key)}:
                return {"value": values.pop(key, None) is not None}
            case {"op": "count"}:
                return {"value": len(values)}
        return {"error": f"no valid request: {message!r:.200}"}

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

    def _put(self, key: str, value: str) -> str:
        self._values[key] = value
        if key in self._waiting:
            self._wake(key)
        return value


def _all_text(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


async def serve(channel: Channel, stores: Mapping[int, KeyValueStore], first: Message) -> None:
    """Answer the requests of one connection in order until it ends. Its first message, {"store": generation}, selects the store."""
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
