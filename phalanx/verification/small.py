"""A model of the same family that a laptop can train, and a layout that it has ranks for. `verification/case` asks for both.

A small model keeps what a family is made of: grouped queries, normalised queries and keys, latent attention, experts and their
router, tied embeddings, biases, positions. Its sizes are as odd as the layout allows, since odd sizes are where cutting goes wrong.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from phalanx.spec.layout import Layout
from phalanx.spec.model import Mla, ModelSpec, Moe

TINY = 2_000_000
"""Parameters up to which a model is taken as it is."""
_VOCABULARY = 257
_LAYERS = 5
_FFN = 43
_INITIAL = 0.1  # larger than usual weights: attention and routing then depend on what they read, and an error in them shows


def shrink(spec: ModelSpec, layout: Layout, length: int) -> ModelSpec:
    """The small model of `spec`'s family for a layout and a sequence length."""
    heads, kv = _heads(spec, layout)
    head = 8 if heads <= 8 else 4
    stages = layout.pipeline * layout.stages_per_rank if layout.pipeline > 1 else 1
    small = replace(
        spec,
        preset=None,
        from_=None,
        layers=_layers(stages),
        heads=heads,
        kv_heads=None if spec.kv_heads is None else kv,
        dim=heads * head,
        ffn=_FFN,
        vocab=_VOCABULARY,
        context=length,
        mtp_depth=min(spec.mtp_depth, 2),
        init_std=max(spec.init_std, _INITIAL),
    )
    if spec.head_dim is not None:  # attention wider or narrower than the residual stream, as it is there
        wider = spec.heads * spec.head > spec.dim
        small = replace(small, head_dim=head, dim=head * (max(1, heads - 2) if wider else heads))
    if spec.rope_scaling is not None:  # so short that some frequencies of these heads are stretched and others are not
        small = replace(small, rope_scaling=replace(spec.rope_scaling, original_context=16))
    if spec.mla is not None:
        ranks = Mla(kv_rank=16, q_rank=None if spec.mla.q_rank is None else 12, nope_dim=8, rope_dim=4, value_dim=6)
        small = replace(small, mla=ranks)
    return replace(small, moe=None if spec.moe is None else _experts(spec.moe, layout))


def _layers(stages: int) -> int:
    """Enough for every stage, and not the same number in each."""
    layers = max(_LAYERS, stages + 1)
    return layers + 1 if stages > 1 and layers % stages == 0 else layers


def _heads(spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """Query and key heads: the family's ratio, in the fewest heads that the layout divides."""
    unit = layout.tensor * (layout.context if layout.context_method == "ulysses" else 1)
    if spec.mla is not None or spec.kv == spec.heads:
        heads = 3 * unit
        return (heads, heads)
    ratio = min(8, max(2, spec.heads // spec.kv))
    kv = min(spec.kv, 2)
    return math.lcm(kv * ratio, unit), kv


def _experts(moe: Moe, layout: Layout) -> Moe:
    groups = min(moe.groups, 4)
    each = math.lcm(groups, layout.expert)
    experts = each * max(2, -(-6 // each))
    active_groups = min(moe.active_groups, groups)
    return replace(
        moe,
        experts=experts,
        groups=groups,
        active_groups=active_groups,
        active=min(moe.active, 3, experts // groups * active_groups),
        ffn=12 * layout.expert_tensor,
        shared=min(moe.shared, 1),
        dense_layers=min(moe.dense_layers, 1),
    )


def fit(layout: Layout, most: int) -> tuple[Layout, list[str]]:
    """The layout with at most so many ranks, and what was shrunk, in words. Degrees stay above 1 as long as they can."""
    degrees: dict[str, Any] = {name: getattr(layout, name) or 1 for name in ("data", "shard", "context", "tensor", "pipeline")}
    given = dict(degrees)
    for least in (2, 1):
        for name in degrees:
            while math.prod(degrees.values()) > most and degrees[name] > least:
                degrees[name] = max(least, degrees[name] // _smallest_factor(degrees[name]))
    fitted = replace(layout, **degrees)
    if fitted.shard == 1:
        fitted = replace(fitted, zero=3)
    if fitted.tensor == 1:
        fitted = replace(fitted, sequence=False)
    if fitted.pipeline == 1:
        fitted = replace(fitted, schedule="1f1b", schedule_file=None, stages=None)
    fitted = _fit_experts(fitted)
    given |= {"expert": layout.expert, "expert_tensor": layout.expert_tensor}
    shrunk = [
        f"layout.{name} {before} → {getattr(fitted, name)}" for name, before in given.items() if getattr(fitted, name) != before
    ]
    if not shrunk:
        return fitted, []
    return fitted, [f"The layout has {layout.ranks} ranks and this proof {fitted.ranks}, at most {most}: {', '.join(shrunk)}."]


def _fit_experts(layout: Layout) -> Layout:
    """Experts on as many of a stage's ranks as there are now."""
    expert, tensor = layout.expert, layout.expert_tensor
    while layout.ranks // layout.pipeline % (expert * tensor):
        if expert > 1 and (expert >= tensor or tensor == 1):
            expert //= _smallest_factor(expert)
        else:
            tensor //= _smallest_factor(tensor)
    return replace(layout, expert=expert, expert_tensor=tensor)


def _smallest_factor(number: int) -> int:
    return next((factor for factor in range(2, math.isqrt(number) + 1) if number % factor == 0), max(number, 1))
