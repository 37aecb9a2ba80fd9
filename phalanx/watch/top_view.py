"""What `phalanx top` shows: the figures of a run, from the views of the page, and its ranks as their heartbeats show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from phalanx.dashboard.numbers import UNKNOWN, dollars, duration, percent, short_duration, size, visible
from phalanx.events.heartbeat import PHASES
from phalanx.spec.json_value import Json, JsonObject
from phalanx.watch import run_views
from phalanx.watch.columns import last_of_each
from phalanx.watch.followed_run import FollowedRun
from phalanx.watch.live_ranks import LiveRank, is_stuck, place, waited_for
from phalanx.watch.rank_digest import MEMORY
from phalanx.watch.record_values import known, number, table, whole
from phalanx.watch.run_report import figures
from phalanx.watch.run_views import Window

ORDERS: dict[str, Callable[[Sequence[LiveRank]], list[LiveRank]]] = {
    "waited for": waited_for,
    "rank": lambda ranks: sorted(ranks, key=lambda rank: rank.rank),
    "phase": lambda ranks: sorted(ranks, key=lambda rank: (rank.phase, -(known(rank.since) or 0.0), rank.rank)),
}
"""Orders of the table of ranks, by name."""
_FIGURE = 38
"""Columns of the terminal for one figure."""
_SHORT = {"pipeline": "pp", "data": "dp", "shard": "fsdp", "context": "cp", "tensor": "tp"}
"""Degrees of a layout in a narrow column."""
_ENDED = {"finished": "green", "stopped": "yellow", "failed": "bold red", "interrupted": "bold red"}


def top_json(run: FollowedRun, ranks: Sequence[LiveRank] | None, order: str) -> JsonObject:
    """Everything that `phalanx top` knows, for programs."""
    head, views = run_views.header(run), run_views.overview(run, Window(width=1))
    names = ("name", "state", "reason", "step", "steps", "elapsed", "time_left", "price", "price_end", "failures")
    memory, layout = rank_memory(run), table(head, "layout")
    return {name: head[name] for name in names} | {
        "figures": views["figures"],
        "promise": views["promise"],
        "live": ranks is not None,
        "phases": None if ranks is None else dict[str, Json](Counter(rank.phase for rank in ranks)),
        "ranks": [_rank_json(rank, layout, len(ranks), memory) for rank in ORDERS[order](ranks)] if ranks else [],
    }


def _rank_json(rank: LiveRank, layout: JsonObject, ranks: int, memory: Mapping[int, float]) -> JsonObject:
    return {
        "rank": rank.rank,
        "node": rank.node,
        "place": dict[str, Json](place(rank.rank, layout, ranks)),
        "phase": rank.phase,
        "since": known(rank.since),
        "step": None if rank.step < 0 else rank.step,
        "step_seconds": known(rank.seconds),
        "computing": known(rank.computing),
        "memory": memory.get(rank.rank),
    }


def rank_memory(run: FollowedRun) -> dict[int, float]:
    """Bytes of each rank at the peak of its measured step, as far as they are known."""
    accounted = run.digest.ranks.accounted
    if not len(accounted):
        return {}
    newest = last_of_each(accounted["rank"], int(accounted["rank"].max()) + 1)
    total = np.nansum([accounted[name][newest] for name in MEMORY], axis=0)
    return {rank: float(value) for rank, (row, value) in enumerate(zip(newest, total, strict=True)) if row >= 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """What of the ranks is shown, and where."""

    order: str
    """A key of `ORDERS`."""
    width: int
    height: int | None = None
    """Lines; None: all ranks are shown."""
    first: int = 0
    """Ranks above those that are shown."""


def top_view(run: FollowedRun, ranks: Sequence[LiveRank] | None, screen: Screen) -> Group:
    """The figures, and below them the ranks; None: their heartbeats are not known."""
    head = run_views.header(run)
    cells = figures(run, head)
    columns = max(1, screen.width // _FIGURE)
    lines = [_title(run, head), _bar(head), _figures(cells, columns)]
    if ranks is None:
        return Group(*lines, _no_ranks(run))
    lines.append(_phases(ranks))
    above = 2 + -(-len(cells) // columns) + 3  # with phases, titles of columns and the last line
    room = len(ranks) if screen.height is None else max(1, screen.height - above - 1)
    shown = ORDERS[screen.order](ranks)
    first = max(0, min(screen.first, len(shown) - room))
    memory, layout = rank_memory(run), table(head, "layout")
    lines.append(_rank_table(shown[first : first + room], layout, len(ranks), memory))
    if len(shown) > room:
        lines.append(
            Text(
                f"ranks {first + 1} to {min(first + room, len(shown))} of {len(shown):,}, by {screen.order}; ↑ ↓ others",
                style="dim",
            )
        )
    return Group(*lines)


def _title(run: FollowedRun, head: JsonObject) -> Text:
    state = str(head["state"])
    reason = f": {visible(str(head['reason']))[:300]}" if head["reason"] else ""
    ended = (
        "" if state in ("running", "reading") else ", the run has ended" if state != "interrupted" else ", nothing runs here"
    )
    program = " ".join(map(str, head["program"])) if isinstance(head["program"], list) else ""
    about = visible(program)[:200] or f"{head['ranks']} {head['device']} ranks"
    return Text.assemble(
        (visible(run.name), "bold"), "  ", (f"{state}{ended}{reason}", _ENDED.get(state, "green")), f"  {about}"
    )


def _bar(head: JsonObject) -> RenderableType:
    step, steps = whole(head, "step") or 0, whole(head, "steps") or 0
    bar = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), expand=True, padding=(0, 1))
    runs = head["state"] in ("running", "reading")
    left = f", {duration(known(number(head, 'time_left')))} left" if runs else ""
    ends = known(number(head, "price_end")) if runs else None
    price = "" if ends is None else f", {dollars(ends)} at the end"
    bar.add_row(
        Text(f"step {step:,} of {steps:,}", style="bold"),
        ProgressBar(total=max(1, steps), completed=step),
        Text(f"{percent(step / steps if steps else None)}{left}{price}"),
    )
    return bar


def _figures(cells: Sequence[tuple[str, str, str]], columns: int) -> Table:
    grid = Table.grid(
        *(Column(ratio=1, no_wrap=True, overflow="ellipsis") for _ in range(columns)), expand=True, padding=(0, 1)
    )
    for begin in range(0, len(cells), columns):
        row = cells[begin : begin + columns]
        grid.add_row(
            *(Text.assemble((f"{name} ", "dim"), (value, "cyan"), (f"  {note}", "dim")) for name, value, note in row),
            *("",) * (columns - len(row)),
        )
    return grid


def _no_ranks(run: FollowedRun) -> Text:
    if run.state != "running":
        return Text("The ranks have ended.", style="dim")
    return Text(
        "No heartbeats of the ranks: the run is starting, or its controller does not see this directory (torchrun, Kubernetes).",
        style="dim",
    )


def _phases(ranks: Sequence[LiveRank]) -> Text:
    """How many ranks are in which phase, and whether all wait."""
    found = Counter(rank.phase for rank in ranks)
    known_phases = [phase for phase in ("lost", "no heartbeat", *PHASES) if found[phase]]
    text = Text("  ".join(f"{phase} {found[phase]:,}" for phase in known_phases))
    living = [rank for rank in ranks if rank.step >= 0]
    if len(living) > 1 and is_stuck(living):
        longest = min(known(rank.since) or 0.0 for rank in living)
        text.append(f"   no rank has made progress for {duration(longest)}", style="bold red")
    return text


def _rank_table(shown: Sequence[LiveRank], layout: JsonObject, ranks: int, memory: Mapping[int, float]) -> Table:
    titles = ("rank", "node", "place", "phase", "since", "step", "step time", "computing", "waiting", "memory")
    table_of_ranks = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table_of_ranks.add_column(title, justify="left" if title in ("place", "phase") else "right", no_wrap=True)
    for rank in shown:
        computing = known(rank.computing)
        table_of_ranks.add_row(
            str(rank.rank),
            UNKNOWN if rank.node is None else str(rank.node),
            " ".join(f"{_SHORT[axis]}{index}" for axis, index in place(rank.rank, layout, ranks).items()),
            Text(rank.phase, style="bold red" if rank.step < 0 else ""),
            duration(known(rank.since)),
            UNKNOWN if rank.step < 0 else f"{rank.step:,}",
            short_duration(known(rank.seconds)),
            percent(computing),
            percent(None if computing is None else 1 - computing),
            size(memory.get(rank.rank)),
        )
    return table_of_ranks
