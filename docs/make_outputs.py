"""Renews the outputs that README.md and the pages of docs/ show below their commands.

    python docs/make_outputs.py [--all] [PAGE ...]

A block that begins with "```console" has commands behind "$ " and below each the lines that it prints. The commands of the tutorial and of a
how-to page follow each other in one folder. On all other pages a command stands for itself, in a folder that has the examples.

A line "…" stands for lines that are left out, and "…" at the end of a line for the rest of it. What follows a "…" is found again by its first
line, whatever numbers are in it, and stays as long as it is. Times and speeds differ from run to run: an output that differs only in what was
measured stays as it is, except with --all. A command without an output only has to succeed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(?<=^```console\n)(?:.*\n)*?(?=```$)", re.M)
LEFT_OUT = "…"
ALL = False
"""Whether outputs are renewed that differ only in what was measured."""
ENVIRONMENT = {"COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
_MEASURED = ("train", "verify")
"""Verbs that print times, speeds and rounding errors: their numbers are not compared, the words are."""
_NUMBERS = [
    (re.compile(r"\d+ (?:h|min|s|d) \d+ (?:min|s|h)\b"), "# s"),  # durations of two parts
    (re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?[kMGT]?"), "#"),
    (re.compile(r"# (?:ms|s|min|h)\b"), "# s"),
    (re.compile("━+|─+"), "─"),
    (re.compile(r"(?:blocks\.#\.)?\b[a-z_.]+\.weight\b"), "TENSOR"),
]


@dataclass(frozen=True)
class Shown:
    """A command of a page, and what the page shows of its output."""

    command: str
    lines: list[str]

    def text(self) -> str:
        return "".join(f"{line}\n" for line in (f"$ {self.command}", *self.lines))


def pages() -> dict[str, Path]:
    """The pages that show outputs, by their paths in the repository."""
    found = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return {str(page.relative_to(ROOT)): page for page in found if BLOCK.search(page.read_text())}


def is_followed(page: Path) -> bool:
    """Whether a reader follows the commands of a page from first to last."""
    return page.name == "tutorial.md" or page.parent.name == "how-to"


def blocks(page: Path) -> list[Shown]:
    return [shown for block in BLOCK.findall(page.read_text()) for shown in parsed(block)]


def parsed(block: str) -> list[Shown]:
    """The commands of a block. A command goes on over several lines if a quote is open or a line ends with a backslash."""
    found: list[Shown] = []
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
        lines = part.splitlines()
        end = next(
            end
            for end in range(1, len(lines) + 1)
            if "\n".join(lines[:end]).count('"') % 2 == 0 and lines[end - 1][-1:] != "\\"
        )
        found.append(Shown("\n".join(lines[:end]), lines[end:]))
    return found


def masked(line: str) -> str:
    """A line without its numbers, and without the widths that follow from them."""
    for pattern, word in _NUMBERS:
        line = pattern.sub(word, line)
    return re.sub(r"\s+", " ", line).strip()


def is_slow(command: str) -> bool:
    return is_measured(command) or command.split()[1] == "rehearse"


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
        start = masked(line.removesuffix(LEFT_OUT))
        cut = line.endswith(LEFT_OUT)
        if anywhere:
            wanted = (at for at in range(place, len(printed)) if _is_line(masked(printed[at]), start, cut))
            place = next(wanted, len(printed))
            anywhere = False
        if place >= len(printed):
            return None
        found.append(line if cut and _is_line(masked(printed[place]), start, cut) else printed[place])
        place += 1
    if not anywhere and place < len(printed):
        found += printed[place:]
    return found


def _is_line(line: str, start: str, cut: bool) -> bool:
    return line.startswith(start) if cut else line == start


def renewed(shown: Shown) -> Shown:
    """A command that stands for itself: with the same lines, unless it prints something else."""
    printed: list[str] = []
    new: list[str] | None = None
    for line in _output(shown.command):
        printed.append(line)
        # A long run need not end where the end of its output is left out.
        if shown.lines[-1:] == [LEFT_OUT] and (new := excerpt(shown.lines, printed)) is not None:
            break
    return _replaced(shown, new or excerpt(shown.lines, printed), printed, by_verb=True)


def followed(page: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[Shown, Shown]]:
    """Runs the commands of a page in order, in a folder: each as it is shown, and as it is now. Of all outputs only words are compared."""
    for shown in blocks(page):
        done = subprocess.run(
            ["bash", "-c", shown.command],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise SystemExit(f"{page.name}: `{shown.command}` ended with {done.returncode}:\n{done.stdout}")
        printed = [line.rstrip() for line in done.stdout.splitlines()]
        yield shown, _replaced(shown, excerpt(shown.lines, printed), printed, by_verb=False) if shown.lines else shown


def _replaced(shown: Shown, new: list[str] | None, printed: list[str], *, by_verb: bool) -> Shown:
    if new is None:
        raise SystemExit(f"`{shown.command}` does not print the lines that follow a {LEFT_OUT}:\n" + "\n".join(printed))

    def essence(lines: list[str]) -> list[str]:
        return [compared(shown.command, line) if by_verb else masked(line) for line in lines]

    return shown if essence(new) == essence(shown.lines) and not ALL else Shown(shown.command, new)


def _output(command: str) -> Iterator[str]:
    """The lines that a command prints in a folder that has the examples, as on a terminal without colors."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "examples").symlink_to(ROOT / "examples")
        words = [sys.executable, "-m", *shlex.split(command.replace("\\\n", " "))]
        with subprocess.Popen(
            words, cwd=folder, env=_environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield line.rstrip()
            finally:
                process.terminate()
                process.stdout.read()


def _environment(folder: str) -> dict[str, str]:
    """What somebody has measured on this machine, or has installed elsewhere, changes no page."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | ENVIRONMENT | {"XDG_CONFIG_HOME": folder, "PYTHONPATH": str(ROOT), "PATH": path}


def text(page: Path) -> str:
    """A page with renewed outputs."""
    if not is_followed(page):
        new = [renewed(shown) for shown in blocks(page)]
    else:
        with tempfile.TemporaryDirectory() as folder:
            new = [now for _, now in followed(page, Path(folder), _environment(folder))]
    left = iter(new)
    return BLOCK.sub(lambda block: "".join(next(left).text() for _ in parsed(block[0])), page.read_text())


if __name__ == "__main__":
    ALL = "--all" in sys.argv
    chosen = [Path(name).resolve() for name in sys.argv[1:] if name != "--all"] or list(pages().values())
    for page in chosen:
        page.write_text(text(page))
