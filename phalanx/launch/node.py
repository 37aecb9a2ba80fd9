"""One node of a run whose processes an engine such as srun has started, one per host. Node 0 prepares the run for all.

Node 0 gives the others the settings of their agents, with the token, where they meet (`launch/rendezvous`). Every node runs its agent, and starts
it again when it dies, until the run is over.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from phalanx.control.protocol import RESUMABLE, AgentSettings, NodeAway, Outcome, Stop
from phalanx.events.records import encode
from phalanx.events.rundir import RunDir
from phalanx.host.env import NodePlace, pod_name
from phalanx.host.interfaces import address_of, address_towards
from phalanx.host.probe import this_machine
from phalanx.host.process_tree import stop_signals, unblock_stop_signals
from phalanx.launch.agent_process import AgentProcess
from phalanx.launch.job import agent_settings, first_events
from phalanx.launch.launcher import StartedAgent
from phalanx.launch.prepare import Request, prepare
from phalanx.launch.prepare_program import prepare_program
from phalanx.launch.rendezvous import FolderRendezvous, Rendezvous
from phalanx.launch.slurm import end_job
from phalanx.spec.errors import RunError
from phalanx.spec.load import load, loads
from phalanx.spec.plan import Machine
from phalanx.spec.run import Run
from phalanx.watch.sink_process import SinkProcess

_PREPARATION_TIMEOUT = 7 * 86400.0  # seconds that the other nodes wait for node 0, which may tokenize a large corpus
_POLL = 0.1  # seconds between two looks at the agent
_SIGN_OF_LIFE = 10.0  # seconds between two signs of life for the engine
_RESTART = 5.0  # seconds until a dead agent is started again
_SHORT_LIVED = 20.0  # seconds: an agent that dies sooner has not worked
_SINK_SECONDS = 1.0  # between two looks which host the sinks belong to
_ATTEMPTS = 3  # at starting an agent that does not work


LOST = 70
"""Exit code of a node whose agent cannot be kept running: the run continues without it."""


class Everywhere:
    """The launcher of a run whose agents are started by `run_node`, on hosts that are all like this one. Implements `launch/launcher.Launcher`."""

    restart_after: float | None = None

    def __init__(self, run: Run, nodes: int, registry: str):
        self.nodes, self.registry, self.hosts = nodes, registry, max(1, nodes - run.resilience.spares)

    def machine(self) -> Machine:
        return this_machine().times(self.hosts)

    def check(self, rundir: RunDir) -> None:
        """The hosts have shown that they see the run directory by reading their settings there."""

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        return AgentProcess(settings, log)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of `phalanx node`."""

    bind: str | None = None
    chaos: str = ""
    alive_file: Path | None = None
    """Touched every few seconds while this process runs."""


def run_node(directory: Path, place: NodePlace, options: NodeOptions, say: Callable[[str], None]) -> int:
    """Run this node until the run is over; returns the exit code."""
    if options.alive_file is not None:
        threading.Thread(target=_show_life, args=(options.alive_file,), daemon=True).start()
    rundir = RunDir(directory)
    meeting = _rendezvous(rundir, place)
    if (code := meeting.over()) is not None:
        return code
    settings = meeting.settings()
    if opened := settings is None and place.node == 0:
        settings = _prepare(rundir, place, options, meeting)
        meeting.publish(settings)
        say(f"prepared {directory} for {place.nodes} nodes")
    settings = settings or meeting.wait_for_settings(_PREPARATION_TIMEOUT)
    if settings is None:
        if (code := meeting.over()) is not None:
            return code
        raise RunError(f"Node 0 has not prepared {directory}: look at its output.")
    run = loads(settings.files[rundir.run_file.name], name=rundir.run_file.name)
    address = _address(run, place, options)
    own = replace(settings, node=place.node, bind=address, topology=place.topology, parent=os.getpid(), data_opened=opened)
    outcome = _Node(own, rundir, run, meeting, say).follow()
    if outcome is None:
        return LOST
    meeting.finish(settings, outcome)
    if outcome.reason is not None:
        say(outcome.reason)
    if 0 not in outcome.nodes and place.node == min(outcome.nodes, default=-1):
        end_job(place.launch, resumable=outcome.code == RESUMABLE)
    return outcome.code


def _rendezvous(rundir: RunDir, place: NodePlace) -> Rendezvous:
    engine, _, name = place.launch.partition("-")
    if engine != "kubernetes":
        return FolderRendezvous(rundir, place.launch)
    from phalanx.launch.kube_api import in_cluster
    from phalanx.launch.kube_rendezvous import KubeRendezvous

    return KubeRendezvous(in_cluster(), name, pod_name(), rundir, shared=place.shared)


