"""Phalanx trains language models across one to thousands of GPUs.

    import phalanx as px

    run = px.load("run.toml", ["train.steps=20"])
    print(px.explain(run))  # the best layout with its cost, and why the others are worse
    summary = px.train(run, on_event=print).wait()  # trains in worker processes
    trainer = px.trainer(run)  # or in this process, step by step
    trainer.step()
    assert px.verify(run).passed  # proves on CPU ranks that the layout equals one device

init, Answers               write a new run file
load, loads                 read a run file, or its text
plan, explain               the fastest layout that fits, and why
rehearse                    the program of any rank of any job, without its GPUs
verify                      proof that the layout computes what one device would
train, trainer              training, in worker processes or in this one
runs, sweep, lr_find        several runs, listed or trained as a grid; a learning rate
generate, evaluate, export  what a trained model writes, its loss, a folder for transformers
bench_step                  the step next to that of other trainers
tune                        settings that make steps faster on this machine, found by trials
Run, Sampling               the value that `load` returns; how `generate` samples
RunError, RunFailed         refused before the start; failed while it ran. Both are PhalanxError.

Imports are lazy: `import phalanx` is fast, and only functions such as `px.trainer` load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx._version import __version__

if TYPE_CHECKING:
    from phalanx.api import (
        bench_step,
        evaluate,
        explain,
        export,
        generate,
        init,
        lr_find,
        plan,
        rehearse,
        runs,
        sweep,
        train,
        trainer,
        tune,
        verify,
    )
    from phalanx.models.sampling import Sampling
    from phalanx.spec.errors import PhalanxError, RunError, RunFailed
    from phalanx.spec.load import load, loads
    from phalanx.spec.new_run_file import Answers
    from phalanx.spec.run import Run

_HOMES = {
    **dict.fromkeys(("load", "loads"), "phalanx.spec.load"),
    "Answers": "phalanx.spec.new_run_file",
    **dict.fromkeys(("explain", "init", "plan", "rehearse", "verify", "train", "trainer", "bench_step", "tune"), "phalanx.api"),
    **dict.fromkeys(("evaluate", "export", "generate", "lr_find", "runs", "sweep"), "phalanx.api"),
    "Run": "phalanx.spec.run",
    "Sampling": "phalanx.models.sampling",
    **dict.fromkeys(("PhalanxError", "RunError", "RunFailed"), "phalanx.spec.errors"),
}
"""The module of each public name."""

__all__ = [
    "Answers", "PhalanxError", "Run", "RunError", "RunFailed", "Sampling", "__version__", "bench_step", "evaluate", "explain", "export", "generate",
    "init", "load", "loads", "lr_find", "plan", "rehearse", "runs", "sweep", "train", "trainer", "tune", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
