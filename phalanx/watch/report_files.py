"""Writes a report as one file that needs nothing else: HTML with pictures inside, Markdown with pictures as data, or PDF."""

from __future__ import annotations

import base64
import html
import io
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.dashboard.numbers import UNKNOWN
from phalanx.dashboard.pictures import GRID, INK, MUTED, new_figure, plain_axes, printable
from phalanx.spec.errors import RunError
from phalanx.watch.run_report import UNITS, Picture, Report, Section, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

_COLORS = ("#2563eb", "#ea580c", "#9aa5b1")
_FAILURE = "#dc2626"
_SIZE, _NARROW = (10.0, 2.8), (5.4, 2.5)
"""Inches of the first picture of a section, and of the others, of which two stand side by side."""
_PAGE = (8.27, 11.69)
"""Inches of a PDF's page: A4."""
_COLUMNS, _LINES, _ON_A_PAGE = 112, 82, 4
"""Characters of a PDF's line, lines of its page, pictures of its page."""


def write_report(report: Report, path: Path) -> None:
    """Writes the report in the format that the file's name ends with. Raises RunError for other names."""
    write = {".html": _html, ".md": _markdown, ".pdf": _pdf}.get(path.suffix)
    if write is None:
        raise RunError(f"--output {path} ends with none of .html, .md and .pdf: the name says which format is written.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(write(report))
        os.replace(partial, path)
    except OSError as error:
        raise RunError(f"--output {path} cannot be written: {error.strerror or error}.") from None


# Pictures.


def draw(picture: Picture, axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    plain_axes(axes, size=8)
    if picture.band is not None:
        axes.axhspan(*picture.band, color=GRID, zorder=0, label="promised, P10 to P90")
    for number, line in enumerate(picture.lines):
        color = _COLORS[number % len(_COLORS)]
        if line.dots:
            axes.plot(line.x, line.y, ".", color=color, markersize=5, label=line.name)
            continue
        if line.low:
            axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)
        axes.plot(line.x, line.y, color=color, linewidth=1.2, marker="o" if len(line.x) < 3 else "", label=line.name)
    for number, step in enumerate(picture.marks):
        axes.axvline(step, color=_FAILURE, linewidth=0.6, alpha=0.6, label="failure" if number == 0 else None)
    handles, names = axes.get_legend_handles_labels()
    kept = [(handle, name) for handle, name in zip(handles, names, strict=True) if name != picture.title]
    if kept:  # beside the title, where it covers nothing
        axes.legend(
            [handle for handle, _ in kept],
            [name for _, name in kept],
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=len(kept),
            borderaxespad=0.2,
            fontsize=8,
            frameon=False,
            labelcolor=MUTED,
        )
    if picture.unit:
        shown = UNITS[picture.unit]
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    axes.set_title(picture.title, loc="left", fontsize=10, color=INK)


def _figure(picture: Picture, size: tuple[float, float]) -> Figure:
    figure = new_figure(size, dpi=110)
    draw(picture, figure.subplots())
    return figure


def _svg(picture: Picture, size: tuple[float, float]) -> str:
    import matplotlib

    target = io.StringIO()
    # Text stays text, and the same run gives the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": picture.title}):
        _figure(picture, size).savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    found = target.getvalue()
    # Identifiers are unique within a picture alone, and a page holds several.
    key = re.sub(r"\W", "-", picture.title)
    found = re.sub(r'id="([^"]+)"', rf'id="{key}-\1"', found)
    found = re.sub(r'(xlink:href="|url\()#', rf"\1#{key}-", found)
    return found[found.index("<svg") :]


def _png(picture: Picture) -> str:
    target = io.BytesIO()
    _figure(picture, _SIZE).savefig(target, format="png", metadata={"Software": None})
    return base64.b64encode(target.getvalue()).decode()


# HTML.

_STYLE = """
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5em, 1fr)); gap: .8em; margin: 1.2em 0; }
.figures b { display: block; font-size: 1.35em; } .figures small { color: var(--muted); }
figure { margin: .6em 0; background: #fff; border-radius: 6px; } figure svg text { fill: inherit; font-size: inherit; }
td { overflow-wrap: anywhere; } pre { margin: .5em 0; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { figure, tr { break-inside: avoid; } }
"""


def _html(report: Report) -> bytes:
    style = (files("phalanx.dashboard") / "plan.css").read_text() + _STYLE
    title = html.escape(report.title)
    text = "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Nothing is loaded and nothing runs, whatever the names and texts of the run contain.
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
            f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            f'<h1>{title}</h1>\n<p class="muted">{html.escape(report.subtitle)}</p>',
            '<div class="figures">',
            *(
                f"<div>{html.escape(name)}<b>{html.escape(value)}</b><small>{html.escape(note)}</small></div>"
                for name, value, note in report.figures
            ),
            "</div>",
            *(part for section in report.sections for part in _html_section(section)),
            "</body>\n</html>\n",
        )
    )
    return text.encode()


