"""A simulated run as text: how much of the time counts, where the rest goes, how many spares pay, how often to save. The CLI calls it with
plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.dashboard.numbers import duration, percent

WORDS = {
    "computing": "computing",
    "slower": "slower on fewer nodes",
    "lost": "steps done again",
    "detection": "noticing failures",
    "restart": "starting again",
    "saving": "saving",
    "waiting": "waiting for nodes or people",
    "maintenance": "maintenance",
}
"""Where time goes."""

ACTIONS = {
    "restart": "started again in place",
    "spare": "moved to free nodes",
    "shrink": "gone on with fewer ranks",
    "grow": "grown back",
    "wait": "waited for a node",
    "end": "given up, and started again by somebody",
    "maintenance": "planned pauses",
}
_KEPT = {"replicas": "with other ranks", "memory": "in host memory", "disk": "on disk"}
_BAR = 40
"""Columns of a bar that stands for all of the time."""


def text(found: Mapping[str, Any]) -> list[str]:
    """Lines for a person; `found` is planning/simulate/simulation_report's values."""
    lines = [
        f"{found['ranks']:,} ranks on {_nodes(found['nodes'] - found['spares'])}, {found['spares']:,} spare; "
        f"steps of {found['step_seconds']:.3g} s; {found['runs']} runs of {_days(found['simulated_days'])}",
        f"goodput   {percent(found['goodput'])} (P10–P90 {percent(found['goodput_p10'])}–{percent(found['goodput_p90'])}), closed form, with nodes enough, {percent(found['closed'])}",
        f"finish    after {_days(found['finish_days'])} (P10–P90 {_days(found['finish_days_p10'])}–{_days(found['finish_days_p90'])})",
    ]
    if found["mtbf_seconds"] is not None:
        count = sum(found["failures"].values())
        lines.append(
            f"failures  {count:,.1f} in a run, one every {duration(found['mtbf_seconds'])} on average: {_most(found['failures'])}"
        )
        lines.append(
            f"answers   {', '.join(f'{many:,.1f} × {ACTIONS.get(name, name)}' for name, many in found['actions'].items()) or 'none'}"
        )
    lines.append(f"the state is {_KEPT[found['keep']]}" + _how_often(found))
    lines += ["", "where the time goes"]
    for name, part in found["spent"].items():
        if part > 0:
            lines.append(f"  {WORDS[name]:<28} {percent(part):>6}  {'█' * round(_BAR * part)}")
    return lines + _intervals(found) + _spares(found) + ["", *(f"assumed: {one}" for one in found["assumed"])]


def _days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else duration(86400 * days)


def _nodes(many: int) -> str:
    return f"{many:,} node{'' if many == 1 else 's'}"


def _most(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {many:,.1f}" for name, many in list(counts.items())[:6]) + (", …" if len(counts) > 6 else "")


def _how_often(found: Mapping[str, Any]) -> str:
    if found["interval_seconds"] is None:
        return ": nothing is saved for the sake of failures"
    best = found["best_interval_seconds"]
    return f", saved every {duration(found['interval_seconds'])}" + (f" (closed form's best: {duration(best)})" if best else "")


def _intervals(found: Mapping[str, Any]) -> list[str]:
    if not found["intervals"]:
        return []
    best = max(found["intervals"], key=lambda one: one["goodput"])
    lines = ["", "saved every      goodput   closed form"]
    for one in found["intervals"]:
        mark = "  ← best" if one is best else ""
        lines.append(f"  {duration(one['value']):<14} {percent(one['goodput']):>6}    {percent(one['closed']):>6}{mark}")
    return lines


def _spares(found: Mapping[str, Any]) -> list[str]:
    if not found["spare_nodes"]:
        return []
    unit = "$" if found["priced"] else "device-hours "
    lines = ["", "spare nodes      goodput   days      the whole run costs"]
    for one in found["spare_nodes"]:
        mark = "  ← costs least" if one["value"] == found["pays"] else ""
        lines.append(
            f"  {one['value']:<14} {percent(one['goodput']):>6}    {one['days']:<8,.1f}  {unit}{one['cost']:,.0f}{mark}"
        )
    return lines


def step_text(found: Mapping[str, Any]) -> list[str]:
    """Of one step; `found`: seconds, promised, bubble, split, schedule, ranks, micro_batches."""
    lines = [
        f"{found['schedule']}: {found['stages']} stages on {found['ranks']} pipeline ranks, {found['micro_batches']} micro-batches",
        f"step {found['seconds']:.4g} s, the plan says {found['promised']:.4g} s; idle {percent(found['bubble'])} of the schedule's time",
        "",
    ]
    for name, seconds in found["split"].items():
        if abs(seconds) > 1e-9:
            part = seconds / found["seconds"]
            lines.append(f"  {name:<12} {seconds:>10.4g} s  {percent(part):>6}  {'█' * round(_BAR * max(0.0, part))}")
    return lines
