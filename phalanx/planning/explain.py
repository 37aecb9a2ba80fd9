"""Fills in the report of a search: the summary of run and cluster, and the sentences on why the best candidate is the best and where its
ranks run. `planning/planner` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.placement import Placement, Ranks, placement
from phalanx.planning.report import (
    PART_LABELS,
    ClusterSummary,
    ModelSummary,
    PlanReport,
    TrainSummary,
    part_changes,
    run_file_tables,
)
from phalanx.planning.search.bounds import NEAR
from phalanx.planning.search.candidate import Alternative, Candidate, SearchResult
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run

_EQUAL = 0.03
"""Steps that differ by less count as equal: no published comparison of measured layouts resolves less."""


def report_of(run: Run, hardware: Hardware, result: SearchResult, *, aim: Literal["time", "price"] = "time") -> PlanReport:
    """The report of a search for this run on these machines."""
    places = placement(result.best.layout, hardware)
    return PlanReport(
        model=ModelSummary(
            name=run.model.preset or run.model.module or run.model.from_ or "a model",
            parameters=run.model.parameters(),
            active=run.model.active_parameters(),
        ),
        cluster=ClusterSummary(
            name=hardware.name,
            device=hardware.device,
            gpu=hardware.gpu.name or hardware.gpu.key,
            gpus=hardware.gpus,
            nodes=hardware.nodes,
            memory=hardware.gpu.memory,
            price=hardware.price,
            failures=None if hardware.failures is None else hardware.failures.rate,
            sources=hardware.sources,
        ),
        train=TrainSummary(
            batch=run.batch,
            sequence_length=run.train.sequence_length,
            steps=run.steps,
            tokens=run.steps * run.batch_tokens,
        ),
        aim=aim,
        best=result.best,
        runners_up=result.runners_up,
        why=(*why(result, aim), *_fixed_keys(run, result)),
        alternatives=_distinct(result),
        curve=result.curve,
        considered=result.considered,
        fitting=result.fitting,
        timed=result.timed,
        seconds=result.seconds,
        assumptions=tuple(dict.fromkeys((*_own_module(run), *result.assumptions, *hardware.assumed))),
        placement=places,
        placement_lines=tuple(placement_lines(places)),
    )


def _distinct(result: SearchResult) -> tuple[Alternative, ...]:
    """Each layout once, with its first reason: a neighbor of the best can also be one of the expected layouts."""
    seen = {run_file_tables(result.best)}
    distinct = []
    for alternative in result.alternatives:
        tables = None if alternative.candidate is None else run_file_tables(alternative.candidate)
        if tables is None or tables not in seen:
            distinct.append(alternative)
            seen |= set() if tables is None else {tables}
    return tuple(distinct)


def _fixed_keys(run: Run, result: SearchResult) -> list[str]:
    """The keys that the search was not free to choose."""
    default = asdict(Layout())
    keys = [key for key, value in asdict(run.layout).items() if value != default[key]]
    if not keys or result.considered <= 1:
        return []
    return [f"The run file's [layout] was kept ({', '.join(keys)}): --free searches all layouts, and compares."]


def _own_module(run: Run) -> list[str]:
    if run.model.module is None:
        return []
    return [f"What {run.model.module} computes is not known: it is judged as a decoder of the run file's sizes."]


def why(result: SearchResult, aim: str) -> list[str]:
    """Why the best candidate is the best, in a few sentences."""
    best, others, considered = result.best, result.runners_up, f"{result.considered:,} legal layouts"
    superlative = {"time": "quickest", "price": "cheapest"}.get(aim, "best")
    first = f"It is the {superlative} that fits, of {considered}."
    if any(other.seconds < best.seconds for other in others):
        first = f"It is the simplest of those as quick as the quickest that fits, of {considered}."
    if any(other.seconds < best.seconds / NEAR for other in others) and best.layout == Layout(data=best.layout.data):
        first = f"It is what `phalanx train` takes here: replicas, as none of {considered} is clearly better."
    if result.considered <= 1:
        first = f"It is the run file's own layout, judged as it stands{'' if best.fits else '; it does not fit'}."
    sentences = [
        first,
        f"Of a step, {_largest_parts(best)}; the fullest rank uses {best.bytes / best.capacity:.0%} of its memory.",
    ]
    if not others:
        return sentences
    near = [other for other in others if other.seconds <= (1 + _EQUAL) * best.seconds]
    if near:
        names = _listed([other.name for other in near[:3]])
        sentences.append(
            f"{names} {'are' if len(near) > 1 else 'is'} within {_EQUAL:.0%} of it, which no prediction resolves: a few steps of each would tell."
        )
    else:
        behind = others[0].seconds / best.seconds - 1
        sentences.append(f"The next, {others[0].name}, takes {behind:.1%} longer{largest_loss(best, others[0])}.")
    return sentences


def _largest_parts(candidate: Candidate) -> str:
    """The share of computing in a step, and of the three largest other parts that show in whole percents."""
    share = {part: seconds / candidate.seconds for part, seconds in candidate.split.items()}
    others = sorted((part for part in share if part != "compute"), key=lambda part: -share[part])[:3]
    shown = [f"{share[part]:.0%} {PART_LABELS[part]}" for part in others if share[part] >= 0.005]
    return ", ".join([f"{share.get('compute', 0.0):.0%} is {PART_LABELS['compute']}", *shown])


def largest_loss(best: Candidate, other: Candidate) -> str:
    """The part that another candidate loses most time to, as the end of a sentence."""
    losses = [change for change in part_changes(best, other) if change.seconds > 0]
    return f", most of it {PART_LABELS[losses[0].part]}" if losses else ""


def placement_lines(places: Placement) -> list[str]:
    """Which groups share a node, an island and a rail, in a few sentences."""
    if places.ranks <= places.node:
        return ["All ranks are on one node."] if places.ranks > 1 else []

    def named(reach: str) -> list[Ranks]:
        return [group for group in places.groups if group.reach == reach]

    def label(group: Ranks) -> str:
        return f"{group.name.replace('_', '-')} groups of {group.size:,}"

    outside = [
        f"{label(group)} span {group.nodes:,} nodes{' on one rail' if group.one_rail and places.rails else ''}"
        for group in named("network")
    ]
    order = ", ".join(name for name in places.order if name in [group.name for group in places.groups])
    rail = f", on rail rank % {places.node}" if places.rails else ""
    lines = [f"A rank is on node rank // {places.node}{rail}; ranks run through {order}, the first fastest."]
    if named("node"):
        lines.append(f"Inside a node: {_listed([label(group) for group in named('node')])}.")
    if named("island"):
        lines.append(f"Inside an island of {places.island:,} devices: {_listed([label(group) for group in named('island')])}.")
    if outside:
        lines.append(f"Over the network: {_listed(outside)}.")
    return lines + ([places.advice] if places.advice else [])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
