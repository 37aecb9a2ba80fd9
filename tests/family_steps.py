"""Steps of models of transformers on ranks, next to those of one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gathering import wholes
from hf_families import ONE_DOCUMENT, config
from ranks import ALONE, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.models.custom import cuts_of
from phalanx.models.init import build
from phalanx.parallel.mesh import Mesh
from phalanx.spec.config_text import spec_of
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Run
from phalanx.verification.tolerance import FLOOR

UNEVEN = {
    "vocab_size": 331, "intermediate_size": 83, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 10, "n_inner": 83, "n_head": 6,
}  # fmt: skip
"""A vocabulary and a width that two, three and four ranks divide unevenly; heads for two and three."""


def family(kind: str, **changes: Any) -> ModelSpec:
    """Its vocabulary holds all bytes, and is even; its weights are larger than initial ones, so that every part tells."""
    values = json.loads(config(kind).to_json_string(use_diff=False))
    more = {name: value for name, value in changes.items() if name in values}
    return spec_of(values | {"vocab_size": 258, "initializer_range": 0.1} | more)


def family_run(kind: str, **layout: Any) -> Run:
    run = tiny_run("train.sequence_length=16", "train.batch=4", "precision.compute=fp32", "optimizer.eps=1e-4")
    data = replace(run.data, document_mask=kind not in ONE_DOCUMENT)
    return replace(run, model=family(kind), layout=Layout(**{"data": 1} | layout), data=data)


def step(mesh: Mesh, run: Run, folder: Path) -> tuple[float, dict[str, Tensor], int]:
    """The loss and the whole gradients of a step, and how many sums over the ranks a forward has."""
    trainer = tiny_trainer(mesh, run, folder)
    part, counted = trainer.sharded.parts[0], []
    original = dist.all_reduce
    with torch.no_grad():
        dist.all_reduce = lambda *args, **options: counted.append(1) or original(*args, **options)
        part(torch.arange(16)[None], torch.arange(16)[None])
        dist.all_reduce = original
    outcome = trainer.step()
    assert outcome is not None
    gradients = wholes({owned.name: (owned.gradient, owned.shard) for owned in trainer.sharded.owned}, mesh)
    trainer.close()
    return outcome.loss, gradients, len(counted)


def differing(run: Run, folder: Path, layout: Layout) -> tuple[float, dict[str, float], int]:
    """How far loss and gradients on ranks are from those of one process, relative to the largest gradient of each parameter, and the sums of a
    forward."""
    cuts_of(build(run.model), layout.tensor, layout.sequence)  # once, for the ranks that are forked from here
    loss, gradients, none = step(ALONE, run, folder / "one")
    assert none == 0
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    far, apart, sums = 0.0, {}, set()
    for got_loss, got, count in run_ranks(step, layout.ranks, run, folder / "some", layout=layout):
        far = max(far, abs(got_loss - loss) / loss)
        sums.add(count)
        for name, want in gradients.items():
            # A gradient that is zero but for rounding, as that of a key's bias, is measured by the others.
            size = max(want.abs().max().item(), FLOOR * largest)
            distance = (got[name] - want).abs().max().item() / size
            apart[name] = max(apart.get(name, 0.0), distance)
    assert len(sums) == 1
    return far, {name: distance for name, distance in apart.items() if not distance <= 1e-4}, sums.pop()
