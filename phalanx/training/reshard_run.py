"""The run of a checkpoint on another layout: what a person asks for, checked against the model, what each rank would then hold,
and a checkpoint of it.

`phalanx checkpoint reshard` and `inspect --layout` call it; the moving itself is `checkpointing/tools/offline_writer`'s.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.checkpointing import directory
from phalanx.checkpointing.find_checkpoint import FoundCheckpoint, is_url
from phalanx.checkpointing.format import Marker, RunMetadata
from phalanx.checkpointing.location import Location, atomic_directory
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.checkpointing.storage import open_location
from phalanx.checkpointing.tools.offline_writer import reshard
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import load, loads
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.dry_build import held

_TABLE = re.compile(r"(?ms)^\[layout\]\n.*?(?=^\[|\Z)")


@dataclass(frozen=True, slots=True)
class Laid:
    """A checkpoint's run on a layout."""

    run: Run
    plan: Plan | None
    """None where the checkpoint knows of none: imported weights have no plan."""

    @property
    def layout(self) -> Layout:
        return self.run.layout

    def holds(self, rank: int) -> dict[str, StateTensor]:
        """What a rank of it would save, without values."""
        # What the run file leaves open was decided for the device it ran on, and the states of an optimizer rest on it.
        compute = self.run.precision.compute or (self.plan.compute if self.plan is not None else None)
        return held(replace(self.run, precision=replace(self.run.precision, compute=compute)), self.layout, rank)

    @property
    def distinct(self) -> list[int]:
        """Ranks of which no two hold all the same: replicas do, unless experts are dealt among them too."""
        layout, degrees = self.layout, (self.layout.pipeline, self.layout.data or 1, self.layout.shard, self.layout.context)
        if layout.expert * layout.expert_tensor > 1 or self.run.optimizer.sync_every > 1:
            return list(range(layout.ranks))
        places = itertools.product(*map(range, (*degrees, layout.tensor)))
        return [rank for rank, place in enumerate(places) if not place[1] and not place[3]]

    def metadata(self, marker: Marker) -> RunMetadata:
        """What a checkpoint of it says besides its tensors: what `marker` says, with this layout."""
        plan = self.plan.to_json() if self.plan is not None else None
        return replace(marker.run, layout=asdict(self.layout), run=dump(self.run), plan=plan)


def laid_out(found: FoundCheckpoint, marker: Marker, asked: str) -> Laid:
    """`asked`: degrees such as "tensor=2,pipeline=2", where all others are 1, or a run file, for its layout."""
    run = _run(found, _degrees(asked))
    layout = run.layout
    replicas = marker.run.replicas or layout.data
    if replicas != layout.data:
        raise RunError(
            [
                f"{found.checkpoint} holds {replicas} replicas, each with a state of its own (optimizer.sync_every = "
                f"{run.optimizer.sync_every}), so it does not fit layout.data = {layout.data}: take data={replicas}."
            ]
        )
    return Laid(run, _plan(run, marker))


def write(saved: CheckpointReader, found: FoundCheckpoint, laid: Laid, out: str) -> Location:
    """The checkpoint as this layout would have saved it: a run directory that can be trained on in and begun from, or, at a URL, a
    folder of checkpoints as `checkpoint.url` names one. Returns where the checkpoint is."""
    shape = (laid.layout.ranks, laid.layout.pipeline)
    step = saved.marker.step
    if is_url(out):
        if directory.step_dir(open_location(out), step).is_folder():
            raise RunError([f"{directory.step_dir(open_location(out), step)} is already there: name another folder."])
        laid = replace(laid, run=replace(laid.run, checkpoint=replace(laid.run.checkpoint, url=out, local_first=False)))
        return reshard(saved, laid.holds, shape, open_location(out), laid.metadata(saved.marker))
    laid = replace(laid, run=replace(laid.run, checkpoint=replace(laid.run.checkpoint, url=None, local_first=False)))
    with atomic_directory(Path(out)) as unfinished:
        (unfinished / "run.toml").write_text(dump(laid.run))
        if laid.plan is not None:
            (unfinished / "plan.json").write_text(laid.plan.to_json())
        if found.tokenizer is not None:
            shutil.copytree(found.tokenizer, unfinished / "tokenizer")
        reshard(saved, laid.holds, shape, open_location(unfinished / "checkpoints"), laid.metadata(saved.marker))
    return directory.step_dir(Path(out) / "checkpoints", step)


def as_saved(found: FoundCheckpoint, marker: Marker) -> Laid | None:
    """On the layout that saved it; None where it does not say."""
    if marker.run.layout is None:
        return None
    run = replace(_run(found, []), layout=Layout.from_saved(marker.run.layout))
    return Laid(run, _plan(run, marker))


def _degrees(asked: str) -> list[str]:
    """As overrides of a run file."""
    if asked.endswith(".toml") or Path(asked).is_file():
        layout = load(asked).layout
        plain = asdict(Layout())
        return [f"layout.{key}={_written(value)}" for key, value in asdict(layout).items() if value != plain[key]]
    parts = [part.strip() for part in asked.split(",") if part.strip()]
    wrong = [part for part in parts if not re.fullmatch(r"[\w.]+\s*=\s*\S+", part)]
    if wrong or not parts:
        raise RunError(
            [
                f'The layout "{asked}" is not understood{f" at {wrong[0]}" if wrong else ""}: give degrees such as tensor=2,pipeline=2, '
                "where all that are left out are 1, or a run file."
            ]
        )
    pairs = [part.split("=", 1) for part in parts]
    keys = [key.strip().removeprefix("layout.") for key, _ in pairs]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise RunError([f'The layout "{asked}" gives {twice[0]} more than once: give it once.'])
    return [f"layout.{key}={value.strip()}" for key, (_, value) in zip(keys, pairs, strict=True)]


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _run(found: FoundCheckpoint, overrides: list[str]) -> Run:
    """The checkpoint's run with no layout but the one given. Of a resolved run file, the folders that it names need not be there."""
    run = loads(_TABLE.sub("", found.run), name=found.source, overrides=overrides)
    return replace(run, layout=replace(run.layout, data=run.layout.data or 1))


def _plan(run: Run, marker: Marker) -> Plan | None:
    if marker.run.plan is None:
        return None
    plan = Plan.from_json(marker.run.plan)
    share = run.batch // run.layout.replicas
    micro = math.gcd(plan.micro_batch, share)
    peak = plan.peak_flops if plan.ranks == run.layout.ranks else None  # how much others can do is told when it starts
    return replace(plan, layout=run.layout, micro_batch=micro, accumulation=share // micro, peak_flops=peak)
