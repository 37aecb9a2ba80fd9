"""Logs settings, curves and tags to MLflow, in batches. A resumed run continues its MLflow run, whose id is in the run directory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from phalanx.events.records import Event, Finished, RunStarted, Stopped, WorkerFailed
from phalanx.events.rundir import replace_file
from phalanx.spec.errors import toml
from phalanx.spec.keys import keys_in, tables_in
from phalanx.spec.run import Run
from phalanx.watch.sinks.curves import curves
from phalanx.watch.sinks.sink import SinkSettings

_METRICS, _PARAMS = 1000, 100
"""Values of one request, at most, as MLflow's REST API allows."""
_VALUE = 500
"""Characters of a setting that every store takes."""


class MlflowSink:
    """One run of MLflow for all launches."""

    def __init__(self, settings: SinkSettings):
        watch = settings.run.watch
        self._settings = settings
        self._client = MlflowClient(tracking_uri=watch.mlflow_uri)
        self._file = settings.rundir.path / "mlflow.json"
        self._run_id = self._resume() or self._begin(watch.mlflow_experiment)
        self._status = "KILLED"
        """How the launch ends if it does not say so."""
        self._log_settings(settings.run)

    def _resume(self) -> str | None:
        """The run of an earlier launch; None if there is none, or if it was deleted."""
        try:
            run_id = json.loads(self._file.read_text())["run_id"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        try:
            if self._client.get_run(run_id).info.lifecycle_stage != "active":
                return None
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        self._client.update_run(run_id, status="RUNNING")
        return str(run_id)

    def _begin(self, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if found is None else found.experiment_id
        run = self._client.create_run(experiment_id, run_name=self._settings.name)
        replace_file(self._file, json.dumps({"run_id": run.info.run_id, "experiment": experiment}))
        return str(run.info.run_id)

    def _log_settings(self, run: Run) -> None:
        """Settings are written once: MLflow does not change them. One that differs in a later launch becomes a tag."""
        known = self._client.get_run(self._run_id).data.params
        given = {
            key.path: toml(value)[:_VALUE]
            for table in tables_in(run)
            for key in keys_in(run, table)
            if (value := key.of(run)) is not None and value != ()
        }
        params = iter([Param(path, value) for path, value in given.items() if path not in known])
        while batch := list(islice(params, _PARAMS)):
            self._client.log_batch(self._run_id, params=batch)
        changed = [RunTag(f"changed.{path}", value) for path, value in given.items() if known.get(path, value) != value]
        here = RunTag("phalanx.run_dir", str(self._settings.rundir.path.absolute()))
        self._client.log_batch(self._run_id, tags=[here, *changed][:_PARAMS])

    def receive(self, events: Sequence[Event]) -> None:
        metrics = iter(
            [
                Metric(name, value, int(1000 * event.time), step)
                for event in events
                for step, values in [curves(event)]
                for name, value in values.items()
            ]
        )
        while batch := list(islice(metrics, _METRICS)):
            self._client.log_batch(self._run_id, metrics=batch)
        for event in events:
            if tags := list(_tags(event)):
                self._client.log_batch(self._run_id, tags=tags)
            match event:
                case Finished():
                    self._status = "FINISHED"
                case WorkerFailed():
                    self._status = "FAILED"

    def close(self) -> None:
        self._client.set_terminated(self._run_id, self._status, int(1000 * time.time()))


def _tags(event: Event) -> Iterator[RunTag]:
    match event:
        case RunStarted():
            for name in ("version", "ranks", "device", "parameters", "compute"):
                yield RunTag(f"phalanx.{name}", str(getattr(event, name)))
        case Stopped():
            yield RunTag("phalanx.end", f"stopped at step {event.step}: {event.reason}"[:_VALUE])
        case WorkerFailed():
            yield RunTag("phalanx.end", f"failed: {event.reason}"[:_VALUE])
        case Finished():
            yield RunTag("phalanx.end", f"finished at step {event.step}")


def open_sink(settings: SinkSettings) -> MlflowSink:
    return MlflowSink(settings)
