"""Prepares a run before anything is started: checks it against this machine and makes its directory ready. All problems are raised
together, as one RunError."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from phalanx.checkpointing import directory
from phalanx.checkpointing.base_digest import check_base
from phalanx.checkpointing.location import open_location
from phalanx.data.chat_turns import model_files
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.events.log import read_events
from phalanx.events.records import DataOpened, SettingsChanged, Step
from phalanx.events.rundir import RunDir, replace_file
from phalanx.host.probe import this_machine
from phalanx.launch import changed_settings, run_checks
from phalanx.launch.launcher import Launcher, launcher
from phalanx.launch.model_check import check_weights, measure, memory_problems
from phalanx.planning.machines.hardware import mismatch
from phalanx.spec.dump import changed as changed_keys
from phalanx.spec.dump import dump
from phalanx.spec.errors import RUN_FILE, RunError, refuse
from phalanx.spec.load import load
from phalanx.spec.pinned_names import keep_commits, moved_names, pin_run
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.preset_vocabulary import vocabulary_notices, vocabulary_question
from phalanx.spec.run import Run

if TYPE_CHECKING:
    from phalanx.data.ingest import ProgressCallback
    from phalanx.planning.machine_fit import PlannedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Options of the command that are not part of the run."""

    directory: Path | None = None
    """Run directory; None: runs/NAME, numbered if taken."""
    fresh: bool = False
    """Start from step 0 even if an unfinished run could be resumed."""
    accept_changed_data: bool = False
    """Resume although the text has changed since the checkpoint was saved."""
    change: bool = False
    """Resume with other values of settings that may change: learning rate, steps, data, evaluation and others."""
    unrehearsed: bool = False
    """Skip the rehearsal that checks whether the run fits in memory."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything a launcher needs."""

    run: Run
    plan: Plan
    rundir: RunDir
    launcher: Launcher
    resumes: bool
    """There is a checkpoint to resume from."""
    notices: tuple[str, ...] = ()
    """Sentences for the user, shown before the first step."""
    data: str = ""
    """Fingerprint of its data, for runs on several hosts."""
    opened: DataOpened | None = None
    """What the run reads; None: a program of the user's own."""
    changed: SettingsChanged | None = None
    """Settings that differ from those of the state that it resumes from."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A run that can start. Nothing was written, except for tokens of its text in data.cache."""

    asked: Run
    """The run before it is planned, with the commits of its names on the hub."""
    planned: PlannedRun
    machine: Machine
    size: Size | None
    launcher: Launcher
    data: Dataset
    notices: tuple[str, ...]
    changed: SettingsChanged | None = None
    """Known when the run directory is chosen."""

    @property
    def run(self) -> Run:
        return self.planned.run

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def opened(self) -> DataOpened:
        """What the run reads."""
        tokens, data = self.run.steps * self.run.batch_tokens, self.data
        return DataOpened(documents=data.documents, tokens=data.tokens, run_tokens=tokens, parameters=self.plan.parameters)


def examine(
    run: Run,
    name: str,
    request: Request | None = None,
    *,
    ranks: int | None = None,
    progress: ProgressCallback | None = None,
    started_by: Launcher | None = None,
) -> Examined:
    """Check the run against this machine, and tokenize its text if needed. Arguments are those of `prepare`."""
    from phalanx.planning.planner import plan_run  # imports numpy

    request = request or Request()
    base = request.directory or Path("runs") / name
    named, run = run, pin_run(recorded_commits(run, name, request))
    problems = _early_problems(run, base)
    started_by = started_by or launcher(run, (request.directory or Path(name)).name)
    run = replace(run, cluster=replace(run.cluster, nodes=started_by.nodes))
    try:
        machine = this_machine() if ranks is not None else started_by.machine()
        if wrong_machine := mismatch(run, machine):
            raise RunError(wrong_machine)
        size = measure(run, machine, trace=False if request.unrehearsed else None)
        planned = plan_run(run, machine, ranks, size)
        if ranks is None:
            problems += run_checks.node_problems(run, planned.plan, machine)
        if not (problems or request.unrehearsed or run.engine.name != "torch"):  # a rehearsal is one of the torch engine
            problems += memory_problems(planned.run, planned.plan, machine)
    except RunError as error:
        problems += error.problems
    refuse(problems)  # slow preparations only for a run that can start
    data = open_dataset(run.data, run.train.sequence_length, run.train.seed, progress)
    problems += [*run_checks.too_little_data(run, data), *run_checks.sample_problems(run, data)]
    problems += run_checks.space_problems(planned.run, planned.plan, base)
    if ranks is None:
        problems += run_checks.replica_problems(planned.run, planned.plan)
    refuse(problems)
    notices = (*moved_names(named, run), *_notices(run, data, planned.plan, torchrun=ranks is not None))
    return Examined(run, planned, machine, size, started_by, data, notices)


