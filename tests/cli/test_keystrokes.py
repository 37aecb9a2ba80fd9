"""The first minutes in a real terminal: `phalanx init`, `train` and `generate`, typed as a person types them."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import BIN, PATIENCE, Workshop

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux, the terminal of this test, is not installed"),
]
PROMPT = r"(?m)^\$ *\Z"


class Tmux:
    """A terminal of a given size, with a shell in a folder. Its server is its own."""

    def __init__(self, workshop: Workshop, width: int, height: int):
        self._server = ["tmux", "-u", "-L", f"phalanx-{uuid.uuid4().hex[:8]}", "-f", "/dev/null"]
        shell = {"PATH": f"{BIN}:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HISTFILE": ""}
        env = {key: value for key, value in workshop.env(shell).items() if key not in ("TMUX", "TMUX_PANE", "TERM")}
        size = ["-x", str(width), "-y", str(height)]
        new = [*self._server, "new-session", "-d", *size, "-c", str(workshop.path), "env PS1='$ ' bash --norc --noprofile"]
        subprocess.run(new, env=env, check=True, timeout=PATIENCE)

    def _tmux(self, *words: str) -> str:
        return subprocess.run([*self._server, *words], check=True, capture_output=True, text=True, timeout=PATIENCE).stdout

    def type(self, text: str, *keys: str) -> None:
        """Types a text, and presses keys such as Enter, Up or C-c."""
        if text:
            self._tmux("send-keys", "-l", text)
        for key in keys:
            self._tmux("send-keys", key)

    def screen(self) -> str:
        """What the terminal shows now, without the empty rows below it."""
        return self._tmux("capture-pane", "-p").rstrip()

    def everything(self) -> str:
        """The screen and all that has scrolled away above it."""
        return self._tmux("capture-pane", "-p", "-S", "-").rstrip()

    def until(self, pattern: str) -> str:
        """Waits until the screen shows a pattern; returns the screen."""
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, shown := self.screen()):
            if time.monotonic() > deadline:
                pytest.fail(f"waited for {pattern!r}; the terminal shows\n{shown}")
            time.sleep(0.1)
        return shown

    def enter(self, command: str, *keys: str) -> str:
        """Types a command on an empty screen and waits for its end; returns all that it has shown."""
        self.type("clear", "Enter")
        self.until(r"\A\$\Z")
        self._tmux("clear-history")
        self.type(command, *keys or ("Enter",))
        self.until(r"\A(?!\$\Z)")
        self.until(PROMPT)
        return self.everything()

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture(params=[(80, 24), (120, 40)], ids=lambda size: f"{size[0]}x{size[1]}")
def terminal(workshop: Workshop, request: pytest.FixtureRequest) -> Iterator[Tmux]:
    made = Tmux(workshop, *request.param)
    try:
        made.until(PROMPT)
        yield made
    finally:
        made.close()


def panels(shown: str) -> list[str]:
    """Rows with a progress bar. Only the last panel may stay: others were drawn over."""
    return [row for row in shown.splitlines() if re.match(r"step \d+/\d+ .*left", row)]


def init(terminal: Tmux) -> None:
    """A wrong answer, defaults with Enter, and values of one's own."""
    terminal.type("phalanx init", "Enter")
    terminal.until(r"(?m)^Choose \[1/2/3\] \(1\): *\Z")
    terminal.type("2", "Enter")
    terminal.until(r"Where is your text\?.*: *\Z")
    terminal.type("txt", "Enter")
    assert "txt: there is no such file or folder." in terminal.until(r"folder\.\nWhere is your text\?.*: *\Z")
    terminal.type("text", "Enter")
    terminal.until(r"Which model\?.*\(tiny-dense\): *\Z")
    terminal.type("", "Enter")
    terminal.until(r"Which tokenizer\?.*\(byte\): *\Z")
    terminal.type("", "Enter")
    terminal.until(r"How many steps\? \(300\): *\Z")
    terminal.type("30", "Enter")
    shown = terminal.until(PROMPT)
    assert "wrote run.toml\nnext: phalanx train run.toml --dry-run, then phalanx train run.toml\n$" in shown


def test_init_train_and_generate_by_keystrokes(workshop: Workshop, terminal: Tmux) -> None:
    init(terminal)
    run_file = tomllib.loads((workshop.path / "run.toml").read_text())
    assert run_file["data"]["paths"] == ["text"] and run_file["train"]["steps"] == 30

    dry = terminal.enter("phalanx train run.toml --dry-run")
    assert "Traceback" not in dry and "dry run: nothing was started" in dry and not (workshop.path / "runs").exists()

    terminal.type("clear; phalanx train run.toml", "Enter")
    terminal.until(r"(?m)^step [1-9]\d*/30 ")
    terminal.type("", "C-c")
    stopped = terminal.until(r"Stopped and saved\. To resume, run the same command again\.\n\$ *\Z")
    assert "Traceback" not in stopped and "\u2500 stopped after step " in stopped
    assert len(panels(terminal.everything())) == 1, "Ctrl-C left a part of the live display behind"

    trained = terminal.enter("phalanx train run.toml")
    assert "Traceback" not in trained and "run directory runs/run (resumed)" in trained
    assert len(panels(trained)) == 1 and panels(trained)[0].startswith("step 30/30 "), trained
    assert "\u2500 finished 30 steps " in trained
    first, last = map(float, re.findall(r"(?m)^\u2502 loss +([\d.]+) \u2192 ([\d.]+)", trained)[0])
    assert last < 0.7 * first, trained

    (command,) = re.findall(r"(?m)^\u2502 generate +(phalanx generate \S+)", trained)
    written = terminal.enter(f'{command} "the rank" --tokens 60 --temperature 0.2')
    lines = written.splitlines()
    assert "Traceback" not in written and lines[0].startswith(f"$ {command}"), written
    place = next(
        number for number, line in enumerate(lines) if line.startswith("using step 30 (runs/run/checkpoints/step-00000030")
    )
    text = "".join(lines[place + 1 : -1])
    assert text.startswith("the rank") and len(text) > 40, written
    known = set("".join(path.read_text() for path in Path(workshop.path / "text").iterdir()))
    assert set(text) <= known, "letters that the text does not have"
