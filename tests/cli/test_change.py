"""`phalanx train --change`: a run goes on with other settings, and says so."""

from __future__ import annotations

from commands import FinishedRuns

from phalanx.events.records import Restored, SettingsChanged, Step


def test_a_finished_run_goes_on_with_more_steps_and_another_rate(finished: FinishedRuns) -> None:
    workshop = finished(1).workshop
    run_dir = workshop.copy("ranks-1", "changed")
    settings = ("train.steps=10", "optimizer.learning_rate=0.001", "layout.data=1")
    refused = workshop.run("train", "tiny.toml", *settings, "--run-dir", run_dir)
    assert refused.code == 2 and "add --change" in refused.err, refused
    ended = workshop.train(*settings, "--run-dir", run_dir, "--change")
    events = workshop.events(run_dir)
    again = events[[isinstance(event, Restored) for event in events].index(True) :]
    assert [event.step for event in again if isinstance(event, Step)] == [9, 10]
    (record,) = [event for event in events if isinstance(event, SettingsChanged)]
    changes = {"optimizer.learning_rate": [0.003, 0.001], "train.steps": [8, 10]}
    assert (record.step, record.changes) == (8, changes)
    assert ended.json["settings_changed"] == [{"step": 8, "changes": changes}]
    status = workshop.run("status", run_dir, "--json")
    assert status.json["settings_changed"] == [{"step": 8, "changes": changes}]
    for shown in (ended.shown, status.shown):
        assert "optimizer.learning_rate: 0.003 → 0.001" in shown.replace("\n", " ")
