"""A trainer that is given up goes, with all that it holds: whoever survives a failure builds the next one in the same process."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from ranks import run_ranks, tiny_run, tiny_trainer

from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.training.trainer import Trainer

LAYOUTS = {
    "replicas": Layout(data=2),
    "shares of the optimizer": Layout(data=1, shard=2, zero=1),
    "shares of everything": Layout(data=1, shard=2, zero=3),
    "tensors": Layout(data=1, tensor=2),
    "stages": Layout(data=1, pipeline=2),
}


def parameters() -> list[torch.nn.Parameter]:
    return [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Parameter)]


def left_of(mesh: Mesh, folder: Path) -> tuple[bool, int]:
    """Whether a trainer outlives its last reference, and how many numbers of its parameters do."""

    def once() -> weakref.ref[Trainer]:
        trainer = tiny_trainer(mesh, tiny_run(), folder)
        trainer.step()
        trainer.close()
        return weakref.ref(trainer)

    before = {id(one) for one in parameters()}  # what the process that forked this one had
    found = once()
    gc.collect()
    kept = [one for one in parameters() if id(one) not in before]
    return found() is not None, sum(one.numel() for one in kept)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_closed_trainer_frees_all_its_parameters(layout: Layout, tmp_path: Path) -> None:
    assert run_ranks(left_of, 2, tmp_path, layout=layout) == [(False, 0)] * 2
