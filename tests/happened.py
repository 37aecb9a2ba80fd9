"""Records of a run for tests of what reads them."""

from __future__ import annotations

from typing import Any

from phalanx.events.records import Evaluated, FailureNoticed, Finished, Recovered, RunStarted, Saved, Step, StepSkipped
from phalanx.spec.plan import Promise

LAYOUT: Any = {"data": 2}


def run_started(time: float = 1000.0, *, promised: float | None = None, steps: int = 100) -> RunStarted:
    promise = (
        None
        if promised is None
        else Promise.from_saved(
            {
                "seconds": 1.0, "low": 0.9, "high": 1.1, "tokens_per_second": promised, "memory": {}, "total_memory": 0.0, "mfu": None, "days": 1.0,
                "price": None, "split": {},
            }
        )
    )  # fmt: skip
    return RunStarted(
        time=time, version="1", ranks=2, device="cpu", steps=steps, parameters=10, micro_batch=1, accumulation=1, layout=LAYOUT, compute="fp32",
        promise=promise,
    )  # fmt: skip


def a_step(number: int, time: float | None = None, *, loss: float = 3.0, speed: float = 100.0, seconds: float = 1.0) -> Step:
    return Step(
        time=1000.0 + number if time is None else time, step=number, loss=loss, tokens=100, samples=number, batch_digest="", learning_rate=1e-3, grad_norm=1.0,
        seconds=seconds, tokens_per_second=speed, flops_per_second=1e9, mfu=0.5, memory=1000,
    )  # fmt: skip


def skipped(number: int, in_a_row: int = 1, reason: str = "not finite") -> StepSkipped:
    return StepSkipped(
        time=1000.0 + number, step=number, samples=number, loss=float("nan"), grad_norm=1.0, in_a_row=in_a_row, reason=reason
    )


def evaluated(number: int, loss: float = 2.5) -> Evaluated:
    return Evaluated(time=1000.0 + number, step=number, loss=loss, tokens=10, seconds=0.25)


def saved(number: int, size: int = 1000) -> Saved:
    return Saved(time=1000.0 + number, step=number, path=f"step-{number}", bytes=size, seconds=0.5)


def failed(number: int, time: float, *, rank: int = 1, step: int = 3) -> FailureNoticed:
    return FailureNoticed(time=time, number=number, cause="died", message=f"rank {rank} was killed", rank=rank, step=step)


def recovered(number: int, time: float, *, generation: int = 1) -> Recovered:
    return Recovered(
        time=time, failures=[number], action="restart", generation=generation, ranks=2, layout=LAYOUT, source="live", step=3, steps_lost=0,
        noticed=time - 2.0, decided=time - 1.5, restarted=time - 1.0, first_step=time, seconds=2.0,
    )  # fmt: skip


def finished(number: int) -> Finished:
    return Finished(time=1000.5 + number, step=number)
