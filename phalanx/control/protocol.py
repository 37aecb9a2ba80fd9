"""The messages of the control plane, as frozen values.

The controller sends an `Order` to every agent; an agent passes some of them on to its ranks. A rank sends a `RankReport` to its agent,
which adds the rank and forwards it; agents send the other `Report`s themselves. `control/codec` turns messages into JSON tables.
"""

from __future__ import annotations

from dataclasses import field
from itertools import accumulate
from typing import Any

from phalanx.control.codec import Message
from phalanx.events.heartbeat import Beat
from phalanx.host.host_check import DeviceResult
from phalanx.host.host_report import HostReport
from phalanx.host.link_probe import LinkSpeed
from phalanx.recovery.diagnose import HangReport
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Run

RESUMABLE = 75
"""Exit code of a run that was asked to stop, has saved and can be resumed (EX_TEMPFAIL)."""
NOT_SAVED = 130
"""Exit code of a run that was asked to stop and has not saved: it was asked twice, or saves no checkpoints."""


def stop_code(run: Run) -> int:
    """Exit code of a run that was asked to stop once."""
    return RESUMABLE if run.resumable else NOT_SAVED


# --- values inside messages -----------------------------------------------------------------------------------------


class RankFailure(Message):
    """Why a rank failed, or was killed."""

    cause: str = "failed"
    reason: str
    traceback: str = ""
    expected: bool = False
    """The rank itself says that the run cannot continue, for example because nothing can be saved."""


class StateSource(Message):
    """Where a generation finds its state: replicas in host memory, or the newest checkpoint on disk."""

    in_memory: bool
    newest_step: int | None = None
    """States after this step are wrong: their checkpoints are removed. None: no limit."""
    generation: int = 0
    step: int = 0
    ranks: int = 0
    """Memory: which replicas. `ranks` is the number of parts they consist of."""
    servers: list[list[Any]] = field(default_factory=list)
    """Memory: host and port of every replica server."""


class WorkerInfo(Message):
    """What an agent tells a new controller about one of its worker processes."""

    rank: int | None
    generation: int
    exit_code: int | None
    """The exit code that the rank announced; None while it works."""


class NodeInfo(Message):
    """What a node publishes. Never contains the token."""

    name: str
    """Number of the node, and what distinguishes this start of its agent from others."""
    address: list[Any]
    """Host and port of its agent."""
    pid: int


class Outcome(Message):
    """How the run ended. `reason` is None unless it failed."""

    code: int
    reason: str | None = None
    rank: int | None = None
    traceback: str = ""
    recorded: bool = False
    """The failure is in events.jsonl."""
    nodes: list[int] = field(default_factory=list)
    """Nodes that were there at the end."""


class Report(Message):
    """Base class of what agents send to the controller."""


# --- between a launcher and its agents (also Stop to an agent, and Outcome and Record back) ---------------------------


class AgentSettings(Message):
    """What an agent needs to know: the first message of its launcher."""

    run_dir: str
    launch: str
    """Identifies this launch. In control/launch of the run directory: a host that does not see it there makes a directory of its own."""
    files: dict[str, str]
    """The run file and the plan, by name, for such a directory."""
    registry: str
    """Where the nodes meet: "folder", in the run directory, which all of them see; or "launcher"."""
    node: int = 0
    nodes: int
    slots: int
    """Ranks that a node can run."""
    hosts: int = 1
    """Computers that the training nodes are on, all like this one."""
    token: str
    bind: str
    topology: str = ""
    """Where the host is in the network, from the outermost switch. Ranks fill hosts in this order."""
    chaos: str
    environment: dict[str, str]
    """Variables of the launcher's environment that a host gets which does not set them itself."""
    parent: int | None
    """Process id of the launcher, if it is on this machine. The agent ends with it."""
    data: str = ""
    """Fingerprint of the run's data; empty: unknown."""
    data_opened: bool = False
    """The run's data was opened on this host, so that its token files are there."""


class Leave(Report):
    """The launcher, and then the agent to the controller: this host goes away. The run moves its ranks elsewhere before."""

    reason: str
    seconds: float | None = None
    """Until then; None: as soon as the run does not need it."""


class NodeAway(Message):
    """Injected fault: the node is lost and returns after this time; None: never."""

    seconds: float | None


class Announce(Message):
    """A node publishes its name and address."""

    info: NodeInfo


class ClaimTerm(Message):
    """A node wants to be the author of a term."""

    term: int
    author: str


class TermClaimed(Message):
    """The answer to `ClaimTerm`."""

    term: int
    granted: bool


class OfferTerm(Message):
    """The author of this term lets others claim the next one at once."""

    term: int


class Touch(Message):
    """The controller shows a sign of life."""


class AskHistory(Message):
    """A new controller asks for the records of this launch."""


class History(Message):
    """The records of this launch, as lines of events.jsonl."""

    lines: list[str]


