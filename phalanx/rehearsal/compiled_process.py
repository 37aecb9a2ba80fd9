"""Compiles the step of a run with `engine.name = "xla"` for virtual devices of the CPU, and prints what the compiler made of it. `rehearsal/compiled_step`
starts it, because JAX counts its devices once in a process.

    python -m phalanx.rehearsal.compiled_process < QUESTION.json

It reads a run and a plan, and prints a JSON object on the last line: the fields of `CompiledProgram`; or problems, a list of sentences.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from phalanx.host.env import use_virtual_devices
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

Result = TypeVar("Result")

_REMATERIALIZATION = "Involuntary full rematerialization"
_REPORTED = 5
"""Most sentences of the compiler that are passed on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledProgram:
    """What a compiler made of a step. Bytes, operations and messages are those of one device."""

    parameters: int
    """Bytes that arrive and stay: parameters, optimizer states, and the rest of the arguments, which is the batch."""
    optimizer: int
    batch: int
    results: int
    """Bytes of results that do not take over the memory of an argument."""
    temporary: int
    """Bytes that the step needs besides."""
    flops: int
    """Of matrix products in a step."""
    formats: dict[str, int]
    """The same by the number formats of both operands."""
    collectives: tuple[tuple[str, tuple[int, ...], int, int], ...]
    """The kind of each, its first group of devices, the bytes that a device sends, and how often."""
    trace_seconds: float
    compile_seconds: float
    rematerializations: tuple[str, ...]
    """What the compiler says of arrays that it gathers on every device because it finds no other way."""
    endless: int
    """Loops of unknown length, which count once."""


def main() -> None:
    question = json.loads(sys.stdin.read())
    plan = Plan.from_json(question["plan"])
    use_virtual_devices(plan.ranks)
    torch.set_num_threads(1)
    try:
        answer: dict[str, Any] = asdict(compiled_program(loads(question["run"]), plan))
    except RunError as error:
        answer = {"problems": list(error.problems)}
    print("\n" + json.dumps(answer), flush=True)


def compiled_program(run: Run, plan: Plan) -> CompiledProgram:
    """Compiles the step for as many virtual devices as the plan has. Allocates nothing on them."""
    from phalanx.xla.abstract_step import abstract_arguments, bytes_on_a_device
    from phalanx.xla.compiled import compile_step
    from phalanx.xla.forward import traced_model
    from phalanx.xla.program_text import read_program

    model = traced_model(run, plan)
    arguments = abstract_arguments(model, run, plan)
    step, said = _listening(lambda: compile_step(model, run, arguments, is_run=False))
    program = read_program(step.compiled_text(), plan.ranks)
    state: Any = arguments[0]
    parameters = bytes_on_a_device(state.params | state.buffers)
    optimizer = bytes_on_a_device(state.means) + bytes_on_a_device(state.squares)
    lines = [line.partition("]")[2].strip() or line for line in said.splitlines() if _REMATERIALIZATION in line]
    return CompiledProgram(
        parameters=parameters,
        optimizer=optimizer,
        batch=step.argument_bytes - parameters - optimizer,
        results=step.result_bytes - step.donated_bytes,
        temporary=step.temporary_bytes,
        flops=program.flops,
        formats=dict(program.operands),
        collectives=tuple((each.kind, each.group, each.bytes, each.times) for each in program.collectives),
        trace_seconds=step.trace_seconds,
        compile_seconds=step.compile_seconds,
        rematerializations=tuple(lines[:_REPORTED]),
        endless=program.endless,
    )


def _listening(work: Callable[[], Result]) -> tuple[Result, str]:
    """What the work returns, and what is written to the standard error of this process meanwhile, which the compiler does from C++."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            result = work()
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            said = file.read().decode(errors="replace")
            sys.stderr.write(said)
    return result, said


if __name__ == "__main__":
    main()
