"""The table [watch.alerts]: which alerts of a run go to a webhook, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from phalanx.spec.fields import SECRET, within

AlertKind = Literal["finished", "stopped", "failed", "failure", "recovered", "diverged", "slow", "disk", "save", "waits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alerts:
    """Alerts by webhook. `phalanx alerts test RUN.toml` sends a test message."""

    url: str | None = field(default=None, metadata=SECRET)
    """Webhook that gets a POST with JSON, such as that of Slack or Mattermost. "env:NAME" reads it from an environment variable. It is a secret: no file or message of the run shows it. Default: no alerts."""
    on: tuple[AlertKind, ...] = get_args(AlertKind)
    """Which alerts are sent. "finished", "stopped", "failed": how a launch ends; "failure": a rank or node failed, and the run recovers; "recovered": it has; "diverged": a loss that is not finite, spikes, a rollback, a loss that rises; "slow": throughput fell; "disk": the disk is filling; "save": a checkpoint could not be saved, uploaded or exported; "waits": a rank that the others wait for, or no step for long."""
    every: float = field(default=900.0, metadata=within(0.0))
    """Least seconds between two messages of one kind. What happens in between is counted in the next one. The end of a launch is always reported."""
    diverged_above: float = field(default=1.3, metadata=within(above=1.0))
    """"diverged": the median loss of 10 steps exceeds the lowest median of the launch by this factor, beyond its usual spread."""
    slow_below: float = field(default=0.5, metadata=within(0.0, 1.0))
    """"slow": tokens/s below this fraction of the launch's median, or of what the plan promised."""
    slow_steps: int = field(default=20, metadata=within(1))
    """"slow": for this many steps in a row."""
    disk_checkpoints: int = field(default=3, metadata=within(0))
    """"disk": at the pace of the last checkpoints, there is no space for this many more."""
    disk_gib: float = field(default=1.0, metadata=within(0.0))
    """"disk": less than this many GiB are left for logs and events besides the next checkpoint."""
    stalled_after: float = field(default=10.0, metadata=within(1.0))
    """"waits": no step for this many times the median step, and at least a minute."""
