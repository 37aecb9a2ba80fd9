"""Proves that parallel training equals training on one device: a case is trained in one process and on its ranks, and compared
by name. Both sides are the trainer itself. The reference process saves its steps to a file; every rank then compares its own
slices with that file, replicas included, so that a replica that drifts is found too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from tempfile import mkdtemp
from typing import Any

import torch

from phalanx.models.attention import attend_locally
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run
from phalanx.verification import step_cost as accounts
from phalanx.verification.cases import MAX_RANKS, Case, Gpus, generate_layouts, make_case
from phalanx.verification.compare_steps import RankResult, compare_records
from phalanx.verification.pool_process import PoolProcess
from phalanx.verification.rank_pool import RankFailed, RankPool
from phalanx.verification.reference import (
    Reference,
    case_trainer,
    record_steps,
    reference_records,
    train_reference,
)
from phalanx.verification.step_cost import RankAccount, Theory, measure_step
from phalanx.verification.tolerance import (
    ROUNDING,
    TOLERANCES,
    Check,
    Comparison,
    Limits,
    Noise,
    Tolerance,
    first_failure,
    judge,
)
from phalanx.verification.xla_devices import COMPILE_SECONDS, compare_devices


def compare_rank(mesh: Mesh, case: Case, reference: Reference, account: bool) -> RankResult:
    """Trains one rank and compares each step with the reference."""
    expected = torch.load(reference.path, weights_only=False, mmap=True)
    theirs = expected[mesh.coordinate("data") if len(expected) > 1 else 0]
    trainer = case_trainer(mesh, case, reference=False)
    result = RankResult()
    for ours, their in zip(record_steps(trainer, case.steps), theirs, strict=True):
        result.comparisons += compare_records(ours, their, mesh.rank)
        result.shards = {name: shard for name, (_, shard) in ours.parameters.items()}
    if all(their.skipped for their in theirs[1:]):  # nothing was updated on either side, so nothing is proven
        problem = f"every step overflowed, with precision.loss_scale = {case.run.precision.loss_scale:g}: lower it"
        result.comparisons.append(Comparison("loss", 1, problem, mesh.rank, float("inf")))
    result.split = {axis for owned in trainer.sharded.owned for axis in owned.shard.split}
    attends = [module.attend for part in trainer.sharded.parts for module in part.modules() if hasattr(module, "attend")]
    result.attends_remotely = bool(attends) and all(_is_remote(attend) for attend in attends)
    if account:
        result.account = measure_step(trainer)
    trainer.close()
    return result


def measure_noise(mesh: Mesh, case: Case, reference: Reference) -> Noise:
    """What rounding does to the reference: its differences from a second one whose gradients are disturbed as rounding disturbs them. Noise
    of a tensor never falls from step to step: where it grows by leaps, other gradients leap in another step."""
    expected = torch.load(reference.path, weights_only=False, mmap=True)
    noise: dict[tuple[str, int, str], float] = {}
    for disturbed, undisturbed in zip(reference_records(mesh, case, ROUNDING[case.numbers]), expected, strict=True):
        for ours, their in zip(disturbed, undisturbed, strict=True):
            for kind, step, tensor, _, apart in compare_records(ours, their, rank=0):
                before, so_far = noise.get((kind, step - 1, tensor), 0.0), noise.get((kind, step, tensor), 0.0)
                # What overflows on one side only is no measurement.
                noise[kind, step, tensor] = max(before, so_far, apart if math.isfinite(apart) else 0.0)
    return noise


def _is_remote(attend: Any) -> bool:
    """Whether attention, below its wrappers, is not the model's local one."""
    while hasattr(attend, "inner"):
        attend = attend.inner
    return attend is not attend_locally


Pool = RankPool | PoolProcess
References = dict[Any, Reference]
"""Reference files by the run, plan and steps they were made from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of one case."""

    case: Case
    checks: tuple[Check, ...] = ()
    failure: RankFailed | None = None
    accounts: tuple[RankAccount, ...] = ()
    """By rank, if requested."""
    theory: Theory | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def first(self) -> Check | None:
        """The first check that fails; None if all pass."""
        return first_failure(self.checks)

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.case.coarsest]

    @property
    def reason(self) -> str:
        """The reason for the tolerances."""
        return self.tolerance.reason

    def to_json(self) -> dict[str, object]:
        case = self.case
        table: dict[str, object] = {
            "passed": self.passed,
            "layout": asdict(case.layout),
            "ranks": case.layout.ranks,
            "device": case.plan.device,
            "gpus": case.gpus,
            "steps": case.steps,
            "precision": case.plan.compute,
            "reason": self.reason,
            "checks": [check.to_json() for check in self.checks],
            "first": self.first.to_json() if self.first else None,
            "notes": list(case.notes),
            "failure": asdict(self.failure) if self.failure else None,
        }
        if self.accounts:
            table["accounts"] = [asdict(account) for account in self.accounts]
            table["theory"] = asdict(self.theory) if self.theory else None
        return table


