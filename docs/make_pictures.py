"""Draws docs/images/plan.svg: the head of what `phalanx plan` prints, as a terminal shows it.

    python docs/make_pictures.py

The picture has its own background, so that it suits light and dark pages, and names no font from elsewhere.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).parent / "images" / "plan.svg"
COMMAND = "phalanx plan examples/llama3-405b.toml --free"
_WIDTH = 100
_LAST = "kernel launches"
"""The picture ends with the line that has these words."""
_THEME = TerminalTheme(
    (22, 27, 34),
    (214, 220, 227),
    [
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)
_FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>What phalanx plan prints</title>
<style>
.{unique_id}-matrix, .{unique_id}-title {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
.{unique_id}-matrix {{ font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def text() -> str:
    """The picture."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(_printed()), soft_wrap=True)
    svg = console.export_svg(title=COMMAND, theme=_THEME, code_format=_FORMAT, unique_id="plan")
    return re.sub(r"in&#160;[\d.]+&#160;s&#160;of&#160;CPU&#160;time", "in&#160;about&#160;a&#160;second", svg)


def _printed() -> str:
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "COLUMNS": str(_WIDTH),
            "FORCE_COLOR": "1",
            "XDG_CONFIG_HOME": folder,  # what somebody has measured on this machine changes no picture
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        }
        words = [sys.executable, "-m", *shlex.split(COMMAND)]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    end = next(number for number, line in enumerate(lines) if _LAST in line)
    return "\n".join(lines[: end + 1])


if __name__ == "__main__":
    FILE.write_text(text())
