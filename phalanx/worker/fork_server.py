"""The fork server of a node: imports torch once and forks ranks on request of the node's agent. Started by `control/processes`.

    python -m phalanx.worker.fork_server RUN_DIR CONTROL_FD AGENT_PID

Forking after the imports makes N ranks start as fast as one and share memory, and makes this process a warm spare for every rank: a lost
rank is replaced in milliseconds. It never opens a process group or a GPU, so that ranks start clean. Ranks become children of the agent,
not of this process: they outlive it, and the agent sees their exit itself.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from phalanx.host.process_tree import STOP_SIGNALS, die_with, unblock_stop_signals

if TYPE_CHECKING:
    from phalanx.events.rundir import RunDir
    from phalanx.spec.run import Run

_MAX_PACKET = 65536  # bytes


def main() -> None:
    directory, control, agent = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    die_with(agent)
    # Stop signals stay blocked here: they must not end this process while it loads, and Python loses a signal that arrives during a fork.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    from phalanx.events.rundir import RunDir
    from phalanx.spec.load import load
    from phalanx.spec.plan import Plan

    rundir = RunDir(Path(directory))
    run = load(rundir.run_file)
    if run.command.program is not None:
        from phalanx.worker.program_rank import CommandRank

        _serve(control, agent, lambda connection: CommandRank(connection, run, rundir).serve())
    if run.engine.name == "xla":
        _serve_xla(control, agent, run, rundir)
    from phalanx.worker.control_thread import ControlThread
    from phalanx.worker.rank import Rank
    from phalanx.worker.rank_process import StopSignals

    # What every rank would import otherwise when it builds the model and takes its first step, if the run needs it: each takes a second.
    if not run.model.is_builtin:
        import torch.fx.experimental.symbolic_shapes
    if run.model.config is not None:
        from phalanx.models.init import build

        build(run.model)
    fully_sharded = run.layout.shard > 1 and run.layout.zero == 3
    if fully_sharded or run.layout.pipeline > 1:
        import torch.distributed.fsdp
    on_gpus = Plan.from_json(rundir.plan_file.read_text()).device != "cpu"  # whose kernels are operations of `phalanx/kernels`
    if fully_sharded or run.layout.context > 1 or run.memory.compile or run.memory.recomputes or on_gpus:
        import torch._dynamo  # noqa: F401
    signals = StopSignals()  # inherited by the ranks, so that an early stop signal is not lost
    gc.freeze()  # keeps the pages of everything loaded now shared: the garbage collector never touches them
    _serve(control, agent, lambda connection: Rank(ControlThread(connection), run, rundir, signals).serve())


def _serve_xla(control: socket.socket, agent: int, run: Run, rundir: RunDir) -> NoReturn:
    """As `main`, for processes of the XLA engine. JAX is imported here and used only in them: it starts threads, which a fork loses."""
    from phalanx.host.env import use_virtual_devices
    from phalanx.spec.plan import Plan

    plan = Plan.from_json(rundir.plan_file.read_text())
    if plan.device == "cpu":
        use_virtual_devices(plan.devices_per_process)
    from phalanx.worker.control_thread import ControlThread
    from phalanx.worker.rank_process import StopSignals
    from phalanx.worker.xla_rank import XlaRank

    signals = StopSignals()
    gc.freeze()
    _serve(control, agent, lambda connection: XlaRank(ControlThread(connection), run, rundir, signals).serve())


def _serve(control: socket.socket, agent: int, work: Callable[[socket.socket], int]) -> NoReturn:
    """Fork ranks as long as the agent asks. `work`: what a rank does with its connection to the agent; returns its exit code."""
    control.send(b"{}")  # ready
    while True:
        packet, fds, _, _ = socket.recv_fds(control, _MAX_PACKET, 1)
        if not packet:
            _exit(0)
        request = json.loads(packet)
        pid = _fork_for_agent(control, agent)
        if pid == 0:
            unblock_stop_signals()
            _exit(work(socket.socket(fileno=fds[0])))
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"worker": request["worker"], "pid": pid}).encode())


def _fork_for_agent(control: socket.socket, agent: int) -> int:
    """Fork twice: the middle process ends at once, so that the agent adopts the new one. Returns its process id; 0 inside it."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        inner = os.fork()
        if inner == 0:
            os.close(reading)
            os.close(writing)
            control.close()
            while os.getppid() != agent:  # until the middle process has ended
                if os.getppid() == 1:
                    os._exit(1)
                time.sleep(0.0005)
            die_with(agent)
            return 0
        os.write(writing, str(inner).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(middle, 0)
    with os.fdopen(reading, "rb") as file:
        return int(file.read())


def _exit(code: int) -> NoReturn:
    """Exit without the parent's exit handlers: a forked process must not tear down what it did not build."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
