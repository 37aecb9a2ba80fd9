"""The command that the launcher starts: loads torch once, then forks the store and the ranks of a job. Not for people.

    python -m phalanx.cli.worker RUN_DIR CONTROL_FD LISTEN_FD LAUNCHER_PID [FOLDER OF COPIES IN MEMORY]

Forking after the imports makes N ranks start as fast as one and share its memory. This process itself never opens a
process group or a GPU, so whatever it forks starts clean.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import NoReturn

from phalanx.launch.family import die_with

_STOPPING = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    directory, control, listener, launcher = sys.argv[1], *map(int, sys.argv[2:5])
    holder = sys.argv[5] if len(sys.argv) > 5 else None
    die_with(launcher)
    # Told to stop while it loads, this process does not die of it; and Python forgets a signal that arrives while it forks.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    import torch._dynamo  # noqa: F401  # the first optimizer would import it, in every rank

    from phalanx.cli import rank
    from phalanx.events.rundir import RunDir
    from phalanx.spec.place import Place
    from phalanx.spec.plan import Plan

    rundir = RunDir(Path(directory))
    ranks = Plan.from_json(rundir.plan_file.read_text()).ranks
    gc.freeze()  # what is loaded now stays shared: no collection ever touches its pages
    me = os.getpid()
    signals = rank.Signals()  # inherited by the ranks: one that is told to stop at once still hears it
    address = _fork_store(me, listener) if ranks > 1 else None
    children: dict[int, int] = {}
    for number in range(ranks):
        place = Place(rank=number, ranks=ranks, local_rank=number, store=address, holder=holder)
        if (pid := os.fork()) == 0:
            die_with(me)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            os.close(control)
            _redirect(rundir.log_of(number))
            _leave(rank.guarded(place, rundir, signals))
        children[pid] = number
    os.close(listener)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    _watch(control, children)


def _fork_store(me: int, listener: int) -> tuple[str, int]:
    """The key-value store where ranks meet, in a process of its own: no rank's death takes it along."""
    import socket

    with socket.socket(fileno=os.dup(listener)) as bound:
        host, port = bound.getsockname()
    if os.fork() == 0:
        die_with(me)
        import torch.distributed as dist

        _store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
        while True:
            signal.pause()  # returns after a signal that is handled
    return host, port


def _watch(control: int, children: dict[int, int]) -> None:
    """Report each rank's end and pass signals on, until all have ended or the launcher has gone."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = dict(children)
    while True:
        while waiting:  # before sleeping: a rank may have ended before the handler was there
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid in waiting:
                _report(control, {"rank": waiting.pop(pid), "code": os.waitstatus_to_exitcode(status)})
        if not waiting:
            _leave(0)
        ready, _, _ = select.select([wake, control], [], [])
        if wake in ready:
            os.read(wake, 4096)
        if control in ready:
            lines = os.read(control, 4096)
            if not lines:
                _leave(1)
            for line in lines.splitlines():
                for pid in waiting:
                    os.kill(pid, json.loads(line)["signal"])


def _report(control: int, message: dict[str, int]) -> None:
    os.write(control, json.dumps(message).encode() + b"\n")


def _redirect(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _leave(code: int) -> NoReturn:
    """End without running what the parent registered: a forked process must not tear down what it did not build."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
