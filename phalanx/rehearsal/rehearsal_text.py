"""Prints a rehearsal for people, for `phalanx rehearse`, and writes its memory timeline."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from phalanx.rehearsal.result import GIB, Rehearsal

_MODULES = 8


def show(console: Console, rehearsal: Rehearsal) -> None:
    """Prints memory, messages, operations and what would fail."""
    console.print(f"[bold]rank {rehearsal.rank} of {rehearsal.ranks:,}[/bold] ({rehearsal.device})", soft_wrap=True)
    for technique, words in rehearsal.applied.items():
        console.print(f"  {technique}: {words}", style="dim", soft_wrap=True)
    if rehearsal.error is not None:
        console.print(f"would fail: {rehearsal.error}", style="red", soft_wrap=True)
    if rehearsal.no_room is not None:
        console.print(f"would run out of memory: {rehearsal.no_room}", style="red", soft_wrap=True)
    _memory(console, rehearsal)
    _messages(console, rehearsal)
    all_flops = sum(rehearsal.flops.values())
    again = f", {rehearsal.repeated_flops / max(all_flops, 1):.0%} of them repeated" if rehearsal.repeated_flops else ""
    console.print(f"operations of a step: {all_flops / 1e12:,.1f} TFLOP{again}")
    for sentence in (*(f"assumed: {assumption}" for assumption in rehearsal.assumed), *rehearsal.notes):
        console.print(sentence, style="dim", soft_wrap=True)
    console.print(
        f"{rehearsal.taken} of {rehearsal.micro_batches} micro-batches were taken through the program, in {rehearsal.seconds:.1f} s; the others do "
        "the same.",
        style="dim",
        soft_wrap=True,
    )


def _memory(console: Console, rehearsal: Rehearsal) -> None:
    table = Table("memory at the peak", "GiB", box=None, header_style="bold", pad_edge=False)
    table.columns[1].justify = "right"
    for name, size in rehearsal.components.items():
        table.add_row(name, f"{size / GIB:,.2f}")
    table.add_row("peak", f"{rehearsal.peak / GIB:,.2f}", style="bold")
    if rehearsal.reserved != rehearsal.peak:
        table.add_row("reserved by the allocator", f"{rehearsal.reserved / GIB:,.2f}")
    for name, size in rehearsal.fixed.items():
        table.add_row(f"{name} (estimate)", f"{size / GIB:,.2f}")
    if rehearsal.capacity is not None:
        table.add_row("the device has", f"{rehearsal.capacity / GIB:,.2f}", style="green" if rehearsal.fits else "red")
    if rehearsal.host:
        table.add_row("in the machine's memory", f"{rehearsal.host / GIB:,.2f}")
    console.print(table)
    if rehearsal.at is not None:
        console.print(f"the peak is in {rehearsal.at}", soft_wrap=True)
    most = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in rehearsal.modules[:_MODULES])
    console.print(f"made in: {most}", style="dim", soft_wrap=True)


def _messages(console: Console, rehearsal: Rehearsal) -> None:
    if not rehearsal.messages:
        return
    table = Table("sent in a step", "collective", "GiB", box=None, header_style="bold", pad_edge=False)
    table.columns[2].justify = "right"
    for use, kinds in rehearsal.sent.items():
        for collective, size in kinds.items():
            table.add_row(use, collective, f"{size / GIB:,.3f}")
    console.print(table)
    tiers = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in rehearsal.tiers.items())
    count = sum(repeated.times for repeated in rehearsal.messages)
    console.print(f"{count:,} messages; GiB by the farthest that they reach: {tiers}", soft_wrap=True)


def write_trace(rehearsal: Rehearsal, path: Path) -> None:
    """Writes the memory of the step as a counter for Perfetto and chrome://tracing; a millisecond is a thousandth of the step."""
    events = [
        {"name": "memory", "ph": "C", "ts": part * 1e6, "pid": rehearsal.rank, "args": {"GiB": size / GIB}}
        for part, size in rehearsal.timeline
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
