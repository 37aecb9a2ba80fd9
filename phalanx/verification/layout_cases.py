"""Layouts that nobody hand-picked: mixes of every degree and option over small models of odd sizes, as many as are asked for.
`phalanx verify --layouts all` proves them all. What cannot work is left to the run file's own checks to say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout, Schedule
from phalanx.spec.model import Mla, ModelSpec, Moe
from phalanx.spec.run import Data, Memory, Run, Train
from phalanx.verification.case import documents, make

_DENSE = ModelSpec(dim=48, layers=5, heads=6, kv_heads=2, ffn=43, vocab=257, context=96, init_std=0.1)
_EXPERTS = Moe(experts=8, active=2, ffn=12, shared=1, dense_layers=1, bias_rate=0.01, balance_loss=0.01)
_GROUPED = Moe(
    experts=8, active=3, ffn=12, router="sigmoid", scale=2.5, groups=4, active_groups=2, bias_rate=0.01, balance_loss=0.001
)
MODELS = {
    "dense": _DENSE,
    "gpt": replace(_DENSE, kv_heads=None, norm="layer", activation="gelu", positions="learned", bias=True, tied=True),
    "moe": replace(_DENSE, qk_norm=True, moe=_EXPERTS),
    "mla": replace(
        _DENSE,
        kv_heads=None,
        mla=Mla(kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, value_dim=6),
        moe=replace(_GROUPED, dense_layers=1),
    ),
    "mla-dense": replace(_DENSE, kv_heads=None, tied=True, mla=Mla(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6)),
}
"""Odd in every way that is legal: 5 layers, 6 heads of which 2 for keys, a vocabulary of 257."""
_TRIES = 200  # for each layout that is asked for


def generate(run: Run, ranks: int, *, count: int = 40, seed: int = 0) -> list[Run]:
    """So many different legal runs for exactly so many ranks, the same for the same seed. Of `run` they keep its numbers:
    precision and optimizer. Fewer, where there are not as many."""
    dice = random.Random(seed)
    base = replace(
        run,
        data=Data(source="memory", documents=documents(seed), eval_fraction=0.0),
        train=Train(batch=8, sequence_length=48, steps=8, seed=seed, clip=run.train.clip),
        memory=Memory(),
    )
    found: dict[tuple[str, Layout], Run] = {}
    kinds = list(MODELS)
    for _ in range(_TRIES * count):
        if len(found) == count:
            break
        kind = kinds[len(found) % len(kinds)]  # every kind gets its share, however few of its layouts are legal
        one = _draw(base, kind, ranks, dice, sum(layout.pipeline > 1 for _, layout in found))
        if (kind, one.layout) not in found and _legal(one, ranks):
            found[kind, one.layout] = one
    return list(found.values())


def _legal(run: Run, ranks: int) -> bool:
    try:
        return make(run, ranks=ranks).layout.ranks == ranks
    except RunError:
        return False


def _draw(base: Run, kind: str, ranks: int, dice: random.Random, pipelines: int) -> Run:
    """`pipelines`: how many there are already; schedules take turns, or those that few layouts allow would hardly be seen."""
    degrees: dict[str, Any] = dict(
        zip(("pipeline", "data", "shard", "context", "tensor"), dice.choice(list(_factored(ranks, 5))), strict=True)
    )
    model = MODELS[kind]
    layout = Layout(
        **degrees,
        zero=dice.choice([1, 2, 3]) if degrees["shard"] > 1 else 3,
        sequence=degrees["tensor"] > 1 and dice.random() < 0.5,
        context_method=dice.choice(["ring", "gather", "ulysses"]) if degrees["context"] > 1 else "ring",
        schedule=get_args(Schedule)[pipelines % len(get_args(Schedule))] if degrees["pipeline"] > 1 else "1f1b",
        **(_expert_degrees(ranks // degrees["pipeline"], dice) if model.moe else {}),
    )
    memory = Memory(
        recompute=dice.choice(["none", "none", "full", "selective"]),
        loss_chunk=dice.choice([None, None, 7, 64]),
    )
    if memory.recompute != "none":
        memory = replace(memory, recompute_every=dice.choice([1, 2]))
    micro_batch = dice.choice([1, 2])
    return replace(base, model=model, layout=layout, memory=memory, train=replace(base.train, micro_batch=micro_batch))


def _expert_degrees(ranks: int, dice: random.Random) -> dict[str, Any]:
    expert, tensor, _ = dice.choice(list(_factored(ranks, 3)))
    return {"expert": expert, "expert_tensor": tensor}


def _factored(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many factors."""
    if parts == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            yield from ((factor, *rest) for rest in _factored(number // factor, parts - 1))
