"""The nursery of a node: loads torch once, then forks ranks whenever the node's supervisor asks for one. Not for people.

    python -m phalanx.worker.fork_server RUN_DIR CONTROL_FD SUPERVISOR_PID

Forking after the imports makes N ranks start as fast as one and share its memory, and makes this process the warm spare of every
rank: a lost one is replaced in milliseconds. It never opens a process group or a GPU, so whatever it forks starts clean. Ranks
become children of the supervisor, not of this process: they outlive it, and the supervisor sees their end itself.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from phalanx.host.process_tree import STOP_SIGNALS, die_with, unblock_stop_signals

_MOST = 65536  # bytes of a message


def main() -> None:
    directory, control, supervisor = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    die_with(supervisor)
    # This process was started deaf, and stays so: told to stop while it loads, it does not die of it; and Python forgets a signal that
    # arrives while it forks.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    import torch._dynamo  # noqa: F401  # the first optimizer would import it, in every rank

    from phalanx.events.rundir import RunDir
    from phalanx.worker import rank

    rundir = RunDir(Path(directory))
    signals = rank.StopSignals()  # inherited by the ranks: one that is told to stop at once still hears it
    gc.freeze()  # what is loaded now stays shared: no collection ever touches its pages
    control.send(b"{}")  # ready
    while True:
        message, handed, _, _ = socket.recv_fds(control, _MOST, 1)
        if not message:
            _leave(0)
        asked = json.loads(message)
        pid = _fork_twice(control, supervisor)
        if pid == 0:
            unblock_stop_signals()
            _leave(rank.serve_rank(socket.socket(fileno=handed[0]), rundir, signals))
        for fd in handed:
            os.close(fd)
        control.send(json.dumps({"worker": asked["worker"], "pid": pid}).encode())


def _fork_twice(control: socket.socket, supervisor: int) -> int:
    """A process that is no child of this one: its parent ends at once, and the supervisor adopts it. Returns its id; 0 inside."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        inner = os.fork()
        if inner == 0:
            os.close(reading)
            os.close(writing)
            control.close()
            while os.getppid() != supervisor:  # until the one between has ended
                if os.getppid() == 1:
                    os._exit(1)
                time.sleep(0.0005)
            die_with(supervisor)
            return 0
        os.write(writing, str(inner).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(middle, 0)
    with os.fdopen(reading, "rb") as file:
        return int(file.read())


def _leave(code: int) -> NoReturn:
    """End without running what the parent registered: a forked process must not tear down what it did not build."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
