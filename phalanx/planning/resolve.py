"""Lays a run out on a machine: fills in what the run file left open, and says what cannot work before anything starts.

The launcher, verification and the API call `plan_run` or `choose`; workers receive the Plan and the Run that come out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phalanx.planning.request import PlanRequest, described
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.run import Run

if TYPE_CHECKING:
    from phalanx.planning.chosen import Better


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run with nothing left open that training would have to decide."""

    run: Run
    """As it was given, with what is traded for memory filled in; its layout may still be open."""
    plan: Plan
    roomy: bool = True
    """It fits with a little to spare."""


class _TooLarge(RunError):
    """Memory is all that stands in the way."""


def choose(run: Run, machine: Machine, ranks: int | None = None, size: Size | None = None) -> Plan:
    """The plan of `plan_run`, for whoever has no use for the run."""
    return plan_run(run, machine, ranks, size).plan


def plan_run(run: Run, machine: Machine, ranks: int | None = None, size: Size | None = None) -> PlannedRun:
    """A plan for the run on this machine; `ranks` is how many somebody else, such as torchrun, has already started.

    Where the run file has no [layout], it is the plan's winner: replicas, which compute the same bits however many there are,
    unless something else is clearly quicker or fits where they do not. `size`: of one's own module, which the shape in the run
    file says nothing about. Raises RunError with everything that stands in the way.
    """
    from phalanx.planning.chosen import better  # the equations need numpy, which whoever only reads a plan does not pay for

    size = size or _size(run)
    settled: PlannedRun | None = None
    refused: RunError | None = None
    try:
        settled = _as_given(PlanRequest.of(run, machine, ranks, size))
    except RunError as error:
        refused = error
    if run.layout == Layout() and run.model.module is None and (settled is not None or isinstance(refused, _TooLarge)):
        found = better(run, machine, ranks, settled.plan if settled and settled.roomy else None)
        if found is not None:
            try:
                return _lay(found, machine, ranks, size)
            except RunError:
                if settled is None:
                    raise
    if settled is None:
        assert refused is not None
        raise refused
    return settled


def again(run: Run, machine: Machine, before: Plan, ranks: int | None = None, size: Size | None = None) -> PlannedRun | None:
    """A run that goes on: where its layout is left open it keeps the one that it had, as long as the machine is the same.

    None where it is not, or cannot be laid out so any more.
    """
    asked = ranks or (run.cluster.cpu_ranks if before.device == "cpu" else None)
    if run.layout != Layout() or before.machine != described(machine) or asked not in (None, before.ranks):
        return None
    micro = run.train.micro_batch or before.micro_batch
    kept = replace(run, layout=before.layout, train=replace(run.train, micro_batch=micro))
    try:
        laid = plan_run(kept, machine, ranks, size)
    except RunError:
        return None
    return PlannedRun(replace(run, memory=laid.run.memory), laid.plan)


def _lay(found: Better, machine: Machine, ranks: int | None, size: Size) -> PlannedRun:
    """What a search came to, held to the same checks as what a person wrote."""
    laid = _as_given(PlanRequest.of(found.run, machine, ranks, size), found=True)
    return PlannedRun(replace(found.asked, memory=laid.run.memory), laid.plan)


def _as_given(asked: PlanRequest, *, found: bool = False) -> PlannedRun:
    """The layout as far as it is given, replicas for the rest. `found`: it is a search's, which has looked at memory already."""
    from phalanx.planning.chosen import placed
    from phalanx.planning.memory_fit import lay, memory_problems, replicas, roomy

    run = asked.run
    layout = replace(run.layout, data=replicas(asked))
    if problems := asked.rank_problems(layout) + asked.batch_problems(layout):
        raise RunError(problems)
    # With the layout open, a search looks at more than this one before anything is traded.
    laid = lay(asked, layout, trade=run.layout != Layout())
    if not found and (problems := memory_problems(asked, laid)):
        raise _TooLarge(problems)
    if problems := asked.layout_problems(layout, laid.plan.accumulation):
        raise RunError(problems)
    plan = replace(laid.plan, placement=placed(run, asked.machine, laid.plan))
    return PlannedRun(laid.run, plan, roomy(laid, asked))


def _size(run: Run) -> Size:
    model = run.model
    assert model.module is None, "an own module is measured before it is planned for"
    return Size(
        parameters=model.parameters(),
        active=model.active_parameters(),
        flops_per_token=model.flops_per_token(run.train.sequence_length),
    )
