"""Which blocks each pipeline stage gets, balanced by cost, so that no stage keeps the others waiting. Planning, training and
rehearsal call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Forward and backward costs of a model's parts, in any unit."""

    first: float
    """Cost of what precedes the blocks: the embedding."""
    blocks: tuple[float, ...]
    last: float
    """Cost of what follows the blocks: norm, head and loss."""


def cut(costs: Sequence[float], first: float, last: float, stages: int) -> list[tuple[int, int]]:
    """(first, stop) of each stage's blocks, at least one block each.

    Minimizes the most expensive stage, then the sum of squares. The result is deterministic: every rank computes the same cut.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        remedy = "take fewer pipeline ranks or stages, or more layers"
        raise RunError(f"{blocks} layers cannot be split into {stages} pipeline stages, which need at least one each: {remedy}")
    total = list(accumulate(costs, initial=0.0))

    def price(stage: int, begin: int, stop: int) -> float:
        return total[stop] - total[begin] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    # best[stop] = (most expensive stage, sum of squares, cuts) after assigning the blocks before `stop` to the stages so far.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        following = {}
        for stop in range(stage + 1, blocks - (stages - stage - 1) + 1):
            choices = []
            for begin in best:
                if begin < stop:
                    (most, squares, stops), here = best[begin], price(stage, begin, stop)
                    choices.append((max(most, here), squares + here**2, (*stops, stop)))
            following[stop] = min(choices)
        best = following
    stops = best[blocks][2]
    return list(zip((0, *stops[:-1]), stops, strict=True))


def flop_costs(spec: ModelSpec, sequence: int) -> Costs:
    """Costs in floating-point operations per token. The embedding look-up has none; its gradient costs one addition per value."""
    plain = replace(spec, mtp_depth=0, moe=None, layers=1, window=None, window_from=0, global_every=None)
    last = spec.flops_per_token(sequence) - replace(spec, mtp_depth=0).flops_per_token(sequence)
    last += plain.flops_per_token(sequence) - _block(plain, None, sequence)
    sparse = plain if spec.moe is None else replace(plain, moe=replace(spec.moe, dense_layers=0))
    kinds = [(plain if layer < spec.dense_layers else sparse, spec.window_of(layer)) for layer in range(spec.layers)]
    costs = {kind: _block(*kind, sequence) for kind in set(kinds)}
    return Costs(first=float(spec.dim), blocks=tuple(costs[kind] for kind in kinds), last=last)


def _block(spec: ModelSpec, window: int | None, sequence: int) -> float:
    """FLOPs per token of one block: the difference between two layers and one."""
    two, one = replace(spec, layers=2, window=window), replace(spec, window=window)
    return two.flops_per_token(sequence) - one.flops_per_token(sequence)
