"""Compares the recorded steps of a rank or of a device with those of the reference, by name. `verification/parity` judges the differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from phalanx.parallel.sharded_model import ParamShard, extract
from phalanx.verification.reference import ShardValue, StepRecord
from phalanx.verification.step_cost import RankAccount
from phalanx.verification.tolerance import FLOOR, Comparison, difference, number_difference


@dataclass(slots=True)
class RankResult:
    """The comparison of one rank with the reference."""

    comparisons: list[Comparison] = field(default_factory=list)
    shards: dict[str, ParamShard] = field(default_factory=dict)
    """The rank's slices of parameters."""
    split: set[str] = field(default_factory=set)
    """Mesh axes along which parameters are sharded, read from the optimizer's parameters."""
    attends_remotely: bool = False
    """Whether its attention reads keys of other ranks."""
    account: RankAccount | None = None


def compare_records(ours: StepRecord, their: StepRecord, rank: int) -> Iterator[Comparison]:
    yield from _numbers(ours, their, rank)
    yield from _tensors("parameters", ours.step, (ours.parameters, their.parameters), rank)
    if not their.skipped:  # overflowed gradients are discarded as a whole
        yield from _tensors("gradients", ours.step, (ours.gradients, their.gradients), rank)


def _numbers(ours: StepRecord, their: StepRecord, rank: int) -> Iterator[Comparison]:
    if ours.step:
        if not (ours.skipped or their.skipped):  # the record of a skipped step has no batch
            yield Comparison("batches", ours.step, "", rank, 0.0 if ours.batch == their.batch else 1.0)
        yield Comparison("loss", ours.step, "", rank, number_difference(ours.loss, their.loss))
        yield Comparison("gradient norm", ours.step, "", rank, number_difference(ours.norm, their.norm))


def _tensors(
    kind: str, step: int, sides: tuple[dict[str, ShardValue], dict[str, ShardValue]], rank: int
) -> Iterator[Comparison]:
    ours, theirs = sides
    largest = {name: tensor.abs().max().item() if tensor.numel() else 0.0 for name, (tensor, _) in theirs.items()}
    floor = FLOOR * max(largest.values(), default=0.0)
    for name, (tensor, shard) in ours.items():
        apart = float("inf")
        if name in theirs and theirs[name][1].slice.whole == shard.slice.whole:
            apart = difference(tensor.cpu(), extract(shard.slice, theirs[name][0]), max(largest[name], floor))
        yield Comparison(kind, step, name, rank, apart)
