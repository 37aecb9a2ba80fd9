"""The code of many ranks on one GPU, as a program: attention kernels that say their weight, engines that shard over a group of one
through NCCL, a pipeline whose stages are all here. `test_parallel` starts it; each check prints a line of JSON."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel import apply as applying
from phalanx.parallel import data_parallel, fsdp
from phalanx.parallel.context import kernels
from phalanx.parallel.data_parallel import Sharding
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.schedules.makers import make
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Place, Plan
from phalanx.training import build as training
from phalanx.training.trainer import Trainer

RUN = """
[model]
dim = 128
layers = 4
heads = 4
kv_heads = 2
[train]
batch = 16
micro_batch = 4
sequence_length = 256
steps = 40
[optimizer]
learning_rate = 1e-3
"""
MOE = ("model.moe.experts=8", "model.moe.active=2", "model.moe.ffn=128", "model.moe.shared=1")


class OneMesh(Mesh):
    """Groups of one rank that still speak through NCCL."""

    def group_of(self, ranks: tuple[int, ...], *, use: str) -> Group:
        return Group(ranks=ranks, index=0, use=use, handle=dist.group.WORLD)


def say(name: str, **values: Any) -> None:
    print(json.dumps({"check": name} | values), flush=True)


def attention() -> None:
    """Each fused kernel against the plain one, which is computed in fp32 from the same numbers."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for masked in (False, True):
            for heads, keys, width, values in ((4, 2, 64, 64), (4, 4, 192, 128), (4, 1, 32, 32)):
                if dtype == torch.float32 and width > 128:
                    continue
                torch.manual_seed(0)
                sizes = ((heads, width), (keys, width), (keys, values), (heads, values))
                q, k, v, gradient = (torch.randn(2, h, 160, w, device="cuda").to(dtype) for h, w in sizes)
                mask = (torch.rand(2, 1, 160, 160, device="cuda") > 0.4).tril() if masked else None
                seen = kernels.Mask(mask, not masked, width**-0.5)
                ways = []
                for fused in (True, False):
                    inputs = tuple(x if fused else x.float() for x in (q, k, v))
                    if fused:
                        result = kernels.forward(*inputs, seen)
                        back = kernels.backward(gradient, inputs, result, seen)
                    else:
                        out, lse = kernels._plain(*inputs, seen)
                        blind = torch.zeros(()).bool() if mask is None else ~mask.any(-1)
                        if mask is not None:
                            out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -math.inf)
                        result = out, lse
                        back = kernels._plain_backward(gradient.float(), inputs, result, seen)
                    ways.append((result[0].float(), result[1].float().nan_to_num(neginf=0.0), *(x.float() for x in back)))
                worst = max(float((a - b).norm() / b.norm()) for a, b in zip(*ways, strict=True))
                chosen = kernels._choose(q, v, seen)
                say("attention", kernel=chosen, dtype=str(dtype), masked=masked, width=width, difference=worst)


def trained(overrides: tuple[str, ...], mesh: Mesh, steps: int = 12) -> list[float]:
    run = loads(RUN, overrides=overrides)
    plan = Plan(
        layout=mesh.layout,
        device="cuda",
        threads=4,
        micro_batch=4,
        accumulation=4,
        compute=run.precision.compute or "bf16",
        parameters=run.model.parameters(),
        flops_per_token=1.0,
        peak_flops=None,
    )
    trainer = Trainer(run, plan, mesh, Path(tempfile.mkdtemp()) / "checkpoints")
    trainer.build()
    losses = [trainer.step().loss for _ in range(steps)]  # type: ignore[union-attr]
    held_out = trainer.evaluate()
    trainer.save()
    trainer.close()
    assert held_out is not None
    return [*losses, held_out.loss]


def engine(stage: int, parts: Any, spots: Any, *job: Any) -> Any:
    """In place of `apply._engine`, which has one rank replicate."""
    _, plan, mesh, recipe = job
    how = Sharding(zero=stage, axes=("data", "shard", "context"), compute=plan.compute)
    return (fsdp.FullySharded if stage == 3 else data_parallel.build)(parts, spots, mesh, recipe, how)


def engines(mesh: Mesh) -> None:
    plain = applying._engine
    for model in ((), MOE):
        whole = trained(("precision.compute=fp32", *model), mesh)
        for compute in ("fp32", "bf16", "fp16"):
            for stage in (1, 2, 3):
                applying._engine = partial(engine, stage)
                found = trained((f"precision.compute={compute}", *model), mesh)
                applying._engine = plain
                worst = max(abs(a - b) / b for a, b in zip(found, whole, strict=True))
                say("zero", stage=stage, compute=compute, experts=bool(model), difference=worst, loss=found[-2])


def pipelines(mesh: Mesh) -> None:
    whole = trained(("precision.compute=fp32",), mesh)
    plain: Callable[..., Any] = training.schedule_for
    for name in ("gpipe", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"):
        training.schedule_for = lambda layout, count, name=name: make(name, 1, count)
        found = trained(("precision.compute=fp32",), mesh)
        training.schedule_for = plain
        worst = max(abs(a - b) / b for a, b in zip(found, whole, strict=True))
        say("pipeline", schedule=name, difference=worst)


if __name__ == "__main__":
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    one = OneMesh(Place(), torch.device("cuda", 0), Layout(data=1))
    for check in sys.argv[1:]:
        {"attention": attention, "engines": lambda: engines(one), "pipelines": lambda: pipelines(one)}[check]()
    dist.destroy_process_group()
