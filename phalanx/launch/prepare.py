"""From a run to a directory that workers can start in: plan, data, extras, space, all checked before anything is started.

Called by the launcher, and by rank 0 under torchrun. Whatever is wrong is raised at once, as one RunError.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.checkpointing import directory
from phalanx.checkpointing.storage import open_location
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.events.log import read_events
from phalanx.events.records import Finished
from phalanx.events.rundir import RunDir
from phalanx.host.env import visible_gpus
from phalanx.host.probe import probe
from phalanx.launch.checkpoint_storage import check_lost, check_owner, newest_first, places, storage_problems
from phalanx.launch.model_check import check_weights, measure, memory_problems
from phalanx.launch.run_checks import address_problems, data_notices, node_problems, sources, too_little_data
from phalanx.planning.machines.hardware import mismatch
from phalanx.spec.dump import changed, dump
from phalanx.spec.errors import RunError
from phalanx.spec.load import load
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

if TYPE_CHECKING:
    from phalanx.data.ingest import ProgressCallback
    from phalanx.planning.planner import PlannedRun

_BYTES_PER_PARAMETER = 12  # weights and two Adam moments in fp32
_SLACK = 16 << 20  # logs, events, the picture


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a person asks for beside the run itself."""

    directory: Path | None = None
    """Where; left out: runs/NAME, numbered if taken."""
    fresh: bool = False
    """Start anew even where an unfinished run could go on."""
    accept_changed_data: bool = False
    """Go on although the text is no longer the one that the checkpoint was trained on."""
    unrehearsed: bool = False
    """Start although a rehearsal may say that it does not fit."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything a launcher needs."""

    run: Run
    plan: Plan
    rundir: RunDir
    resumes: bool
    """There is a checkpoint to go on from."""
    notices: tuple[str, ...] = ()
    """What a person should know before the first step."""


def prepare(
    run: Run, name: str, request: Request | None = None, *, ranks: int | None = None, progress: ProgressCallback | None = None
) -> Prepared:
    """Check the run against this machine and make its directory ready; text that has to be tokenised first, is.

    Without a directory, runs/NAME is taken: an unfinished run of the same settings there goes on, a finished or different
    one is left alone and a numbered directory beside it is used. `ranks`: how many somebody else has started already.
    """
    from phalanx.planning.planner import keep_layout, plan_run  # imports numpy

    request = request or Request()
    problems = [*_missing_extras(run), *storage_problems(run), *address_problems(run)]
    settled = data = None
    try:
        machine = probe(visible_gpus())
        if elsewhere := mismatch(run, machine):
            raise RunError(elsewhere)
        size = measure(run)
        settled = plan_run(run, machine, ranks, size)
        if ranks is None:
            problems += node_problems(run, settled.plan)
    except RunError as error:
        problems += error.problems
    try:
        if settled is not None and not (problems or request.unrehearsed):
            problems += memory_problems(settled.run, settled.plan, machine)
        if not problems:  # what takes long is not begun for a run that cannot be
            data = open_dataset(run.data, run.train.sequence_length, run.train.seed, progress)
            problems += too_little_data(run, data)
    except RunError as error:
        problems += error.problems
    if problems or settled is None or data is None:
        raise RunError(problems)
    base, own = request.directory or Path("runs") / name, request.directory is None
    if run.checkpoint.url is None or run.checkpoint.local_first:
        _check_space(base, settled.plan)
    _check_offload(settled.run, settled.plan)
    rundir = _own(base, run, request.fresh) if own else _given(base, run, request.fresh)
    try:
        if (before := _before(rundir)) is not None:
            settled = keep_layout(run, machine, before, ranks, size) or settled
        return _fill(rundir, settled, data, request)
    except BaseException:
        rundir.release()  # a program that is told no may ask again
        raise


