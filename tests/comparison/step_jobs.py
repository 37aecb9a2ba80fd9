"""Tiny runs for the trainers of the comparison, on CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.comparison.compare_step import ComparisonSettings, bench_run
from phalanx.comparison.peer_loop import PeerJob
from phalanx.spec.load import resolve
from phalanx.spec.model import ModelSpec, Moe, RopeScaling
from phalanx.spec.plan import Machine
from phalanx.spec.run import Cluster, Data, Optimizer, Run, Train

MACHINE = Machine(host="h", cpu="a CPU", cores=2, memory=64 << 30, core_flops=1e11)
SETTINGS = ComparisonSettings(micro_batch=2, steps=3, warmup=1, rounds=1)
LLAMA = ModelSpec(dim=48, layers=2, heads=4, kv_heads=2, ffn=100, context=256)
MODELS = {
    "llama": LLAMA,
    "tied, scaled": replace(LLAMA, tied=True, rope_scaling=RopeScaling(factor=8.0, original_context=32)),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=16),
    "gpt2": ModelSpec(
        dim=48, layers=2, heads=4, context=256, norm="layer", activation="gelu", positions="learned", bias=True, tied=True
    ),
    "qwen3-moe": replace(LLAMA, qk_norm=True, moe=Moe(experts=4, active=2, ffn=32)),
}
_WORDS = "the quick brown fox jumps over the lazy dog, and a phalanx of spears moves as one; "


def tiny_run(model: ModelSpec = LLAMA, **changes: Any) -> Run:
    """A run whose first steps differ if weights, gradients, clipping, decay or learning rates do."""
    run = Run(
        model=model,
        data=Data(source="memory", documents=(_WORDS * 40, _WORDS[::-1] * 40), document_mask=False, eval_fraction=0.0),
        train=Train(batch=2, sequence_length=64, steps=1, clip=0.5),
        optimizer=Optimizer(learning_rate=1e-2, warmup_steps=2),
        cluster=Cluster(device="cpu", threads=1),
    )
    return resolve(replace(run, **changes))


def tiny_job(run: Run | None = None, *, compile: bool = False) -> PeerJob:
    planned = bench_run(run or tiny_run(), MACHINE, SETTINGS)
    return PeerJob(planned.run, planned.plan, compile)
