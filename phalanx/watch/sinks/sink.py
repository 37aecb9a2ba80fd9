"""What a sink of records is, and the names of all sinks. `watch/run_sinks` runs them, outside of the ranks.

A sink is a file with a function `open_sink`, an entry of `SINKS` and a key of the run file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

from phalanx.events.records import Event
from phalanx.events.rundir import RunDir
from phalanx.spec.run import Run, Watch


class Sink(Protocol):
    """Takes the records of a run, in a thread of its own."""

    def receive(self, events: Sequence[Event]) -> None:
        """Take the next records, in their order. Without any, all are read and time has passed: this is called about once a second then.

        Raises any exception if the records could not be taken: they are given again later."""

    def close(self) -> None:
        """The run is over, and all records were given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkSettings:
    """What a sink may know."""

    run: Run
    """Without secrets."""
    rundir: RunDir
    warn: Callable[[str], None]
    """Tells the user a sentence, in the records of the run: the first of each sink."""
    alert_url: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.rundir.path.absolute().name


@dataclass(frozen=True, slots=True)
class SinkKind:
    """One sink."""

    module: str
    """File below this folder."""
    wanted: Callable[[Watch], bool]
    """Whether a run asks for it."""
    key: str = ""
    """How a run file asks for it."""
    package: str | None = None
    """Package that it imports."""
    extra: str = ""
    """Extra of Phalanx that installs the package."""
    seconds: float = 0.25
    """Between two looks at the events: a sink that sends a request for each gets more records at once."""
    from_launch: bool = False
    """It never gets records of an earlier launch."""

    @property
    def installed(self) -> bool:
        """Whether its package is there."""
        try:
            return self.package is None or find_spec(self.package) is not None
        except ModuleNotFoundError:  # the package above it
            return False

    def open(self, settings: SinkSettings) -> Sink:
        """Raises whatever is wrong."""
        return cast(Sink, import_module(f"{__package__}.{self.module}").open_sink(settings))


SINKS: dict[str, SinkKind] = {
    "tensorboard": SinkKind(
        "tensorboard_sink", lambda watch: watch.tensorboard, "watch.tensorboard = true", "tensorboard", "watch"
    ),
    "wandb": SinkKind("wandb_sink", lambda watch: watch.wandb, "watch.wandb = true", "wandb", "wandb"),
    "mlflow": SinkKind("mlflow_sink", lambda watch: watch.mlflow, "watch.mlflow = true", "mlflow", "mlflow", seconds=3.0),
    "otlp": SinkKind(
        "otlp_sink",
        lambda watch: watch.otlp is not None,
        "watch.otlp",
        "opentelemetry.exporter.otlp.proto.http",
        "otel",
        seconds=2.0,
        from_launch=True,
    ),
    "alerts": SinkKind("alert_sink", lambda watch: watch.alerts.url is not None, "watch.alerts.url", from_launch=True),
}
"""Every sink by its name."""


def sinks_of(watch: Watch) -> dict[str, SinkKind]:
    """The sinks that a run asks for."""
    return {name: kind for name, kind in SINKS.items() if kind.wanted(watch)}
