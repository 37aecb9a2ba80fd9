"""What is proven: a run made small enough for CPU ranks, and the same run as one process would train it.
`verification/parity` makes one for each layout it is asked about."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from phalanx.data.dataset import open_dataset
from phalanx.launch.model_check import measure
from phalanx.planning.planner import choose
from phalanx.spec.check import check
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan
from phalanx.spec.run import Checkpoint, Cluster, Memory, Optimizer, Run, Source
from phalanx.spec.sources import kind
from phalanx.verification.small import TINY, fit, shrink

MOST_RANKS = 8
"""Ranks that a laptop carries without complaint."""
EPS = 1e-4
"""Adam divides by the root of a square: at its usual 1e-8 a gradient of nearly nothing becomes a full step in a direction that
rounding chose. Gradients that agree to 6e-7 then give parameters 4.5e-4 apart after 3 steps; with 1e-4 they stay 2e-6 apart."""
COARSE_EPS = 1e-2
"""The same for numbers of 16 bits and fewer, whose gradients agree to 1e-2 at best: biases, which begin at zero, would be one step
apart after the first."""
_RATE = 1e-3
"""The learning rate of proofs: a step moves parameters by far more than is accepted, so that a wrong one shows, and by so little
that what rounding does to one step is not blown up in the next."""
_TOKENS = 4096  # of a batch, up to which it is taken as it is
_LENGTH = 24
_ROOM = Machine(host="proof", cpu="any", cores=64, memory=1 << 50)  # whether the real one can carry it shows soon enough


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One proof."""

    run: Run
    plan: Plan
    alone: Run
    """The same for one process, without anything that trades something for memory."""
    alone_plan: Plan
    steps: int
    folder: str = "."
    """Where files go that a technique keeps beside its run."""
    said: tuple[str, ...] = ()
    """What differs from the run as it was given, a sentence each."""

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def coarsest(self) -> str:
        """What decides how close two computations can come: the coarsest numbers that take part. A key of `compare.RANGES`."""
        precision, numbers = self.run.precision, str(self.plan.compute)
        if numbers == "fp32" and "bf16" in (precision.reduce, precision.optimizer):
            numbers = "bf16"
        if numbers == "fp32" and self.run.optimizer.name == "muon":
            numbers = "muon"
        return "experts" if self.run.model.moe is not None and numbers != "fp32" else numbers


def make(run: Run, *, ranks: int | None = None, steps: int = 8) -> Case:
    """The proof of a run: `ranks` at most, `steps` optimizer steps. Raises RunError where it cannot be made."""
    said: list[str] = []
    layout = _layout(run, ranks, said)
    run = replace(run, layout=layout, cluster=Cluster(device="cpu", threads=1), checkpoint=Checkpoint())
    run = _data(_sizes(run, said), said)
    run = replace(run, optimizer=_optimizer(run, said), train=replace(run.train, steps=steps, tokens=None, eval_every=None))
    if problems := check(run):
        raise RunError(problems)
    open_dataset(run.data, run.train.sequence_length, run.train.seed)  # what is wrong with the text is told before ranks start
    alone = replace(run, layout=Layout(data=1), memory=Memory())
    return Case(run=run, plan=_plan(run), alone=alone, alone_plan=_plan(alone), steps=steps, said=tuple(said))


def _plan(run: Run) -> Plan:
    return choose(run, _ROOM, run.layout.ranks, measure(run))


def _layout(run: Run, ranks: int | None, said: list[str]) -> Layout:
    layout, most = run.layout, ranks or MOST_RANKS
    if layout.data is None:
        wanted = max(1, most // layout.ranks) if ranks else (2 if layout.ranks == 1 else 1)
        layout = replace(layout, data=wanted)
        said.append(f"layout.data is left out; the proof takes {wanted}.")
    fitted, words = fit(layout, most)
    said += words
    return fitted


def _sizes(run: Run, said: list[str]) -> Run:
    """A small model and a small batch that the layout divides, unless they are small already."""
    layout, model = run.layout, run.model
    tiny = model.module is not None or model.parameters() <= TINY
    unit = 2 * layout.context * layout.tensor  # a piece from either end of each context rank's share, cut for each tensor rank
    stages = layout.pipeline * layout.stages_per_rank if layout.pipeline > 1 else 2
    micro = run.train.micro_batch or (1 if run.batch % (2 * stages * layout.replicas) else 2)
    given = replace(run, model=replace(model, from_=None), train=replace(run.train, micro_batch=micro))
    if tiny and run.batch_tokens <= _TOKENS and not check(given):
        return given
    micro = min(micro, 2)
    smallest = layout.replicas * micro * stages
    length = -(-min(_LENGTH, run.train.sequence_length) // unit) * unit
    if not tiny:
        small = shrink(model, layout, length)
        said.append(
            f"A model of the same family with {small.parameters():,} parameters stands for the {model.parameters():,} of the run."
        )
        model = small
    said.append(f"Batches are of {smallest} sequences of {length} tokens.")
    train = replace(run.train, sequence_length=length, batch=smallest, batch_tokens=None, micro_batch=micro)
    return replace(run, model=replace(model, from_=None), train=train)


def _data(run: Run, said: list[str]) -> Run:
    data = replace(run.data, eval_fraction=0.0)
    near = kind(data) in ("stdlib", "memory", "text") and not any("://" in path for path in data.paths)
    if data.tokenizer == "byte" and near and not data.mix:
        return replace(run, data=data)
    said.append("Its text is not at hand or has another tokenizer: random documents stand for it.")
    plain = {name: getattr(Source(), name) for name in ("paths", "split", "config", "streaming", "template", "epochs", "field")}
    data = replace(
        data, source="memory", documents=documents(run.train.seed), tokenizer="byte", end_token=None, mix=(), **plain
    )
    return replace(run, data=data)


def documents(seed: int, count: int = 300) -> tuple[str, ...]:
    """Random texts of uneven lengths: most windows hold several, so masks and ignored targets take part."""
    dice = random.Random(seed)
    return tuple("".join(chr(dice.randrange(32, 127)) for _ in range(dice.choice([2, 5, 9, 17, 60]))) for _ in range(count))


def _optimizer(run: Run, said: list[str]) -> Optimizer:
    given, precision = run.optimizer, run.precision
    coarse = precision.compute not in (None, "fp32") or "bf16" in (precision.reduce, precision.optimizer)
    eps = max(COARSE_EPS if coarse else EPS, given.eps)
    said.append(
        f"The learning rate is {_RATE:g} from the first step on. optimizer.eps is {eps:g} in place of {given.eps:g}: "
        "with less, Adam turns rounding errors of tiny gradients into steps."
    )
    changed = replace(given, eps=eps, learning_rate=_RATE, warmup_steps=0)
    return replace(changed, schedule="constant", decay_steps=None)
