"""`phalanx verify` proves on CPU ranks, or on GPUs that ranks may share, that the layout of a run, or many layouts, compute the same as one
device, or that a run survives faults of every kind. `phalanx rehearse` runs the program of one rank of a job of any size on fake tensors, without the other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from typer import Option

from phalanx.cli.options import AsJson, Overrides, RunFile, parse_size
from phalanx.cli.output import console, finish
from phalanx.host.probe import this_machine
from phalanx.launch.model_check import measure
from phalanx.planning.request import with_engine
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.load import load
from phalanx.spec.plan import Gpu
from phalanx.spec.run import Run

_STEPS = 8
_RankDevice = Annotated[
    str,
    Option(
        help='"cuda": on the GPUs of this machine, in the number format that they train in, bf16 unless the run file says otherwise. '
        "Where there are fewer GPUs than ranks, ranks share them, and gloo takes the place of NCCL. Blocks are compiled as in "
        "training; with --layouts all only if memory.compile = true."
    ),
]


def verify(
    run_file: RunFile,
    overrides: Overrides = None,
    steps: Annotated[
        int | None, Option(min=1, help="Optimizer steps to compare. Default: 8; with --chaos 80, or 5 per fault.")
    ] = None,
    layouts: Annotated[
        str | None,
        Option(
            help='"all": verify generated layouts of every kind with small models of odd sizes, instead of the layout of the run.'
        ),
    ] = None,
    ranks: Annotated[
        int | None, Option(min=1, help="Maximum number of ranks; with --layouts all, the exact number. Default: 8.")
    ] = None,
    device: _RankDevice = "cpu",
    count: Annotated[int, Option(min=1, help="With --layouts all: the number of layouts.")] = 40,
    account: Annotated[
        bool, Option("--account", help="Also compare the communication and memory of each rank with theory.")
    ] = False,
    chaos: Annotated[
        bool,
        Option("--chaos", help="Prove that a small run of the model's family survives faults of every kind instead."),
    ] = False,
    faults: Annotated[
        int | None, Option(min=1, help="With --chaos: the number of random faults, instead of the standard ones.")
    ] = None,
    seed: Annotated[int, Option(min=0, help="With --faults: the seed of the faults.")] = 0,
    json: AsJson = False,
) -> None:
    """Prove that parallel training equals training on one device. Compares losses, gradients and parameters of a small model of the
    same family, in the layout of RUN.toml on CPU ranks or GPUs, with one process."""
    if layouts not in (None, "all"):
        raise RunError(f'--layouts {layouts} is not known: use "all", or remove it to verify the layout of the run file.')
    if chaos and (layouts or ranks or account):
        raise RunError(
            "--chaos runs on 4 ranks as 2 nodes, in the run's layout: --layouts, --ranks and --account do not apply."
        )
    if faults is not None and not chaos:
        raise RunError(f"--faults {faults} is the number of faults that --chaos draws: add --chaos.")
    gpus = () if device == "cpu" else _gpus(device, "--chaos" if chaos else "--account" if account else None)
    run = load(run_file, overrides or [])
    from phalanx.verification import chaos_campaign, parity, verify_report
    from phalanx.verification.rank_pool import RankPool

    result: Mapping[str, object]
    if chaos:
        planned = chaos_campaign.campaign(run, steps=steps, faults=faults, seed=seed)
        campaign = chaos_campaign.verify(planned, lambda text: console.print(text, style="dim"))
        verify_report.show_campaign(console, campaign)
        passed, result = campaign.passed, campaign.to_json()
    elif layouts == "all":
        passed, result = _sweep(run, steps or _STEPS, ranks, count, gpus)
    else:
        report = parity.verify(run, steps=steps or _STEPS, ranks=ranks, account=account, gpus=gpus, pool=RankPool)
        verify_report.show_report(console, report)
        passed, result = report.passed, report.to_json()
    finish(json, result, passed)


def _gpus(device: str, other: str | None) -> tuple[Gpu, ...]:
    """The GPUs of `--device`. `other`: an option that excludes it."""
    if other is not None:
        raise RunError(f"--device {device} does not apply to {other}, which runs on CPU ranks: remove one of them.")
    from phalanx.verification.cases import gpus_of

    return gpus_of(this_machine(), device)


def _sweep(run: Run, steps: int, ranks: int | None, count: int, gpus: tuple[Gpu, ...]) -> tuple[bool, Mapping[str, object]]:
    from phalanx.verification.parity import sweep
    from phalanx.verification.rank_pool import RankPool
    from phalanx.verification.verify_report import show_line

    reports = []
    if gpus and not run.memory.compile:
        words = (
            "Blocks are not compiled, because that takes far longer than the proof: memory.compile=true verifies compiled ones."
        )
        console.print(words, style="dim", soft_wrap=True)
    for number, report in enumerate(sweep(run, ranks=ranks, steps=steps, count=count, gpus=gpus, pool=RankPool), start=1):
        reports.append(report)
        show_line(console, number, report)
    good = sum(report.passed for report in reports)
    passed = good == len(reports)
    console.print(f"{good} of {len(reports)} layouts passed", style="bold green" if passed else "bold red")
    passed = passed and bool(reports)
    return passed, {"passed": passed, "layouts": [report.to_json() for report in reports]}


def rehearse(
    run_file: RunFile,
    overrides: Overrides = None,
    rank: Annotated[int, Option(help="The rank to rehearse.")] = 0,
    all_stages: Annotated[bool, Option("--all-stages", help="Rehearse one rank of each distinct kind instead.")] = False,
    memory: Annotated[
        str | None, Option(help="Memory of a device, for example 80GiB. Default: the memory of the cluster's device.")
    ] = None,
    messages: Annotated[bool, Option("--messages", help="With --json: list every collective, in order.")] = False,
    trace: Annotated[Path | None, Option(help="Write the memory timeline of the step to this file, for Perfetto.")] = None,
    json: AsJson = False,
) -> None:
    """Run the program of one rank on fake tensors: peak memory by component, communication, and errors. The exit code is 1 if the
    run would fail. With engine.name=xla the step is compiled for virtual devices instead."""
    run = with_engine(load(run_file, overrides or []))
    limit = None if memory is None else parse_size("--memory", memory)
    if run.engine.name == "xla":
        given = {"--rank": rank != 0, "--all-stages": all_stages, "--messages": messages, "--trace": trace is not None}
        _rehearse_compiled(run, limit, [option for option, is_given in given.items() if is_given], json=json)
        return
    import torch

    from phalanx.rehearsal.rehearse import distinct_ranks, rehearsal_job
    from phalanx.rehearsal.rehearse import rehearse as rehearsed
    from phalanx.rehearsal.result import show, write_trace

    torch.set_num_threads(1)
    results = []
    with console.status("planning") as status:
        machine = this_machine()
        job = rehearsal_job(run, machine, measure(run, machine, trace=True), limit)
        ranks = distinct_ranks(job.run, job.plan) if all_stages else {rank: 1}
        for number, each in enumerate(ranks, start=1):
            status.update(f"rehearsing rank {each:,}" + (f", {number} of {len(ranks)} kinds" if all_stages else ""))
            results.append(rehearsed(job.run, job.plan, each, job.device))
            show(console, results[-1])
    worst = max(results, key=lambda result: (not result.fits, result.peak))
    if trace is not None:
        write_trace(worst, trace)
    stages = {"stages": [result.to_json() for result in results]} if all_stages else {}
    finish(json, worst.to_json(every_message=messages) | stages, worst.fits)


def _rehearse_compiled(run: Run, limit: int | None, given: list[str], *, json: bool) -> None:
    """Compiles the step of a run of the XLA engine. `given`: options that are about single ranks."""
    refuse(
        [f'{option} is for ranks, but the devices of engine.name = "xla" all run one program: remove it.' for option in given]
    )
    from phalanx.rehearsal.compiled_rehearsal import rehearse_compiled, show_compiled
    from phalanx.rehearsal.rehearse import rehearsal_job

    with console.status("planning") as status:
        machine = this_machine()
        job = rehearsal_job(run, machine, measure(run, machine, trace=True), limit)
        status.update("compiling")
        result = rehearse_compiled(job)
    show_compiled(console, result)
    finish(json, result.to_json(), result.fits)
