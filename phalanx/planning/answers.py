"""What a person asks of planning, answered in plain values: the best layout, the run file's own, other numbers of devices, the smallest
cluster. The CLI and `phalanx.explain` call it; the dashboard shows what it returns."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from phalanx.planning.chosen import devices_of
from phalanx.planning.chosen import judged as judged_here
from phalanx.planning.explain import largest_loss, report_of
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.cpu import resident
from phalanx.planning.machines.hardware import hardware as hardware_of
from phalanx.planning.planner import search
from phalanx.planning.report import PlanReport, SolveReport
from phalanx.planning.resolve import PlannedRun, plan_run
from phalanx.planning.search.alternatives import other_formats, why_not
from phalanx.planning.search.candidate import Alternative, Candidate, SearchResult
from phalanx.planning.search.search import NONE, Aim, Limits, assumed, beyond, find, judge, rates_of
from phalanx.planning.search.space import space
from phalanx.planning.solve import What, solve, what_if
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan
from phalanx.spec.run import Memory, Run


def explained(
    run: Run, hardware: Hardware, *, aim: Aim = "time", limits: Limits = NONE, most: int = 10, free: bool = False
) -> PlanReport:
    """The search's answer, told. `free`: the layout that the run file gives is not kept but compared. RunError where there is none."""
    open_ = freed(run) if free else run
    found = search(open_, hardware, aim=aim, limits=limits, most=most)
    if free and run.layout != Layout():
        found = replace(found, alternatives=(_own(run, hardware, found.best), *found.alternatives))
    return report_of(open_, hardware, found, aim=aim)


def here(run: Run, machine: Machine, most: int = 10) -> PlanReport:
    """For this very machine: what `phalanx train` takes there, and the search's winner beside it where that is another. RunError where
    neither finds anything that fits."""
    devices = hardware_of(run, machine)
    if run.model.module is not None:
        return report_of(run, devices, search(run, devices, most=most))
    refused: RunError | None = None
    found: SearchResult | None = None
    try:
        settled = plan_run(run, machine)
    except RunError as error:
        refused = error
    try:
        found = search(run, devices, most=most)
    except RunError:
        if refused is not None:
            raise  # it says what would make it fit
    if refused is not None:
        assert found is not None
        own = Alternative(candidate=None, name="as the run file has it", reason=" ".join(refused.problems))
        return report_of(run, devices, replace(found, alternatives=(own, *found.alternatives)))
    return _taken(run, machine, settled, found, most)


def _taken(run: Run, machine: Machine, settled: PlannedRun, found: SearchResult | None, most: int) -> PlanReport:
    """What training takes, told as the best."""
    plan = settled.plan
    devices = devices_of(run, machine, plan.ranks, plan.threads, plan.device)
    exact = replace(settled.run, layout=plan.layout, train=replace(run.train, micro_batch=plan.micro_batch))
    best = judged_here(exact, machine, plan)
    if best is None:  # a schedule of one's own, of which a search knows nothing either
        return report_of(run, devices, found or _alone(judge(exact, devices), run, devices))
    if found is None:
        return report_of(run, devices, _alone(best, run, devices))
    here_too = partial(_as_here, run, machine, plan)
    quickest, others, curve = here_too(found.best), tuple(map(here_too, found.runners_up)), tuple(map(here_too, found.curve))
    neighbours = why_not(space(run, devices, plan.ranks), rates_of(run, devices), best, here_too)
    reasons = *other_formats(run, devices, best), *neighbours
    if _choices(best) == _choices(quickest):
        return report_of(run, devices, replace(found, best=quickest, runners_up=others, curve=curve, alternatives=reasons))
    if best.layout == quickest.layout:
        others = others[:most]
    else:
        others = (quickest, *(option for option in others if option.layout != best.layout))[:most]
    beside = Alternative(candidate=quickest, name=quickest.name, reason=_kept(best, quickest))
    return report_of(run, devices, replace(found, best=best, runners_up=others, curve=curve, alternatives=(beside, *reasons)))


def _choices(option: Candidate) -> tuple[object, ...]:
    return option.layout, option.micro_batch, option.recompute, option.recompute_every, option.offload


