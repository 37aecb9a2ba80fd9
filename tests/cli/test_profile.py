"""`phalanx profile` and `phalanx top` of a running job of two ranks, of which the second is slow. The job goes on, with the same losses."""

from __future__ import annotations

import gzip
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from commands import PATIENCE, InProcess, Started, Workshop, losses

from phalanx.control.run_requests import RunRequest, ask
from phalanx.events.log import EventLog
from phalanx.events.records import Profiled, RequestFailed, RequestStarted, RunStarted, Step, WorkerStarted
from phalanx.events.rundir import RunDir
from phalanx.launch import ask_run as ask_module
from phalanx.launch.ask_run import ask_run
from phalanx.observe.step_recorders import OUTSIDE
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.layout import Layout

SETTINGS = ("train.steps=100000", "train.eval_every=100000", "checkpoint.every=100000", "layout.data=2")


class Live:
    """A running job."""

    def __init__(self, workshop: Workshop):
        self.workshop, self.path = workshop, workshop.path / "run"
        self.rundir = RunDir(self.path)
        slow = ("--chaos", "slow rank=1 x4 from=3")
        self.command: Started = workshop.start("train", "tiny.toml", *SETTINGS, "--run-dir", "run", *slow)
        self.command.until(workshop.reached("run", 5), "step 5")

    def goes_on(self) -> None:
        """The job takes further steps."""
        last = max(event.step for event in self.workshop.events("run") if isinstance(event, Step))
        self.command.until(self.workshop.reached("run", last + 3), "further steps")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    workshop = Workshop(tmp_path_factory.mktemp("live") / "workshop")
    made = Live(workshop)
    yield made
    if made.command.process.poll() is None:
        made.command.process.send_signal(signal.SIGTERM)
        made.command.wait()
    workshop.close()


def request(number: str, steps: int = 2, kind: str = "profile", ranks: list[int] | None = None) -> RunRequest:
    return RunRequest(id=number, kind=kind, steps=steps, ranks=ranks)


def test_steps_of_all_ranks_are_profiled_while_the_job_goes_on(live: Live, here: InProcess) -> None:
    ended = here("profile", live.path, "--steps", 3, "--ranks", "all", "--json")
    assert ended.code == 0, ended
    found = ended.json["profiles"]
    assert [each["rank"] for each in found] == [0, 1] and {each["steps"] for each in found} == {3}
    first = found[0]["step"]
    assert found[1]["step"] == first, "the ranks begin at the same step"
    for each in found:
        path = live.path / "profiles" / f"step-{first:08d}" / f"rank-{each['rank']}.json.gz"
        assert each["file"] == str(path) and path.stat().st_size == each["bytes"]
        names = [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        marks = [name for name in names if str(name).startswith("ProfilerStep#")]
        assert marks == [f"ProfilerStep#{number}" for number in range(first, first + 3)]
        assert OUTSIDE in each["top"] and set(each["top"]) - {OUTSIDE} <= set(names)
        assert all(0 < seconds < each["seconds"] * 3 for seconds in each["top"].values())
    assert "Rank 1: of a step of " in ended.shown and OUTSIDE in ended.shown and f"steps {first} to" in ended.shown
    records = [event for event in live.workshop.events("run") if isinstance(event, Profiled)]
    assert {(event.rank, event.path) for event in records[-2:]} == {
        (rank, f"profiles/step-{first:08d}/rank-{rank}.json.gz") for rank in (0, 1)
    }
    live.goes_on()


def test_allocations_of_one_rank_are_recorded_and_copied(live: Live, here: InProcess, tmp_path: Path) -> None:
    ended = here("profile", live.path, "--steps", 1, "--ranks", "1", "--memory", "-o", tmp_path / "out")
    assert ended.code == 0 and "On CPUs torch keeps no history" in ended.shown, ended
    (copy,) = (tmp_path / "out").iterdir()
    assert copy.name == "rank-1.memory.json.gz"
    events = json.loads(gzip.decompress(copy.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "[memory]" and event["args"]["Bytes"] > 0 for event in events)
    record = [event for event in live.workshop.events("run") if isinstance(event, Profiled)][-1]
    assert (record.what, record.rank, record.steps) == ("memory", 1, 1) and record.top and min(record.top.values()) > 1000


def test_top_names_ranks_and_phases_and_the_slow_rank_first(live: Live, here: InProcess) -> None:
    found = here("top", live.path, "--json").json
    assert found["state"] == "running" and found["steps"] == 100000 and found["live"] is True
    assert [rank["rank"] for rank in found["ranks"]] == [1, 0], "all wait for rank 1"
    slow, other = found["ranks"]
    assert slow["computing"] > other["computing"] and slow["place"] == {"data": 1} and slow["node"] == 0
    assert sum(found["phases"].values()) == 2 and other["step"] >= 4 and other["memory"] > 0
    steps = [event for event in live.workshop.events("run") if isinstance(event, Step)]
    assert found["figures"]["first_loss"] == steps[0].loss and found["step"] <= steps[-1].step
    shown = here("top", live.path, "--once", "--sort", "rank").out
    rows = [line.split()[:3] for line in shown.splitlines() if "dp" in line]
    assert rows == [["0", "0", "dp0"], ["1", "0", "dp1"]] and "promised" in shown and "left" in shown


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--ranks", "7"), "--ranks: there is no rank 7: the run has ranks 0 to 1."),
        (("--ranks", "1-0"), '--ranks "1-0": write the numbers of ranks, such as 0,3 or 0-7, or all.'),
        (("--steps", "0"), "--steps 0: ask for 1 to 100 steps."),
        (("--steps", "101"), "--steps 101: ask for 1 to 100 steps."),
    ],
)
def test_bad_requests_are_refused_before_they_are_made(
    live: Live, here: InProcess, words: tuple[str, ...], complaint: str
) -> None:
    refused = here("profile", live.path, *words)
    assert refused.code == 2 and complaint in refused.err, refused
    assert not live.rundir.ask_file.exists()


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (request("a", ranks=[0, 7]), "there is no rank 7: the run has ranks 0 to 1"),
        (request("b", steps=1000), "1000 steps are asked for: ask for 1 to 100"),
        (request("c", kind="telepathy"), "does not know such a request"),
    ],
)
def test_the_controller_refuses_what_it_cannot_do(live: Live, asked: RunRequest, complaint: str) -> None:
    with pytest.raises(RunError, match=complaint):
        list(ask_run(live.rundir, asked))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"id": 1, "kind": "profile", "steps": 1, "ranks": null}', b"\xff" * 2000]
)
def test_a_broken_request_is_removed(live: Live, content: bytes) -> None:
    live.rundir.ask_file.write_bytes(content)
    live.command.until(lambda: not live.rundir.ask_file.exists(), "the request was taken")
    live.goes_on()