def prepare(
    run: Run,
    name: str,
    request: Request | None = None,
    *,
    ranks: int | None = None,
    progress: ProgressCallback | None = None,
    started_by: Launcher | None = None,
) -> Prepared:
    """Check the run against this machine, tokenize its text if needed, and make its directory ready.

    Without a directory, runs/NAME is used: an unfinished run with the same settings is resumed; a finished or different one is left alone
    and a numbered directory next to it is used. `ranks`: how many ranks torchrun has started already. `started_by`: a launcher other than
    the one that the run file names.
    """
    from phalanx.planning.planner import keep_layout  # imports numpy

    request = request or Request()
    examined = examine(run, name, request, ranks=ranks, progress=progress, started_by=started_by)
    run, planned, data, started_by = examined.asked, examined.planned, examined.data, examined.launcher
    rundir = choose_directory(run, name, request)
    try:
        if (last := _last_plan(rundir)) is not None:
            planned = keep_layout(run, examined.machine, last, ranks, examined.size) or planned
        resumes, said, changed = _check_resumption(rundir, planned, data, request)
        if not resumes or run.lora.rank is not None:  # otherwise its checkpoint has the weights
            check_weights(planned.run)
        if ranks is None:
            begin_launch(rundir, started_by)
        replace_file(rundir.run_file, dump(planned.run))
        replace_file(rundir.plan_file, planned.plan.to_json())
        _store_tokenizer(data.tokenizer.files, model_files(run.data, data.tokenizer), rundir.tokenizer)
        fingerprint = data.fingerprint if run.cluster.nodes > 1 else ""
        opened, said = examined.opened, (*said, *examined.notices)
        return Prepared(planned.run, planned.plan, rundir, started_by, resumes, said, fingerprint, opened, changed)
    except BaseException:
        rundir.release()  # so that the same program can try again
        raise


def _early_problems(run: Run, base: Path) -> list[str]:
    """What can be said before anything slow."""
    question = [] if RunDir(base).exists else vocabulary_question(run)  # a run to resume has decided
    refuse(question)  # alone: what the rows of nobody's choice cost in memory is no other problem
    return [
        *run_checks.watch_problems(run),
        *run_checks.adapter_problems(run),
        *run_checks.storage_problems(run),
        *run_checks.run_directory_problems(run.data, base),
    ]


def _notices(run: Run, data: Dataset, plan: Plan, *, torchrun: bool) -> tuple[str, ...]:
    """Sentences for the user about a run that can start."""
    return (
        *vocabulary_notices(run),
        *run_checks.skipped_file_notices(run.data),
        *run_checks.data_notices(data),
        *run_checks.checkpoint_notices(run, torchrun=torchrun),
        *run_checks.format_notices(plan),
    )


def begin_launch(rundir: RunDir, started_by: Launcher) -> None:
    """Forget the terms of an earlier launch, and check that the hosts see what they must of this one."""
    shutil.rmtree(rundir.control, ignore_errors=True)
    rundir.launch_id = secrets.token_hex(8)
    started_by.check(rundir)


def recorded_commits(run: Run, name: str, request: Request) -> Run:
    """The run with the commits of the hub that its directory records, if `choose_directory` will find an earlier launch of it."""
    if request.fresh:
        return run
    number = 1
    while (rundir := _directory(request.directory or Path("runs") / name, number)).exists:
        number += 1
        if request.directory is not None or not changed_settings.is_finished(rundir):
            with suppress(RunError):  # `choose_directory` deals with a run file that cannot be read
                recorded = load(rundir.run_file)
                kept = keep_commits(run, recorded)
                if not changed_keys(recorded, kept):
                    return kept
        if request.directory is not None:
            break
    return run


