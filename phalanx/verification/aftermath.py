"""What became of planted faults, and whether a disturbed run went where an undisturbed one did: computed from their events alone.
`verification/chaos_campaign` runs the two and asks here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

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
"""Seconds from which on a rank that hangs or is frozen must have been noticed."""
Noticing = FailureNoticed | Corrupted | NotFinite | Straggling | SaveFailed


_TOGETHER = 1.0  # seconds: what one fault takes with it, another may have struck just before
_UNSEEN = 6.0  # seconds that a hang stays unseen: until then another failure may end it


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One fault and what became of it. Seconds count from the moment at which it struck."""

    fault: str
    kind: str
    step: int | None = None
    """In which it struck; None: it did not."""
    noticed: float | None = None
    """Seconds until somebody said so; None: nobody did."""
    recovered: float | None = None
    """Seconds until the first step after it was done; None: nothing had to be recovered."""
    steps_lost: int = 0
    said: str = ""
    """In the words of whoever noticed it."""
    passed: bool = True
    """It was noticed where it must be, and the right one was named."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One check of a campaign."""

    name: str
    passed: bool
    said: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def strikes(faults: Sequence[Fault], events: Sequence[Event], moments: Mapping[int, float] | None = None) -> list[Strike]:
    """Each fault with what was noticed of it. One noticing belongs to one fault: the last that it can be about. `times`: when
    each struck, by number, where that is known besides."""
    struck: dict[str, list[FaultInjected]] = {}
    for event in events:
        if isinstance(event, FaultInjected):
            struck.setdefault(event.fault, []).append(event)
    left: list[Noticing] = [event for event in events if isinstance(event, Noticing)]
    pairs: list[tuple[int, Fault, FaultInjected]] = []
    for number, fault in enumerate(faults):
        if told := struck.get(str(fault)):
            pairs.append((number, fault, told.pop(0)))
        elif moments and number in moments:
            pairs.append((number, fault, replace(fault_record(fault, fault.step), time=moments[number])))
    found: dict[int, Strike] = {}
    about: dict[int, Noticing] = {}
    for event in left:
        # The last to strike before it: an earlier one that passed unseen, as a short hang may, must not take another's word.
        fitting = [
            (when.time, number)
            for number, fault, when in pairs
            if number not in about and when.time <= event.time and _about(fault, when, event)
        ]
        if fitting:
            about[max(fitting)[1]] = event
    for number, fault, when in pairs:
        found[number] = _strike(fault, when, about.get(number), events)
    return [found.get(number) or Strike(fault=str(fault), kind=fault.kind) for number, fault in enumerate(faults)]


def _about(fault: Fault, struck: FaultInjected, event: Noticing) -> bool:
    """Whether this noticing can be of this fault, and names the right one."""
    if isinstance(event, FailureNoticed):
        if fault.node is not None:
            return event.node == fault.node and event.cause in ("node lost", "connection lost")
        if fault.link is not None:
            return event.node in fault.link
        causes = {"kill": "died", "raise": "failed", "hang": "hung", "freeze": "hung", "corrupt": "corrupt"}
        return event.rank == fault.rank and event.cause in (causes.get(fault.kind), "died" if fault.kind == "raise" else None)
    if isinstance(event, Corrupted):
        named = event.rank in (fault.rank, None)  # of two that differ, nobody can tell which is wrong
        return fault.kind == "corrupt" and named and event.step >= (struck.step or 0)
    if isinstance(event, NotFinite):
        right = fault.layer is None or event.layer.startswith(fault.layer)
        return fault.kind == "nan" and event.rank == fault.rank and event.step == struck.step and right
    if isinstance(event, Straggling):
        return fault.kind == "slow" and event.rank == fault.rank
    return fault.kind == "fill-disk" and event.time <= struck.time + (fault.seconds or 0) + 1


def _strike(fault: Fault, struck: FaultInjected, noticed: Noticing | None, events: Sequence[Event]) -> Strike:
    strike = Strike(fault=str(fault), kind=fault.kind, step=struck.step)
    if noticed is None:
        meanwhile = _recovering(struck.time, events, _UNSEEN if fault.kind in ("hang", "freeze") else _TOGETHER)
        if meanwhile is None:
            return replace(strike, passed=not _must_be_noticed(fault))
        said = f"struck while the run recovered from failure {_numbers(meanwhile.failures)}"
        return replace(strike, recovered=meanwhile.first_step - struck.time, said=said)
    number = noticed.number if isinstance(noticed, FailureNoticed) else _failure_after(noticed, events)
    recovery = next((event for event in events if isinstance(event, Recovered) and number in event.failures), None)
    after = recovery.first_step if recovery else _next_step(noticed, events)
    return replace(
        strike,
        noticed=noticed.time - struck.time,
        recovered=None if after is None else after - struck.time,
        steps_lost=recovery.steps_lost if recovery else 0,
        said=noticed.reason if isinstance(noticed, SaveFailed) else noticed.message,
    )


