"""What a run's steps were made of, from what its ranks have recorded: one step and one rank stand for it. `planning/compare_run` sets that
beside the plan's parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.events.records import StepTimed
from phalanx.planning.refit import TOLD_BY

NAMES = {
    "compute": "computing, launching",
    "tensor": "tensor exchange",
    "context": "context exchange",
    "expert": "expert exchange",
    "data": "gradients and shards",
    "bubble": "bubble, between stages",
    "optimizer": "optimizer, offload",
    "loading": "waiting for data",
    "other": "everything else",
}
"""Parts of a step as they are measured, in words."""
_OWN = ("compute", "optimizer", "loading")
"""Parts in which a rank waits for no other."""
_NOTHING = 1e-4
"""Part of a step below which it is not worth a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One step of a run on the rank that waited least for others, as the plan's equations see a step."""

    step: int
    rank: int
    ranks: int
    """That were timed."""
    seconds: float
    parts: dict[str, float]
    """Seconds that add up to it, by the names of NAMES."""
    mean: dict[str, float]
    """The same over all ranks."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, seconds: float) -> dict[str, float]:
        """The parts of a step that takes so long."""
        return {part: spent * seconds / self.seconds for part, spent in self.parts.items()}

    def told(self, seconds: float) -> dict[str, float]:
        """The same by the names of refit.TOLD_BY: no equation knows the batch that is waited for."""
        found = self.of(seconds)
        found["other"] = found.get("other", 0.0) + found.pop("loading", 0.0)
        return {part: found.get(part, 0.0) for part in TOLD_BY}


def timed(events: Sequence[StepTimed]) -> Timed | None:
    """Of the steps that were timed, the one of median length; None where there is none."""
    by_step: dict[int, dict[int, StepTimed]] = {}
    for event in events:
        by_step.setdefault(event.step, {})[event.rank] = event
    most = max((len(ranks) for ranks in by_step.values()), default=0)
    steps = sorted(
        (list(ranks.values()) for ranks in by_step.values() if len(ranks) == most),
        key=lambda ranks: max(event.seconds for event in ranks),
    )
    if not steps:
        return None
    middle = steps[(len(steps) - 1) // 2]
    busiest = max(middle, key=lambda event: sum(event.parts.get(part, 0.0) for part in _OWN))
    names = [name for name in NAMES if any(event.parts.get(name) for event in middle)]
    return Timed(
        step=busiest.step,
        rank=busiest.rank,
        ranks=most,
        seconds=busiest.seconds,
        parts={name: busiest.parts[name] for name in names if busiest.parts.get(name)},
        mean={name: sum(event.parts.get(name, 0.0) for event in middle) / most for name in names},
    )


def beside(split: Mapping[str, float], found: Timed | None, seconds: float) -> Iterator[tuple[str, float | None, float | None]]:
    """Of each part that is worth a line: its name, what was promised of it, and what it is of a step that was measured to take so long."""
    measured = None if found is None else found.of(seconds)
    for part, name in NAMES.items():
        promised = sum(split.get(one, 0.0) for one in TOLD_BY[part]) if part in TOLD_BY else None
        spent = None if measured is None else measured.get(part, 0.0)
        if (promised or 0.0) > _NOTHING * sum(split.values()) or (spent or 0.0) > _NOTHING * seconds:
            yield name, promised, spent
