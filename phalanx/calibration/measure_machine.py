"""Measures this machine in a few minutes, and turns what it measured into constants that plans use. `phalanx bench` calls it.

Operations are measured one by one for the reader, and for what they tell directly. What a step of training really takes is measured
with real steps of small models, to which the constants of `planning/machines/rates` are drawn.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from phalanx.calibration import op_bench
from phalanx.calibration.op_bench import Row
from phalanx.calibration.step_bench import Compute, jobs, plan_of
from phalanx.host.env import worker_env
from phalanx.planning.feedback.refit import EIGHT_BITS, WIDTHS, Measured, corrected, refitted
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.cpu import cpu_hardware
from phalanx.planning.machines.hardware import hardware
from phalanx.spec.errors import RunFailed
from phalanx.spec.plan import Machine, Plan
from phalanx.spec.run import Cluster, Run, Train

Device = Literal["cpu", "cuda"]

_SPREAD = {"low": 0.87, "high": 1.18}
"""P10 and P90 of a step as parts of its promise, once the machine was measured."""
_APART = 4
"""How much longer a short message takes between cores that compute: they do not arrive at the same time."""
_OTHERS = 10 * 2**20
"""Bytes of what a rank of a job has in it besides: its connections, its text, its records."""
_PATIENCE = 300.0


@dataclass(slots=True)
class Bench:
    """What was measured."""

    machine: Machine
    device: Device
    rows: list[Row] = field(default_factory=list)
    constants: dict[str, float] = field(default_factory=dict)
    """By names such as "cuda.bf16.gemm"."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"device": self.device, "seconds": self.seconds, "constants": self.constants, "measured": self.rows}

    def value(self, what: str) -> float | None:
        """The best of the rows of a name."""
        found = [row["value"] for row in self.rows if row["what"] == what]
        return max(found) if found else None


def bench(machine: Machine, folder: Path, minutes: float = 5.0, say: Callable[[str], None] = lambda words: None) -> Bench:
    """All of it, in at most so many minutes. `folder`: whose disk is measured; `say`: what is being done."""
    begin = time.perf_counter()
    device: Device = "cuda" if machine.gpus and torch.cuda.is_available() else "cpu"
    found = Bench(machine, device)
    budget = 60 * minutes * 0.8  # starting processes and allocating takes the rest
    here = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _operations(found, here, budget * 0.3, say)
    finally:
        torch.set_num_threads(before)
    say("writing to disk")
    if (row := op_bench.disk(folder)) is not None:
        found.rows.append(row)
        found.constants[f"{device}.storage"] = row["value"]
    ranks = len(machine.gpus) if device == "cuda" else min(2, machine.cores)
    if ranks > 1:
        say(f"exchanging messages between {ranks} ranks")
        _links(found, ranks, budget * 0.15)
    say("training small models")
    if device == "cpu":
        _steps(found, "fp32", budget * 0.45)
    else:
        _steps(found, "bf16", budget * 0.35)
        if "cuda.fp8.gemm" in found.constants:  # what rounding to it costs, no product by itself tells
            _steps(found, "fp8", budget * 0.1, EIGHT_BITS)
    found.seconds = time.perf_counter() - begin
    return found


def _operations(found: Bench, here: torch.device, budget: float, say: Callable[[str], None]) -> None:
    on_gpu = found.device == "cuda"
    formats = ("fp32", "bf16", "fp16", "fp8") if on_gpu else ("fp32", "bf16")
    for compute in formats:
        say(f"multiplying matrices in {compute}")
        found.rows += op_bench.products(here, compute, budget * 0.5 / len(formats))
    say("attending")
    found.rows += op_bench.attention(here, "bf16" if on_gpu else "fp32", budget * 0.3)
    say("copying memory")
    found.rows += [op_bench.memory(here, budget * 0.05), op_bench.launch(here, budget * 0.05)]
    if on_gpu:
        found.rows += op_bench.host_copies(here, budget * 0.05)
        found.constants["cuda.host_bandwidth"] = min(found.value("host to device") or 0, found.value("device to host") or 0)
        gpu = hardware(_asking(found.device), found.machine).gpu
        for compute in ("fp32", "fp16", "fp8"):
            if (reached := found.value(f"{compute} product")) and (peak := gpu.peak(compute)):
                found.constants[f"cuda.{compute}.gemm"] = min(reached / peak, 1.0)
    found.constants[f"{found.device}.bandwidth"] = found.value("memory") or 0.0


