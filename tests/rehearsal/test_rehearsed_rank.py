"""After a step, a rehearsed rank holds as many bytes as a real rank of the same layout, and has sent the same messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks, tiny_run, tiny_trainer

from phalanx.parallel.mesh import Mesh
from phalanx.rehearsal.fake_gpu import RehearsalDevice
from phalanx.rehearsal.rehearse import rehearse
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

MOE = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=16", "model.moe.router=sigmoid")
FOUR = "model.layers=4"
BF16 = "precision.compute=bf16"
CASES: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "replicas": (Layout(data=2), ()),
    "zero 1": (Layout(data=2, shard=2, zero=1), (BF16,)),
    "zero 2": (Layout(data=1, shard=4, zero=2), ("model.tied=true",)),
    "zero 3": (Layout(data=2, shard=2, zero=3), (BF16, "precision.optimizer=bf16")),
    "zero 3, uneven": (Layout(data=1, shard=3, zero=3), ("train.batch=6", "model.ffn=20")),
    "tensor": (Layout(data=1, tensor=2), (BF16,)),
    "tensor, sequence": (Layout(data=1, tensor=2, sequence=True), ("memory.recompute=full",)),
    "context, ring": (Layout(data=1, context=2), ()),
    "context, gather": (Layout(data=1, context=2, context_method="gather"), (BF16,)),
    "context, ulysses": (Layout(data=1, context=2, context_method="ulysses"), ("data.document_mask=false",)),
    "gpipe": (Layout(data=1, pipeline=2, schedule="gpipe"), (FOUR,)),
    "1f1b, tied": (Layout(data=1, pipeline=2, shard=2, zero=1), (FOUR, "model.tied=true")),
    "interleaved": (Layout(data=1, pipeline=2, schedule="interleaved-1f1b"), (FOUR, "memory.recompute=selective")),
    "looped": (Layout(data=1, pipeline=2, schedule="looped-bfs"), (FOUR,)),
    "interleaved zero bubble": (Layout(data=1, pipeline=2, schedule="interleaved-zero-bubble"), (FOUR,)),
    "zbv": (Layout(data=1, pipeline=2, schedule="zbv", tensor=2), (FOUR,)),
    "dualpipev, zero 3": (Layout(data=1, pipeline=2, schedule="dualpipev", shard=2, zero=3), (FOUR,)),
    "experts": (Layout(data=2, expert=2), MOE),
    "experts, sliced, zero 3": (Layout(data=1, shard=4, zero=3, expert=2, expert_tensor=2), MOE),
    "experts, tensor, zero 1": (Layout(data=1, shard=2, zero=1, tensor=2, expert=2), (*MOE, BF16)),
    "offloaded": (Layout(data=1, shard=2, zero=2), ("memory.offload=cpu",)),
    "states in files": (Layout(data=2), ("memory.offload=nvme",)),
    "muon": (Layout(data=1, shard=2, zero=3), ("optimizer.name=muon",)),
    "muon, tensor, zero 1": (Layout(data=1, shard=2, zero=1, tensor=2), ("optimizer.name=muon", "model.ffn=20")),
    "muon, tensor, zero 3, uneven": (
        Layout(data=1, shard=3, zero=3, tensor=2),
        ("optimizer.name=muon", "train.batch=6", "model.ffn=20"),
    ),
    "zbv, tied": (Layout(data=1, pipeline=2, schedule="zbv"), (FOUR, "model.tied=true")),
    "dualpipev, tied, zero 3": (Layout(data=1, pipeline=2, shard=2, zero=3, schedule="dualpipev"), (FOUR, "model.tied=true")),
    "1f1b, zero 2, many micro-batches": (Layout(data=1, pipeline=2, shard=2, zero=2), (FOUR, "train.batch=24")),
    "experts, fp16, narrow": (Layout(data=2, expert=2), (*MOE, "precision.compute=fp16", "model.moe.ffn=8")),
    "experts, fp32, narrow": (
        Layout(data=1, shard=2, zero=3),
        (*MOE, "model.moe.ffn=4", "model.dim=36", "model.heads=6", "model.kv_heads=3"),
    ),
    "local steps, fp16": (Layout(data=2), ("optimizer.sync_every=2", "precision.compute=fp16")),
    "fp8, activations on the host, chunks": (
        Layout(data=2),
        ("precision.compute=fp8", "memory.activations=cpu", "memory.loss_chunk=8"),
    ),
}
QUICK = ("zero 3", "dualpipev, zero 3", "experts, tensor, zero 1")


def plan_of(run: Run, layout: Layout) -> Plan:
    assert run.train.micro_batch is not None
    return Plan(
        layout=layout,
        device="cpu",
        threads=1,
        micro_batch=run.train.micro_batch,
        accumulation=run.batch // layout.replicas // run.train.micro_batch,
        compute=run.precision.compute or "fp32",
        parameters=0,
        flops_per_token=0.0,
        peak_flops=None,
    )


def real(mesh: Mesh, run: Run, folder: Path) -> dict[str, Any]:
    trainer = tiny_trainer(mesh, run, folder / "checkpoints")
    for _ in range(2):
        trainer.step()
    placed, account = trainer.state.placement(), trainer.hooks.take_measurement()
    trainer.close()
    assert account is not None
    state = {kind: getattr(placed, kind) for kind in ("parameters", "gradients", "optimizer", "files")}
    return {"state": state, "sent": account.sent, "flops": account.flops}


def compare(case: str, folder: Path) -> None:
    layout, settings = CASES[case]
    run = tiny_run("train.micro_batch=1", *settings)
    found = run_ranks(real, layout.ranks, run, folder, layout=layout)
    for rank in sorted({0, layout.ranks - 1}):
        told = rehearse(run, plan_of(run, layout), rank, RehearsalDevice(card=None))
        assert told.error is None
        assert told.state == found[rank]["state"]
        # A run's own account ends before new values are spread.
        told_sent = replace(told, messages=tuple(one for one in told.messages if one.phase != "update")).sent
        sent = found[rank]["sent"]
        assert told_sent.keys() == sent.keys()
        for use in sent.keys() - {"expert", "expert tensor"}:  # how many rows travel to experts is the data's to say
            assert told_sent[use] == sent[use]
        if run.model.moe is None and (layout.context == 1 or not run.data.document_mask):
            assert sum(told.flops.values()) == found[rank]["flops"]["all"]
            assert told.repeated_flops == found[rank]["flops"]["repeated"]


@pytest.mark.parametrize("case", QUICK)
def test_rehearsed_rank_holds_and_sends_the_same_as_a_real_rank(case: str, tmp_path: Path) -> None:
    compare(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK])
def test_rehearsed_rank_equals_a_real_rank_in_every_other_layout(case: str, tmp_path: Path) -> None:
    compare(case, tmp_path)