def _before(rundir: RunDir) -> Plan | None:
    """How a run that goes on was laid out when it was last started."""
    try:
        return Plan.from_json(rundir.plan_file.read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None  # there is none, or one of another version


def _fill(rundir: RunDir, settled: PlannedRun, data: Dataset, request: Request) -> Prepared:
    """What workers read, into a directory that is held."""
    run, plan = settled.run, settled.plan
    resumes, changes = _check_resumption(rundir, run, plan, data, request)
    if not resumes:  # one that goes on has its weights in its checkpoint
        check_weights(run)
    _write(rundir.run_file, dump(run))
    _write(rundir.plan_file, plan.to_json())
    _keep(data.tokenizer.files, rundir.tokenizer)
    return Prepared(run, plan, rundir, resumes, (*changes, *data_notices(data)))


def _keep(files: Sequence[Path], folder: Path) -> None:
    """The tokenizer's files beside the checkpoints, which mean nothing without them."""
    for file in files:
        folder.mkdir(exist_ok=True)
        partial = folder / f"{file.name}.partial"
        shutil.copyfile(file, partial)
        os.replace(partial, folder / file.name)


def _missing_extras(run: Run) -> list[str]:
    asked = {"tensorboard": (run.watch.tensorboard, "watch"), "wandb": (run.watch.wandb, "wandb")}
    return [
        f"watch.{package} = true needs the package {package}, which is not installed: pip install 'phalanx[{extra}]', "
        f"or set watch.{package} = false."
        for package, (wanted, extra) in asked.items()
        if wanted and importlib.util.find_spec(package) is None
    ]


def _given(directory: Path, run: Run, fresh: bool) -> RunDir:
    """The directory the person named: it must be new, or hold this very run."""
    if directory.exists() and not directory.is_dir():
        raise RunError([f"--run-dir {directory} is a file: name a directory, or one that does not exist yet."])
    rundir = RunDir(directory)
    if _imported(rundir):
        raise RunError(
            [
                f"--run-dir {directory} holds imported weights, not a run that could go on: name another directory, and begin "
                f'with these weights by model.from = "{directory}".'
            ]
        )
    if rundir.exists and fresh:
        raise RunError([f"--run-dir {directory} already holds a run and --fresh was given: name another directory."])
    if rundir.exists and (differences := changed(load(rundir.run_file), run)):
        raise RunError(
            [
                f"--run-dir {directory} holds a run with other settings ({'; '.join(differences)}): name another directory, "
                "or undo the change to go on with that run."
            ]
        )
    _make(rundir)
    if not rundir.acquire():
        raise RunError([f"--run-dir {directory} is in use by a running job: wait for it, stop it, or name another directory."])
    return rundir


def _own(base: Path, run: Run, fresh: bool) -> RunDir:
    """The first of runs/NAME, runs/NAME-2, … that is free or holds this run unfinished."""
    number = 1
    while True:
        rundir = RunDir(base if number == 1 else base.with_name(f"{base.name}-{number}"))
        number += 1
        if rundir.exists and (fresh or _ended(rundir) or _imported(rundir) or _differs(rundir, run)):
            continue
        _make(rundir)
        if rundir.acquire():
            return rundir


def _imported(rundir: RunDir) -> bool:
    """What `phalanx import` made: weights of no text, and no state of an optimizer to go on with."""
    try:
        listed = directory.list_checkpoints(rundir.checkpoints)
    except OSError:
        return False  # `_make` says what is wrong with it
    for path in listed:
        try:
            return directory.read_marker(path)["data"] is None
        except directory.DamagedCheckpoint:
            continue
    return False


def _ended(rundir: RunDir) -> bool:
    """The run took all its steps."""
    return any(isinstance(event, Finished) for event in read_events(rundir.events_file))


def _differs(rundir: RunDir, run: Run) -> bool:
    try:
        old = load(rundir.run_file)
    except RunError:
        return True  # written by another version, or torn: not ours to touch
    return bool(changed(old, run)) or old.steps != run.steps


def _make(rundir: RunDir) -> None:
    try:
        rundir.create()
        for folder in (rundir.path, rundir.checkpoints):
            os.listdir(folder)
            probe_file = folder / ".writable"
            probe_file.touch()
            probe_file.unlink()
    except OSError as error:
        where = os.path.abspath(error.filename or rundir.path)
        raise RunError(
            [f"The run directory {rundir.path} cannot be written ({error.strerror}: {where}): choose another with --run-dir."]
        ) from None


def _check_resumption(rundir: RunDir, run: Run, plan: Plan, data: Dataset, request: Request) -> tuple[bool, list[str]]:
    """Whether there is a checkpoint, and what is to be said of it.

    One of other text must not be continued unasked: its position in the data means something else now.
    """
    found = places(run, rundir)
    for path, saved in newest_first(found):
        if path.parent != open_location(rundir.checkpoints):
            check_owner(path, saved, run, new=not rundir.exists, fresh=request.fresh)
        replicas = saved.get("replicas", plan.layout.data)
        if replicas != plan.layout.data:
            raise RunError(
                [
                    f"{path} holds {replicas} replicas, each with a state of its own (optimizer.sync_every = "
                    f"{run.optimizer.sync_every}), so it does not go on with layout.data = {plan.layout.data}: set "
                    f"layout.data = {replicas}, or start afresh with --fresh or another --run-dir."
                ]
            )
        if saved["data"] == data.fingerprint:
            return True, []
        text = f"The text of {sources(run)} has changed since {path} was saved"
        if request.accept_changed_data:
            return True, [f"{text}: as asked, the run goes on at the same position of the new text."]
        raise RunError(
            [
                f"{text}, so the run cannot go on where it was: restore the files, go on all the same with "
                "--accept-changed-data, or start afresh with --fresh or another --run-dir."
            ]
        )
    check_lost(found, rundir)
    return False, []


def _write(path: Path, text: str) -> None:
    """Whole or not at all: killed here, a run that goes on must not have lost its settings."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def _check_offload(run: Run, plan: Plan) -> None:
    """A folder of one's own for optimizer states must take them; without one they lie in the run directory."""
    if run.memory.offload != "nvme" or run.memory.offload_path is None:
        return
    folder, said = Path(run.memory.offload_path).expanduser(), f'memory.offload_path = "{run.memory.offload_path}"'
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(
            [f"{said} cannot be written ({error.strerror}): name a folder on a fast local disk, or leave it out."]
        ) from None
    layout = plan.layout
    copies = layout.ranks // (layout.pipeline * layout.shard * layout.tensor)  # replicas keep states of their own
    need, free = plan.parameters * _BYTES_PER_PARAMETER * copies, shutil.disk_usage(folder).free
    if free < need:
        raise RunError(
            [
                f"{said} has {free / 2**20:,.0f} MiB free, but the optimizer states and master weights of {plan.parameters / 1e6:,.1f} M "
                f"parameters take {need / 2**20:,.0f} MiB there: free some space or name another folder."
            ]
        )


def _check_space(path: Path, plan: Plan) -> None:
    """Before anything is made: `path` or a directory above it may not be there yet."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    # A new checkpoint is complete before an old one goes, so there must be room for one beside what is already there.
    need = plan.parameters * _BYTES_PER_PARAMETER + _SLACK
    if free < need:
        raise RunError(
            [
                f"The disk of the run directory {path} has {free / 2**20:,.0f} MiB free and one checkpoint of "
                f"{plan.parameters / 1e6:,.1f} M parameters takes {need / 2**20:,.0f} MiB: free some space or choose another "
                "disk with --run-dir."
            ]
        )
