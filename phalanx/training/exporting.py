"""An export for transformers of every checkpoint, made and compared by a process of its own while training goes on. `Saving` tells
it what was saved, on rank 0; the other ranks only know that it is asked for.

One export at a time. Of those that wait the newest goes first, and the others are not made. A checkpoint that is being exported, or
is about to be, is held: whoever prunes asks `owned` first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.checkpointing.directory import PARTIAL, step_of
from phalanx.checkpointing.hf_folder import ReferenceLogits
from phalanx.checkpointing.location import Location
from phalanx.events.records import Event, Exported, ExportFailed

LOGITS = ".logits"
"""What a folder's checkpoint said in training lies beside it, under its name with this behind."""


class _Job(NamedTuple):
    step: int
    checkpoint: Location
    reference: ReferenceLogits
    asked: float


class Exports:
    """The exports of one run, in one folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.Lock()
        self._expected: dict[int, ReferenceLogits] = {}
        self._waiting: _Job | None = None
        self._running: _Job | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._ended: list[Event] = []
        for left in folder.glob(f"*{PARTIAL}"):  # by a process that was killed
            _remove(left)

    def has(self, name: str) -> bool:
        """Whether the checkpoint of this name has been exported."""
        return (self._folder / name).is_dir()

    def expect(self, step: int, reference: ReferenceLogits) -> None:
        """A save of this step begins; this is what the model says."""
        with self._lock:
            self._expected[step] = reference

    def saved(self, checkpoint: Location) -> None:
        """It is complete: export it. Called from the thread that saves."""
        step = step_of(checkpoint)
        assert step is not None, f"{checkpoint} is named after a step"
        with self._lock:
            reference = self._expected.pop(step, None)
            self._expected = {later: kept for later, kept in self._expected.items() if later > step}
            if reference is None or self._closed:
                return
            if self._waiting is not None:
                reason = f"step {step} was saved before its turn had come: exports take longer than the time between saves"
                self._tell(ExportFailed(step=self._waiting.step, path=str(self._out(self._waiting)), reason=reason))
            self._waiting = _Job(step, checkpoint, reference, time.perf_counter())
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="exports", daemon=True)
                self._thread.start()

    @property
    def owned(self) -> set[str]:
        """Names of checkpoints that must stay for now."""
        with self._lock:
            return {job.checkpoint.name for job in (self._waiting, self._running) if job is not None}

    def pruned(self, names: list[str]) -> None:
        """These checkpoints are gone; so are their exports."""
        for name in names:
            _remove(self._folder / name)
            _remove(self._folder / f"{name}{LOGITS}")

    def ended(self) -> list[Event]:
        """What has ended since this was asked last."""
        with self._lock:
            told, self._ended = self._ended, []
        return told

    def wait(self) -> list[Event]:
        """Until none is under way."""
        self._join()
        return self.ended()

    def close(self) -> None:
        """Give up what is under way."""
        with self._lock:
            self._closed, self._waiting = True, None
            if self._process is not None:
                self._process.kill()
        self._join()

    def _join(self) -> None:
        while (thread := self._thread) is not None:
            thread.join()

    def _work(self) -> None:
        """In a thread of its own, as long as there is something to do. The process that it starts dies with this very thread."""
        while True:
            with self._lock:
                job, self._waiting = self._waiting, None
                self._running = job
                if job is None:
                    self._thread = None
                    return
            try:
                event = self._export(job)
            except OSError as error:
                event = ExportFailed(step=job.step, path=str(self._out(job)), reason=str(error))
            with self._lock:
                self._tell(event)

    def _export(self, job: _Job) -> Event:
        out = self._out(job)
        logits, unfinished = out.with_name(f"{out.name}{LOGITS}"), out.with_name(f"{out.name}{LOGITS}{PARTIAL}")
        out.parent.mkdir(parents=True, exist_ok=True)
        for old in (out, logits):  # of a step that was taken again
            _remove(old)
        try:
            job.reference.write(unfinished)
            found = self._run([str(job.checkpoint), str(out), str(unfinished), str(os.getpid())])
            if "error" in found:
                return ExportFailed(step=job.step, path=str(out), reason=found["error"])
            unfinished.rename(logits)
        finally:
            _remove(unfinished)
        return Exported(step=job.step, path=str(out), seconds=time.perf_counter() - job.asked, difference=found["difference"])

    def _run(self, arguments: list[str]) -> dict[str, Any]:
        """What the command says on its last line, or why it says nothing."""
        # -P: a file of the working directory that is called like a module must not be taken for it.
        command = [sys.executable, "-P", "-m", "phalanx.evaluation.export_process", *arguments]
        with self._lock:
            if self._closed:
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
        said, wrong = self._process.communicate()
        with self._lock:
            code, self._process = self._process.returncode, None
        last = said.splitlines()[-1:]
        try:
            told: dict[str, Any] = json.loads(last[0]) if last else {}
        except ValueError:
            told = {}
        if code and "error" not in told:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            told = {"error": f"its process ended by {how}{': ' + wrong.splitlines()[-1] if wrong else ''}"}
        return told

    def _tell(self, event: Event) -> None:
        self._ended.append(event)

    def _out(self, job: _Job) -> Path:
        return self._folder / job.checkpoint.name


def _remove(path: Path) -> None:
    """A file, or a folder; renamed first, so that what carries its name is whole even if this is cut short."""
    if path.is_dir() and not path.name.endswith(PARTIAL):
        path = path.rename(path.with_name(f"{path.name}.removed{PARTIAL}"))
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
