"""`phalanx rehearse` of a run with `engine.name = "xla"`: its step is compiled for virtual devices of the CPU, one for each device of the layout, and
never runs. The result is what the compiler made of it, next to what the plan expects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from rich.console import Console
from rich.table import Table

from phalanx.host.process_tree import ask_python, python_command
from phalanx.rehearsal.compiled_process import CompiledProgram
from phalanx.rehearsal.rehearse import Job
from phalanx.rehearsal.result import GIB, Message, bytes_by_tier, bytes_by_use, flops_text, show_messages, unit_of
from phalanx.spec.check_engine import missing_engine
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan, Promise
from phalanx.spec.run import Run

MOST_DEVICES = 256
"""Virtual devices of one compilation. A layout with more is compiled with fewer replicas."""
_SECONDS = 3600.0
"""Until a compilation counts as hanging."""
_AXES = ("data", "shard", "context", "tensor")
"""Of the mesh, outermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledRehearsal:
    """The compiled step of one device. All devices run the same program."""

    ranks: int
    compiled_for: int
    """Virtual devices; fewer than ranks where the layout has more than MOST_DEVICES."""
    device: str
    """What the run is planned for."""
    program: CompiledProgram
    messages: tuple[Message, ...]
    micro_batches: int
    capacity: int | None
    """Bytes of a device; None: unknown."""
    promise: Promise | None
    """What the plan expects."""
    planned_flops: float
    """Of one device in a step, as the plan counts them: without recomputation."""
    notes: tuple[str, ...] = ()

    @property
    def components(self) -> dict[str, int]:
        """Bytes by purpose."""
        program = self.program
        return {
            "parameters": program.parameters,
            "optimizer": program.optimizer,
            "temporary": program.temporary,
            "batch and results": program.batch + program.results,
        }

    @property
    def in_use(self) -> int:
        """Bytes of a device in a step."""
        return sum(self.components.values())

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.in_use <= self.capacity

    def to_json(self) -> dict[str, Any]:
        """Sizes are in GiB under names that end in _gib and by component, and in bytes elsewhere."""
        program, promise = self.program, self.promise
        return {
            "engine": "xla",
            "ranks": self.ranks,
            "compiled_for": self.compiled_for,
            "device": self.device,
            "fits": self.fits,
            "in_use_gib": self.in_use / GIB,
            "capacity_gib": None if self.capacity is None else self.capacity / GIB,
            "components": {name: size / GIB for name, size in self.components.items()},
            "bytes": self.components,
            "flops": {"all": program.flops, "formats": program.formats},
            "sent": bytes_by_use(self.messages),
            "tiers": bytes_by_tier(self.messages),
            "messages": sum(message.times for message in self.messages),
            "micro_batches": self.micro_batches,
            "trace_seconds": program.trace_seconds,
            "compile_seconds": program.compile_seconds,
            "rematerializations": list(program.rematerializations),
            "planned": {
                "flops": self.planned_flops,
                "memory": None if promise is None else {name: size / GIB for name, size in promise.memory.items()},
                "in_use_gib": None if promise is None else promise.total_memory / GIB,
                "seconds": None if promise is None else promise.seconds,
            },
            "notes": list(self.notes),
        }