def _html_section(section: Section) -> Iterator[str]:
    yield f"<h2>{html.escape(section.title)}</h2>"
    yield from (f"<p>{html.escape(note)}</p>" for note in section.notes)
    drawn = [
        f'<figure role="img" aria-label="{html.escape(picture.title)}">{_svg(picture, _NARROW if number else _SIZE)}</figure>'
        for number, picture in enumerate(section.pictures)
    ]
    yield from (*drawn[:1], '<div class="two">', *drawn[1:], "</div>") if drawn else ()
    if section.table is not None:
        head = "".join(f"<th>{html.escape(word)}</th>" for word in section.table.heads)
        yield f'<div class="scroll"><table>\n<tr>{head}</tr>'
        for row in section.table.rows:
            yield f"<tr>{''.join(f'<td>{html.escape(word)}</td>' for word in row)}</tr>"
        yield "</table></div>"
    yield from (f"<pre>{html.escape(code)}</pre>" for code in section.code)


# Markdown.


def _markdown(report: Report) -> bytes:
    lines = [f"# {_flat(report.title)}", "", _flat(report.subtitle), ""]
    lines += _markdown_table(Table(heads=("", "", ""), rows=report.figures))
    for section in report.sections:
        lines += ["", f"## {section.title}", ""]
        lines += [line for note in section.notes for line in (_flat(note), "")]
        lines += [
            line for picture in section.pictures for line in (f"![{picture.title}](data:image/png;base64,{_png(picture)})", "")
        ]
        lines += _markdown_table(section.table) if section.table is not None else []
        lines += [line for code in section.code for line in ("", *(f"    {part}" for part in code.splitlines()))]
    return ("\n".join(lines) + "\n").encode()


def _markdown_table(table: Table) -> list[str]:
    rows = [table.heads, ("---",) * len(table.heads), *table.rows]
    return [f"| {' | '.join(word if word == '---' else _flat(word) for word in row)} |" for row in rows]


def _flat(text: str) -> str:
    """Text that stays text in a line or a cell of Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))


# PDF.


def _pdf(report: Report) -> bytes:
    from matplotlib.backends.backend_pdf import PdfPages

    target = io.BytesIO()
    with PdfPages(target, metadata={"Title": printable(report.title), "CreationDate": None}) as pages:
        figures = [f"{name:<16}{value:<14}{note}" for name, value, note in report.figures]
        text = [report.title, "", *textwrap.wrap(report.subtitle, _COLUMNS), "", *figures]
        for section in report.sections:
            text += ["", section.title.upper(), "", *_pdf_lines(section)]
            if section.pictures:
                _add_pictures(pages, text, section.pictures)
                text = []
        _add_text(pages, text)
    return target.getvalue()


def _pdf_lines(section: Section) -> Iterator[str]:
    for note in section.notes:
        yield from textwrap.wrap(note, _COLUMNS)
    if section.table is not None:
        rows = [section.table.heads, *section.table.rows]
        widths = [min(40, max(len(row[column]) for row in rows)) for column in range(len(section.table.heads))]
        for row in rows:
            cells = [textwrap.wrap(word, width) or [""] for word, width in zip(row, widths, strict=True) if width]
            kept = [width for width in widths if width]
            for number in range(max(map(len, cells), default=0)):
                parts = (cell[number] if number < len(cell) else "" for cell in cells)
                yield "  ".join(part.ljust(width) for part, width in zip(parts, kept, strict=True))[: _COLUMNS + 30]
    for code in section.code:
        yield ""
        for line in code.splitlines():
            yield from textwrap.wrap(line, _COLUMNS, subsequent_indent="    ") or [""]


def _add_text(pages: PdfPages, lines: Sequence[str]) -> None:
    from matplotlib.figure import Figure

    for first in range(0, len(lines), _LINES):
        figure = Figure(figsize=_PAGE)
        figure.text(0.06, 0.96, _typed(lines[first : first + _LINES]), family="monospace", fontsize=7, va="top", color=INK)
        pages.savefig(figure)  # type: ignore[no-untyped-call]


def _add_pictures(pages: PdfPages, lines: Sequence[str], pictures: Sequence[Picture]) -> None:
    """Below the lines, as long as these leave room for them."""
    if len(lines) > _LINES // _ON_A_PAGE:
        _add_text(pages, lines)
        lines = ()
    places = [*([None] if lines else []), *pictures]
    for first in range(0, len(places), _ON_A_PAGE):
        figure = new_figure(_PAGE, pad=0.25)
        shown = places[first : first + _ON_A_PAGE]
        for number, axes in enumerate(figure.subplots(_ON_A_PAGE, 1)):
            picture = shown[number] if number < len(shown) else None
            if picture is not None:
                draw(picture, axes)
            else:
                axes.set_axis_off()
        if first == 0 and lines:
            figure.text(0.06, 0.97, _typed(lines), family="monospace", fontsize=7, va="top", color=INK)
        pages.savefig(figure)  # type: ignore[no-untyped-call]


def _typed(lines: Sequence[str]) -> str:
    """As the font has it, and not as a formula."""
    return printable("\n".join(lines).replace(UNKNOWN, "-")).replace("$", r"\$")
