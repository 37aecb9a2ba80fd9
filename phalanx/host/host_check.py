"""The rules by which the hosts of a run are judged before its first step: what they must agree on, and what their links and devices must
deliver. Pure functions; launchers and the controller (`control/preflight`) call them.

Hosts are numbers, indices of the names and reports that are passed with them.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.host.host_report import HostReport

CLOCK_SECONDS = 2.0
"""By which clocks may differ: records of several hosts are read in the order of their times."""
MAX_ROUNDS = 15
"""Rounds of link measurements: all pairs of up to 16 hosts; of more hosts, 15 links of each."""
STREAM_SPEED = 1.25e9
"""Bytes/s (10 Gbit/s) that one TCP stream of one process reaches on any host. Of a faster network the measurement shows only which links
are slower than others."""
_DISK = 64 << 20  # bytes
_MEMORY = 0.05  # fraction

Pair = tuple[int, int]


class HostProblem(NamedTuple):
    """Why a host cannot be used, with the remedy."""

    host: int
    message: str


def disagreements(
    names: Sequence[str], reports: Sequence[HostReport], elapsed: Sequence[tuple[float, float]]
) -> Iterator[HostProblem]:
    """What keeps hosts from training together. `elapsed`: when each was asked and had answered, by the clock of whoever asked."""
    for what in reports[0].versions:
        yield from _odd(names, [report.versions[what] for report in reports], what)
    if len({report.versions["phalanx"] for report in reports}) == 1:
        yield from _odd(names, [report.code[:12] for report in reports], "Phalanx's source code")
    yield from _odd(
        names, [report.files[:12] for report in reports], "the run file or plan", remedy="look at its run directory"
    )
    # A host's clock is read at some moment between question and answer.
    offsets = [_outside(report.clock, *times) for report, times in zip(reports, elapsed, strict=True)]
    middle = statistics.median_low(offsets)
    for host, offset in enumerate(offsets):
        if abs(offset - middle) > CLOCK_SECONDS:
            late = "ahead of" if offset > middle else "behind"
            yield HostProblem(
                host,
                f"The clock of {names[host]} is {abs(offset - middle):.0f} s {late} the others, and {CLOCK_SECONDS:.0f} s are allowed: "
                "synchronize it, for example with chrony, or remove the host.",
            )


def gpu_differences(names: Sequence[str], counts: Sequence[int]) -> Iterator[HostProblem]:
    """Hosts with another number of usable GPUs than most."""
    texts = [f"{count} GPU{'' if count == 1 else 's'}" for count in counts]
    yield from _odd(names, texts, "the number of GPUs", remedy="give hosts with more of them slots=N")


def shortages(names: Sequence[str], reports: Sequence[HostReport], run_dir: str) -> Iterator[HostProblem]:
    """Hosts without the disk space and memory that any run needs."""
    for host, report in enumerate(reports):
        if report.free_disk < _DISK:
            yield HostProblem(
                host,
                f"{names[host]} has {report.free_disk >> 20} MiB free for {run_dir}, and logs alone need {_DISK >> 20} MiB: free some, "
                "or remove the host.",
            )
        if report.free_memory < _MEMORY * report.machine.memory:
            yield HostProblem(
                host,
                f"{names[host]} has {report.free_memory >> 20} MiB of its {report.machine.memory >> 20} MiB memory free, and "
                f"{_MEMORY:.0%} are needed to start: end what uses it, or remove the host.",
            )


def _odd(
    names: Sequence[str], found: Sequence[str], what: str, remedy: str = "install the same on all hosts"
) -> Iterator[HostProblem]:
    """A problem for each host that differs from most; if there are as many of both, the first host is right."""
    usual = Counter(found).most_common(1)[0][0]
    for host, value in enumerate(found):
        if value != usual:
            yield HostProblem(
                host,
                f"{what} of {names[host]} is {value or 'missing'}, but {usual or 'missing'} on most hosts: {remedy}, or remove the "
                "host.",
            )


def _outside(clock: float, asked: float, answered: float) -> float:
    """Seconds by which a clock is outside of the time in which it was read."""
    return min(0.0, clock - asked) + max(0.0, clock - answered)


# --- links ----------------------------------------------------------------------------------------------------------


def link_rounds(hosts: Sequence[int]) -> list[list[Pair]]:
    """Pairs of hosts whose links are measured at the same time, round by round: a host is in at most one pair of a round, and no pair comes
    twice. All pairs, up to `MAX_ROUNDS`."""
    # The circle method of tournaments: the first host stays, the others move on by one place after each round.
    ring: list[int | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    rounds = []
    for _ in range(min(MAX_ROUNDS, len(ring) - 1)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def disjoint_rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Any pairs, in rounds in which no host comes twice."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        for others in rounds:
            if not any(set(pair) & set(other) for other in others):
                others.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def usual_speed(rates: Mapping[Pair, float]) -> float:
    """Bytes/s of a link between healthy hosts: the median over hosts of each one's fastest link. One bad host has slow links to all others,
    so that with three hosts most links are slow, but most hosts have a fast one."""
    fastest: dict[int, float] = {}
    for pair, rate in rates.items():
        for host in pair:
            fastest[host] = max(fastest.get(host, 0.0), rate)
    return statistics.median_high(fastest.values())


def slow_links(rates: Mapping[Pair, float], limit: float) -> tuple[list[int], list[Pair]]:
    """Hosts all of whose links are slower than the limit, and slow links between other hosts. `rates`: bytes/s of each measured pair; 0: it
    could not connect. Of two hosts that cannot connect one is among the hosts, because ranks on both could not train."""
    left = dict(rates)
    hosts: list[int] = []
    while True:
        slow: dict[int, list[bool]] = defaultdict(list)
        dead: Counter[int] = Counter()
        for pair, rate in left.items():
            for host in pair:
                slow[host].append(rate < limit or not rate)
                dead[host] += not rate
        guilty = [host for host, links in slow.items() if all(links)] or [host for host in dead if dead[host]]
        if not guilty:
            return sorted(hosts), sorted(pair for pair, rate in left.items() if rate < limit)
        worst = max(guilty, key=lambda host: (dead[host], len(slow[host]), host))
        hosts.append(worst)
        left = {pair: rate for pair, rate in left.items() if worst not in pair}


# --- devices --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceResult:
    """What one device has computed (`worker/compute_check`)."""

    host: int = -1
    """Set by who compares."""
    name: str
    """The device, for people, such as "GPU 3"."""
    model: str = ""
    """Devices of the same model compute the same bits at the same speed."""
    wrong: int = 0
    """Numbers that differ from the exact result."""
    digest: str = ""
    """Of results that depend on the order of sums, which is the same on devices of the same model."""
    flops: float = 0.0
    problem: str | None = None
    """Why it has not computed at all."""


def device_problems(names: Sequence[str], results: Sequence[DeviceResult], min_speed: float) -> Iterator[HostProblem]:
    """Devices that compute wrongly, otherwise than most of their model, or slower than `min_speed` times the median of their model."""
    computed: dict[str, list[DeviceResult]] = {}
    for result in results:
        if result.problem is None:
            computed.setdefault(result.model, []).append(result)
    digests = {model: Counter(result.digest for result in like).most_common(1)[0] for model, like in computed.items()}
    speeds = {model: statistics.median(result.flops for result in like) for model, like in computed.items()}
    for result in results:
        device = f"{result.name} of {names[result.host]}{f' ({result.model})' if result.model else ''}"
        replace_it = "replace it, or remove the host."
        if result.problem is not None:
            yield HostProblem(result.host, f"{device} does not compute: {result.problem}; {replace_it}")
            continue
        if result.wrong:
            yield HostProblem(
                result.host,
                f"{device} computes wrongly: {result.wrong} of the numbers in products of matrices differ from the exact ones: {replace_it}",
            )
            continue
        (usual, count), devices = digests[result.model], len(computed[result.model])
        if result.digest != usual and count > devices / 2:
            yield HostProblem(
                result.host, f"{device} computes other bits than {count} of {devices} devices of its model: {replace_it}"
            )
        middle = speeds[result.model]
        if result.flops < min_speed * middle:
            yield HostProblem(
                result.host,
                f"{device} computes {result.flops / 1e9:,.1f} GFLOP/s, less than cluster.min_speed = {min_speed:g} of the "
                f"{middle / 1e9:,.1f} GFLOP/s of its model: look at its clock, temperature and power limit, or remove the host.",
            )
