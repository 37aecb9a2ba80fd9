"""Shows plans on the terminal, and the results of `--solve`, `--compare` and `phalanx bench`. The CLI and `phalanx.explain` call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from phalanx.dashboard.numbers import UNKNOWN, count, dollars, duration, energy, flops, percent, short_duration, size
from phalanx.planning.feedback import Comparison, Timed
from phalanx.planning.report import MEMORY_LABELS, PART_LABELS, PlanReport, keys_to_change, part_changes, run_file_tables
from phalanx.planning.search.candidate import Alternative, Candidate
from phalanx.planning.solve import SolveReport
from phalanx.spec.adapted_layers import trained_parameters
from phalanx.spec.plan import Promise

COLORS = {
    "parameters": "blue", "gradients": "cyan", "optimizer": "magenta", "activations": "green", "logits": "yellow",
    "gathered": "bright_blue", "buffers": "bright_black", "fixed": "bright_black", "compute": "green", "bubble": "red",
}  # fmt: skip
SHORTHAND = (
    "PP pipeline ranks, v stages per rank, -zb zero-bubble and -bfs breadth-first order; DP replicas; ZeRO1×128 optimizer states "
    "sharded over 128 ranks (ZeRO2: gradients too, FSDP: parameters too); CP context, TP tensor, +SP sequence, EP expert parallelism. "
    "Recompute full 1/2: only every second block."
)
"""Explains the short names of layouts and of recomputation."""
_BAR = 14
"""Columns of the longest bar."""
_WIDE = 96
"""Columns from which parts are side by side."""
_REASONS = 10
"""Smallest number of layouts in the section "why not"."""
_OWN_PARTS = ("compute", "optimizer")
"""Parts of a step in which a rank waits for no other rank."""


def show_plan(console: Console, report: PlanReport, top: int = 5) -> None:
    """Shows a whole plan with `top` runners-up."""
    wide = console.width >= _WIDE
    console.print(_head(report))
    console.print(_winner(console, report))
    bars = [chart(report.best, console.width // 2 - 1 if wide else console.width) for chart in (_memory, _step)]
    if wide:
        side_by_side = Table.grid(*(Column(ratio=1) for _ in bars), padding=(0, 1), expand=True)
        side_by_side.add_row(*bars)
        console.print(side_by_side)
    else:
        console.print(*bars, sep="\n")
    _section(console, "why this one", map(Text, report.why))
    if report.runners_up and top:
        _section(console, "runners-up", [_runners_up(report, top)] if wide else _runner_up_lines(report, top))
    if report.alternatives:
        _section(console, "why not", [_why_not(report.best, report.alternatives, max(_REASONS, 2 * top))])
    _section(console, "placement", map(Text, report.placement.lines))
    _section(console, "assumed", (_side_by_side(Text("·"), Text(line), padding=1, style="dim") for line in report.assumptions))


def show_solution(console: Console, solution: SolveReport) -> None:
    """Shows the answer of `--solve`: a sentence, the values that were tried, what other clusters would change, and the plan."""
    console.print(Text(solution.sentence, style="bold green"))
    if solution.tried:
        fastest = max(speed for _, speed in solution.tried)
        rows = [
            (f"{value:,}", speed, f"{count(speed)} tok/s", "green" if value == solution.value else "yellow")
            for value, speed in solution.tried
        ]
        console.print(_bars(f"tried, by {solution.what}", rows, fastest, console.width))
    _section(console, "what if", (Text(change.sentence) for change in solution.what_if))
    console.print(_rule("its plan"))
    show_plan(console, solution.plan, top=0)


def interval(values: Sequence[float] | None, format_value: Callable[[float], str]) -> str:
    """Formats a range as "4.10 – 6.02 s"; both ends have a unit if the units differ."""
    if not values:
        return ""
    low, high = format_value(values[0]), format_value(values[1])
    number, _, unit = low.partition(" ")
    return f"{number if unit and high.split(' ')[1:] == [unit] else low} – {high}"


def days(value: float) -> str:
    """Formats days as "54.3 d", and short runs in smaller units."""
    return f"{value:,.1f} d" if value >= 2 else duration(86400 * value)


def bar(fraction: float, width: int) -> str:
    """Draws a fraction as a bar with a resolution of an eighth of a character, and at least one eighth."""
    eighths = max(1, round(8 * width * min(1.0, fraction))) if fraction > 0 else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def recompute_label(candidate: Candidate) -> str:
    """The mode of recomputation and its fraction of the blocks, such as "full 1/2"."""
    every = candidate.recompute_every
    return candidate.recompute + (f" 1/{every}" if every > 1 else "")


def savings_label(candidate: Candidate) -> str:
    """Recomputation and offload, such as "full 1/2, offload"."""
    return recompute_label(candidate) + ("" if candidate.offload == "none" else ", offload")


def search_summary(report: PlanReport) -> str:
    """How many candidates the search covered, and in what time."""
    if report.considered <= 1:
        return "the run file's own layout"
    one_by_one = f", {report.timed:,} of them one by one" if 0 < report.timed < report.considered else ""
    return f"{report.considered:,} legal layouts evaluated{one_by_one}, in {short_duration(report.seconds)} of CPU time"


def promise(candidate: Candidate) -> list[tuple[str, str, str]]:
    """What the plan promises for a candidate: rows of name, value and interval."""
    ranges = candidate.ranges
    rows = [
        ("step", short_duration(candidate.seconds), interval(ranges["seconds"], short_duration)),
        ("speed", f"{count(candidate.tokens_per_second)} tok/s", interval(ranges["tokens_per_second"], count)),
        ("MFU", percent(candidate.mfu), interval(ranges.get("mfu"), percent)),
        ("memory", size(candidate.bytes), f"of {size(candidate.capacity)}"),
        ("whole run", days(candidate.days), interval(ranges["days"], days)),
    ]
    if candidate.save_every is not None or candidate.goodput < 1:
        saving = "no checkpoint is saved" if candidate.save_every is None else f"saving every {duration(candidate.save_every)}"
        rows += [
            ("goodput", percent(candidate.goodput), saving),
            ("with failures", days(candidate.expected_days), interval(ranges["expected_days"], days)),
        ]
    rows.append(("device-hours", count(candidate.gpu_hours), interval(ranges["gpu_hours"], count)))
    if candidate.price is not None:
        rows.append(("price", dollars(candidate.price), interval(ranges["price"], dollars)))
    if candidate.energy is not None:
        rows.append(("energy", energy(candidate.energy), interval(ranges["energy"], energy)))
    return rows


def _head(report: PlanReport) -> Text:
    run, hardware = report.run, report.hardware
    parameters, active = run.model.parameters(), run.model.active_parameters()
    adapters = "" if run.lora.rank is None else f" and {count(trained_parameters(run.model, run.lora))} of LoRA adapters"
    adapters += "" if run.lora.base is None else f" on weights in {run.lora.base}"
    nodes = f" in {hardware.nodes:,} nodes" if hardware.nodes > 1 else ""
    step = f"{run.batch:,} sequences of {run.train.sequence_length:,} tokens a step"
    return Text.assemble(
        (report.model_name, "bold"),
        f", {count(parameters)} parameters{f' ({count(active)} active)' if active < parameters else ''}{adapters}, on ",
        (f"{hardware.gpus:,} × {hardware.gpu.name}{nodes}", "bold"),
        f"\n{step}, {run.steps:,} steps, {count(report.tokens)} tokens\n",
        (search_summary(report), "dim"),
    )


def _winner(console: Console, report: PlanReport) -> Panel:
    best = report.best
    quiet = Column(style="dim", no_wrap=True)
    rows = Table.grid(quiet, Column(style="bold", no_wrap=True, justify="right"), quiet.copy(), padding=(0, 2))
    for row in [("", "", "P10 – P90"), *promise(best)]:
        rows.add_row(*row)
    tables = Text(run_file_tables(best), style="cyan")
    inside: RenderableType = _side_by_side(tables, rows, padding=4) if console.width >= _WIDE else Group(rows, Text(), tables)
    fits = "" if best.fits else "  DOES NOT FIT"
    style = "green" if best.fits else "red"
    ranks = best.layout.ranks
    fewer = f" on {ranks:,} of the devices" if ranks < report.hardware.gpus else ""
    title = Text(f"{best.name}{fewer}{fits}", style=f"bold {style}")
    return Panel(inside, title=title, title_align="left", border_style=style, padding=(0, 1))


def _memory(best: Candidate, width: int) -> Group:
    parts = sorted(((name, value) for name, value in best.memory.items() if value > 0), key=lambda part: -part[1])
    rows = [(MEMORY_LABELS.get(name, name), value, size(value), COLORS.get(name, "white")) for name, value in parts]
    free = best.capacity - best.bytes
    rows.append(("free" if free >= 0 else "missing", abs(free), size(abs(free)), "bright_black" if free >= 0 else "bold red"))
    rank = f"pipeline rank {best.fullest}, the fullest" if best.layout.pipeline > 1 else "a rank"
    return _bars(f"memory of {rank}", rows, max(best.capacity, best.bytes), width)


def _step(best: Candidate, width: int) -> Group:
    rows = []
    for name, value in sorted(best.split.items(), key=lambda part: -part[1]):
        if value > 0 and value >= 5e-4 * best.seconds:
            text = f"{short_duration(value)} {value / best.seconds:>6.1%}"
            rows.append((PART_LABELS.get(name, name), value, text, COLORS.get(name, "yellow")))
    return _bars(f"a step, {short_duration(best.seconds)}", rows, best.seconds, width)


def _bars(title: str, rows: Sequence[tuple[str, float, str, str]], whole: float, width: int) -> Group:
    """Draws a titled bar chart of at most `width` columns; `rows`: name, value, text of the value, color."""
    columns = [Column(no_wrap=True), Column(no_wrap=True, justify="right"), Column(no_wrap=True)]
    table = Table.grid(*columns, padding=(0, 1, 0, 0))
    left = width - max(len(name) for name, *_ in rows) - max(len(text) for _, _, text, _ in rows) - 3
    for name, value, text, color in rows:
        table.add_row(name, text, Text(bar(value / whole, max(1, min(_BAR, left))), style=color))
    return Group(Text(title, style="bold"), table)


def _runners_up(report: PlanReport, top: int) -> Table:
    best = report.best
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    priced = best.price is not None
    for title in ("layout", "micro", "recompute", "step", "", "memory", *(["price"] if priced else [])):
        right = title in ("micro", "step", "", "memory", "price")
        table.add_column(title, no_wrap=title != "layout", justify="right" if right else "left")
    table.add_column("costs more in")
    for index, candidate in enumerate([best, *report.runners_up[:top]]):
        table.add_row(
            Text(candidate.name),
            str(candidate.micro_batch),
            savings_label(candidate),
            short_duration(candidate.seconds),
            f"{candidate.seconds / best.seconds - 1:+.1%}" if index else "",
            size(candidate.bytes),
            *([dollars(candidate.price)] if priced else []),
            Text(_largest_loss(best, candidate) if index else "", style="dim"),
            style="" if index else "green",
        )
    return table


def _runner_up_lines(report: PlanReport, top: int) -> list[RenderableType]:
    """The runners-up on a narrow terminal: two lines for each."""
    lines: list[RenderableType] = []
    for candidate in report.runners_up[:top]:
        slower = candidate.seconds / report.best.seconds - 1
        facts = [f"{short_duration(candidate.seconds)} ({slower:+.1%})", size(candidate.bytes)]
        facts += [] if candidate.price is None else [dollars(candidate.price)]
        facts += [f"micro-batch {candidate.micro_batch}", f"recompute {savings_label(candidate)}"]
        facts += [f"more: {loss}"] if (loss := _largest_loss(report.best, candidate)) else []
        lines += [Text(candidate.name, style="bold"), Padding(Text(", ".join(facts)), (0, 0, 0, 2))]
    return lines


def _largest_loss(best: Candidate, candidate: Candidate) -> str:
    """The part of the step in which a candidate loses most time against the best."""
    losses = (
        f"{PART_LABELS[part]} +{short_duration(more)}" for part, more in part_changes(best, candidate).items() if more > 0
    )
    return next(losses, "")


def _why_not(best: Candidate, alternatives: Sequence[Alternative], most: int) -> Group:
    """The reasons against other layouts, each with the keys that select the layout."""
    table, has_keys = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2)), False
    for alternative in alternatives[:most]:
        reason = Text(alternative.reason)
        if alternative.candidate is not None and (keys := keys_to_change(best, alternative.candidate)):
            reason.append(f"\n{keys}", style="dim")
            has_keys = True
        table.add_row(Text(alternative.name, style="bold"), reason)
    left = len(alternatives) - most
    notes = [f"({left} more with --json or --html, or a larger --top)"] if left > 0 else []
    if has_keys:
        notes.append("keys to set in a run file that has the winner's tables: phalanx plan RUN.toml --given KEY=VALUE …")
    return Group(table, *(Text(note, style="dim") for note in notes))


def _side_by_side(*parts: RenderableType, padding: int, style: str = "") -> Table:
    table = Table.grid(padding=(0, padding))
    table.add_row(*parts, style=style)
    return table


def _rule(title: str) -> Rule:
    return Rule(Text(title, style="bold"), align="left", style="dim")


def _section(console: Console, title: str, parts: Iterable[RenderableType]) -> None:
    """Prints a titled section, unless it is empty."""
    if parts := list(parts):
        console.print(_rule(title), *parts, sep="\n")


def show_comparison(console: Console, comparison: Comparison, refitted: Promise | None = None) -> None:
    """Shows the promise of a plan next to the measurements of its run; `refitted`: the promise with corrected constants."""
    names = ("predicted", "measured", "error", *(() if refitted is None else ("refitted",)))
    table = _plain_table("", *(Column(name, justify="right") for name in names))
    again = {} if refitted is None else {row.name: row.predicted for row in comparison.against(refitted)}
    for row in comparison.rows:
        error = UNKNOWN if row.error is None else f"{'+' if row.error >= 0 else '−'}{percent(abs(row.error))}"
        style = "" if row.error is None or abs(row.error) <= 0.2 else "yellow"
        table.add_row(
            Text(row.name),
            _quantity(row.predicted, row.unit),
            _quantity(row.measured, row.unit),
            Text(error, style=style),
            *([] if refitted is None else [_quantity(again.get(row.name), row.unit)]),
        )
    console.print(table)
    if comparison.timed is not None:
        console.print(_timed_step(comparison.timed), soft_wrap=True, markup=False)
    for technique, collectives in comparison.sent.items():
        parts = ", ".join(f"{size(sent)} by {name}" for name, sent in collectives.items())
        console.print(f"rank 0 sends for {technique}: {parts} a step")


def _plain_table(*columns: Column | str) -> Table:
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2), header_style="dim")


def _timed_step(timed: Timed) -> str:
    """Which step and rank the measured parts come from."""
    text = f"parts of a step: in the proportions of step {timed.step}, which took {short_duration(timed.seconds)}"
    if timed.ranks == 1:
        return text
    own, mean = (sum(parts.get(name, 0.0) for name in _OWN_PARTS) / timed.seconds for parts in (timed.parts, timed.mean))
    return (
        f"{text}, on rank {timed.rank}, which waited least of {timed.ranks}: it worked {percent(own)} of that time, "
        f"the ranks {percent(mean)} on average"
    )


def show_bench(console: Console, measured: Sequence[tuple[str, str, float, str]], constants: Mapping[str, float]) -> None:
    """Shows the measurements of `phalanx bench` (what, of which shape, value and unit), then the constants that plans take from them."""
    table = _plain_table("measured", Column("of", style="dim"), Column(justify="right"))
    for what, shape, value, unit in measured:
        table.add_row(what, shape, _quantity(value, unit))
    values = _plain_table("constant", Column(justify="right"))
    for name in sorted(constants):
        values.add_row(name, f"{constants[name]:.4g}")
    console.print(table, values)


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    if unit == "s":
        return short_duration(value)
    if unit == "FLOP/s":
        return flops(value)
    return size(value) + unit[1:] if unit in ("B", "B/s") else f"{count(value)} {unit}"
