"""Cutting a model into stages, against every way there is."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from phalanx.schedules.stage_split import cut, flop_costs
from phalanx.spec.errors import RunError
from phalanx.spec.model import PRESETS, ModelSpec, Moe


def dearest(ranges: list[tuple[int, int]], costs: list[float], first: float, last: float) -> float:
    prices = [sum(costs[begin:stop]) for begin, stop in ranges]
    prices[0] += first
    prices[-1] += last
    return max(prices)


def test_stage_split_is_optimal() -> None:
    dice = random.Random(1)
    for _ in range(60):
        blocks, stages = dice.randint(1, 8), dice.randint(1, 8)
        if stages > blocks:
            continue
        costs = [dice.choice([1.0, 1.0, 2.5]) for _ in range(blocks)]
        first, last = dice.choice([0.0, 0.1, 3.0]), dice.choice([0.0, 1.7, 6.0])
        found = cut(costs, first, last, stages)
        assert [begin for begin, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == blocks
        assert all(begin < stop for begin, stop in found) and len(found) == stages
        others = [[0, *places, blocks] for places in combinations(range(1, blocks), stages - 1)]
        best = min(dearest(list(pairwise(one)), costs, first, last) for one in others)
        assert dearest(found, costs, first, last) == pytest.approx(best)


def test_head_counts_toward_the_last_stage() -> None:
    assert cut([1.0] * 5, 0.0, 0.0, 2) == [(0, 2), (2, 5)]
    assert cut([1.0] * 5, 0.0, 2.0, 2) == [(0, 3), (3, 5)]
    assert cut([1.0] * 8, 0.1, 4.0, 4) == [(0, 2), (2, 4), (4, 7), (7, 8)]  # the rest still shares evenly


def test_fewer_layers_than_stages_is_refused() -> None:
    with pytest.raises(RunError, match="5 layers cannot be split into 8 pipeline stages, which need at least one each"):
        cut([1.0] * 5, 0.0, 0.0, 8)


def test_stage_costs_add_up_to_the_model() -> None:
    plain = ModelSpec(dim=24, layers=5, heads=6, kv_heads=2, ffn=48, vocab=257)
    moe = replace(plain, moe=Moe(experts=8, active=2, ffn=16, shared=1, dense_layers=2), mtp_depth=1)
    for spec in (plain, moe, replace(PRESETS["llama3-8b"], vocab=128256), PRESETS["mixtral-8x7b"]):
        costs = flop_costs(spec, 512)
        assert len(costs.blocks) == spec.layers
        assert sum(costs.blocks) + costs.last == pytest.approx(spec.flops_per_token(512))
        assert costs.first == spec.dim
    dense, sparse = set(flop_costs(moe, 512).blocks[:2]), set(flop_costs(moe, 512).blocks[2:])
    assert len(dense) == len(sparse) == 1 and dense != sparse
