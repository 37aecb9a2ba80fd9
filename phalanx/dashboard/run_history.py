"""The events of a run directory as one history: launches that rolled back to a checkpoint rewrite what came after it.

The loss curve and the summary are drawn from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.events.records import Evaluated, Event, Restored, RunStarted, Step, StepSkipped


@dataclass(slots=True)
class History:
    """What holds now, by step."""

    steps: dict[int, Step] = field(default_factory=dict)
    evaluations: dict[int, Evaluated] = field(default_factory=dict)
    skipped: list[StepSkipped] = field(default_factory=list)
    launch: list[Step] = field(default_factory=list)
    """Steps of the last launch, in order."""


def history(events: Iterable[Event]) -> History:
    """Fold the records in the order in which they were written."""
    known, fresh = History(), True
    for event in events:
        if isinstance(event, RunStarted):
            known.launch, fresh = [], True
        elif isinstance(event, Restored):
            _forget(known, event.step + 1)
        elif isinstance(event, Step | StepSkipped):
            if fresh or event.step in known.steps:
                # A launch, or a recovery, that found no checkpoint says nothing about it and begins anew: the same is undone.
                _forget(known, event.step)
                fresh = False
            if isinstance(event, StepSkipped):
                known.skipped.append(event)
            else:
                known.steps[event.step] = event
                known.launch.append(event)
        elif isinstance(event, Evaluated):
            known.evaluations[event.step] = event
    return known


def _forget(known: History, first: int) -> None:
    known.steps = {step: record for step, record in known.steps.items() if step < first}
    known.evaluations = {step: record for step, record in known.evaluations.items() if step < first}
    known.skipped = [record for record in known.skipped if record.step < first]
