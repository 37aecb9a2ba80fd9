"""The two sides of a proof, as they run inside a rank of the pool: one process that leaves all it found in a file, and a rank
that holds its own boxes against it. `verification/parity` sends them there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.models.attention import attend_locally
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import ParamShard, extract
from phalanx.training.trainer import Trainer
from phalanx.verification.case import Case
from phalanx.verification.local_sgd_reference import replicas
from phalanx.verification.recorder import Box, Moment, copied, moments
from phalanx.verification.step_cost import RankAccount, take
from phalanx.verification.tolerance import FLOOR, Row, difference, number_difference


@dataclass(frozen=True, slots=True)
class Reference:
    """What one process did, left in a file."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    """Of its parameters and buffers, in the model's order."""


@dataclass(slots=True)
class Found:
    """What a rank says."""

    rows: list[Row] = field(default_factory=list)
    spots: dict[str, ParamShard] = field(default_factory=dict)
    """Its boxes of parameters."""
    split: set[str] = field(default_factory=set)
    """Axes of the mesh along which parameters are cut, read off what the optimizer holds."""
    attends_elsewhere: bool = False
    """Its attention reaches beyond this rank."""
    account: RankAccount | None = None


def leave(mesh: Mesh, case: Case, path: Path) -> Reference:
    """One process's steps, in a file; replicas that step by themselves one after the other."""
    local = case.run.optimizer.sync_every > 1
    found = list(replicas(mesh, case)) if local else [list(_kept(_trainer(mesh, case, alone=True), case.steps))]
    torch.save(found, path)
    return Reference(path, {name: spot.slice.whole for name, (_, spot) in found[0][0].parameters.items()})


def _kept(trainer: Trainer, steps: int) -> Iterator[Moment]:
    for moment in moments(trainer, steps):
        moment.gradients, moment.parameters = copied(moment.gradients), copied(moment.parameters)
        yield moment
    trainer.close()


def compare(mesh: Mesh, case: Case, reference: Reference, account: bool) -> Found:
    """One rank's steps, each held against what one process did."""
    expected = torch.load(reference.path, weights_only=False, mmap=True)
    theirs = expected[mesh.coordinate("data") if len(expected) > 1 else 0]
    trainer = _trainer(mesh, case, alone=False)
    found = Found()
    for ours, their in zip(moments(trainer, case.steps), theirs, strict=True):
        found.rows += _numbers(ours, their, mesh.rank)
        found.rows += _tensors("parameters", ours.step, (ours.parameters, their.parameters), mesh.rank)
        if not their.skipped:  # gradients that overflowed are refused as a whole: which of them did is chance
            found.rows += _tensors("gradients", ours.step, (ours.gradients, their.gradients), mesh.rank)
        found.spots = {name: spot for name, (_, spot) in ours.parameters.items()}
    if all(their.skipped for their in theirs[1:]):  # nothing was updated on either side, which is no proof of anything
        said = f"every step overflowed, with precision.loss_scale = {case.run.precision.loss_scale:g}: lower it"
        found.rows.append(Row("loss", 1, said, mesh.rank, float("inf")))
    found.split = {axis for one in trainer.sharded.owned for axis in one.shard.split}
    attends = [module.attend for part in trainer.sharded.parts for module in part.modules() if hasattr(module, "attend")]
    found.attends_elsewhere = bool(attends) and all(_reaches_out(attend) for attend in attends)
    if account:
        found.account = take(trainer)
    trainer.close()
    return found


def _trainer(mesh: Mesh, case: Case, *, alone: bool) -> Trainer:
    run, plan = (case.alone, case.alone_plan) if alone else (case.run, case.plan)
    run = replace(run, resilience=replace(run.resilience, check_every=0))  # a proof says more than that replicas differ
    # Nothing is ever saved there; files that a technique keeps beside its run go there too.
    trainer = Trainer(run, plan, mesh, Path(case.folder) / ("alone" if alone else "ranks") / "checkpoints")
    trainer.build()
    return trainer


def _reaches_out(attend: Any) -> bool:
    """Whether what computes attention, under whatever is wrapped around it, is no longer the model's own."""
    while hasattr(attend, "inner"):
        attend = attend.inner
    return attend is not attend_locally


def _numbers(ours: Moment, their: Moment, rank: int) -> Iterator[Row]:
    if ours.step:
        if not (ours.skipped or their.skipped):  # a step that is refused does not say what it saw
            yield Row("batches", ours.step, "", rank, 0.0 if ours.batch == their.batch else 1.0)
        yield Row("loss", ours.step, "", rank, number_difference(ours.loss, their.loss))
        yield Row("gradient norm", ours.step, "", rank, number_difference(ours.norm, their.norm))


def _tensors(kind: str, step: int, sides: tuple[dict[str, Box], dict[str, Box]], rank: int) -> Iterator[Row]:
    ours, theirs = sides
    largest = {name: _largest(tensor) for name, (tensor, _) in theirs.items()}
    floor = FLOOR * max(largest.values(), default=0.0)
    for name, (tensor, spot) in ours.items():
        if name not in theirs or theirs[name][1].slice.whole != spot.slice.whole:
            yield Row(kind, step, name, rank, float("inf"))
        else:
            yield Row(
                kind, step, name, rank, difference(tensor, extract(spot.slice, theirs[name][0]), max(largest[name], floor))
            )


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
