"""A generation's meeting place: who waits is woken by what comes, by the clock, or by the generation's end, and nothing said breaks it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from phalanx.control.channel import Channel, Listener, connect
from phalanx.control.store_server import KeyValueStore, serve

TOKEN = "a secret of the test"


def test_setting_a_key_wakes_those_who_wait_for_it() -> None:
    async def main() -> None:
        store = KeyValueStore()
        waiting = [
            asyncio.create_task(store.ask({"op": op, "keys": ["a", "b"], "timeout": 5})) for op in ("get", "wait", "get")
        ]
        await asyncio.sleep(0)
        assert await store.ask({"op": "set", "key": "b", "value": "\xff\x00"}) == {"value": True}
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        assert await store.ask({"op": "add", "key": "a", "value": 3}) == {"value": 3}
        assert await asyncio.gather(*waiting) == [{"value": ["3", "\xff\x00"]}, {"value": True}, {"value": ["3", "\xff\x00"]}]
        assert await store.ask({"op": "set", "keys": ["c", "d"], "values": ["1", "2"]}) == {"value": True}
        assert await store.ask({"op": "count"}) == {"value": 4} and store._waiting == {}

    asyncio.run(main())


def test_timeout_names_the_missing_key() -> None:
    async def main() -> None:
        store = KeyValueStore()
        await store.ask({"op": "set", "key": "here", "value": ""})
        answer = await store.ask({"op": "get", "keys": ["here", "rank 3"], "timeout": 0.1})
        assert answer == {"error": "waited 0.1 s for 'rank 3', which nobody has set", "late": True}
        assert store._waiting == {}
        assert (await store.ask({"op": "wait", "keys": ["rank 3"], "timeout": 0}))["late"]

    asyncio.run(main())


def test_deleted_key_is_waited_for_again() -> None:
    async def main() -> None:
        store = KeyValueStore()
        waiting = asyncio.create_task(store.ask({"op": "get", "keys": ["a", "b"], "timeout": 5}))
        for question in (
            {"op": "set", "key": "a", "value": "1"},
            {"op": "delete", "key": "a"},
            {"op": "set", "key": "b", "value": "2"},
        ):
            await asyncio.sleep(0)
            await store.ask(question)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await store.ask({"op": "set", "key": "a", "value": "3"})
        assert await waiting == {"value": ["3", "2"]}

    asyncio.run(main())


def test_ending_the_store_answers_all_waiting_and_later_requests() -> None:
    async def main() -> None:
        store = KeyValueStore()
        waiting = [asyncio.create_task(store.ask({"op": "get", "keys": [f"{n}"], "timeout": 60})) for n in range(20)]
        await asyncio.sleep(0)
        store.end("rank 3 has died")
        store.end("another reason")
        over = {"error": "rank 3 has died", "over": True}
        assert await asyncio.wait_for(asyncio.gather(*waiting), 0.3) == [over] * 20
        for op in ("get", "wait", "set", "add", "check", "count", "nonsense"):
            assert await store.ask({"op": op, "key": "k", "keys": ["k"], "value": "1", "timeout": 5}) == over

    asyncio.run(main())


def test_invalid_store_requests_get_error_answers() -> None:
    draw = random.Random(7)
    names = ["op", "key", "keys", "value", "values", "expected", "timeout", "more"]
    ops = ["set", "get", "add", "append", "compare_set", "check", "wait", "delete", "count", "", None, 3, [], {}]
    values: list[Any] = [
        None,
        0,
        1,
        -1,
        1e308,
        float("nan"),
        float("inf"),
        True,
        "",
        "k",
        "12",
        "\u2603",
        [],
        ["k"],
        ["k", 3],
        {},
        {"k": 1},
    ]

    async def main() -> None:
        store = KeyValueStore()
        for _ in range(3000):
            question = {name: draw.choice(values) for name in names if draw.random() < 0.8}
            question["op"] = draw.choice(ops) if draw.random() < 0.9 else draw.choice(values)
            if question.get("timeout") != 0:  # what is right would wait
                question["timeout"] = draw.choice([0, -1, float("nan"), None, "1", True])
            answer = await store.ask(question)
            assert ("value" in answer) != ("error" in answer), (question, answer)
        await store.ask({"op": "set", "key": "k", "value": "whole"})
        assert await store.ask({"op": "get", "keys": ["k"], "timeout": 0}) == {"value": ["whole"]} and store._waiting == {}

    asyncio.run(main())


def test_disconnected_client_frees_its_waiting_request() -> None:
    stores = {4: KeyValueStore(), 5: KeyValueStore()}

    async def on_link(link: Channel) -> None:
        await serve(link, stores, await link.receive())

    async def main() -> None:
        refused: list[str] = []
        listener = Listener("127.0.0.1", TOKEN, on_link, lambda address, reason: refused.append(reason))
        links = {}
        for generation in (4, 5, 6, "4", None):
            links[generation] = await connect(listener.address, TOKEN)
            await links[generation].send({"store": generation})
            await links[generation].send({"op": "add", "key": "k", "value": 1})
            answer = await links[generation].receive()
            assert answer == {"value": 1} if generation in stores else answer["over"], answer
        await links[4].send({"op": "get", "keys": ["never"], "timeout": 60})
        await links[5].send({"op": "get", "keys": ["never"], "timeout": 60})
        while not (stores[4]._waiting and stores[5]._waiting):
            await asyncio.sleep(0.01)
        links[4].close()  # as a rank that dies
        await links[5].send({"op": "count"})  # as none of ours would
        with pytest.raises(ConnectionError):
            await links[5].receive()
        async with asyncio.timeout(5):
            while stores[4]._waiting or stores[5]._waiting:
                await asyncio.sleep(0.01)
        for link in links.values():
            link.close()
        await listener.close()
        await asyncio.sleep(0.01)
        assert refused == []

    asyncio.run(main())
