"""A pool of ranks: forked once with torch loaded, then used for one case after the other. Each case connects under a new
generation of the same store. Ranks are on CPU, or on this machine's GPUs, which they share where there are fewer GPUs than ranks. If a rank raises, dies or hangs, the others wait for it forever: all are killed, and the next case
gets new ranks."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
import torch._dynamo  # these, because the first optimizer and the first sharded model would import them, in every rank
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor

from phalanx import accelerator
from phalanx.host.env import count_gpus_without_cuda, use_loopback_only
from phalanx.host.process_tree import die_with
from phalanx.parallel.mesh import connect, disconnect
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Place

_GRACE = 0.5  # seconds to wait for the failures of other ranks: the earliest one is the cause
_LINES = 12  # lines of a traceback to report
_SECONDS = {"cpu": 120.0, "cuda": 300.0}
"""Until a case counts as hanging. On GPUs the first case also starts CUDA, and kernels or blocks are compiled."""


@dataclass(eq=False)
class RankFailed(Exception):
    """A rank failed in a case."""

    rank: int | None
    """None: the reference process."""
    error: str
    trace: Sequence[str]

    def __str__(self) -> str:
        return f"{'the reference process' if self.rank is None else f'rank {self.rank}'}: {self.error}"


@dataclass(slots=True)
class _Raised:
    error: str
    trace: list[str]
    when: float
    died: bool = False


@dataclass(slots=True)
class _Worker:
    rank: int
    pid: int
    pipe: Connection
    """Tasks go out as pickles, results come back."""
    log: Path
    """Standard error of the rank, and its stack on request."""


class RankPool:
    """Up to `ranks` ranks, started on first use as forks of this process. Not for a process that has used torch in parallel, or whose threads
    are not known: `pool_process.PoolProcess` is the same in a process of its own."""

    def __init__(self, ranks: int, timeout: float | None = None, device: str = "cpu", folder: Path | None = None):
        """`timeout`: seconds after which a case counts as hanging. `device`: "cpu" or "cuda"; this process itself never touches a GPU.
        `folder`: a folder of the caller's own for files that ranks exchange."""
        self.ranks, self.device, self.timeout = ranks, device, _SECONDS[device] if timeout is None else timeout
        self._workers: list[_Worker] = []
        self._store: int | None = None
        self._address = ("127.0.0.1", 0)
        self._generation = 0
        self._own = None if folder is not None else tempfile.TemporaryDirectory(prefix="phalanx-verify-")
        self.folder = folder or Path(self._own.name if self._own else "")
        """For files that ranks exchange; removed with the pool unless it is the caller's."""

    def run(self, function: Callable[..., Any], layout: Layout, *args: Any) -> list[Any]:
        """Calls `function(mesh, *args)` on the ranks of a layout; returns the result of each. Raises RankFailed."""
        assert layout.ranks <= self.ranks, f"{layout.ranks} ranks requested of {self.ranks}"
        self._start()
        self._generation += 1
        places = [
            Place(rank=rank, ranks=layout.ranks, local_rank=rank, store=self._address, generation=self._generation)
            for rank in range(layout.ranks)
        ]
        return self._execute(places, layout, function, args)

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(mesh, *args)` in a single-process mesh. Raises RankFailed with rank None."""
        self._start()
        try:
            return self._execute([Place()], None, function, args)[0]
        except RankFailed as failed:
            raise RankFailed(None, failed.error, failed.trace) from None

    def close(self) -> None:
        self._kill()
        if self._own is not None:
            self._own.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._workers:
            return
        torch.set_num_threads(1)  # forks of a process with OpenMP threads hang, because the threads are missing
        if self.device != "cpu":
            count_gpus_without_cuda()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._address = listener.getsockname()
            self._store = fork(serve_store, *self._address, listener.fileno())
        for rank in range(self.ranks):
            ours, theirs = Pipe()
            log = self.folder / f"rank-{rank}.log"
            pid = fork(_serve, theirs, log, self.device)
            theirs.close()  # before the next fork, so that only this rank has it: end-of-file then shows its death
            self._workers.append(_Worker(rank, pid, ours, log))

    def _kill(self) -> None:
        for pid in (*([self._store] if self._store else []), *(worker.pid for worker in self._workers)):
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still valid
            os.waitpid(pid, 0)
        for worker in self._workers:
            worker.pipe.close()
        self._workers, self._store = [], None

    def _execute(
        self, places: list[Place], layout: Layout | None, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> list[Any]:
        workers = self._workers[: len(places)]
        try:
            for worker, place in zip(workers, places, strict=True):
                try:
                    worker.pipe.send_bytes(pickle.dumps((place, self.timeout, layout, function, args)))
                except OSError:
                    raise RankFailed(worker.rank, _death(worker), last_lines(worker.log)) from None
            return self._collect(workers)
        except BaseException:
            self._kill()
            raise

    def _collect(self, workers: list[_Worker]) -> list[Any]:
        results: dict[int, Any] = {}
        raised: dict[int, _Raised] = {}
        deadline = time.monotonic() + self.timeout
        waiting: dict[Any, _Worker] = {worker.pipe: worker for worker in workers}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for worker in [waiting.pop(pipe) for pipe in ready]:
                result = _result(worker)
                if isinstance(result, _Raised):
                    raised[worker.rank] = result
                    deadline = min(deadline, time.monotonic() + _GRACE)
                else:
                    results[worker.rank] = result
        if raised:
            # A death comes before any exception: ranks raise because another died, but none dies because another raised.
            rank, first = min(raised.items(), key=lambda pair: (not pair[1].died, pair[1].when))
            raise RankFailed(rank, first.error, first.trace)
        missing = [worker for worker in workers if worker.rank not in results]
        if missing:
            others = f" (nor have ranks {', '.join(str(worker.rank) for worker in missing[1:])})" if missing[1:] else ""
            raise RankFailed(missing[0].rank, f"has not ended within {self.timeout:.0f} s{others}", _stack(missing[0]))
        return [results[worker.rank] for worker in workers]


def fork(function: Callable[..., NoReturn], *args: Any) -> int:
    """Forks a process that calls `function` and exits, at the latest with this one; returns its pid."""
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns about forks of processes with threads; the threads here are idle and hold no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        die_with(parent)
        # What the parent left to its garbage collector may own threads, which do not exist here: its destructor would abort.
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too and kills the ranks
        try:
            function(*args)
        finally:
            os._exit(1)  # skips exit handlers of the parent program
    return pid


def serve_store(host: str, port: int, listener: int) -> NoReturn:
    """Runs the rendezvous store of the ranks, on a socket that is already bound."""
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener))
    while store:
        signal.pause()
    raise AssertionError


def _serve(pipe: Connection, log: Path, device: str) -> NoReturn:
    """The main loop of a rank: executes tasks until it is killed."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    use_loopback_only(gpus=device != "cpu")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    torch.set_num_threads(1)
    while True:
        place, timeout, layout, function, args = pickle.loads(pipe.recv_bytes())
        try:
            mesh = connect(place, device, timeout, layout, share=True)
            result = pickle.dumps(function(mesh, *args))
            disconnect(mesh)
        except BaseException as error:
            lines = traceback.format_exc().strip().splitlines()
            message = f"{type(error).__name__}: {error}"
            pipe.send_bytes(pickle.dumps(_Raised(message, lines[-_LINES:], time.monotonic())))
            while True:  # stays alive, so that its end causes no further failures
                signal.pause()
        pipe.send_bytes(result)
        gc.collect()  # models are reference cycles; the next case needs the memory
        accelerator.of(device).empty_cache()


def _result(worker: _Worker) -> Any:
    """The result of a rank, or how it died."""
    try:
        return pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, OSError):
        return _Raised(_death(worker), last_lines(worker.log), time.monotonic(), died=True)


def _death(worker: _Worker) -> str:
    # WNOWAIT does not reap the process: the pid must stay valid until the pool kills its ranks.
    status = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    if status.si_code == os.CLD_EXITED:
        return f"ended with exit code {status.si_status}"
    return f"was killed by {signal.Signals(status.si_status).name}"


def _stack(worker: _Worker) -> list[str]:
    """The current stack of a hanging rank."""
    os.kill(worker.pid, signal.SIGUSR1)
    time.sleep(_GRACE)
    return last_lines(worker.log)


def last_lines(log: Path) -> list[str]:
    """The last lines of a log, or the stack at its end."""
    text = log.read_text(errors="replace") if log.exists() else ""
    stack = text.rpartition("Current thread")[2].splitlines() if "Current thread" in text else text.splitlines()[-_LINES:]
    return [line for line in stack if line.strip()][:_LINES]
