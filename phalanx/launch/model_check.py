"""Checks of a run that only torch can answer: the size of a custom model, whether given weights match it, and whether the run fits in
memory. The launcher never imports torch, so each check asks another process."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.checkpointing.find_checkpoint import find
from phalanx.dashboard.numbers import size
from phalanx.host.probe import this_machine
from phalanx.host.process_tree import ask_python, python_command
from phalanx.planning.machines.hardware import hardware, planned
from phalanx.spec import hf_config
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.hub import HubError, model_folder
from phalanx.spec.json_value import JsonObject
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.run import Run

_MEASURE_SECONDS = 600.0  # importing a module may download or compile something
_REHEARSAL_SECONDS = 300.0  # a slower rehearsal is not waited for
_REHEARSAL_THRESHOLD = 0.5  # fraction of the memory above which a run is rehearsed: smaller runs start without the delay
_CPU_FRACTION = 0.95
DRIVER = 614 << 20  # bytes of the memory shown by nvidia-smi that the driver reserves; measured on an H200
REMEDY = (
    'set a smaller train.micro_batch, memory.recompute = "full", memory.offload = "cpu" or a layout that shards more, or start the run '
    "anyway with --unrehearsed"
)


def measure(run: Run, machine: Machine | None = None, *, trace: bool | None = None) -> Size | None:
    """Count the run's custom module; None for built-in models, whose size follows from the spec. RunError if it cannot be built, or not be
    cut as the run's layout says: once, before any rank starts.

    `trace`: also trace a step on fake tensors, for activations and FLOPs, and to run the layout's cuts. Default: if one replica has several
    ranks. `machine`: the one to train on, if the run names no cluster.
    """
    if run.model.is_builtin:
        return None
    key = run.model.custom_key
    if trace is None:
        trace = replace(run.layout, data=1).ranks > 1
    if not trace:
        return Size(**_measure(run, key))
    gpu = _gpu(run, machine)
    compute = run.precision.compute or ("bf16" if gpu else "fp32")
    question = json.dumps({"run": dump(run), "gpu": gpu, "compute": compute})
    return Size(**_ask("phalanx.rehearsal.module_process", question, key))


@dataclass(frozen=True, slots=True)
class InferredCuts:
    """How tensor ranks divide a model."""

    text: str
    plan: JsonObject
    """The fields of a CutPlan, and `axes`, its table of names of dimensions."""


def inferred_cuts(run: Run) -> InferredCuts:
    """How tensor ranks divide the run's model, inferred from its graph. RunError if it cannot be traced."""
    key = "the model" if run.model.is_builtin else run.model.custom_key
    found = _ask("phalanx.worker.cuts_process", dump(run), key)
    return InferredCuts(found.pop("text"), found)


def measured(run: Run, machine: Machine | None = None) -> Run:
    """The run with its custom module counted and traced, for plans; other runs as they are."""
    size = measure(run, machine, trace=True)
    return run if size is None else replace(run, model=replace(run.model, measured=size))


def _gpu(run: Run, machine: Machine | None) -> str:
    """The name of the GPU that a run is for; empty: CPUs."""
    if planned(run):
        cluster = hardware(run, None)
        return "" if cluster.device == "cpu" else cluster.gpu.key
    machine = machine or this_machine()
    return "" if run.cluster.device == "cpu" or not machine.gpus else machine.gpus[0].name


def check_weights(run: Run) -> None:
    """Raise RunError unless the weights of `model.from`, if given, are present, complete and match the model. Downloads those of a hub
    name."""
    given = run.model.from_
    if given is None:
        return
    absent = (
        f'model.from = "{given}" does not exist any more: name a folder of Hugging Face weights, a run directory or a '
        f"checkpoint, taken from {Path.cwd()}."
    )
    try:
        folder = model_folder(given)
    except HubError as error:
        raise RunError(f'model.from = "{given}": {error}' if error.exists else f"{absent} {error}") from None
    if not folder.is_dir():
        raise RunError(absent)
    if hf_config.is_folder(folder):
        _measure(run, f'model.from = "{given}"')
    else:
        find(folder)


def memory_problems(run: Run, plan: Plan, machine: Machine) -> list[str]:
    """Sentences on why the run does not fit in the memory of this machine; empty if it fits or cannot be rehearsed."""
    available = _available(plan, machine)
    if available <= 0:
        return []
    if _estimate(run, plan, machine) * (plan.ranks if plan.device == "cpu" else 1) < _REHEARSAL_THRESHOLD * available:
        return []
    question = {
        "run": dump(run),
        "plan": plan.to_json(),
        "capacity": available,
        "gpu": machine.gpus[0].name if machine.gpus else "",
    }
    try:
        answer: dict[str, Any] = ask_python(
            python_command("phalanx.rehearsal.rehearse"), _REHEARSAL_SECONDS, json.dumps(question)
        )
    except OSError:
        answer = {"problems": []}
    if "problems" in answer:
        return []  # a run that cannot be rehearsed is not refused for that
    kinds: list[dict[str, Any]] = answer["kinds"]
    if plan.device == "cpu":
        need = sum(kind["in_use"] * kind["count"] for kind in kinds)
        if need <= _CPU_FRACTION * available:
            return []
        return [
            f"{plan.ranks} CPU ranks need {size(need)} together, as a rehearsal of their program shows, but this machine has "
            f"{size(available)}: {REMEDY}."
        ]
    too_large = [kind for kind in kinds if not kind["fits"] and kind["error"] is None]
    if not too_large:
        return []
    worst = max(too_large, key=lambda kind: kind["in_use"])
    return [
        f"Rank {worst['rank']} needs {size(worst['in_use'])} of the GPU's {size(available)}, as a rehearsal of its program shows, and "
        f"runs out of memory in {worst['at']}: {REMEDY}."
    ]


def _available(plan: Plan, machine: Machine) -> int:
    if plan.device == "cpu":
        return machine.memory
    return min((gpu.memory for gpu in machine.gpus[: plan.ranks]), default=0) - DRIVER


def _estimate(run: Run, plan: Plan, machine: Machine) -> float:
    """Planned bytes of one rank; on CPUs without the interpreter, which no rehearsal counts."""
    from phalanx.planning.machine_fit import need_and_promise  # imports numpy, which other commands need not wait for

    need, promise = (0.0, plan.promise) if plan.promise else need_and_promise(run, machine, plan)
    if promise is None:
        return need
    return promise.total_memory - (promise.memory.get("fixed", 0.0) if plan.device == "cpu" else 0.0)


def _measure(run: Run, key: str) -> dict[str, Any]:
    """Ask `worker/measure_process` about the model; `key` names the run-file key in errors."""
    return _ask("phalanx.worker.measure_process", dump(run), key)


def _ask(program: str, question: str, key: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = ask_python(python_command(program), _MEASURE_SECONDS, question)
    except TimeoutError:
        raise RunError(f"{key} was not built within {_MEASURE_SECONDS:.0f} s: look at what it does when imported.") from None
    except ChildProcessError as error:
        raise RunError(f"{key} could not be built: {error}.") from None
    if "problems" in answer:
        raise RunError(answer["problems"])
    return answer
