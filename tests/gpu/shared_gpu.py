"""Four ranks on the GPUs of this machine, fewer of them if there are not as many, as a program: where ranks are, and named layouts against one
process. `test_ranks_on_one_gpu` starts it with what to check; each check prints a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.host.probe import this_machine
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Gpu
from phalanx.spec.run import Run
from phalanx.verification.cases import MODELS
from phalanx.verification.parity import verify
from phalanx.verification.rank_pool import RankPool

RANKS = 4
RUN = """
[data]
source = "memory"
documents = ["to be or not to be, that is the question", "whether tis nobler", "in the mind to suffer the slings and arrows", "or not"]
[train]
batch = 8
micro_batch = 1
sequence_length = 48
steps = 8
"""
LAYOUTS: dict[str, tuple[str, Layout]] = {
    "data": ("dense", Layout(data=4)),
    "tensor": ("dense", Layout(data=2, tensor=2)),
    "tensor, sequence": ("gpt", Layout(data=2, tensor=2, sequence=True)),
    "pipeline": ("dense", Layout(data=2, pipeline=2)),
    "pipeline of four, tied": ("gpt", Layout(data=1, pipeline=4)),
    "zero bubble": ("dense", Layout(data=2, pipeline=2, schedule="zbv")),
    "overlapping passes": ("moe", Layout(data=1, pipeline=2, shard=2, zero=2, expert=2, schedule="dualpipev")),
    "expert": ("moe", Layout(data=4, expert=4)),
    "expert slices": ("moe", Layout(data=4, expert=2, expert_tensor=2)),
    "latent attention, experts": ("mla", Layout(data=2, tensor=2, expert=2)),
    "ring": ("dense", Layout(data=1, context=4)),
    "gathered keys": ("dense", Layout(data=2, context=2, context_method="gather")),
    "ulysses": ("dense", Layout(data=2, context=2, context_method="ulysses")),
    "ring in a pipeline": ("mla-dense", Layout(data=1, pipeline=2, context=2)),
    "ZeRO-1": ("dense", Layout(data=1, shard=4, zero=1)),
    "ZeRO-2": ("dense", Layout(data=2, shard=2, zero=2)),
    "ZeRO-3": ("dense", Layout(data=1, shard=4, zero=3)),
    "hybrid": ("moe", Layout(data=2, shard=2, zero=3, expert=2)),
    "ZeRO-3 in a pipeline": ("dense", Layout(data=1, pipeline=2, shard=2, zero=3)),
}
MORE: dict[str, tuple[str, Layout, tuple[str, ...]]] = {
    "recompute": ("dense", Layout(data=1, shard=2, tensor=2), ("memory.recompute=full",)),
    "selective": ("moe", Layout(data=2, shard=2), ("memory.recompute=selective",)),
    "offloaded activations": ("dense", Layout(data=2, pipeline=2), ("memory.activations=cpu",)),
    "offloaded optimizer": ("dense", Layout(data=1, shard=4), ("memory.offload=cpu",)),
    "muon": ("dense", Layout(data=1, shard=2, tensor=2), ("optimizer.name=muon",)),
    "local SGD": ("dense", Layout(data=2, shard=2), ("optimizer.sync_every=2",)),
}
"""What moves data between device and host, or has its own way of communicating."""
IN_FP8: dict[str, tuple[str, Layout, tuple[str, ...]]] = {
    "gathered": ("dense", Layout(data=1, shard=4), ()),
    "gathered, hybrid": ("dense", Layout(data=2, shard=2), ("memory.recompute=full",)),
    "gathered, compiled": ("dense", Layout(data=1, shard=4), ("memory.compile=true",)),
}
"""ZeRO-3, whose weights are gathered in fp8."""


def say(name: str, **values: Any) -> None:
    print(json.dumps({"check": name} | values), flush=True)


def placed(mesh: Mesh) -> tuple[int, str, int, bool, float]:
    """Rank, device, current device, whether messages go through host memory, and a sum over all ranks that was computed on the device."""
    total = torch.full((1000,), float(mesh.rank), device=mesh.device)
    for _ in range(50):  # each sum depends on the one before: a stream that does not wait shows
        dist.all_reduce(total)
        total = total.mul_(2).div_(2 * mesh.ranks)
    return mesh.rank, str(mesh.device), torch.cuda.current_device(), mesh.via_host, float(total.sum())


def run_of(model: str, layout: Layout, *overrides: str) -> Run:
    return replace(loads(RUN, overrides=overrides), model=MODELS[model], layout=layout)


def prove(check: str, name: str, run: Run, pool: RankPool, gpus: tuple[Gpu, ...]) -> None:
    began = time.monotonic()
    report = verify(run, ranks=RANKS, steps=6, gpus=gpus, pool=pool)
    table = report.to_json()
    say(
        check,
        layout=name,
        passed=report.passed,
        ranks=report.case.layout.ranks,
        precision=table["precision"],
        compiled=bool(report.case.run.memory.compile),
        seconds=round(time.monotonic() - began, 1),
        checks={check.name: check.largest for check in report.checks},
        first=table["first"],
        failure=table["failure"],
    )


def main(checks: list[str]) -> None:
    gpus = this_machine().gpus
    with RankPool(RANKS, device="cuda") as pool:
        for check in checks:
            if check == "placement":
                for rank, device, current, via_host, total in pool.run(placed, Layout(data=RANKS)):
                    say(check, rank=rank, device=device, current=current, via_host=via_host, total=total, gpus=len(gpus))
            elif check == "compiled":
                for name in ("data", "tensor", "tensor, sequence", "pipeline", "ring", "ZeRO-3", "expert"):
                    prove(check, name, run_of(*LAYOUTS[name]), pool, gpus)
            elif check == "more":
                for name, (model, layout, overrides) in MORE.items():
                    plain = ("precision.compute=fp32", "memory.compile=false")
                    prove(check, name, run_of(model, layout, *plain, *overrides), pool, gpus)
            elif check == "fp8":
                for name, (model, layout, overrides) in IN_FP8.items():
                    plain = ("precision.compute=fp8", "precision.fp8_gather=true", "memory.compile=false")
                    prove(check, name, run_of(model, layout, *plain, *overrides), pool, gpus)
            else:
                for name, row in LAYOUTS.items():
                    prove(check, name, run_of(*row, f"precision.compute={check}", "memory.compile=false"), pool, gpus)


if __name__ == "__main__":
    main(sys.argv[1:])
