"""Prints the tables of `phalanx checkpoint`. It gets plain values and reads no files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from phalanx.dashboard.numbers import UNKNOWN, size
from phalanx.spec.layout import Layout

_SHOWN = 20  # tensors, files or ranks; more only on request
_RIGHT = ("step", "size", "ranks", "bytes", "rank", "reads", "from files", "of tensors", "values", "largest", "relative")


class ListedCheckpoint(Protocol):
    """A checkpoint of a folder, as `checkpointing/checkpoint_info` describes it."""

    @property
    def step(self) -> int | None: ...
    @property
    def time(self) -> float | None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def ranks(self) -> int | None: ...
    @property
    def problem(self) -> str | None: ...
    @property
    def leftover(self) -> bool: ...


def show_listing(console: Console, folder: str, rows: Sequence[tuple[ListedCheckpoint, str]]) -> None:
    """Lists the checkpoints of a folder, newest first, each with its layout in words."""
    if not rows:
        console.print(f"There is no checkpoint in {folder}.", soft_wrap=True)
        return
    table = _Table("step", "saved", "size", "ranks", "layout", "state")
    for row, degrees in rows:
        state = "valid" if row.problem is None else row.problem
        style = None if row.problem is None else "yellow" if row.leftover else "red"
        step = UNKNOWN if row.step is None else str(row.step)
        layout = UNKNOWN if row.ranks is None else degrees
        table.add_row(step, local_time(row.time), size(row.bytes), str(row.ranks or UNKNOWN), layout, state, style=style)
    console.print(folder, style="bold", soft_wrap=True, markup=False)
    table.print(console)


def local_time(seconds: float | None) -> str:
    """Formats a time in the local time zone."""
    return UNKNOWN if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def first_rows(tensors: Sequence[Any], show_all: bool) -> tuple[Sequence[Any], int]:
    """The tensors to show, and the number of tensors that are not shown."""
    return (tensors, 0) if show_all else (tensors[:_SHOWN], max(0, len(tensors) - _SHOWN))


class CheckpointFile(Protocol):
    """A file of a checkpoint."""

    @property
    def bytes(self) -> int: ...
    @property
    def checksum(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """What the marker and the headers of a checkpoint say."""

    path: str
    step: int | None
    samples: int | None
    seed: int | None
    data: str | None
    time: float | None
    version: str | None
    degrees: str
    """The layout in words."""
    ranks: int | None
    bytes: int
    kinds: Mapping[str, int]
    """Bytes by kind of tensor."""
    files: Mapping[str, CheckpointFile]


def show_checkpoint(console: Console, about: CheckpointSummary, tensors: tuple[Sequence[Any], int]) -> None:
    """Shows one checkpoint. `tensors`: the result of `first_rows`."""
    kinds = ", ".join(f"{kind} {size(count)}" for kind, count in about.kinds.items())
    table = _Table("", "")
    for title, text in (
        ("checkpoint", about.path),
        ("step", str(about.step)),
        ("samples seen", _known(about.samples)),
        ("seed", _known(about.seed)),
        ("text", _known(about.data)),
        ("saved", f"{local_time(about.time)} by phalanx {_known(about.version)}"),
        ("layout", f"{about.degrees} ({about.ranks} rank{'s' if about.ranks != 1 else ''})"),
        ("size", f"{size(about.bytes)} ({kinds})"),
    ):
        table.add_row(title, text)
    table.print(console)
    _files(console, about.files)
    _tensors(console, *tensors)


def _files(console: Console, files: Mapping[str, CheckpointFile]) -> None:
    table = _Table("file", "bytes", "checksum")
    for name, file in list(files.items())[: 2 * _SHOWN]:
        table.add_row(name, f"{file.bytes:,}", file.checksum)
    console.print()
    table.print(console)
    if (more := len(files) - 2 * _SHOWN) > 0:
        console.print(f"… and {more} more files (--json has all)", style="dim")


def _tensors(console: Console, tensors: Sequence[Any], more: int) -> None:
    table = _Table("tensor", "format", "shape", "stored in")
    for tensor in tensors:
        boxes = [f"{file.removesuffix('.safetensors')}{_slice(saved.box, tensor.shape)}" for file, saved in tensor.boxes[:4]]
        rest = f" … and {len(tensor.boxes) - 4} more" if len(tensor.boxes) > 4 else ""
        table.add_row(tensor.name, tensor.dtype, _shape(tensor.shape), ", ".join(boxes) + rest)
    console.print()
    table.print(console)
    if more:
        console.print(f"… and {more} more tensors (--names '*' shows all)", style="dim")


def _slice(box: Any, whole: Sequence[int]) -> str:
    """The slice of a tensor in Python's notation; empty for the whole tensor."""
    if tuple(box.shape) == tuple(whole):
        return ""
    ranges = (":" if n == all_ else f"{begin}:{begin + n}" for begin, n, all_ in zip(box.offset, box.shape, whole, strict=True))
    return f"[{', '.join(ranges)}]"


