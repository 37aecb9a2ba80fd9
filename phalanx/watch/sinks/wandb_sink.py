"""Logs curves to Weights & Biases. The library sends them in the background, and keeps them while its server cannot be reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import wandb

from phalanx.events.records import Event
from phalanx.watch.sinks.curves import curves
from phalanx.watch.sinks.sink import SinkSettings


class WandbSink:
    """One run of Weights & Biases for all launches."""

    def __init__(self, session: Any):
        self._session = session

    def receive(self, events: Sequence[Event]) -> None:
        for event in events:
            step, values = curves(event)
            if values:
                self._session.log(values, step=step)

    def close(self) -> None:
        self._session.finish()


def open_sink(settings: SinkSettings) -> WandbSink:
    # The run directory's name is the id, so that a resumed run continues its curves.
    run, name, folder = settings.run, settings.name, settings.rundir.path
    project, quiet = run.watch.wandb_project, wandb.Settings(console="off")  # this process prints nothing of the run
    return WandbSink(
        wandb.init(project=project, name=name, id=name, resume="allow", dir=folder, config=asdict(run), settings=quiet)
    )
