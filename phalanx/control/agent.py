"""The supervisor of one node: keeps its workers, its nursery and its copies in memory, and follows the controller; or is it. Never
loads torch, so it outlives what kills the workers.

    python -m phalanx.control.agent       with what it needs in a line of JSON on its standard input

It tells whoever started it how the run ended, in a line of JSON on its standard output, and takes orders on its standard input.
When that ends, as it does with the process that started it, so does the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.control import store_server
from phalanx.control.channel import Channel, listen
from phalanx.control.controller import Controller
from phalanx.control.election import LeaderClient, Terms
from phalanx.control.node_faults import NodeFaults
from phalanx.control.processes import ForkClient, ReplicaProcess, Worker, inspect_process
from phalanx.control.store_server import KeyValueStore
from phalanx.events import heartbeat
from phalanx.events.log import EventLog
from phalanx.events.records import Event, StrangerRefused, Warned
from phalanx.events.rundir import RunDir
from phalanx.host.process_tree import STOP_SIGNALS, adopt_orphans, die_with, unblock_stop_signals
from phalanx.spec.load import load
from phalanx.spec.plan import Plan

_BEAT = 0.2  # seconds between two signs of life
_TOLD = 5.0  # seconds between two records of refused strangers

Message = dict[str, Any]


class Agent:
    """One node of one run."""

    def __init__(self, given: Message):
        self.rundir = RunDir(Path(given["run_dir"]))
        self.node, self.nodes, self.slots = int(given["node"]), int(given["nodes"]), int(given["slots"])
        self.token, self.bind = str(given["token"]), str(given["bind"])
        self.chaos = str(given.get("chaos") or "")
        self.run, self.plan = load(self.rundir.run_file), Plan.from_json(self.rundir.plan_file.read_text())
        self.name = f"{self.node}-{secrets.token_hex(4)}"
        self.claims = Terms(self.rundir.control)
        self.log = EventLog(self.rundir.events_file)
        self.stores: dict[int, KeyValueStore] = {}
        """By generation: where its ranks meet, if this agent has begun it."""
        self.address: tuple[str, int] = ("", 0)
        self.last: Message | None = None
        """The order that began the newest generation."""
        self.workers: dict[str, Worker] = {}
        self.stopping: str | None = None
        self.outcome: Message | None = None
        """How the run ended."""
        self.controller: Controller | None = None
        self._follower = LeaderClient(self)
        self._count = 0
        self._keeping: asyncio.Task[Any] | None = None
        self._refused, self._refused_told = 0, 0.0
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._strikes = NodeFaults(self) if self.chaos else None
        self.nursery = ForkClient(self.rundir, self.plan)

    # --- the node's life ---

    async def live(self) -> None:
        """Until the run is over."""
        self.nursery.on_failure = self._barren
        self.nursery.start()
        # Beside torch's loading, which takes longer.
        self.keeper = await asyncio.to_thread(ReplicaProcess, self.rundir, self.node, self.bind, self.token)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        listener = await listen(self.bind, self.token, self._welcome, self._refuse)
        self.address = listener.address
        self.claims.announce(self.node, {"name": self.name, "address": list(self.address), "pid": os.getpid()})
        follow = self.spawn(self._follower.follow())
        beats = self.spawn(self._beat())
        await self._over.wait()
        for task in (follow, beats):
            task.cancel()
        self.nursery.close()
        await self._end_workers()
        await listener.close()
        self.keeper.close()
        if self._strikes is not None:
            self._strikes.close()
        self.log.close()

    def _barren(self, reason: str) -> None:
        """No worker can be started on this node."""
        if self.last is not None:
            os._exit(70)  # a lost node, as the others see it
        said, _, log = reason.partition("\n")
        self.finish({"code": 1, "reason": said, "rank": None, "traceback": log})

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """A task that is kept, and whose failure ends this process instead of passing unseen."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "a supervisor's task failed", "exception": error})
            os._exit(70)  # the others take it for what it is: a lost node

    async def _end_workers(self) -> None:
        for worker in self.workers.values():
            if not worker.gone.is_set():
                worker.kill()
        for worker in self.workers.values():
            await worker.gone.wait()

    def emit(self, event: Event) -> None:
        with contextlib.suppress(OSError):
            self.log.emit(event)

    def reached(self, node: int) -> bool:
        """Whether nothing that was planted keeps this node from that one."""
        return self._strikes is None or self._strikes.reached(node)

    def part_from(self, node: int) -> None:
        """A planted fault: the link to another node is down."""
        for worker in self.workers.values():
            worker.order({"order": "cut"})
        if self.controller is not None:
            self.controller.part_from(node)
        else:
            self._follower.part_from(node)

    # --- who decides ---

    def joining(self) -> Message:
        """What a controller has to know of this node."""
        workers = {
            worker.name: {"rank": worker.rank, "generation": worker.generation, "ended": worker.ended}
            for worker in self.workers.values()
            if not worker.gone.is_set() or worker.ended is not None
        }
        return {
            "report": "join",
            "node": self.node,
            "name": self.name,
            "slots": self.slots,
            "holder": list(self.keeper.address),
            "workers": workers,
            "last": self.last,
            "stopping": self.stopping,
        }

    def report(self, message: Message) -> None:
        """To whoever decides."""
        if self.controller is not None:
            self.controller.hear(self.node, message)
        else:
            self._follower.post(message)

    async def _welcome(self, link: Channel) -> None:
        """Somebody who knows the token: a rank that looks for its store, or a node that joins."""
        first = await link.receive()
        if "store" in first:
            await store_server.serve(link, self.stores, first)
        elif first.get("report") == "join" and self.controller is not None and self.reached(int(first["node"])):
            await self.controller.member(link, first)

    def _refuse(self, address: str, reason: str) -> None:
        """A stranger. Told once in a while: whoever scans ports must not fill the log."""
        self._refused += 1
        if time.monotonic() >= self._refused_told + _TOLD:
            self.emit(StrangerRefused(address=address, node=self.node, reason=reason, count=self._refused))
            self._refused, self._refused_told = 0, time.monotonic()

    # --- orders ---

    async def obey(self, message: Message) -> None:
        """An order of the controller."""
        what = message["order"]
        if what == "begin":
            await self._begin(message)
        elif what in ("halt", "hand over", "pause"):
            for worker in self._of(message["generation"]):
                if what != "hand over" or worker.rank in message["contributors"]:
                    worker.order(message)
        elif what == "kill":
            for worker in self._of(message["generation"]):
                if worker.rank in message["ranks"]:
                    worker.failure = message.get("failure")
                    worker.kill()
        elif what == "where":
            for worker in self._of(message["generation"]):
                worker.order(message)
        elif what == "inspect":
            for worker in self._of(message["generation"]):
                if worker.rank in message["ranks"]:
                    self.spawn(self._inspect(worker))
        elif what == "evict":  # this node's workers are of a generation that went on without them
            for worker in self.workers.values():
                worker.kill()
        elif what == "stop":
            self.stop(message["reason"])
        elif what == "done":
            self.finish(message["outcome"])

    def _of(self, generation: int) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.generation == generation and not worker.gone.is_set()]

    def finish(self, outcome: Message) -> None:
        self.outcome = outcome
        print(json.dumps({"outcome": outcome}), flush=True)
        self._over.set()

    async def _begin(self, order: Message) -> None:
        """This node's ranks of a new generation: survivors by name, others forked now. Whoever is in none ends."""
        self.last = order
        mine = {entry["rank"]: entry["worker"] for entry in order["ranks"] if entry["node"] == self.node}
        kept = {name for name in mine.values() if name is not None}
        for worker in self.workers.values():
            if worker.name not in kept and worker.ended is None:
                worker.kill()
        slots = iter(sorted(set(range(self.slots)) - {self.workers[name].slot for name in kept if name in self.workers}))
        fresh = [(rank, next(slots)) for rank, name in mine.items() if name is None]
        started = await asyncio.gather(*(self._fork(slot) for _, slot in fresh))
        if self.last is not order:  # it took long, and the next has begun
            for worker in started:
                worker.kill()
            return
        given = dict(zip((rank for rank, _ in fresh), started, strict=True))
        names = {rank: given[rank].name if name is None else name for rank, name in mine.items()}
        self.report({"report": "began", "generation": order["generation"], "names": names})
        for rank, name in mine.items():
            found = given[rank] if name is None else self.workers.get(name)
            if found is None or found.gone.is_set():
                self.report({"report": "died", "rank": rank, "generation": order["generation"], "code": -9, "failure": None})
                continue
            found.rank, found.generation = rank, order["generation"]
            found.order(self._place(order, found))
            if self.stopping is not None:
                found.order({"order": "stop", "reason": self.stopping})

    def _place(self, order: Message, worker: Worker) -> Message:
        """What one rank is told."""
        place = {
            "rank": worker.rank,
            "ranks": len(order["ranks"]),
            "local_rank": worker.slot,
            "store": order["store"],
            "holder": str(self.keeper.folder),
            "generation": order["generation"],
            "token": self.token,
            "node": self.node,
            "copy_every": order["copy_every"],
        }
        kept = {key: order[key] for key in ("generation", "plan", "source", "save")}
        return {"order": "begin", "place": place, "pulse": str(worker.heartbeat), "chaos": self.chaos} | kept

    async def _fork(self, slot: int) -> Worker:
        self._count += 1
        name = f"{self.node}.{self._count}"
        worker = await self.nursery.fork(name, slot, self.keeper.folder / f"pulse-{self._count}", self._said)
        self.workers[name] = worker
        self._reap()  # it may have died before it was known here
        return worker

    # --- what workers say and do ---

    def _said(self, worker: Worker, message: Message) -> None:
        what = message["say"]
        if what == "ended":
            worker.ended = message["code"]
        elif what == "failed":
            worker.failure = message
            return  # its end is what counts
        self.report({"report": "said", "rank": worker.rank} | message)

    async def _keep(self) -> None:
        """The process that keeps the copies is gone; what it kept is not."""
        try:
            await asyncio.to_thread(self.keeper.restart)
        except OSError as error:
            self.emit(Warned(message=f"Node {self.node} keeps no copies in memory any more: {error}."))
            return
        self.emit(Warned(message=f"The process that keeps node {self.node}'s copies in memory was lost, and started again."))
        self.report({"report": "holder", "address": list(self.keeper.address)})

    def _reap(self) -> None:
        """Somebody has died: see who."""
        if self.keeper.lost and (self._keeping is None or self._keeping.done()):
            self._keeping = self.spawn(self._keep())
        for worker in self.workers.values():
            if worker.gone.is_set():
                continue
            try:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = worker.pid, 1 << 8
            if pid:
                worker.bury()
                asyncio.get_running_loop().call_later(0.02, self._report_end, worker, os.waitstatus_to_exitcode(status))

    def _report_end(self, worker: Worker, code: int) -> None:
        """A moment later: what it said last may still be in its pipe."""
        if worker.ended is not None and worker.ended == code:
            return
        self.report(
            {
                "report": "died",
                "rank": worker.rank,
                "generation": worker.generation,
                "code": code,
                "failure": worker.failure,
                "step": worker.step,
            }
        )

    async def _inspect(self, worker: Worker) -> None:
        state, stack = await inspect_process(worker)
        self.report({"report": "inspected", "rank": worker.rank, "state": state, "stack": stack})

    async def _beat(self) -> None:
        """Signs of life, and what the ranks are at, as long as the node lives."""
        while True:
            now = time.monotonic()
            beats: dict[int, list[Any]] = {}
            for worker in self.workers.values():
                if worker.gone.is_set() or worker.rank is None or (beat := heartbeat.read(worker.heartbeat)) is None:
                    continue
                beats[worker.rank] = [
                    beat.generation, beat.step, beat.phase, now - beat.since, beat.step_seconds, beat.busy_seconds, beat.taken, beat.memory
                ]  # fmt: skip
            self.report({"report": "beats", "beats": beats})
            if self._strikes is not None:
                self._strikes.look(max((beat[1] for beat in beats.values()), default=-1))
            await asyncio.sleep(_BEAT)

    # --- from outside ---

    def stop(self, reason: str) -> None:
        """Save and end: told by whoever started this node, or by a signal."""
        if self.stopping is None:
            self.stopping = reason
            for worker in self.workers.values():
                worker.order({"order": "stop", "reason": reason})
            self.report({"report": "stop", "reason": reason})

    def hear(self, line: str) -> None:
        """A line from whoever started this process."""
        message = json.loads(line)
        if "stop" in message:
            self.stop(message["stop"])


async def _main(given: Message) -> None:
    agent = Agent(given)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, agent.stop, signal.Signals(number).name)
    unblock_stop_signals()
    follow_lines(loop, agent.hear)
    await agent.live()


def main() -> None:
    line = first_line()
    if line is None:
        return
    given = json.loads(line)
    die_with(int(given["parent"]))
    adopt_orphans()
    asyncio.run(_main(given))
    sys.stdout.flush()
    os._exit(0)


def first_line() -> bytes | None:
    """Byte by byte: what follows is read by the loop. None: nobody is there any more."""
    line = b""
    while not line.endswith(b"\n"):
        if not (one := os.read(0, 1)):
            return None
        line += one
    return line


def follow_lines(loop: asyncio.AbstractEventLoop, hear: Callable[[str], None]) -> None:
    """Every further line, as it comes. Their end ends this process at once, and the workers with it."""
    buffer = bytearray()

    def read() -> None:
        block = os.read(0, 65536)
        if not block:
            os._exit(1)
        buffer.extend(block)
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            hear(line.decode())

    loop.add_reader(0, read)


if __name__ == "__main__":
    main()
