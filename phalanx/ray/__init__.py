"""For programs that use Ray: trains a run on the nodes of a Ray cluster, with the interface of Ray Train's trainers.

    from phalanx.ray import PhalanxTrainer

    result = PhalanxTrainer("run.toml", run_dir="/shared/runs/mine").fit()
    print(result.metrics["loss"], result.checkpoint)

The calling process is the launcher: a program that is connected to Ray already, a notebook, or the entry point of a Ray job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.control.protocol import stop_code
from phalanx.events.records import Event, Saved, Step
from phalanx.launch.job import Job
from phalanx.launch.prepare import Request, prepare
from phalanx.launch.ray import Ray
from phalanx.spec.errors import RunFailed, toml
from phalanx.spec.json_value import Json
from phalanx.spec.load import load, loads
from phalanx.spec.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a run has ended. `metrics`, `checkpoint`, `path` and `error` mean what they mean in Ray Train."""

    metrics: dict[str, float]
    """Of the last step: step, loss, learning_rate, grad_norm, seconds, tokens_per_second. Empty if the run has taken none."""
    checkpoint: str | None
    """Path or URL of the newest checkpoint that this launch has saved."""
    path: Path
    """The run directory."""
    error: RunFailed | None
    """Why the run failed; None: it has finished, or was asked to stop."""
    stopped: bool
    """It was asked to stop. It has saved, and continues with the next `fit`, unless `checkpoint.save = false`."""


class PhalanxTrainer:
    """A run on a Ray cluster."""

    def __init__(
        self,
        run: Run | str | Path | Mapping[str, Mapping[str, Json]],
        *,
        run_dir: str | Path | None = None,
        address: str | None = None,
        on_event: Callable[[Event], None] | None = None,
    ):
        """`run`: a run, a run file, or its tables as a dictionary such as {"train": {"steps": 100}}. Raises RunError if it is wrong.

        `run_dir`: default runs/NAME, as on the command line; name a folder that outlives the Ray job to resume in it. `address`: of the
        cluster, unless this process is connected to one; `on_event`: called with every event, such as `Step`.
        """
        self._name = Path(run).stem if isinstance(run, str | Path) else "run"
        if isinstance(run, str | Path):
            run = load(run)
        elif isinstance(run, Mapping):
            run = loads("\n".join(f"{table} = {toml(keys)}" for table, keys in run.items()))
        cluster = replace(run.cluster, launcher="ray", ray_address=address or run.cluster.ray_address)
        self._run, self._on_event = replace(run, cluster=cluster), on_event
        self._request = Request(directory=None if run_dir is None else Path(run_dir))

    def fit(self) -> Result:
        """Train until the run has finished, failed or was asked to stop. An unfinished run in the run directory is resumed.

        Raises RunError if the run cannot start on this cluster.
        """
        name = (self._request.directory or Path(self._name)).name
        with Ray(self._run, name) as launcher:
            job = Job(prepare(self._run, name, self._request, started_by=launcher))
            step, saved, error = self._follow(job)
        names = ("step", "loss", "learning_rate", "grad_norm", "seconds", "tokens_per_second")
        return Result(
            metrics={} if step is None else {name: getattr(step, name) for name in names},
            checkpoint=None if saved is None else saved.path,
            path=job.rundir.path,
            error=error,
            stopped=job.exit_code == stop_code(self._run),
        )

    def _follow(self, job: Job) -> tuple[Step | None, Saved | None, RunFailed | None]:
        step: Step | None = None
        saved: Saved | None = None
        try:
            for event in job.events():
                step = event if isinstance(event, Step) else step
                saved = event if isinstance(event, Saved) else saved
                if self._on_event is not None:
                    self._on_event(event)
        except RunFailed as failure:
            return step, saved, failure
        return step, saved, None
