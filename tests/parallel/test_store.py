"""The agent's store in place of torch's own: the same answers, from many threads, and nobody waits in a generation that is over."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import meeting
import pytest
import torch
import torch.distributed as dist

from phalanx.events import frames
from phalanx.events.frames import Address, BlockingChannel
from phalanx.host.env import use_loopback_only
from phalanx.parallel.mesh import Mesh, connect, disconnect
from phalanx.parallel.store import ControlStore
from phalanx.spec.plan import Place
from phalanx.verification.rank_pool import fork


def store(agent: meeting.Agent, generation: int = 1, timeout: float = 60.0) -> ControlStore:
    return ControlStore(agent.address, meeting.TOKEN, generation, timeout)


def _once(store: dist.Store, draw: random.Random) -> Any:
    """A question drawn at random, and its answer."""
    key, value = draw.choice("abcd"), draw.choice([b"", b"1", b"-7", b"text", bytes(range(256)), "höher".encode()])
    what = draw.choice(["set", "get", "add", "compare_set", "check", "delete_key", "wait", "append", "multi_get", "multi_set"])
    try:
        if what in ("set", "append"):
            return what, getattr(store, what)(key, value)
        if what == "add":
            return what, store.add(f"number {key}", draw.randrange(-3, 9))
        if what == "compare_set":
            return what, store.compare_set(key, draw.choice([b"", b"1", b"text"]), value)
        if what == "wait":
            return what, store.wait([key, draw.choice("abcd")], timedelta(milliseconds=10))
        if what == "multi_get":
            keys = [key for key in "abcd" if store.check([key])]
            return what, keys, store.multi_get(keys)
        if what == "multi_set":
            return what, store.multi_set([key, "d"], [value, value])
        if what == "get" and not store.check([key]):
            return what, None
        return what, getattr(store, what)([key] if what == "check" else key)
    except dist.DistStoreError:
        return what, "late"


@pytest.mark.parametrize("wrap", [lambda store: store, lambda store: dist.PrefixStore("under a name", store)])
def test_answers_are_those_of_torchs_store(wrap: Callable[[dist.Store], dist.Store]) -> None:
    """600 questions, drawn alike: through the Python interface and, behind a prefix, through torch's C++ code."""
    with meeting.agent() as agent:
        ours = store(agent)
        theirs = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))
        one, other, started = random.Random(3), random.Random(3), theirs.num_keys()
        for number in range(600):
            assert _once(wrap(ours), one) == _once(wrap(theirs), other), number
        assert wrap(ours).num_keys() == theirs.num_keys() - started
        ours.close()


def test_who_waits_too_long_is_told_so_in_torchs_words() -> None:
    with meeting.agent() as agent:
        ours = store(agent, timeout=0.2)
        with pytest.raises(dist.DistStoreError, match=r"waited 0.2 s for 'nobody'"):
            ours.get("nobody")
        behind = dist.PrefixStore("p", ours)
        behind.set_timeout(timedelta(seconds=0.1))  # torch sets it so, and the store heeds it
        with pytest.raises(dist.DistStoreError, match=r"waited 0.1 s for 'p/nobody'"):
            behind.get("nobody")
        with pytest.raises(dist.DistStoreError, match=r"waited 0.05 s"):
            ours.wait(["nobody"], timedelta(seconds=0.05))
        with pytest.raises(dist.DistStoreError, match="holds no number"):
            ours.set("word", "w")
            ours.add("word", 1)
        ours.close()


def test_threads_that_wait_hold_no_other_up() -> None:
    with meeting.agent() as agent:
        ours, found = store(agent), []
        waiting = [threading.Thread(target=lambda n=n: found.append(ours.get(f"{n}"))) for n in range(8)]
        adding = [threading.Thread(target=lambda: [ours.add("sum", 1) for _ in range(50)]) for _ in range(4)]
        for thread in (*waiting, *adding):
            thread.start()
        for thread in adding:
            thread.join()
        assert ours.add("sum", 0) == 200 and not found
        ours.multi_set([f"{n}" for n in range(8)], [f"{n}" for n in range(8)])
        for thread in waiting:
            thread.join(5)
        assert sorted(found) == [f"{n}".encode() for n in range(8)]
        assert len(ours._idle) <= 12
        ours.close()


def test_another_run_and_another_generation_are_said() -> None:
    with meeting.agent() as agent:
        stranger = ControlStore(agent.address, "another secret", 1, 5.0)
        with pytest.raises(ConnectionError, match=r"the store of generation 1 at 127.* refused this one's token"):
            stranger.set("a", "b")
        late = store(agent, generation=77)
        with pytest.raises(ConnectionError, match="generation 77 is not, or no longer, met here"):
            late.set("a", "b")
        assert store(agent, 1).add("a", 1) == store(agent, 2).add("a", 1) == 1, "generations are apart"
        assert agent.stop() == {"it does not know the token of this run": 1}


