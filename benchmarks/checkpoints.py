"""Saving behind training beside saving while it waits, and beside plain writing: on CPU ranks, or on one GPU.

    python benchmarks/checkpoints.py [--folder DIR] [--parameters 300e6] [--ranks 2] [--saves 3] [--device cpu|cuda]

Ranks that hold the same model take steps and save in turns: waiting for it, and behind two steps. In between one process writes
as many bytes into one file of the same disk, with fsync, 16 MiB at a time. All in one run, so that whatever else the machine does
falls on all of them. Peak memory is the resident set's high-water mark over a save, against what was resident before the first.
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
from phalanx.verification.rank_pool import Pool

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
MOST = 8 << 30  # bytes of plain writing: it says the speed as well as more would


def plain(file: Path, size: int) -> float:
    """Bytes per second of writing so many bytes into one file."""
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
    """What one rank measures; rank 0 writes plainly."""
    torch.set_num_threads(plan.threads)
    trainer = Trainer(run, plan, mesh, folder)
    trainer.build()
    trainer.step()
    trainer.step()
    tensors = trainer.tensors()
    found: dict[str, Any] = {"waited": [], "stall": [], "behind": [], "plain": [], "step": [], "step_behind": [], "memory": []}
    quiet = _status("VmRSS")
    for number in range(saves):
        saved = trainer.save()
        found["waited"].append(saved.seconds)
        found["bytes"] = saved.bytes
        mesh.barrier()
        if mesh.rank == 0:
            shutil.rmtree(saved.path)  # room for what comes
            found["plain"].append(plain(folder / "plain.bin", min(saved.bytes, MOST)))
        mesh.barrier()
        if number == 0:
            trainer.checkpointer.prepare(tensors)
            trainer.step()
            time.sleep(5 if mesh.device.type == "cpu" else 60)  # as in a run, where memory is ready long before the first save
        started = time.perf_counter()
        trainer.step()
        found["step"].append(time.perf_counter() - started)
        _reset_peak()
        started = time.perf_counter()
        trainer.checkpointer.save(trainer.progress, tensors, wait=False)
        trainer.step()
        found["step_behind"].append(time.perf_counter() - started)
        (ended,) = trainer.checkpointer.settle()
        found["stall"].append(ended.stall)  # type: ignore[attr-defined]
        found["behind"].append(ended.bytes_per_second)  # type: ignore[attr-defined]
        found["memory"].append(_status("VmHWM") - quiet)
    found["staged"] = trainer.checkpointer._saver._staging.bytes
    trainer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; left out: a temporary one")
    parser.add_argument("--parameters", type=float, default=300e6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    dim = 1024 if given.parameters < 1e9 else 3072
    layers = round((given.parameters - 2 * 16384 * dim) / (12 * dim * dim))
    run = loads(RUN.format(dim=dim, layers=layers, ranks=given.ranks, device=given.device, threads=given.threads))
    plan = choose(run, probe("" if given.device == "cpu" else None), given.ranks)
    if os.environ.get("GLOO_SOCKET_IFNAME") != "lo":  # before the first thread starts
        os.execve(sys.executable, [sys.executable, *sys.argv], worker_env(plan))
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        if given.ranks == 1:
            ranks = [one_rank(connect(Place(), given.device, 60), run, plan, folder, given.saves)]
        else:
            with Pool(given.ranks, timeout=3600) as pool:
                ranks = pool.run(one_rank, plan.layout, run, plan, folder, given.saves)
    finally:
        shutil.rmtree(folder)
    first = ranks[0]
    waited, stall = median(first["waited"]), max(median(one["stall"]) for one in ranks)
    print(json.dumps(ranks))
    print(f"{plan.parameters / 1e6:.0f} M parameters, {first['bytes'] / 1e9:.2f} GB, {given.ranks} ranks")
    print(f"waited for: {waited:.2f} s; stall behind training: {stall:.3f} s = {100 * stall / waited:.1f} %")
    for name, speed in (
        ("waited", first["bytes"] / waited),
        ("behind", median(first["behind"])),
        ("plain", median(first["plain"])),
    ):
        print(f"{name:>7}: {speed / 1e9:.2f} GB/s, {speed / median(first['plain']):.2f} of plain writing")
    for number, one in enumerate(ranks):
        print(f"rank {number}: {max(one['memory']) / 1e9:.2f} GB more at the peak, copy of {one['staged'] / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