def _show_life(file: Path) -> None:
    while True:
        file.touch()
        time.sleep(_SIGN_OF_LIFE)


def _prepare(rundir: RunDir, place: NodePlace, options: NodeOptions, meeting: Rendezvous) -> AgentSettings:
    if not rundir.request_file.is_file():
        raise RunError(
            f"{rundir.path} holds no request.toml: it is written by `phalanx train --on`, or by `phalanx node --run-file`."
        )
    run = load(rundir.request_file)
    run = replace(run, cluster=replace(run.cluster, nodes=place.nodes))
    launcher = Everywhere(run, place.nodes, meeting.registry)
    prepare_any = prepare if run.command.program is None else prepare_program
    prepared = prepare_any(run, rundir.path.name, Request(directory=rundir.path), started_by=launcher)
    for event in first_events(prepared):
        meeting.record(encode(replace(event, time=time.time())))
    if meeting.shared:
        rundir.launch_id = meeting.launch
    return replace(agent_settings(prepared, options.chaos), launch=meeting.launch)


def _address(run: Run, place: NodePlace, options: NodeOptions) -> str:
    """The address of this node: as given, of the interface that cluster.bind names, or the one from which it reaches the others."""
    given = options.bind or run.cluster.bind
    if (address := address_of(given)) is not None:
        return address
    if options.bind is None and place.peer is not None and given == "127.0.0.1":
        return address_towards(place.peer) or given
    return given


class _Node:
    def __init__(self, settings: AgentSettings, rundir: RunDir, run: Run, meeting: Rendezvous, say: Callable[[str], None]):
        self._settings, self._meeting, self._say = settings, meeting, say
        self._heartbeat = run.resilience.heartbeat
        rundir.create()
        self._log = rundir.logs / f"node-{settings.node}.log"
        given = run.resilience.node_return
        self._restart_after = _RESTART if given is None else given
        self._stop: str | None = None
        self._agent: AgentProcess | None = None
        self._run, self._rundir = run, rundir
        self._sinks: SinkProcess | None = None
        self._sinks_checked = 0.0

    def follow(self) -> Outcome | None:
        """Keep an agent running until the run is over. None: it cannot be kept running."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        unblock_stop_signals()
        short_lived = 0
        while True:
            begin = time.monotonic()
            outcome, away = self._live()
            if outcome is not None:
                if self._sinks is not None:
                    self._sinks.close()
                return outcome
            short_lived = short_lived + 1 if time.monotonic() - begin < _SHORT_LIVED else 0
            if short_lived == _ATTEMPTS or self._stop is not None:
                self._say(f"the agent of node {self._settings.node} has ended; see {self._log}")
                if self._sinks is not None:
                    self._sinks.kill()  # the run goes on without this host
                return None
            time.sleep(self._restart_after if away is None else away)

    def _live(self) -> tuple[Outcome | None, float | None]:
        """Follow one agent to its end; returns the outcome of the run, and for how long an injected fault keeps the node away."""
        self._meeting.follow(self._settings, self._heartbeat)
        self._agent = agent = AgentProcess(self._settings, self._log)
        if self._stop is not None:
            agent.send(Stop(reason=self._stop))
        outcome: Outcome | None = None
        away: float | None = None
        try:
            while True:
                ended = agent.poll() is not None
                for message in agent.receive():
                    if isinstance(message, Outcome):
                        outcome = message
                    elif isinstance(message, NodeAway):
                        away = float("inf") if message.seconds is None else message.seconds
                    else:
                        self._meeting.handle(message)
                if ended:
                    if outcome is None:
                        self._meeting.lose()
                    return outcome, away
                if self._stop is None and self._meeting.stop_requested():
                    self._stop = "phalanx stop"
                    agent.send(Stop(reason=self._stop))
                for message in self._meeting.messages():
                    agent.send(message)
                self._check_sinks()
                select.select([agent], [], [], _POLL)
        finally:
            self._agent = None
            agent.close()

    def _check_sinks(self) -> None:
        """The sinks of the run live on the host of the controller. If that is lost, they go on with the next one."""
        if time.monotonic() < self._sinks_checked + _SINK_SECONDS:
            return
        self._sinks_checked = time.monotonic()
        leads = self._meeting.leads(self._settings.node)
        if self._sinks is None and leads:
            self._sinks = SinkProcess.of(self._run, self._rundir)
        elif self._sinks is not None and leads:
            self._sinks.keep_running()
        elif self._sinks is not None:
            self._sinks.kill()
            self._sinks = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = signal.Signals(number).name
        if self._agent is not None:
            self._agent.send(Stop(reason=self._stop))
