"""Prints the tables of `phalanx checkpoint`. It gets values and reads no files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass

from rich.console import Console

from phalanx.checkpointing.checkpoint_info import CheckpointInfo, Difference, FileDamage, ReadNeed, layout_text
from phalanx.checkpointing.format import Marker, SavedTensor
from phalanx.dashboard.numbers import UNKNOWN, size
from phalanx.spec.layout import Layout
from phalanx.spec.tensor_slice import Box

_SHOWN = 20  # tensors, files or ranks; more only on request
_RIGHT = ("step", "size", "ranks", "bytes", "rank", "reads", "from files", "of tensors", "values", "largest", "relative")


def show_listing(console: Console, folder: str, infos: Sequence[CheckpointInfo]) -> None:
    """Lists the checkpoints of a folder, newest first, each with its layout in words."""
    if not infos:
        console.print(f"There is no checkpoint in {folder}.", soft_wrap=True)
        return
    rows, styles = [], []
    for info in infos:
        layout = UNKNOWN if info.ranks is None else layout_text(info.layout)
        facts = (_known(info.step), local_time(info.time), size(info.bytes), str(info.ranks or UNKNOWN), layout)
        rows.append((*facts, info.problem or ("valid" if info.verified else "complete")))
        styles.append("" if info.problem is None else "yellow" if info.leftover else "red")
    _print(console, folder, "bold")
    _print_table(console, ("step", "saved", "size", "ranks", "layout", "state"), rows, styles)
    if any(info.problem is None and not info.verified for info in infos):
        _print(console, "complete: every file has its size. --verify compares contents with their checksums.", "dim")


def local_time(seconds: float | None) -> str:
    """Formats a time in the local time zone."""
    return UNKNOWN if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def show_checkpoint(
    console: Console,
    info: CheckpointInfo,
    marker: Marker,
    kinds: Mapping[str, int],
    tensors: Sequence[SavedTensor],
    most: int | None,
) -> None:
    """Shows one checkpoint with `most` of the tensors (None: the first ones). `kinds`: bytes by kind of tensor."""
    run, by_kind = marker.run, ", ".join(f"{kind} {size(count)}" for kind, count in kinds.items())
    rows = [
        ("checkpoint", info.path),
        ("step", str(info.step)),
        ("samples seen", _known(run.progress.get("samples"))),
        ("seed", _known(run.seed)),
        ("text", _known(run.data)),
        ("saved", f"{local_time(info.time)} by phalanx {_known(info.version)}"),
        ("layout", f"{layout_text(run.layout)} ({info.ranks} rank{'s' if info.ranks != 1 else ''})"),
        ("size", f"{size(info.bytes)} ({by_kind})"),
    ]
    _print_table(console, ("", ""), rows)
    console.print()
    files = [(name, f"{file.bytes:,}", file.checksum) for name, file in marker.files.items()]
    _print_table(console, ("file", "bytes", "checksum"), files[: 2 * _SHOWN])
    if (more := len(files) - 2 * _SHOWN) > 0:
        console.print(f"… and {more} more files (--json has all)", style="dim")
    console.print()
    most = _SHOWN if most is None else most
    _print_table(console, ("tensor", "format", "shape", "stored in"), [_tensor(tensor) for tensor in tensors[:most]])
    if (more := len(tensors) - most) > 0:
        console.print(f"… and {more} more tensors (--names '*' shows all)", style="dim")


def _tensor(tensor: SavedTensor) -> tuple[str, ...]:
    boxes = [f"{file.removesuffix('.safetensors')}{_slice(saved.box, tensor.shape)}" for file, saved in tensor.boxes]
    return tensor.name, tensor.dtype, " × ".join(map(str, tensor.shape)) or "scalar", _first(boxes, 4)


def _slice(box: Box, whole: Sequence[int]) -> str:
    """The slice of a tensor in Python's notation; empty for the whole tensor."""
    if tuple(box.shape) == tuple(whole):
        return ""
    ranges = (":" if n == all_ else f"{begin}:{begin + n}" for begin, n, all_ in zip(box.offset, box.shape, whole, strict=True))
    return f"[{', '.join(ranges)}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChange:
    """What the ranks of another layout would read of a checkpoint."""

    layout: Layout
    degrees: str
    """The layout in words."""
    distinct: Sequence[ReadNeed]
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
    console.print(f"\nOn {change.degrees} ({ranks} rank{'s' if ranks != 1 else ''})", style="bold")
    rows = [(str(need.rank), size(need.bytes), str(need.files), str(need.tensors)) for need in read[:_SHOWN]]
    _print_table(console, ("rank", "reads", "from files", "of tensors"), rows)
    if len(read) > _SHOWN:
        sizes = [need.bytes for need in read]
        console.print(f"… and {len(read) - _SHOWN} more: {size(min(sizes))} to {size(max(sizes))} each", style="dim")
    if replicas > 1:
        console.print(f"Each of these {len(read)} ranks has {replicas - 1} more with the same part.")
    names = f": {_first(cut, 6)}" if cut else ""
    console.print(f"{len(cut)} of {change.tensors} tensors are sharded differently{names}", soft_wrap=True)
    if change.micro_batch is not None:
        console.print(f"{change.accumulation} × micro-batch of {change.micro_batch} per rank and step")