class LogText(Message):
    """New text of a log file of a host that does not share the run directory."""

    name: str
    text: str
    time: float


class RegistryState(Message):
    """What the launcher knows: sent on each change, and regularly as its own sign of life."""

    term: int
    author: str
    offered: int
    """The newest term that its author has offered; 0: none."""
    nodes: dict[str, NodeInfo | None]
    """None: the node is gone."""
    all_nodes: bool = True
    """`nodes` are all of them; else those that have changed since the last message."""
    touches: int
    """Signs of life of the author so far."""


# --- orders: controller to agents -----------------------------------------------------------------------------------


class Order(Message):
    """Base class of the controller's messages."""

    term: int = 0
    """Term of the controller; set when the order is sent."""


class ControllerAlive(Order):
    """Heartbeat of the controller."""

    recorded: int
    """Records that have arrived on this connection."""


class ClockAnswered(Order):
    """Answer to `ClockAsked`."""

    node: int
    """Of the controller."""
    asked: float
    """As it was asked."""
    now: float
    """Seconds of the controller's monotonic clock."""


class CheckHost(Order):
    """Before the first generation: report what the host is (`HostChecked`), and what each of its devices computes (`Computed`)."""

    compute: str
    """Number format to compute in; empty: compute nothing."""
    device: str
    """Kind of device that the ranks use."""


class MeasureLinks(Order):
    """Before the first generation: the first node of each pair measures its link to the second, and reports `LinkMeasured`."""

    pairs: list[list[int]]
    addresses: dict[str, list[Any]]
    """Host and port of each node's `LinkServer`."""
    seconds: float
    """In each direction."""


class KeepWorkers(Order):
    """To one node, before `BeginGeneration`: its processes that become ranks of that generation, by rank. The others are new."""

    generation: int
    names: dict[str, str]


class BeginGeneration(Order):
    """Start a generation of ranks. The same message goes to all nodes, so that it is encoded once."""

    generation: int
    plan: Plan
    nodes: list[list[int]]
    """Nodes in the order of ranks, each with the number of ranks that are next to each other there."""
    source: StateSource
    store: list[Any]
    """Host and port of the generation's key-value store."""
    copy_every: int | None
    """Steps between two replicas of the state in host memory."""
    save_only: bool
    """The ranks restore, save and end."""
    author: int
    """Node of the controller."""
    injected: list[int] = field(default_factory=list)
    """Faults of `--chaos` that have happened, by number."""

    @property
    def assignment(self) -> tuple[int, ...]:
        """Node of each rank."""
        return tuple(node for node, ranks in self.nodes for _ in range(ranks))

    @property
    def ranks(self) -> int:
        return sum(ranks for _, ranks in self.nodes)

    def ranks_on(self, node: int) -> list[int]:
        """The ranks of a node: of a few thousand nodes, each needs its own only."""
        ends = accumulate(ranks for _, ranks in self.nodes)
        runs = zip(self.nodes, ends, strict=True)
        return [rank for (place, ranks), end in runs if place == node for rank in range(end - ranks, end)]


class Halt(Order):
    """The generation is over: ranks abandon their step and report their `SurvivorReport`."""

    generation: int


class HandOff(Order):
    """The contributors bring their state to the newest step and copy it into host memory for the next generation."""

    generation: int
    spans: list[list[int]]
    """The contributors, which are nearly all ranks: first and last of those that follow each other."""
    newest: SurvivorReport
    """Of a rank that has applied the step, with what the others need to apply it. This rank writes step records which may have been
    lost with rank 0."""

    @property
    def contributors(self) -> list[int]:
        return [rank for first, last in self.spans for rank in range(first, last + 1)]


class Pause(Order):
    """Ranks stop after the current step, so that the run can change its layout."""

    generation: int


class Kill(Order):
    """Kill these ranks, for the given reason."""

    generation: int
    ranks: list[int]
    failure: RankFailure | None = None


class LocateRanks(Order):
    """Every rank reports its `RankLocation`."""

    generation: int
    question: int


class Inspect(Order):
    """Agents inspect the processes of these ranks from outside, and report their `RankLocation`."""

    generation: int
    question: int
    ranks: list[int]


class Evict(Order):
    """The run continued without this node: it kills its workers."""


class HandOver(Order):
    """The controller is leaving and has offered its term: another node leads from now on, and it joins."""


class Release(Order):
    """The run does without this node, which is leaving: its agent ends."""


class Stop(Order):
    """Save and end."""

    reason: str


class Done(Order):
    """The run is over."""

    outcome: Outcome


# --- orders: agent to rank (also BeginGeneration as BeginRank, Halt, HandOff, Pause, Stop, LocateRanks) ---------------


class BeginRank(Message):
    """Become a rank of a generation."""

    begin: BeginGeneration
    place: Place
    heartbeat: str
    """Path of the heartbeat page."""
    chaos: str


