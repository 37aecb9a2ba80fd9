"""The run that trials train, and a side of a duel: that run with some keys changed, planned for this machine with nothing left open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from phalanx.planning.machine_fit import PlannedRun
from phalanx.planning.planner import plan_run
from phalanx.planning.request import gib
from phalanx.spec.check import check
from phalanx.spec.errors import RunError, refuse, toml
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.run import Checkpoint, Cluster, Run, Watch

Value: TypeAlias = bool | int | str | Layout | None
Changes: TypeAlias = Mapping[str, Value]
"""Values of keys by their dotted names; "layout" is the whole table."""
_STEPS = 1_000_000
"""More than any trial takes."""


@dataclass(frozen=True)
class Side:
    """One side of a duel."""

    run: Run
    """With layout, micro-batch and memory settings as the plan has chosen them."""
    plan: Plan
    need: float
    """Bytes of the fullest rank."""
    changes: Changes = field(default_factory=dict)
    """Keys that differ from the run file."""

    @property
    def device_bytes(self) -> float:
        """Bytes of the machine's memory that it fills, or of one GPU's."""
        return self.need * (self.plan.ranks if self.plan.device == "cpu" else 1)

    @cached_property
    def name(self) -> str:
        """Its changes in words; "defaults" without any."""
        return ", ".join(map(words_of, self.changes.items())) or "defaults"


def words_of(change: tuple[str, Value]) -> str:
    """A changed key, such as "memory.compile = true"."""
    key, value = change
    if isinstance(value, Layout):
        default = Layout()
        degrees = {name: getattr(value, name) for name in ("pipeline", "data", "shard", "context", "tensor", "expert")}
        named = [f"{name} {degree}" for name, degree in degrees.items() if degree and degree != 1] or ["one rank"]
        named += [f"ZeRO-{value.zero}"] if value.shard > 1 else []
        named += [value.schedule] if value.pipeline > 1 else []
        named += [value.context_method] if value.context > 1 and value.context_method != default.context_method else []
        return f"layout: {', '.join(named)}"
    return f"{key} = {toml(value)}"


def trial_run(run: Run, machine: Machine, ranks: int | None = None) -> tuple[Run, Machine]:
    """The run as trials train it on this machine, without whatever happens between steps, and the part of the machine that it uses.
    `ranks`: tune with so many ranks instead of all. RunError names what cannot be tuned."""
    if run.command.program is not None:
        raise RunError("[command] names a program of its own, which Phalanx does not tune: give a run file with [model].")
    cluster = Cluster(device=run.cluster.device, cpu_ranks=run.cluster.cpu_ranks, threads=run.cluster.threads)
    # The weights that a fine-tuning starts from decide about its losses, but take time to load in every trial.
    needs_weights = run.lora.rank is not None or run.train.objective == "dpo"
    one = replace(
        run,
        model=run.model if needs_weights else replace(run.model, from_=None),
        data=replace(run.data, epochs=None, mix=tuple(replace(source, epochs=None) for source in run.data.mix)),
        train=replace(run.train, tokens=None, steps=_STEPS, eval_every=None, sample_every=None, sample_prompts=()),
        cluster=cluster,
        checkpoint=Checkpoint(save=False),
        watch=Watch(),
    )
    if ranks is not None:
        one, machine = _on_ranks(one, machine, ranks)
    refuse(check(one))
    return one, machine


def _on_ranks(run: Run, machine: Machine, ranks: int) -> tuple[Run, Machine]:
    """The run on so many ranks. A layout keeps everything but its number of replicas, and each replica its share of the batch."""
    on_gpus = bool(machine.gpus) and run.cluster.device != "cpu"
    if on_gpus and ranks > len(machine.gpus):
        raise RunError(f"--ranks {ranks}: this machine has {len(machine.gpus)} GPUs; give at most so many.")
    part = replace(machine, gpus=machine.gpus[:ranks]) if on_gpus else machine
    layout, replica = run.layout, replace(run.layout, data=1).ranks
    if layout == Layout():
        return replace(run, cluster=replace(run.cluster, cpu_ranks=None if on_gpus else ranks)), part
    if ranks % replica:
        raise RunError(f"--ranks {ranks}: a replica of the run's [layout] has {replica} ranks; give a multiple of it.")
    train = run.train
    if layout.data is not None and layout.data != ranks // replica:
        batch = run.batch * (ranks // replica) // layout.data
        if not batch or run.batch * (ranks // replica) % layout.data:
            raise RunError(
                f"--ranks {ranks}: the batch of {run.batch} sequences on {layout.data} replicas leaves no whole share for {ranks // replica}; "
                "give another number of ranks."
            )
        train = replace(train, batch=batch, batch_tokens=None)
    return replace(run, layout=replace(layout, data=ranks // replica), train=train), part


class Planner:
    """Plans sides on one machine."""

    def __init__(self, machine: Machine, size: Size | None = None):
        """`size`: of a custom module."""
        self.machine, self._size = machine, size

    def defaults(self, run: Run) -> Side:
        """The side that `phalanx train` would run. RunError where it would refuse."""
        return _side(plan_run(run, self.machine, None, self._size), {})

    def changed(self, base: Side, changes: Changes) -> Side:
        """A side with further keys changed. RunError where the run or the plan rules that out."""
        run = with_keys(base.run, changes)
        refuse(check(run))
        planned = plan_run(run, self.machine, None, self._size)
        if not planned.has_margin:
            raise RunError(f"does not fit: a rank needs about {gib(planned.need)}")
        return _side(planned, {**base.changes, **changes})


def _side(planned: PlannedRun, changes: Changes) -> Side:
    run, plan = planned.run, planned.plan
    pinned = replace(run, layout=plan.layout, train=replace(run.train, micro_batch=plan.micro_batch))
    return Side(run=pinned, plan=plan, need=planned.need, changes=changes)


def with_keys(run: Run, changes: Changes) -> Run:
    """The run with other values of some keys."""
    for key, value in changes.items():
        table, _, name = key.partition(".")
        part: Any = replace(getattr(run, table), **{name: value}) if name else value
        run = replace(run, **{table: part})
    return run
