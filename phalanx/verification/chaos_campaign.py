"""`phalanx verify --chaos`: trains the same small run twice, undisturbed and with faults of every kind, and compares the two. Neither
may leave processes or incomplete files behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from phalanx.checkpointing.find_checkpoint import locate
from phalanx.checkpointing.replicas import shm_slots
from phalanx.checkpointing.restore import CheckpointReader, Difference, compare
from phalanx.events.fault_log import FaultClaims
from phalanx.events.log import read_events
from phalanx.events.records import Event, Recovered
from phalanx.events.rundir import RunDir
from phalanx.faults.grammar import DEFAULT_KINDS, Fault, check, draw_faults, format_faults, parse
from phalanx.host.process_tree import adopt_orphans, die_with
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run
from phalanx.verification.cases import make_case
from phalanx.verification.fault_outcomes import (
    FaultOutcome,
    Verdict,
    fault_outcomes,
    outcome_verdicts,
    run_verdicts,
    same_layout,
)
from phalanx.verification.tolerance import TOLERANCES, Tolerance

_EXIT_GRACE = 5.0  # seconds within which processes must end after their parent


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """One of the two runs, after its end."""

    name: str
    directory: Path
    code: int | None
    """Exit code; None: it was killed after the time limit."""
    seconds: float
    events: list[Event]
    leftovers: tuple[str, ...]
    """Processes that outlived the run, and incomplete files."""
    output: str
    """The end of its output."""


def train_command(file: Path, directory: Path, faults: Sequence[Fault], limit: float) -> TrainedRun:
    """Trains a run file as a command, for at most `limit` seconds. Call `adopt_orphans` first, so that processes it leaves behind
    become children of this one."""
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--run-dir", str(directory), "--json"]
    if faults:
        command += ["--chaos", format_faults(faults)]
    before, parent, start = _children(), os.getpid(), time.monotonic()
    log = file.with_name(f"{directory.name}.log")
    code: int | None = None
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, preexec_fn=lambda: die_with(parent)
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:  # also where the caller is interrupted: the run ends with everything that it started
            process.kill()
            process.wait()
            seconds = time.monotonic() - start
            survivors = _end_survivors(before)
    return TrainedRun(
        name=directory.name,
        directory=directory,
        code=code,
        seconds=seconds,
        # Records that waited for free disk space are behind later ones in the file.
        events=sorted(read_events(RunDir(directory).events_file), key=lambda event: event.time),
        leftovers=(*survivors, *_incomplete_files(directory)),
        output=log.read_text(errors="replace")[-2000:],
    )


def _children() -> set[int]:
    """Child processes of this one, adopted orphans included."""
    children = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has just ended
        if int(fields[1]) == os.getpid():
            children.add(int(folder.name))
    return children


def _end_survivors(before: set[int]) -> list[str]:
    """Kills processes that outlived a run; returns a description of each."""
    end = time.monotonic() + _EXIT_GRACE
    while (running := _running(_children() - before)) and time.monotonic() < end:
        time.sleep(0.05)
    descriptions = [f"process {pid} ({_command(pid)})" for pid in running]
    while running:  # their children are adopted and come next
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        running = _running(_children() - before)
    return descriptions


def _running(pids: set[int]) -> list[int]:
    """Processes that have not ended; reaps the others."""
    return [pid for pid in sorted(pids) if os.waitpid(pid, os.WNOHANG)[0] == 0]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended"


def _incomplete_files(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*.partial")):
        yield f"{path.relative_to(directory)}, incomplete"
    known = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:8]  # as control/processes names them
    for path in sorted(shm_slots.default_root().glob(f"{known}-*")):
        yield f"{path}, in-memory replicas"


RANKS, NODES = 4, 2
STEPS = 80
"""Minimum number of steps of the standard campaign."""
STANDARD = (
    "kill rank=3 step=6; kill rank=0 step=10 during=update; kill rank=1 step=14 during=collective; raise rank=2 step=18 in=data; "
    "hang rank=1 step=22 in=data; hang rank=2 step=26 in=collective; hang rank=0 step=30 in=update; "
    "slow rank=2 x3 from=34 to=40; corrupt rank=1 step=42; corrupt rank=2 step=44 what=gradients; nan rank=0 step=47; "
    "fill-disk from=49 for=0.5s; freeze rank=1 step=52 for=1s; drop-link 0-1 step=55 for=1s; kill rank=2 step=57 during=save; "
    "kill rank=3 step=59 during=evaluate; kill node=1 step=62 for=3s; hang rank=0 step=64 for=4s; hang rank=0 step=66 for=4s; "
    "hang rank=0 step=68 for=4s; kill node=0 step=72 for=3s; hang rank=0 step=74 for=4s; hang rank=0 step=76 for=4s; "
    "hang rank=0 step=78 for=4s"
)
"""Faults of every kind at every point. A node needs seconds to return: the short hangs after its loss keep the run going until
then."""
_PER_FAULT, _PER_STEP, _MINIMUM = 40.0, 3.0, 120.0  # seconds of the time limit of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """A run and its faults."""

    run: Run
    faults: tuple[Fault, ...]
    accepted: Tolerance = TOLERANCES["fp32"]
    """Tolerance between the two runs if the layout changed during recovery."""
    notes: tuple[str, ...] = ()
    """Differences from the given run, a sentence each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignReport:
    """The result of a campaign."""

    campaign: Campaign
    verdicts: tuple[Verdict, ...]
    outcomes: tuple[FaultOutcome, ...]
    recoveries: int
    steps_lost: int
    seconds: tuple[float, float]
    """Duration of the undisturbed and the disturbed run."""

    @property
    def passed(self) -> bool:
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    def to_json(self) -> dict[str, object]:
        run = self.campaign.run
        return {
            "passed": self.passed,
            "layout": asdict(run.layout),
            "ranks": run.layout.ranks,
            "nodes": run.cluster.nodes,
            "steps": run.steps,
            "checks": [asdict(verdict) for verdict in self.verdicts],
            "faults": [asdict(outcome) for outcome in self.outcomes],
            "recoveries": self.recoveries,
            "steps_lost": self.steps_lost,
            "seconds": {"undisturbed": self.seconds[0], "disturbed": self.seconds[1]},
            "notes": list(self.campaign.notes),
        }


