"""Measures this machine in a few minutes and derives the constants that plans use: a few from single operations, the others of
`planning/machines/rates` fitted to real training steps of small models. `phalanx bench` calls it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from phalanx import accelerator
from phalanx.calibration import op_bench
from phalanx.calibration.bench_process import Compute, Device, jobs, plan_of
from phalanx.calibration.op_bench import Measurement
from phalanx.host.env import worker_env
from phalanx.host.process_tree import python_command
from phalanx.planning.feedback import EIGHT_BITS, WIDTHS, Measured, corrected, refitted
from phalanx.planning.machines.cpu import cpu_hardware
from phalanx.planning.machines.hardware import hardware
from phalanx.spec.errors import RunFailed
from phalanx.spec.plan import Machine
from phalanx.spec.run import Cluster, Run, Train

_SPREAD = {"low": 0.87, "high": 1.18}
"""P10 and P90 of a step as fractions of its promise, on a measured machine."""
_SKEW = 4
"""How many times as long a short message takes between CPU ranks that compute, because they do not arrive at the same time."""
_RANK_BYTES = 10 * 2**20
"""Memory of a rank of a job beyond a single process: connections, text, records."""
_TIMEOUT = 300.0


@dataclass(slots=True)
class BenchReport:
    """The measurements of a machine and the constants that follow from them."""

    machine: Machine
    device: Device
    rows: list[Measurement] = field(default_factory=list)
    constants: dict[str, float] = field(default_factory=dict)
    """Values by names such as "cuda.bf16.gemm"."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"device": self.device, "seconds": self.seconds, "constants": self.constants, "measured": self.row_tables()}

    def row_tables(self) -> list[dict[str, Any]]:
        """The rows as the machine profile and JSON hold them."""
        return [{key: value for key, value in asdict(row).items() if value is not None} for row in self.rows]

    def best(self, what: str) -> float | None:
        """The largest value measured under a name."""
        return max((row.value for row in self.rows if row.what == what), default=None)


def bench(
    machine: Machine, folder: Path, minutes: float = 5.0, on_status: Callable[[str], None] = lambda status: None
) -> BenchReport:
    """Measures the machine in at most `minutes`, and the disk of `folder`. `on_status` receives the name of each phase."""
    begin = time.perf_counter()
    device: Device = "cuda" if machine.gpus and accelerator.of("cuda").available() else "cpu"
    report = BenchReport(machine, device)
    budget = 60 * minutes * 0.8  # starting processes and allocating memory takes the rest
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _operations(report, accelerator.of(device).device(), budget * 0.3, on_status)
    finally:
        torch.set_num_threads(before)
    on_status("writing to disk")
    if (row := op_bench.disk(folder)) is not None:
        report.rows.append(row)
        report.constants[f"{device}.storage"] = row.value
    ranks = len(machine.gpus) if device == "cuda" else min(2, machine.cores)
    if ranks > 1:
        on_status(f"exchanging messages between {ranks} ranks")
        _links(report, ranks, budget * 0.15)
    on_status("training small models")
    if device == "cpu":
        _steps(report, "fp32", budget * 0.45)
    else:
        _steps(report, "bf16", budget * 0.35)
        if "cuda.fp8.gemm" in report.constants:  # a product alone does not show the cost of casts
            _steps(report, "fp8", budget * 0.1, EIGHT_BITS)
    report.seconds = time.perf_counter() - begin
    return report


def _operations(report: BenchReport, device: torch.device, budget: float, on_status: Callable[[str], None]) -> None:
    on_gpu = accelerator.of(device).asynchronous
    formats = ("fp32", "bf16", "fp16", "fp8") if on_gpu else ("fp32", "bf16")
    for compute in formats:
        on_status(f"multiplying matrices in {compute}")
        report.rows += op_bench.products(device, compute, budget * 0.5 / len(formats))
    on_status("computing attention")
    report.rows += op_bench.attention(device, "bf16" if on_gpu else "fp32", budget * 0.3)
    on_status("copying memory")
    report.rows += [op_bench.memory(device, budget * 0.05), op_bench.launch(device, budget * 0.05)]
    if on_gpu:
        report.rows += op_bench.host_copies(device, budget * 0.05)
        report.constants["cuda.host_bandwidth"] = min(report.best("host to device") or 0, report.best("device to host") or 0)
        gpu = hardware(_any_run(report.device), report.machine).gpu
        for compute in ("fp32", "fp16", "fp8"):
            if (reached := report.best(f"{compute} product")) and (peak := gpu.peak(compute)):
                report.constants[f"cuda.{compute}.gemm"] = min(reached / peak, 1.0)
    report.constants[f"{report.device}.bandwidth"] = report.best("memory") or 0.0


