"""Parallel equals one device: a case trained in one process and on its ranks, and everything compared by name.
`phalanx verify` and `phalanx.verify` call `verify`, and `sweep` for many layouts.

Both sides are the trainer itself. The one process goes first and leaves what it found in a file; every rank then holds its own
boxes against it, copies included, so that a rank that has drifted apart from its twin is found too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from tempfile import mkdtemp
from typing import Any

import torch

from phalanx.spec.run import Run
from phalanx.verification import step_cost as accounts
from phalanx.verification.case import MOST_RANKS, Case, make
from phalanx.verification.layout_cases import generate
from phalanx.verification.rank_pool import Pool, RankFailed
from phalanx.verification.sides import Found, Reference, compare, leave
from phalanx.verification.step_cost import RankAccount, Theory
from phalanx.verification.tolerance import RANGES, Check, Row, earliest, judge

References = dict[Any, Reference]
"""What one process has been found to do, by what it was given."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that did not get through."""

    rank: int | None
    """None: the one process that the ranks were to be compared with."""
    error: str
    trace: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a proof came to."""

    case: Case
    checks: tuple[Check, ...] = ()
    failure: Failure | None = None
    accounts: tuple[RankAccount, ...] = ()
    """By rank, where they were asked for."""
    theory: Theory | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def first(self) -> Check | None:
        """What differs first; None where nothing does."""
        return earliest(self.checks)

    @property
    def because(self) -> str:
        """Where the accepted ranges come from."""
        return RANGES[self.case.coarsest].because

    def to_json(self) -> dict[str, Any]:
        case = self.case
        table: dict[str, Any] = {
            "passed": self.passed,
            "layout": asdict(case.layout),
            "ranks": case.layout.ranks,
            "steps": case.steps,
            "precision": case.plan.compute,
            "because": self.because,
            "checks": [check.to_json() for check in self.checks],
            "first": self.first.to_json() if self.first else None,
            "said": list(case.said),
            "failure": asdict(self.failure) if self.failure else None,
        }
        if self.accounts:
            table["accounts"] = [asdict(account) for account in self.accounts]
            table["theory"] = asdict(self.theory) if self.theory else None
        return table


def verify(run: Run, *, steps: int = 8, ranks: int | None = None, account: bool = False, pool: Pool | None = None) -> Report:
    """Prove one run's layout. Raises RunError where the run itself is wrong; anything else is in the report."""
    return prove(make(run, ranks=ranks, steps=steps), account=account, pool=pool)


def sweep(run: Run, *, ranks: int | None = None, steps: int = 8, count: int = 40, pool: Pool | None = None) -> Iterator[Report]:
    """Prove a generated set of layouts, one report each, through one pool of ranks."""
    most = ranks or MOST_RANKS
    with _held(most, pool) as held:
        references: References = {}
        for one in generate(run, most, count=count):
            yield prove(make(one, ranks=most, steps=steps), pool=held, references=references)


def prove(case: Case, *, account: bool = False, pool: Pool | None = None, references: References | None = None) -> Report:
    """`references` are used and added to."""
    references = {} if references is None else references
    with _held(case.layout.ranks, pool) as held:
        case = replace(case, folder=mkdtemp(dir=held.folder))
        local = case.layout.data if case.run.optimizer.sync_every > 1 else None
        key = (case.alone, case.alone_plan, case.steps, local)
        try:
            if key not in references:
                references[key] = held.alone(leave, case, held.folder / f"reference-{len(references)}.pt")
            found = held.run(compare, case.layout, case, references[key], account)
        except RankFailed as failed:
            return Report(case=case, failure=Failure(failed.rank, failed.error, failed.trace))
    rows = [row for one in found for row in one.rows] + list(_placement(case, found, references[key]))
    return Report(
        case=case,
        checks=tuple(judge(rows, RANGES[case.coarsest], list(references[key].shapes))),
        accounts=tuple(one.account for one in found if one.account is not None),
        theory=accounts.theory(case.run, case.plan) if account else None,
    )


def _held(ranks: int, pool: Pool | None) -> AbstractContextManager[Pool]:
    """The caller's pool, which stays, or one of our own."""
    return Pool(ranks) if pool is None else nullcontext(pool)


def _placement(case: Case, found: list[Found], reference: Reference) -> Iterator[Row]:
    """Whether the ranks together hold all of the model, and the layout was applied at all: a technique that silently does
    nothing computes the right numbers too. Read off what the ranks hold, never off the settings."""
    for name, shape in reference.shapes.items():
        missing = torch.ones(shape, dtype=torch.bool)
        for one in found:
            if name in one.spots:
                for box in one.spots[name].slice.boxes:
                    missing[box.index] = False
        yield Row("placement", 0, name, 0, float(missing.sum()))
    layout, split = case.layout, set().union(*(one.split for one in found))
    applied = {axis: axis in split for axis in ("shard", "tensor", "expert", "expert_tensor")}
    applied["context"] = all(one.attends_elsewhere for one in found)
    applied["pipeline"] = all(one.spots.keys() != reference.shapes.keys() for one in found)
    for axis, done in applied.items():
        degree = getattr(layout, axis)
        if degree > 1 and not done:
            yield Row("placement", 0, f"layout.{axis} = {degree} was not applied", 0, 1.0)
