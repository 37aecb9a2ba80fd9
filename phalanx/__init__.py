"""Phalanx trains language models across one to thousands of GPUs.

    import phalanx as px

    run = px.load("run.toml", ["train.steps=20"])
    print(px.explain(run))  # the best layout with its cost, and why the others are worse
    for event in px.train(run).events():  # trains in worker processes
        ...
    trainer = px.trainer(run)  # or in this process, step by step
    trainer.step()
    assert px.verify(run).passed  # proves on CPU ranks that the layout equals one device

Imports are lazy: `import phalanx` is fast, and only functions such as `px.trainer` load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx._version import __version__

if TYPE_CHECKING:
    from phalanx.api import bench_step, explain, plan, rehearse, train, trainer, verify
    from phalanx.spec.load import load, loads

__all__ = ["__version__", "bench_step", "explain", "load", "loads", "plan", "rehearse", "train", "trainer", "verify"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    return getattr(import_module("phalanx.spec.load" if name in ("load", "loads") else "phalanx.api"), name)