def verify(
    run: Run,
    *,
    steps: int = 8,
    ranks: int | None = None,
    account: bool = False,
    gpus: Gpus = (),
    pool: Pool | type[Pool] = PoolProcess,
) -> Report:
    """Verifies the layout of one run, on CPU or on these GPUs of this machine. Raises RunError if the run is invalid; any other failure
    is in the report. `pool`: one that stays open, or the kind to open. `RankPool` starts sooner, but forks this process, which must not have
    used torch before, nor have threads."""
    if run.engine.name == "xla" and account:
        raise RunError('--account counts messages of the torch engine\'s ranks: remove it, or set engine.name = "torch".')
    return prove(make_case(run, ranks=ranks, steps=steps, gpus=gpus), account=account, pool=pool)


def sweep(
    run: Run,
    *,
    ranks: int | None = None,
    steps: int = 8,
    count: int = 40,
    gpus: Gpus = (),
    pool: Pool | type[Pool] = PoolProcess,
) -> Iterator[Report]:
    """Verifies generated layouts in one pool of ranks, with a report for each. `pool`: see `verify`."""
    most = ranks or MAX_RANKS
    if run.engine.name == "xla":  # JAX takes a number of devices, and of processes, once in the life of a process
        for generated in generate_layouts(run, most, count=count, gpus=gpus):
            yield prove(make_case(generated, ranks=most, steps=steps, gpus=gpus), pool=pool)
        return
    with _pool_for(run, most, "cuda" if gpus else "cpu", pool) as opened:
        references: References = {}
        for generated in generate_layouts(run, most, count=count, gpus=gpus):
            case = make_case(generated, ranks=most, steps=steps, gpus=gpus)
            yield prove(case, pool=opened, references=references)


def prove(
    case: Case, *, account: bool = False, pool: Pool | type[Pool] = PoolProcess, references: References | None = None
) -> Report:
    """Verifies one case. `references`: a cache of reference files."""
    if case.run.engine.name == "xla" and case.gpus:
        raise RunError('--device cuda puts ranks of the torch engine on GPUs: remove it, or set engine.name = "torch".')
    references = {} if references is None else references
    with _pool_for(case.run, case.plan.processes, case.plan.device, pool) as opened:
        case = replace(case, folder=mkdtemp(dir=opened.folder))
        local = case.layout.data if case.run.optimizer.sync_every > 1 else None
        key = (case.reference, case.reference_plan, case.steps, local)
        on_xla = case.run.engine.name == "xla"
        try:
            if key not in references:
                references[key] = opened.alone(train_reference, case, opened.folder / f"reference-{len(references)}.pt")
            results = (
                list(chain(*opened.run(compare_devices, Layout(data=case.plan.processes), case, references[key])))
                if on_xla
                else opened.run(compare_rank, case.layout, case, references[key], account)
            )
            comparisons = [row for result in results for row in result.comparisons]
            comparisons += _placement(case, results, references[key])
            limits = Limits(TOLERANCES[case.coarsest])
            beyond = [row for row in comparisons if not limits.accept(row)]
            if beyond and not any(row.precedes_update for row in beyond):
                if references[key].noise is None:
                    references[key] = replace(references[key], noise=opened.alone(measure_noise, case, references[key]))
                limits = replace(limits, noise=references[key].noise or {})
        except RankFailed as failed:
            return Report(case=case, failure=failed)
    return Report(
        case=case,
        checks=tuple(judge(comparisons, limits, list(references[key].shapes))),
        accounts=tuple(result.account for result in results if result.account is not None),
        theory=accounts.theory(case.run, case.plan) if account else None,
    )


def _pool_for(run: Run, ranks: int, device: str, pool: Pool | type[Pool]) -> AbstractContextManager[Pool]:
    """The caller's pool, which stays open, or a new one. Processes of the XLA engine compile for as long as it takes."""
    if not isinstance(pool, type):
        return nullcontext(pool)
    return pool(ranks, COMPILE_SECONDS) if run.engine.name == "xla" else pool(ranks, device=device)


def _placement(case: Case, results: list[RankResult], reference: Reference) -> Iterator[Comparison]:
    """Whether the ranks together hold the whole model, and every axis of the layout was applied: a technique that silently does
    nothing computes the right numbers too. Reads the shards of the ranks, never the settings."""
    for name, shape in reference.shapes.items():
        missing = torch.ones(shape, dtype=torch.bool)
        for result in results:
            if name in result.shards:
                for box in result.shards[name].slice.boxes:
                    missing[box.index] = False
        yield Comparison("placement", 0, name, 0, float(missing.sum()))
    layout, split = case.layout, set().union(*(result.split for result in results))
    applied = {axis: axis in split for axis in ("shard", "tensor", "expert", "expert_tensor")}
    applied["context"] = all(result.attends_remotely for result in results)
    applied["pipeline"] = all(result.shards.keys() != reference.shapes.keys() for result in results)
    for axis, done in applied.items():
        degree = getattr(layout, axis)
        if degree > 1 and not done:
            yield Comparison("placement", 0, f"layout.{axis} = {degree} was not applied", 0, 1.0)
