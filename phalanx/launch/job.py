"""Starts a prepared run with its launcher, and follows it until it is over. Never imports torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from phalanx._version import __version__
from phalanx.checkpointing.replicas import shm_slots
from phalanx.control.protocol import NOT_SAVED, AgentSettings, NodeAway, Outcome, Stop
from phalanx.control.run_requests import RequestFiles
from phalanx.dashboard.summary import Summary
from phalanx.events.log import EventLog, EventReader, read_events
from phalanx.events.records import Event, RunStarted, Warned, WorkerFailed
from phalanx.host.interfaces import address_of
from phalanx.launch.launcher import StartedAgent
from phalanx.launch.prepare import Examined, Prepared
from phalanx.launch.registry_server import RegistryServer
from phalanx.spec.errors import RunFailed
from phalanx.watch.page_process import PageProcess
from phalanx.watch.sink_process import SinkProcess

_POLL = 0.1  # seconds between two reads of the event log
_STATE_SECONDS = 0.5  # between two messages with the state of the registry, which are also the launcher's sign of life
_DISK_CHECK = 1.0  # seconds between two checks whether the disk is full
_NEWS = 2.0  # seconds in which an agent learns that the run is over; one that is just starting, or cut off, does not
_SHUTDOWN = 20.0  # seconds that an agent has to clean up after the run is over


def first_events(prepared: Prepared | Examined) -> list[Event]:
    """The first records of a launch: what starts, and what the user should know about it."""
    run, plan = prepared.run, prepared.plan
    started = RunStarted(
        version=__version__,
        ranks=plan.ranks,
        device=plan.device,
        steps=0 if run.command.program else run.steps,
        parameters=plan.parameters,
        adapters=plan.trained,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        layout=asdict(plan.layout),
        compute=plan.compute,
        promise=plan.promise,
        program=list(run.command.program or ()),
        saves=run.resumable,
    )
    known = [event for event in (prepared.opened, prepared.changed) if event is not None]
    return [started, *known, *(Warned(message=notice) for notice in prepared.notices)]


def agent_settings(prepared: Prepared, chaos: str) -> AgentSettings:
    """The settings of node 0's agent, as a process of this one."""
    run, rundir, nodes = prepared.run, prepared.rundir, prepared.run.cluster.nodes
    return AgentSettings(
        run_dir=str(rundir.path.absolute()),
        launch=rundir.launch_id or "",
        files={path.name: path.read_text() for path in (rundir.run_file, rundir.plan_file)},
        registry=prepared.launcher.registry,
        nodes=nodes,
        slots=-(-prepared.plan.processes // max(1, nodes - run.resilience.spares)),
        hosts=prepared.launcher.hosts,
        token=secrets.token_hex(32),
        bind=address_of(run.cluster.bind) or run.cluster.bind,
        chaos=chaos,
        environment={},
        parent=os.getpid(),
        data=prepared.data,
    )


@dataclass(slots=True)
class _Node:
    agent: StartedAgent
    lost: float | None = None
    """When its death was noticed."""
    away: float | None = None
    """Seconds for which an injected fault keeps it away."""
    done: bool = False
    """It knows that the run is over, and cleans up."""


class Job:
    """A started run. Read `events()` to the end; then `exit_code` and `failure` are set.

    A thread follows the agents, and keeps their registry if they meet through the launcher: they need it however slowly events are read.
    """

    def __init__(self, prepared: Prepared, chaos: str = "", on_event: Callable[[Event], None] | None = None):
        """`on_event` is called with every event that is read."""
        self._on_event = on_event
        self.run, self.plan, self.rundir = prepared.run, prepared.plan, prepared.rundir
        self.exit_code: int | None = None
        self.failure: WorkerFailed | None = None
        self._outcome: Outcome | None = None
        self._forced = self._abandoned = False
        self._stops: SimpleQueue[str] = SimpleQueue()
        self._disk_full, self._disk_checked = False, time.monotonic()
        self._log = EventLog(self.rundir.events_file)
        self._reader = EventReader(self.rundir.events_file, offset=self.rundir.events_file.stat().st_size)
        for path in self.rundir.logs.glob("rank-*.error.json"):
            path.unlink()
        for event in first_events(prepared):
            self._log.emit(event)
        nodes = self.run.cluster.nodes
        self._launcher = prepared.launcher
        self._registry = (
            RegistryServer(self.rundir, self.run.resilience.heartbeat) if self._launcher.registry == "launcher" else None
        )
        self._requests = RequestFiles(self.rundir)
        self._told = 0.0
        """When the agents were last told the state of the registry."""
        self._settings = agent_settings(prepared, chaos)
        self._nodes = {number: self._start(number) for number in range(nodes)}
        self.page = PageProcess(self.rundir.path, self.rundir.logs / "page.log") if self.run.watch.page else None
        """The live page of the run, which ends with the job; None if the run file asks for none."""
        self._sinks = SinkProcess.of(self.run, self.rundir)
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._follow, name="launcher", daemon=True).start()

    def _start(self, number: int) -> _Node:
        return _Node(self._launcher.start(replace(self._settings, node=number), self._log_of(number)))

    def _log_of(self, number: int) -> Path:
        return self.rundir.logs / f"node-{number}.log"

    @property
    def _living(self) -> list[_Node]:
        return [node for node in self._nodes.values() if node.lost is None]

    def events(self) -> Iterator[Event]:
        """Yield every event as it happens until the run is over; then raise RunFailed if it failed."""
        try:
            for event in self._read():
                if self._on_event is not None:
                    self._on_event(event)
                yield event
        finally:
            self._abandoned = True
            self._ended.wait()
            self._log.close()
            self.rundir.release()
            if self.page is not None:
                self.page.close()
            if self._sinks is not None:
                self._sinks.close()
        if self._error is not None:
            raise self._error
        if self.failure is not None:
            raise RunFailed(describe_failure(self.failure, self.rundir.path))

    def wait(self) -> Summary:
        """Read all events until the run is over; returns its summary, such as `loss`, `eval_loss` and `checkpoint`. Raises RunFailed if it
        failed."""
        for _ in self.events():
            pass
        return Summary(read_events(self.rundir.events_file))

    def _read(self) -> Iterator[Event]:
        while not self._ended.wait(_POLL):
            yield from self._reader.new()
            yield from self._check_disk()
        yield from self._reader.new()
        if self._sinks is not None:
            self.rundir.release()  # the run is over, also for them
            self._sinks.close()
            yield from self._reader.new()  # what they have to say

    # --- the thread ---

    def _follow(self) -> None:
        """Follow the agents until the run is over, then clean up."""
        try:
            while self._outcome is None and not self._forced and not self._abandoned:
                select.select([node.agent for node in self._living], [], [], _POLL)
                self._receive()
                self._pass_stops()
                self._pass_requests()
                self._tell_state()
                if self._sinks is not None:
                    self._sinks.keep_running()
                if not self._check_nodes():
                    break
            if not self._abandoned:
                self._conclude()
        except BaseException as error:
            self._error = error
        finally:
            for node in self._nodes.values():
                node.agent.close()
            with contextlib.suppress(OSError):  # memory of nodes that were killed and could not free it themselves
                shm_slots.remove_stale(shm_slots.default_root())
            self._remove_control_files()
            if self._registry is not None:
                self._registry.close()
            self._ended.set()

    def _remove_control_files(self) -> None:
        """Remove terms and addresses, which are dangling links now and would break a copy of the run directory."""
        for pattern in ("launch", "term-*", "offer-*", "node-*", "ask.json", "top", "beats.json"):
            for path in self.rundir.control.glob(pattern):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # claims of injected faults stay, for those who count them
            self.rundir.control.rmdir()

    def _receive(self) -> None:
        for number, node in self._nodes.items():
            for message in node.agent.receive() if node.lost is None else ():
                if isinstance(message, NodeAway):
                    node.away = message.seconds or float("inf")
                elif isinstance(message, Outcome):
                    node.done = True
                    self._outcome = self._outcome or message
                elif self._registry is not None:
                    self._registry.handle(number, message, node.agent.send)

    def _tell_state(self) -> None:
        """Tell the agents the state of the registry, at once if it has changed."""
        if self._registry is not None and (self._registry.changed or time.monotonic() - self._told > _STATE_SECONDS):
            self._told, self._registry.changed = time.monotonic(), False
            for number, node in self._nodes.items():
                if node.lost is None:
                    self._registry.tell(number, node.agent.send)

    def _pass_stops(self) -> None:
        if self.rundir.stop_file.exists():
            self.rundir.stop_file.unlink(missing_ok=True)
            self._stops.put("phalanx stop")
        with contextlib.suppress(Empty):
            while reason := self._stops.get_nowait():
                if not any([node.agent.send(Stop(reason=reason)) for node in self._living]):
                    self._write(Warned(message=f"{reason} could not be passed on: the run has ended already."))

    def _pass_requests(self) -> None:
        """Pass requests such as that of `phalanx profile` to an agent, unless the controller sees the run directory itself."""
        if self._registry is not None:
            for request in self._requests.take():
                any(node.agent.send(request) for node in self._living)  # one of them is enough

    def _check_nodes(self) -> bool:
        """Notice lost nodes and restart those that shall return; returns whether any node is left or will return."""
        wait = self._launcher.restart_after
        for number, node in list(self._nodes.items()):
            if node.lost is None and node.agent.poll() is not None:
                self._receive()
                node.lost = time.monotonic()
                if self._registry is not None:
                    self._registry.lose(number)
            after = wait if node.away is None else node.away
            if node.lost is not None and after is not None and time.monotonic() - node.lost >= after:
                node.agent.close()
                self._nodes[number] = self._start(number)
        return any(node.lost is None or (node.away or wait) is not None for node in self._nodes.values())

    def _check_disk(self) -> Iterator[Event]:
        """Warn when the disk has filled up: the records of the workers then wait in their memory, where nobody sees them."""
        if time.monotonic() < self._disk_checked + _DISK_CHECK:
            return
        self._disk_checked = time.monotonic()
        before = self._disk_full
        with contextlib.suppress(OSError):
            self._disk_full = not shutil.disk_usage(self.rundir.path).free
        if self._disk_full and not before:
            yield Warned(
                message=f"The disk of {self.rundir.path} is full: training continues, but its steps are neither shown nor recorded, and "
                "nothing is saved there, until space is free again. Free some space."
            )

    def stop(self, reason: str = "SIGTERM") -> None:
        """Ask the workers to save and end. May be called by a signal handler."""
        self._stops.put(reason)

    def kill(self) -> None:
        """End the workers now, without saving."""
        self._forced = True
        for node in self._nodes.values():
            node.agent.kill()

    def _conclude(self) -> None:
        """The run is over, or all agents are gone: set `exit_code` and `failure`."""
        if self._forced:
            self.exit_code = NOT_SAVED
            return
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < _SHUTDOWN:
            self._receive()
            if not any(node.agent.poll() is None for node in self._nodes.values() if node.done or waited < _NEWS):
                break
            time.sleep(_POLL / 10)
        self._receive()
        outcome = self._outcome
        if outcome is None:
            number, node = next(iter(self._nodes.items()))
            log = self._log_of(number).read_text(errors="replace")[-4000:]
            reason = f"The supervisor of node {number} ended with exit code {node.agent.poll()}, and no other is left."
            self.failure = WorkerFailed(rank=None, reason=reason, traceback=log)
        elif outcome.reason is not None:
            self.failure = WorkerFailed(rank=outcome.rank, reason=outcome.reason, traceback=outcome.traceback)
        if self.failure is not None and not (outcome is not None and outcome.recorded):
            self._write(self.failure)
        self.exit_code = 1 if outcome is None or self.failure is not None else outcome.code

    def _write(self, event: Event) -> None:
        """Write to the log if possible: a full disk must not hide the failure that it caused."""
        with contextlib.suppress(OSError):
            self._log.emit(event)


def describe_failure(failure: WorkerFailed, path: Path) -> str:
    """A failure for people: the traceback of the rank that failed first, then what happened and where the logs are."""
    rank = "" if failure.rank is None else f"Rank {failure.rank} failed: "
    message = f"{rank}{failure.reason}\nThe run has ended; its logs are in {path / 'logs'}."
    return f"{failure.traceback.rstrip()}\n\n{message}" if failure.traceback else message