class RankRead(Protocol):
    """What one rank would read."""

    @property
    def rank(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def files(self) -> int: ...
    @property
    def tensors(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChange:
    """What the ranks of another layout would read of a checkpoint."""

    layout: Layout
    degrees: str
    """The layout in words."""
    distinct: Sequence[RankRead]
    """One of each group of ranks that read the same."""
    tensors: int
    """Number of tensors of the checkpoint."""
    cut: Sequence[str]
    """Tensors that are sharded differently."""
    micro_batch: int | None
    accumulation: int | None


def show_relayout(console: Console, change: LayoutChange) -> None:
    """Shows what the ranks of another layout would read."""
    read, cut, ranks = change.distinct, change.cut, change.layout.ranks
    replicas = ranks // len(read)
    sizes = [row.bytes for row in read]
    console.print(f"\nOn {change.degrees} ({ranks} rank{'s' if ranks != 1 else ''})", style="bold")
    table = _Table("rank", "reads", "from files", "of tensors")
    for row in read[:_SHOWN]:
        table.add_row(str(row.rank), size(row.bytes), str(row.files), str(row.tensors))
    table.print(console)
    if len(read) > _SHOWN:
        console.print(f"… and {len(read) - _SHOWN} more: {size(min(sizes))} to {size(max(sizes))} each", style="dim")
    if replicas > 1:
        console.print(f"Each of these {len(read)} ranks has {replicas - 1} more with the same part.")
    names = ", ".join(cut[:6]) + (f" … and {len(cut) - 6} more" if len(cut) > 6 else "")
    console.print(
        f"{len(cut)} of {change.tensors} tensors are sharded differently{f': {names}' if cut else ''}", soft_wrap=True
    )
    if change.micro_batch is not None:
        console.print(f"{change.accumulation} × micro-batch of {change.micro_batch} per rank and step")


class DamagedFile(Protocol):
    """A file whose bytes are not those that were saved."""

    @property
    def file(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def ranges(self) -> Sequence[tuple[int, int]]: ...


def show_verified(console: Console, path: str, count: int, damages: Sequence[DamagedFile]) -> None:
    if not damages:
        console.print(f"{path}: every byte is as saved ({size(count)})", soft_wrap=True, markup=False)
        return
    console.print(f"{path} is damaged:", style="red", soft_wrap=True, markup=False)
    for damage in damages:
        ranges = ", ".join(f"{begin:,} to {end:,}" for begin, end in damage.ranges[:8])
        rest = f" … and {len(damage.ranges) - 8} more" if len(damage.ranges) > 8 else ""
        where = f" in bytes {ranges}{rest}" if ranges else ""
        console.print(f"  {damage.file}: {damage.reason}{where}", soft_wrap=True, markup=False)


class DifferentTensor(Protocol):
    """A tensor that differs between two checkpoints, as `checkpointing/checkpoint_diff` describes it."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def a(self) -> str: ...
    @property
    def b(self) -> str: ...
    @property
    def unequal(self) -> int: ...
    @property
    def values(self) -> int: ...
    @property
    def largest(self) -> float: ...
    @property
    def relative(self) -> float: ...


def show_differences(
    console: Console,
    paths: tuple[str, str],
    rows: Sequence[DifferentTensor],
    metadata: Mapping[str, tuple[object, object]],
    *,
    equal: int,
    most: int,
) -> None:
    """Shows how two checkpoints differ. `metadata`: other values that differ; `equal`: number of equal tensors; `most`: rows to show."""
    console.print(f"A {paths[0]}\nB {paths[1]}", soft_wrap=True, markup=False)
    for key, (a, b) in metadata.items():
        console.print(f"{key}: {a} → {b}", soft_wrap=True, markup=False)
    if rows and most:
        table = _Table("tensor", "differs in", "values", "largest", "relative")
        for row in rows[:most]:
            numbers = row.kind in ("values", "format")
            kind = row.kind + (f" ({row.a} → {row.b})" if row.a else "")
            count = f"{row.unequal:,} of {row.values:,}" if numbers else UNKNOWN
            sizes = [f"{value:.3g}" if numbers else UNKNOWN for value in (row.largest, row.relative)]
            table.add_row(row.name, kind, count, *sizes)
        table.print(console)
        if len(rows) > most:
            console.print(f"… and {len(rows) - most} more (--largest shows them)", style="dim")
    if rows:
        console.print(f"{len(rows)} tensors differ, {equal} are bitwise equal", style="bold")
    else:
        console.print(f"All {equal} tensors are bitwise equal", style="bold")


def show_pruned(
    console: Console, removed: Sequence[str], kept: Sequence[str], damaged: Sequence[str], *, dry_run: bool
) -> None:
    for problem in damaged:
        console.print(f"damaged, not removed: {problem}", style="yellow", soft_wrap=True, markup=False)
    for name in removed:
        console.print(f"{'would remove' if dry_run else 'removed'} {name}", soft_wrap=True, markup=False)
    console.print(f"{'would keep' if dry_run else 'kept'} {', '.join(kept)}", style="bold", soft_wrap=True, markup=False)


def _known(value: Any) -> str:
    return UNKNOWN if value is None else str(value)


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


class _Table:
    """A table whose columns are as wide as their contents on any screen: names and checksums can be copied."""

    def __init__(self, *titles: str):
        self._rows: list[tuple[tuple[str, ...], str | None]] = [(titles, "bold")] if any(titles) else []
        self._right = [title in _RIGHT for title in titles]

    def add_row(self, *cells: str, style: str | None = None) -> None:
        self._rows.append((cells, style))

    def print(self, console: Console) -> None:
        widths = [max(len(cells[column]) for cells, _ in self._rows) for column in range(len(self._right))]
        for cells, style in self._rows:
            columns = zip(cells, widths, self._right, strict=True)
            line = "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns)
            console.print(line.rstrip(), style=style, soft_wrap=True, markup=False)
