"""Who decides: the agent that is the author of the newest term. Begins generations of ranks, notices what breaks, and carries out what
`recovery/policy` decides about it. Never loads torch.

Whatever it knows it has heard from the agents, so another can take over with what they tell it. Before each order it looks whether
its term is still the newest: a controller that was thought lost, and comes back, is obeyed by nobody and finds out itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phalanx.checkpointing.replicas import replica_index
from phalanx.control.channel import Channel
from phalanx.control.protocol import RESUMABLE
from phalanx.control.recover import Record, Recovery, Replanner, copy_every
from phalanx.control.startup import assemble
from phalanx.control.state import Generation, Message
from phalanx.control.store_server import KeyValueStore
from phalanx.control.watchdog import Watchdog
from phalanx.host.env import visible_gpus
from phalanx.host.probe import probe
from phalanx.recovery.state import Event, Failure, Node, NodeJoined, NodeLost, Situation, WorkerDied
from phalanx.spec.plan import Plan

if TYPE_CHECKING:
    from phalanx.control.agent import Agent

_ALIVE = 0.3  # seconds between two signs of life to the agents
_STALL = 1.0  # seconds without one, after which this process is taken to have stood still itself


@dataclass(slots=True)
class Member:
    """A node that has joined."""

    node: int
    name: str
    slots: int
    holder: tuple[str, int]
    link: Channel | None
    """None: this very agent."""
    heard: float


class Controller:
    """Of one term."""

    def __init__(self, agent: Agent, term: int):
        self.agent, self.term = agent, term
        self.run, self.settings = agent.run, agent.run.resilience
        self.members: dict[int, Member] = {}
        self.generation: Generation | None = None
        self.troubles: list[Event] = []
        """What has broken, or come, and is not dealt with."""
        self.history: tuple[Failure, ...] = ()
        self.dead: tuple[int, ...] = ()
        """Ranks without a process while the run waits for a node."""
        self.joined: set[int] = set()
        self.stop_asked: float | None = None
        self.wanted = agent.plan.layout
        self.replanner = Replanner(agent.run, agent.plan, lambda: probe(visible_gpus()))
        self.begun = 0
        """The step that this launch began from."""
        self.deposed = False
        self.awake = time.monotonic()
        """When this process last came back from standing still: before that, nobody else can be blamed."""
        self.failures = 0
        """So many have been noticed."""
        self.returned: set[int] = set()
        """Nodes that came while a recovery was under way."""
        self.saving = False
        """The present generation only saves."""
        self.copies: int | None = None
        """Steps between two copies of the state in memory."""
        self.recovering: Record | None = None
        """The recovery whose first step is still to come."""
        self._changed = asyncio.Event()
        self._ticked = time.monotonic()
        self.lasts: list[Message] = []
        self.joins: dict[int, Message] = {}

    # --- hearing ---

    async def member(self, link: Channel, first: Message) -> None:
        """A node's agent, as long as it lives."""
        node = int(first["node"])
        self.hear(node, first, link)
        with contextlib.suppress(ConnectionError):
            while True:
                self.hear(node, await link.receive())
        one = self.members.get(node)
        if one is not None and one.link is link:
            self._lose(node, "its supervisor is gone")

    def hear(self, node: int, message: Message, link: Channel | None = None) -> None:
        """What an agent reports."""
        what = message["report"]
        if what == "join":
            self._join(node, message, link)
        elif node in self.members:
            self.members[node].heard = time.monotonic()
            getattr(self, f"_{what}")(node, message)
        self._changed.set()

    def _join(self, node: int, message: Message, link: Channel | None) -> None:
        host, port = message["holder"]
        known = self.members.get(node)
        if known is not None and known.name != message["name"]:
            self._lose(node, "it was started again")
        self.members[node] = Member(node, message["name"], int(message["slots"]), (host, port), link, time.monotonic())
        self.joins[node] = message
        if message["last"] is not None:
            self.lasts.append(message["last"])
        if message["stopping"] is not None:
            self._stop(node, {"reason": message["stopping"]})
        current = self.generation
        if current is None:
            return
        # One that was deposed may have begun a generation of the same number.
        ours = message["last"] is not None and message["last"]["term"] == current.term
        workers = [one for one in message["workers"].values() if one["ended"] is None]
        if link is not None and any(not ours or one["generation"] != current.number for one in workers):
            link.post({"order": "evict", "term": self.term})
        elif known is not None and known.name == message["name"]:
            self._missed(node, {one["rank"] for one in message["workers"].values() if one["generation"] == current.number})
        self.joined.add(node)

    def _missed(self, node: int, ranks: set[int | None]) -> None:
        """A node is back on another connection, with these ranks: what it said in between was lost."""
        current = self.generation
        assert current is not None
        for rank, place in enumerate(current.assignment):
            if place == node and rank not in ranks and rank not in current.ended:
                failure = {"cause": "died", "reason": "it is gone, or was never begun", "traceback": ""}
                self._died(node, {"rank": rank, "generation": current.number, "code": 1, "failure": failure})

    def _said(self, node: int, message: Message) -> None:
        current = self.generation
        if message["say"] == "where":
            self.overseer.hangs.hear(message)
        elif current is not None and message["generation"] == current.number:
            current.hear(message)

    def _beats(self, node: int, message: Message) -> None:
        current, now = self.generation, time.monotonic()
        if current is not None:
            for rank, beat in message["beats"].items():
                if beat[0] == current.number:
                    current.beats[int(rank)] = now, beat

    def _holder(self, node: int, message: Message) -> None:
        """Its copies are kept by another process now."""
        host, port = message["address"]
        self.members[node].holder = (host, port)
        if self.generation is not None and self.copies is not None:
            self.agent.spawn(self._tell_peers(self.generation.assignment))

    def _inspected(self, node: int, message: Message) -> None:
        self.overseer.hangs.hear(message)

    def _began(self, node: int, message: Message) -> None:
        current = self.generation
        if current is not None and message["generation"] == current.number:
            current.names |= {int(rank): name for rank, name in message["names"].items()}

    def _died(self, node: int, message: Message) -> None:
        current = self.generation
        if current is None or message["generation"] != current.number or message["rank"] in current.dead:
            return
        rank = message["rank"]
        if message.get("step") is not None:
            current.completed.append(message["step"])
        died = self.overseer.died(rank, message)
        current.dead[rank] = died
        self.troubles.append(died)

    def _stop(self, node: int, message: Message) -> None:
        if self.stop_asked is None:
            self.stop_asked = time.monotonic()
            self.order({"order": "stop", "reason": message["reason"]})

    def _lose(self, node: int, reason: str) -> None:
        if self.members.pop(node, None) is None:
            return
        self.joined.discard(node)
        current = self.generation
        if current is None or node not in current.assignment:
            return
        for rank, place in enumerate(current.assignment):
            if place == node and rank not in current.dead:
                current.dead[rank] = WorkerDied(rank, current.step, "node lost", reason, node_lives=False)
        self.troubles.append(NodeLost(node, current.step, f"node {node}: {reason}"))
        self._changed.set()

    # --- ordering ---

    @property
    def leads(self) -> bool:
        """Whether this is still the newest term."""
        newest = self.agent.claims.newest()
        if newest != (self.term, self.agent.name):
            self.deposed = True
        return not self.deposed

    def order(self, message: Message) -> None:
        """To every node, as long as this is the newest term."""
        if not self.leads:
            return
        message = message | {"term": self.term}
        for member in self.members.values():
            if member.link is not None:
                member.link.post(message)
            else:
                self.agent.spawn(self.agent.obey(message))

    async def wait(self, seconds: float) -> None:
        """For something to be heard."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def until(self, met: Callable[[], bool], seconds: float) -> bool:
        """Whether it is so in time."""
        deadline = time.monotonic() + seconds
        while not met():
            left = deadline - time.monotonic()
            if left <= 0 or self.deposed:
                return False
            await self.wait(min(left, 0.25))
            self.look()
        return True

    def look(self) -> None:
        """Which nodes have fallen silent."""
        if self.stands_still:
            return  # what the others said waits to be heard
        now = time.monotonic()
        for member in list(self.members.values()):
            if member.link is not None and now - member.heard > self.settings.heartbeat:
                member.link.close()
                self._lose(member.node, f"no sign of life for {now - member.heard:.1f} s")

    @property
    def stands_still(self) -> bool:
        """Whether this process did, and has not come round to giving a sign of life since."""
        return time.monotonic() - self._ticked > _STALL

    def part_from(self, node: int) -> None:
        """A planted fault: that node is not heard any more."""
        if (member := self.members.get(node)) is not None and member.link is not None:
            member.link.close()
            self._lose(node, "its link is down")

    async def _alive(self) -> None:
        while True:
            self.agent.claims.touch(self.agent.node)  # first: whoever hears of life later looks whether more has come
            stood, self._ticked = self.stands_still, time.monotonic()
            if stood:
                self.awake = self._ticked
            for member in self.members.values():
                if stood:
                    member.heard = self._ticked
                if member.link is not None:
                    member.link.post({"order": "alive", "term": self.term})
            await asyncio.sleep(_ALIVE)

    # --- leading ---

    async def lead(self) -> None:
        """Until the run has ended, or another leads."""
        self.overseer = Watchdog(self)
        alive = asyncio.create_task(self._alive())
        try:
            await assemble(self)
            while self.agent.outcome is None and self.leads:
                if self._ended():
                    break
                if self.troubles or self.joined:
                    await Recovery(self).run()
                else:
                    await self.overseer.look()
                    await self.wait(0.25)
                self.look()
        finally:
            alive.cancel()
            for store in self.agent.stores.values():
                store.end("this generation is over: another node decides now")
            for member in self.members.values():
                if member.link is not None and self.deposed:
                    member.link.close()

    async def begin(
        self, plan: Plan, assignment: tuple[int, ...], names: dict[int, str | None], source: Message, *, save: bool = False
    ) -> None:
        """A new generation. `names`: of the survivors' processes, by their new rank. `save`: only to save what there is."""
        number = (self.generation.number + 1) if self.generation is not None else 0
        if self.generation is not None and self.generation.number in self.agent.stores:
            self.agent.stores[self.generation.number].end(f"generation {self.generation.number} is over")
        self.agent.stores[number] = KeyValueStore()
        self.copies = every = copy_every(self.run, plan, assignment)
        if every is not None:
            await self._tell_peers(assignment)
        self.generation = Generation(number, plan, assignment, self.term)
        self.order(
            {
                "order": "begin",
                "generation": number,
                "plan": asdict(plan),
                "ranks": [{"rank": r, "node": node, "worker": names.get(r)} for r, node in enumerate(assignment)],
                "source": source,
                "store": list(self.agent.address),
                "copy_every": every,
                "save": save,
                "author": self.agent.node,
            }
        )

    async def _tell_peers(self, assignment: tuple[int, ...]) -> None:
        holders = {node: self.members[node].holder for node in set(assignment) if node in self.members}
        await asyncio.to_thread(replica_index.set_peers, holders, self.agent.token)

    def situation(self) -> Situation:
        current = self.generation
        assert current is not None
        return Situation(
            wanted=self.wanted,
            layout=current.plan.layout,
            assignment=current.assignment,
            nodes=tuple(Node(one.node, one.slots) for one in sorted(self.members.values(), key=lambda one: one.node)),
            history=self.history,
            dead=self.dead,
            begun=self.begun,
            restarts=self.settings.restarts,
            shrink=self.settings.shrink,
            continue_degraded=self.settings.continue_degraded,
            batch=self.run.batch,
        )

    def take_troubles(self) -> list[Event]:
        """What has happened since this was asked last."""
        found, self.troubles = self.troubles, []
        found += [NodeJoined(node) for node in sorted(self.joined)]
        self.joined.clear()
        return found

    # --- the end ---

    def _ended(self) -> bool:
        current = self.generation
        if current is None or not current.complete:
            return False
        self.overseer.recovered(current)
        self.end(RESUMABLE if RESUMABLE in current.ended.values() else 0)
        return True

    def give_up(self, story: str | None, died: WorkerDied | None) -> None:
        """There is no way on: `story` says why, or the one that died does."""
        if story is None and died is not None:
            self.end(1, died.reason.removeprefix(f"rank {died.rank}: "), died.rank, died.traceback)
        else:
            self.end(1, story or "", traceback=died.traceback if died is not None else "")

    def end(self, code: int, reason: str | None = None, rank: int | None = None, traceback: str = "") -> None:
        """Tell everybody; this agent last."""
        outcome: dict[str, Any] = {"code": code, "reason": reason, "rank": rank, "traceback": traceback}
        for member in self.members.values():
            if member.link is not None:
                member.link.post({"order": "done", "term": self.term, "outcome": outcome})
        asyncio.get_running_loop().call_later(0.05, self.agent.finish, outcome)
        self.agent.outcome = outcome