def test_a_request_whose_connection_ended_is_repeated_and_counts_once() -> None:
    with meeting.agent() as agent:
        ours = store(agent)
        assert ours.add("n", 1) == 1
        ours._idle[0]._socket.shutdown(socket.SHUT_RDWR)
        assert ours.add("n", 1) == 2
        for _ in range(2):  # the answer was lost, or the connection ended after it was given
            channel = BlockingChannel(agent.address, meeting.TOKEN, frames.CONTROL)
            channel.send({"store": 1})
            channel.send({"op": "add", "key": "n", "value": 1, "id": "the same"})
            assert channel.receive(60.0) == {"value": 3}
            channel.close()
        assert ours.add("n", 1) == 4
        ours.close()


def test_an_agent_that_dies_or_was_never_there_is_noticed_at_once() -> None:
    with meeting.agent() as agent:
        ours = store(agent, timeout=36000.0)  # no test waits for that
        ours.set("a", "b")
        threading.Timer(0.2, agent.kill).start()
        for _ in range(2):
            with pytest.raises(ConnectionError, match=r"generation 1 at 127.* is out of reach"):
                ours.get("nobody")
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()
    with pytest.raises(ConnectionError, match="out of reach"):
        ControlStore(gone, "t", 1, 5.0).set("a", "b")


def test_an_interrupted_question_is_not_answered_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    class Halted(Exception):
        pass

    def halt(*_: Any) -> None:
        raise Halted

    with meeting.agent() as agent:
        ours = store(agent)
        ours.set("a", "a")
        before = signal.signal(signal.SIGUSR1, halt)
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(Halted):
                dist.PrefixStore("p", ours).get("later")  # through torch's C++ code, as in a rendezvous
        finally:
            signal.signal(signal.SIGUSR1, before)
        ours.set("p/later", "late")
        assert ours.get("a") == b"a" and ours.get("p/later") == b"late"
        ours.close()


def _rank(function: Callable[..., Any], rank: int, ranks: int, address: Address, pipe: int) -> None:
    """One forked rank; it says what came of it and when."""
    use_loopback_only()
    try:
        mesh = connect(Place(rank=rank, ranks=ranks, store=address, token=meeting.TOKEN, generation=4), "cpu", 30.0)
        said = function(mesh)
        disconnect(mesh)
    except (RuntimeError, OSError) as error:
        said = f"{type(error).__name__}: {error}"
    os.write(pipe, f"{time.time()} {said}\n".encode())


def _told(agent: meeting.Agent, function: Callable[..., Any], ranks: int, absent: int = 0, then: Any = None) -> list[list[str]]:
    reading, writing = os.pipe()
    pids = [fork(_rank, function, rank, ranks, agent.address, writing) for rank in range(ranks - absent)]
    os.close(writing)
    try:
        if then is not None:
            then()
        with open(reading) as pipe:
            return [line.rstrip("\n").split(" ", 1) for line in pipe]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _everything(mesh: Mesh) -> str:
    groups = [mesh.group_of(tuple(range(mesh.ranks)), use=f"use {n}") for n in range(3)]
    threads = [threading.Thread(target=lambda: [mesh.store_add("sum", 1) for _ in range(20)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    values = torch.full((2,), float(mesh.rank))
    for group in groups:
        dist.all_reduce(values, group=group.handle)
    for thread in threads:
        thread.join()
    mesh.store_set(f"rank {mesh.rank}", f"größe {mesh.rank}")
    words = [mesh.store_get(f"rank {rank}") for rank in range(mesh.ranks)]
    mesh.barrier()
    return f"{values.tolist()} {words} {mesh.store_add('sum', 0)}"


def test_ranks_meet_in_it_and_speak_through_it() -> None:
    with meeting.agent() as agent:
        said = _told(agent, _everything, 3)
        assert [text for _, text in said] == ["[27.0, 27.0] ['größe 0', 'größe 1', 'größe 2'] 180"] * 3
        assert agent.stop() == {}


def test_ranks_that_wait_for_one_who_never_comes_wake_when_the_generation_ends() -> None:
    ended: list[float] = []

    def end() -> None:
        looking = store(agent, 4)
        meeting.until(lambda: looking.num_keys() >= 2, "both have said where they are", 60.0)
        looking.close()
        time.sleep(0.3)  # by then both wait for the third
        ended.append(time.time())
        agent.end(4, "generation 4 is over: rank 2 has died")

    with meeting.agent() as agent:
        said = _told(agent, _everything, 3, absent=1, then=end)
    assert [text for _, text in said] == ["ConnectionError: generation 4 is over: rank 2 has died"] * 2
    assert all(ended[0] <= float(when) for when, _ in said), "before it was over"
