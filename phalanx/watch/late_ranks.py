"""Says in words what the ranks of a run wait for: who arrives last, at which collective, how often, and what kept that rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from phalanx.dashboard.numbers import percent, short_duration
from phalanx.watch.step_timeline import Meeting, StepOfRank, StepTimeline

_LEAST_SHARE = 0.01
"""Of a step: shorter waits are not worth a sentence."""
_LEAST_SECONDS = 1e-4
_SHOWN = 4
"""Ranks in a sentence."""
_LOADING_SHARE = 0.05
"""Of a step, from which on the data loader is named even if it is slow on all ranks."""
_EXPLAINED = 0.3
"""Of a wait, that a phase of the late rank must explain to be called slow."""
_SLOW_STAGE = 1.3
"""Times the median, from which on a rank's computation is called slow where no other rank does the same."""

_PHASES = {
    "loading": "the data loader",
    "compute": "forward and backward",
    "reduce": "the reduction of gradients",
    "optimizer": "the optimizer",
    "evaluating": "evaluation",
    "saving": "saving",
    "other": "the time between these parts of a step",
}
"""Phases as they are called in sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One phase of a step, without waits for other ranks; and these waits as "waiting"."""

    name: str
    seconds: float
    """Median over steps, of the median rank."""
    share: float
    """Of a step."""
    slowest: int
    """The rank that takes longest for it."""
    longest: float
    """Its seconds."""
    shortest: float
    """Seconds of the rank that takes shortest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRank:
    """A rank that others wait for."""

    rank: int
    meeting: str
    """The collective at which they wait longest, such as "all_reduce of bucket 3"."""
    use: str
    seconds: float
    """For which each of the others waits there, in the steps in which they do: the median."""
    share_of_steps: float
    per_step: float
    """Seconds that each of the others waits for this rank in a step on average, in all collectives."""
    phase: str
    """Where the rank loses the time; empty: its own work takes as long as that of the others."""
    own: float
    """Seconds of its phase, and of the others."""
    others: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What the steps of a run wait for."""

    steps: tuple[int, ...]
    ranks: int
    step_seconds: float
    parts: tuple[Part, ...]
    late: tuple[LateRank, ...]
    waiting_share: float
    """Of a step, that the average rank waits in collectives for the last one."""
    bubble_share: float
    """Of a step, that the average rank waits for other pipeline stages."""

    def sentences(self) -> list[str]:
        """The answer in words, the most expensive first."""
        said = [_late_sentence(late) for late in self.late if late.phase]
        parts = {part.name: part for part in self.parts}
        if varying := [late for late in self.late if not late.phase]:
            said.append(_varying_sentence(varying))
        loading = parts["loading"].shortest if "loading" in parts else 0.0
        if loading > _LOADING_SHARE * self.step_seconds:
            who = "The rank waits" if self.ranks == 1 else "Every rank waits"
            said.append(
                f"{who} {short_duration(loading)} of a step ({percent(loading / self.step_seconds)}) for the data loader, which is slower "
                f"than the computation."
            )
        if self.bubble_share >= _LEAST_SHARE:
            said.append(f"Ranks wait for other pipeline stages for {percent(self.bubble_share)} of a step.")
            compute = parts.get("compute")
            if compute is not None and compute.longest > _SLOW_STAGE * compute.seconds:
                more = compute.longest / compute.seconds
                said.append(
                    f"Rank {compute.slowest} computes {more:.1f} times as long as the median rank: its stage is the slowest."
                )
        if not self.late and self.ranks > 1:
            said.append(
                f"No rank is late: the average rank waits in collectives for the last one for {percent(self.waiting_share)} of a step."
            )
        return said


def _late_sentence(late: LateRank) -> str:
    """Begins with the name of the operation, which is written small."""
    waits = f"{late.meeting} waits {short_duration(late.seconds)} for rank {late.rank} in {late.share_of_steps:.0%} of steps"
    own, others = short_duration(late.own), short_duration(late.others)
    return f"{waits}; rank {late.rank} is slow in {_PHASES.get(late.phase, late.phase)} ({own} a step, the others {others})."


