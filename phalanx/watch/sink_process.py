"""The sinks of a run in a process of their own, beside the launcher, which loads none of what they need."""

from __future__ import annotations

import contextlib
import subprocess

from phalanx.events.log import EventLog
from phalanx.events.records import Warned
from phalanx.events.rundir import RunDir
from phalanx.host.env import secret
from phalanx.host.process_tree import ModuleProcess
from phalanx.spec.dump import dump
from phalanx.spec.json_value import JsonObject
from phalanx.spec.run import Run, Watch
from phalanx.watch.sinks.sink import sinks_of

DRAIN_SECONDS = 15.0
"""Time that all sinks have for the last records after the run is over."""
_STARTS = 4
_GIVEN_UP = (
    f"The process of the run's sinks has ended {_STARTS} times, and is not started again: the run goes on, but TensorBoard, metrics, alerts and others "
    "get no more records of this launch. See logs/sinks.log."
)


class SinkProcess:
    """The sinks of a run, in a process of their own, which ends with this one."""

    def __init__(self, run: Run, rundir: RunDir):
        self._rundir, self._run = rundir, dump(run)
        self._secrets: JsonObject = {
            "alert_url": secret(run.watch.alerts.url),
            "metrics_token": secret(run.watch.metrics_token),
        }
        self._starts = 0
        self._process: ModuleProcess | None = None
        self.keep_running()

    @staticmethod
    def of(run: Run, rundir: RunDir) -> SinkProcess | None:
        """The sinks that a run asks for; None if it asks for none. The first records of the launch are written."""
        wanted = sinks_of(run.watch) or run.watch.metrics_port is not None
        return SinkProcess(run, rundir) if wanted else None

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def _start(self) -> ModuleProcess:
        settings: JsonObject = {"run_dir": str(self._rundir.path.absolute()), "run": self._run}
        return ModuleProcess("phalanx.watch.run_sinks", settings | self._secrets, self._rundir.logs / "sinks.log")

    def keep_running(self) -> None:
        """Start it again if it has died, a few times. Never raises: the run matters more."""
        if self._starts > _STARTS or self.pid is not None:
            return
        self._end(0.0)
        self._starts += 1
        with contextlib.suppress(OSError):
            if self._starts > _STARTS:
                log = EventLog(self._rundir.events_file)
                log.emit(Warned(message=_GIVEN_UP))
                log.close()
            else:
                self._process = self._start()

    def close(self) -> None:
        """The run is over: wait until the sinks have the last records, for a while."""
        self._end(DRAIN_SECONDS + 5.0)

    def kill(self) -> None:
        """Another process takes over."""
        self._end(0.0)

    def _end(self, patience: float) -> None:
        process, self._process = self._process, None
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if process is not None:
                process.close(patience)


def metrics_address(watch: Watch) -> str | None:
    """Where the metrics of a run are served; None if they are not."""
    if watch.metrics_port is None:
        return None
    host = f"[{watch.metrics_host}]" if ":" in watch.metrics_host else watch.metrics_host
    return f"http://{host}:{watch.metrics_port}/metrics"
