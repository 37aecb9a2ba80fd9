"""The process of one trainer in the comparison: builds it, then takes and measures steps when asked to. Between two turns it waits for its
input, so that another trainer has the device to itself.

    python -P -m phalanx.comparison.trainer_process
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.accelerator import Accelerator
from phalanx.comparison.jax_device import jax_device
from phalanx.comparison.peer_loop import PeerJob
from phalanx.comparison.step_messages import (
    ON_JAX,
    PHALANX,
    PHALANX_XLA,
    Built,
    Failed,
    Message,
    TakeSteps,
    TrainerJob,
    Turn,
    decode,
    encode,
)
from phalanx.host.process_tree import die_with
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan

_MAX_REASON = 160
"""Characters of a reason in the table."""


class StepTrainer(Protocol):
    """What the comparison asks of a trainer."""

    version: str
    settings: str
    compute: str

    def step(self) -> float | Tensor:
        """Takes one step; returns its loss, which may still be computed."""
        ...

    def token_losses(self, tokens: Tensor, targets: Tensor, /) -> Tensor:
        """Losses of single tokens with the present weights."""
        ...


def make(job: TrainerJob) -> tuple[StepTrainer, PeerJob, Accelerator]:
    """Builds a trainer by its name, and says what measures its device. Each is imported on its own: what the others import would count as its memory."""
    peer = PeerJob(loads(job.run), Plan.from_json(job.plan), job.compile, on_host=job.trainer in ON_JAX)
    torch.set_num_threads(peer.plan.threads)
    if peer.on_host:
        kind = jax_device(peer)
        return _on_jax(job, peer), peer, kind
    kind = accelerator.of(peer.device)
    kind.set_device(peer.device)
    return _on_torch(job, peer), peer, kind


def _on_torch(job: TrainerJob, peer: PeerJob) -> StepTrainer:
    folder = Path(job.folder)
    match job.trainer:
        case "phalanx":
            from phalanx.comparison.phalanx_steps import PhalanxSteps

            return PhalanxSteps(peer, folder)
        case "transformers":
            from phalanx.comparison.transformers_steps import TransformersSteps

            return TransformersSteps(peer)
        case "torchtitan" | "torchtitan-fsdp":
            from phalanx.comparison.torchtitan_steps import TorchtitanSteps

            return TorchtitanSteps(peer, folder, fsdp=job.trainer == "torchtitan-fsdp")
        case _:
            from phalanx.comparison.handwritten_loop import HandwrittenLoop

            return HandwrittenLoop(peer)


def _on_jax(job: TrainerJob, peer: PeerJob) -> StepTrainer:
    if job.trainer == PHALANX_XLA:
        from phalanx.comparison.xla_steps import XlaSteps

        return XlaSteps(peer, Path(job.folder))
    from phalanx.comparison.jax_loop import JaxLoop

    return JaxLoop(peer)


class TimedSteps(NamedTuple):
    """What was measured of consecutive steps."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    losses: tuple[float, ...]


def time_steps(step: Callable[[], float | Tensor], kind: Accelerator, steps: int) -> TimedSteps:
    """Takes steps and measures each from the end of the one before: on a GPU, from the moment at which its last kernel ended, the first
    from an idle device. A trainer that does not wait for its results may launch the next step before."""
    losses: list[float | Tensor] = []
    kind.synchronize()
    cpu, ends = [time.process_time()], [_mark(kind)]
    for _ in range(steps):
        losses.append(step())
        ends.append(_mark(kind))
        cpu.append(time.process_time())
    kind.synchronize()
    seconds = tuple(_between(begin, end) for begin, end in pairwise(ends))
    return TimedSteps(seconds, tuple(end - begin for begin, end in pairwise(cpu)), tuple(float(loss) for loss in losses))


def take(trainer: StepTrainer, kind: Accelerator, steps: int) -> Turn:
    """Takes steps of a trainer and measures them."""
    timed, on_gpu = time_steps(trainer.step, kind, steps), kind.type != "cpu"
    return Turn(
        seconds=timed.seconds,
        cpu_seconds=timed.cpu_seconds,
        losses=timed.losses,
        memory=kind.max_memory_allocated() if on_gpu else peak_resident(),
        reserved=kind.max_memory_reserved() if on_gpu else None,
        retries=kind.allocation_retries(),
    )


def _mark(kind: Accelerator) -> Any:
    """This moment on the device, or on the host where an operation is complete when it returns."""
    if not kind.asynchronous:
        return time.perf_counter()
    event = kind.event(timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """Seconds between two marks."""
    return float(end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000)


def forget_peak(kind: Accelerator) -> None:
    """Peaks count from here on: building a peer from Phalanx's weights takes memory that its own users do not need."""
    kind.empty_cache()
    kind.reset_peak_memory()
    with contextlib.suppress(OSError):  # not every system allows it
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident() -> int:
    """Largest resident size of this process since `forget_peak`, or since its start where the system knows no better."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def failure(error: BaseException) -> Failed:
    """What the table says about an error."""
    # Libraries under torch report it by errors of their own.
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return Failed(reason="out of memory", out_of_memory=True)
    words = error.problems[0] if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
    return Failed(reason=textwrap.shorten(words, _MAX_REASON, placeholder=" …"))


def serve(answer: Callable[[Message], None], orders: TextIO) -> None:
    """Builds the trainer of the first message, then takes the steps that the others ask for."""
    job = decode(orders.readline())
    assert isinstance(job, TrainerJob)
    die_with(job.parent)
    trainer, peer, kind = make(job)
    losses = trainer.token_losses(*peer.probe)
    if job.trainer not in (PHALANX, PHALANX_XLA):
        _ = peer.batches  # Phalanx reads its text as it goes
    answer(
        Built(
            version=trainer.version,
            settings=trainer.settings,
            compute=trainer.compute,
            token_losses=tuple(losses.tolist()),
        )
    )
    gc.collect()
    gc.freeze()  # what a library has loaded is not searched for garbage in the middle of a step
    forget_peak(kind)
    for line in orders:
        order = decode(line)
        assert isinstance(order, TakeSteps)
        answer(take(trainer, kind, order.steps))


def main() -> None:
    # The answers have the pipe to themselves: what libraries print goes to the log.
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)

        def answer(message: Message) -> None:
            pipe.write(encode(message))
            pipe.flush()

        try:
            serve(answer, sys.stdin)
        except BaseException as error:  # a peer may raise anything; it is a reason in the table
            traceback.print_exc()
            with contextlib.suppress(OSError):
                answer(failure(error))


if __name__ == "__main__":
    main()
