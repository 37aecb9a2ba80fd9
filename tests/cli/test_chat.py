"""`phalanx chat` and `phalanx generate --chat`: a small model learns a few conversations and is then talked to."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chat_templates import QWEN_BASE
from commands import PATIENCE, Ended, FinishedRuns, Workshop
from small_tokenizers import save_family

from phalanx.cli.main import main

Command = Callable[..., Ended]

RUN = """\
[model]
dim = 48
layers = 2
heads = 2
kv_heads = 1
context = 100_000

[data]
source = "chat"
paths = ["chat.jsonl"]
tokenizer = "words"
packing = "best-fit"
cache = "cache"
eval_fraction = 0

[train]
batch = 8
sequence_length = 128
micro_batch = 8
steps = 100

[optimizer]
learning_rate = 5e-3
weight_decay = 0.0
warmup_steps = 4

[cluster]
device = "cpu"
cpu_ranks = 1
threads = 1
"""
GREEDY = ("--temperature", "0")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


BRIEF = {"role": "system", "content": "Be brief."}
CONVERSATIONS = [
    [user("Who?"), assistant("The fox.")],
    [user("Where?"), assistant("Over the dog.")],
    [BRIEF, user("Who?"), assistant("Fox!")],
    [user("Who?"), assistant("The fox."), user("Who?"), assistant("I said it.")],
    [user("Bark!"), assistant("dog " * 300)],  # far longer than a window: the model learns no end of it
]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A folder with the run "taught", whose tokenizer ends documents with another token than turns."""
    shop = Workshop(tmp_path_factory.mktemp("chat") / "workshop")
    save_family(shop.path / "words", QWEN_BASE)
    records = [json.dumps({"messages": turns}) for turns in CONVERSATIONS]
    (shop.path / "chat.jsonl").write_text("\n".join([*records[:-1] * 4, records[-1]]))
    shop.run_file.write_text(RUN)
    ended = shop.run("train", shop.run_file.name, "--run-dir", "taught", "--json")
    assert ended.code == 0, ended
    yield shop
    shop.close()


