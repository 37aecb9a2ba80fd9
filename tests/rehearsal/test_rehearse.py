"""Rehearsals on one process: what they find, what they refuse, and that they take no memory; collectives against formulas of their own."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import tiny_run
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.observe.comm_timer import COMM_TIMER
from phalanx.planning.search.candidate import Candidate
from phalanx.rehearsal import fake_gpu
from phalanx.rehearsal import rehearse as rehearsing
from phalanx.rehearsal.fake_gpu import RehearsalDevice
from phalanx.rehearsal.rehearse import distinct_ranks, rehearsal_job, rehearse
from phalanx.rehearsal.rehearsed_rank import rehearsed_program
from phalanx.rehearsal.result import write_trace
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan
from phalanx.spec.run import Memory, Run
from phalanx.transforms.activations import MOVED

H200 = fake_gpu.CARDS["h200"]
HERE = Machine(host="here", cpu="a cpu", cores=2, memory=8 << 30)
GPU = ("cluster.gpu=h100-sxm",)


def on_gpu(run: Run) -> Plan:
    layout = replace(run.layout, data=run.layout.data or 1)
    assert run.train.micro_batch is not None
    return Plan(
        layout=layout,
        device="cuda",
        threads=1,
        micro_batch=run.train.micro_batch,
        accumulation=run.batch // layout.replicas // run.train.micro_batch,
        compute=run.precision.compute or "bf16",
        parameters=0,
        flops_per_token=0.0,
        peak_flops=None,
    )


def test_rehearsal_of_a_gpu_needs_no_memory() -> None:
    run = tiny_run(
        "model.dim=4096", "model.layers=4", "model.heads=32", "model.kv_heads=8", "model.ffn=14336", "model.vocab=128256"
    )
    tiny = tiny_run()
    rehearse(tiny, on_gpu(tiny), 0, RehearsalDevice(card=H200))  # what torch loads the first time is not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = rehearse(run, on_gpu(run), 0, RehearsalDevice(card=H200))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    parameters = run.model.parameters()
    norms = 9 * 4096  # in fp32 once; everything else is in bf16, and in fp32 for the optimizer
    weights = 6 * parameters - 2 * norms
    assert told.state == {"parameters": weights, "gradients": 4 * parameters, "optimizer": 8 * parameters, "files": 0}
    assert told.peak > 16 * parameters and told.reserved >= told.peak
    assert sum(told.components.values()) == pytest.approx(told.peak, rel=1e-3)
    assert not dist.is_initialized() and torch.zeros(2).tolist() == [0.0, 0.0]


def test_rehearsal_restores_everything_that_it_replaces() -> None:
    def replaceable() -> list[Any]:
        owners: list[Any] = [torch, torch.get_device_module("cuda"), F, torch.nn.Module, torch.UntypedStorage, FakeTensor]
        return [COMM_TIMER.complete, set(MOVED), *(dict(vars(owner)) for owner in owners)]

    run = tiny_run()
    rehearse(run, on_gpu(run), 0, RehearsalDevice(card=H200))  # what torch imports lazily is there now
    before = replaceable()
    with rehearsed_program(run, on_gpu(run), 0, RehearsalDevice(card=H200)):
        for original, value in zip(before, replaceable(), strict=True):
            assert value != original
    assert replaceable() == before


def test_memory_of_the_second_step_follows_from_the_first() -> None:
    """Allocations that outlive the first step count in the second, without running it."""
    run = tiny_run("precision.optimizer=bf16", "train.micro_batch=4")
    told = rehearse(run, on_gpu(run), 0, RehearsalDevice(card=H200))
    with rehearsed_program(run, on_gpu(run), 0, RehearsalDevice(card=H200)) as (program, watch):
        program.step(2)
        watch.device.peak = watch.device.now
        program.step(2)
        assert watch.device.peak == pytest.approx(told.peak, abs=1 << 13)  # but for a few single numbers


SHORTENED: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "dualpipev": (Layout(data=1, pipeline=2, schedule="dualpipev"), ()),
    "1f1b, zero 1, tied": (
        Layout(data=1, pipeline=2, shard=2, zero=1, schedule="1f1b"),
        ("model.tied=true", "memory.recompute=selective"),
    ),
    "1f1b, zero 3": (Layout(data=1, pipeline=2, shard=2, zero=3, schedule="1f1b"), ("memory.recompute=full",)),
    "interleaved, zero 2": (Layout(data=1, pipeline=2, shard=2, zero=2, schedule="interleaved-1f1b"), ()),
    "interleaved, zero 3": (Layout(data=1, pipeline=2, shard=2, zero=3, schedule="interleaved-1f1b"), ()),
    "zero bubble, zero 3": (
        Layout(data=1, pipeline=2, shard=2, zero=3, schedule="interleaved-zero-bubble"),
        ("memory.recompute=full",),
    ),
    "zbv, zero 2": (Layout(data=1, pipeline=2, shard=2, zero=2, schedule="zbv"), ()),
    "dualpipev, zero 3": (Layout(data=1, pipeline=2, shard=2, zero=3, schedule="dualpipev"), ()),
    "no pipeline, zero 3": (Layout(data=1, shard=2, zero=3), ("memory.recompute=full",)),
    "no pipeline, zero 2": (Layout(data=1, shard=2, zero=2), ()),
}


def shortened(case: str, ranks: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layout, settings = SHORTENED[case]
    run = tiny_run(f"train.batch={16 * layout.shard}", "train.micro_batch=1", "model.layers=4", *settings)
    plan = replace(on_gpu(run), layout=layout, accumulation=16)
    for rank in ranks:
        told = rehearse(run, plan, rank % layout.ranks, RehearsalDevice(card=H200))
        with monkeypatch.context() as patch:
            patch.setattr(rehearsing, "enough", lambda order, plan, rank: plan.accumulation)
            whole = rehearse(run, plan, rank % layout.ranks, RehearsalDevice(card=H200))
        assert told.error is None and told.taken < told.micro_batches == 16 == whole.taken
        assert told.peak == pytest.approx(whole.peak, abs=1 << 13)  # but for a few single numbers
        assert told.sent == whole.sent
        assert sum(one.times for one in told.messages) == len(whole.messages)
        assert told.flops == whole.flops and told.repeated_flops == whole.repeated_flops


def test_fewer_micro_batches_give_the_results_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    shortened("dualpipev", (0,), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHORTENED)
def test_fewer_micro_batches_give_the_results_of_all_in_other_layouts(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shortened(case, (0, -1), monkeypatch)


def test_out_of_memory_is_reported_with_its_place() -> None:
    run = tiny_run("train.micro_batch=8", "model.vocab=4096")
    plan = on_gpu(run)
    need = rehearse(run, plan, 0, RehearsalDevice(card=H200))
    fixed = sum(need.fixed.values())
    enough = rehearse(run, plan, 0, RehearsalDevice(card=H200, capacity=need.reserved + fixed))
    less = rehearse(run, plan, 0, RehearsalDevice(card=H200, capacity=need.reserved + fixed - (4 << 20)))
    assert enough.fits and not less.fits
    assert less.no_room is not None and less.no_room.phase in ("forward", "loss", "backward", "step")
    assert json.loads(json.dumps(less.to_json()))["fits"] is False


def test_unsupported_settings_and_ranks_are_refused_by_name() -> None:
    run = tiny_run("model.layers=4")
    plan = replace(on_gpu(run), layout=Layout(data=1, pipeline=2, stage_split="measured"))
    with pytest.raises(RunError, match=r"layout\.stage_split"):
        rehearse(run, plan, 0, RehearsalDevice(card=H200))
    with pytest.raises(RunError, match="--rank 7"):
        rehearse(run, on_gpu(run), 7, RehearsalDevice(card=H200))


def test_distinct_ranks_contain_every_kind() -> None:
    run = tiny_run("model.layers=5", "train.batch=32", "train.micro_batch=1")
    plan = replace(on_gpu(run), layout=Layout(data=2, pipeline=4, tensor=2), accumulation=16)
    found = distinct_ranks(run, plan)
    assert sum(found.values()) == 16 and 0 in found and 12 in found


def test_rehearsal_of_a_named_cluster_uses_its_nodes(tmp_path: Any) -> None:
    run = tiny_run(*GPU, "cluster.gpus=16", "layout.tensor=4", "layout.data=4", "cluster.device=cuda", "train.micro_batch=1")
    job = rehearsal_job(run, HERE)
    told = rehearse(job.run, job.plan, 5, job.device)
    assert told.ranks == 16 and told.capacity is not None and told.capacity > 70e9
    tiers = {one.use: one.tier for one in told.messages}
    assert tiers["tensor"] == "node" and tiers["data"] == "across"
    write_trace(told, tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 10


@pytest.mark.parametrize("given", [(), ("layout.data=4", "layout.tensor=2", "train.micro_batch=1")])
def test_rehearsal_takes_all_savings_of_the_planner(given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(*GPU, "cluster.gpus=8", "cluster.device=cuda", "memory.recompute=auto", *given)
    run = run if given else replace(run, train=replace(run.train, micro_batch=None))

    def every_second(self: Candidate, memory: Memory) -> Memory:
        return replace(memory, recompute="full", recompute_every=2, offload="none")

    with monkeypatch.context() as patch:
        patch.setattr(Candidate, "with_savings", every_second)
        job = rehearsal_job(run, HERE)
    assert (job.run.memory.recompute, job.run.memory.recompute_every) == ("full", 2)


def test_a_compiled_run_is_rehearsed_uncompiled_and_says_so() -> None:
    run = tiny_run("memory.compile=true")
    assert any("uncompiled" in note for note in rehearse(run, on_gpu(run), 0, RehearsalDevice(card=H200)).notes)


def test_chosen_kernels_are_those_of_an_h200() -> None:
    def kernel(dtype: torch.dtype, widths: tuple[int, int] = (128, 128), **how: bool) -> str:
        return fake_gpu.kernel(H200, dtype, widths=widths, **{"masked": False, "grouped": False} | how)

    assert (
        kernel(torch.bfloat16)
        == kernel(torch.bfloat16, masked=True, grouped=True)
        == kernel(torch.float16, (192, 128))
        == "cudnn"
    )
    assert kernel(torch.bfloat16, (36, 36)) == "flash" and kernel(torch.bfloat16, (36, 36), masked=True) == "math"
    assert kernel(torch.float32) == "efficient" and kernel(torch.float32, grouped=True) == "math"
