"""The whole run, simulated many times: how much of the time counts, when it ends, how many spare nodes pay, how often to save. The CLI
calls `simulate`; `planning/simulate/simulated_run` plays each run with the live recovery policy."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.simulate.cluster_model import Judge, Setting
from phalanx.planning.simulate.simulated_faults import Dice
from phalanx.planning.simulate.simulated_run import SPENT, World, play
from phalanx.planning.simulate.simulation_report import Ask, Band, Simulated, Tried
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

_STUDIED = 6
"""Runs for each number of spares and each interval: they meet the same failures, so that few tell them apart."""
_AROUND = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)
"""Intervals that are tried, times the closed form's best."""


def simulate(run: Run, hardware: Hardware, option: Candidate, ask: Ask, judge: Judge) -> Simulated:
    """`option`: the layout that is wanted, with its promise; `judge`: of another layout."""
    began = time.process_time()
    _check(hardware, option, ask)
    setting = Setting(run, hardware, option, ask, judge)
    world = setting.world
    trials = [play(world, Dice(ask.seed, number)) for number in range(ask.runs)]
    study = _Study(setting, hardware, ask)
    intervals, spares = (study.intervals(), study.spares()) if ask.study else ((), ())
    return Simulated(
        option=option,
        ranks=option.layout.ranks,
        runs=ask.runs,
        nodes=world.nodes,
        spares=world.nodes - setting.used,
        keep=setting.keep,
        interval=setting.interval,
        mtbf=setting.mtbf if math.isfinite(setting.mtbf) else None,
        goodput=_band([one.goodput for one in trials]),
        finish=_band([setting.days(one) for one in trials]),
        closed=setting.closed(setting.interval),
        best=setting.best,
        failures=_mean(one.components for one in trials),
        actions=_mean(one.actions for one in trials),
        spent={name: sum(one.spent[name] for one in trials) / sum(one.seconds for one in trials) for name in SPENT},
        intervals=intervals,
        spare_nodes=spares,
        pays=int(min(spares, key=lambda one: (one.cost, one.value)).value) if spares else None,
        priced=hardware.price is not None,
        trial=trials[0],
        decisions=world.situations.asked,
        seconds=time.process_time() - began,
        assumed=setting.assumed(),
    )


def _check(hardware: Hardware, option: Candidate, ask: Ask) -> None:
    given = {"--days": ask.days, "--interval": ask.interval, "--runs": ask.runs}
    problems = [
        f"{name} {value}: give a number above 0." for name, value in given.items() if value is not None and not value > 0
    ]
    if ask.spares is not None and ask.spares < 0:
        problems.append(f"--spares {ask.spares}: give 0 or more nodes.")
    if ask.maintenance is not None and ask.maintenance[1] >= ask.maintenance[0]:
        problems.append(
            "--maintenance: a pause must be shorter than the time between two: give how often and how long, such as 7d/4h."
        )
    if option.layout.ranks > hardware.gpus:
        problems.append(
            f"The layout has {option.layout.ranks:,} ranks but the cluster {hardware.gpus:,} devices: "
            "set cluster.gpus to at least as many, or leave layout.data out."
        )
    if problems:
        raise RunError(problems)


class _Study:
    """Variations of one setting."""

    def __init__(self, setting: Setting, hardware: Hardware, ask: Ask):
        self._setting, self._hardware, self._ask = setting, hardware, ask

    def intervals(self) -> tuple[Tried, ...]:
        """How often to save."""
        s = self._setting
        if s.best is None:
            return ()
        tried = sorted({max(s.step, round(s.best * factor / s.step) * s.step) for factor in _AROUND})
        return tuple(self._tried(one, replace(s.world, saves=s.saves(one)), s.closed(one)) for one in tried)

    def spares(self) -> tuple[Tried, ...]:
        """How many nodes to keep idle."""
        s = self._setting
        if s.used == 1 or self._hardware.failures is None:
            return ()
        have = s.world.nodes - s.used
        numbers = sorted({0, 1, 2, 4, 8, 16, have} if have <= 16 else {0, 4, 8, 16, have // 2, have})
        return tuple(self._tried(one, replace(s.world, nodes=s.used + one), None) for one in numbers)

    def _tried(self, value: float, world: World, closed: float | None) -> Tried:
        trials = [play(world, Dice(self._ask.seed, number)) for number in range(min(self._ask.runs, _STUDIED))]
        days = fmean(self._setting.days(one) for one in trials)
        hours = world.nodes * self._hardware.node * days * 24
        return Tried(value, fmean(one.goodput for one in trials), closed, days, hours * (self._hardware.price or 1.0))


def _band(values: Sequence[float]) -> Band:
    ordered = sorted(values)

    def at(part: float) -> float:
        place = part * (len(ordered) - 1)
        low = math.floor(place)
        return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

    return Band(fmean(ordered), at(0.1), at(0.9))


def _mean(counters: Iterable[Counter[str]]) -> dict[str, float]:
    every = list(counters)
    total: Counter[str] = sum(every, Counter())
    return {name: count / len(every) for name, count in total.most_common()}