def _any_run(device: Device) -> Run:
    """A run that sets nothing but the kind of this machine's devices."""
    return Run(train=Train(batch=1, steps=1), cluster=Cluster(device=device))


def _links(report: BenchReport, ranks: int, budget: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [["links", report.device, str(rank), str(ranks), str(port), f"{budget:.1f}"] for rank in range(ranks)]
    answers = _run_processes(report.device, arguments)
    times = {(row["name"], row["bytes"]): row["seconds"] for row in answers[0]}
    for (name, size), seconds in times.items():
        factor = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": (ranks - 1) / ranks, "message": 2.0}[name]
        shape = f"{size >> 10} KiB, {ranks} ranks"
        report.rows.append(Measurement(name, shape, factor * size / seconds, "B/s", seconds))
    small, large = min(size for _, size in times), max(size for _, size in times)
    # An all-reduce has the latency of two collectives. The bandwidth follows from the time without latency.
    latency = times["all-reduce", small] / 2
    transfer = max(times["all-reduce", large] - 2 * latency, 1e-9)
    bandwidth = 2 * (ranks - 1) / ranks * large / transfer
    report.constants[f"{report.device}.latency"] = latency * (_SKEW if report.device == "cpu" else 1)
    if report.device == "cpu":
        report.constants["cpu.island_bandwidth"] = bandwidth
    else:
        nominal = hardware(_any_run("cuda"), report.machine).island_bandwidth
        report.constants["cuda.island"] = bandwidth / nominal


def _steps(report: BenchReport, compute: Compute, budget: float, widths: Mapping[str, float] = WIDTHS) -> None:
    device = report.device
    answer = _run_processes(device, [["steps", device, compute, f"{budget:.1f}"]])[0]
    machine = replace(report.machine, gpus=report.machine.gpus[:1], measured=tuple(report.constants.items()))
    devices = cpu_hardware(machine, 1, 1) if device == "cpu" else hardware(_any_run("cuda"), machine)
    steps = [
        (Measured(run=run, plan=plan_of(run), seconds=seconds), devices)
        for run, seconds in zip(jobs(device, compute), answer["seconds"], strict=True)
        if seconds is not None
    ]
    report.constants |= corrected(refitted(steps, compute, widths), devices, compute, {})
    for name, value in _SPREAD.items():
        report.constants[f"{device}.{name}"] = value
    if device == "cpu":
        report.constants["cpu.fixed_memory"] = float(answer["fixed"] + _RANK_BYTES)
    for step, _ in steps:
        model, train = step.run.model, step.run.train
        shape = f"{model.layers} x {model.dim}, {step.plan.accumulation} x {train.micro_batch} x {train.sequence_length} tokens"
        report.rows.append(Measurement(f"{compute} step", shape, step.seconds, "s"))


def _run_processes(device: Device, commands: list[list[str]]) -> list[Any]:
    """Runs `bench_process` with each list of arguments at the same time, in the environment of a rank; returns their answers."""
    environment = worker_env(plan_of(jobs(device, "fp32")[0]))

    def answer(arguments: list[str]) -> Any:
        command, name = (
            python_command("phalanx.calibration.bench_process", *arguments),
            f"A measurement ({' '.join(arguments)})",
        )
        try:
            process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{name} did not end within {_TIMEOUT:.0f} s.") from None
        if process.returncode:
            raise RunFailed(f"{name} failed:\n{process.stderr.strip()}")
        return json.loads(process.stdout.strip().splitlines()[-1])

    with ThreadPoolExecutor(len(commands)) as threads:
        return list(threads.map(answer, commands))
