"""Shows data: the report about a corpus, samples of a batch, and the progress of tokenization. Text of a corpus is never parsed as markup."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.text import Text

from phalanx.dashboard.numbers import count, percent, size

if TYPE_CHECKING:  # these import readers of formats that most commands never need
    from phalanx.data.ingest import Progress as IngestProgress
    from phalanx.data.inspect import InspectReport, PieceView, SampleView

_BAR = 32  # columns of the longest bar
_LINE_SECONDS = 5.0  # between lines, if the console is no terminal
MASKED = ("⟦", "⟧")
"""Encloses text without loss on it where the output has no colors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFormat:
    """How a source is stored and read; None: unknown."""

    dtype: str
    """Number type of its tokens."""
    tokenizer: str | None = None
    vocab: int | None = None
    end: int | None = None
    """The end token."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of skipped records by reason."""


def show_inspected(console: Console, name: str, found: InspectReport, about: SourceFormat) -> None:
    """Shows the report about one source."""
    console.print(Rule(Text(name), align="left"))
    text_size = "" if found.bytes is None else f", {'about ' if found.bytes_estimated else ''}{size(found.bytes)} of text"
    console.print(f"{count(found.documents)} documents, {count(found.tokens)} tokens{text_size}", style="bold")
    vocab, end = ("?" if number is None else number for number in (about.vocab, about.end))
    console.print(Text(f"tokenizer {about.tokenizer or 'unknown'}, {vocab} tokens, end token {end}, read as {about.dtype}"))
    if found.masked_tokens is not None:
        share = percent(found.masked_tokens / max(found.tokens, 1))
        console.print(f"not trained on: {count(found.masked_tokens)} tokens ({share})")
    if found.lengths:
        lengths = (f"{key} {value:,.{1 if key == 'mean' else 0}f}" for key, value in found.lengths.items())
        console.print(f"tokens of a document: {', '.join(lengths)}")
        _bars(console, found.histogram)
    sampled = "" if found.duplicates_of == found.documents else f" of {count(found.duplicates_of)} that were compared"
    console.print(f"exact duplicates: {found.duplicates} documents ({percent(found.duplicate_share)}{sampled})")
    if found.padding is not None:
        console.print(f"padding under best-fit packing into {found.sequence_length} tokens: {percent(found.padding)}")
    for reason, times in about.skipped.items():
        console.print(Text(f"skipped {times} records: {reason}", style="yellow"))
    for sample in found.sample:
        console.print(Text(f"document {sample.document}, {sample.tokens} tokens", style="dim"))
        shown = sample.text if sample.text is not None else " ".join(map(str, sample.ids))
        console.print(Text(_visible(shown)), soft_wrap=True)


def show_sample(console: Console, sample: SampleView, width: int) -> None:
    """Shows one sample of a batch; `width`: characters of each document, 0 for all."""
    where = f"sample {sample.sample} · {sample.source} · epoch {sample.epoch} · window {sample.window}"
    console.print(Rule(Text(where, style="bold"), align="left", characters="═"))
    counts = f"{sample.trained} targets trained on, {sample.masked} masked, {sample.padding} padding"
    console.print(Text(counts, style="dim"))
    for piece in sample.pieces:
        about = f"document {piece.document} · tokens {piece.start}–{piece.stop} · from position {piece.first}"
        console.print(Rule(Text(about, style="dim"), align="left"))
        console.print(_text(piece, width, colored=console.is_terminal), soft_wrap=True)
    if sample.padding:
        console.print(Rule(Text(f"{sample.padding} tokens of padding", style="dim"), align="left"))


def _text(piece: PieceView, width: int, *, colored: bool) -> Text:
    text, left = Text(), width or sum(len(stretch.text) for stretch in piece.texts)
    for stretch in piece.texts:
        if left <= 0:
            break
        part = _visible(stretch.text[:left])
        left -= len(stretch.text)
        if stretch.trained:
            text.append(part)
        elif colored:
            text.append(part, style="dim italic")
        else:
            text.append(part.join(MASKED))
    if left < 0:
        text.append(" …", style="dim")
    return text


def _visible(text: str) -> str:
    """Replaces control characters by their symbols, so that text cannot move the cursor."""
    return "".join(chr(0x2400 + ord(letter)) if ord(letter) < 32 and letter not in "\n\t" else letter for letter in text)


def _bars(console: Console, histogram: list[tuple[int, int, int]]) -> None:
    most = max(times for _, _, times in histogram)
    names = [f"{low:,}" if low == high else f"{low:,}–{high:,}" for low, high, _ in histogram]
    for name, (_, _, times) in zip(names, histogram, strict=True):
        bar = "█" * max(1 if times else 0, round(_BAR * times / most))
        console.print(f"  {name:>{max(map(len, names))}}  {bar:<{_BAR}}  {count(times)}")


@contextmanager
def tokenizing(console: Console) -> Iterator[Callable[[IngestProgress], None]]:
    """Shows the progress of tokenization: the context is a function to call with the progress of a source.

    Nothing is shown if it is never called.
    """
    if not console.is_terminal:
        yield _line_printer(console)
        return
    columns = (TextColumn("tokenizing {task.description}", markup=False), BarColumn(), TextColumn("{task.fields[words]}"))
    bars = Progress(*columns, TimeRemainingColumn(), console=console)
    tasks: dict[str, TaskID] = {}

    def show(progress: IngestProgress) -> None:
        if not tasks:
            bars.start()
        if progress.name not in tasks:
            tasks[progress.name] = bars.add_task(progress.name, total=None, words="")
        words = _progress_text(progress)
        bars.update(tasks[progress.name], completed=progress.bytes, total=progress.size, words=words)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()


def _line_printer(console: Console) -> Callable[[IngestProgress], None]:
    """Prints a line when a source begins, and then one every few seconds."""
    source, last = "", 0.0

    def show(progress: IngestProgress) -> None:
        nonlocal source, last
        now = time.monotonic()
        if progress.name != source or now - last >= _LINE_SECONDS:
            source, last = progress.name, now
            console.print(f"tokenizing {progress.name}: {_progress_text(progress)}", soft_wrap=True, markup=False)

    return show


def _progress_text(progress: IngestProgress) -> str:
    part = f" of {size(progress.size)} ({percent(progress.bytes / progress.size)})" if progress.size else ""
    speed = f", {count(progress.tokens_per_second)} tok/s" if progress.tokens_per_second else ""
    return f"{size(progress.bytes)}{part}, {count(progress.tokens)} tokens{speed}"