def _asking(device: Device) -> Run:
    """A run that asks for nothing but this machine's devices of a kind."""
    return Run(train=Train(batch=1, steps=1), cluster=Cluster(device=device))


def _links(found: Bench, ranks: int, budget: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [["links", found.device, str(rank), str(ranks), str(port), f"{budget:.1f}"] for rank in range(ranks)]
    answers = _ask(words, _plan(found, 1))
    by_name = {(row["name"], row["bytes"]): row["seconds"] for row in answers[0]}
    for (name, size), seconds in by_name.items():
        factor = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": (ranks - 1) / ranks, "message": 2.0}[name]
        shape = f"{size >> 10} KiB, {ranks} ranks"
        found.rows.append({"what": name, "shape": shape, "value": factor * size / seconds, "unit": "B/s", "seconds": seconds})
    small, large = min(size for _, size in by_name), max(size for _, size in by_name)
    # Of the latencies, an all-reduce counts as two collectives; of the bandwidths, what remains once that is taken off.
    latency = by_name["all-reduce", small] / 2
    moving = max(by_name["all-reduce", large] - 2 * latency, 1e-9)
    bandwidth = 2 * (ranks - 1) / ranks * large / moving
    found.constants[f"{found.device}.latency"] = latency * (_APART if found.device == "cpu" else 1)
    if found.device == "cpu":
        found.constants["cpu.island_bandwidth"] = bandwidth
    else:
        nominal = hardware(_asking("cuda"), found.machine).island_bandwidth
        found.constants["cuda.island"] = bandwidth / nominal


def _steps(found: Bench, compute: Compute, budget: float, widths: Mapping[str, float] = WIDTHS) -> None:
    device = found.device
    answer = _ask([["steps", device, compute, "1", f"{budget:.1f}"]], _plan(found, 1))[0]
    devices = _one(found)
    steps = [
        (Measured(run=run, plan=plan_of(run, device, compute, 1), seconds=seconds), devices)
        for run, seconds in zip(jobs(device, compute), answer["seconds"], strict=True)
        if seconds is not None
    ]
    found.constants |= corrected(refitted(steps, compute, widths), devices, compute, {})
    for name, value in _SPREAD.items():
        found.constants[f"{device}.{name}"] = value
    if device == "cpu":
        found.constants["cpu.fixed_memory"] = float(answer["fixed"] + _OTHERS)
    for step, _ in steps:
        model, train = step.run.model, step.run.train
        shape = f"{model.layers} x {model.dim}, {step.plan.accumulation} x {train.micro_batch} x {train.sequence_length} tokens"
        found.rows.append({"what": f"{compute} step", "shape": shape, "value": step.seconds, "unit": "s"})


def _one(found: Bench) -> Hardware:
    """One device of this machine, with what has been measured so far."""
    own = tuple(found.constants.items())
    machine = Machine(
        host=found.machine.host,
        cpu=found.machine.cpu,
        cores=found.machine.cores,
        memory=found.machine.memory,
        core_flops=found.machine.core_flops,
        gpus=found.machine.gpus[:1],
        measured=own,
    )
    return cpu_hardware(machine, 1, 1) if found.device == "cpu" else hardware(_asking("cuda"), machine)


def _plan(found: Bench, threads: int) -> Plan:
    run = jobs(found.device, "fp32")[0]
    return plan_of(run, found.device, "fp32", threads)


def _ask(commands: list[list[str]], plan: Plan) -> list[Any]:
    """The answers of processes that run at the same time, in the environment that ranks are given."""
    start = [sys.executable, "-P", "-m", "phalanx.calibration.bench_process"]
    environment = worker_env(plan)
    running = [
        subprocess.Popen([*start, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for words in commands
    ]
    try:
        said = [process.communicate(timeout=_PATIENCE) for process in running]
    except subprocess.TimeoutExpired:
        raise RunFailed(f"A measurement ({' '.join(commands[0])}) did not end within {_PATIENCE:.0f} s.") from None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    for process, (_, trouble) in zip(running, said, strict=True):
        if process.returncode:
            raise RunFailed(f"A measurement ({' '.join(commands[0])}) failed:\n{trouble.strip()}")
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in said]
