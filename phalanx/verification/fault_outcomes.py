"""The outcome of each injected fault, and whether a disturbed run equals an undisturbed one, computed from their events alone.
`verification/chaos_campaign` trains the two runs and calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from phalanx.events.fault_log import fault_record
from phalanx.events.records import (
    Corrupted,
    Event,
    FailureNoticed,
    FaultInjected,
    Finished,
    NotFinite,
    Recovered,
    RunStarted,
    SaveFailed,
    Step,
    StepSkipped,
    Straggling,
    WorkerFailed,
)
from phalanx.faults.grammar import Fault
from phalanx.verification.tolerance import number_difference

LONG = 15.0
"""Seconds from which on a hang or a freeze must be detected."""
_Kind = TypeVar("_Kind", bound=Event)
Detection = FailureNoticed | Corrupted | NotFinite | Straggling | SaveFailed

_TOGETHER = 1.0  # seconds before a detected failure in which another fault may have hit the same ranks
_UNDETECTED = 6.0  # seconds that a hang stays undetected; another failure may end it before


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOutcome:
    """One fault and its outcome. Seconds count from the injection."""

    fault: str
    kind: str
    step: int | None = None
    """Step of the injection; None: it was not injected."""
    noticed: float | None = None
    """Seconds until it was detected; None: it was not."""
    recovered: float | None = None
    """Seconds until the end of the next step; None: no recovery was needed."""
    steps_lost: int = 0
    message: str = ""
    """Message of the detection."""
    passed: bool = True
    """Whether it was detected if it must be, with the right rank or node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One check of a campaign."""

    name: str
    passed: bool
    message: str


def fault_outcomes(
    faults: Sequence[Fault], events: Sequence[Event], moments: Mapping[int, float] | None = None
) -> list[FaultOutcome]:
    """The outcome of each fault. A detection belongs to one fault: the last that fits. `moments`: times of injection by fault number,
    from the claims of the run directory."""
    injected: dict[str, list[FaultInjected]] = {}
    for event in events:
        if isinstance(event, FaultInjected):
            injected.setdefault(event.fault, []).append(event)
    pairs: list[tuple[int, Fault, FaultInjected]] = []
    for number, fault in enumerate(faults):
        if records := injected.get(str(fault)):
            pairs.append((number, fault, records.pop(0)))
        elif moments and number in moments:
            pairs.append((number, fault, replace(fault_record(fault, fault.step), time=moments[number])))
    detected: dict[int, Detection] = {}
    for event in (event for event in events if isinstance(event, Detection)):
        # The last fault before it: an earlier one may have stayed undetected, as a short hang does.
        fitting = [
            (when.time, number)
            for number, fault, when in pairs
            if number not in detected and when.time <= event.time and _matches(fault, when, event)
        ]
        if fitting:
            detected[max(fitting)[1]] = event
    outcomes = {number: _outcome(fault, when, detected.get(number), events) for number, fault, when in pairs}
    return [outcomes.get(number) or FaultOutcome(fault=str(fault), kind=fault.kind) for number, fault in enumerate(faults)]


def _matches(fault: Fault, injected: FaultInjected, event: Detection) -> bool:
    """Whether this detection fits this fault and names the right rank or node."""
    if isinstance(event, FailureNoticed):
        if fault.node is not None:
            return event.node == fault.node and event.cause in ("node lost", "connection lost")
        if fault.link is not None:
            return event.node in fault.link
        causes = {"kill": "died", "raise": "failed", "hang": "hung", "freeze": "hung", "corrupt": "corrupt"}
        return event.rank == fault.rank and event.cause in (causes.get(fault.kind), "died" if fault.kind == "raise" else None)
    if isinstance(event, Corrupted):
        named = event.rank in (fault.rank, None)  # of two replicas that differ, either may be wrong
        return fault.kind == "corrupt" and named and event.step >= (injected.step or 0)
    if isinstance(event, NotFinite):
        right = fault.layer is None or event.layer.startswith(fault.layer)
        return fault.kind == "nan" and event.rank == fault.rank and event.step == injected.step and right
    if isinstance(event, Straggling):
        return fault.kind == "slow" and event.rank == fault.rank
    return fault.kind == "fill-disk" and event.time <= injected.time + (fault.seconds or 0) + 1


def _outcome(fault: Fault, injected: FaultInjected, noticed: Detection | None, events: Sequence[Event]) -> FaultOutcome:
    outcome = FaultOutcome(fault=str(fault), kind=fault.kind, step=injected.step)
    if noticed is None:
        # The recovery that was in progress at that time, or that answers a fault of the same time.
        before = _UNDETECTED if fault.kind in ("hang", "freeze") else _TOGETHER
        meanwhile = _first(events, Recovered, lambda event: event.noticed - before <= injected.time <= event.first_step)
        if meanwhile is None:
            return replace(outcome, passed=not _must_be_detected(fault))
        message = f"injected while the run recovered from failure {', '.join(map(str, meanwhile.failures)) or 'none'}"
        return replace(outcome, recovered=meanwhile.first_step - injected.time, message=message)
    failure = noticed if isinstance(noticed, FailureNoticed) else None
    if isinstance(noticed, Corrupted):  # the failure that follows it
        failure = _first(events, FailureNoticed, lambda event: event.cause == "corrupt" and event.time >= noticed.time)
    recovery = _first(events, Recovered, lambda event: failure is not None and failure.number in event.failures)
    after = recovery.first_step if recovery else None
    if recovery is None and isinstance(noticed, NotFinite | Corrupted):  # which may skip only one step
        step = _first(events, Step, lambda event: event.time > noticed.time)
        after = step.time if step else None
    return replace(
        outcome,
        noticed=noticed.time - injected.time,
        recovered=None if after is None else after - injected.time,
        steps_lost=recovery.steps_lost if recovery else 0,
        message=noticed.reason if isinstance(noticed, SaveFailed) else noticed.message,
    )


def _must_be_detected(fault: Fault) -> bool:
    """A short hang, a slow period or a short loss of a link may stay undetected; other faults may not."""
    if fault.kind in ("hang", "freeze"):
        return fault.seconds is None or fault.seconds >= LONG
    return fault.kind in ("kill", "raise", "corrupt", "nan")


def _first(events: Iterable[Event], kind: type[_Kind], wanted: Callable[[_Kind], bool]) -> _Kind | None:
    return next((event for event in events if isinstance(event, kind) and wanted(event)), None)


def steps_of(events: Iterable[Event]) -> dict[int, Step | StepSkipped]:
    """The last record of each step, because a step may be repeated."""
    return {event.step: event for event in events if isinstance(event, Step | StepSkipped)}


def same_layout(events: Iterable[Event]) -> bool:
    """Whether the layout never changed."""
    layouts = [event.layout for event in events if isinstance(event, RunStarted | Recovered)]
    return all(layout == layouts[0] for layout in layouts)


def run_verdicts(ours: Sequence[Event], theirs: Sequence[Event], steps: int, accepted: float) -> Iterator[Verdict]:
    """Compares the disturbed run with the undisturbed one; `accepted` is the maximum relative difference of a step's loss."""
    for name, events in (("undisturbed", theirs), ("disturbed", ours)):
        last = next((event for event in reversed(events) if isinstance(event, Finished | WorkerFailed)), None)
        done = isinstance(last, Finished) and last.step == steps
        message = f"all {steps} steps" if done else "it did not reach the last step"
        if isinstance(last, WorkerFailed):
            message = last.reason
        yield Verdict(name=f"{name} run", passed=done, message=message)
    pair = steps_of(ours), steps_of(theirs)
    other_batch = next(filter(None, (_batch_difference(step, *pair) for step in range(1, steps + 1))), None)
    same = f"the same tokens in each of {steps} steps"
    yield Verdict(name="batches", passed=other_batch is None, message=other_batch or same)
    yield _losses(*pair, accepted)


