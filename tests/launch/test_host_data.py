"""Hosts that have the run's text, but no token files of it: nodes of this machine with homes, and so caches, of their own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from small_tokenizers import save_bpe

from phalanx.control.protocol import AgentSettings
from phalanx.events.records import Event, FailureNoticed, HostRejected, Recovered, Step, Warned
from phalanx.launch.agent_process import AgentProcess
from phalanx.launch.job import Job
from phalanx.launch.launcher import StartedAgent
from phalanx.launch.local import Local
from phalanx.launch.prepare import Request, prepare
from phalanx.spec.load import loads

RUN = """
[model]
dim = 32
layers = 1
heads = 2
kv_heads = 2
[data]
paths = ["~/text"]
tokenizer = "{folder}/tokenizer"
cache = "~/cache"
[train]
batch = 4
micro_batch = 1
sequence_length = 32
steps = {steps}
[layout]
data = 2
[cluster]
threads = 1
device = "cpu"
nodes = {nodes}
[resilience]
spares = {spares}
"""


class OwnHomes(Local):
    """Each node has a home of its own, as on hosts that share none."""

    def __init__(self, launcher: Local, homes: Path):
        super().__init__(launcher._run)
        self._homes = homes

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        home = self._homes / f"home-{settings.node}"
        return AgentProcess(settings, log, wrap=lambda command: ["env", f"HOME={home}", *command])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for home in ("home", "home-0", "home-1", "home-2"):
        (tmp_path / home / "text").mkdir(parents=True)
        for number in range(20):
            text = f"{number}: all that glitters is not gold; often have you heard that told. " * 20
            (tmp_path / home / f"text/{number}.txt").write_text(text)
    save_bpe(tmp_path / "tokenizer")
    return tmp_path


def job(folder: Path, name: str, nodes: int, spares: int = 0, steps: int = 12, chaos: str = "") -> Job:
    run = loads(RUN.format(folder=folder, nodes=nodes, spares=spares, steps=steps))
    prepared = prepare(run, "run", Request(directory=folder / name))
    if nodes > 1:
        assert isinstance(prepared.launcher, Local)
        prepared = replace(prepared, launcher=OwnHomes(prepared.launcher, folder))
    return Job(prepared, chaos)


def losses(events: list[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, Step)]


def tokenizing(events: list[Event]) -> int:
    return sum(isinstance(event, Warned) and " tokenizes " in event.message for event in events)


def test_each_host_tokenizes_once_before_its_ranks_start(folder: Path) -> None:
    alone = list(job(folder, "alone", nodes=1).events())
    running = job(folder, "run", nodes=2)
    events = list(running.events())
    assert running.exit_code == 0 and losses(events) == losses(alone)
    assert tokenizing(alone) == 0 and tokenizing(events) == 2
    first = next(index for index, event in enumerate(events) if isinstance(event, Step))
    assert tokenizing(events[:first]) == 2
    assert {path.parts[-4] for path in folder.glob("home-*/cache/tokens-*/tokens.json")} == {"home-0", "home-1"}


@pytest.mark.parametrize("problem", [pytest.param("cannot be written", marks=pytest.mark.slow), "differs from the data"])
def test_host_with_other_data_or_none_is_named_and_left_out(folder: Path, problem: str) -> None:
    if problem == "cannot be written":
        (folder / "home-1/cache").write_text("not a folder")
    else:
        (folder / "home-1/text/7.txt").write_text("Gilded tombs do worms enfold.")
    running = job(folder, "run", nodes=3, spares=1)
    events = list(running.events())
    assert running.exit_code == 0, running.failure
    (rejected,) = (event for event in events if isinstance(event, HostRejected))
    assert rejected.node == 1 and problem in rejected.message
    assert not any(isinstance(event, Recovered) for event in events) and len(losses(events)) == 12


@pytest.mark.slow
def test_host_that_comes_back_with_an_empty_disk_tokenizes_while_the_others_train(folder: Path) -> None:
    running, events = job(folder, "run", nodes=2, steps=1000, chaos="kill node=1 step=4 for=0.5s"), []
    for event in running.events():
        events.append(event)
        if isinstance(event, FailureNoticed):
            shutil.rmtree(folder / "home-1/cache")
        if isinstance(event, Recovered) and event.action == "grow":
            running.stop("seen enough")
    assert [event.action for event in events if isinstance(event, Recovered)] == ["shrink", "grow"]
    assert tokenizing(events) == 3 and not any(isinstance(event, HostRejected) for event in events)
