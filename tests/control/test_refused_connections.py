"""Strangers on the ports of a run: thousands of random, recorded and changed messages, while those who belong there go on working."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import meeting
import pytest
import torch
import torch.distributed as dist
from strangers import attack, recorded

from phalanx.events import frames
from phalanx.events.frames import Address, BlockingChannel
from phalanx.events.rundir import replace_file
from phalanx.host.env import use_loopback_only
from phalanx.parallel.mesh import connect
from phalanx.spec.plan import Place
from phalanx.verification.rank_pool import fork, serve_store

QUESTIONS = [{"store": 1}] + [{"op": "set", "key": f"recorded {number}", "value": "x" * 50} for number in range(4)]


class Honest(threading.Thread):
    """Someone of the run who asks all the time, on one connection or on a new one for each question, and notes whatever is odd."""

    def __init__(self, address: Address, name: str, anew: bool):
        super().__init__()
        self.address, self.key, self.anew = address, name, anew
        self.asked, self.odd, self.over = 0, "", threading.Event()

    def run(self) -> None:
        channel: BlockingChannel | None = None
        try:
            while not self.over.is_set():
                if channel is None:
                    channel = frames.BlockingChannel(self.address, meeting.TOKEN, frames.CONTROL)
                    channel.send({"store": 1})
                channel.send({"op": "add", "key": self.key, "value": 1})
                answer = channel.receive(10.0)
                self.asked += 1
                if answer != {"value": self.asked}:
                    self.odd = f"question {self.asked} was answered {answer}"
                    return
                if self.anew:
                    channel.close()
                    channel = None
                time.sleep(0.002)
        except Exception as error:
            self.odd = f"question {self.asked + 1}: {type(error).__name__}: {error}"
        finally:
            if channel is not None:
                channel.close()


@contextmanager
def at_work(address: Address) -> Iterator[list[Honest]]:
    """Three of the run, before, during and after what happens inside."""
    honest = [Honest(address, f"honest {number}", anew=number == 0) for number in range(3)]
    for one in honest:
        one.start()
    try:
        yield honest
    finally:
        for one in honest:
            one.over.set()
        for one in honest:
            one.join()


def on_the_way(address: Address, draw: random.Random) -> None:
    """Somebody on the way changes what passes after an honest proof."""
    sock, key = frames.connect(address, meeting.TOKEN, frames.CONTROL)
    with sock:
        seals = frames.MessageSealer(key, client=True)
        parts = [seals.pack({"store": 1}), *(seals.pack({"op": "set", "key": "way", "value": "good"}) for _ in range(3))]
        change = draw.randrange(5)
        if change == 0:
            place = draw.randrange(1, 4)
            changed = bytearray(parts[place])
            changed[draw.randrange(4, len(changed))] ^= 1 << draw.randrange(8)
            parts[place] = bytes(changed)
        elif change == 1:
            parts.insert(2, parts[1])
        elif change == 2:
            parts[1], parts[2] = parts[2], parts[1].replace(b"good", b"evil")
        elif change == 3:
            parts[2] = frames.MessageSealer(draw.randbytes(32), client=True).pack({"op": "set", "key": "way", "value": "evil"})
        else:
            parts[1] = struct.pack("!I", draw.randrange(frames.MAX_MESSAGE + 1, 1 << 32)) + parts[1][4:]
        with suppress(ConnectionError):
            sock.sendall(b"".join(parts))
            while sock.recv(4096):
                pass


def _campaign(strangers: int, changed: int) -> None:
    draw = random.Random(strangers)
    with meeting.agent() as agent, at_work(agent.address) as honest:
        conversation = recorded(agent.address, meeting.TOKEN, frames.CONTROL, QUESTIONS)
        attack(agent.address, 100, draw, conversation)  # what a process needs once, it has then
        meeting.until(lambda: agent.descriptors() < 30, "the first strangers are gone")
        memory, descriptors, most = agent.memory(), agent.descriptors(), [0]
        attacks = [(strangers // 2, random.Random(draw.random())) for _ in range(2)]
        threads = [threading.Thread(target=attack, args=(agent.address, *one, conversation)) for one in attacks]
        for thread in threads:
            thread.start()
        for _ in range(changed):
            on_the_way(agent.address, draw)
            most[0] = max(most[0], agent.descriptors())
        for thread in threads:
            while thread.is_alive():
                most[0] = max(most[0], agent.descriptors())
                thread.join(0.05)
        meeting.until(lambda: agent.descriptors() <= descriptors + 1, "no connection of a stranger is left")
        grown = agent.memory() - memory
        reached = [one.asked for one in honest]
        meeting.until(lambda: all(one.asked > before for one, before in zip(honest, reached, strict=True)), "all go on")
        channel = frames.BlockingChannel(agent.address, meeting.TOKEN, frames.CONTROL)
        channel.send({"store": 1})
        channel.send({"op": "get", "keys": ["way"], "timeout": 0})
        assert channel.receive(5.0) in (
            {"value": ["good"]},
            {"error": "waited 0 s for 'way', which nobody has set", "late": True},
        )
        channel.close()
        for one in honest:
            one.over.set()
            one.join()
        refused = agent.stop()
    assert [one.odd for one in honest] == [""] * 3
    assert min(one.asked for one in honest) > 20
    assert most[0] < descriptors + 64 + 40, f"{most[0]} descriptors at a time"
    assert grown < 16 << 20, f"{grown / 2**20:.1f} MiB more than before"
    sealed = sum(count for reason, count in refused.items() if "seal" in reason or "announced" in reason)
    assert sealed == changed and sum(refused.values()) >= strangers + 100 + changed, refused


def test_strangers_disturb_nobody() -> None:
    _campaign(2000, 100)


@pytest.mark.slow
def test_ten_thousand_strangers_disturb_nobody() -> None:
    _campaign(10_000, 500)


# --- torch's own sockets: gloo's listeners, and the store where no agent keeps one ------------------------------------


def _sum_on(rank: int, address: Address, beat: Path, over: Path) -> None:
    """A rank that sums with the others until it is told to end, and checks every sum."""
    use_loopback_only()
    mesh = connect(Place(rank=rank, ranks=3, store=address), "cpu", 60.0)
    groups = [mesh.group_of((0, 1, 2), use="one"), mesh.group_of((0, 1, 2), use="other")]
    step = 0
    while True:
        for group in groups:
            values = torch.full((1000,), float(step + rank))
            dist.all_reduce(values, group=group.handle)
            assert values.eq(3 * step + 3).all(), f"rank {rank}, step {step}: {values}"
        assert mesh.store_add(f"step {step}", 1) <= 3
        step += 1
        replace_file(beat, str(step))
        last = torch.tensor(float(over.exists()))
        if mesh.all_reduce(last) > 0:
            os._exit(0)


def _listening(pids: list[int]) -> list[Address]:
    """Ports on which these processes listen, from the kernel's tables."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [("127.0.0.1", int(row[1].split(":")[1], 16)) for row in rows if row[3] == "0A" and row[9] in inodes]