def _directory(base: Path, number: int) -> RunDir:
    return RunDir(base if number == 1 else base.with_name(f"{base.name}-{number}"))


def choose_directory(run: Run, name: str, request: Request) -> RunDir:
    """The directory of a run, locked: the one that the user names, else runs/NAME, or the first that is free. Raises RunError if a new
    run has a question open."""
    if request.change and request.fresh:
        raise RunError("--change continues a run, and --fresh starts a new one: use one of them.")
    if request.directory is not None:
        return _use_directory(request.directory, run, request, f"--run-dir {request.directory}")
    if request.change:
        found = changed_settings.directory_to_change(Path("runs") / name)
        return _use_directory(found, run, request, str(found))
    return _choose_directory(Path("runs") / name, run, request.fresh)


def _last_plan(rundir: RunDir) -> Plan | None:
    """The plan of the last launch in this directory; None if there is none, or one of another version."""
    try:
        return Plan.from_json(rundir.plan_file.read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store_tokenizer(files: Sequence[Path], of_chats: Mapping[str, str], folder: Path) -> None:
    """Copy the tokenizer next to the checkpoints, which are useless without it. `of_chats`: files of a run that reads conversations."""
    if files or of_chats:
        folder.mkdir(exist_ok=True)
    for file in files:
        partial = folder / f"{file.name}.partial"
        shutil.copyfile(file, partial)
        os.replace(partial, folder / file.name)
    for name, text in of_chats.items():
        replace_file(folder / name, text)


def _use_directory(directory: Path, run: Run, request: Request, holder: str) -> RunDir:
    """Use the directory that the user named: it must be new, or hold this run. `holder`: its name in sentences."""
    if directory.exists() and not directory.is_dir():
        raise RunError(f"{holder} is a file: name a directory, or one that does not exist yet.")
    rundir = RunDir(directory)
    if _is_import(rundir):
        raise RunError(
            f"{holder} holds imported weights, not a run to resume: name another directory, and start "
            f'from these weights with model.from = "{directory}".'
        )
    if rundir.exists and request.fresh:
        raise RunError(f"{holder} already holds a run and --fresh was given: name another directory.")
    if rundir.exists:
        changed_settings.check_changes(load(rundir.run_file), run, holder, "name another directory", change=request.change)
    elif request.change and run.checkpoint.url is None:  # at a URL there may be a run that this machine has not seen
        raise RunError(f"--change continues a run with other settings, but {holder} holds none: remove --change to start one.")
    if rundir.exists and (reason := _unresumable(rundir, run)):
        raise RunError(f"{holder} {reason}: name another directory, or remove this one, to start again from step 0.")
    _create(rundir, run)
    if not rundir.acquire():
        raise RunError(f"{holder} is in use by a running job: wait for it, stop it, or name another directory.")
    return rundir


def _choose_directory(base: Path, run: Run, fresh: bool) -> RunDir:
    """Use the first of runs/NAME, runs/NAME-2, … that is free or holds this run unfinished."""
    for rundir in _numbered(base):
        if not rundir.exists or _is_continued_by(rundir, run, fresh):
            _create(rundir, run)
            if rundir.acquire():
                return rundir
    raise AssertionError("the numbers do not end")


def expected_directory(run: Run, name: str, request: Request) -> RunDir:
    """The directory that `choose_directory` would choose now. Creates and locks nothing."""
    if request.directory is not None:
        return RunDir(request.directory)
    base = Path("runs") / name
    return next(rundir for rundir in _numbered(base) if not rundir.exists or _is_continued_by(rundir, run, request.fresh))


def _numbered(base: Path) -> Iterator[RunDir]:
    return (_directory(base, number) for number in count(1))


def _is_continued_by(rundir: RunDir, run: Run, fresh: bool) -> bool:
    """Whether the run goes on in a directory that exists."""
    if fresh or changed_settings.is_finished(rundir) or _is_import(rundir) or _differs(rundir, run):
        return False
    return not _unresumable(rundir, run)


def _is_import(rundir: RunDir) -> bool:
    """Whether `phalanx import` made it: such a directory has weights but no optimizer state, and cannot be resumed."""
    with suppress(OSError):  # `_create` reports what is wrong with the directory
        newest, _ = directory.newest(rundir.checkpoints)
        return newest is not None and directory.read_marker(newest).run.data is None
    return False


def _unresumable(rundir: RunDir, run: Run) -> str | None:
    """Why this run cannot use the directory of a run that has taken steps or has a checkpoint: one of the two saves none."""
    saved = load(rundir.run_file).resumable
    if (saved and run.resumable) or rundir.job_is_running:
        return None
    has_steps = any(isinstance(event, Step) for event in read_events(rundir.events_file))
    if not has_steps and not directory.list_checkpoints(rundir.checkpoints):
        return None
    if not saved:
        return "holds a run that saved nothing (checkpoint.save = false) and cannot be resumed"
    return "holds a run that saves checkpoints, and a run with checkpoint.save = false resumes none"


def _differs(rundir: RunDir, run: Run) -> bool:
    try:
        old = load(rundir.run_file)
    except RunError:
        return True  # written by another version, or damaged: leave it alone
    return bool(changed_keys(old, run)) or (run.command.program is None and old.steps != run.steps)


def _create(rundir: RunDir, run: Run) -> None:
    if not rundir.exists:  # otherwise it holds this run, whose rows are decided
        refuse(vocabulary_question(run))
    try:
        rundir.create()
        for folder in (rundir.path, rundir.checkpoints):
            run_checks.try_writing(folder)
    except OSError as error:
        where = os.path.abspath(error.filename or rundir.path)
        raise RunError(
            f"The run directory {rundir.path} cannot be written ({error.strerror}: {where}): choose another with --run-dir."
        ) from None


class _Resumption(NamedTuple):
    resumes: bool = False
    """There is a checkpoint to resume from."""
    notices: tuple[str, ...] = ()
    changed: SettingsChanged | None = None


def _check_resumption(rundir: RunDir, planned: PlannedRun, data: Dataset, request: Request) -> _Resumption:
    """Whether there is a checkpoint to resume from, notices about it, and what has changed since.

    A run whose text has changed is not resumed unless the user asks, or has named other text: its position in the data means something else
    now. A run that saves no checkpoints has a directory of its own, and begins at step 0.
    """
    run, plan = planned.run, planned.plan
    if not run.checkpoint.save:
        return _Resumption()
    searched = run_checks.locations(run, rundir)
    path, _ = directory.newest(searched)
    if path is None:
        run_checks.check_lost(searched, rundir)
        before = rundir.run_file.read_text() if rundir.exists else dump(run)
        changed = changed_settings.settings_changed(before, run, 0)
        told = () if request.directory is not None or request.fresh else changed_settings.other_run_notices(rundir, run)
        return _Resumption(False, tuple(told), changed)
    saved = directory.read_marker(path)
    if path.parent != open_location(rundir.checkpoints):
        run_checks.check_owner(path, saved, run, new=not rundir.exists, fresh=request.fresh, change=request.change)
    if run.lora.rank is not None:
        check_base(run.model.from_, saved.run.base, path)
    replicas = saved.run.replicas or plan.layout.data
    if replicas != plan.layout.data:
        raise RunError(
            f"{path} holds {replicas} replicas, each with a state of its own (optimizer.sync_every = "
            f"{run.optimizer.sync_every}), so it cannot continue with layout.data = {plan.layout.data}: set "
            f"layout.data = {replicas}, or start again with --fresh or another --run-dir."
        )
    changed = changed_settings.settings_changed(saved.run.run or dump(run), run, saved.step)
    keys = changed.changes if changed is not None else {}
    if request.change and "train.steps" in keys and run.steps <= saved.step:
        raise RunError(
            f"train.steps = {run.steps}, but the run in {rundir.path} has taken {saved.step} steps: set it to more to continue the run."
        )
    if saved.run.data == data.fingerprint:
        return _Resumption(True, (), changed)
    text = f"The text of {run_checks.source_names(run)} has changed since {path} was saved"
    if request.accept_changed_data or any(key.startswith("data.") for key in keys):
        notice = f"{text}: as requested, the run continues at the same position of the new text."
        return _Resumption(True, (notice,), changed)
    raise RunError(
        f"{text}, so the run cannot continue where it stopped: restore the files, continue anyway with "
        f"--accept-changed-data, or start again with --fresh or another --run-dir. `phalanx data preview {RUN_FILE} "
        f"--step {saved.step + 1}` shows what the next step would read."
    )