def started(answer: Iterator[Any]) -> RequestStarted:
    """Waits until a request is under way."""
    return next(event for event in answer if isinstance(event, RequestStarted))


def test_one_request_at_a_time(live: Live) -> None:
    first = ask_run(live.rundir, request("first", steps=8))
    started(first)
    with pytest.raises(RunError, match="another request is under way, in steps"):
        list(ask_run(live.rundir, request("second")))
    assert {event.rank for event in first if isinstance(event, Profiled)} == {0, 1}


def test_a_request_that_nobody_has_taken_is_not_replaced(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.control.mkdir()
    assert ask(rundir, request("first")) and not ask(rundir, request("second"))
    assert json.loads(rundir.ask_file.read_text())["id"] == "first"
    assert sorted(path.name for path in rundir.control.iterdir()) == ["ask.json"]


def test_a_lost_rank_ends_the_request_and_the_job_recovers(live: Live) -> None:
    answer = ask_run(live.rundir, request("lost", steps=100))
    started(answer)
    (pid,) = {event.pid for event in live.workshop.events("run") if isinstance(event, WorkerStarted) and event.rank == 1}
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match="a failure came between: the ranks recover from it"):
        list(answer)
    live.goes_on()
    done = list(ask_run(live.rundir, request("after", steps=1, ranks=[1])))
    assert [event.rank for event in done if isinstance(event, Profiled)] == [1], "ranks of the next generation are asked"


def test_the_end_of_the_run_ends_the_request_and_the_losses_are_those_of_another_run(live: Live, here: InProcess) -> None:
    answer = ask_run(live.rundir, request("end", steps=100))
    started(answer)
    assert here("stop", live.path).code == 0
    with pytest.raises(RunFailed, match=r"the ranks have stopped after \d+ of the 100 steps"):
        list(answer)
    assert live.command.wait().code == 75
    assert not live.rundir.ask_file.exists() and not live.rundir.beats_file.exists()
    problems = [event for event in live.workshop.events("run") if isinstance(event, RequestFailed) and event.request == "end"]
    assert {event.rank for event in problems} == {0, 1}
    refused = here("profile", live.path)
    assert refused.code == 2 and "is not running: only a running job can be asked." in refused.err
    shown = here("top", live.path).out
    assert "stopped, the run has ended: phalanx stop" in shown and "The ranks have ended." in shown
    profiled = {event.step for event in live.workshop.events("run") if isinstance(event, Profiled)}
    reference = live.workshop.start("train", "tiny.toml", *SETTINGS, "--run-dir", "reference")
    reference.until(live.workshop.reached("reference", min(profiled) + 5), "the profiled steps")
    reference.process.send_signal(signal.SIGTERM)
    assert reference.wait().code == 75
    expected = losses(live.workshop.events("reference"))
    assert len(expected) >= min(profiled) + 5
    assert dict_of(losses(live.workshop.events("run"))).items() >= dict_of(expected).items()


def dict_of(rows: list[tuple[int, float, str]]) -> dict[int, tuple[float, str]]:
    return {step: (loss, digest) for step, loss, digest in rows}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[RunDir]:
    """The directory of a run that this process pretends to run."""
    rundir = RunDir(tmp_path / "held")
    rundir.create()
    begin(rundir)
    assert rundir.acquire()
    yield rundir
    rundir.release()