class Compute(Message):
    """Compute what `CheckHost` asks for, and report `Computed` for each kind of device."""

    slot: int
    devices: list[str]
    compute: str
    wrong: bool
    """Injected fault: the result is wrong by one bit."""


class PrepareData(Message):
    """Open the run's data, which makes the token files that this host does not have, and report `DataPrepared`."""

    fingerprint: str
    """Of the data as others have it; empty: unknown."""


class CutConnections(Message):
    """Injected fault: shut down all TCP connections of the process once."""


# --- reports: rank to agent to controller ---------------------------------------------------------------------------


class RankReport(Report):
    """Base class of what ranks report."""

    generation: int
    rank: int = -1
    """Set by the agent."""


class RankRestored(RankReport):
    """The rank has restored the state after `step`."""

    step: int
    from_memory: bool = True
    """False: from a checkpoint on disk, which may be newer than the state in memory that the order names; or it began at step 0."""


class FirstStepDone(RankReport):
    """The first step of the generation is complete."""


class RankPaused(RankReport):
    """The rank stopped after a step, as ordered by `Pause`."""


class RankEnded(RankReport):
    """The rank is done and exits with this code."""

    code: int


class ConnectionLost(RankReport):
    """The rank failed with a secondary error: another rank, or a connection, was lost."""

    reason: str


class ReplicasDiffer(RankReport):
    """Replicas that must be equal differ."""

    culprits: list[int]
    """Ranks with wrong values; empty if unknown."""
    what: str
    """"weights", "optimizer" or "gradients"."""
    last_valid: int | None
    """Newest step whose state is right on every rank that is no culprit; None: the one that the generation restored."""
    reason: str


class SurvivorReport(RankReport):
    """The state that a rank holds after its generation ended."""

    step: int | None
    """The state is the one after this step; None: no usable state."""
    prepared: bool = False
    """The rank can still apply the next step."""
    divisor: float | None = None
    bad: float | None = None
    """What the last step was applied with."""
    rewinds: int = 0
    """Rollbacks so far. Of two states, the one with more rollbacks is newer."""


class HandedOff(RankReport):
    """The rank has carried out `HandOff`."""

    covered: bool
    """The contributors hold all tensors of this pipeline rank, and its share is in host memory."""


class RankFailed(RankReport):
    """The rank failed and ends."""

    failure: RankFailure


class RankLocation(RankReport):
    """What the rank is doing, by its own answer or as seen from outside."""

    question: int
    report: HangReport


# --- reports: agent to controller -----------------------------------------------------------------------------------


class Join(Report):
    """A node joins, with everything that a new controller must know about it."""

    node: int
    name: str
    slots: int
    topology: str = ""
    replica_server: list[Any]
    workers: dict[str, WorkerInfo]
    last_begin: BeginGeneration | None
    """The order that began the newest generation known to the node."""
    step: int | None
    """Newest complete step of its ranks."""
    stopping: str | None
    leaving: Leave | None = None
    preparing: bool = False
    """Its ranks cannot start yet: `DataPrepared` follows."""
    problem: str = ""
    """Of the run's data on this host."""


class HostChecked(Report):
    """The host of a node, and where its links can be measured."""

    report: HostReport
    link_server: list[Any]


class Computed(Report):
    """What one device has computed."""

    result: DeviceResult


class LinkMeasured(Report):
    """The link of a node to another."""

    peer: int
    speed: LinkSpeed | None
    """None: they cannot connect."""
    problem: str = ""


class DataPrepared(Report):
    """The ranks of this node can read the run's data, unless there is a problem."""

    problem: str = ""


class RanksBegan(Report):
    """The processes of this node's ranks, by rank."""

    generation: int
    names: dict[str, str]


class RankDied(Report):
    """The process of a rank is gone."""

    rank: int
    generation: int
    code: int
    failure: RankFailure | None = None
    step: int | None = None
    """Last complete step, if its heartbeat tells."""


class Beats(Report):
    """Heartbeats of this node's ranks, by rank; an empty one is the heartbeat of the node itself."""

    beats: dict[str, Beat]


class ClockAsked(Report):
    """A node asks what time it is on the controller's monotonic clock."""

    at: float
    """Seconds of its own."""


class Record(Report):
    """A record of a rank or an agent, as a line of events.jsonl."""

    line: str
    generation: int | None = None
    """Of the rank; None: the record of an agent."""
    if_new: bool = False
    """Only if there is no record of that step."""


class Reports(Report):
    """Reports of a node that came together, in their order: thousands of ranks report at the same moment."""

    reports: list[Any]


class StopAsked(Report):
    """A node was asked to save and end, which the whole run does then."""

    reason: str


class ReplicaServerMoved(Report):
    """The node's replica server was restarted and listens elsewhere."""

    address: list[Any]
