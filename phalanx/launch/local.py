"""A job on this machine: starts a supervisor for each of its nodes, hears how the run ends, starts lost nodes again where the run
file says so. Never imports torch.

The supervisors (`control/agent`) do the rest; all of them, and all that they have started, die with this process.
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
from phalanx.control.processes import ONE_NODE, give_back, room_for_copies
from phalanx.events.log import EventLog, EventReader
from phalanx.events.records import Event, RunStarted, Warned, WorkerFailed
from phalanx.host.env import python_env
from phalanx.host.process_tree import stop_signals_blocked
from phalanx.launch.prepare import Prepared
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

FORCED_EXIT = 130
"""Exit code of a run that was ended at once, without saving: asked a second time, it does not wait."""

_POLL = 0.1  # seconds between looks at the event log
_LOOK = 1.0  # seconds between looks at whether the disk is full
_UNTIL_GONE = 20.0  # seconds that a supervisor has to give everything back once the run is over


class _Node:
    """The supervisor of one node, as its parent sees it."""

    def __init__(self, number: int, given: dict[str, Any], log: Path):
        self.number = number
        with log.open("ab") as file, stop_signals_blocked():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx.control.agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=python_env(),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which asks all to stop together
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.output: IO[bytes] = self.process.stdout
        self._buffer = b""
        self.lost: float | None = None
        """When it was seen to be gone."""
        self.away: float | None = None
        """Seconds that a planted fault keeps it away."""
        # Not among its arguments, which every user of the machine can read.
        self.tell(given | {"node": number, "parent": os.getpid()})

    def tell(self, message: dict[str, Any]) -> bool:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            return False
        return True

    def hear(self) -> list[dict[str, Any]]:
        """Without waiting."""
        while select.select([self.output], [], [], 0)[0]:
            block = os.read(self.output.fileno(), 65536)
            if not block:
                break
            self._buffer += block
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """At once, with all that it has started."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.output.close()


