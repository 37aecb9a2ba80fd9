from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from phalanx.dashboard.data_tables import tokenizing
from phalanx.data.ingest import Progress


def reached(**values: Any) -> Progress:
    usual: dict[str, Any] = {"name": "wiki", "bytes": 0, "size": 2 << 20, "tokens": 0, "kept": 0}
    return Progress(**(usual | values))


def shown(*news: Progress, terminal: bool) -> str:
    file = io.StringIO()
    with tokenizing(Console(file=file, width=100, force_terminal=terminal)) as show:
        for each in news:
            show(each)
    return file.getvalue()


def test_nothing_to_tokenise_shows_nothing() -> None:
    assert shown(terminal=False) == shown(terminal=True) == ""


def test_a_file_gets_a_line_per_source_and_no_more_than_it_can_bear() -> None:
    many = [reached(bytes=n << 10, tokens=n) for n in range(1000)]
    text = shown(*many, reached(name="code[1]", size=None, bytes=5 << 10, tokens=1200), terminal=False)
    assert text.splitlines() == [
        "tokenizing wiki: 0 B of 2.0 MiB (0.00%), 0 tokens",
        "tokenizing code[1]: 5.0 KiB, 1.20k tokens",
    ]


def test_a_terminal_gets_a_bar_per_source() -> None:
    text = shown(reached(bytes=1 << 20, tokens=5000), reached(name="code[1]", size=None), terminal=True)
    for part in ("tokenizing wiki", "1.0 MiB of 2.0 MiB (50.0%)", "5.00k tokens", "tokenizing code[1]"):
        assert part in text, part
