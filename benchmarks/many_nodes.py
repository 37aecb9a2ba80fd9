"""What the control plane costs on thousands of nodes: light agents, with ranks that only exist on paper, join the real controller over real
connections, beat, lose nodes and recover.

    python benchmarks/many_nodes.py [--nodes 2048] [--ranks-per-node 8] [--lost 10] [--processes 4] [--in-memory]

Reports CPU time and messages of the controller per second while the run is steady, and for each loss the seconds until the controller has
noticed it, decided, and all ranks of the next generation have begun; and how long the controller, and the processes of the agents, were busy
at most without a look at their connections. With --in-memory there are no connections: messages are encoded, decoded and handed over in
one process, which two cores can do for 2,048 nodes, too. `lost`: connections end, as when processes die. `silent`: the nodes just say nothing
more, as behind a cut link. There is a spare for the first loss; after the second, the run shrinks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from phalanx.control import codec, protocol
from phalanx.control.channel import MAX_UNAUTHENTICATED, Channel, Listener
from phalanx.control.controller import Controller
from phalanx.control.election import LeaderClient, NodeServices, beat_seconds, rank_beat_seconds
from phalanx.control.recover import Replanner
from phalanx.events.frames import to_body
from phalanx.events.heartbeat import Beat
from phalanx.events.log import EventReader
from phalanx.events.records import Event, FailureNoticed, Recovered, RunStarted, encode
from phalanx.events.rundir import RunDir
from phalanx.host.host_check import DeviceResult
from phalanx.host.host_report import HostReport
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Gpu, Machine, Plan

RUN = """
[model]
preset = "llama3-8b"
[train]
batch = {batch}
sequence_length = 1024
steps = 1000000
[cluster]
gpu = "h100-sxm"
gpus = {gpus}
nodes = {nodes}
[resilience]
heartbeat = {heartbeat}
spares = {spares}
restarts = 100000
"""
TOKEN = "0" * 64
STEADY_SECONDS = 10.0
_STEP_SECONDS = 1.0  # of the ranks on paper


def one_node() -> Machine:
    """A node of the cluster that is simulated."""
    gpu = Gpu(name="NVIDIA H100 80GB HBM3", memory=80 << 30)
    return Machine(host="node", cpu="some", cores=96, memory=1 << 40, gpus=(gpu,) * 8)


class CountingController(Controller):
    """Counts messages by their names."""

    def __init__(self, agent: NodeServices, term: int, count: Counter[str]):
        super().__init__(agent, term)
        self._replanner = Replanner(agent.run, agent.plan, lambda: one_node().times(agent.hosts))
        self._count = count

    def receive(self, node: int, report: protocol.Report, channel: Channel | None = None) -> None:
        self._count[f"received {type(report).__name__}"] += 1
        super().receive(node, report, channel)

    def order(self, order: protocol.Order, only: int | None = None) -> None:
        self._count[f"sent {type(order).__name__}"] += len(self.state.members) if only is None else 1
        super().order(order, only)


class LightAgent(NodeServices):
    """The agent of a node whose ranks are numbers. `count` receives the name of each message that its controller handles."""

    def __init__(self, settings: protocol.AgentSettings):
        super().__init__(settings)
        self.slots, self._bind = settings.slots, settings.bind
        self._controller: Controller | None = None
        self._leader = LeaderClient(self, self._lead)
        self._ranks: list[int] = []
        self._generation, self._began = -1, 0.0
        self.last_begin: protocol.BeginGeneration | None = None
        self.count: Counter[str] = Counter()
        self.silent = False
        self.connection: InMemory | None = None
        self._told_ranks = 0.0
        self._own: list[asyncio.Task[Any]] = []

    async def live(self) -> None:
        limit = max(MAX_UNAUTHENTICATED, 2 * self.nodes)
        self._listener = Listener(self._bind, TOKEN, self._on_connection, self.on_refused, limit=limit)
        self.address = self._listener.address
        self.registry.announce(self.node, protocol.NodeInfo(name=self.name, address=list(self.address), pid=os.getpid()))
        self._own = [self.spawn(self._leader.follow()), self.spawn(self._send_beats())]

    async def lose(self) -> None:
        """End at once, as a killed process does."""
        for task in self._own:
            task.cancel()
        if self.connection is not None:
            self.connection.end()
        else:
            await self._listener.close()

    def join_in_memory(self, controller: Controller) -> None:
        self.connection = InMemory(self, controller)
        controller.receive(self.node, codec.decode(json.loads(to_body(codec.encode(self.join_report())))), self.connection)
        self._own = [self.spawn(self._send_beats())]

    @property
    def leads(self) -> Controller | None:
        return self._controller

    async def _on_connection(self, channel: Channel) -> None:
        join = codec.decode(await channel.receive())
        if isinstance(join, protocol.Join) and self._controller is not None:
            await self._controller.serve_member(channel, join)

    async def _lead(self, term: int) -> None:
        self._controller = controller = CountingController(self, term, self.count)
        self.records.connect(controller.record)
        try:
            controller.receive(self.node, self.join_report())
            await controller.lead()
        finally:
            self.records.connect(None)
            self._controller = None

    def join_report(self) -> protocol.Join:
        workers = {
            f"{self.node}.{rank}": protocol.WorkerInfo(rank=rank, generation=self._generation, exit_code=None)
            for rank in self._ranks
        }
        return protocol.Join(
            node=self.node,
            name=self.name,
            slots=self.slots,
            replica_server=["127.0.0.1", 1],
            workers=workers,
            last_begin=self.last_begin,
            step=self._step if self._ranks else None,
            stopping=None,
        )

    @property
    def _step(self) -> int:
        return int((time.monotonic() - self._began) / _STEP_SECONDS)

    def reachable(self, node: int) -> bool:
        return not self.silent

    def report(self, report: protocol.Report) -> None:
        if self.silent:
            return
        if self.connection is not None:
            self.connection.report(report)
        elif self._controller is not None:
            self._controller.receive(self.node, report)
        else:
            self._leader.send(report)

    async def _send_beats(self) -> None:
        while True:
            age = (time.monotonic() - self._began) % _STEP_SECONDS
            beat = Beat(self._step, "computing", age, _STEP_SECONDS, 0.5, self._step, self._generation)
            heartbeat, now = self.run.resilience.heartbeat, time.monotonic()
            with_ranks = now >= self._told_ranks + rank_beat_seconds(self.nodes, self.slots, heartbeat)
            self._told_ranks = now if with_ranks else self._told_ranks
            self.report(protocol.Beats(beats={str(rank): beat for rank in self._ranks} if with_ranks else {}))
            await asyncio.sleep(beat_seconds(self.nodes, heartbeat))

    def flush(self) -> None: ...

    def drop_link(self, node: int) -> None: ...

    def on_refused(self, address: str, reason: str) -> None: ...

    async def obey(self, order: protocol.Order) -> None:
        ours = self._ranks
        match order:
            case protocol.CheckHost():
                report = HostReport(
                    machine=one_node(),
                    versions={},
                    code="",
                    clock=time.time(),
                    addresses={},
                    reached_at=None,
                    sees_run_dir=True,
                    missing=(),
                    free_disk=1 << 40,
                    free_memory=1 << 40,
                )
                self.report(protocol.HostChecked(report=report, link_server=list(self.address)))
                for device in ("CPU", *(f"GPU {slot}" for slot in range(self.slots))):
                    self.report(protocol.Computed(result=DeviceResult(name=device, digest="same", flops=1e12)))
            case protocol.BeginGeneration():
                self.last_begin, self._generation, self._began = order, order.generation, time.monotonic()
                self._ranks = ours = order.ranks_on(self.node)
                names = {str(rank): f"{self.node}.{rank}" for rank in ours}
                self.report(protocol.RanksBegan(generation=order.generation, names=names))
                for kind in (partial(protocol.RankRestored, step=0), protocol.FirstStepDone):
                    for rank in ours:
                        self.report(kind(generation=order.generation, rank=rank))
            case protocol.Halt():
                for rank in ours:
                    state = protocol.SurvivorReport(generation=order.generation, rank=rank, step=0, divisor=1.0, bad=0.0)
                    self.report(state)
            case protocol.HandOff():
                for rank in set(ours) & set(order.contributors):
                    self.report(protocol.HandedOff(generation=order.generation, rank=rank, covered=True))


def settings_of(folder: Path, node: int, nodes: int, slots: int) -> protocol.AgentSettings:
    return protocol.AgentSettings(
        run_dir=str(folder),
        launch="many",
        files={},
        registry="folder",
        node=node,
        nodes=nodes,
        slots=slots,
        hosts=nodes,
        token=TOKEN,
        bind="127.0.0.1",
        chaos="",
        environment={},
        parent=None,
    )


class InMemory(Channel):
    """The connection of a controller to a light agent in the same process. What it orders is decoded once for all of them."""

    _decoded: ClassVar[dict[bytes, protocol.Order]] = {}

    def __init__(self, agent: LightAgent, controller: Controller):
        self._agent, self._controller, self._unsent = agent, controller, list[protocol.Report]()

    def post(self, message: dict[str, Any]) -> None:
        self.post_body(to_body(message))

    def post_body(self, body: bytes) -> None:
        if body not in self._decoded:
            self._decoded.clear()
            self._decoded[body] = codec.decode(json.loads(body))
        asyncio.get_running_loop().create_task(self._agent.obey(self._decoded[body]))

    def report(self, report: protocol.Report) -> None:
        """Reports that come together are one message, as `LeaderClient` sends them."""
        self._unsent.append(report)
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        reports, self._unsent = self._unsent, []
        body = to_body(codec.encode(reports[0] if len(reports) == 1 else protocol.Reports(reports=reports)))
        if not self._agent.silent:
            self._controller.receive(self._agent.node, codec.decode(json.loads(body)))

    def end(self) -> None:
        self._controller.lose_node(self._agent.node, "its agent is gone")

    def close(self) -> None: ...


class Pauses:
    """How long this process was busy at most, without a look at its connections, since the last question."""

    def __init__(self) -> None:
        self._longest = 0.0
        self.task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self._longest = max(self._longest, time.monotonic() - before - 0.01)

    def longest(self) -> float:
        longest, self._longest = self._longest, 0.0
        return longest


async def _live_in_memory(agents: list[LightAgent]) -> None:
    leader, *others = agents
    await leader.live()
    while (controller := leader.leads) is None:
        await asyncio.sleep(0.01)
    for agent in others:
        agent.join_in_memory(controller)
        await asyncio.sleep(0)


async def serve(folder: Path, first: int, last: int, nodes: int, slots: int, in_memory: int) -> None:
    """Run these nodes. Commands come on standard input: `lose 3 4`, `silence 3 4`, `usage`."""
    loop, commands = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    agents = {node: LightAgent(settings_of(folder, node, nodes, slots)) for node in range(first, last)}
    if in_memory:
        await _live_in_memory(list(agents.values()))
    else:
        for agent in agents.values():
            await agent.live()
    pauses = Pauses()
    while line := (await commands.readline()).decode().split():
        word, chosen = line[0], [agents[int(node)] for node in line[1:] if int(node) in agents]
        for agent in chosen:
            if word == "lose":
                await agent.lose()
            else:
                agent.silent = True
        if word == "usage":
            count = sum((agent.count for agent in agents.values()), Counter())
            told = {"cpu": time.process_time(), "time": time.monotonic(), "count": count, "pause": pauses.longest()}
            print(json.dumps(told), flush=True)
    os._exit(0)


class ManyNodes:
    """The processes of a simulated cluster. Node 0, the first controller, has one of its own."""

    def __init__(self, folder: Path, *, nodes: int, slots: int, spares: int, processes: int, heartbeat: float):
        """`processes`: for all but node 0; 0: one for all of them, in memory."""
        self.folder, self._events, self._unread = folder, EventReader(folder / "events.jsonl"), deque[Event]()
        training = nodes - spares
        rundir = RunDir(folder)
        rundir.create()
        rundir.launch_id = "many"
        count = training * slots
        values = {"batch": count, "gpus": count, "nodes": nodes, "spares": spares, "heartbeat": heartbeat}
        rundir.run_file.write_text(RUN.format(**values))
        layout = Layout(data=training * slots // 8, tensor=8) if slots == 8 else Layout(data=training * slots)
        plan = Plan(
            layout=layout,
            device="cuda",
            threads=1,
            micro_batch=1,
            accumulation=8,
            compute="bf16",
            parameters=8_000_000_000,
            flops_per_token=5e10,
            peak_flops=None,
        )
        rundir.plan_file.write_text(plan.to_json())
        started = RunStarted(
            time=time.time(),
            version="",
            ranks=plan.ranks,
            device="cuda",
            steps=1,
            parameters=1,
            micro_batch=1,
            accumulation=1,
            layout={},
            compute="bf16",
        )
        rundir.events_file.write_text(encode(started) + "\n")
        share = -(-(nodes - 1) // processes) if processes else 0
        ranges = (
            [(0, 1), *((first, min(nodes, first + share)) for first in range(1, nodes, share))] if processes else [(0, nodes)]
        )
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve", *map(str, (folder, first, last, nodes, slots, int(not processes)))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first, last in ranges
        ]

    def tell(self, *words: object) -> None:
        for process in self.processes:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(" ".join(map(str, words)) + "\n")
                process.stdin.flush()

    def usage(self) -> dict[str, Any]:
        """CPU seconds and messages of the controller so far. Pauses of the controller, and of the processes of the agents, since the last
        question."""
        answers: list[dict[str, Any]] = []
        self.tell("usage")
        for process in self.processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        return answers[0] | {"agents' pause": max((answer["pause"] for answer in answers[1:]), default=0.0)}

    def until(self, condition: Any, what: str, seconds: float = 300.0) -> list[Event]:
        """The new records up to the first that the condition holds for."""
        found, deadline = list[Event](), time.monotonic() + seconds
        while True:
            self._unread += self._events.new()
            while self._unread:
                found.append(self._unread.popleft())
                if condition(found[-1]):
                    return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:.0f} s for {what}")
            time.sleep(0.02)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def began(cluster: ManyNodes, nodes: int, seconds: float = 300.0) -> float:
    """Wait until the first generation has begun everywhere; returns the seconds that it took."""
    begin, wanted = time.monotonic(), 0
    while True:
        count = cluster.usage()["count"]
        wanted = count.get("received FirstStepDone", 0)
        if wanted >= nodes:
            return time.monotonic() - begin
        if time.monotonic() > begin + seconds:
            raise TimeoutError(f"{wanted} of {nodes} ranks began within {seconds:.0f} s: {count}")
        time.sleep(0.1)


def recovery_of(cluster: ManyNodes, lost: int) -> list[Event]:
    """Wait until this many nodes are lost and the run has recovered from each; returns the records, the last of which is the recovery. Nodes
    whose connections end one after another may be several failures, with a recovery each."""
    events: list[Event] = []
    nodes: set[int | None] = set()
    unrecovered: set[int] = set()
    while len(nodes) < lost or unrecovered:
        new = cluster.until(lambda event: isinstance(event, Recovered), "the recovery")
        for event in new:
            if isinstance(event, FailureNoticed):
                nodes.add(event.node)
                unrecovered.add(event.number)
            elif isinstance(event, Recovered):
                unrecovered -= set(event.failures)
        events += new
    return events


def measure(
    nodes: int, slots: int, lost: int, processes: int, *, steady: float = STEADY_SECONDS, heartbeat: float = 2.5
) -> dict[str, Any]:
    """Start, watch a steady run, and lose nodes twice. `heartbeat`: seconds of silence after which a node is lost."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = ManyNodes(Path(folder), nodes=nodes, slots=slots, spares=lost, processes=processes, heartbeat=heartbeat)
        try:
            result: dict[str, Any] = {"nodes": nodes, "ranks": (nodes - lost) * slots}
            result["start"] = began(cluster, (nodes - lost) * slots)
            print(f"{nodes} nodes have begun within {result['start']:.1f} s", file=sys.stderr, flush=True)
            before = cluster.usage()
            time.sleep(steady)
            after = cluster.usage()
            seconds = after["time"] - before["time"]
            sent = {name: (after["count"][name] - before["count"].get(name, 0)) / seconds for name in after["count"]}
            result["steady"] = {
                "controller CPU": (after["cpu"] - before["cpu"]) / seconds,
                "longest pauses": [after["pause"], after["agents' pause"]],
                "messages per second": {name: rate for name, rate in sent.items() if rate},
            }
            for number, word in enumerate(("lose", "silence")):
                # Not the controller's, and not next to each other.
                chosen = [1 + number + 2 * index for index in range(lost)]
                begin = time.time()
                cluster.tell(word, *chosen)
                events = recovery_of(cluster, lost)
                noticed = [event for event in events if isinstance(event, FailureNoticed)]
                recovered = events[-1]
                assert isinstance(recovered, Recovered)
                used = cluster.usage()
                print(f"{word}: recovered", file=sys.stderr, flush=True)
                result[word] = {
                    "nodes noticed": len({event.node for event in noticed}),
                    "action": recovered.action,
                    "ranks": recovered.ranks,
                    "noticed after": recovered.noticed - begin,
                    "decided after notice": recovered.decided - recovered.noticed,
                    "begun after notice": recovered.first_step - recovered.noticed,
                    "longest pauses": [used["pause"], used["agents' pause"]],
                }
            return result
        finally:
            cluster.close()


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        folder, *numbers = sys.argv[2:]
        asyncio.run(serve(Path(folder), *map(int, numbers)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--lost", type=int, default=10)
    parser.add_argument("--processes", type=int, default=4, help="processes that the agents share")
    parser.add_argument("--in-memory", action="store_true", help="no processes and connections")
    options = parser.parse_args()
    processes = 0 if options.in_memory else options.processes
    print(json.dumps(measure(options.nodes, options.ranks_per_node, options.lost, processes), indent=2))


if __name__ == "__main__":
    main()
