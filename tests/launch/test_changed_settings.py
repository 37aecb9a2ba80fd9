"""A run that is resumed with other settings: what `--change` accepts, what it refuses, what is recorded, and what is then read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import ALONE, tiny_trainer

from phalanx.dashboard.progress import event_line
from phalanx.events.log import EventLog
from phalanx.events.records import SettingsChanged, Step, Stopped, decode, encode
from phalanx.launch.job import first_events
from phalanx.launch.prepare import Prepared, Request, prepare
from phalanx.optim.optimizer import learning_rate
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Run

TEXT = """
[model]
dim = 32
heads = 2
layers = 1
[data]
eval_fraction = 0.1
[data.mix.one]
paths = ["one.txt"]
weight = 1.0
[data.mix.two]
paths = ["two.txt"]
weight = 1.0
[train]
batch = 8
micro_batch = 8
sequence_length = 32
steps = 8
[cluster]
device = "cpu"
cpu_ranks = 1
"""
WEIGHTS = "data.mix.one.weight=3.0"
RATE = "optimizer.learning_rate=0.001"
CHANGE = Request(change=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a run of eight steps that was stopped after the fourth."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("one", "two", "three")):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"{name} {number * 7919 + i}" for i in range(4000)))
    first = prepared(loads(TEXT))
    trainer = tiny_trainer(ALONE, first.run, first.rundir.checkpoints)
    log = EventLog(first.rundir.events_file)
    for event in [*first_events(first), *(trainer.step() for _ in range(4)), trainer.save(), Stopped(step=4, reason="test")]:
        assert event is not None
        log.emit(event)
    trainer.close()
    log.close()
    yield tmp_path


def prepared(run: Run, request: Request | None = None) -> Prepared:
    """Prepared, and the directory given back."""
    found = prepare(run, "any", request)
    found.rundir.release()
    return found


def problems(run: Run, request: Request | None = None) -> tuple[str, ...]:
    with pytest.raises(RunError) as caught:
        prepare(run, "any", request)
    return caught.value.problems


def continued(found: Prepared) -> list[Step]:
    """The steps that the run takes from its checkpoint."""
    trainer = tiny_trainer(ALONE, found.run, found.rundir.checkpoints)
    trainer.restore()
    steps = []
    while not trainer.finished:
        record = trainer.step()
        assert isinstance(record, Step)
        steps.append(record)
    trainer.close()
    return steps


def test_learning_rate_steps_and_evaluation_change_and_are_recorded(folder: Path) -> None:
    run = loads(TEXT, overrides=[RATE, "train.steps=10", "train.eval_every=5", "train.clip=inf", "optimizer.beta2=0.99"])
    found = prepared(run, CHANGE)
    assert found.resumes and found.rundir.path == Path("runs/any")
    (record,) = [event for event in first_events(found) if isinstance(event, SettingsChanged)]
    assert record == SettingsChanged(
        step=4,
        changes={
            "train.clip": [1.0, "inf"],
            "optimizer.beta2": [0.95, 0.99],
            "optimizer.learning_rate": [0.0003, 0.001],
            "train.eval_every": [None, 5],
            "train.steps": [8, 10],
        },
    )
    assert decode(encode(record)) == record
    line = event_line(record)
    assert line is not None and "after step 4" in line.plain and "optimizer.learning_rate: 0.0003 → 0.001" in line.plain
    steps = continued(found)
    assert [step.step for step in steps] == [5, 6, 7, 8, 9, 10]
    assert [step.learning_rate for step in steps] == [learning_rate(run.optimizer, done, 10) for done in range(4, 10)]
    # The directory now holds the run with the new settings: the same command resumes it, with --change or without.
    assert prepared(run).rundir.path == Path("runs/any") == prepared(run, CHANGE).rundir.path


@pytest.mark.parametrize(
    "settings",
    [
        [WEIGHTS],
        ['data.mix.two.paths=["three.txt"]'],
        ['data.mix.three.paths=["three.txt"]', "data.mix.three.weight=0.5"],
    ],
    ids=["weights", "paths", "another source"],
)
def test_changed_data_continues_at_the_same_sample(folder: Path, settings: list[str]) -> None:
    """Steps after the change read what a run on the new data would read that had never been changed."""
    run = loads(TEXT, overrides=settings)
    resumed = continued(prepared(run, CHANGE))
    straight = tiny_trainer(ALONE, run, folder / "straight")
    straight.load_initial_weights()
    expected = [straight.step() for _ in range(8)]
    straight.close()
    assert [(step.step, step.samples, step.batch_digest) for step in resumed] == [
        (step.step, step.samples, step.batch_digest) for step in expected[4:] if isinstance(step, Step)
    ]
    # The old data would have been read differently.
    unchanged = tiny_trainer(ALONE, loads(TEXT), Path("runs/any/checkpoints"))
    unchanged.restore()
    record = unchanged.step()
    unchanged.close()
    assert isinstance(record, Step) and record.batch_digest != resumed[0].batch_digest


def test_new_text_is_noticed_and_stays_accepted_before_the_next_checkpoint(folder: Path) -> None:
    run = loads(TEXT, overrides=['data.mix.two.paths=["three.txt"]'])
    assert any("continues at the same position of the new text" in notice for notice in prepared(run, CHANGE).notices)
    assert prepared(run).resumes, "the change was accepted once"


def test_text_that_changes_by_itself_is_refused_with_change(folder: Path) -> None:
    (folder / "two.txt").write_text("something else " * 4000)
    (refused,) = problems(loads(TEXT, overrides=[RATE]), CHANGE)
    assert "has changed since" in refused and "--accept-changed-data" in refused


def test_everything_else_is_refused_by_name(folder: Path) -> None:
    run = loads(TEXT, overrides=["train.seed=1", "model.layers=2", RATE, "optimizer.name=muon", "train.batch=16"])
    told = problems(run, CHANGE)
    assert len(told) == 4
    for key, old, new in (
        ("train.seed", 0, 1),
        ("model.layers", 1, 2),
        ("optimizer.name", '"adamw"', '"muon"'),
        ("train.batch", 8, 16),
    ):
        (sentence,) = [sentence for sentence in told if f"{key}: {old} → {new}" in sentence]
        assert f"set it back to {old}" in sentence and "runs/any" in sentence
    assert loads(Path("runs/any/run.toml").read_text()).train.seed == 0, "nothing was written"


def test_without_the_flag_the_message_names_it(folder: Path) -> None:
    directory = Request(directory=Path("runs/any"))
    (accepted,) = problems(loads(TEXT, overrides=[RATE]), directory)
    assert "optimizer.learning_rate: 0.0003 → 0.001" in accepted and "add --change" in accepted
    (mixed,) = problems(loads(TEXT, overrides=[RATE, "train.seed=1"]), directory)
    assert "--change does not accept train.seed" in mixed
    (fixed,) = problems(loads(TEXT, overrides=["train.seed=1"]), directory)
    assert "--change" not in fixed
    # Without a directory, a new one is used; a notice says how to continue the other.
    new = prepared(loads(TEXT, overrides=[RATE]))
    assert new.rundir.path == Path("runs/any-2") and not new.resumes
    (notice,) = [notice for notice in new.notices if "--change" in notice]
    assert "runs/any holds an unfinished run" in notice and "--run-dir runs/any --change" in notice
    # The last directory is the one that --change continues.
    assert prepared(loads(TEXT, overrides=["optimizer.learning_rate=0.002"]), CHANGE).rundir.path == Path("runs/any-2")


def test_change_without_a_run_or_without_steps_left_is_refused(folder: Path) -> None:
    (refused,) = problems(loads(TEXT), Request(directory=folder / "nothing", change=True))
    assert "holds none: remove --change" in refused
    with pytest.raises(RunError, match="runs/nobody holds none"):
        prepare(loads(TEXT), "nobody", CHANGE)
    (refused,) = problems(loads(TEXT), replace(CHANGE, fresh=True))
    assert "--fresh" in refused
    (refused,) = problems(loads(TEXT, overrides=["train.steps=4"]), CHANGE)
    assert "train.steps = 4" in refused and "has taken 4 steps" in refused
