"""MLflow gets the settings and curves of a run, and a resumed run continues its MLflow run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from happened import a_step, evaluated, finished, run_started

from phalanx.events.records import Evaluated, Event, Step, Stopped
from phalanx.events.rundir import RunDir
from phalanx.spec.dump import dump
from phalanx.spec.load import loads
from phalanx.watch.sinks.sink import SINKS, SinkSettings

pytest.importorskip("mlflow", reason="needs the extra mlflow")
pytest.importorskip("sqlalchemy", reason="needs sqlalchemy, for MLflow's store in a file")

RUN = "[train]\nbatch = 8\nsteps = {steps}\n[watch]\nmlflow = true\nmlflow_uri = '{uri}'\nmlflow_experiment = 'tests'\n"
pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow and of what it imports


def launch(rundir: RunDir, uri: str, events: list[Event], steps: int = 10) -> Any:
    """Give the records of a launch to the sink; returns MLflow's own client."""
    from mlflow.tracking import MlflowClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # As a run gives it: what the run directory holds, without secrets.
        run = loads(dump(loads(RUN.format(uri=uri, steps=steps), overrides=["watch.alerts.url=https://x/secret"])))
        sink = SINKS["mlflow"].open(SinkSettings(run=run, rundir=rundir, warn=pytest.fail))
        for at in range(0, len(events), 3):
            sink.receive(events[at : at + 3])
        sink.close()
    return MlflowClient(tracking_uri=uri)


def history(client: Any, run_id: str, name: str) -> dict[int, float]:
    return {metric.step: metric.value for metric in client.get_metric_history(run_id, name)}


def test_the_store_holds_what_the_events_say_over_two_launches(tmp_path: Path) -> None:
    rundir, uri = RunDir(tmp_path / "tiny"), f"sqlite:///{tmp_path / 'ml.db'}"
    rundir.create()
    first = [run_started(), *(a_step(number, loss=4.0 / number) for number in range(1, 6)), evaluated(5, 3.5)]
    client = launch(rundir, uri, [*first, Stopped(time=1006.0, step=5, reason="SIGTERM")])
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "KILLED" and run.data.tags["phalanx.end"] == "stopped at step 5: SIGTERM"
    second = [run_started(2000.0), *(a_step(number, loss=4.0 / number) for number in range(6, 11)), evaluated(10, 3.0)]
    client = launch(rundir, uri, [*second, finished(20)], steps=20)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "tiny"
    events = [*first, *second]
    steps = [event for event in events if isinstance(event, Step)]
    for name, field in (("train/loss", "loss"), ("speed/tokens_per_second", "tokens_per_second"), ("speed/mfu", "mfu")):
        assert history(client, run.info.run_id, name) == {event.step: getattr(event, field) for event in steps}
    assert history(client, run.info.run_id, "eval/loss") == {
        event.step: event.loss for event in events if isinstance(event, Evaluated)
    }
    (one,) = [metric for metric in client.get_metric_history(run.info.run_id, "train/loss") if metric.step == 3]
    assert one.timestamp == 1003_000
    assert run.data.params["train.batch"] == "8" and run.data.params["train.steps"] == "10"
    assert run.data.tags["changed.train.steps"] == "20" and run.data.tags["phalanx.ranks"] == "2"
    assert "secret" not in str(run.data) and "watch.alerts.url" not in run.data.params


def test_a_deleted_run_is_begun_anew(tmp_path: Path) -> None:
    rundir, uri = RunDir(tmp_path / "tiny"), f"sqlite:///{tmp_path / 'ml.db'}"
    rundir.create()
    client = launch(rundir, uri, [run_started(), a_step(1), finished(1)])
    experiment = client.get_experiment_by_name("tests").experiment_id
    (old,) = client.search_runs([experiment])
    client.delete_run(old.info.run_id)
    (new,) = launch(rundir, uri, [run_started(), a_step(2), finished(2)]).search_runs([experiment])
    assert new.info.run_id != old.info.run_id and history(client, new.info.run_id, "train/loss") == {2: 3.0}
