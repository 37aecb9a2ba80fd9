"""The best layout for the ranks that are left. Called by `recovery/policy` when a run shrinks or grows.

The global batch and the order of the tokens do not depend on the layout, so any legal one can go on with the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from phalanx.spec.finding import divisors
from phalanx.spec.layout import Layout

Legal = Callable[[Layout], bool]
"""Whether a layout can be run: it divides the batch, heads, experts, …, its pipeline has a schedule, and it fits in memory."""


def relayout(wanted: Layout, ranks: int, legal: Legal, batch: int | None = None) -> Layout | None:
    """The best legal layout on at most so many ranks, and never on more than were wanted; None where there is none.

    Best is, in this order:
    1. the most ranks;
    2. the fewest changes among tensor, context, pipeline, expert and expert_tensor, which are never raised; then the smallest,
       by the product of the ratios; of equal ones those which leave tensor alone, then context, expert, expert_tensor and
       pipeline: a shorter pipeline has smaller bubbles, and what the tensor group shares stays on a node;
    3. `shard` as it was, or as near as can be, by ratio; of two equally near the larger, which needs less memory;
    4. `data` is what is left.
    With enough replicas this changes `data` alone. What belongs to a degree of 1 goes with it: `sequence` to tensor, `zero` to
    shard, `schedule`, `schedule_file` and `stages` to pipeline; a schedule file is for its own number of ranks only.

    `batch`: sequences of a step, which replicas must divide: numbers of ranks that no such replicas come to are passed over.
    """
    most = min(ranks, wanted.ranks)
    for count in range(most, 0, -1) if batch is None else _counts(wanted, most, batch):
        for layout in sorted(_layouts(wanted, count, batch), key=lambda layout: cost(wanted, layout)):
            if legal(layout):
                return layout
    return None


def _counts(wanted: Layout, most: int, batch: int) -> list[int]:
    """Numbers of ranks that some layout with replicas that divide the batch has, largest first."""
    replicas = [number for number in divisors(batch) if number <= most]
    inner = {
        pipeline * tensor * context
        for pipeline in range(1, wanted.pipeline + 1)
        for tensor in range(1, wanted.tensor + 1)
        for context in range(1, wanted.context + 1)
    }
    return sorted({one * number for one in inner for number in replicas if one * number <= most}, reverse=True)


def cost(wanted: Layout, layout: Layout) -> tuple[float, ...]:
    """What layouts are ordered by, the best first."""
    kept = [
        _ratio(wanted.tensor, layout.tensor),
        _ratio(wanted.context, layout.context),
        _ratio(wanted.expert, layout.expert),
        _ratio(wanted.expert_tensor, layout.expert_tensor),
        _ratio(wanted.pipeline, layout.pipeline),
    ]
    changes = sum(ratio != 1 for ratio in kept)
    return -layout.ranks, changes, math.prod(kept), *kept, _ratio(wanted.shard, layout.shard), -layout.shard


def fitted(wanted: Layout, layout: Layout) -> Layout:
    """A layout with new degrees, and with those of the wanted settings that still have a meaning."""
    piped, same = layout.pipeline > 1, layout.pipeline == wanted.pipeline
    return replace(
        layout,
        zero=wanted.zero if layout.shard > 1 else 3,
        sequence=wanted.sequence and layout.tensor > 1,
        schedule=wanted.schedule if piped else "1f1b",
        schedule_file=wanted.schedule_file if same else None,
        stages=wanted.stages if piped else None,
    )


def _layouts(wanted: Layout, count: int, batch: int | None) -> Iterator[Layout]:
    """All layouts of so many ranks that do not raise a degree other than `data` and `shard`."""
    for pipeline in _up_to(wanted.pipeline, count):
        stage = count // pipeline
        for tensor in _up_to(wanted.tensor, stage):
            for context in _up_to(wanted.context, stage // tensor):
                replicas = stage // tensor // context
                if batch is not None and batch % replicas:
                    continue
                for shard in divisors(replicas):
                    degrees = replace(
                        wanted, pipeline=pipeline, data=replicas // shard, shard=shard, context=context, tensor=tensor
                    )
                    for expert, expert_tensor in _experts(wanted, stage):
                        yield fitted(wanted, replace(degrees, expert=expert, expert_tensor=expert_tensor))


def _experts(wanted: Layout, stage: int) -> Iterator[tuple[int, int]]:
    """How the ranks of a stage can share experts: both together divide them."""
    for expert in _up_to(wanted.expert, stage):
        for expert_tensor in _up_to(wanted.expert_tensor, stage // expert):
            yield expert, expert_tensor


def _up_to(most: int, number: int) -> list[int]:
    return [1] if most == 1 else [degree for degree in divisors(number) if degree <= most]


def _ratio(wanted: int, degree: int) -> float:
    return max(wanted, degree) / min(wanted, degree)
