"""The timeline of all ranks on one clock: steps of ranks, and each collective with all ranks that took part in it. `late_ranks` and
`perfetto_file` read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.events.log import launch_events
from phalanx.events.records import ClockAligned
from phalanx.events.timeline_files import Author, Call, CallGroup, RecordedStep, Span, read_timeline


@dataclass(frozen=True, slots=True)
class StepOfRank:
    """One step of one rank. All times are seconds of the reference clock."""

    step: int
    author: Author
    begin: float
    end: float
    spans: Sequence[Span]
    calls: Sequence[Call]

    @property
    def rank(self) -> int:
        return self.author.rank


@dataclass(frozen=True, slots=True)
class Meeting:
    """A collective, or a message between two ranks, with the calls of all ranks that recorded it."""

    step: int
    group: CallGroup
    number: int
    operation: str
    label: str
    calls: Mapping[int, Call]
    """By rank; at least two."""

    @property
    def last(self) -> int:
        """The rank that arrived last."""
        return max(self.calls, key=lambda rank: self.calls[rank].arrived)

    @property
    def first_arrival(self) -> float:
        return min(call.arrived for call in self.calls.values())

    @property
    def last_arrival(self) -> float:
        return self.calls[self.last].arrived

    def blocked(self, rank: int) -> float:
        """Seconds for which this rank had nothing to do but wait for the last one."""
        call = self.calls[rank]
        return max(0.0, min(call.end, self.last_arrival) - call.begin)

    @property
    def is_message(self) -> bool:
        """From one pipeline stage to the next, not a collective."""
        return self.operation in ("send", "receive")

    @property
    def name(self) -> str:
        """Such as "all_reduce of bucket 3"."""
        operation = "message" if self.is_message else self.operation
        return f"{operation} of {self.label}" if self.label else f"{operation} ({self.group.use})"


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Recorded steps of all ranks."""

    steps: Mapping[int, Mapping[int, StepOfRank]]
    """By step, then by rank."""
    meetings: Sequence[Meeting]
    clock_error: float | None
    """Seconds by which clocks of different hosts may differ after alignment; 0 on one host, None if that is unknown."""

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for ranks in self.steps.values() for rank in ranks})


def load_timeline(run_dir: Path, first: int = 0, last: int | None = None) -> StepTimeline:
    """The recorded steps `first` to `last`."""
    recorded = read_timeline(run_dir, first, last)
    shifts, error = clock_shifts([found.author for found in recorded], _clocks(run_dir))
    steps: dict[int, dict[int, StepOfRank]] = defaultdict(dict)
    for found in recorded:
        steps[found.record.step][found.author.rank] = _shifted(found, shifts[found.author])
    groups: dict[tuple[int, str], CallGroup] = {}
    together: dict[tuple[int, str, int], dict[int, Call]] = defaultdict(dict)
    for found in recorded:
        for call in steps[found.record.step][found.author.rank].calls:
            together[found.record.step, call.group, call.number][found.author.rank] = call
            groups.setdefault((found.record.step, call.group), found.groups.get(call.group, CallGroup("", ())))
    meetings = []
    for (step, name, number), calls in together.items():
        if len(calls) > 1:
            any_call = next(iter(calls.values()))
            meetings.append(Meeting(step, groups[step, name], number, any_call.operation, any_call.label, calls))
    meetings.sort(key=lambda meeting: meeting.first_arrival)
    return StepTimeline(dict(steps), meetings, error)


def _shifted(found: RecordedStep, shift: float) -> StepOfRank:
    record = found.record
    begin = record.begin + shift
    return StepOfRank(
        record.step,
        found.author,
        begin,
        begin + record.seconds,
        [span._replace(begin=begin + span.begin, end=begin + span.end) for span in record.spans],
        [call._replace(arrived=begin + call.arrived, begin=begin + call.begin, end=begin + call.end) for call in record.calls],
    )


def _clocks(run_dir: Path) -> list[ClockAligned]:
    """The newest comparison of each node's clock, of the last launch."""
    newest: dict[int, ClockAligned] = {}
    with suppress(OSError):
        newest = {event.node: event for event in launch_events(run_dir / "events.jsonl") if isinstance(event, ClockAligned)}
    return list(newest.values())


def clock_shifts(authors: Iterable[Author], clocks: Sequence[ClockAligned]) -> tuple[dict[Author, float], float | None]:
    """What to add to each author's monotonic clock to get that of the reference, and the largest error of that."""
    authors = list(dict.fromkeys(authors))
    if not authors:
        return {}, 0.0
    reference = next((clock.reference for clock in clocks), authors[0].node)
    base = next((author for author in authors if author.node == reference), authors[0])
    by_node = {clock.node: clock for clock in clocks if clock.reference == reference}
    shifts, errors = {}, [0.0]
    unknown = False
    for author in authors:
        clock = by_node.get(author.node)
        if author.boot == base.boot and author.boot:
            shifts[author] = 0.0  # one system, one clock
        elif clock is not None:
            shifts[author] = clock.offset
            errors.append(clock.error)
        else:  # by the time of day, as exact as the hosts keep it
            shifts[author] = (author.wall - author.monotonic) - (base.wall - base.monotonic)
            unknown = True
    return shifts, None if unknown else max(errors)
