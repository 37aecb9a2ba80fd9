"""Requests to a running job, as the controller decides on them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from controllers import OrdersKept, plan_on

from phalanx.control.controller_state import Generation
from phalanx.control.observation import Observations
from phalanx.control.run_requests import BEATS, Observe, Observed, RequestFiles, RunRequest, ask
from phalanx.control.watchdog import HangDetector
from phalanx.events.heartbeat import Beat
from phalanx.events.records import Event, RequestFailed, RequestStarted
from phalanx.events.rundir import RunDir
from phalanx.spec.layout import Layout
from phalanx.spec.run import Resilience

RANKS, STEPS = 4, 1000


class Registry:
    """Requests that wait, and what was published."""

    def __init__(self) -> None:
        self.waiting: list[RunRequest] = []
        self.published: list[Any] = []

    def take_requests(self) -> list[RunRequest]:
        taken, self.waiting = self.waiting, []
        return taken

    def publish_beats(self, text: str) -> None:
        self.published.append(json.loads(text))


class Running(OrdersKept):
    """Four ranks that take a step in `seconds`; step 50 is complete, or 49 on some. `now` is their clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.1, program: tuple[str, ...] | None = None):
        self.generation, self.written, self.registry, self.now = self._generation(0), list[Event](), Registry(), 1000.0
        super().__init__(self.generation, Resilience(hang=5.0), emit=self.written.append, registry=self.registry, rundir=None)
        vars(self.agent.run).update(steps=STEPS, command=SimpleNamespace(program=program))
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self._last_heartbeat = self.state.last_stall_end = self.now
        self.observations = Observations(self)
        for rank in range(RANKS):
            self.beat(rank, 50 - rank % 2, seconds)

    @staticmethod
    def _generation(number: int) -> Generation:
        return Generation(number, plan_on(Layout(data=RANKS)), (0, 0, 1, 1))

    def beat(self, rank: int, step: int, seconds: float = 0.1, taken: int = 9) -> None:
        self.generation.beats[rank] = Beat(step, "computing", self.now, seconds, seconds / 2, taken, 0)

    def request(self, **changes: Any) -> list[Event]:
        """The records that answer a request."""
        before = len(self.written)
        self.registry.waiting.append(RunRequest(**({"id": "x", "kind": "profile", "steps": 3, "ranks": None} | changes)))
        self.later(1.0)
        return self.written[before:]

    def later(self, seconds: float) -> None:
        self.now += seconds
        self._last_heartbeat = self.now
        self.observations.check()

    def answer(self, *ranks: int, problem: str = "", request: str = "x") -> None:
        for rank in ranks:
            self.observations.on_observed(Observed(generation=0, rank=rank, request=request, problem=problem))