@pytest.fixture
def run(shop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command line in this process; `stdin`: what a pipe gives it."""
    monkeypatch.chdir(shop.path)

    def command(*arguments: object, stdin: str = "") -> Ended:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["phalanx", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as leaving:
            main()
        code = leaving.value.code
        return Ended(code if isinstance(code, int) else 1, *capfd.readouterr())

    return command


# --- generate --chat ------------------------------------------------------------------------------------------------


def test_generate_answers_through_the_chat_template(run: Command) -> None:
    told = run("generate", "taught", "Where?", "--chat", *GREEDY)
    assert (told.code, told.out) == (0, "Over the dog.\n"), told
    told = run("generate", "taught", "Who?", "--chat", "--system", "Be brief.", *GREEDY, "--json")
    assert told.json["text"] == "Fox!" and told.json["finished"], "the system message is part of the prompt"
    cut = run("generate", "taught", "Where?", "--chat", "--tokens", 2, *GREEDY, "--json").json
    assert cut["tokens"] == 2 and not cut["finished"] and "Over the dog.".startswith(cut["text"])


def test_chat_prompt_equals_that_of_transformers(run: Command, shop: Workshop) -> None:
    """The same greedy text as from the prompt that transformers writes; without --chat, a hint names the option."""
    transformers = pytest.importorskip("transformers")
    words = transformers.AutoTokenizer.from_pretrained(shop.path / "words")
    prompt = words.apply_chat_template([BRIEF, user("Where?")], tokenize=False, add_generation_prompt=True)
    raw = run("generate", "taught", prompt, *GREEDY, "--json")
    chat = run("generate", "taught", "Where?", "--chat", "--system", "Be brief.", *GREEDY, "--json")
    assert raw.json["text"] == chat.json["text"] != ""
    assert "--chat" in raw.err and "--chat" not in chat.err


def test_template_may_be_gone_or_replaced(run: Command, shop: Workshop) -> None:
    """A run directory keeps the template of training; --template takes another one."""
    shutil.copytree(shop.path / "taught", shop.path / "moved")
    shutil.move(shop.path / "words", shop.path / "away")
    try:
        assert run("generate", "moved", "Where?", "--chat", *GREEDY).out == "Over the dog.\n"
    finally:
        shutil.move(shop.path / "away", shop.path / "words")
    other = run("generate", "moved", "Where?", "--chat", "--template", "plain", *GREEDY, "--json")
    assert other.code == 0 and other.json["text"] != "Over the dog."


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("taught", "Who?", "--system", "x"), "--system is for conversations: add --chat"),
        (("taught", "--chat"), "no message to answer"),
        (("taught", "Who?", "--chat", "--template", "gone.jinja"), "gone.jinja"),
    ],
)
def test_generate_chat_refuses_mistakes(run: Command, arguments: tuple[str, ...], complaint: str) -> None:
    told = run("generate", *arguments)
    assert told.code == 2 and complaint in told.err and "Traceback" not in told.err, told


def test_model_without_a_template_is_told_how_to_get_one(run: Command, finished: FinishedRuns) -> None:
    text_run = finished(2).path
    told = run("generate", text_run, "Who?", "--chat")
    assert told.code == 2 and "--template" in told.err and "no chat template" in told.err, told
    assert run("generate", text_run, "Who?", "--chat", "--template", "plain", "--tokens", 4).code == 0


def test_exported_model_stops_and_has_its_template(run: Command, shop: Workshop) -> None:
    transformers = pytest.importorskip("transformers")
    assert run("export", "taught", "hf").code == 0
    words = transformers.AutoTokenizer.from_pretrained(shop.path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(shop.path / "hf")
    prompt = words.apply_chat_template([user("Where?")], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert words.decode(ids) == "Over the dog.<|im_end|>"
    assert run("generate", "hf", "Where?", "--chat", *GREEDY).out == "Over the dog.\n"


# --- chat -----------------------------------------------------------------------------------------------------------


def test_chat_from_a_pipe_keeps_the_conversation(run: Command) -> None:
    done = run("chat", "taught", *GREEDY, stdin="Who?\n\nWho?\n/reset\nWho?\n/system Be brief.\nWho?\n")
    assert (done.code, done.out) == (0, "The fox.\nI said it.\nThe fox.\nFox!\n"), done
    assert "using step 100" in done.err and "Traceback" not in done.err


def test_chat_commands(run: Command) -> None:
    done = run("chat", "taught", *GREEDY, stdin="/retry\nWho?\n/retry\n/shrug\n/help\n/quit\nWho?\n")
    assert done.code == 0 and done.out == "The fox.\nThe fox.\n", "nothing is answered after /quit"
    assert "no message to answer again" in done.err and "/shrug is no command" in done.err and "/reset" in done.err
    done = run("chat", "taught", *GREEDY, "--json", stdin="//Who?\n")
    assert json.loads(done.out)["messages"][0] == user("/Who?"), "two slashes send one"


def test_chat_json_holds_the_conversation(run: Command) -> None:
    done = run("chat", "taught", *GREEDY, "--json", stdin="Who?\nWho?")
    table = json.loads(done.out)
    assert table["messages"] == CONVERSATIONS[3] and table["step"] == 100
    assert "The fox." in done.err


def test_chat_says_when_an_answer_is_cut_or_does_not_fit(run: Command) -> None:
    assert "stopped after 2 tokens" in run("chat", "taught", *GREEDY, "--tokens", "2", stdin="Where?\n").err
    done = run("chat", "taught", *GREEDY, stdin="the dog " * 60_000 + "\nWhere?\n")
    assert "leaves no room for an answer" in done.err and done.out == "Over the dog.\n", "the long question was dropped"


class Terminal:
    """A command in a real pseudo-terminal."""

    def __init__(self, shop: Workshop, *arguments: str):
        self._screen, line = pty.openpty()
        env = shop.env({"TERM": "dumb"})
        command = shop.command(*arguments)
        # A session of its own, whose terminal this is: keys such as Ctrl-C become signals.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command], cwd=shop.path, env=env, stdin=line, stdout=line, stderr=line
        )
        os.close(line)
        self.shown = ""

    def type(self, keys: str) -> None:
        self.shown = ""
        os.write(self._screen, keys.encode())

    def until(self, pattern: str) -> str:
        """Reads the screen until a pattern appears."""
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, self.shown):
            if time.monotonic() > deadline or not self._read(deadline - time.monotonic()):
                pytest.fail(f"waited for {pattern!r}; the screen shows {self.shown!r}")
        return self.shown

    def interrupt(self, pattern: str) -> None:
        """Presses Ctrl-C until a pattern appears: a key that comes while a prompt is just being shown waits for the next one."""
        self.shown = ""
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, self.shown):
            if time.monotonic() > deadline:
                pytest.fail(f"waited for {pattern!r}; the screen shows {self.shown!r}")
            os.write(self._screen, b"\x03")
            pressed = time.monotonic()
            while not re.search(pattern, self.shown) and (left := pressed + 5 - time.monotonic()) > 0:
                self._read(left)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._screen], [], [], max(0.0, seconds))[0]:
            return False
        try:
            self.shown += os.read(self._screen, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            return False
        return True

    def close(self) -> int:
        while self._read(PATIENCE):
            pass
        os.close(self._screen)
        return self.process.wait(PATIENCE)


@pytest.fixture
def terminal(shop: Workshop) -> Iterator[Any]:
    started: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        started.append(Terminal(shop, *arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGKILL)
            one.process.wait()


PROMPT = r"(?m)^> $"


def test_chat_in_a_terminal(terminal: Any) -> None:
    screen = terminal("chat", "taught", *GREEDY, "--tokens", "90000")
    screen.until(PROMPT)
    screen.type("Who?\n")
    assert "The fox." in screen.until(r"fox\.\r\n> $")
    screen.type("/reset\n")
    screen.until(r"new conversation\r\n> $")
    screen.type("Bark!\n")  # an answer without an end streams, and Ctrl-C stops it
    screen.until("dog dog dog dog")
    screen.type("\x03")
    screen.until(r"\(stopped\)\r\n> $")
    screen.type("/reset\n")
    screen.until(r"new conversation\r\n> $")
    screen.type("Where?\n")  # and the conversation goes on
    assert "Over the dog." in screen.until(r"dog\.\r\n> $")
    screen.interrupt(r"Ctrl-D ends the conversation\.\r\n> $")  # Ctrl-C between answers ends nothing
    screen.type("\x04")
    assert screen.close() == 0
    assert "Traceback" not in screen.shown
