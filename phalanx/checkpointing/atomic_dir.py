"""A directory that is there whole or not at all: written beside its name, renamed at the end. For whatever writes models and
checkpoints to a place of a person's choice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.spec.errors import RunError, RunFailed


def refuse_taken(out: Path) -> None:
    """RunError where a name is taken by something other than an empty directory."""
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise RunError([f"{out} is already there: name a new directory, or an empty one."])


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A directory to write into that takes the name `out` when all went well, and else leaves nothing."""
    refuse_taken(out)
    unfinished = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # from an attempt that was killed
        unfinished.mkdir(parents=True)
        yield unfinished
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise RunFailed(f"{out} could not be written: {_reason(error)}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _reason(error: OSError) -> str:
    if not error.strerror:
        return str(error)
    return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
