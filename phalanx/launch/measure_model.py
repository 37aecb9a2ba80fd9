"""What one's own model comes to, and whether weights fit a model. Only torch can build one, so another process is asked.

`launch/prepare` and `phalanx.plan` call it; `worker/measure_process` is what answers.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from phalanx.checkpointing.find_checkpoint import find
from phalanx.host.env import for_python
from phalanx.spec import hf_config
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.origin import origin_folder
from phalanx.spec.plan import Size
from phalanx.spec.run import Run

_PATIENCE = 600.0  # seconds; importing a module may download or compile something


def measure(run: Run) -> Size | None:
    """Parameters of the run's own module; None for the built-in decoder, which counts itself. Whatever is wrong is a RunError."""
    if run.model.module is None:
        return None
    return Size(**_ask(run, f'model.module = "{run.model.module}"'))


def check_weights(run: Run) -> None:
    """Raise RunError unless the weights that `model.from` names, if it does, are there and whole and those of this model."""
    given = run.model.from_
    if given is None:
        return
    folder = origin_folder(given)
    if not folder.is_dir():
        raise RunError(
            [
                f'model.from = "{given}" is not there any more: name a folder of Hugging Face weights, a run directory or a '
                f"checkpoint, taken from {Path.cwd()}."
            ]
        )
    if hf_config.is_folder(folder):
        _ask(run, f'model.from = "{given}"')
    else:
        find(folder)


def _ask(run: Run, named: str) -> dict[str, Any]:
    try:
        # -P: a file of the working directory that is called like a module must not be taken for it.
        done = subprocess.run(
            [sys.executable, "-P", "-m", "phalanx.worker.measure_process"],
            input=dump(run),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            env=for_python(),
        )
    except subprocess.TimeoutExpired:
        raise RunError([f"{named} was not built within {_PATIENCE:.0f} s: look at what it does when imported."]) from None
    answer = _answer(done.stdout)
    if answer is None:
        raise RunError([f"{named} could not be built: its process {_end(done.returncode)}{_last_words(done.stderr)}."])
    if "problems" in answer:
        raise RunError(answer["problems"])
    return answer


def _answer(out: str) -> dict[str, Any] | None:
    """The object on the last line; whatever the module prints stands before it."""
    try:
        answer = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return answer if isinstance(answer, dict) else None


def _end(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no answer"


def _last_words(err: str) -> str:
    lines = err.strip().splitlines()
    return f", saying {lines[-1].strip()!r}" if lines else ""
