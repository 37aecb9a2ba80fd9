"""How samples and corpora are shown: masks and boundaries are visible, and no text is taken for markup."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from phalanx.dashboard.data_tables import SourceFormat, show_inspected, show_sample
from phalanx.data.corpus import MemoryCorpus
from phalanx.data.inspect import InspectOptions, PieceView, SampleView, TextSpan, inspect
from phalanx.data.tokenizer import ByteTokenizer


def screen(**values: Any) -> Console:
    return Console(file=io.StringIO(), width=80, highlight=False, **values)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def sample(*stretches: TextSpan, padding: int = 0) -> SampleView:
    piece = PieceView(document=7, start=3, stop=20, first=0, texts=stretches)
    return SampleView(sample=9, source="web", epoch=1, window=4, pieces=(piece,), trained=10, masked=7, padding=padding)


def test_masks_are_brackets_in_a_file_and_dim_on_a_terminal() -> None:
    stretches = (TextSpan("read ", False), TextSpan("[bold]learnt[/bold]", True))
    file, terminal = screen(), screen(force_terminal=True, color_system="truecolor")
    for console in (file, terminal):
        show_sample(console, sample(*stretches), 0)
    assert "⟦read ⟧[bold]learnt[/bold]\n" in printed(file)
    assert "⟦" not in printed(terminal) and "\x1b[2;3mread \x1b[0m[bold]learnt[/bold]" in printed(terminal)


def test_heads_and_counts() -> None:
    console = screen()
    show_sample(console, sample(TextSpan("x", True), padding=5), 0)
    text = printed(console)
    for part in (
        "sample 9 · web · epoch 1 · window 4",
        "10 targets trained on, 7 masked, 5 padding",
        "document 7 · tokens 3–20 · from position 0",
        "5 tokens of padding",
    ):
        assert part in text


def test_width_cuts_documents() -> None:
    console = screen()
    show_sample(console, sample(TextSpan("abc", False), TextSpan("defgh", True), TextSpan("ijk", False)), 5)
    assert "⟦abc⟧de …\n" in printed(console)


def test_control_characters_are_shown_not_sent() -> None:
    console = screen()
    show_sample(console, sample(TextSpan("a\x1b[2Jb\x07\r\x00c\n\td", True)), 0)
    assert "a␛[2Jb␇␍␀c\n" in printed(console)


def test_a_corpus() -> None:
    console = screen()
    found = inspect(MemoryCorpus(["[red]one[/red]", "two", "two"]), ByteTokenizer(), InspectOptions(sequence_length=16))
    about = SourceFormat(tokenizer="byte", vocab=257, end=256, dtype="uint16", skipped={"broken JSON": 3})
    show_inspected(console, "web", found, about)
    text = printed(console)
    for part in (
        "3 documents, 23 tokens, 20 B of text",
        "min 3, median 3, mean 6.7, p90 14, p99 14, max 14",
        "exact duplicates: 1 documents (33.3%)",
        "padding under best-fit packing into 16 tokens: 37.5%",
        "skipped 3 records: broken JSON",
        "[red]one[/red]",
    ):
        assert part in text, text
    bars = [line for line in text.splitlines() if "█" in line]
    assert [line.split()[0] for line in bars] == ["2–3", "8–15"]
