"""The one entry of planning: a PlanRequest in, a PlanReport out; and the plan alone, for training. This machine is one more
cluster, with one more rule: the layout that the run file gives trains here, and replicas where it gives none, unless another
layout is clearly faster or replicas do not fit. Replicas compute the same bits however many there are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from phalanx.planning.cost.job_table import is_counted
from phalanx.planning.machine_fit import CLEARLY, PlannedRun, as_process, fit, judge_plan, memory_problems, promise_of, replicas
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.placement import placement
from phalanx.planning.report import PlanReport, largest_loss, report_of, run_file_tables
from phalanx.planning.request import PlanRequest, devices_of, free_run, machine_name
from phalanx.planning.search.alternatives import neighbours, other_formats
from phalanx.planning.search.candidate import Alternative, Candidate, SearchResult
from phalanx.planning.search.search import (
    NO_LIMITS,
    Aim,
    Limits,
    assumptions_of,
    beyond,
    cheaper,
    find,
    judge,
    rates_of,
)
from phalanx.planning.search.space import largest_divisor, space
from phalanx.planning.solve import SolveReport, What, remedies, solve, what_if
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.run import Run


class _TooLarge(RunError):
    """Memory is the only problem."""


def plan(request: PlanRequest) -> PlanReport:
    """The best layout for a request, with the layouts it was compared with. RunError, with remedies, where nothing fits."""
    if request.given:
        return _judged(request)
    default = (request.aim, request.limits, request.free) == ("time", NO_LIMITS, False)
    if request.machine is not None and default and (request.run.model.is_builtin or is_counted(request.run.model)):
        return _plan_here(request, request.machine)
    run, devices = free_run(request.run) if request.free else request.run, request.cluster
    result = search(run, devices, aim=request.aim, limits=request.limits, most=request.top)
    if request.free and request.run.layout != Layout():
        own = _run_files_own(request.run, devices, result.best)
        result = replace(result, alternatives=(own, *result.alternatives))
    return report_of(run, devices, result, aim=request.aim)


def solve_report(request: PlanRequest, what: What) -> SolveReport:
    """The smallest cluster, the largest model or the best batch, with its plan; and what other clusters would change."""
    run, cluster = free_run(request.run) if request.free else request.run, request.cluster
    answer = solve(run, cluster, what, request.limits)
    return replace(answer, what_if=tuple(what_if(run, cluster) or what_if(answer.plan.run, answer.plan.hardware)))


def scaling(request: PlanRequest, ranks: int) -> tuple[Candidate, ...]:
    """The fastest layout on a quarter, half, twice and four times as many devices, and on this many."""
    run, cluster = free_run(request.run), request.cluster
    tried = sorted({number for part in (0.25, 0.5, 1, 2, 4) if (number := int(part * ranks)) >= 1})
    results = [find(run, cluster.sized(max(number, cluster.gpus)), None, 1, gpus=number) for number in tried]
    return tuple(result.best for result in results if result is not None)


def search(run: Run, hardware: Hardware, *, aim: Aim = "time", limits: Limits = NO_LIMITS, most: int = 10) -> SearchResult:
    """The best layout and its alternatives. RunError where nothing fits, with the smallest changes that would make it fit, or where no
    layout stays within the limits."""
    began = time.process_time()
    result = find(run, hardware, limits.fits_in, most)
    if result is None:
        raise RunError(remedies(run, hardware, limits.fits_in))
    if aim == "price" or beyond(result.best, replace(limits, deadline=None)):
        result = cheaper(run, hardware, result, aim, limits, most)
    if problems := beyond(result.best, limits):
        raise RunError(problems)
    alternatives = _alternatives(run, hardware, result.best)
    return replace(result, alternatives=alternatives, seconds=time.process_time() - began)


def _alternatives(
    run: Run, hardware: Hardware, best: Candidate, as_process: Callable[[Candidate], Candidate] = lambda candidate: candidate
) -> tuple[Alternative, ...]:
    here = space(run, hardware, best.layout.ranks)
    return (*other_formats(run, hardware, best), *neighbours(here, rates_of(run, hardware), best, as_process))


# What trains.


def choose(run: Run, machine: Machine | None, ranks: int | None = None, size: Size | None = None) -> Plan:
    """The plan of `plan_run` alone."""
    return plan_run(run, machine, ranks, size).plan


def plan_run(run: Run, machine: Machine | None, ranks: int | None = None, size: Size | None = None) -> PlannedRun:
    """The plan to train a run with, on this machine or, for None, on the cluster that the run file names. `ranks`: how many ranks
    another launcher, such as torchrun, has already started. `size`: of a custom module. RunError with everything in the way."""
    request = PlanRequest(run, machine, ranks, size)
    run = request.run
    if machine is None:
        best = search(run, request.cluster).best
        made = replace(request.plan(best.layout, best.micro_batch), promise=promise_of(best))
        return PlannedRun(replace(run, memory=best.with_savings(run.memory)), _placed(request, made))
    if run.engine.name == "xla":
        return _of_xla(_as_given(request, searched=True))
    is_open = run.layout == Layout() and run.model.is_builtin
    try:
        planned = _as_given(request)
    except _TooLarge:
        better = _clearly_better(request, machine, None) if is_open else None
        if better is None:
            raise
        return _as_searched(request, better)
    better = _clearly_better(request, machine, planned.plan if planned.has_margin else None) if is_open else None
    if better is not None:
        with suppress(RunError):
            return _as_searched(request, better)
    return planned


def _of_xla(planned: PlannedRun) -> PlannedRun:
    """The layout as given, without a promise: times of this engine on this machine are not known."""
    memory = replace(planned.run.memory, compile=None, cuda_graphs=None, offload="none")
    each = devices_per_process(planned.run, planned.plan.ranks)
    made = replace(planned.plan, promise=None, devices_per_process=each)
    return replace(planned, run=replace(planned.run, memory=memory), plan=made)


def devices_per_process(run: Run, devices: int) -> int:
    """Devices of each process of an XLA run: those of a host, unless the run file says otherwise. RunError where they do not come out even."""
    hosts, given = max(1, run.cluster.nodes - run.resilience.spares), run.engine.devices_per_process
    on_host, odd = divmod(devices, hosts)
    if odd:
        raise RunError(
            f"cluster.nodes = {run.cluster.nodes}: {devices} devices do not divide among {hosts} hosts, and a process of the XLA engine has devices of "
            "one host: change cluster.nodes, or a degree of [layout] such as layout.data."
        )
    if given is not None and on_host % given:
        raise RunError(
            f"engine.devices_per_process = {given} does not divide the {on_host} devices of {'the' if hosts == 1 else 'a'} host: set it to a divisor, or "
            "remove it for one process on each host."
        )
    return given or on_host


def keep_layout(
    run: Run, machine: Machine, before: Plan, ranks: int | None = None, size: Size | None = None
) -> PlannedRun | None:
    """The plan of a run that resumes: where its layout is left open, the run keeps the one it had, on the same machine. None where
    the machine has changed or the layout is no longer possible."""
    asked = ranks or (run.cluster.cpu_ranks if before.device == "cpu" else None)
    if run.layout != Layout() or before.machine != machine_name(machine) or asked not in (None, before.ranks):
        return None
    micro_batch = run.train.micro_batch or before.micro_batch
    fixed = replace(run, layout=before.layout, train=replace(run.train, micro_batch=micro_batch))
    try:
        planned = plan_run(fixed, machine, ranks, size)
    except RunError:
        return None
    return replace(planned, run=replace(run, memory=planned.run.memory))


def _as_given(request: PlanRequest, *, searched: bool = False) -> PlannedRun:
    """The layout as far as it is given, with replicas for the rest. `searched`: a search has already checked its memory."""
    run = request.run
    layout = replace(run.layout, data=replicas(request))
    if problems := request.rank_problems(layout) + request.batch_problems(layout):
        raise RunError(problems)
    # With the layout open, other layouts are searched before memory is saved at the cost of time; for the XLA engine none are.
    fitted = fit(request, layout, save_memory=run.layout != Layout() or run.engine.name == "xla")
    if not searched and (problems := memory_problems(request, fitted)):
        raise _TooLarge(problems)
    if problems := request.layout_problems(layout, fitted.plan.accumulation):
        raise RunError(problems)
    return replace(fitted, plan=_placed(request, fitted.plan))


def _as_searched(request: PlanRequest, best: Candidate) -> PlannedRun:
    """A candidate of a search, checked like a layout that a person gives."""
    run = request.run
    memory, train = best.with_savings(run.memory), replace(run.train, micro_batch=best.micro_batch)
    planned = _as_given(replace(request, run=replace(run, layout=best.layout, memory=memory, train=train)), searched=True)
    return replace(planned, run=replace(run, memory=planned.run.memory))


def _placed(request: PlanRequest, made: Plan) -> Plan:
    """The plan with its placement, as JSON can write it, and the link between hosts."""
    devices = request.devices(made.ranks)
    table: dict[str, Any] = json.loads(json.dumps(asdict(placement(made.layout, devices))))
    link = devices.network * devices.node if devices.gpus > devices.node else None
    return replace(made, placement=table, host_link=link)


def _clearly_better(request: PlanRequest, machine: Machine, given: Plan | None) -> Candidate | None:
    """The best candidate of a search where it is clearly faster than the given plan, or where nothing given fits. On CPUs other
    layouts take the place of replicas only where replicas do not fit; else only their number is searched."""
    run = request.run
    if request.device == "cpu" and given is not None:
        return _fewer_replicas(request, given)
    best: tuple[float, Candidate] | None = None
    for ranks in _rank_counts(request, machine, given):
        result = find(run, request.devices(ranks), most=1, gpus=ranks)
        if result is None:
            continue  # nothing of this size fits, or divides the run
        # With another number of ranks, a candidate has to be faster than the given plan even at its P90.
        seconds = result.best.seconds if given is None or ranks == given.ranks else result.best.high
        if best is None or seconds < best[0]:
            best = (seconds, result.best)
    if best is None:
        return None
    seconds, candidate = best
    same = given is not None and (given.layout, given.micro_batch) == (candidate.layout, candidate.micro_batch)
    if given is not None and (same or given.promise is None or seconds >= CLEARLY * given.promise.seconds):
        return None
    return candidate


def _fewer_replicas(request: PlanRequest, given: Plan) -> Candidate | None:
    """Fewer CPU replicas with more threads each, where nobody has asked for a number."""
    run = request.run
    if request.started is not None or run.cluster.cpu_ranks is not None or given.promise is None:
        return None
    best: Candidate | None = None
    fastest, ranks = given.promise.seconds, given.ranks
    while ranks > 1:
        ranks = largest_divisor(run.batch, ranks // 2)
        candidate = judge(replace(run, layout=Layout(data=ranks)), request.devices(ranks))
        if candidate.fits and candidate.high < min(fastest, CLEARLY * given.promise.seconds):
            best, fastest = candidate, candidate.high
    return best


def _rank_counts(request: PlanRequest, machine: Machine, given: Plan | None) -> list[int]:
    """Numbers of ranks that this machine could run, largest first."""
    if request.started is not None:
        return [request.started]
    if (request.run.cluster.device or "cuda") == "cuda" and machine.gpus:
        return sorted({len(machine.gpus), given.ranks if given else len(machine.gpus)}, reverse=True)
    if request.run.cluster.cpu_ranks is not None:
        return [request.run.cluster.cpu_ranks]
    return [machine.cores >> half for half in range(machine.cores.bit_length())]


# What a person reads.


def _judged(request: PlanRequest) -> PlanReport:
    """The run file's own layout, compared with nothing. RunError where it is over a limit."""
    began, run, cluster = time.process_time(), request.run, request.cluster
    candidate = judge(run, cluster, request.limits.fits_in)
    if problems := beyond(candidate, request.limits):
        raise RunError(problems)
    result = replace(_alone(candidate, run, cluster), seconds=time.process_time() - began)
    return report_of(run, cluster, result)