@pytest.mark.parametrize(("seconds", "ahead"), [(0.1, 10), (0.001, 1000), (60.0, 1)])
def test_the_first_step_is_about_a_second_ahead_of_all_ranks(
    seconds: float, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Running(monkeypatch, seconds)
    vars(controller.agent.run)["steps"] = 10_000
    (event,) = controller.request(ranks=[3, 1, 1])
    assert isinstance(event, RequestStarted)
    assert (event.step, event.steps, event.ranks, event.what) == (52 + ahead, 3, [1, 3], "profile")
    (order,) = controller.orders
    assert isinstance(order, Observe) and (order.first, order.ranks, order.generation) == (52 + ahead, [1, 3], 0)


def test_near_the_end_of_the_run_the_last_steps_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Running(monkeypatch)
    vars(controller.agent.run)["steps"] = 55
    (event,) = controller.request(steps=4)
    assert isinstance(event, RequestStarted) and event.step == 52 and event.ranks == list(range(RANKS))
    controller.answer(*range(RANKS))
    (event,) = controller.request(steps=5)
    assert (
        isinstance(event, RequestFailed)
        and event.reason == "the run ends with step 55, and step 50 is complete: ask for fewer steps"
    )


def refusal(controller: Running, **changes: Any) -> str:
    (event,) = controller.request(**changes)
    assert isinstance(event, RequestFailed) and event.rank is None
    assert controller.orders == [] and not controller.state.observing
    return event.reason


def test_what_cannot_be_done_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Running(monkeypatch)
    assert refusal(controller, ranks=[0, 4]) == "there is no rank 4: the run has ranks 0 to 3"
    assert refusal(controller, ranks=[-1]).startswith("there is no rank -1")
    assert refusal(controller, steps=0) == "0 steps are asked for: ask for 1 to 100"
    assert "does not know" in refusal(controller, kind="timeline?")
    controller.state.stop_requested = 1.0
    assert refusal(controller) == "the run is ending"
    controller.state.stop_requested = None
    controller.beat(2, 0, taken=0)
    assert refusal(controller) == "the ranks have not taken a step yet: ask again when they have"
    controller.state.generation = None
    assert "the ranks are starting, or recover" in refusal(controller)
    assert "phalanx launch" in refusal(Running(monkeypatch, program=("python", "train.py")))


def test_one_request_at_a_time_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Running(monkeypatch)
    controller.request()
    assert controller.request() == [], "the same file, read by two nodes"
    (event,) = controller.request(id="y")
    assert isinstance(event, RequestFailed) and event.reason.startswith("another request is under way, in steps 62 to 64")
    controller.answer(0, 1, 2, 3, request="y")
    controller.answer(0, 1, 2)
    assert controller.state.observing
    controller.answer(3, problem="OSError: no space left")
    failed = controller.written[-1]
    assert isinstance(failed, RequestFailed) and (failed.rank, failed.reason) == (3, "OSError: no space left")
    assert not controller.state.observing and isinstance(controller.request(id="z")[0], RequestStarted)


def test_a_recovery_or_silence_ends_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Running(monkeypatch)
    controller.request()
    controller.state.generation = controller._generation(1)
    controller.later(1.0)
    failed = controller.written[-1]
    assert isinstance(failed, RequestFailed) and "a failure came between" in failed.reason and not controller.state.observing
    controller = Running(monkeypatch)
    controller.request()
    controller.answer(0, 2)
    controller.later(200.0)
    assert controller.state.observing
    controller.later(200.0)
    failed = controller.written[-1]
    assert isinstance(failed, RequestFailed) and failed.reason.endswith("from rank 1, 3") and not controller.state.observing


def test_ranks_that_record_are_not_taken_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Running(monkeypatch)
    hangs = HangDetector(controller)
    for taken in (8, 9):  # from which it learns how long a step takes
        for rank in range(RANKS):
            controller.beat(rank, 50, taken=taken)
        asyncio.run(hangs.check(controller.generation))
    controller.request()
    ordered = list(controller.orders)
    for _ in range(10):
        controller.later(10.0)
        asyncio.run(hangs.check(controller.generation))
    assert controller.orders == ordered, "nobody is asked where it is, and nobody is killed"
    controller.answer(*range(RANKS))
    asyncio.run(hangs.check(controller.generation))
    assert len(controller.orders) > len(ordered), "and afterwards they are watched again"


def test_heartbeats_are_published_only_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Running(monkeypatch)
    controller.later(5.0)
    assert controller.registry.published == []
    controller.request(kind=BEATS, id=BEATS)
    for _ in range(30):
        controller.later(0.5)
    assert 9 <= len(controller.registry.published) <= 11
    first = controller.registry.published[0]
    assert first["ranks"] == RANKS and first["nodes"] == [[0, 2], [1, 2]]
    assert first["beats"]["1"] == [49, "computing", pytest.approx(6.0), 0.1, 0.05]
    assert controller.written == [] and controller.orders == []


class Broken:
    """Not what a request has."""

    def __len__(self) -> int:
        raise ValueError("broken")

    def __iter__(self) -> Any:
        raise ValueError("broken")


def test_nothing_in_a_request_ends_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Running(monkeypatch)
    (event,) = controller.request(ranks=Broken())
    assert isinstance(event, RequestFailed) and event.reason == "ValueError: broken" and not controller.state.observing
    assert isinstance(controller.request(id="good")[0], RequestStarted)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "large", "other user's JSON"])
def test_files_that_are_no_requests_are_passed_over(kind: str, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.control.mkdir()
    files = RequestFiles(rundir)
    assert files.take() == []
    match kind:
        case "folder":
            rundir.ask_file.mkdir()
        case "link":
            (tmp_path / "elsewhere").write_text('{"id": "x", "kind": "profile", "steps": 1, "ranks": null}')
            rundir.ask_file.symlink_to(tmp_path / "elsewhere")
        case "pipe":
            os.mkfifo(rundir.ask_file)
        case "large":
            rundir.ask_file.write_bytes(b'{"id": "' + b"x" * (2 << 20))
        case _:
            rundir.ask_file.write_text('{"id": "x", "kind": 3, "steps": true, "ranks": [1.5]}')
    assert files.take() == [] and files.take() == []
    assert kind == "folder" or not rundir.ask_file.exists()


def test_a_request_is_taken_once_and_a_touch_asks_for_heartbeats(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.control.mkdir()
    rundir.top_file.touch()
    files = RequestFiles(rundir)
    assert files.take() == [], "an old touch is nobody's"
    asked = RunRequest(id="x", kind="memory", steps=2, ranks=[0, 3])
    assert ask(rundir, asked) and files.take() == [asked] and files.take() == []
    os.utime(rundir.top_file, ns=(1, 1))
    assert [request.kind for request in files.take()] == [BEATS] and files.take() == []
    rundir.top_file.unlink()
    assert files.take() == []
