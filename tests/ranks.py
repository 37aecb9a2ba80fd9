"""Ranks for tests, as processes of this machine, and a tiny run for them to train. Imported by tests as `ranks`.

Ranks are forked, so a test passes them its own functions and whatever it has patched, and no torch is loaded twice.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # the first optimizer would import it, in every rank
from torch import Tensor
from torch.distributed.checkpoint import logger as dcp_logger

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.events.heartbeat import Heartbeat
from phalanx.parallel.mesh import Mesh, connect, disconnect
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Run
from phalanx.training.trainer import Trainer
from phalanx.verification.rank_pool import fork, serve_store

# A process that has run OpenMP in parallel leaves its forks a pool of threads that are not there. Modules are collected
# before any test runs, so from here on no test of the session has one.
torch.set_num_threads(1)

dcp_logger._dcp_logger.setLevel(logging.WARNING)  # or every failed test would show hundreds of lines of it

ALONE = Mesh(Place(), torch.device("cpu"))


class RankTraceback(Exception):
    """The cause of what `run_ranks` raises: where in the rank it was raised."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def run_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 240.0, layout: Layout | None = None
) -> list[Any]:
    """`function(mesh, *args)` on that many connected CPU ranks; what each returned, by rank. Without a layout all are replicas.

    What the first failing rank raised is raised here, at once: the others, which wait for it, are killed.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        store = fork(serve_store, host, port, listener.fileno())
        workers: list[_Worker] = []
        try:
            for rank in range(ranks):
                reading, writing = os.pipe()
                place = Place(rank=rank, ranks=ranks, local_rank=rank, store=(host, port))
                workers.append(_Worker(rank, fork(_work, (place, layout), function, args, writing, timeout), reading))
                os.close(writing)  # now, so that no later rank holds it: its end is how a rank's end is noticed
            return _collect(workers, time.monotonic() + timeout)
        finally:
            for pid in (store, *(worker.pid for worker in workers)):
                os.kill(pid, signal.SIGKILL)  # nobody has waited for it yet, so the number is still its own
                os.waitpid(pid, 0)
            for worker in workers:
                os.close(worker.pipe)


@dataclass
class _Worker:
    rank: int
    pid: int
    pipe: int
    received: bytearray = field(default_factory=bytearray)


@dataclass
class _Raised:
    """What a rank raised, and when: the ranks that this took along raise a moment later."""

    error: BaseException
    trace: str
    when: float


def _work(
    seat: tuple[Place, Layout | None], function: Callable[..., Any], args: Sequence[Any], pipe: int, timeout: float
) -> NoReturn:
    # Into what pytest shows of a failed test: where each rank was waiting.
    faulthandler.dump_traceback_later(0.9 * timeout, file=sys.__stderr__)
    try:
        torch.set_num_threads(1)
        mesh = connect(seat[0], "cpu", max(120.0, timeout), seat[1])
        result = function(mesh, *args)
        disconnect(mesh)
        message = pickle.dumps(result)
    except BaseException as error:
        message = pickle.dumps(_Raised(_portable(error), traceback.format_exc(), time.monotonic()))
    with os.fdopen(pipe, "wb") as file:
        file.write(message)
    sys.stderr.flush()
    os._exit(0)  # nothing that the test session has registered may run here


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives the way through a pipe."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _collect(workers: list[_Worker], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
        while len(results) < len(workers):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [worker.rank for worker in workers if worker.rank not in results]
                raise TimeoutError(f"ranks {missing} have not ended in time")
            raised: list[tuple[int, _Raised]] = []
            for worker in (key.data for key, _ in ready):
                if part := os.read(worker.pipe, 1 << 20):
                    worker.received += part
                    continue
                selector.unregister(worker.pipe)
                result = results[worker.rank] = _result(worker)
                if isinstance(result, _Raised):
                    raised.append((worker.rank, result))
            if raised:
                rank, first = min(raised, key=lambda pair: pair[1].when)
                raise first.error from RankTraceback(f"On rank {rank}:\n{first.trace}")
    return [results[worker.rank] for worker in workers]


def _result(worker: _Worker) -> Any:
    if worker.received:
        return pickle.loads(worker.received)
    return _Raised(RuntimeError(f"rank {worker.rank} ended without a result"), "", time.monotonic())


def _documents(count: int = 60) -> list[str]:
    """Texts of very uneven lengths that a tiny model can learn something about within a few steps."""
    dice = random.Random(7)
    words = ["to be or not", "that is", "the question", "whether", "tis nobler in the mind", "to suffer"]
    return [" ".join(dice.choice(words) for _ in range(dice.choice([1, 1, 2, 3, 12]))) for _ in range(count)]


TINY = f"""
[model]
dim = 32
layers = 2
heads = 4
kv_heads = 2
ffn = 64

[data]
source = "memory"
documents = {json.dumps(_documents())}
eval_fraction = 0.1

[train]
batch = 8
micro_batch = 2
sequence_length = 24
steps = 6
seed = 3
eval_sequences = 5

[optimizer]
learning_rate = 1e-2
warmup_steps = 2

[cluster]
device = "cpu"
threads = 1
"""


def tiny_run(*overrides: str) -> Run:
    """A run that takes milliseconds per step; most of its windows hold several documents, so some targets are masked."""
    return loads(TINY, overrides=overrides)


def tiny_trainer(mesh: Mesh, run: Run, checkpoints: Path, heartbeat: Heartbeat | None = None) -> Trainer:
    """Built and at step 0, laid out as the mesh is."""
    assert run.train.micro_batch is not None
    plan = Plan(
        layout=mesh.layout,
        device="cpu",
        threads=1,
        micro_batch=run.train.micro_batch,
        accumulation=run.batch // mesh.layout.replicas // run.train.micro_batch,
        compute=run.precision.compute or "fp32",
        parameters=run.model.parameters(),
        flops_per_token=run.model.flops_per_token(run.train.sequence_length),
        peak_flops=None,
    )
    trainer = Trainer(run, plan, mesh, checkpoints, heartbeat=heartbeat)
    trainer.build()
    return trainer


def copied(tensors: Mapping[str, Tensor | StateTensor]) -> dict[str, Tensor]:
    return {name: _tensor(found).detach().clone() for name, found in tensors.items()}


def _tensor(found: Tensor | StateTensor) -> Tensor:
    if isinstance(found, Tensor):
        return found
    return found.tensor if isinstance(found.tensor, Tensor) else found.tensor.read()


def differing(one: Mapping[str, Tensor | StateTensor], other: Mapping[str, Tensor | StateTensor]) -> list[str]:
    """Names whose tensors differ in any bit, or that only one of the two has."""
    first, second = copied(one), copied(other)
    both = first.keys() & second.keys()
    return sorted((first.keys() ^ second.keys()) | {name for name in both if not torch.equal(first[name], second[name])})
