"""Starts processes, asks them, ties their lives together, and blocks stop signals while they start. Used by launchers, agents and the
processes they start, before anything heavy is imported."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from phalanx.host.env import python_env
from phalanx.spec.json_value import JsonObject

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask the run to save and end. A process handles those of `stop_signals()`."""
_KILL_ROUNDS, _KILL_SECONDS = 500, 0.01
_END_SECONDS = 5.0
"""For which a session may end by itself."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit now if the parent is no longer `parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_session(session: int) -> None:
    """Kill every process of a session but its leader. Repeats until there is none: a process may just be forking."""
    for _ in range(_KILL_ROUNDS):
        members = [pid for pid in _processes() if pid != session and _session(pid) == session]
        if not members:
            return
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_SECONDS)


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a process that leads a session, and those that compile for it. Compilers are asked first, so that they remove what they have half
    written: torch would load it from its cache later."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_END_SECONDS)
    kill_session(process.pid)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def silent_end(process: subprocess.Popen[Any], log: Path) -> str:
    """How a process ended that said nothing: the signal or code, and the last line of its log."""
    code = process.wait()
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, perhaps because the machine ran out of memory"
    lines = log.read_text(errors="replace").strip().splitlines()
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return how + (f": {lines[-1].strip()[:120]}" if lines else "")


def _processes() -> list[int]:
    """Living processes, without those that have ended and wait for their parent."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and not _ended(int(name))]


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _session(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Start child processes with `STOP_SIGNALS` blocked until they call `unblock_stop_signals`: a signal to all processes of a job must not
    kill one that is still loading, and helper processes are asked to stop in another way."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stop_signals() -> None:
    """Receive `STOP_SIGNALS` from now on, including pending ones."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def stop_signals() -> tuple[signal.Signals, ...]:
    """`STOP_SIGNALS`, without SIGHUP if this process was told to ignore it, as by nohup: then a run goes on without its terminal."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP))


def python_command(module: str, *arguments: str) -> list[str]:
    """The command of a Python module. -P: a file in the working directory must not shadow a module of the same name."""
    return [sys.executable, "-P", "-m", module, *arguments]


class ModuleProcess(subprocess.Popen[bytes]):
    """A Python module as a process in a session of its own, with pipes to its standard input and from its standard output.

    It reads `settings` as its first line of input, because every user of the machine can read the arguments of a process. `wrap` makes the
    command of another one that runs it, such as ssh.
    """

    stdin: IO[bytes]
    stdout: IO[bytes]

    def __init__(
        self,
        module: str,
        settings: JsonObject,
        log: Path,
        fds: Sequence[int] = (),
        wrap: Callable[[list[str]], list[str]] = list,
    ):
        pipe = subprocess.PIPE
        with log.open("ab") as errors, stop_signals_blocked():
            super().__init__(
                wrap(python_command(module)),
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                pass_fds=fds,
                env=python_env(),
                start_new_session=True,
            )
        self.write(settings)

    def write(self, message: JsonObject) -> bool:
        """Send a line of JSON; False if the process is gone."""
        try:
            self.stdin.write(json.dumps(message).encode() + b"\n")
            self.stdin.flush()
        except OSError:
            return False
        return True

    def close(self, patience: float = 0.0) -> None:
        """End its input and wait for its end; after so many seconds, kill it."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        try:
            self.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
        self.stdout.close()


def run_program(
    command: Sequence[str], seconds: float, question: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with `question` as its input and more variables. Raises OSError if it cannot be run, TimeoutError if it
    takes longer."""
    try:
        return subprocess.run(
            command,
            input=question,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env={**python_env(), **(env or {})},
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def ask_python(command: Sequence[str], seconds: float, question: str = "") -> JsonObject:
    """The JSON object on the last line that a Python process prints; imported modules may print before it.

    Raises TimeoutError, or another OSError that says how the process ended without an answer.
    """
    done = run_program(command, seconds, question)
    with contextlib.suppress(ValueError, IndexError):
        if isinstance(answer := json.loads(done.stdout.splitlines()[-1]), dict):
            return answer
    code, words = done.returncode, (done.stderr.strip() or done.stdout.strip()).splitlines()
    end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no answer"
    raise ChildProcessError(f"its process {end}" + (f", saying {words[-1].strip()!r}" if words else ""))
