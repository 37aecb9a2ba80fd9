"""Reports: one file that needs nothing else, with the figures that the events have."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from commands import PATIENCE
from watch_runs import Record, started, step, write_run

RECORDS: list[Record] = [
    started(),
    {"event": "data_opened", "time": 0.5, "documents": 12, "tokens": 4096, "run_tokens": 10240, "parameters": 1000},
    *(step(number, seconds=1.0 + 0.25 * number) for number in range(1, 7)),
    {"event": "evaluated", "time": 12.5, "step": 6, "loss": 4.25, "sources": {}},
    {"event": "saved", "time": 12.6, "step": 6, "path": "checkpoints/step-00000006", "bytes": 3 << 20, "seconds": 0.5, "stall": 0.125},
    {"event": "failure_noticed", "time": 13.0, "number": 1, "cause": "died", "message": "rank 3 was <b>killed</b>", "rank": 3, "node": 0, "step": 6, "traceback": "Traceback: | [x](y)"},
    {"event": "recovered", "time": 15.0, "failures": [1], "action": "restart", "generation": 1, "ranks": 4, "layout": {"data": 4}, "source": "memory", "step": 6, "steps_lost": 2, "noticed": 13.0, "decided": 13.1, "restarted": 14.0, "first_step": 15.0, "seconds": 2.0},
    {"event": "sampled", "time": 15.1, "step": 6, "prompt": "Once", "text": " upon <script>alert(1)</script> \u001b[31m", "tokens": 3, "seconds": 0.1},
    *(step(number) for number in range(7, 11)),
    {"event": "finished", "time": 20.5, "step": 10},
]  # fmt: skip


def reported(run: Path, output: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "report", str(run), "-o", str(output), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


class Page(html.parser.HTMLParser):
    """The text of a page, and what it would load or run."""

    def __init__(self, text: str):
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value and value[0] != "#"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_page_without_links_whose_figures_are_those_of_the_events(tmp_path: Path) -> None:
    run = write_run(tmp_path / "story", RECORDS, "[train]\nbatch = 8  # <i>\n")
    done = reported(run, tmp_path / "out" / "report.html", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["state"] == "finished", done.stderr
    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert page.loads == [] and "script" not in page.tags and "i" not in page.tags and "@import" not in text
    words = "\n".join(page.words)
    seconds = median(record["seconds"] for record in RECORDS if record["event"] == "step")
    for shown in (
        "4.0000", "from 4.9000",  # the loss of step 10 and of step 1
        "4.2500",
        "10.2k",  # tokens
        f"{seconds:.2f} s", "promised 2.00 s",
        "rank 3 was <b>killed</b>", "restart from memory", "2.0 s, 2 steps lost", "Traceback: | [x](y)",
        "3.0 MiB", "125 ms",
        "12 documents", "2.50 epochs",
        "Once upon <script>alert(1)</script> \\x1b[31m",
        "batch = 8  # <i>",
    ):  # fmt: skip
        assert shown in words, shown
    assert text.count("<svg") >= 6 and words.count("gradient norm") == 1
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and {found for found in re.findall(r'href="#([^"]+)"', text)} <= set(ids)


def test_markdown_and_pdf(tmp_path: Path) -> None:
    run = write_run(tmp_path / "story", RECORDS)
    for name in ("report.md", "report.pdf"):
        assert reported(run, tmp_path / name).returncode == 0
    text = (tmp_path / "report.md").read_text()
    assert (
        "# story" in text
        and r"rank 3 was \<b\>killed\</b\>" in text
        and "](data:image/png;base64," in text
        and "](http" not in text
    )
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows and all(re.sub(r"\\.", "", row).count("|") == re.sub(r"\\.", "", row).count(" | ") + 2 for row in rows), (
        "no cell is cut"
    )
    pdf = (tmp_path / "report.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"%%EOF" in pdf[-32:]
    if shutil.which("pdftotext"):
        shown = subprocess.run(
            ["pdftotext", "-layout", str(tmp_path / "report.pdf"), "-"], capture_output=True, text=True
        ).stdout
        assert "restart from memory" in shown and "loss" in shown


@pytest.mark.parametrize(
    ("records", "output", "sentence"),
    [
        (RECORDS, "report.doc", "ends with none of .html, .md and .pdf"),
        ([], "report.html", "nothing to report"),
        (None, "report.html", "is no run directory"),
        (RECORDS, "story/run.toml/report.html", "cannot be written"),
    ],
)
def test_what_cannot_be_reported_is_refused(records: list[Record] | None, output: str, sentence: str, tmp_path: Path) -> None:
    run = tmp_path / "story"
    if records is not None:
        write_run(run, records)
    done = reported(run, tmp_path / output)
    assert done.returncode == 2 and sentence in " ".join(done.stderr.split()) and not (tmp_path / "report.html").exists()