def _varying_sentence(late: Sequence[LateRank]) -> str:
    shown = sorted(late, key=lambda one: -one.per_step)[:_SHOWN]
    ranks = ", ".join(f"rank {one.rank} ({short_duration(one.seconds)} in {one.share_of_steps:.0%} of steps)" for one in shown)
    more = f" and {len(late) - len(shown)} more" if len(late) > len(shown) else ""
    return (
        f"Others wait for {ranks}{more}, whose own work takes no longer than that of the others on average: it varies from step to step, "
        f"as it does next to other programs."
    )


def diagnose(timeline: StepTimeline) -> Diagnosis:
    """Reads steps in which all ranks were recorded, with as many ranks as in the last of them."""
    complete = {
        number: ranks for number, ranks in timeline.steps.items() if len(ranks) == next(iter(ranks.values())).author.ranks
    }
    if complete:
        ranks_now = complete[max(complete)].keys()
        complete = {number: ranks for number, ranks in complete.items() if ranks.keys() == ranks_now}
    if not complete:
        return Diagnosis(
            steps=(), ranks=len(timeline.ranks), step_seconds=0.0, parts=(), late=(), waiting_share=0.0, bubble_share=0.0
        )
    seconds = median(median(step.end - step.begin for step in ranks.values()) for ranks in complete.values())
    own = {number: {rank: own_seconds(step) for rank, step in ranks.items()} for number, ranks in complete.items()}
    meetings = [meeting for meeting in timeline.meetings if meeting.step in complete]
    parts = _parts(own, seconds)
    partners = _partners(meetings)
    blocked: dict[bool, dict[int, float]] = {True: defaultdict(float), False: defaultdict(float)}
    for meeting in meetings:
        blocked[_between_stages(meeting, partners)][meeting.step] += sum(meeting.blocked(rank) for rank in meeting.calls)
    ranks = len(next(iter(complete.values())))

    def share(waits: Mapping[int, float]) -> float:
        """Of a step and the average rank; the median, as the first steps of a launch wait for each other's start."""
        return median(waits.get(step, 0.0) for step in complete) / ranks / seconds if seconds else 0.0

    return Diagnosis(
        steps=tuple(sorted(complete)),
        ranks=ranks,
        step_seconds=seconds,
        parts=parts,
        late=_late_ranks(meetings, partners, own, seconds),
        waiting_share=share(blocked[False]),
        bubble_share=share(blocked[True]),
    )


def _partners(meetings: Sequence[Meeting]) -> Mapping[int, set[int]]:
    """By rank: the ranks of other pipeline stages that it exchanges messages with."""
    partners: dict[int, set[int]] = defaultdict(set)
    for meeting in meetings:
        if meeting.is_message:
            for rank in meeting.calls:
                partners[rank] |= meeting.calls.keys() - {rank}
    return partners


def _between_stages(meeting: Meeting, partners: Mapping[int, set[int]]) -> bool:
    """Whether ranks of several pipeline stages meet. They end their work at different times in any case."""
    return bool(partners) and any(not partners.get(rank, set()).isdisjoint(meeting.calls) for rank in meeting.calls)


def own_seconds(step: StepOfRank) -> dict[str, float]:
    """Seconds of each phase of a step without the waits in it, and these as "waiting"."""
    own: dict[str, float] = defaultdict(float)
    phases = [span for span in step.spans if span.kind == "phase" and span.name in _PHASES]  # not how a launch begins
    for span in phases:
        own[span.name] += span.end - span.begin
    for call in step.calls:
        own["waiting"] += call.end - call.begin
        middle = (call.begin + call.end) / 2
        phase = next((span.name for span in phases if span.begin <= middle < span.end), None)
        if phase is not None:
            own[phase] -= call.end - call.begin
    return {name: max(0.0, seconds) for name, seconds in own.items()}


OwnSeconds = Mapping[int, Mapping[int, Mapping[str, float]]]
"""By step, rank and phase."""


