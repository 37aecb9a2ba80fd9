"""Clusters and runs for the tests of planning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.planning.machines.catalogue import named_gpu
from phalanx.planning.machines.cluster import Hardware
from phalanx.spec.model import PRESETS, ModelSpec, Moe
from phalanx.spec.run import Precision, Run, Train

SMALL = ModelSpec(vocab=512, dim=256, layers=6, heads=8, kv_heads=4, context=512)
SPARSE = replace(SMALL, moe=Moe(experts=8, active=2, ffn=128, shared=1, dense_layers=1))


def cluster(gpus: int, gpu: str = "h100-sxm", **changed: Any) -> Hardware:
    """So many H100s in nodes of eight."""
    found = named_gpu(gpu, "the test")
    plain = Hardware(
        name="test", device="cuda", gpu=found, gpus=gpus, node=8, island=8, island_bandwidth=450e9, network=50e9, rails=True,
        host_memory=2e12, host_bandwidth=25e9, storage=5e9, power=1000.0, price=2.5, failures=None, family=found.family,
    )  # fmt: skip
    return replace(plain, **changed)


def with_memory(hardware: Hardware, size: float) -> Hardware:
    """The same with devices of so many bytes."""
    return replace(hardware, gpu=replace(hardware.gpu, memory=size))


def run_of(model: str | ModelSpec, batch: int, sequence: int, **changed: Any) -> Run:
    """A run of a preset or a shape, in bf16."""
    spec = PRESETS[model] if isinstance(model, str) else model
    train = Train(batch=batch, sequence_length=sequence, tokens=10**9)
    return replace(Run(model=spec, train=train, precision=Precision(compute="bf16")), **changed)
