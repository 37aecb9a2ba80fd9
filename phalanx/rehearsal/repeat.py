"""How many of a step's micro-batches have to be taken through the program until all has been seen, and how often what was seen
happens in the whole step. `rehearsal/rehearse` asks.

What an action of a pipeline does hangs on its kind and stage alone; how much memory there is, on how many micro-batches of each
stage are under way, which messages were asked for, and which stages have gradients already. A shorter step that passes through
every such situation of the whole one, and does the same in it, has its peak.
"""

from __future__ import annotations

from collections import Counter

from phalanx.parallel.program import program
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Plan
from phalanx.spec.schedule import Schedule
from phalanx.spec.schedule_make import resized

_LOOPED = 4
"""Without a pipeline: the first micro-batch, one between, the last but one and the last."""

Situation = tuple[str, int, tuple[tuple[int, int, int, bool], ...], int]


def enough(order: Schedule | None, plan: Plan, rank: int) -> int:
    """Micro-batches that show all that the plan's do; `rank`: of the pipeline."""
    count = plan.accumulation
    if order is None:
        # On CPUs sums are put aside as a tree over all micro-batches.
        return count if plan.device == "cpu" else min(count, _LOOPED)
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
    """All that a rank's program meets: an action, and what there is when it begins."""
    under_way: Counter[int] = Counter()
    owed: Counter[int] = Counter()
    learned: set[int] = set()
    stages, asked = order.stages_of(rank), set[object]()
    found: set[Situation] = set()
    for step in program(order, rank):
        asked |= {message for _, message in step.ask}
        state = tuple((stage, under_way[stage], owed[stage], stage in learned) for stage in stages)
        found.add((step.kind, step.stage, state, len(asked)))
        asked.discard(step.takes)
        if step.kind == "F":
            under_way[step.stage] += 1
        elif step.kind == "W":
            owed[step.stage] -= 1
            learned.add(step.stage)
        else:
            under_way[step.stage] -= 1
            owed[step.stage] += step.kind == "I"
            learned.update([step.stage] if step.kind == "B" else [])
    return found


def times(order: Schedule | None, plan: Plan, rank: int, taken: int) -> dict[str, int]:
    """How often each action that was taken stands for one of the whole step, by its name; those not named stand for themselves."""
    count = plan.accumulation
    if taken == count:
        return {}
    if order is None:
        return {"micro-batch 2": count - taken + 1}
    whole = Counter((action.kind, action.stage) for action in order.actions[rank])
    found: dict[str, int] = {}
    shown: Counter[tuple[str, int]] = Counter()
    shorter = resized(order, taken).actions[rank]
    each = Counter((action.kind, action.stage) for action in shorter)
    for action in shorter:
        kind = action.kind, action.stage
        shown[kind] += 1
        if shown[kind] == each[kind]:  # the last of its kind stands for those that were left out
            found[f"{action.stage}{action.kind}{action.micro_batch}"] = whole[kind] - each[kind] + 1
    return found
