"""From what a person names to a checkpoint and the run it belongs to: a checkpoint, or a run directory. Used by generate."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpointing import disk
from phalanx.checkpointing.location import Location, at
from phalanx.spec.errors import RunError


def find(path: Path) -> tuple[Location, Path]:
    """(checkpoint, run file). A run directory stands for its newest valid checkpoint."""
    if not path.is_dir():
        raise RunError(
            [
                f"{path} is not a directory: name a checkpoint such as runs/quickstart/checkpoints/step-00000300, or a run directory."
            ]
        )
    if (path / disk.MARKER).is_file() or path.parent.name == "checkpoints":
        disk.verify(path)
        checkpoint, run_file = at(path), path.parent.parent / "run.toml"
    else:
        found, damaged = disk.newest_valid(path / "checkpoints")
        if found is None:
            why = "; ".join(str(bad) for bad in damaged) or f"there is none in {path / 'checkpoints'}"
            raise RunError([f"{path} has no checkpoint to load ({why}): train first, or name another directory."])
        checkpoint, run_file = found, path / "run.toml"
    if not run_file.is_file():
        raise RunError([f"{checkpoint} has no run file at {run_file}: a checkpoint is read together with its run directory."])
    return checkpoint, run_file
