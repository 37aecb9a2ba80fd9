"""How many of a step's micro-batches have to be taken through the program until all has been seen, and how often what was seen
happens in the whole step. `rehearsal/rehearse` asks.

What an action of a pipeline does hangs on its kind and stage alone; how much memory there is, on how many micro-batches of each
stage are under way, which messages were asked for, which stages have gradients already, and whose parameters are still gathered. A
shorter step that passes through every such situation of the whole one, and does the same in it, has its peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from phalanx.parallel.pipeline.rank_actions import rank_actions
from phalanx.schedules.actions import Schedule
from phalanx.schedules.makers import resized
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Plan

_LOOPED = 4
"""Without a pipeline: the first micro-batch, one between, the last but one and the last."""

Situation = tuple[str, int, tuple[tuple[int, int, int, bool, bool], ...], int]
"""An action's kind and stage; of each stage the micro-batches under way and those whose weights still wait, whether it has gradients,
and whether anything but a forward came last, which leaves parameters that are gathered where they are; messages asked for."""


def enough(order: Schedule | None, plan: Plan, rank: int) -> int:
    """Micro-batches that show all that the plan's do; `rank`: of the pipeline."""
    count = plan.accumulation
    if plan.device == "cpu":
        return count  # there sums are put aside as a tree over all micro-batches
    if order is None:
        return min(count, _LOOPED)
    wanted = situations(order, rank)
    for fewer in range(1, count):
        try:
            shorter = resized(order, fewer)
        except (RunError, AssertionError):
            continue
        if not shorter.problems() and wanted <= situations(shorter, rank):
            return fewer
    return count


def situations(order: Schedule, rank: int) -> set[Situation]:
    """All that a rank's program meets."""
    return {situation for _, situation in met(order, rank)}


def met(order: Schedule, rank: int) -> Iterator[tuple[str, Situation]]:
    """A rank's actions by name, each with what there is when it begins."""
    under_way: Counter[int] = Counter()
    owed: Counter[int] = Counter()
    learned: set[int] = set()
    last: dict[int, str] = {}
    stages, asked = order.stages_of(rank), set[object]()
    for step in rank_actions(order, rank):
        asked |= {message for _, message in step.receives}
        state = tuple((stage, under_way[stage], owed[stage], stage in learned, last.get(stage, "") != "F") for stage in stages)
        yield f"{step.stage}{step.kind}{step.micro_batch}", (step.kind, step.stage, state, len(asked))
        asked.discard(step.consumes)
        last[step.stage] = step.kind
        if step.kind == "F":
            under_way[step.stage] += 1
        elif step.kind == "W":
            owed[step.stage] -= 1
            learned.add(step.stage)
        else:
            under_way[step.stage] -= 1
            owed[step.stage] += step.kind == "I"
            learned.update([step.stage] if step.kind == "B" else [])


def times(order: Schedule | None, plan: Plan, rank: int, taken: int) -> dict[str, int]:
    """How often each action that was taken stands for one of the whole step, by its name; those not named stand for themselves."""
    count = plan.accumulation
    if taken == count:
        return {}
    if order is None:
        return {"micro-batch 2": count - taken + 1}
    shorter = list(met(resized(order, taken), rank))
    found = dict.fromkeys((name for name, _ in shorter), 0)
    standing = {situation: name for name, situation in shorter}
    for _, situation in met(order, rank):
        found[standing[situation]] += 1
    return found