def show_verified(console: Console, path: str, count: int, damages: Sequence[FileDamage]) -> None:
    if not damages:
        _print(console, f"{path}: every byte is as saved ({size(count)})")
        return
    _print(console, f"{path} is damaged:", "red")
    for damage in damages:
        ranges = _first([f"{begin:,} to {end:,}" for begin, end in damage.ranges], 8)
        _print(console, f"  {damage.file}: {damage.reason}" + (f" in bytes {ranges}" if ranges else ""))


def show_differences(
    console: Console,
    paths: tuple[str, str],
    rows: Sequence[Difference],
    metadata: Mapping[str, tuple[object, object]],
    *,
    equal: int,
    most: int,
) -> None:
    """Shows how two checkpoints differ. `metadata`: other values that differ; `equal`: number of equal tensors; `most`: rows to show."""
    _print(console, f"A {paths[0]}\nB {paths[1]}")
    for key, (a, b) in metadata.items():
        for name, before, after in _changed_leaves(key, a, b):
            _print(console, f"{name}: {before} → {after}")
    if rows and most:
        _print_table(
            console, ("tensor", "differs in", "values", "largest", "relative"), [_difference(row) for row in rows[:most]]
        )
        if len(rows) > most:
            console.print(f"… and {len(rows) - most} more (--largest shows them)", style="dim")
    equality = f"{len(rows)} tensors differ, {equal} are bitwise equal" if rows else f"All {equal} tensors are bitwise equal"
    console.print(equality, style="bold")


def _changed_leaves(name: str, a: object, b: object) -> Iterator[tuple[str, object, object]]:
    """Values that differ in two nested tables, by dotted name."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in {**a, **b}:
            yield from _changed_leaves(f"{name}.{key}", a.get(key, UNKNOWN), b.get(key, UNKNOWN))
    elif is_dataclass(a) and is_dataclass(b) and not isinstance(a, type) and not isinstance(b, type):
        yield from _changed_leaves(name, asdict(a), asdict(b))
    elif a != b:
        yield name, a, b


def _difference(row: Difference) -> tuple[str, ...]:
    kind = row.kind + (f" ({row.a} → {row.b})" if row.a else "")
    if row.kind not in ("values", "format"):
        return row.name, kind, UNKNOWN, UNKNOWN, UNKNOWN
    return row.name, kind, f"{row.unequal:,} of {row.values:,}", f"{row.largest:.3g}", f"{row.relative:.3g}"


def show_pruned(
    console: Console, removed: Sequence[str], kept: Sequence[str], damaged: Sequence[str], *, dry_run: bool
) -> None:
    for problem in damaged:
        _print(console, f"damaged, not removed: {problem}", "yellow")
    for name in removed:
        _print(console, f"{'would remove' if dry_run else 'removed'} {name}")
    _print(console, f"{'would keep' if dry_run else 'kept'} {', '.join(kept)}", "bold")


def _known(value: object) -> str:
    return UNKNOWN if value is None else str(value)


def _first(names: Sequence[str], most: int) -> str:
    """The first names, and the number of the others."""
    return ", ".join(names[:most]) + (f" … and {len(names) - most} more" if len(names) > most else "")


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, soft_wrap=True, markup=False)


def _print_table(
    console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] | None = None
) -> None:
    """Prints columns that are as wide as their contents on any screen: names and checksums can be copied."""
    lines = [(titles, "bold")] if any(titles) else []
    lines += zip(rows, styles or [""] * len(rows), strict=True)
    widths = [max(len(cells[column]) for cells, _ in lines) for column in range(len(titles))]
    for cells, style in lines:
        columns = zip(cells, widths, titles, strict=True)
        line = "  ".join(cell.rjust(width) if title in _RIGHT else cell.ljust(width) for cell, width, title in columns)
        _print(console, line.rstrip(), style)
