"""Asynchronous saves next to synchronous saves and to plain writing: on CPU ranks, or on one GPU.

    python benchmarks/checkpoints.py [--folder DIR] [--parameters 300e6] [--ranks 2] [--saves 3] [--device cpu|cuda]

Ranks with the same model alternate synchronous saves and saves during the next step. In between, one process writes as many bytes into
one file of the same disk, 16 MiB at a time, with fsync. All happens in one run, so that other load on the machine affects all of them.
Peak memory is the largest resident set during a save, minus the resident set before the first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phalanx.host.env import worker_env
from phalanx.host.probe import probe
from phalanx.parallel.mesh import Mesh, connect
from phalanx.planning.planner import choose
from phalanx.spec.load import loads
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Run
from phalanx.training.trainer import Trainer
from phalanx.verification.rank_pool import RankPool

RUN = """
[model]
dim = {dim}
layers = {layers}
heads = 16
vocab = 16384
[data]
eval_fraction = 0.0
[train]
batch = {ranks}
micro_batch = 1
sequence_length = 64
steps = 1000
[checkpoint]
every = 1
keep_last = 1
[layout]
data = {ranks}
[cluster]
device = "{device}"
threads = {threads}
"""
CHUNK = 16 << 20
MOST = 8 << 30  # bytes of plain writing; more would not change its speed


def plain(file: Path, size: int) -> float:
    """Writes `size` bytes into one file, and returns the bytes per second."""
    block = os.urandom(CHUNK)
    started = time.perf_counter()
    with file.open("wb", buffering=0) as target:
        for _ in range(size // CHUNK):
            target.write(block)
        os.fsync(target.fileno())
    speed = size // CHUNK * CHUNK / (time.perf_counter() - started)
    file.unlink()
    return speed


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def one_rank(mesh: Mesh, run: Run, plan: Plan, folder: Path, saves: int) -> dict[str, Any]:
    """Runs on every rank; rank 0 also measures plain writing."""
    torch.set_num_threads(plan.threads)
    trainer = Trainer(run, plan, mesh, folder)
    trainer.build()
    trainer.step()
    trainer.step()
    tensors = trainer.tensors()
    measured: dict[str, Any] = {
        "waited": [],
        "stall": [],
        "behind": [],
        "plain": [],
        "step": [],
        "step_behind": [],
        "memory": [],
    }
    resident = _status("VmRSS")
    for number in range(saves):
        saved = trainer.save()
        measured["waited"].append(saved.seconds)
        measured["bytes"] = saved.bytes
        mesh.barrier()
        if mesh.rank == 0:
            shutil.rmtree(saved.path)  # free the disk space
            measured["plain"].append(plain(folder / "plain.bin", min(saved.bytes, MOST)))
        mesh.barrier()
        if number == 0:
            trainer.checkpointer.prepare(tensors)
            trainer.step()
            time.sleep(5 if mesh.device.type == "cpu" else 60)  # in a run, the buffers are ready long before the first save
        started = time.perf_counter()
        trainer.step()
        measured["step"].append(time.perf_counter() - started)
        _reset_peak()
        started = time.perf_counter()
        trainer.checkpointer.save(trainer.progress, tensors, wait=False)
        trainer.step()
        measured["step_behind"].append(time.perf_counter() - started)
        (ended,) = trainer.checkpointer.settle()
        measured["stall"].append(ended.stall)  # type: ignore[attr-defined]
        measured["behind"].append(ended.bytes_per_second)  # type: ignore[attr-defined]
        measured["memory"].append(_status("VmHWM") - resident)
    measured["staged"] = len(trainer.checkpointer._saver._staging._memory)  # type: ignore[arg-type]
    trainer.close()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; default: a temporary folder")
    parser.add_argument("--parameters", type=float, default=300e6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    dim = 1024 if args.parameters < 1e9 else 3072
    layers = round((args.parameters - 2 * 16384 * dim) / (12 * dim * dim))
    run = loads(RUN.format(dim=dim, layers=layers, ranks=args.ranks, device=args.device, threads=args.threads))
    plan = choose(run, probe("" if args.device == "cpu" else None), args.ranks)
    if "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ:  # before the first thread starts
        os.execve(sys.executable, [sys.executable, *sys.argv], worker_env(plan))
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        if args.ranks == 1:
            ranks = [one_rank(connect(Place(), args.device, 60), run, plan, folder, args.saves)]
        else:
            with RankPool(args.ranks, timeout=3600) as pool:
                ranks = pool.run(one_rank, plan.layout, run, plan, folder, args.saves)
    finally:
        shutil.rmtree(folder)
    first = ranks[0]
    waited, stall = median(first["waited"]), max(median(rank["stall"]) for rank in ranks)
    print(json.dumps(ranks))
    print(f"{plan.parameters / 1e6:.0f} M parameters, {first['bytes'] / 1e9:.2f} GB, {args.ranks} ranks")
    print(f"synchronous save: {waited:.2f} s; stall of an asynchronous save: {stall:.3f} s = {100 * stall / waited:.1f} %")
    for name, speed in (
        ("sync", first["bytes"] / waited),
        ("async", median(first["behind"])),
        ("plain", median(first["plain"])),
    ):
        print(f"{name:>7}: {speed / 1e9:.2f} GB/s, {speed / median(first['plain']):.2f} of plain writing")
    for number, rank in enumerate(ranks):
        print(
            f"rank {number}: {max(rank['memory']) / 1e9:.2f} GB more at the peak, staging buffer of {rank['staged'] / 1e9:.2f} GB"
        )


if __name__ == "__main__":
    main()
