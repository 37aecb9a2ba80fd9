"""The world of a simulated run: what the run file, the catalogue and the plan say of nodes, failures, saves and other layouts.
`planning/simulate/simulate_run` plays runs in it, and in variations of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from phalanx.planning.cost.run_cost import DETECT, best_interval, goodput, upkeep
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.simulate.simulated_faults import kind_of, mean_detection
from phalanx.planning.simulate.simulated_policy import Situations
from phalanx.planning.simulate.simulated_run import Trial, World
from phalanx.planning.simulate.simulated_saves import Keep, Saves
from phalanx.planning.simulate.simulation_report import Ask
from phalanx.recovery.history import WINDOW
from phalanx.recovery.relayout import replicated_elsewhere
from phalanx.schedules.makers import schedule_for
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run

Judge = Callable[[Run, Hardware], Candidate]
"""The step time and memory of a run as its layout says."""

DAY = 86400.0
_STATE = 12
"""Bytes of a parameter that are saved: the weight and Adam's two moments, in fp32."""
_UNASKED = 0.005
"""Part of the time that copies which nobody asked for may take, as in the live trainer."""
_LONGEST = 10.0
"""Times the days without failures, after which a run that does not end is given up."""


class Setting:
    """The world of one question, and what the closed form says of it."""

    def __init__(self, run: Run, hardware: Hardware, option: Candidate, ask: Ask, judge: Judge):
        self._run, self._hardware, self._option, self._ask, self._judge = run, hardware, option, ask, judge
        self._options: dict[Layout, Candidate | None] = {option.layout: option}
        self.step = option.seconds
        self.used = -(-option.layout.ranks // hardware.node)
        self._up = upkeep(hardware, state=state_bytes(run, option.layout), ranks=option.layout.ranks, step=option.seconds)
        self.mtbf = float(self._up.mtbf)
        # What that names whole is here two things: being noticed, which differs by what fails, and starting again.
        self._restart = ask.restart if ask.restart is not None else float(self._up.restart) - DETECT
        self._stall = ask.stall if ask.stall is not None else float(self._up.stall)
        self._written = state_bytes(run, option.layout) * hardware.node / hardware.storage
        situations = Situations(option.layout, hardware.node, self._legal, run.resilience, run.batch)
        self.keep = ask.keep or self._live_keep(situations)
        self.best = None if self.keep == "replicas" or not math.isfinite(self.mtbf) else self._best()
        self.interval = self._interval()
        self.world = World(
            situations=situations,
            nodes=self._nodes(),
            failures=hardware.failures,
            step=self._seconds,
            saves=self.saves(self.interval),
            restart=self._restart,
            repair=ask.repair,
            relaunch=ask.relaunch,
            horizon=ask.days * DAY if ask.days is not None else _LONGEST * option.days * DAY,
            steps=run.steps,
            maintenance=ask.maintenance,
        )

    # --- the world ---

    def _live_keep(self, situations: Situations) -> Keep:
        """As control/recover has it: copies where a node holds what no other does."""
        alike = self._run.optimizer.sync_every == 1
        if (
            self._run.checkpoint.memory_every is None
            and alike
            and replicated_elsewhere(self._option.layout, situations.first.assignment)
        ):
            return "replicas"
        return "memory" if self._up.in_memory or self._run.checkpoint.memory_every is not None else "disk"

    def _nodes(self) -> int:
        asked = self._ask.spares if self._ask.spares is not None else self._run.resilience.spares
        return self.used + asked if asked or self._ask.spares is not None else max(self._hardware.nodes, self.used)

    def _disk(self) -> tuple[float, float]:
        """Seconds that training waits for a checkpoint, and those until it is complete behind training."""
        if self._ask.stall is not None:
            return self._ask.stall, 0.0
        return (self._stall, self._written) if self._run.checkpoint.async_save else (self._stall + self._written, 0.0)

    def _best(self) -> float:
        """The closed form's best interval: not oftener than a step, nor than checkpoints are written."""
        stall, behind = self._disk() if self.keep == "disk" else (self._stall, 0.0)
        return max(float(best_interval(self.mtbf, stall)), behind, self.step)

    def _interval(self) -> float | None:
        """Seconds of training between saves that failures go back to."""
        step, saving = self._option.seconds, self._run.checkpoint
        if self.keep == "replicas":
            return None
        if self._ask.interval is not None:
            return self._ask.interval
        given = saving.memory_every if self.keep == "memory" else saving.every
        if given is not None:
            return given * step
        if self.keep == "memory":  # as often as the trainer makes copies that nobody asked for
            return max(1, math.ceil(self._stall / _UNASKED / step)) * step
        return self.best or _LONGEST * self._option.days * DAY

    def saves(self, interval: float | None) -> Saves:
        every = None if interval is None else max(1, round(interval / self.step))
        stall, behind = self._disk()
        disk = every if self.keep == "disk" else self._run.checkpoint.every
        if disk is None and self.best:  # a run in which everything is lost wants something on disk
            rare = max(float(best_interval(self.mtbf * 100, stall)), behind, interval or 0.0)
            disk = max(1, round(rare / self.step))
        if disk is not None:  # one begins when the one before it is written
            stall += max(0.0, behind - disk * self.step)
        return Saves(
            keep=self.keep,
            memory_every=every if self.keep == "memory" else None,
            memory_stall=self._stall,
            disk_every=disk,
            disk_stall=stall,
            disk_write=behind,
        )

    # --- other layouts ---

    def _seconds(self, layout: Layout) -> float:
        option = self._of(layout)
        assert option is not None, "the policy has asked whether it is legal"
        return option.seconds

    def _legal(self, layout: Layout) -> bool:
        return self._of(layout) is not None

    def _of(self, layout: Layout) -> Candidate | None:
        if layout not in self._options:
            self._options[layout] = self._judged(layout)
        return self._options[layout]

    def _judged(self, layout: Layout) -> Candidate | None:
        """The run on another layout, as control/recover lays it out: with the same batch, and a micro-batch that divides a replica's share."""
        run, option = self._run, self._option
        if run.batch % layout.replicas or (run.optimizer.sync_every > 1 and layout.data != option.layout.data):
            return None
        share = run.batch // layout.replicas
        train = replace(run.train, micro_batch=math.gcd(share, option.micro_batch))
        memory = replace(run.memory, recompute=option.recompute, offload=option.offload)
        run = replace(run, layout=layout, train=train, memory=memory)
        if next(iter(layout_findings(run)), None) is not None:
            return None
        try:
            order = schedule_for(layout, share // math.gcd(share, option.micro_batch))
            if order is not None and order.stages > run.model.layers:
                return None
            judged = self._judge(run, replace(self._hardware, gpus=layout.ranks))
        except RunError:
            return None
        return judged if judged.fits else None

    # --- what is said of it ---

    def days(self, trial: Trial) -> float:
        """Of the whole run, at the pace of this one."""
        steps = max(trial.steps, 1)
        return trial.seconds / DAY if trial.finished else trial.seconds / DAY * self._run.steps / steps

    def closed(self, interval: float | None) -> float:
        """Goodput of the closed form, with nodes enough, for the saves that are simulated."""
        saves, failing = self.saves(interval), self._hardware.failures
        every = {"replicas": 1, "memory": saves.memory_every, "disk": saves.disk_every}[self.keep]
        assert every is not None, "there is an interval where the state is saved"
        stall = saves.memory_stall if self.keep == "memory" else 0.0
        if saves.disk_every is not None:
            stall += saves.disk_stall * every / saves.disk_every
        trained = every * self.step
        if failing is None or not math.isfinite(self.mtbf):
            return trained / (trained + stall)
        restart = self._restart + mean_detection(failing, self._run.resilience, self.step)
        if self.keep == "disk":
            restart += saves.disk_write
        elif self.used == 1 and saves.disk_every is not None:  # who loses the only node goes back to half a checkpoint ago
            lone = sum(rate for name, rate in failing.rates if kind_of(name) == "node") / failing.rate
            restart += lone * (saves.disk_every * self.step / 2 + saves.disk_write)
        return float(goodput(trained, self.mtbf, stall, restart))

    def assumed(self) -> tuple[str, ...]:
        said = [*self._hardware.assumed]
        if self._hardware.failures is None:
            said.append("Nothing fails: no rates are known for these machines.")
        else:
            days = 1 / self._hardware.failures.rate / 24
            said.append(f"A device interrupts a run once in {days:,.0f} days ({self._hardware.failures.source}).")
        if self._run.resilience.node_return is None and self._hardware.failures is not None:
            said.append(f"A lost node is back after {self._ask.repair / 3600:.1f} h on average.")
        said.append(f"From the decision to the next step {self._restart:.0f} s; a save stops training for {self._stall:.2f} s.")
        if self._hardware.failures is not None:
            said.append(
                f"A run that gives up, as after more than resilience.restarts = {self._run.resilience.restarts} failures within {WINDOW:,} "
                f"steps, is started again by somebody after {self._ask.relaunch / 60:.0f} min, from disk."
            )
        return tuple(said)


def state_bytes(run: Run, layout: Layout) -> float:
    """That a rank has to save: its part of weights and moments, which replicas do not each save again."""
    return _STATE * run.model.parameters() / (layout.pipeline * layout.tensor * layout.shard)