def rehearse_compiled(job: Job) -> CompiledRehearsal:
    """Compiles the step of a job. Raises RunError for what is refused, and for a layout with too many devices."""
    refuse(missing_engine(job.run))
    run, plan, notes = job.run, job.plan, list(_NOTES[job.name.startswith("tpu")])
    layout = fewer_replicas(plan.layout)
    if layout != plan.layout:
        part = plan.ranks // layout.ranks
        notes.insert(
            0,
            f"Compiled for {layout.ranks} of {plan.ranks:,} devices: with layout.data = {layout.data} instead of {plan.layout.data}, and a batch "
            f"that is {part} times smaller. A device computes and holds the same. Messages between replicas are counted for all of them.",
        )
        run = replace(run, train=replace(run.train, batch=run.batch // part, batch_tokens=None))
    smaller = replace(plan, layout=layout)
    program = _compiled(replace(run, layout=layout), smaller)
    if program.endless:
        notes.append(
            f"{program.endless} loops of the program have no known length: their products and messages are counted once."
        )
    return CompiledRehearsal(
        ranks=plan.ranks,
        compiled_for=layout.ranks,
        device=job.name or "cpu",
        program=program,
        messages=tuple(_messages(program, job, layout)),
        micro_batches=plan.accumulation,
        capacity=job.device.capacity,
        promise=plan.promise,
        planned_flops=plan.flops_per_token * job.run.batch_tokens / plan.ranks,
        notes=tuple(notes),
    )


_COMPILER = (
    "The compiler is that of CPUs. Another device's fuses other operations, so that temporary memory differs; products of bf16 are computed in "
    "fp32 here, with copies."
)
_NOTES = (
    (_COMPILER,),
    (_COMPILER, "On TPUs attention is a kernel of its own, which keeps no table of scores; here it is not."),
)


def fewer_replicas(layout: Layout) -> Layout:
    """The layout, with as many replicas as virtual devices allow; at least two of several, because one exchanges nothing. Raises RunError where
    that is not enough."""
    if layout.ranks <= MOST_DEVICES:
        return layout
    data = layout.data or 1
    each = layout.ranks // data
    allowed = [number for number in range(min(data, 2), data + 1) if data % number == 0 and number * each <= MOST_DEVICES]
    if not allowed:
        raise RunError(
            f"One replica of the layout has {each} devices, but a step is compiled for {MOST_DEVICES} virtual devices at most, with two replicas if "
            "there are several: lower layout.shard, layout.context or layout.tensor to rehearse."
        )
    return replace(layout, data=allowed[-1])


def _compiled(run: Run, plan: Plan) -> CompiledProgram:
    question = json.dumps({"run": dump(run), "plan": replace(plan, promise=None).to_json()})
    try:
        answer: dict[str, Any] = ask_python(python_command("phalanx.rehearsal.compiled_process"), _SECONDS, question)
    except TimeoutError:
        raise RunError(
            f'engine.name = "xla": the step was not compiled within {_SECONDS:.0f} s: lower model.layers to rehearse.'
        ) from None
    except ChildProcessError as error:
        raise RunError(f'engine.name = "xla": the step could not be compiled: {error}.') from None
    if "problems" in answer:
        raise RunError(answer["problems"])
    collectives = tuple((kind, tuple(group), size, times) for kind, group, size, times in answer.pop("collectives"))
    answer["rematerializations"] = tuple(answer["rematerializations"])
    return CompiledProgram(**answer, collectives=collectives)


def _messages(program: CompiledProgram, job: Job, compiled: Layout) -> Iterator[Message]:
    """The messages of the layout, from those of the one that was compiled, which has fewer replicas."""
    whole = job.plan.layout
    for kind, group, size, times in program.collectives:
        axes = _axes(group, compiled)
        members, sent = len(group), size
        if whole != compiled and "data" in axes:
            members *= (whole.data or 1) // (compiled.data or 1)
            if kind not in (
                "collective-permute",
                "reduce-scatter",
            ):  # the first goes to a neighbor, and of the second each gets less
                sent = round(size * (1 - 1 / members) / (1 - 1 / len(group)))
        ends = _places(group, compiled, whole)
        yield Message(
            collective=kind,
            use=" + ".join(axes) or "none",
            ranks=members,
            tier=job.device.tier(ends),
            bytes=sent,
            phase="step",
            action="",
            times=times,
        )


def _axes(group: Sequence[int], layout: Layout) -> list[str]:
    """The axes of the mesh along which these devices differ."""
    places = [_place(device, layout) for device in group]
    return [axis for number, axis in enumerate(_AXES) if len({place[number] for place in places}) > 1]


def _places(group: Sequence[int], compiled: Layout, whole: Layout) -> list[int]:
    """Numbers of these devices in the whole layout: the last of the replicas that were compiled stands for the last of all."""
    lengths, last = _lengths(whole), (compiled.data or 1) - 1
    numbers = []
    for device in group:
        replica, *inside = _place(device, compiled)
        place = [lengths[0] - 1 if replica == last and last else replica, *inside]
        numbers.append(sum(index * prod(lengths[axis + 1 :]) for axis, index in enumerate(place)))
    return numbers


def _place(device: int, layout: Layout) -> list[int]:
    lengths = _lengths(layout)
    return [device // prod(lengths[axis + 1 :]) % length for axis, length in enumerate(lengths)]


def _lengths(layout: Layout) -> tuple[int, ...]:
    return layout.data or 1, layout.shard, layout.context, layout.tensor


def show_compiled(console: Console, rehearsal: CompiledRehearsal) -> None:
    """Prints the verdict, then memory and operations next to the plan's, messages, and what the compiler said."""
    style = "red" if not rehearsal.fits else "bold" if rehearsal.capacity is None else "bold green"
    console.print(verdict(rehearsal), style=style, soft_wrap=True)
    _show_memory(console, rehearsal)
    program = rehearsal.program
    planned = f" (planned: {flops_text(rehearsal.planned_flops)}, without recomputation)"
    formats = ", ".join(f"{count / max(program.flops, 1):.0%} in {name}" for name, count in program.formats.items())
    console.print(f"operations of a device in a step: {flops_text(program.flops)}{planned}; {formats}", soft_wrap=True)
    show_messages(console, rehearsal.messages)
    seconds = f"traced in {program.trace_seconds:.1f} s, compiled in {program.compile_seconds:.1f} s on this machine"
    console.print(f"{seconds}, for {rehearsal.compiled_for} virtual devices", soft_wrap=True)
    if program.rematerializations:
        console.print("the compiler gathers whole arrays on every device, which takes time and memory:", style="red")
        for line in program.rematerializations:
            console.print(f"  {line}", style="red", markup=False, soft_wrap=True)
    else:
        console.print("the compiler reports no involuntary full rematerialization")
    for note in rehearsal.notes:
        console.print(note, style="dim", soft_wrap=True)


def verdict(rehearsal: CompiledRehearsal) -> str:
    """Whether the step fits, as the first sentence of the report."""
    unit, scale = unit_of(rehearsal.in_use)
    who = f"each of {rehearsal.ranks:,} device{'s' if rehearsal.ranks > 1 else ''} ({rehearsal.device})"
    used = f"{who} needs {rehearsal.in_use / scale:,.1f}"
    if rehearsal.capacity is None:
        return f"{used} {unit}; the memory of a device is not known, --memory sets it"
    return f"{'fits' if rehearsal.fits else 'does not fit'}: {used} of {rehearsal.capacity / scale:,.1f} {unit}"


def _show_memory(console: Console, rehearsal: CompiledRehearsal) -> None:
    planned = {} if rehearsal.promise is None else rehearsal.promise.memory
    unit, scale = unit_of(rehearsal.in_use)
    table = Table("memory of a device", f"compiled, {unit}", f"planned, {unit}", box=None, header_style="bold", pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    apart = ("parameters", "optimizer", "fixed")
    rows: dict[str, tuple[float | None, float | None]] = {
        name: (size, planned.get(name)) for name, size in rehearsal.components.items()
    }
    if planned:
        rest = sum(size for name, size in planned.items() if name not in apart)
        rows["temporary"] = rehearsal.components["temporary"], rest
        rows |= {"runtime and fragmentation": (None, planned["fixed"])} if planned.get("fixed") else {}
    rows["in use"] = rehearsal.in_use, sum(planned.values()) or None
    for name, sizes in rows.items():
        told = ["" if size is None else f"{size / scale:,.2f}" for size in sizes]
        table.add_row(name, *told, style="bold" if name == "in use" else None)
    console.print(table)