def begin(rundir: RunDir, **changes: Any) -> None:
    sizes = {"ranks": 2, "steps": 9, "parameters": 1, "micro_batch": 1, "accumulation": 1}
    log = EventLog(rundir.events_file)
    log.emit(RunStarted(version="0", device="cpu", layout=asdict(Layout(data=2)), compute="fp32", **sizes | changes))
    log.close()


def test_runs_that_take_no_requests_are_named(held: RunDir, here: InProcess) -> None:
    refused = here("profile", held.path)
    assert refused.code == 2 and "a process that takes no requests: one that torchrun has started" in refused.err
    held.launch_id = "test"
    begin(held, program=["python", "train.py"])
    refused = here("profile", held.path)
    assert refused.code == 2 and "runs a program of its own (`phalanx launch`)" in refused.err
    held.job_file.write_text("{}")
    refused = here("profile", held.path)
    assert refused.code == 2 and "Kubernetes job" in refused.err and "kubectl exec" in refused.err


def test_a_request_that_nobody_takes_is_withdrawn(held: RunDir, here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a job whose controller hangs."""
    held.launch_id = "test"
    monkeypatch.setattr(ask_module, "_TAKEN", 0.3)
    refused = here("profile", held.path)
    assert refused.code == 2 and "has not taken the request within 0 s" in refused.err and "phalanx status" in refused.err
    assert not held.ask_file.exists()
    assert ask(held, request("other"))
    refused = here("profile", held.path)
    assert refused.code == 2 and "another request waits for this run already" in refused.err
    assert json.loads(held.ask_file.read_text())["id"] == "other"
    assert "cannot be made" in here("profile", held.path, "-o", held.events_file).err


def test_top_of_a_run_without_heartbeats_shows_its_figures(held: RunDir, here: InProcess) -> None:
    shown = here("top", held.path, "--once")
    assert shown.code == 0 and "held  running  2 cpu ranks" in shown.out and "No heartbeats of the ranks" in shown.out
    assert not held.control.exists()


def test_top_is_quit_by_a_key_and_leaves_the_terminal_as_it_was(held: RunDir) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "phalanx", "top", str(held.path), "--interval", "0.1"]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, env=env)
    shown = b""
    while b"step 0 of 9" not in shown:
        shown += os.read(ours, 1 << 16)
    os.write(ours, b"rq")  # two keys at once
    assert process.wait(PATIENCE) == 0
    while b"\x1b[?1049l" not in shown:  # the screen of before
        shown += os.read(ours, 1 << 16)
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


FAKE_SSH = '#!/bin/bash\nexec bash -c "${@: -1}"\n'
"""Runs the command here: two nodes that meet through the launcher, not through a folder."""


@pytest.mark.slow
def test_nodes_that_meet_through_the_launcher_are_asked_through_it(workshop: Workshop, here: InProcess) -> None:
    ssh = workshop.path / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    (workshop.path / "hosts.txt").write_text("127.0.0.1 slots=1 bind=127.0.0.1\nlocalhost slots=1 bind=127.0.0.1\n")
    place = ("--on", "ssh", "--hosts", "hosts.txt", f"cluster.ssh={ssh}")
    command = workshop.start("train", "tiny.toml", *SETTINGS, "--run-dir", "run", *place)
    command.until(workshop.reached("run", 5), "step 5")
    ended = here("profile", workshop.path / "run", "--steps", 1, "--ranks", "all", "--json")
    assert ended.code == 0 and [each["rank"] for each in ended.json["profiles"]] == [0, 1], ended
    found = here("top", workshop.path / "run", "--json").json
    assert {(rank["rank"], rank["node"]) for rank in found["ranks"]} == {(0, 0), (1, 1)}
    assert here("stop", workshop.path / "run").code == 0
    assert command.wait().code == 75


@pytest.mark.slow
def test_nodes_that_share_a_folder_are_asked_through_it(workshop: Workshop, here: InProcess) -> None:
    place = ("--nodes", 2, "--launch", "test-1", "--bind", "127.0.0.1", "--run-file", "tiny.toml")
    nodes = [workshop.start("node", "run", *SETTINGS, "--node", number, *place) for number in (0, 1)]
    nodes[0].until(workshop.reached("run", 5), "step 5")
    ended = here("profile", workshop.path / "run", "--steps", 1, "--ranks", "1", "--json")
    assert ended.code == 0 and [each["rank"] for each in ended.json["profiles"]] == [1], ended
    assert len(here("top", workshop.path / "run", "--json").json["ranks"]) == 2
    assert here("stop", workshop.path / "run").code == 0
    assert [node.wait().code for node in nodes] == [75, 75]


def test_folders_without_a_run_are_named(here: InProcess, tmp_path: Path) -> None:
    for verb in ("profile", "top"):
        refused = here(verb, tmp_path)
        assert refused.code == 2 and "holds no run: name a run directory" in refused.err
    (tmp_path / "events.jsonl").write_text("")
    refused = here("profile", tmp_path)
    assert refused.code == 2 and "is not running" in refused.err
    refused = here("top", tmp_path, "--sort", "size")
    assert refused.code == 2 and '--sort "size" is not known: choose one of waited for, rank, phase.' in refused.err
