"""Starts the processes of a trial on this machine and asks them for steps. Implements `tuning/duel.Bench`."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import TypeVar

from phalanx.host.env import worker_env
from phalanx.host.process_tree import end_session, python_command, silent_end
from phalanx.spec.dump import dump
from phalanx.tuning.duel import WARM_UP, TrialFailed
from phalanx.tuning.trial_messages import Message, Ready, TakeTurn, TrialJob, TrialLost, TrialTurn, decode, encode
from phalanx.tuning.trial_run import Side

_SETTLED = 3
"""The last steps of the warm-up, which are like the measured ones."""
_COMPILING, _CACHED = 3, 0.5
"""The first steps, in which code is compiled, and the part of that time that a cache of compiled code saves."""
T = TypeVar("T", bound=Message)


class ProcessBench:
    """Starts sides as processes, with logs and what they write in `folder`."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0

    def start(self, side: Side, seconds: float) -> TrialProcesses:
        """The side after its warm-up."""
        self._count += 1
        own = Path(mkdtemp(prefix=f"{self._count}-", dir=self._folder))
        return TrialProcesses(side, own, seconds)


class TrialProcesses:
    """The processes of one side."""

    def __init__(self, side: Side, folder: Path, seconds: float):
        begun = time.monotonic()
        self._log, self._buffer = folder / "log", b""
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                python_command("phalanx.tuning.trial_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=worker_env(side.plan),
                start_new_session=True,  # Ctrl-C is for the parent, which ends its processes
            )
        try:
            job = TrialJob(run=dump(side.run), plan=side.plan.to_json(), folder=str(folder), parent=os.getpid())
            self._send(job)
            self._receive(Ready, seconds)
            turn = self._turn(WARM_UP, seconds - (time.monotonic() - begun))
        except BaseException:
            self.close()
            raise
        self.losses, self.step_seconds = turn.losses, median(turn.seconds[-_SETTLED:])
        self.loading = turn.parts.get("loading", 0.0) / sum(turn.parts.values()) if turn.parts else None
        self.start_seconds = max(time.monotonic() - begun - WARM_UP * self.step_seconds, 0.0)
        compiling = max(sum(turn.seconds[:_COMPILING]) - _COMPILING * self.step_seconds, 0.0)
        self.warm_seconds = self.start_seconds - _CACHED * compiling

    def take(self, steps: int, seconds: float) -> Sequence[float]:
        return self._turn(steps, seconds).seconds

    def _turn(self, steps: int, seconds: float) -> TrialTurn:
        self._send(TakeTurn(steps=steps))
        return self._receive(TrialTurn, seconds)

    def _send(self, message: Message) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the missing answer says why
            self._process.stdin.write(encode(message))

    def _receive(self, expected: type[T], seconds: float) -> T:
        """The next message. TrialFailed if there is none within so many seconds, or a rank has failed."""
        line = self._line(time.monotonic() + seconds)
        if line is None:
            raise TrialFailed(f"no answer within {seconds:.0f} s", timed_out=True)
        message = decode(line) if line.endswith(b"\n") else TrialLost(reason=silent_end(self._process, self._log))
        if isinstance(message, TrialLost):
            raise TrialFailed(message.reason, out_of_memory=message.out_of_memory)
        assert isinstance(message, expected), message
        return message

    def _line(self, deadline: float) -> bytes | None:
        """A line of output, without its end if the process has ended; None after the deadline."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([output], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                return None
            data = os.read(output, 1 << 16)
            if not data:
                return b""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"

    def close(self) -> None:
        end_session(self._process)