def _must_be_noticed(fault: Fault) -> bool:
    """A hang that ends soon, a slow spell or a link that is gone for a moment may pass unseen; the rest may not."""
    if fault.kind in ("hang", "freeze"):
        return fault.seconds is None or fault.seconds >= LONG
    return fault.kind in ("kill", "raise", "corrupt", "nan")


def _recovering(moment: float, events: Iterable[Event], before: float) -> Recovered | None:
    """The recovery that was under way then, or from what struck at the same time."""
    every = (event for event in events if isinstance(event, Recovered))
    return next((event for event in every if event.noticed - before <= moment <= event.first_step), None)


def _failure_after(noticed: Event, events: Iterable[Event]) -> int | None:
    """What was found corrupt is a failure too, which is told right after."""
    if not isinstance(noticed, Corrupted):
        return None
    every = (event for event in events if isinstance(event, FailureNoticed) and event.cause == "corrupt")
    return next((event.number for event in every if event.time >= noticed.time), None)


def _next_step(noticed: Event, events: Iterable[Event]) -> float | None:
    """When the run had gone on after a NaN, which stops nothing but a step."""
    if not isinstance(noticed, NotFinite | Corrupted):
        return None
    return next((event.time for event in events if isinstance(event, Step) and event.time > noticed.time), None)


def _numbers(failures: Sequence[int]) -> str:
    return ", ".join(map(str, failures)) or "none"


def steps_of(events: Iterable[Event]) -> dict[int, Step | StepSkipped]:
    """What counts of each step: its last record, since a step may be taken again."""
    return {event.step: event for event in events if isinstance(event, Step | StepSkipped)}


def same_layout(events: Iterable[Event]) -> bool:
    """Whether every step was taken on the layout that the run began with."""
    layouts = [event.layout for event in events if isinstance(event, RunStarted | Recovered)]
    return all(layout == layouts[0] for layout in layouts)


def judge(ours: Sequence[Event], theirs: Sequence[Event], steps: int, accepted: float) -> Iterator[Verdict]:
    """The disturbed run against the undisturbed one; `accepted` is the largest relative difference of a step's loss."""
    for name, events in (("undisturbed", theirs), ("disturbed", ours)):
        last = next((event for event in reversed(events) if isinstance(event, Finished | WorkerFailed)), None)
        done = isinstance(last, Finished) and last.step == steps
        said = (
            f"all {steps} steps"
            if done
            else last.reason
            if isinstance(last, WorkerFailed)
            else "it did not reach its last step"
        )
        yield Verdict(name=f"{name} run", passed=done, said=said)
    ours_, theirs_ = steps_of(ours), steps_of(theirs)
    yield _batches(ours_, theirs_, steps)
    yield _losses(ours_, theirs_, accepted)


def _batches(ours: dict[int, Step | StepSkipped], theirs: dict[int, Step | StepSkipped], steps: int) -> Verdict:
    for step in range(1, steps + 1):
        one, other = ours.get(step), theirs.get(step)
        if one is None or other is None:
            whose = "either run" if one is other else "the disturbed run" if one is None else "the undisturbed run"
            return Verdict(name="batches", passed=False, said=f"step {step} has no record in {whose}")
        if type(one) is not type(other):
            words = "left out" if isinstance(one, StepSkipped) else "taken"
            return Verdict(name="batches", passed=False, said=f"step {step} was {words} in the disturbed run alone")
        seen = [(record.samples, getattr(record, "batch_digest", ""), getattr(record, "tokens", 0)) for record in (one, other)]
        if seen[0] != seen[1]:
            return Verdict(name="batches", passed=False, said=f"step {step} saw other tokens")
    return Verdict(name="batches", passed=True, said=f"the same tokens in each of {steps} steps")


def _losses(ours: dict[int, Step | StepSkipped], theirs: dict[int, Step | StepSkipped], accepted: float) -> Verdict:
    both = [step for step in ours if isinstance(ours[step], Step) and isinstance(theirs.get(step), Step)]
    apart = {step: number_difference(ours[step].loss, theirs[step].loss) for step in both}
    if not apart:
        return Verdict(name="loss", passed=False, said="there is no step to compare")
    worst = max(apart, key=lambda step: apart[step])
    said = (
        f"{apart[worst]:.1e} apart at most, in step {worst}; accepted {accepted:.0e}"
        if apart[worst]
        else "the same in every bit"
    )
    return Verdict(name="loss", passed=apart[worst] <= accepted, said=said)


def of_strikes(found: Sequence[Strike]) -> Iterator[Verdict]:
    """Whether faults happened, and were noticed."""
    struck = [strike for strike in found if strike.step is not None]
    missing = "; ".join(strike.fault for strike in found if strike.step is None)
    said = f"{len(struck)} of {len(found)}" + (f"; whom they were for was not there: {missing}" if missing else "")
    yield Verdict(name="faults struck", passed=bool(struck) or not found, said=said)
    unseen = [strike.fault for strike in struck if not strike.passed]
    said = (
        f"not noticed, or another one was named: {'; '.join(unseen)}" if unseen else "every one that must be, and rightly named"
    )
    yield Verdict(name="noticed", passed=not unseen, said=said)
