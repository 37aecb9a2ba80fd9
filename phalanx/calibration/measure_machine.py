"""Measures this machine in a few minutes and derives the constants that plans use: a few from single operations, the others of
`planning/machines/rates` fitted to real training steps of small models. `phalanx bench` calls it."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx import accelerator
from phalanx.calibration.bench_process import Compute, Device, jobs, plan_of
from phalanx.host.env import worker_env
from phalanx.host.probe import write_speed
from phalanx.host.process_tree import python_command
from phalanx.planning.feedback import EIGHT_BITS, WIDTHS, Measured, corrected, refitted
from phalanx.planning.machines.cpu import cpu_hardware
from phalanx.planning.machines.hardware import hardware
from phalanx.spec.errors import RunFailed
from phalanx.spec.plan import Machine
from phalanx.spec.run import Cluster, Run, Train
from phalanx.transforms import fp8

_SPREAD = {"low": 0.87, "high": 1.18}
"""P10 and P90 of a step as fractions of its promise, on a measured machine."""
_SKEW = 4
"""How many times as long a short message takes between CPU ranks that compute, because they do not arrive at the same time."""
_RANK_BYTES = 10 * 2**20
"""Memory of a rank of a job beyond a single process: connections, text, records."""
_TIMEOUT = 300.0
_DISK_BYTES = 128 << 20
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured value."""

    what: str
    shape: str
    value: float
    unit: str
    """"s", "B/s" or "FLOP/s"."""
    seconds: float | None = None
    """Seconds of one repetition, for collectives."""


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
    if (row := disk(folder)) is not None:
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
        report.rows += products(device, compute, budget * 0.5 / len(formats))
    on_status("computing attention")
    report.rows += attention(device, "bf16" if on_gpu else "fp32", budget * 0.3)
    on_status("copying memory")
    report.rows += [memory(device, budget * 0.05), launch(device, budget * 0.05)]
    if on_gpu:
        report.rows += host_copies(device, budget * 0.05)
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
    with TemporaryDirectory() as folder:  # the ranks meet in a file: torch's store would listen on every interface
        words = [str(ranks), f"{folder}/store", f"{budget:.1f}"]
        answers = _run_processes(report.device, [["links", report.device, str(rank), *words] for rank in range(ranks)])
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


# --- single operations on one device ---


def best_seconds(work: Callable[[], object], device: torch.device, budget: float, *, launch_only: bool = False) -> float:
    """The fastest of as many repetitions as fit into `budget` seconds: other programs on the machine only add time. `launch_only`: until
    the host has launched the work, not until the device has done it."""
    synchronize = accelerator.of(device).synchronize
    work()
    synchronize(device)
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < 3 or (time.perf_counter() - begin < budget and len(taken) < 100):
        start = time.perf_counter()
        work()
        launched = time.perf_counter() - start
        synchronize(device)
        taken.append(launched if launch_only else time.perf_counter() - start)
    return min(taken)


def products(device: torch.device, compute: str, budget: float) -> Iterator[Measurement]:
    """Matrix products: square ones of several sizes, a wide one as in a feed-forward layer, and some of awkward sizes."""
    on_gpu = accelerator.of(device).asynchronous
    if compute == "fp8" and (not on_gpu or fp8.available(device)):
        return  # CPUs only emulate it
    sizes = [(n, n, n) for n in ((1024, 2048, 4096, 8192) if on_gpu else (128, 256, 512, 1024))]
    sizes += [(4096, 14336, 4096), (4096, 4096, 4100), (4096, 4096, 4095)] if on_gpu else [(512, 384, 128), (512, 509, 509)]
    rate = math.inf
    for m, n, k in sizes:
        if compute == "fp8" and (n % 16 or k % 16):
            continue  # the kernels refuse these sizes, and training computes them in bf16
        if 2 * m * n * k / rate > max(budget / len(sizes), 1.0):
            continue  # CPUs without instructions for a format can take a minute
        work = _product(device, compute, m, n, k)
        # On a GPU, short products are queued, so that their launches do not count.
        repeats = max(1, int(2e11 / (2 * m * n * k))) if on_gpu else 1
        seconds = best_seconds(partial(_repeat, work, repeats), device, budget / len(sizes)) / repeats
        rate = 2 * m * n * k / seconds
        yield Measurement(f"{compute} product", f"{m} x {n} x {k}", rate, "FLOP/s")


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def _product(device: torch.device, compute: str, m: int, n: int, k: int) -> Callable[[], Tensor]:
    if compute == "fp8":
        a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    dtype = _FORMATS[compute]
    left, right = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    return lambda: left @ right


def attention(device: torch.device, compute: str, budget: float) -> Iterator[Measurement]:
    """Causal attention, forward and backward, by head width and sequence length. Half of the scores count as work."""
    on_gpu = accelerator.of(device).asynchronous
    dtype = _FORMATS.get(compute, torch.bfloat16)
    heads = 16 if on_gpu else 4
    shapes = [
        (width, length)
        for width in ((64, 128) if on_gpu else (32, 64))
        for length in ((1024, 4096, 16384) if on_gpu else (128, 512))
    ]
    for width, length in shapes:
        rows = max(1, 16384 // length) if on_gpu else 2
        q, k, v = (torch.randn(rows, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        forward = best_seconds(attend, device, budget / 20)
        out = attend()
        grads = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
        backward = best_seconds(grads, device, budget / 15)
        flops = 2 * rows * heads * length * length * width
        shape = f"head {width}, {length} tokens"
        yield Measurement(f"{compute} attention forward", shape, flops / forward, "FLOP/s")
        yield Measurement(f"{compute} attention backward", shape, 2.5 * flops / backward, "FLOP/s")


def memory(device: torch.device, budget: float) -> Measurement:
    """Memory bandwidth: bytes read and written by a copy that is too large for caches."""
    count = (1 << 28) if accelerator.of(device).asynchronous else (1 << 25)
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), device, budget)
    return Measurement("memory", f"copy of {source.nbytes >> 20} MiB", 2 * source.nbytes / seconds, "B/s")


def launch(device: torch.device, budget: float) -> Measurement:
    """Seconds that the host needs to launch one small operation."""
    small = torch.zeros(64, device=device)

    # A GPU's queue accepts all of them before the first is done.
    seconds = best_seconds(partial(_repeat, lambda: small.add_(1.0), 200), device, budget, launch_only=True) / 200
    return Measurement("launch of an operation", "64 numbers", seconds, "s")


def host_copies(device: torch.device, budget: float) -> Iterator[Measurement]:
    """Copies between pinned host memory and the device."""
    host = accelerator.of(device).pin(torch.zeros(64 << 20, dtype=torch.uint8))
    copy = torch.empty_like(host, device=device)
    for name, work in (("host to device", lambda: copy.copy_(host)), ("device to host", lambda: host.copy_(copy))):
        seconds = best_seconds(work, device, budget / 2)
        yield Measurement(name, "64 MiB", host.nbytes / seconds, "B/s")


def disk(folder: Path) -> Measurement | None:
    """Write bandwidth of a folder's disk, without caches; None if the folder is not writable."""
    try:
        speed = write_speed(folder, _DISK_BYTES)
    except OSError:
        return None
    return Measurement("disk", f"{_DISK_BYTES >> 20} MiB written", speed, "B/s")