_Steps = dict[int, Step | StepSkipped]


def _batch_difference(step: int, ours: _Steps, theirs: _Steps) -> str | None:
    """How the batches of a step differ; None: they are the same."""
    one, other = ours.get(step), theirs.get(step)
    if one is None or other is None:
        whose = "either run" if one is other else "the disturbed run" if one is None else "the undisturbed run"
        return f"step {step} has no record in {whose}"
    if type(one) is not type(other):
        return f"step {step} was {'skipped' if isinstance(one, StepSkipped) else 'taken'} in the disturbed run only"
    batches = [(record.samples, getattr(record, "batch_digest", ""), getattr(record, "tokens", 0)) for record in (one, other)]
    return None if batches[0] == batches[1] else f"step {step} read other tokens"


def _losses(ours: _Steps, theirs: _Steps, accepted: float) -> Verdict:
    both = [step for step in ours if isinstance(ours[step], Step) and isinstance(theirs.get(step), Step)]
    apart = {step: number_difference(ours[step].loss, theirs[step].loss) for step in both}
    if not apart:
        return Verdict(name="loss", passed=False, message="there is no step to compare")
    worst = max(apart, key=lambda step: apart[step])
    message = f"{apart[worst]:.1e} apart at most, in step {worst}; accepted {accepted:.0e}"
    return Verdict(name="loss", passed=apart[worst] <= accepted, message=message if apart[worst] else "the same in every bit")


def outcome_verdicts(outcomes: Sequence[FaultOutcome]) -> Iterator[Verdict]:
    """Whether the faults were injected and detected."""
    injected = [outcome for outcome in outcomes if outcome.step is not None]
    missing = "; ".join(outcome.fault for outcome in outcomes if outcome.step is None)
    message = f"{len(injected)} of {len(outcomes)}" + (f"; their target was missing: {missing}" if missing else "")
    yield Verdict(name="faults injected", passed=bool(injected) or not outcomes, message=message)
    undetected = [outcome.fault for outcome in injected if not outcome.passed]
    message = f"not detected, or with a wrong rank: {'; '.join(undetected)}"
    if not undetected:
        message = "all that must be detected, with the right rank"
    yield Verdict(name="noticed", passed=not undetected, message=message)