def _parts(own: OwnSeconds, seconds: float) -> tuple[Part, ...]:
    ranks = sorted(next(iter(own.values())))
    names = dict.fromkeys(name for step in own.values() for phases in step.values() for name in phases)
    parts = []
    for name in names:
        of_rank = {rank: _usual(own, name, rank) for rank in ranks}
        if not any(of_rank.values()):
            continue
        slowest = max(of_rank, key=lambda rank: of_rank[rank])
        usual = median(of_rank.values())
        share = usual / seconds if seconds else 0.0
        shortest = min(of_rank.values())
        parts.append(Part(name=name, seconds=usual, share=share, slowest=slowest, longest=of_rank[slowest], shortest=shortest))
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def _usual(own: OwnSeconds, phase: str, rank: int) -> float:
    """The median over steps. A phase that most steps do not have, such as saving, counts with its mean."""
    values = [phases[rank].get(phase, 0.0) for phases in own.values()]
    return median(values) or mean(values)


def _late_ranks(
    meetings: Sequence[Meeting], partners: Mapping[int, set[int]], own: OwnSeconds, step_seconds: float
) -> tuple[LateRank, ...]:
    """Those that are worth a sentence, the most expensive first."""
    steps, least = len(own), max(_LEAST_SECONDS, _LEAST_SHARE * step_seconds)
    waits: dict[int, dict[tuple[str, str], dict[int, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    members: dict[int, set[int]] = defaultdict(set)
    for meeting, culprit, seconds in _charges(meetings):
        if not _between_stages(meeting, partners):  # a rank that is slow for its stage shows where the ranks of the stage meet
            waits[culprit][meeting.name, meeting.group.use][meeting.step] += seconds / (len(meeting.calls) - 1)
            members[culprit] |= meeting.calls.keys() - {culprit}
    found = []
    for rank, by_meeting in waits.items():
        per_step = sum(sum(of_steps.values()) for of_steps in by_meeting.values()) / steps
        (name, use), of_steps = max(by_meeting.items(), key=lambda item: sum(item[1].values()))
        long = [seconds for seconds in of_steps.values() if seconds >= least]
        if per_step < least or not long:
            continue
        phase, of_rank, of_others = _slow_phase(own, rank, members[rank], _EXPLAINED * median(long))
        found.append(
            LateRank(
                rank=rank,
                meeting=name,
                use=use,
                seconds=median(long),
                share_of_steps=len(long) / steps,
                per_step=per_step,
                phase=phase,
                own=of_rank,
                others=of_others,
            )
        )
    found.sort(key=lambda late: (not late.phase, -late.per_step))
    return tuple(found)


def _charges(meetings: Sequence[Meeting]) -> Iterator[tuple[Meeting, int, float]]:
    """Every wait of a rank for the last one, as (meeting, rank that caused it, seconds).

    The last rank may be late because it has waited for others itself, earlier in the step, and longer than those who wait for it now. Then
    they are the cause, and what remains is its own.
    """
    inherited: dict[int, dict[int, float]] = {}
    step = None
    for meeting in sorted(meetings, key=lambda meeting: (meeting.step, meeting.last_arrival)):
        if meeting.step != step:
            inherited, step = defaultdict(lambda: defaultdict(float)), meeting.step
        last = meeting.last
        before = dict(inherited[last])
        for rank in meeting.calls:
            waited = 0.0 if rank == last else meeting.blocked(rank)
            if waited <= 0:
                continue
            more = {c: s for c, seconds in before.items() if c != rank and (s := seconds - inherited[rank][c]) > 0}
            scale = min(1.0, waited / total) if (total := sum(more.values())) else 0.0
            caused = {culprit: seconds * scale for culprit, seconds in more.items()}
            caused[last] = caused.get(last, 0.0) + waited - sum(caused.values())
            for culprit, seconds in caused.items():
                if seconds > 0.01 * waited:
                    inherited[rank][culprit] += seconds
                    yield meeting, culprit, seconds


def _slow_phase(own: OwnSeconds, rank: int, others: Iterable[int], least: float) -> tuple[str, float, float]:
    """The phase in which a rank usually takes longer than those that wait for it, by `least` seconds, with its seconds and theirs; empty if
    there is none."""
    others = list(others)
    slow = ("", 0.0, 0.0)
    for phase in dict.fromkeys(name for step in own.values() for name in step[rank] if name != "waiting"):
        of_rank = _usual(own, phase, rank)
        of_others = median(_usual(own, phase, other) for other in others)
        if of_rank - of_others >= max(least, slow[1] - slow[2]):
            slow = phase, of_rank, of_others
    return slow