def _kept(best: Candidate, quickest: Candidate) -> str:
    """Why training does not take the search's winner."""
    gain = 1 - quickest.seconds / best.seconds
    if best.layout == quickest.layout:
        how = f"with a micro-batch of {quickest.micro_batch}"
        how += f", {quickest.recompute} recomputation" if quickest.recompute != best.recompute else ""
        how += f", states in {quickest.offload}" if quickest.offload != best.offload else ""
        kept = "less memory is taken, and nothing traded for it, unless that is clearly better"
    else:
        how = ""
        kept = "replicas are kept unless something else is clearly better, as they compute the same bits however many there are"
    speed = f"{gain:.1%} quicker by the equations" if gain > 0 else "no quicker"
    return f"{how}{' ' if how else ''}{speed}: {kept}"


def _as_here(run: Run, machine: Machine, plan: Plan, option: Candidate) -> Candidate:
    """With all that a process on this machine's cores keeps."""
    if plan.device != "cpu":
        return option
    return replace(option, memory=resident(run, replace(plan, layout=option.layout), option.memory, machine))


def _alone(option: Candidate, run: Run, hardware: Hardware) -> SearchResult:
    """One way of laying a run out, with nothing beside it."""
    return SearchResult(
        best=option,
        runners_up=(),
        alternatives=(),
        considered=1,
        fitting=int(option.fits),
        seconds=0.0,
        assumptions=assumed(run, hardware),
        curve=(option,),
    )


def freed(run: Run) -> Run:
    """The run with everything open that a search can choose."""
    usual = Memory()
    memory = replace(run.memory, recompute=usual.recompute, recompute_every=usual.recompute_every, offload=usual.offload)
    return replace(run, layout=Layout(), memory=memory, train=replace(run.train, micro_batch=None))


def _own(run: Run, hardware: Hardware, best: Candidate) -> Alternative:
    """The run file's layout as one of those that are not the winner."""
    try:
        own = judge(run, hardware)
    except RunError as error:
        return Alternative(candidate=None, name="the run file's", reason=" ".join(error.problems))
    name = f"{own.name}:"
    if not own.fits:
        return Alternative(
            candidate=own, name="the run file's", reason=f"{name} lacks {(own.bytes - own.capacity) / 2**30:.1f} GiB of memory"
        )
    behind = own.seconds / best.seconds - 1
    if behind <= 0:
        return Alternative(candidate=own, name="the run file's", reason=f"{name} as quick")
    return Alternative(candidate=own, name="the run file's", reason=f"{name} {behind:+.1%} time{largest_loss(best, own)}")


def judged(run: Run, hardware: Hardware, limits: Limits = NONE) -> PlanReport:
    """The same of the run file's own layout, with nothing beside it. RunError where it is over a deadline or a budget."""
    began = time.process_time()
    option = judge(run, hardware, limits.fits_in)
    if problems := beyond(option, limits):
        raise RunError(problems)
    found = replace(_alone(option, run, hardware), seconds=time.process_time() - began)
    return report_of(run, hardware, found)


def sizes(run: Run, hardware: Hardware, ranks: int) -> tuple[Candidate, ...]:
    """The fastest layout on a quarter, half, twice and four times as many devices, and on this many."""
    run = freed(run)
    tried = sorted({number for part in (0.25, 0.5, 1, 2, 4) if (number := int(part * ranks)) >= 1})
    results = [find(run, hardware.sized(max(number, hardware.gpus)), None, 1, gpus=number) for number in tried]
    return tuple(result.best for result in results if result is not None)


def solved(run: Run, hardware: Hardware, what: What, limits: Limits = NONE) -> SolveReport:
    """The smallest cluster, the largest model or the best batch, with its plan; and what other clusters would change."""
    answer = solve(run, hardware, what, limits)
    return SolveReport(
        what=answer.what,
        value=answer.value,
        sentence=answer.sentence,
        plan=report_of(answer.run, answer.hardware, answer.found),
        tried=answer.tried,
        what_if=tuple(what_if(run, hardware) or what_if(answer.run, answer.hardware)),
    )
