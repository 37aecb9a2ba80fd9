"""Draws docs/images/layer-cuts.svg: one layer of Phi-3, with fused matrices, on two tensor ranks.

    python docs/make_cuts_picture.py

The picture has its own background, so that it suits light and dark pages, and names no font from elsewhere. A test compares what it draws with the
cuts that are inferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

FILE = Path(__file__).parent / "images" / "layer-cuts.svg"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of the layer: which dimension ranks divide, and its segments."""

    name: str
    dim: int
    segments: tuple[str, ...]


BLOCKS = (
    (
        "Attention",
        "each rank: half of the heads",
        (Matrix("self_attn.qkv_proj", 0, ("q", "k", "v")), Matrix("self_attn.o_proj", 1, ("",))),
    ),
    (
        "Feed-forward",
        "each rank: half of silu(gate) · up",
        (Matrix("mlp.gate_up_proj", 0, ("gate", "up")), Matrix("mlp.down_proj", 1, ("",))),
    ),
)
_RANKS = ("#58a6ff", "#f0883e")
_WIDTH, _HEIGHT, _PANEL = 980, 515, 470
_STYLE = """text{font-family:Helvetica,Arial,sans-serif;fill:#d6dce3}.h{font-size:17px;font-weight:600}.n{font-size:14px;font-family:ui-monospace,
SFMono-Regular,Menlo,Consolas,monospace}.s{font-size:13px;fill:#9aa7b4}.m{text-anchor:middle}.r{font-size:12px;fill:#10151c;text-anchor:middle}"""


def text() -> str:
    """The picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        "<title>How two ranks divide one layer with fused matrices</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="10" fill="#161b22"/>',
        *_legend(),
    ]
    for index, (title, between, matrices) in enumerate(BLOCKS):
        parts += _block(15 + index * (_PANEL + 10), title, between, matrices)
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> Iterator[str]:
    for rank, color in enumerate(_RANKS):
        yield f'<rect x="{30 + rank * 100}" y="20" width="16" height="16" rx="3" fill="{color}"/>'
        yield _words(54 + rank * 100, 33, f"rank {rank}", "s")
    yield _words(240, 33, "A matrix is drawn as it is stored: rows are outputs, columns are inputs.", "s")


def _block(left: int, title: str, between: str, matrices: tuple[Matrix, ...]) -> Iterator[str]:
    middle = left + 115
    yield f'<rect x="{left}" y="55" width="{_PANEL}" height="445" rx="8" fill="none" stroke="#30363d"/>'
    yield _words(left + 18, 82, title, "h")
    yield from _bar(middle, 96, "x, normalized: whole on every rank")
    yield from _arrow(middle, 126, "enter: the backward sums gradients")
    yield from _matrix(middle, 160, matrices[0], 150, 130)
    yield from _arrow(middle, 296, between)
    yield from _matrix(middle, 330, matrices[1], 150, 90)
    yield from _arrow(middle, 426, "leave: the forward sums partial results")
    yield from _bar(middle, 464, "added to x: whole on every rank")


def _bar(middle: int, top: int, what: str) -> Iterator[str]:
    yield f'<rect x="{middle - 75}" y="{top}" width="150" height="24" rx="4" fill="#8b949e"/>'
    yield _words(middle + 90, top + 17, what, "s")


def _arrow(middle: int, top: int, what: str) -> Iterator[str]:
    yield f'<path d="M{middle} {top}v22m-5-6l5 6l5-6" stroke="#9aa7b4" stroke-width="2" fill="none"/>'
    yield _words(middle + 90, top + 17, what, "s")


def _matrix(middle: int, top: int, matrix: Matrix, width: int, height: int) -> Iterator[str]:
    """Each segment is divided evenly: of a fused matrix a rank has a part of every one."""
    left, each = middle - width // 2, height / len(matrix.segments)
    for index, segment in enumerate(matrix.segments):
        for rank, color in enumerate(_RANKS):
            if matrix.dim == 0:
                box = (left, top + (index + rank / 2) * each, width, each / 2)
            else:
                box = (left + rank * width / 2, top, width / 2, height)
            x, y, w, h = box
            yield f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{color}" stroke="#161b22"/>'
            part = f"{segment}, {('first', 'second')[rank]} half" if segment else f"{('first', 'second')[rank]} half"
            yield _words(x + w / 2, y + h / 2 + 4, part, "r")
    yield _words(middle + 90, top + height / 2 - 4, matrix.name, "n")
    rows = "every segment's rows are divided" if len(matrix.segments) > 1 else "rows are divided"
    yield _words(middle + 90, top + height / 2 + 16, rows if matrix.dim == 0 else "columns are divided", "s")


def _words(x: float, y: float, what: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(what)}</text>'


if __name__ == "__main__":
    FILE.write_text(text())