@pytest.mark.slow
def test_strangers_on_torchs_own_sockets_disturb_no_collective(tmp_path: Path) -> None:
    over, beats = tmp_path / "over", [tmp_path / f"beat-{rank}" for rank in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address: Address = listener.getsockname()
        pids = [fork(serve_store, *address, listener.fileno())]
    pids += [fork(_sum_on, rank, address, beats[rank], over) for rank in range(3)]
    try:
        meeting.until(lambda: all(beat.exists() for beat in beats), "the ranks have met", 60.0)
        ports = _listening(pids)
        assert address in ports and len(ports) >= 4, ports
        draw, before = random.Random(5), [int(beat.read_text()) for beat in beats]
        said = [draw.randbytes(draw.choice([8, 40, 64, 200])) for _ in range(20)]
        memory = [_memory(pid) for pid in pids]
        for port in ports:
            attack(port, 12_000 // len(ports), draw, (said, said), patience=0.01)  # none of them answers
        assert [os.waitpid(pid, os.WNOHANG) for pid in pids] == [(0, 0)] * 4, "all live"
        reached = [int(beat.read_text()) for beat in beats]
        assert all(now > then + 10 for now, then in zip(reached, before, strict=True)), (before, reached)
        assert all(_memory(pid) - then < 64 << 20 for pid, then in zip(pids, memory, strict=True))
        over.touch()
        assert [os.waitpid(pid, 0)[1] for pid in pids[1:]] == [0, 0, 0]
        del pids[1:]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
