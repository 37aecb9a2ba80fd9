"""Writes curves into files of TensorBoard in the run directory. With the writer of TensorBoard itself, which needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from phalanx.events.records import Event
from phalanx.watch.sinks.curves import curves
from phalanx.watch.sinks.sink import SinkSettings


class TensorBoardSink:
    """One file for each launch."""

    def __init__(self, folder: str):
        self._writer = EventFileWriter(folder)

    def receive(self, events: Sequence[Event]) -> None:
        for event in events:
            step, values = curves(event)
            if values:
                summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
                self._writer.add_event(TensorBoardEvent(wall_time=event.time, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_sink(settings: SinkSettings) -> TensorBoardSink:
    return TensorBoardSink(str(settings.rundir.path / "tensorboard"))
