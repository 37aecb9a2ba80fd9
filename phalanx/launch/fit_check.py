"""Whether a run that is about to start fits: rehearsed, one rank of each kind, where an estimate says that it may be close. Only torch can
rehearse, so another process is asked; `launch/prepare` calls it, and `rehearsal/fit_process` is what answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from phalanx.host.env import for_python
from phalanx.spec.dump import dump
from phalanx.spec.machine import Machine
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

_PATIENCE = 300.0
"""Seconds; a rehearsal that takes longer says nothing."""
_CLOSE = 0.5
"""Part of the memory from which on a run is rehearsed: smaller ones start as quickly as ever."""
_CPU_SHARE = 0.95
DRIVER = 614 << 20
"""Bytes of what nvidia-smi shows that the driver keeps for itself; measured on an H200."""
REMEDY = (
    'take a smaller train.micro_batch, memory.recompute = "full", memory.offload = "cpu" or a layout that shares more, or start it all '
    "the same with --unrehearsed"
)


def memory_problems(run: Run, plan: Plan, machine: Machine) -> list[str]:
    """Why the run does not fit into this machine's devices, in sentences; empty where it does, or nobody can tell."""
    have = _have(plan, machine)
    if have <= 0 or _estimate(run, plan, machine) * (plan.ranks if plan.device == "cpu" else 1) < _CLOSE * have:
        return []
    answer = _ask(run, plan, have, machine)
    if answer is None or "problems" in answer:
        return []  # what cannot be rehearsed is not refused for it
    kinds: list[dict[str, Any]] = answer["kinds"]
    if plan.device == "cpu":
        need = sum(kind["in_use"] * kind["count"] for kind in kinds)
        if need <= _CPU_SHARE * have:
            return []
        return [
            f"{plan.ranks} CPU ranks need {_gib(need)} together, as a rehearsal of their program shows, and {_gib(have)} are there: {REMEDY}."
        ]
    without = [kind for kind in kinds if not kind["fits"] and kind["error"] is None]
    if not without:
        return []
    worst = max(without, key=lambda kind: kind["in_use"])
    return [
        f"Rank {worst['rank']} needs {_gib(worst['in_use'])} of the GPU's {_gib(have)}, as a rehearsal of its program shows, and runs out of "
        f"memory in {worst['at']}: {REMEDY}."
    ]


def _have(plan: Plan, machine: Machine) -> int:
    if plan.device == "cpu":
        return machine.memory
    return min((gpu.memory for gpu in machine.gpus[: plan.ranks]), default=0) - DRIVER


def _estimate(run: Run, plan: Plan, machine: Machine) -> float:
    """Bytes of a rank, as the plan has them; of one on cores without the interpreter, which no rehearsal counts."""
    from phalanx.planning.chosen import promised, rank_bytes  # with numpy, which whoever does not start a run need not wait for

    promise = plan.promise or promised(run, machine, plan)
    if promise is None:
        return rank_bytes(run, machine, plan)
    return promise.total_memory - (promise.memory.get("fixed", 0.0) if plan.device == "cpu" else 0.0)


def _ask(run: Run, plan: Plan, have: int, machine: Machine) -> dict[str, Any] | None:
    question = {"run": dump(run), "plan": plan.to_json(), "capacity": have, "gpu": machine.gpus[0].name if machine.gpus else ""}
    try:
        # -P: a file of the working directory that is called like a module must not be taken for it.
        done = subprocess.run(
            [sys.executable, "-P", "-m", "phalanx.rehearsal.fit_process"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            env=for_python(),
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError):
        return None
    return answer if isinstance(answer, dict) else None


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
