"""The process of a trial: builds the trainer of a run, then takes and measures steps when asked to. Between two turns it waits for its input,
so that the other side of a duel has the devices to itself. It is rank 0, and forks the other ranks after torch is loaded.

    python -P -m phalanx.tuning.trial_process
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median_low
from typing import BinaryIO, NoReturn

import torch
import torch.distributed as dist

from phalanx import accelerator
from phalanx.comparison.trainer_process import failure, time_steps
from phalanx.events.records import Step, StepSkipped, StepTimed
from phalanx.host.process_tree import die_with
from phalanx.parallel.mesh import connect
from phalanx.spec.errors import RunFailed
from phalanx.spec.load import loads
from phalanx.spec.plan import Place, Plan
from phalanx.training.trainer import Trainer
from phalanx.tuning.trial_messages import Message, Ready, TakeTurn, TrialJob, TrialLost, TrialTurn, decode, encode

Answer = Callable[[Message], None]
_HOST = "127.0.0.1"


class RankSteps:
    """Steps of `Trainer.train` on one rank, with everything that a step of a run does: reading text, hooks, records."""

    def __init__(self, job: TrialJob, place: Place):
        run, plan = loads(job.run), Plan.from_json(job.plan)
        torch.set_num_threads(plan.threads)
        mesh = connect(place, plan.device, run.resilience.timeout, plan.layout)
        self.kind = accelerator.of(mesh.device)
        self._trainer = Trainer(run, plan, mesh, Path(job.folder) / f"rank-{place.rank}" / "checkpoints")
        self._trainer.build()
        self._trainer.load_initial_weights()
        self._events = self._trainer.train()
        self._timed: list[StepTimed] = []

    def step(self) -> float:
        """Takes one step; returns its loss."""
        for event in self._events:
            if isinstance(event, StepSkipped):
                raise RunFailed(f"step {event.step} was skipped: loss or gradient was not finite")
            if isinstance(event, Step):
                if isinstance(measured := self._trainer.hooks.take_measurement(), StepTimed):
                    self._timed.append(measured)
                return event.loss
        raise RunFailed("the run ended before its last step")

    def parts(self) -> dict[str, float]:
        """Seconds by part of the timed step of median length; empty without one. Returned once."""
        timed, self._timed = self._timed, []
        if not timed:
            return {}
        middle = median_low([event.seconds for event in timed])
        return next(event.parts for event in timed if event.seconds == middle)


def serve(job: TrialJob, place: Place, orders: BinaryIO, answer: Answer, forward: Callable[[bytes], None]) -> None:
    """The program of a rank: takes the steps that messages ask for. `forward` passes a message on to the other ranks."""
    rank = RankSteps(job, place)
    gc.collect()
    gc.freeze()  # what libraries have loaded is not searched for garbage in the middle of a step
    answer(Ready())
    for line in orders:
        forward(line)
        order = decode(line)
        assert isinstance(order, TakeTurn)
        timed = time_steps(rank.step, rank.kind, order.steps)
        answer(TrialTurn(seconds=timed.seconds, losses=timed.losses, parts=rank.parts()))


def _lead(job: TrialJob, orders: BinaryIO, answer: Answer) -> None:
    """Rank 0: forks the others, serves the store at which all meet, and passes messages on."""
    ranks = Plan.from_json(job.plan).ranks
    if ranks == 1:
        serve(job, Place(), orders, answer, lambda line: None)
        return
    pipes: list[int] = []
    with socket.create_server((_HOST, 0)) as listener:  # it is bound before any rank looks for it
        host, port = listener.getsockname()[:2]
        places = [Place(rank=rank, ranks=ranks, local_rank=rank, store=(host, port)) for rank in range(ranks)]
        for place in places[1:]:  # before a thread is started, which a fork would not have
            pipes.append(_fork_rank(job, place, answer))
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno()))

    def forward(line: bytes) -> None:
        for pipe in pipes:
            os.write(pipe, line)

    serve(job, places[0], orders, answer, forward)
    del store


def _fork_rank(job: TrialJob, place: Place, answer: Answer) -> int:
    """Forks a rank; returns the pipe to it."""
    parent, (reading, writing) = os.getpid(), os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns about forks of processes with threads; those of libraries are idle here and hold no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(reading)
        return writing
    os.close(writing)
    die_with(parent)
    _follow(job, place, reading, answer)


def _follow(job: TrialJob, place: Place, reading: int, answer: Answer) -> NoReturn:
    """A rank other than 0. Of its messages, only that of a failure is for the parent."""
    try:
        serve(job, place, os.fdopen(reading, "rb"), lambda message: None, lambda line: None)
    except BaseException as error:
        _report(error, answer)
        while True:  # its end would cause failures of other ranks, and the parent ends all of them
            signal.pause()
    os._exit(0)


def _report(error: BaseException, answer: Answer) -> None:
    traceback.print_exc()
    reason = failure(error)
    with contextlib.suppress(OSError):
        answer(TrialLost(reason=reason.reason, out_of_memory=reason.out_of_memory))


def main() -> None:
    # The answers have the pipe to themselves: what libraries print goes to the log.
    pipe = os.dup(1)
    os.dup2(2, 1)

    def answer(message: Message) -> None:
        os.write(pipe, encode(message))

    try:
        job = decode(sys.stdin.buffer.readline())
        assert isinstance(job, TrialJob)
        die_with(job.parent)
        _lead(job, sys.stdin.buffer, answer)
    except BaseException as error:  # a setting may break anything; it is a reason in the table
        _report(error, answer)


if __name__ == "__main__":
    main()
