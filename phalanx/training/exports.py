"""Exports every checkpoint for transformers, in a process of its own while training goes on, and checks the export against the logits
of the live model. `training/saving` reports saves to it on rank 0; all ranks compute the logits together.

One export runs at a time. When it ends, the newest waiting checkpoint is next, and older ones are not exported. A checkpoint that is
being exported or waits for it is protected from pruning.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.checkpointing.directory import PARTIAL
from phalanx.checkpointing.hf_folder import ReferenceLogits
from phalanx.checkpointing.location import Location, open_location
from phalanx.checkpointing.upload import Job, NewestFirst
from phalanx.events.records import Event, Exported, ExportFailed
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.live_logits import length_unit, live_logits
from phalanx.training.step import Stepper

LOGITS = ".logits"
"""The reference logits of an export lie next to its folder, under the folder's name with this suffix."""
_PROMPT_TOKENS = 16
"""Tokens of the prompt, or the fewest that the layout can divide; at most as many rows of logits are kept."""


@dataclass(frozen=True)
class _Export(Job):
    target: Path
    reference: ReferenceLogits
    requested: float

    def failed(self, reason: str) -> ExportFailed:
        return ExportFailed(step=self.step, path=str(self.target), reason=reason)


class Exports(NewestFirst[_Export]):
    """The exports of one run, in one folder."""

    def __init__(self, folder: Path, *, enabled: bool = True):
        """Not `enabled`: expects nothing, and so exports nothing."""
        super().__init__("exports")
        self._folder, self._enabled = folder, enabled
        self._expected: dict[int, ReferenceLogits] = {}
        self._process: subprocess.Popen[str] | None = None
        if enabled:
            for leftover in folder.glob(f"*{PARTIAL}"):  # of a process that was killed
                _remove(leftover)
            self._thread.start()

    def has(self, name: str) -> bool:
        """Whether the checkpoint of this name has been exported."""
        return (self._folder / name).is_dir()

    def expect(self, step: int, reference: ReferenceLogits) -> None:
        """Sets the logits of the model whose save begins now."""
        if self._enabled:
            with self._changed:
                self._expected[step] = reference

    def on_saved(self, checkpoint: Location) -> None:
        """Exports a complete checkpoint. Called from the saver's thread."""
        step = Job(checkpoint).step
        with self._changed:
            reference = self._expected.pop(step, None)
            self._expected = {later: logits for later, logits in self._expected.items() if later > step}
        if reference is not None:
            self._put(_Export(checkpoint, self._folder / checkpoint.name, reference, time.perf_counter()))

    def _skip(self, older: _Export, newer: _Export) -> None:
        reason = f"step {newer.step} was saved before its turn had come: exports take longer than the time between saves"
        self._ended.append(older.failed(reason))

    def on_pruned(self, names: list[str]) -> None:
        """Removes the exports of checkpoints that were removed."""
        for name in names if self._enabled else ():
            _remove(self._folder / name)
            _remove(self._folder / f"{name}{LOGITS}")

    def close(self) -> None:
        with self._changed:
            self._closing = True
            if self._process is not None:
                self._process.kill()
        super().close()

    def _do(self, job: _Export) -> Event:
        try:
            return self._export(job)
        except OSError as error:
            return job.failed(str(error))

    def _export(self, job: _Export) -> Event:
        target = job.target
        logits, partial = target.with_name(f"{target.name}{LOGITS}"), target.with_name(f"{target.name}{LOGITS}{PARTIAL}")
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in (target, logits):  # of the same step before a rollback
            _remove(old)
        try:
            job.reference.write(partial)
            result = self._run([str(job.checkpoint), str(target), str(partial), str(os.getpid())])
            if "error" in result:
                return job.failed(result["error"])
            partial.rename(logits)
        finally:
            _remove(partial)
        seconds = time.perf_counter() - job.requested
        return Exported(step=job.step, path=str(target), seconds=seconds, difference=result["difference"])

    def _run(self, arguments: list[str]) -> dict[str, Any]:
        """Runs the export process; returns the JSON on its last line, or why there is none."""
        # -P: a file in the working directory with the name of a module must not shadow it.
        command = [sys.executable, "-P", "-m", "phalanx.evaluation.export_process", *arguments]
        with self._changed:
            if self._closing:
                return {"error": "the run has ended"}
            # A session of its own: Ctrl-C is for the launcher, which asks the ranks to stop.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        output, errors = self._process.communicate()
        with self._changed:
            code, self._process = self._process.returncode, None
        result: dict[str, Any] = {}
        with suppress(ValueError, IndexError):
            result = json.loads(output.splitlines()[-1])
        if code and "error" not in result:
            cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            result = {"error": f"its process ended by {cause}{': ' + errors.splitlines()[-1] if errors else ''}"}
        return result


def _remove(path: Path) -> None:
    """Removes a file or folder. A folder is renamed first, so that a folder of its name is complete even if this is interrupted."""
    if path.is_dir() and not path.name.endswith(PARTIAL):
        path = path.rename(path.with_name(f"{path.name}.removed{PARTIAL}"))
    open_location(path).remove()


def prompt(run: Run, layout: Layout) -> np.ndarray:
    """Token ids that follow from seed and vocabulary; as many as ranks that share sequences can divide evenly."""
    unit = length_unit(run, layout)
    length = min(run.train.sequence_length, -(-_PROMPT_TOKENS // unit) * unit)
    generator = np.random.default_rng([run.train.seed, run.model.rows])
    return generator.integers(run.model.rows, size=length)


def reference_logits(stepper: Stepper, run: Run, plan: Plan) -> ReferenceLogits:
    """The live model's logits of the prompt, the same on every rank; all ranks call it together."""
    tokens_S = prompt(run, plan.layout)
    kept_K = np.unique(np.linspace(0, len(tokens_S) - 1, _PROMPT_TOKENS).round().astype(np.int64))
    whole_KV = live_logits(stepper, run, plan.layout, tokens_S, kept_K)
    precision = run.precision
    return ReferenceLogits(
        torch.from_numpy(tokens_S),
        torch.from_numpy(kept_K),
        whole_KV.cpu(),
        plan.compute,
        precision.fp8_scaling,
        run.fp8_blocks,
        precision.fp8_experts,
    )
