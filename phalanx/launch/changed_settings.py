"""Settings that differ from those of the run in a directory: which of them `--change` accepts, how the others are refused, and what is
recorded. Called by `launch/prepare` and `launch/run_checks`."""

from __future__ import annotations

from pathlib import Path

from phalanx.events.log import read_events
from phalanx.events.records import Finished, SettingsChanged, plain
from phalanx.events.rundir import RunDir
from phalanx.spec.dump import Change, changes, recorded_changes, shown
from phalanx.spec.errors import RunError, either
from phalanx.spec.load import load, loads
from phalanx.spec.run import Run


def check_changes(before: Run, after: Run, holder: str, elsewhere: str, *, change: bool) -> None:
    """Raise RunError unless a run continues with these settings. `holder`: where the run is; `elsewhere`: how to start another; `change`:
    the user asks for it."""
    differing = changes(before, after)
    fixed = [found for found in differing if not found.allowed]
    if change:
        if fixed:
            raise RunError([_fixed(found, holder, elsewhere) for found in fixed])
        return
    if not differing:
        return
    remedy = f"{elsewhere}, or undo the change to continue that run"
    if not fixed:
        remedy = f"add --change to continue that run with the new values, {elsewhere}, or undo the change"
    elif len(fixed) < len(differing):
        remedy += f" (--change does not accept {either([found.path for found in fixed])})"
    raise RunError(f"{holder} holds a run with other settings ({'; '.join(map(str, differing))}): {remedy}.")


def _fixed(found: Change, holder: str, elsewhere: str) -> str:
    old = "remove the key" if found.before is None else f"set it back to {shown(found.before)}"
    return (
        f"--change does not accept {found} in the run of {holder}, only learning rate and schedule, weight decay, betas, clipping, steps, "
        f"sources of data and evaluation: {old} to continue that run, or {elsewhere} to start another."
    )


def settings_changed(before: str, after: Run, step: int) -> SettingsChanged | None:
    """The record of a launch that continues with other settings from a state of this step. `before`: the run file of that state."""
    try:
        earlier = loads(before)
    except RunError:  # of another version, whose state is still read
        return None
    found = {change.path: [plain(change.before), plain(change.after)] for change in recorded_changes(earlier, after)}
    return SettingsChanged(step=step, changes=found) if found else None


def directory_to_change(base: Path) -> Path:
    """The directory whose run `--change` continues if none is named: the last of runs/NAME, runs/NAME-2, …"""
    found, number = None, 1
    while RunDir(path := base if number == 1 else base.with_name(f"{base.name}-{number}")).exists:
        found, number = path, number + 1
    if found is None:
        raise RunError(
            f"--change continues a run with other settings, but {base} holds none: remove --change to start one, or name the directory "
            "of the run with --run-dir."
        )
    return found


def other_run_notices(rundir: RunDir, run: Run) -> list[str]:
    """That a new directory is used, because the run in the one before has other settings, which it could have changed."""
    name, _, number = rundir.path.name.rpartition("-")
    if rundir.exists or not number.isdecimal():
        return []
    earlier = RunDir(rundir.path.with_name(name if number == "2" else f"{name}-{int(number) - 1}"))
    try:
        found = recorded_changes(load(earlier.run_file), run)
        deciding = changes(load(earlier.run_file), run)
    except RunError:  # there is none, or one of another version
        return []
    if not found or not all(change.allowed for change in deciding) or is_finished(earlier):
        return []
    return [
        f"{earlier.path} holds an unfinished run with other settings ({'; '.join(map(str, found))}), so a new run starts in "
        f"{rundir.path}: to continue that one with the new values, use --run-dir {earlier.path} --change."
    ]


def is_finished(rundir: RunDir) -> bool:
    """Whether a run has taken all its steps in this directory."""
    return any(isinstance(event, Finished) for event in read_events(rundir.events_file))
