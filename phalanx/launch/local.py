"""A job on this machine: starts an agent for each node, follows the run's events, and restarts lost nodes if the run file says so. Never
imports torch.

The agents (`control/agent`) do the rest. They and everything they have started die with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from phalanx._version import __version__
from phalanx.checkpointing.replicas import shm_slots
from phalanx.control.protocol import Outcome, decode
from phalanx.events.log import EventLog, EventReader
from phalanx.events.records import Event, RunStarted, Warned, WorkerFailed
from phalanx.events.rundir import RunDir
from phalanx.host.env import python_env
from phalanx.host.process_tree import stop_signals_blocked
from phalanx.launch.prepare import Prepared
from phalanx.launch.run_checks import ONE_NODE, check_replica_memory
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

FORCED_EXIT = 130
"""Exit code of a run that was ended at once without saving, after a second request to stop."""

_POLL = 0.1  # seconds between two reads of the event log
_DISK_CHECK = 1.0  # seconds between two checks whether the disk is full
_SHUTDOWN = 20.0  # seconds that an agent has to clean up after the run is over


class _Node:
    """The agent of one node, as its parent process sees it."""

    def __init__(self, number: int, settings: dict[str, Any], log: Path):
        self.number = number
        with log.open("ab") as file, stop_signals_blocked():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx.control.agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=python_env(),
                start_new_session=True,  # Ctrl-C reaches only the launcher, which asks all nodes to stop together
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.output: IO[bytes] = self.process.stdout
        self._buffer = b""
        self.lost: float | None = None
        """When its death was noticed."""
        self.away: float | None = None
        """Seconds for which an injected fault keeps it away."""
        # The token is not an argument: every user of the machine can read those.
        self.send(settings | {"node": number, "parent": os.getpid()})

    def send(self, message: dict[str, Any]) -> bool:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived, without waiting."""
        while select.select([self.output], [], [], 0)[0]:
            block = os.read(self.output.fileno(), 65536)
            if not block:
                break
            self._buffer += block
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Kill the agent, and with it everything it has started."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.output.close()