def campaign(run: Run, *, steps: int | None = None, faults: int | None = None, seed: int = 0) -> Campaign:
    """The standard faults, or `faults` random ones, on a small run of the same family. Raises RunError if they do not fit."""
    if run.engine.name == "xla":
        raise RunError(
            '--chaos plants faults inside of steps, and compares states in memory, which engine.name = "xla" has not: use `phalanx train --chaos '
            '"kill rank=0 step=6"\', or set engine.name = "torch".'
        )
    steps = steps or max(STEPS, 5 * (faults or 0))
    if faults is None and steps < STEPS:
        raise RunError(
            f"--steps {steps} is too short for the standard campaign, which needs {STEPS}: raise it, or use --faults N."
        )
    if faults is not None and faults >= steps:
        raise RunError(
            f"--faults {faults} does not fit into --steps {steps}: at most one fault in a step, and none in the first."
        )
    case = make_case(_four_ranks(run), ranks=RANKS, steps=steps)
    small = replace(
        case.run,
        data=replace(case.run.data, eval_fraction=0.05),
        train=replace(case.run.train, eval_every=max(5, steps // 8), eval_sequences=8),
        cluster=replace(case.run.cluster, nodes=NODES),
        checkpoint=replace(case.run.checkpoint, every=max(5, steps // 10), memory_every=1),
        resilience=replace(run.resilience, check_every=1, restarts=max(run.resilience.restarts, 2 * (faults or 20))),
    )
    notes = [
        *case.notes,
        "State is compared in every step (resilience.check_every = 1) and replicated in memory after every step.",
    ]
    kinds: Sequence[str] = (*DEFAULT_KINDS, "freeze")
    if small.layout.data == 1:
        kinds = [kind for kind in kinds if kind != "corrupt"]
        notes.append("There are no replicas (layout.data = 1) to detect corruption, so no state is corrupted.")
    if faults is None:
        planned = tuple(fault for fault in parse(STANDARD) if fault.kind in kinds)
    else:
        planned = draw_faults(faults, steps=steps, ranks=RANKS, nodes=NODES, seed=seed, kinds=kinds)
    assert not check(planned, RANKS, NODES, steps)
    return Campaign(run=small, faults=planned, accepted=TOLERANCES[case.coarsest], notes=tuple(notes))


def _four_ranks(run: Run) -> Run:
    """The run with as many replicas as fit on four ranks."""
    others = run.layout.ranks // (run.layout.data or 1)
    if RANKS % others and others <= RANKS:
        raise RunError(
            f"--chaos runs on {RANKS} ranks, but the layout without layout.data has {others}, which does not divide them."
        )
    return replace(run, layout=replace(run.layout, data=max(1, RANKS // others)))


def verify(campaign: Campaign, report: Callable[[str], None] = lambda line: None) -> CampaignReport:
    """Runs and compares both. `report` receives a line before and after each run."""
    adopt_orphans()  # processes that a run leaves behind become children of this one
    limit = max(_MINIMUM, _PER_FAULT * len(campaign.faults) + _PER_STEP * campaign.run.steps)
    with TemporaryDirectory(prefix="phalanx-chaos-") as folder:
        file = Path(folder) / "run.toml"
        file.write_text(dump(campaign.run))
        sides = []
        for name, faults in (("undisturbed", ()), ("disturbed", campaign.faults)):
            report(f"{name} run: {campaign.run.steps} steps on {RANKS} ranks of {NODES} nodes")
            sides.append(train_command(file, Path(folder) / name, faults, limit))
            report(f"{name} run: exit code {sides[-1].code} after {sides[-1].seconds:.1f} s")
        theirs, ours = sides
        outcomes = fault_outcomes(campaign.faults, ours.events, FaultClaims(ours.directory).times())
        verdicts = [
            *run_verdicts(ours.events, theirs.events, campaign.run.steps, campaign.accepted.loss),
            _compare_state(ours, theirs, campaign.accepted.parameters),
            *outcome_verdicts(outcomes),
            *(_leftovers(side) for side in sides),
        ]
    recoveries = [event for event in ours.events if isinstance(event, Recovered)]
    return CampaignReport(
        campaign=campaign,
        verdicts=tuple(verdicts),
        outcomes=tuple(outcomes),
        recoveries=len(recoveries),
        steps_lost=sum(event.steps_lost for event in recoveries),
        seconds=(theirs.seconds, ours.seconds),
    )


def _leftovers(side: TrainedRun) -> Verdict:
    message = "; ".join(side.leftovers) or "no process, no incomplete file, no in-memory replica"
    return Verdict(name=f"left by the {side.name} run", passed=not side.leftovers, message=message)


def _compare_state(ours: TrainedRun, theirs: TrainedRun, accepted: float) -> Verdict:
    """Compares the last checkpoints. They are equal bit for bit if the layout never changed; with fewer ranks for a while, sums were in
    another order."""
    verdict = partial(Verdict, name="state")
    try:
        one, other = (CheckpointReader(locate(side.directory).checkpoint) for side in (ours, theirs))
    except (RunError, OSError) as error:
        outputs = [side.output.strip() for side in (ours, theirs) if side.code]
        endings = "; ".join(output.splitlines()[-1] for output in outputs if output)
        return verdict(passed=False, message=f"{error} {endings}".strip())
    if one.marker.step != other.marker.step:
        steps = f"the last checkpoint is of step {one.marker.step}, the undisturbed run's of {other.marker.step}"
        return verdict(passed=False, message=steps)
    different = [item for item in compare(one, other) if isinstance(item, Difference)]
    if not different:
        return verdict(passed=True, message="weights and optimizer the same in every bit")
    if same_layout(ours.events):
        names = ", ".join(item.name for item in different[:3])
        return verdict(passed=False, message=f"{len(different)} tensors differ, such as {names}")
    apart = {item.name: _relative(item, one) for item in different if item.name.startswith("model/")}
    worst = max(apart, key=lambda name: apart[name], default="")
    because = f"accepted {accepted:.0e}, because the layout changed during recovery"
    within = all(value <= accepted for value in apart.values())
    return verdict(passed=within, message=f"weights {apart.get(worst, 0.0):.1e} apart at most, in {worst}; {because}")


def _relative(difference: Difference, saved: CheckpointReader) -> float:
    """The difference relative to the largest element of the tensor."""
    if difference.kind != "values":
        return float("inf")
    largest = max(float(saved.read(difference.name, *part).abs().max()) for part in saved.row_ranges(difference.name))
    return difference.largest / largest if largest else float("inf")
