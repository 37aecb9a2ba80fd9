"""`phalanx verify --chaos`: the same small run twice, as its own commands, once undisturbed and once with faults of every kind; and
whether both went the same way. Nothing may be left running or half-written after either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from phalanx.checkpointing.find_checkpoint import locate
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.tools.diff import Difference, compare
from phalanx.events.fault_log import FaultClaims
from phalanx.events.records import Recovered
from phalanx.faults.draw import draw_faults
from phalanx.faults.grammar import Fault, check, parse
from phalanx.host.process_tree import adopt_orphans
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run
from phalanx.verification.aftermath import Strike, Verdict, judge, of_strikes, same_layout, strikes
from phalanx.verification.case import make
from phalanx.verification.command import Side, train
from phalanx.verification.tolerance import RANGES, Range

RANKS, NODES = 4, 2
STEPS = 80
"""Of the standard campaign, at least."""
STANDARD = (
    "kill rank=3 step=6; kill rank=0 step=10 during=update; kill rank=1 step=14 during=collective; raise rank=2 step=18 in=data; "
    "hang rank=1 step=22 in=data; hang rank=2 step=26 in=collective; hang rank=0 step=30 in=update; "
    "slow rank=2 x3 from=34 to=40; corrupt rank=1 step=42; corrupt rank=2 step=44 what=gradients; nan rank=0 step=47; "
    "fill-disk from=49 for=0.5s; freeze rank=1 step=52 for=1s; drop-link 0-1 step=55 for=1s; kill rank=2 step=57 during=save; "
    "kill rank=3 step=59 during=evaluate; kill node=1 step=62 for=3s; hang rank=0 step=64 for=4s; hang rank=0 step=66 for=4s; "
    "hang rank=0 step=68 for=4s; kill node=0 step=72 for=3s; hang rank=0 step=74 for=4s; hang rank=0 step=76 for=4s; "
    "hang rank=0 step=78 for=4s"
)
"""Of every kind, at every point. A node needs seconds to return: the short hangs behind its loss keep the run going until then."""
_PER_FAULT, _PER_STEP, _AT_LEAST = 40.0, 3.0, 120.0  # seconds after which a run counts as one that does not end


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """What is run."""

    run: Run
    faults: tuple[Fault, ...]
    accepted: Range = RANGES["fp32"]
    """How far the two may be apart where the layout changed on the way."""
    said: tuple[str, ...] = ()
    """What differs from the run as it was given, a sentence each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a campaign came to."""

    campaign: Campaign
    verdicts: tuple[Verdict, ...]
    strikes: tuple[Strike, ...]
    recoveries: int
    steps_lost: int
    seconds: tuple[float, float]
    """Of the undisturbed run and of the disturbed one."""

    @property
    def passed(self) -> bool:
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        run = self.campaign.run
        return {
            "passed": self.passed,
            "layout": asdict(run.layout),
            "ranks": run.layout.ranks,
            "nodes": run.cluster.nodes,
            "steps": run.steps,
            "checks": [verdict.to_json() for verdict in self.verdicts],
            "faults": [strike.to_json() for strike in self.strikes],
            "recoveries": self.recoveries,
            "steps_lost": self.steps_lost,
            "seconds": {"undisturbed": self.seconds[0], "disturbed": self.seconds[1]},
            "said": list(self.campaign.said),
        }


def campaign(run: Run, *, steps: int | None = None, faults: int | None = None, seed: int = 0) -> Campaign:
    """The standard faults, or so many random ones, on a small run of the same family. RunError where that cannot be."""
    steps = steps or max(STEPS, 5 * (faults or 0))
    if faults is None and steps < STEPS:
        raise RunError([f"--steps {steps} is too short for the standard campaign, which needs {STEPS}; or give --faults N."])
    if faults is not None and faults >= steps:
        raise RunError(
            [f"--faults {faults} does not fit into --steps {steps}: at most one fault in a step, and none in the first."]
        )
    case = make(_four_ranks(run), ranks=RANKS, steps=steps)
    small = replace(
        case.run,
        data=replace(case.run.data, eval_fraction=0.05),
        train=replace(case.run.train, eval_every=max(5, steps // 8), eval_sequences=8),
        cluster=replace(case.run.cluster, nodes=NODES),
        checkpoint=replace(case.run.checkpoint, every=max(5, steps // 10), memory_every=1),
        resilience=replace(run.resilience, check_every=1, restarts=max(run.resilience.restarts, 2 * (faults or 20))),
    )
    replicas = small.layout.data or 1
    found = (
        parse(STANDARD)
        if faults is None
        else draw_faults(faults, steps=steps, ranks=RANKS, nodes=NODES, seed=seed, kinds=_kinds(replicas))
    )
    if replicas == 1:
        found = tuple(fault for fault in found if fault.kind != "corrupt")
    said = [*case.said, "State is compared in every step (resilience.check_every = 1) and copied into memory after every step."]
    if replicas == 1:
        said.append("Nothing replicates the state (layout.data = 1), so nobody could notice corruption: it is left out.")
    assert not check(found, RANKS, NODES, steps)
    return Campaign(run=small, faults=found, accepted=RANGES[case.coarsest], said=tuple(said))


def _kinds(replicas: int) -> tuple[str, ...]:
    return tuple(
        kind
        for kind in ("kill", "hang", "slow", "corrupt", "nan", "raise", "fill-disk", "drop-link", "kill-node", "freeze")
        if replicas > 1 or kind != "corrupt"
    )


def _four_ranks(run: Run) -> Run:
    """As many replicas as four ranks have room for."""
    others = run.layout.ranks // (run.layout.data or 1)
    if RANKS % others and others <= RANKS:
        raise RunError(
            [f"--chaos runs on {RANKS} ranks, but the layout without layout.data has {others}, which does not divide them."]
        )
    return replace(run, layout=replace(run.layout, data=max(1, RANKS // others)))


def verify(found: Campaign, say: Callable[[str], None] = lambda words: None) -> Report:
    """Run both and compare. `say`: what happens, a line at a time."""
    adopt_orphans()  # what a run leaves behind comes to this process, and shows
    with TemporaryDirectory(prefix="phalanx-chaos-") as folder:
        file = Path(folder) / "run.toml"
        file.write_text(dump(found.run))
        sides = []
        for name, faults in (("undisturbed", ()), ("disturbed", found.faults)):
            say(f"{name} run: {found.run.steps} steps on {RANKS} ranks of {NODES} nodes")
            sides.append(train(file, Path(folder) / name, faults, _limit(found)))
            say(f"{name} run: exit code {sides[-1].code} after {sides[-1].seconds:.1f} s")
        theirs, ours = sides
        told = strikes(found.faults, ours.events, FaultClaims(ours.directory).times())
        verdicts = [
            *judge(ours.events, theirs.events, found.run.steps, found.accepted.loss),
            _state(ours, theirs, found.accepted.parameters),
            *of_strikes(told),
            *(_left(side) for side in sides),
        ]
    recoveries = [event for event in ours.events if isinstance(event, Recovered)]
    return Report(
        campaign=found,
        verdicts=tuple(verdicts),
        strikes=tuple(told),
        recoveries=len(recoveries),
        steps_lost=sum(event.steps_lost for event in recoveries),
        seconds=(theirs.seconds, ours.seconds),
    )


def _limit(found: Campaign) -> float:
    return max(_AT_LEAST, _PER_FAULT * len(found.faults) + _PER_STEP * found.run.steps)


def _left(side: Side) -> Verdict:
    said = "; ".join(side.left) or "no process, no half-written file, no copy in memory"
    return Verdict(name=f"left by the {side.name} run", passed=not side.left, said=said)


def _state(ours: Side, theirs: Side, accepted: float) -> Verdict:
    """The last checkpoints. On one layout throughout they are the same to the bit; where ranks were fewer for a while, sums were in
    another order."""
    try:
        one, other = (CheckpointReader(locate(side.directory)) for side in (ours, theirs))
    except (RunError, OSError) as error:
        endings = "; ".join(side.said.strip().splitlines()[-1] for side in (ours, theirs) if side.code and side.said.strip())
        return Verdict(name="state", passed=False, said=f"{error} {endings}".strip())
    if one.contents["step"] != other.contents["step"]:
        said = f"the last checkpoint is of step {one.contents['step']}, the undisturbed run's of {other.contents['step']}"
        return Verdict(name="state", passed=False, said=said)
    different = [found for found in compare(one, other) if isinstance(found, Difference)]
    if not different:
        return Verdict(name="state", passed=True, said="weights and optimizer the same in every bit")
    if same_layout(ours.events):
        names = ", ".join(found.name for found in different[:3])
        return Verdict(name="state", passed=False, said=f"{len(different)} tensors differ, such as {names}")
    apart = {found.name: _apart(found, one) for found in different if found.name.startswith("model/")}
    worst = max(apart, key=lambda name: apart[name], default="")
    said = f"weights {apart.get(worst, 0.0):.1e} apart at most, in {worst}; accepted {accepted:.0e}, as the layout changed on the way"
    return Verdict(name="state", passed=all(value <= accepted for value in apart.values()), said=said)


def _apart(found: Difference, saved: CheckpointReader) -> float:
    """In relation to the largest number of the tensor."""
    if found.kind != "values":
        return float("inf")
    largest = max(float(saved.read(found.name, *part).abs().max()) for part in saved.parts(found.name))
    return found.largest / largest if largest else float("inf")
