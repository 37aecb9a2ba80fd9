"""A rehearsal as a person reads it. Printed by `phalanx rehearse`."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from phalanx.rehearsal.result import GIB, Rehearsal

_MODULES = 8


def show(console: Console, told: Rehearsal) -> None:
    """Memory, messages, operations and what would go wrong."""
    console.print(f"[bold]rank {told.rank} of {told.ranks:,}[/bold] ({told.device})", soft_wrap=True)
    for technique, words in told.applied.items():
        console.print(f"  {technique}: {words}", style="dim", soft_wrap=True)
    if told.error is not None:
        console.print(f"would fail: {told.error}", style="red", soft_wrap=True)
    if told.no_room is not None:
        console.print(f"would run out of memory: {told.no_room}", style="red", soft_wrap=True)
    _memory(console, told)
    _messages(console, told)
    all_flops = sum(told.flops.values())
    again = f", {told.repeated_flops / max(all_flops, 1):.0%} of them repeated" if told.repeated_flops else ""
    console.print(f"operations of a step: {all_flops / 1e12:,.1f} TFLOP{again}")
    for sentence in (*(f"assumed: {one}" for one in told.assumed), *told.notes):
        console.print(sentence, style="dim", soft_wrap=True)
    console.print(
        f"{told.taken} of {told.micro_batches} micro-batches were taken through the program, in {told.seconds:.1f} s; the others do "
        "the same.",
        style="dim",
        soft_wrap=True,
    )


def _memory(console: Console, told: Rehearsal) -> None:
    table = Table("memory at the peak", "GiB", box=None, header_style="bold", pad_edge=False)
    table.columns[1].justify = "right"
    for name, size in told.components.items():
        table.add_row(name, f"{size / GIB:,.2f}")
    table.add_row("peak", f"{told.peak / GIB:,.2f}", style="bold")
    if told.reserved != told.peak:
        table.add_row("reserved by the allocator", f"{told.reserved / GIB:,.2f}")
    for name, size in told.fixed.items():
        table.add_row(f"{name} (estimate)", f"{size / GIB:,.2f}")
    if told.capacity is not None:
        table.add_row("the device has", f"{told.capacity / GIB:,.2f}", style="green" if told.fits else "red")
    if told.host:
        table.add_row("in the machine's memory", f"{told.host / GIB:,.2f}")
    console.print(table)
    if told.at is not None:
        console.print(f"the peak is in {told.at}", soft_wrap=True)
    most = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in told.modules[:_MODULES])
    console.print(f"made in: {most}", style="dim", soft_wrap=True)


def _messages(console: Console, told: Rehearsal) -> None:
    if not told.messages:
        return
    table = Table("sent in a step", "collective", "GiB", box=None, header_style="bold", pad_edge=False)
    table.columns[2].justify = "right"
    for use, kinds in told.sent.items():
        for collective, size in kinds.items():
            table.add_row(use, collective, f"{size / GIB:,.3f}")
    console.print(table)
    tiers = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in told.tiers.items())
    count = sum(one.times for one in told.messages)
    console.print(f"{count:,} messages; GiB by the farthest that they reach: {tiers}", soft_wrap=True)


def write_trace(told: Rehearsal, path: Path) -> None:
    """The memory of the step as a counter that Perfetto and chrome://tracing draw; a millisecond stands for a thousandth of the step."""
    events = [
        {"name": "memory", "ph": "C", "ts": part * 1e6, "pid": told.rank, "args": {"GiB": size / GIB}}
        for part, size in told.timeline
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
