"""A run with checkpoint.save = false: survives failures by what is in memory, leaves no checkpoint, and says so."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from commands import FinishedRuns, InProcess, StepLosses, Workshop

from phalanx.cli.train_cmd import _follow_submitted
from phalanx.control.protocol import NOT_SAVED, RESUMABLE
from phalanx.events.log import EventReader
from phalanx.events.records import Finished, Recovered, Restored, Saved, Stopped
from phalanx.events.rundir import RunDir
from phalanx.launch.slurm import SlurmJob
from phalanx.spec.load import loads

UNSAVED = ("train", "tiny.toml", "checkpoint.save=false")


def test_failures_are_recovered_from_memory_and_no_checkpoint_is_left(
    workshop: Workshop, finished: FinishedRuns, losses: StepLosses, here: InProcess
) -> None:
    sharded = ("layout.shard=2", "layout.zero=2", "--chaos", "kill rank=1 step=6")
    ended = workshop.run(*UNSAVED, *sharded, "--run-dir", "run", "--json")
    assert ended.code == 0 and ended.json["checkpoint"] is None and ended.json["finished"], ended
    assert "nothing is saved, not even at the end" in ended.shown and "none: checkpoint.save = false" in ended.shown
    events = workshop.events("run")
    (recovery,) = (event for event in events if isinstance(event, Recovered))
    assert recovery.source == "memory" and recovery.steps_lost <= 1
    assert all(event.path.startswith("memory") for event in events if isinstance(event, Restored))
    assert isinstance(events[-1], Finished) and not any(isinstance(event, Saved) for event in events)
    assert list((workshop.path / "run" / "checkpoints").iterdir()) == []
    expected = dict((step, loss) for step, loss, _ in losses(finished(2).workshop.events(finished(2).path)))
    assert dict((step, loss) for step, loss, _ in losses(events)) == pytest.approx(expected, abs=1e-5)
    for words in (
        ("generate", "DIR", "the"),
        ("eval", "DIR"),
        ("export", "DIR", "hf"),
        *(("checkpoint", verb, "DIR") for verb in ("list", "inspect", "verify", "prune")),
        ("checkpoint", "reshard", "DIR", "shard=2", "other"),
    ):
        refused = here(*(str(workshop.path / "run") if word == "DIR" else word for word in words))
        assert refused.code == 2 and "checkpoint.save = false, which has saved no checkpoint: train it again" in refused.err, (
            words
        )
    status = here("status", workshop.path / "run")
    assert (
        status.code == 0
        and "finished, step 8 of 8" in status.shown
        and "no checkpoint: checkpoint.save = false" in status.shown
    )


def test_a_stopped_run_is_not_resumable_and_says_so(workshop: Workshop, here: InProcess) -> None:
    command = workshop.start(*UNSAVED, "train.steps=5000", "layout.data=2", "--run-dir", "run")
    command.until(workshop.reached("run", 5), "step 5")
    command.process.send_signal(signal.SIGTERM)
    ended = command.wait()
    assert ended.code == 130, ended
    assert "Nothing was saved (checkpoint.save = false): the run cannot be resumed" in ended.shown
    assert "run the same command again" not in ended.shown
    (stop,) = (event for event in workshop.events("run") if isinstance(event, Stopped))
    assert stop.step >= 5 and not stop.saved
    assert list((workshop.path / "run" / "checkpoints").iterdir()) == []
    again = workshop.run("train", "tiny.toml", "train.steps=5000", "--run-dir", "run")
    assert again.code == 2 and "--run-dir run holds a run that saved nothing (checkpoint.save = false)" in again.err, again


class Cancelled(SlurmJob):
    """A job that scancel has ended."""

    def ended(self) -> str | None:
        return "CANCELLED"


@pytest.mark.parametrize(("overrides", "code"), [((), RESUMABLE), (("checkpoint.save=false",), NOT_SAVED)])
def test_a_cancelled_job_is_resumable_only_if_it_saves(
    overrides: tuple[str, ...], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    run = loads("[train]\nbatch = 8\nsteps = 4", overrides=overrides)
    reader = EventReader(rundir.events_file)
    assert _follow_submitted(Cancelled("7", rundir), run, rundir, reader, json=False) == code
    assert ("Nothing was saved" in capsys.readouterr().out) == (code == NOT_SAVED)
