"""`phalanx bench` measures this machine for the planner; `phalanx bench step` measures the training step next to that of other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from phalanx.cli.options import AsJson, Device, check_folders
from phalanx.cli.output import console, finish, write_file
from phalanx.dashboard.trainer_bars import FORMATS, TrainerBar, draw_trainers
from phalanx.host.probe import this_machine
from phalanx.spec.errors import RunError, refuse, toml
from phalanx.spec.load import load, loads
from phalanx.spec.run import Run

if TYPE_CHECKING:
    from phalanx.comparison.comparison_report import StepComparison

_SHAPE = "[train]\nbatch = 8\nsteps = 1\n[data]\ndocument_mask = false\n"
"""The rest of the run file of --model. Peers do not mask documents, so Phalanx does not either."""

app = typer.Typer(invoke_without_command=True)


@app.callback()
def bench(
    context: typer.Context,
    minutes: Annotated[float, Option(min=0.2, max=60.0, help="Maximum time to take.")] = 5.0,
    out: Annotated[Path | None, Option(help="File to write. Default: the file that plans on this machine read.")] = None,
    json: AsJson = False,
) -> None:
    """Measure matrix products, attention, memory, links, kernel launches, disk and training steps of this machine. Plans use the
    result. `phalanx bench step` compares the training step with that of other trainers."""
    if context.invoked_subcommand is not None:
        return
    from phalanx.calibration.measure_machine import bench as measure
    from phalanx.dashboard.plan_text import show_bench
    from phalanx.host.machine_profile import profile_file, write_profile

    machine = this_machine()
    with console.status("measuring") as status:
        report = measure(machine, Path.cwd(), minutes, status.update)
    path = write_profile(machine, report.constants, report.row_tables(), out)
    show_bench(console, [(row.what, row.shape, row.value, row.unit) for row in report.rows], report.constants)
    use = "plans on this machine use it from now on" if path == profile_file() else "plans do not read it there"
    console.print(f"measured in {report.seconds:.0f} s; saved to {path}: {use}")
    finish(json, report.to_json() | {"file": str(path)})


@app.command("step")
def step(
    words: Annotated[
        list[str] | None,
        Argument(
            help="The run file, and settings such as model.layers=16 that override it.", metavar="[RUN.toml] [KEY=VALUE]..."
        ),
    ] = None,
    model: Annotated[str | None, Option(help="A preset instead of a run file; `phalanx models` lists them.")] = None,
    micro_batch: Annotated[
        int | None, Option(min=1, help="Sequences of a step. Default: train.micro_batch, or the plan's choice.")
    ] = None,
    sequence: Annotated[
        int | None, Option(min=2, help="Tokens of a sequence. Default: train.sequence_length, or 1024.")
    ] = None,
    steps: Annotated[int, Option(min=1, help="Measured steps of each trainer.")] = 20,
    warmup: Annotated[
        int,
        Option(min=1, help="Steps before them. Phalanx accounts and times some of its first five, and compiles in the first."),
    ] = 5,
    rounds: Annotated[int, Option(min=1, help="Turns of each trainer, over which the steps are divided.")] = 4,
    peers: Annotated[
        str | None,
        Option(
            help="Trainers, separated by commas: phalanx, phalanx-xla, transformers, torchtitan, torchtitan-fsdp, hand, jax. Default: all."
        ),
    ] = None,
    compile: Annotated[
        bool | None,
        Option(
            "--compile/--no-compile",
            help="Compile all trainers, or none. Default: Phalanx as the run file says; peers on GPUs.",
        ),
    ] = None,
    device: Device = None,
    picture: Annotated[Path | None, Option(help="Draw speed and memory into this file, .svg or .png.")] = None,
    json: AsJson = False,
) -> None:
    """Compare the training step of Phalanx, with both engines, with transformers, torchtitan and loops in plain PyTorch and JAX, on one device and one shape.

    Every trainer is a process of its own, with the same initial weights and tokens, AdamW, fp32 master weights and clipping. They take turns.
    The table has medians, quartiles, peak memory and the ratio to the best peer. A trainer whose losses differ from Phalanx's is not compared.

    Model FLOPs of a token: 6 per weight of a matrix that it passes through (the head counts, the embedding look-up does not; of experts the
    active ones), plus 12·layers·width·sequence for attention. The causal MFU counts half of the attention.
    """
    refuse(_file_problems(picture))
    run = _run(words or [], model, {"train.sequence_length": sequence, "cluster.device": device})
    from phalanx.comparison.compare_step import TRAINERS, ComparisonSettings, compare

    names = TRAINERS if peers is None else tuple(name.strip() for name in peers.split(",") if name.strip())
    settings = ComparisonSettings(
        trainers=names, micro_batch=micro_batch, steps=steps, warmup=warmup, rounds=rounds, compile=compile
    )
    with console.status("preparing") as status:
        report = compare(run, this_machine(), settings, status.update)
    report.render(console)
    if picture is not None and report.ran:
        write_file(picture, lambda: _draw(report, picture))
    asked = "phalanx" in names
    finish(json, report.to_json(), report.phalanx is not None if asked else bool(report.ran))


def _draw(report: StepComparison, path: Path) -> None:
    tokens = report.micro_batch * report.sequence
    bars = [
        TrainerBar(
            name=result.name,
            tokens_per_second=report.tokens_per_second(result),
            quartiles=(tokens / result.quartiles[1], tokens / result.quartiles[0]),
            memory=result.memory,
            is_ours=result is report.phalanx,
        )
        for result in report.comparable
    ]
    caption = f"{report.micro_batch} × {report.sequence:,} tokens, {report.device}"
    draw_trainers(bars, report.model, caption, path)


def _file_problems(picture: Path | None) -> list[str]:
    if picture is not None and picture.suffix[1:] not in FORMATS:
        return [f"--picture {picture}: its name must end in {' or '.join(f'.{kind}' for kind in FORMATS)}."]
    return check_folders(picture)


def _run(words: list[str], model: str | None, given: dict[str, str | int | None]) -> Run:
    """The run of a run file or of a preset, with overrides."""
    is_file = bool(words) and "=" not in words[0]
    overrides = [
        *(words[1:] if is_file else words),
        *(f"{key}={toml(value)}" for key, value in given.items() if value is not None),
    ]
    if is_file and model is not None:
        raise RunError(
            f"{words[0]} and --model {model}: give a run file or a preset. model.preset={model} sets it in a run file."
        )
    if is_file:
        return load(words[0], overrides)
    if model is None:
        raise RunError(
            "Name a run file, or a model: `phalanx bench step --model llama3.2-1b`. `phalanx models` lists the presets."
        )
    return loads(f"[model]\npreset = {toml(model)}\n{_SHAPE}", name=f"--model {model}", overrides=overrides)
