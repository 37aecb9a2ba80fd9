"""A plan made by hand, for tests of what a person sees of one: every number is chosen, so that each can be looked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.planning.cost.step_time import PARTS
from phalanx.planning.machines.catalogue import GpuEntry
from phalanx.planning.machines.cluster import Failures, Hardware
from phalanx.planning.search.candidate import Alternative, Candidate, SearchResult
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.run import Run

GIB = 2.0**30
CARD = 79.6 * GIB


def run() -> Run:
    return loads('model = "llama3-405b"\n[train]\nbatch = 2048\nsequence_length = 8192\ntokens = 15_600_000_000_000\n')


def hardware(**changes: Any) -> Hardware:
    gpu = GpuEntry(
        key="h100-sxm",
        match="H100",
        peaks={"bf16": 989e12},
        memory=CARD,
        bandwidth=3.35e12,
        source="a datasheet",
        name="H100 SXM",
    )
    made = Hardware(
        name="h100-16384", device="cuda", gpu=gpu, gpus=16384, node=8, island=8, island_bandwidth=450e9, network=50e9, rails=True,
        host_memory=2e12, host_bandwidth=50e9, storage=2e9, power=1300.0, price=2.0,
        failures=Failures(rates=(("gpu", 1e-5), ("host", 1e-5)), source="a paper"), family="h100",
    )  # fmt: skip
    return replace(made, **changes)


def option(**changes: Any) -> Candidate:
    """5 s a step: 3.5 computing, 0.5 bubble, 0.4 tensor, 0.35 data, 0.25 else; 61 GiB of 79.6."""
    split = dict.fromkeys(PARTS, 0.0) | {
        "compute": 3.5,
        "bubble": 0.5,
        "tensor": 0.4,
        "data": 0.35,
        "optimizer": 0.15,
        "other": 0.1,
    }
    made = Candidate(
        layout=Layout(pipeline=16, data=1, shard=128, tensor=8, zero=1, sequence=True, schedule="interleaved-1f1b", stages=8),
        micro_batch=1, accumulation=16, compute="bf16", recompute="none", recompute_every=1, offload="none",
        memory={"parameters": 6 * GIB, "gradients": 12 * GIB, "optimizer": 1 * GIB, "activations": 36 * GIB, "logits": 2 * GIB, "fixed": 4 * GIB},
        fullest=0, capacity=CARD, seconds=5.0, low=4.0, high=6.0, split=split,
        pieces={"forward": 0.1, "input": 0.1, "weight": 0.1, "head": 0.02, "hop": 0.001, "tail": 0.3},
        tokens_per_second=3_355_443.2, mfu=0.42, days=54.0, goodput=0.9, save_every=328.0, price=47.2e6, energy=1.1e14,
    )  # fmt: skip
    return replace(made, **changes)


def found() -> SearchResult:
    best = option()
    wide = option(
        layout=replace(best.layout, tensor=16, shard=64),
        seconds=6.9, low=5.5, high=8.3, split=best.split | {"tensor": 2.3}, days=74.5, price=65e6, tokens_per_second=2_431_480.0, mfu=0.304,
    )  # fmt: skip
    flat = option(
        layout=Layout(pipeline=8, data=2, shard=128, tensor=8, zero=3, sequence=True),
        recompute="full", seconds=5.6, low=4.5, high=6.7, split=best.split | {"compute": 4.1}, days=60.5, price=52.9e6,
        memory=best.memory | {"activations": 20 * GIB}, tokens_per_second=2_995_931.0, mfu=0.375,
    )  # fmt: skip
    return SearchResult(
        best=best,
        runners_up=(flat, wide),
        alternatives=(
            Alternative(candidate=wide, name="TP16", reason="leaves the NVLink island, +38 % exposed communication"),
            Alternative(candidate=None, name="PP128", reason="126 layers are fewer than 128 stages"),
        ),
        considered=374_400,
        fitting=12_345,
        timed=20_000,
        seconds=0.75,
        assumptions=("Every GPU-hour costs $2.00.", "Nothing is known of the switches: rails are assumed."),
        curve=(flat, best),
    )