def _plan_here(request: PlanRequest, machine: Machine) -> PlanReport:
    """What `phalanx train` runs on this machine, compared with the fastest layout. RunError where neither exists."""
    run, result = request.run, None
    try:
        planned = plan_run(run, machine)
    except RunError as refused:
        result = search(run, request.cluster, most=request.top)  # where it fails, its sentences say what would make the run fit
        own = Alternative(candidate=None, name="as the run file has it", reason=" ".join(refused.problems))
        return report_of(run, request.cluster, replace(result, alternatives=(own, *result.alternatives)))
    with suppress(RunError):
        result = search(run, request.cluster, most=request.top)
    return _trained_here(request, machine, planned, result)


def _trained_here(request: PlanRequest, machine: Machine, planned: PlannedRun, result: SearchResult | None) -> PlanReport:
    """The report with what trains here as the best."""
    run, made = request.run, planned.plan
    devices = devices_of(run, machine, made.ranks, made.threads, made.device)
    best = judge_plan(planned.run, machine, made)
    if best is None:  # a custom schedule, which the search does not know either
        exact = replace(planned.run, layout=made.layout, train=replace(run.train, micro_batch=made.micro_batch))
        return report_of(run, devices, result or _alone(judge(exact, devices), run, devices))
    if result is None:
        return report_of(run, devices, _alone(best, run, devices))
    process = partial(as_process, run=run, machine=machine, plan=made)
    fastest, curve = process(result.best), tuple(map(process, result.curve))
    runners_up = tuple(map(process, result.runners_up))
    alternatives = _alternatives(run, devices, best, process)
    if run_file_tables(best) == run_file_tables(fastest):
        best = fastest
    else:
        alternatives = Alternative(candidate=fastest, name=fastest.name, reason=_not_taken(best, fastest)), *alternatives
        if best.layout != fastest.layout:
            others = [candidate for candidate in runners_up if candidate.layout != best.layout]
            runners_up = (fastest, *others)[: request.top]
    full = replace(result, best=best, runners_up=runners_up, curve=curve, alternatives=alternatives)
    return report_of(run, devices, full)


