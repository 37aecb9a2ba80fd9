"""Requests to a rank: taken up between two steps, answered once each, and never an error of the training."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

from ranks import ALONE, tiny_run, tiny_trainer

from phalanx.control.run_requests import Observe, Observed, RunRequest
from phalanx.events.records import Event, Profiled
from phalanx.events.rundir import RunDir
from phalanx.training.trainer import Trainer
from phalanx.worker.rank_requests import RankRequests


class Asked:
    """A rank that is asked, with its answers."""

    def __init__(self, folder: Path):
        self.rundir, self.records, self.answers = RunDir(folder), list[Event](), list[Observed]()
        self.trainer: Trainer = tiny_trainer(ALONE, tiny_run(), self.rundir.checkpoints)
        self.requests = RankRequests(self.rundir, self.records.append, self.answers.append)

    def ask(self, number: str, first: int = 1, **changes: Any) -> None:
        request = RunRequest(**({"id": number, "kind": "profile", "steps": 2, "ranks": None} | changes))
        thread = threading.Thread(
            target=self.requests.ask, args=(Observe(generation=4, request=request, ranks=[0], first=first),)
        )
        thread.start()
        thread.join()

    def steps(self, count: int) -> None:
        for _ in range(count):
            assert self.trainer.step() is not None
            self.requests.between_steps(self.trainer)

    def end(self) -> list[tuple[str, str]]:
        """Every request with its problem."""
        self.requests.finish(self.trainer)
        self.trainer.close()
        assert {answer.generation for answer in self.answers} <= {4}
        return [(answer.request, answer.problem) for answer in self.answers]


def test_a_profile_is_written_and_recorded_before_it_is_answered(tmp_path: Path) -> None:
    rank = Asked(tmp_path)
    rank.steps(1)
    rank.ask("a", first=3)
    rank.steps(4)
    assert rank.trainer.hooks.all_allow_ahead, "the hook is gone"
    assert rank.end() == [("a", "")]
    (record,) = rank.records
    assert isinstance(record, Profiled) and (record.step, record.steps, record.rank, record.request) == (3, 2, 0, "a")
    assert record.path == "profiles/step-00000003/rank-0.json.gz"
    content = json.loads(gzip.decompress((tmp_path / record.path).read_bytes()))
    marks = {str(event.get("name")) for event in content["traceEvents"]}
    assert {"ProfilerStep#3", "ProfilerStep#4"} <= marks and "ProfilerStep#2" not in marks and "ProfilerStep#5" not in marks


def test_what_cannot_be_done_is_answered_with_its_reason(tmp_path: Path) -> None:
    rank = Asked(tmp_path)
    rank.ask("unknown", kind="timeline?")
    rank.steps(1)
    rank.rundir.profiles.write_text("in the way of the folder")
    rank.ask("unwritable", steps=1)
    rank.steps(2)
    rank.ask("first", first=9)
    rank.steps(1)
    rank.ask("second", first=9)
    rank.steps(1)
    answers = dict(rank.end())
    assert answers["unknown"] == 'ValueError: this version does not know the request "timeline?"'
    assert answers["unwritable"].startswith("NotADirectoryError: ")
    assert answers["second"] == "another request is under way on this rank"
    assert answers["first"] == "the ranks have stopped after 0 of the 2 steps"
    assert rank.records == [] and len(rank.answers) == 4


def test_a_generation_that_is_over_takes_its_request_along(tmp_path: Path) -> None:
    rank = Asked(tmp_path)
    rank.ask("lost", first=1, steps=5)
    rank.steps(2)
    rank.requests.abandon()
    rank.requests.abandon()
    assert rank.answers == []
    rank.trainer.close()
    after = Asked(tmp_path / "next")
    after.ask("next", steps=1)
    after.steps(2)
    assert after.end() == [("next", "")], "another profiler can be started in this process"
