"""A rank that runs a program of the user's own (`phalanx launch`): starts it for every generation, watches it, and ends it with all the processes
that it has started. Forked by `worker/fork_server`. Never imports torch.

The program keeps its own checkpoints. So when a generation is over, it is ended on every rank and started again, with other ports.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.control import codec, protocol
from phalanx.events import frames
from phalanx.events.frames import BlockingChannel
from phalanx.events.heartbeat import Heartbeat
from phalanx.events.records import WorkerStarted, encode
from phalanx.events.rundir import RunDir
from phalanx.host.env import ProgramRank, rank_environment
from phalanx.host.process_tree import die_with, kill_session, outlive_parent, stop_signals
from phalanx.recovery.state import is_secondary_error
from phalanx.spec.run import Run

_POLL = 0.1  # seconds between two looks at the program
_LAST_OUTPUT = 4000  # bytes of output that a failure shows


class CommandRank:
    """The process of a rank, as the agent sees it. It leads the session of its program, which ends with it."""

    def __init__(self, connection: socket.socket, run: Run, rundir: RunDir):
        self._connection, self._run, self._rundir = connection, run, rundir
        self._received = b""
        self._program: subprocess.Popen[bytes] | None = None
        self._order: protocol.BeginRank | None = None
        self._heartbeat: Heartbeat | None = None
        self._progress = Path()
        self._log_start = 0
        """Size of the log when the program was started."""
        self._stopping = self._pausing = False
        """The program was asked to end: for good, or until the next generation."""
        self._patience = math.inf
        """When it is killed if it has not."""
        outlive_parent()  # long enough to end the program
        os.setsid()
        for number in (*stop_signals(), signal.SIGUSR2):  # a batch system may send them to all processes; the agent decides
            signal.signal(number, lambda number, frame: None)

    def serve(self) -> int:
        """Run the program as the agent orders; returns the exit code of this process."""
        while True:
            for order in self._receive():
                if order is None:  # the agent is gone
                    self._end_program()
                    return 1
                self._obey(order)
            if self._program is not None and not self._watch():
                return 1

    # --- orders ---

    def _receive(self) -> list[Any]:
        """The orders that have arrived; None: the agent is gone."""
        if not select.select([self._connection], [], [], _POLL)[0]:
            return []
        try:
            block = self._connection.recv(1 << 20)
        except OSError:
            block = b""
        if not block:
            return [None]
        *lines, self._received = (self._received + block).split(b"\n")
        return [codec.decode(json.loads(line)) for line in lines]

    def _obey(self, order: Any) -> None:
        match order:
            case protocol.BeginRank():
                self._begin(order)
            case protocol.Halt():
                self._end_program()
                self._report(protocol.SurvivorReport(generation=order.generation, step=None))
            case protocol.Pause():
                self._pausing = True
                self._terminate()
            case protocol.Stop() if not self._stopping:
                self._stopping = True
                self._terminate()

    def _report(self, report: protocol.RankReport | protocol.Record) -> None:
        with suppress(OSError):
            self._connection.sendall(json.dumps(codec.encode(report)).encode() + b"\n")

    # --- the program ---

    def _begin(self, order: protocol.BeginRank) -> None:
        self._end_program()
        self._pausing, self._order, place = False, order, order.place
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(Path(order.heartbeat))
            self._progress = Path(order.heartbeat).with_suffix(".progress")
        self._heartbeat.start(place.generation)
        try:
            host, ports = self._meet(order)
        except OSError as error:
            self._report(protocol.ConnectionLost(generation=place.generation, reason=str(error)))
            return
        log = self._rundir.rank_log(place.rank)
        self._progress.touch()
        assignment, own, command = order.begin.assignment, order.begin.ranks_on(place.node), self._run.command
        rank = ProgramRank(
            rank=place.rank,
            ranks=place.ranks,
            local_rank=own.index(place.rank),
            local_ranks=len(own),
            node=list(dict.fromkeys(assignment)).index(place.node),
            nodes=len(set(assignment)),
            host=host,
            ports=ports,
            restarts=place.generation,
            run_dir=str(self._rundir.path.absolute()),
            progress=str(self._progress),
        )
        assert command.program is not None
        parent = os.getpid()
        with log.open("ab") as output:
            self._log_start = output.tell()
            try:
                self._program = subprocess.Popen(
                    command.program,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=rank_environment(rank, command.environment or ()),
                    preexec_fn=lambda: die_with(parent),
                )
            except OSError as error:
                reason = f"{command.program[0]} cannot be started ({error.strerror}): name a program that every host has"
                self._fail(protocol.RankFailure(reason=reason, expected=True))
                raise SystemExit(1) from None
        host, pid, device = socket.gethostname(), self._program.pid, order.begin.plan.device
        started = WorkerStarted(time=time.time(), rank=place.rank, host=host, pid=pid, device=device)
        self._report(protocol.Record(line=encode(started), generation=place.generation))
        self._report(protocol.RankRestored(generation=place.generation, step=0))
        self._report(protocol.FirstStepDone(generation=place.generation))
        if self._stopping:
            self._terminate()

    def _terminate(self) -> None:
        """Ask the program to save and end."""
        self._patience = time.monotonic() + self._run.resilience.preemption_notice
        if self._program is not None:
            self._program.terminate()

    def _meet(self, order: protocol.BeginRank) -> tuple[str, tuple[int, int]]:
        """Rank 0's address and free ports, through the store of the generation. Raises OSError."""
        place = order.place
        assert place.store is not None and place.token is not None
        channel = BlockingChannel((place.store[0], int(place.store[1])), place.token, frames.CONTROL)
        try:
            channel.send({"store": place.generation})
            if place.rank == 0:
                host = channel.own_host
                sockets = [socket.create_server((host, 0), family=channel.family) for _ in range(2)]
                ports = [sock.getsockname()[1] for sock in sockets]
                for sock in sockets:
                    sock.close()
                channel.send({"op": "set", "key": "program", "value": json.dumps([host, *ports])})
                channel.receive(self._run.resilience.timeout)
            seconds = self._run.resilience.timeout
            channel.send({"op": "get", "keys": ["program"], "timeout": seconds})
            answer = channel.receive(2 * seconds)
        finally:
            channel.close()
        if "error" in answer:
            raise ConnectionError(str(answer["error"]))
        values = answer["value"]
        assert isinstance(values, list)
        host, store_port, coordinator_port = json.loads(str(values[0]))
        return host, (store_port, coordinator_port)

    def _watch(self) -> bool:
        """Look at the program; False if this process shall end, because it failed."""
        program, order = self._program, self._order
        assert program is not None and order is not None and self._heartbeat is not None
        generation = order.begin.generation
        code = program.poll()
        asked = self._stopping or self._pausing
        if code is None and not (asked and time.monotonic() > self._patience):
            self._heartbeat.enter("saving" if asked else "computing")
            return asked or self._makes_progress()
        self._end_program()  # with what it has left behind
        if self._stopping:
            self._report(protocol.RankEnded(generation=generation, code=protocol.RESUMABLE))
        elif self._pausing:
            self._report(protocol.RankPaused(generation=generation))
        elif code == 0:
            self._heartbeat.enter("ending")
            self._report(protocol.RankEnded(generation=generation, code=0))
        elif code is not None and code > 0 and is_secondary_error(last := self._last_output()):
            self._report(protocol.ConnectionLost(generation=generation, reason=_last_line(last)))
        else:
            assert code is not None
            self._fail(self._failure(code))
            return False
        return True

    def _makes_progress(self) -> bool:
        limit = self._run.command.hang
        try:
            silent = time.time() - self._progress.stat().st_mtime
        except OSError:
            return True
        if limit is None or silent < limit:
            return True
        assert self._order is not None
        rank = self._order.place.rank
        reason = f"rank {rank} has not touched its progress file for {silent:.0f} s, and command.hang = {limit:g}"
        self._fail(protocol.RankFailure(cause="hung", reason=reason, traceback=self._last_output()))
        self._end_program()
        return False

    def _failure(self, code: int) -> protocol.RankFailure:
        last = self._last_output()
        if code < 0:
            killed = "; if nobody did that, the machine ran out of memory (see dmesg)" if code == -signal.SIGKILL else ""
            return protocol.RankFailure(
                cause="died", reason=f"it was ended by {signal.Signals(-code).name}{killed}", traceback=last
            )
        said = f": {line}" if (line := _last_line(last)) else ""
        return protocol.RankFailure(reason=f"it ended with exit code {code}{said}", traceback=last)

    def _fail(self, failure: protocol.RankFailure) -> None:
        assert self._order is not None
        self._report(protocol.RankFailed(generation=self._order.begin.generation, failure=failure))

    def _last_output(self) -> str:
        assert self._order is not None
        try:
            with self._rundir.rank_log(self._order.place.rank).open("rb") as file:
                file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - _LAST_OUTPUT))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _end_program(self) -> None:
        """Kill the program and everything that it has started."""
        if self._program is not None:
            kill_session(os.getpid())
            self._program.wait()
            self._program = None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
