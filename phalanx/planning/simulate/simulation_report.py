"""What is asked of a simulation of a whole run, and what it answers: plain values. `planning/simulate/simulate_run` makes the answer, the CLI asks and
shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from phalanx.planning.search.candidate import Candidate
from phalanx.planning.simulate.simulated_run import Trial
from phalanx.planning.simulate.simulated_saves import Keep


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What is asked of a simulation."""

    days: float | None = None
    """Simulated at most; None: until the run ends."""
    seed: int = 0
    runs: int = 20
    spares: int | None = None
    """Nodes beyond those of the layout; None: resilience.spares, or what the cluster has left."""
    interval: float | None = None
    """Seconds between saves; None: as the run file says, or the closed form's best."""
    keep: Keep | None = None
    """Where the state is found again; None: as the live system would have it."""
    restart: float | None = None
    """Seconds from the decision about a failure to the next step; None: planning/cost/run_cost's."""
    stall: float | None = None
    """Seconds that training waits for a save; None: planning/cost/run_cost's."""
    repair: float = 4 * 3600.0
    """Mean seconds until a lost node is back; resilience.node_return wins."""
    relaunch: float = 1800.0
    maintenance: tuple[float, float] | None = None
    """Seconds between planned pauses, and of one."""
    study: bool = True
    """Also try other numbers of spares and other intervals."""


@dataclass(frozen=True, slots=True)
class Band:
    """Over the simulated runs."""

    mean: float
    low: float
    """P10 …"""
    high: float
    """… and P90."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One interval, or one number of spares."""

    value: float
    """Seconds, or nodes."""
    goodput: float
    closed: float | None
    """The closed form's; it knows no shortage of nodes."""
    days: float
    """Of the whole run."""
    cost: float
    """Of the whole run with all nodes, in US dollars; in device-hours where no price is known (Simulated.priced)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """The answers."""

    option: Candidate
    ranks: int
    runs: int
    nodes: int
    spares: int
    keep: Keep
    interval: float | None
    """Seconds of training between saves; None: the state is with other ranks, nothing is saved for failures."""
    mtbf: float | None
    goodput: Band
    finish: Band
    """Days until the last step."""
    closed: float
    """Goodput of the closed form for the same rates, interval, stall and restart."""
    best: float | None
    """Its best interval."""
    failures: dict[str, float]
    """By component, of one run."""
    actions: dict[str, float]
    """restart, spare, shrink, grow, wait, end, maintenance."""
    spent: dict[str, float]
    """Parts of the time by simulate_run.SPENT."""
    intervals: tuple[Tried, ...]
    spare_nodes: tuple[Tried, ...]
    pays: int | None
    """Spare nodes with which the whole run costs least."""
    priced: bool
    trial: Trial
    """The first run: its timeline."""
    decisions: int
    """That the live policy made."""
    seconds: float
    """CPU time that it took."""
    assumed: tuple[str, ...]

    def values(self) -> dict[str, Any]:
        """As programs read it, and displays."""
        kept = (
            "ranks",
            "nodes",
            "spares",
            "keep",
            "closed",
            "failures",
            "actions",
            "spent",
            "pays",
            "priced",
            "decisions",
            "assumed",
        )
        found: dict[str, Any] = {name: getattr(self, name) for name in kept}
        for name, band in (("goodput", self.goodput), ("finish_days", self.finish)):
            found |= {name: band.mean, f"{name}_p10": band.low, f"{name}_p90": band.high}
        found |= {
            "intervals": [asdict(one) for one in self.intervals],
            "spare_nodes": [asdict(one) for one in self.spare_nodes],
        }
        found |= {"interval_seconds": self.interval, "best_interval_seconds": self.best, "mtbf_seconds": self.mtbf}
        found |= {"step_seconds": self.option.seconds, "layout": asdict(self.option.layout), "cpu_seconds": self.seconds}
        found |= {"simulated_days": self.trial.seconds / 86400, "runs": self.runs}
        return found