class Job:
    """A started run. Read `events()` to the end; then `exit_code` and `failure` say how it went."""

    def __init__(self, prepared: Prepared, chaos: str = ""):
        self.run, self.plan, self.rundir = prepared.run, prepared.plan, prepared.rundir
        self.exit_code: int | None = None
        self.failure: WorkerFailed | None = None
        self._outcome: dict[str, Any] | None = None
        self._forced = False
        self._full, self._looked = False, time.monotonic()
        try:
            room_for_copies(self.run, self.plan)
        except RunError:
            self.rundir.release()  # nothing was started
            raise
        self._log = EventLog(self.rundir.events_file)
        self._reader = EventReader(self.rundir.events_file, offset=self.rundir.events_file.stat().st_size)
        for stale in self.rundir.logs.glob("rank-*.error.json"):
            stale.unlink()
        shutil.rmtree(self.rundir.control, ignore_errors=True)  # terms of an earlier launch
        self._log.emit(run_started(self.run, self.plan))
        alone = self.run.checkpoint.memory_every is not None and self.run.cluster.nodes == 1
        for notice in (*prepared.notices, *((ONE_NODE,) if alone else ())):
            self._log.emit(Warned(message=notice))
        nodes = self.run.cluster.nodes
        self._given = {
            "run_dir": str(self.rundir.path.absolute()),
            "nodes": nodes,
            "slots": -(-self.plan.ranks // max(1, nodes - self.run.resilience.spares)),
            "token": secrets.token_hex(32),
            "bind": self.run.cluster.bind,
            "chaos": chaos,
        }
        self._nodes = {number: self._start(number) for number in range(nodes)}

    def _start(self, number: int) -> _Node:
        return _Node(number, self._given, self.rundir.logs / f"node-{number}.log")

    def events(self) -> Iterator[Event]:
        """Everything that happens, as it happens, until the run is over; a failure is raised at the end."""
        try:
            while self._outcome is None and not self._forced:
                select.select([node.output for node in self._nodes.values() if node.lost is None], [], [], _POLL)
                self._hear()
                yield from self._reader.new()
                yield from self._disk()
                if not self._look():
                    break
            self._settle()
            yield from self._reader.new()
        finally:
            for node in self._nodes.values():
                node.close()
            give_back()
            self._sweep()
            self._log.close()
            self.rundir.release()
        if self.failure is not None:
            raise RunFailed(describe_failure(self.failure, self.rundir.path))

    def _sweep(self) -> None:
        """What the supervisors told each other means nothing now, and its links lead nowhere: whoever copies a run would fall over them."""
        for left in (*self.rundir.control.glob("term-*"), *self.rundir.control.glob("node-*")):
            left.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # planted faults are kept, for whoever counts them
            self.rundir.control.rmdir()

    def _hear(self) -> None:
        for node in self._nodes.values():
            if node.lost is None:
                for message in node.hear():
                    self._outcome = self._outcome or message.get("outcome")
                    if "away" in message:
                        node.away = message["away"] or float("inf")

    def _look(self) -> bool:
        """Which supervisors are gone, and which are to come back; whether there is still one to hear from."""
        wait = self.run.resilience.node_return
        for number, node in list(self._nodes.items()):
            if node.lost is None and node.process.poll() is not None:
                self._hear()
                node.lost = time.monotonic()
            after = wait if node.away is None else node.away
            if node.lost is not None and after is not None and time.monotonic() - node.lost >= after:
                node.close()
                self._nodes[number] = self._start(number)
        return any(node.lost is None or (node.away or wait) is not None for node in self._nodes.values())

    def _disk(self) -> Iterator[Event]:
        """Whether it has filled up. What the workers say then waits in their memory, so nobody would hear of it."""
        if time.monotonic() < self._looked + _LOOK:
            return
        self._looked = time.monotonic()
        before = self._full
        with contextlib.suppress(OSError):
            self._full = not shutil.disk_usage(self.rundir.path).free
        if self._full and not before:
            yield Warned(
                message=f"The disk of {self.rundir.path} is full: training goes on, but its steps are neither shown nor recorded, and "
                "nothing is saved there, until there is room again. Free some space."
            )

    def stop(self, reason: str = "SIGTERM") -> None:
        """Ask the workers to save and end."""
        if not any([node.tell({"stop": reason}) for node in self._nodes.values() if node.lost is None]):
            self._write(Warned(message=f"{reason} could not be passed on: the run has ended already."))

    def kill(self) -> None:
        """End the workers now, without saving."""
        self._forced = True
        for node in self._nodes.values():
            if node.process.poll() is None:
                node.process.kill()  # its ranks die with it

    def _settle(self) -> None:
        """The run is over, or its supervisors are: say how."""
        if self._forced:
            self.exit_code = FORCED_EXIT
            return
        deadline = time.monotonic() + _UNTIL_GONE
        for node in self._nodes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.0, deadline - time.monotonic()))
        self._hear()
        if self._outcome is None:
            node = next(iter(self._nodes.values()))
            log = (self.rundir.logs / f"node-{node.number}.log").read_text(errors="replace")[-4000:]
            reason = f"The supervisor of node {node.number} ended with exit code {node.process.wait()}, and no other is left."
            self.failure = WorkerFailed(rank=None, reason=reason, traceback=log)
        elif self._outcome["reason"] is not None:
            found = self._outcome
            self.failure = WorkerFailed(rank=found["rank"], reason=found["reason"], traceback=found["traceback"])
        if self.failure is not None:
            self._write(self.failure)
        self.exit_code = 1 if self.failure else int((self._outcome or {})["code"])

    def _write(self, event: Event) -> None:
        """Into the log if that can be: a full disk must not hide the failure that it has caused."""
        with contextlib.suppress(OSError):
            self._log.emit(event)


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
        promise=None if plan.promise is None else asdict(plan.promise),
    )


def describe_failure(failure: WorkerFailed, path: Path) -> str:
    """A failure as a person reads it: the traceback of the rank that failed first, then what and where."""
    who = "" if failure.rank is None else f"Rank {failure.rank} failed: "
    words = f"{who}{failure.reason}\nThe run has ended; its logs are in {path / 'logs'}."
    return f"{failure.traceback.rstrip()}\n\n{words}" if failure.traceback else words
