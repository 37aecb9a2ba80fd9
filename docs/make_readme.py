"""Renews the outputs that README.md shows: runs every command of a block that begins with "$ phalanx" and replaces the lines below it.

    python docs/make_readme.py

A line "…" stands for lines that are left out, and "…" at the end of a line for the rest of it. What follows a "…" is found again by its first
line, whatever numbers are in it, and stays as long as it is. Times and speeds differ from run to run: a block that differs only in what was
measured stays as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"(?<=^```\n)\$ (phalanx .*)\n((?:.*\n)*?)(?=```$)", re.M)
"""A command and the lines that it prints."""
LEFT_OUT = "…"
_WIDTH = 100
_MEASURED = ("train", "verify")
"""Verbs that print times, speeds and rounding errors: their numbers are not compared, the words are."""
_NUMBERS = [
    (re.compile(r"\d+ (?:h|min|s|d) \d+ (?:min|s|h)\b"), "# s"),  # durations of two parts
    (re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?[kMGT]?"), "#"),
    (re.compile(r"# (?:ms|s|min|h)\b"), "# s"),
    (re.compile("━+|─+"), "─"),
    (re.compile(r"(?:blocks\.#\.)?\b[a-z_.]+\.weight\b"), "TENSOR"),
]


def masked(line: str) -> str:
    """A line without its numbers, and without the widths that follow from them."""
    for pattern, word in _NUMBERS:
        line = pattern.sub(word, line)
    return re.sub(r"\s+", " ", line).strip()


def is_measured(command: str) -> bool:
    return command.split()[1] in _MEASURED


def compared(command: str, line: str) -> str:
    """What of a line must be the same in every run of a command."""
    if is_measured(command):
        return masked(line)
    return re.sub(r"in [\d.]+ s of CPU time", "in # s of CPU time", line)


def excerpt(shown: list[str], printed: list[str]) -> list[str] | None:
    """The lines of an output that stand where the shown ones stood; None if the output does not have them (yet)."""
    found: list[str] = []
    place, anywhere = 0, False
    for line in shown:
        if line == LEFT_OUT:
            found.append(line)
            anywhere = True
            continue
        if anywhere:
            place = next((at for at in range(place, len(printed)) if masked(printed[at]) == masked(line)), len(printed))
            anywhere = False
        if place >= len(printed):
            return None
        start = masked(line.removesuffix(LEFT_OUT))
        found.append(line if line.endswith(LEFT_OUT) and masked(printed[place]).startswith(start) else printed[place])
        place += 1
    if not anywhere and place < len(printed):
        found += printed[place:]
    return found


def renewed(command: str, shown: list[str]) -> list[str]:
    """The lines to show below a command: the same ones, unless the command prints something else."""
    printed: list[str] = []
    new: list[str] | None = None
    for line in _output(command):
        printed.append(line)
        # A long run need not end where the end of its output is left out.
        if shown[-1] == LEFT_OUT and (new := excerpt(shown, printed)) is not None:
            break
    new = new or excerpt(shown, printed)
    if new is None:
        raise SystemExit(f"README.md: `{command}` does not print the lines that follow a {LEFT_OUT}:\n" + "\n".join(printed))
    same = [compared(command, line) for line in new] == [compared(command, line) for line in shown]
    return shown if same else new


def _output(command: str) -> Iterator[str]:
    """The lines that a command prints in a folder that has the examples, as on a terminal without colors."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "examples").symlink_to(ROOT / "examples")
        # What somebody has measured on this machine changes no plan of the README.
        env = os.environ | {
            "COLUMNS": str(_WIDTH),
            "XDG_CONFIG_HOME": folder,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        }
        words = [sys.executable, "-m", *shlex.split(command)]
        with subprocess.Popen(
            words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield line.rstrip()
            finally:
                process.terminate()
                process.stdout.read()


def blocks() -> dict[str, list[str]]:
    """The commands of the README that are shown with an output, and the lines of it."""
    return {command: lines.splitlines() for command, lines in BLOCK.findall(README.read_text())}


def text() -> str:
    """The README with renewed outputs."""

    def renew(block: re.Match[str]) -> str:
        return "\n".join([f"$ {block[1]}", *renewed(block[1], block[2].splitlines()), ""])

    return BLOCK.sub(renew, README.read_text())


if __name__ == "__main__":
    README.write_text(text())
