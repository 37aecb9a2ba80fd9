"""A checkpoint's run on another layout, for `phalanx checkpoint reshard` and `inspect --layout`: parses and checks the layout, computes what
each rank would hold, and writes the resharded checkpoint."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from phalanx.checkpointing import directory
from phalanx.checkpointing.find_checkpoint import FoundCheckpoint, is_url
from phalanx.checkpointing.format import Marker, RunMetadata
from phalanx.checkpointing.location import Location, open_location
from phalanx.checkpointing.offline_writer import atomic_directory, reshard
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError, toml
from phalanx.spec.layout import Layout
from phalanx.spec.load import load, loads
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.build import dry_build_tensors

_LAYOUT_TABLE = re.compile(r"(?ms)^\[layout\]\n.*?(?=^\[|\Z)")


@dataclass(frozen=True, slots=True)
class ReshardedRun:
    """A checkpoint's run on a layout."""

    run: Run
    plan: Plan | None
    """None for imported weights, which have no plan."""

    @property
    def layout(self) -> Layout:
        return self.run.layout

    def holds(self, rank: int) -> dict[str, StateTensor]:
        """What a rank would save, without values."""
        # A dtype that the run file leaves open was chosen for the device, and optimizer states depend on it.
        compute = self.run.precision.compute or (self.plan.compute if self.plan is not None else None)
        return dry_build_tensors(replace(self.run, precision=replace(self.run.precision, compute=compute)), self.layout, rank)

    @property
    def distinct(self) -> list[int]:
        """Ranks that hold different states: one per replica group, unless experts are spread over replicas too."""
        layout = self.layout
        if layout.expert * layout.expert_tensor > 1 or self.run.optimizer.sync_every > 1:
            return list(range(layout.ranks))
        degrees = (layout.pipeline, layout.data or 1, layout.shard, layout.context, layout.tensor)
        coordinates = itertools.product(*map(range, degrees))
        return [rank for rank, (_, data, _, context, _) in enumerate(coordinates) if not data and not context]

    def metadata(self, marker: Marker) -> RunMetadata:
        """That of `marker`, but on this layout."""
        plan = self.plan.to_json() if self.plan is not None else None
        return replace(marker.run, layout=asdict(self.layout), run=dump(self.run), plan=plan)


def on_layout(found: FoundCheckpoint, marker: Marker, asked: str) -> ReshardedRun:
    """A checkpoint's run on the layout `asked`: degrees such as "tensor=2,pipeline=2", with 1 for all others, or a run file."""
    run = _run(found, _degrees(asked))
    layout = run.layout
    replicas = marker.run.replicas or layout.data
    if replicas != layout.data:
        raise RunError(
            f"{found.checkpoint} holds {replicas} replicas, each with a state of its own (optimizer.sync_every = "
            f"{run.optimizer.sync_every}), so it does not fit layout.data = {layout.data}: take data={replicas}."
        )
    return ReshardedRun(run, _plan(run, marker))


def write(saved: CheckpointReader, found: FoundCheckpoint, resharded: ReshardedRun, out: str) -> Location:
    """Writes the checkpoint as this layout would have saved it: into a run directory, or, at a URL, into a folder of checkpoints as for
    `checkpoint.url`. Returns the checkpoint's location."""
    step, folder = saved.marker.step, open_location(out)
    url = out if is_url(out) else None
    checkpoint = replace(resharded.run.checkpoint, url=url, local_first=False)
    resharded = replace(resharded, run=replace(resharded.run, checkpoint=checkpoint))
    shape, metadata = (resharded.layout.ranks, resharded.layout.pipeline), resharded.metadata(saved.marker)
    if url is not None:
        if directory.step_dir(folder, step).is_folder():
            raise RunError(f"{directory.step_dir(folder, step)} is already there: name another folder.")
        return reshard(saved, resharded.holds, shape, folder, metadata)
    with atomic_directory(Path(out)) as unfinished:
        (unfinished / "run.toml").write_text(dump(resharded.run))
        if resharded.plan is not None:
            (unfinished / "plan.json").write_text(resharded.plan.to_json())
        if found.tokenizer is not None:
            shutil.copytree(found.tokenizer, unfinished / "tokenizer")
        reshard(saved, resharded.holds, shape, open_location(unfinished / "checkpoints"), metadata)
    return directory.step_dir(folder / "checkpoints", step)


def on_saved_layout(found: FoundCheckpoint, marker: Marker) -> ReshardedRun | None:
    """A checkpoint's run on the layout that saved it; None if the checkpoint does not name one."""
    if marker.run.layout is None:
        return None
    run = replace(_run(found, []), layout=Layout.from_saved(marker.run.layout))
    return ReshardedRun(run, _plan(run, marker))


def _degrees(asked: str) -> list[str]:
    """A layout as overrides of a run file."""
    if asked.endswith(".toml") or Path(asked).is_file():
        plain = asdict(Layout())
        return [f"layout.{key}={toml(value)}" for key, value in asdict(load(asked).layout).items() if value != plain[key]]
    parts = [part.strip() for part in asked.split(",") if part.strip()]
    wrong = [part for part in parts if not re.fullmatch(r"[\w.]+\s*=\s*\S+", part)]
    if wrong or not parts:
        raise RunError(
            f'The layout "{asked}" is not understood{f" at {wrong[0]}" if wrong else ""}: give degrees such as tensor=2,pipeline=2, '
            "where all others are 1, or a run file."
        )
    pairs = [part.split("=", 1) for part in parts]
    keys = [key.strip().removeprefix("layout.") for key, _ in pairs]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise RunError(f'The layout "{asked}" gives {twice[0]} more than once: give it once.')
    return [f"layout.{key}={value.strip()}" for key, (_, value) in zip(keys, pairs, strict=True)]


def _run(found: FoundCheckpoint, overrides: list[str]) -> Run:
    """The checkpoint's run with the given layout only. Folders that a resolved run file names need not exist."""
    run = loads(_LAYOUT_TABLE.sub("", found.run), name=found.source, overrides=overrides)
    return replace(run, layout=replace(run.layout, data=run.layout.data or 1))


def _plan(run: Run, marker: Marker) -> Plan | None:
    if marker.run.plan is None:
        return None
    plan = Plan.from_json(marker.run.plan)
    share = run.batch // run.layout.replicas
    micro = math.gcd(plan.micro_batch, share)
    peak = plan.peak_flops if plan.ranks == run.layout.ranks else None  # that of other devices is known when the run starts
    return replace(plan, layout=run.layout, micro_batch=micro, accumulation=share // micro, peak_flops=peak)
