"""The pipeline schedule that a layout asks for: a known one, or one from a file. Planning looks whether there is one, training
executes it."""

from __future__ import annotations

from pathlib import Path

from phalanx.schedules.actions import Schedule
from phalanx.schedules.csv_format import load
from phalanx.schedules.makers import make, resized
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout


def schedule(layout: Layout, micro_batches: int) -> Schedule | None:
    """The order of a step's micro-batches; None without a pipeline. Raises RunError where there can be none."""
    if layout.pipeline == 1:
        return None
    if layout.schedule_file is None:
        return make(layout.schedule, layout.pipeline, micro_batches, layout.stages_per_rank)
    found = load(Path(layout.schedule_file))
    if found.ranks != layout.pipeline:
        raise RunError(
            [
                f'layout.schedule_file = "{layout.schedule_file}" is for {found.ranks} ranks, but layout.pipeline = {layout.pipeline}: '
                "set layout.pipeline to that number, or name another file."
            ]
        )
    if micro_batches > found.micro_batches:
        raise RunError(
            [
                f'layout.schedule_file = "{layout.schedule_file}" is for {found.micro_batches} micro-batches, but a step has {micro_batches} '
                "(train.batch / layout.data / layout.shard / train.micro_batch): raise train.micro_batch, or write a file for as many with "
                "`phalanx schedule --csv`."
            ]
        )
    return resized(found, micro_batches)