def _not_taken(best: Candidate, fastest: Candidate) -> str:
    gain = 1 - fastest.seconds / best.seconds
    speed = f"{gain:.1%} quicker by the equations" if gain > 0 else "no quicker"
    if best.layout != fastest.layout:
        kept = "replicas are kept unless something else is clearly better, as they compute the same bits however many there are"
        return f"{speed}: {kept}"
    how = f"with a micro-batch of {fastest.micro_batch}"
    how += f", {fastest.recompute} recomputation" if fastest.recompute != best.recompute else ""
    how += f", states in {fastest.offload}" if fastest.offload != best.offload else ""
    return f"{how} {speed}: less memory is taken, and nothing traded for it, unless that is clearly better"


def _alone(candidate: Candidate, run: Run, hardware: Hardware) -> SearchResult:
    """A result of one candidate, compared with nothing."""
    return SearchResult(
        best=candidate,
        considered=1,
        fitting=int(candidate.fits),
        assumptions=assumptions_of(run, hardware),
        curve=(candidate,),
    )


def _run_files_own(run: Run, hardware: Hardware, best: Candidate) -> Alternative:
    try:
        own = judge(run, hardware)
    except RunError as error:
        return Alternative(candidate=None, name="the run file's", reason=" ".join(error.problems))
    behind = own.seconds / best.seconds - 1
    if not own.fits:
        reason = f"lacks {(own.bytes - own.capacity) / 2**30:.1f} GiB of memory"
    else:
        reason = "as quick" if behind <= 0 else f"{behind:+.1%} time{largest_loss(best, own)}"
    return Alternative(candidate=own, name="the run file's", reason=f"{own.name}: {reason}")