class Job:
    """A started run. Read `events()` to the end; then `exit_code` and `failure` are set."""

    def __init__(self, prepared: Prepared, chaos: str = ""):
        self.run, self.plan, self.rundir = prepared.run, prepared.plan, prepared.rundir
        self.exit_code: int | None = None
        self.failure: WorkerFailed | None = None
        self._outcome: Outcome | None = None
        self._forced = False
        self._disk_full, self._disk_checked = False, time.monotonic()
        try:
            check_replica_memory(self.run, self.plan)
        except RunError:
            self.rundir.release()  # nothing was started
            raise
        self._log = EventLog(self.rundir.events_file)
        self._reader = EventReader(self.rundir.events_file, offset=self.rundir.events_file.stat().st_size)
        _remove_stale_files(self.rundir)
        self._log.emit(run_started(self.run, self.plan))
        nodes = self.run.cluster.nodes
        alone = self.run.checkpoint.memory_every is not None and nodes == 1
        for notice in (*prepared.notices, *((ONE_NODE,) if alone else ())):
            self._log.emit(Warned(message=notice))
        self._settings = {
            "run_dir": str(self.rundir.path.absolute()),
            "nodes": nodes,
            "slots": -(-self.plan.ranks // max(1, nodes - self.run.resilience.spares)),
            "token": secrets.token_hex(32),
            "bind": self.run.cluster.bind,
            "chaos": chaos,
        }
        self._nodes = {number: self._start(number) for number in range(nodes)}

    def _start(self, number: int) -> _Node:
        return _Node(number, self._settings, self.rundir.logs / f"node-{number}.log")

    def events(self) -> Iterator[Event]:
        """Yield every event as it happens until the run is over; then raise RunFailed if it failed."""
        try:
            while self._outcome is None and not self._forced:
                select.select([node.output for node in self._nodes.values() if node.lost is None], [], [], _POLL)
                self._receive()
                yield from self._reader.new()
                yield from self._check_disk()
                if not self._check_nodes():
                    break
            self._conclude()
            yield from self._reader.new()
        finally:
            for node in self._nodes.values():
                node.close()
            with contextlib.suppress(OSError):  # memory of nodes that were killed and could not free it themselves
                shm_slots.remove_stale(shm_slots.default_root())
            self._remove_control_files()
            self._log.close()
            self.rundir.release()
        if self.failure is not None:
            raise RunFailed(describe_failure(self.failure, self.rundir.path))

    def _remove_control_files(self) -> None:
        """Remove terms and addresses, which are dangling links now and would break a copy of the run directory."""
        for path in (*self.rundir.control.glob("term-*"), *self.rundir.control.glob("node-*")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # claims of injected faults stay, for those who count them
            self.rundir.control.rmdir()

    def _receive(self) -> None:
        for node in self._nodes.values():
            if node.lost is None:
                for message in node.receive():
                    if self._outcome is None and "outcome" in message:
                        self._outcome = decode(message["outcome"])
                    if "away" in message:
                        node.away = message["away"] or float("inf")

    def _check_nodes(self) -> bool:
        """Notice lost nodes and restart those that shall return; returns whether any node is left or will return."""
        wait = self.run.resilience.node_return
        for number, node in list(self._nodes.items()):
            if node.lost is None and node.process.poll() is not None:
                self._receive()
                node.lost = time.monotonic()
            after = wait if node.away is None else node.away
            if node.lost is not None and after is not None and time.monotonic() - node.lost >= after:
                node.close()
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
                message=f"The disk of {self.rundir.path} is full: training goes on, but its steps are neither shown nor recorded, and "
                "nothing is saved there, until there is room again. Free some space."
            )

    def stop(self, reason: str = "SIGTERM") -> None:
        """Ask the workers to save and end."""
        if not any([node.send({"stop": reason}) for node in self._nodes.values() if node.lost is None]):
            self._write(Warned(message=f"{reason} could not be passed on: the run has ended already."))

    def kill(self) -> None:
        """End the workers now, without saving."""
        self._forced = True
        for node in self._nodes.values():
            if node.process.poll() is None:
                node.process.kill()  # its ranks die with it

    def _conclude(self) -> None:
        """The run is over, or all agents are gone: set `exit_code` and `failure`."""
        if self._forced:
            self.exit_code = FORCED_EXIT
            return
        deadline = time.monotonic() + _SHUTDOWN
        for node in self._nodes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.0, deadline - time.monotonic()))
        self._receive()
        outcome = self._outcome
        if outcome is None:
            node = next(iter(self._nodes.values()))
            log = (self.rundir.logs / f"node-{node.number}.log").read_text(errors="replace")[-4000:]
            reason = f"The supervisor of node {node.number} ended with exit code {node.process.wait()}, and no other is left."
            self.failure = WorkerFailed(rank=None, reason=reason, traceback=log)
        elif outcome.reason is not None:
            self.failure = WorkerFailed(rank=outcome.rank, reason=outcome.reason, traceback=outcome.traceback)
        if self.failure is not None:
            self._write(self.failure)
        self.exit_code = 1 if outcome is None or self.failure is not None else outcome.code

    def _write(self, event: Event) -> None:
        """Write to the log if possible: a full disk must not hide the failure that it caused."""
        with contextlib.suppress(OSError):
            self._log.emit(event)


def _remove_stale_files(rundir: RunDir) -> None:
    for path in rundir.logs.glob("rank-*.error.json"):
        path.unlink()
    shutil.rmtree(rundir.control, ignore_errors=True)  # terms of an earlier launch


def run_started(run: Run, plan: Plan) -> RunStarted:
    """The first record of a launch."""
    return RunStarted(
        version=__version__,
        ranks=plan.ranks,
        device=plan.device,
        steps=run.steps,
        parameters=plan.parameters,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        layout=asdict(plan.layout),
        compute=plan.compute,
        promise=plan.promise,
    )


def describe_failure(failure: WorkerFailed, path: Path) -> str:
    """A failure for people: the traceback of the rank that failed first, then what happened and where the logs are."""
    rank = "" if failure.rank is None else f"Rank {failure.rank} failed: "
    message = f"{rank}{failure.reason}\nThe run has ended; its logs are in {path / 'logs'}."
    return f"{failure.traceback.rstrip()}\n\n{message}" if failure.traceback else message
