"""Proofs of real layouts, through one pool: what passes, what is told, and that silence is not taken for proof."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from ranks import tiny_run

import phalanx as px
from phalanx.parallel.sharded_model import ParamShard
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.verification import parity
from phalanx.verification.cases import MODELS, make_case
from phalanx.verification.parity import RankResult, Report, prove, verify
from phalanx.verification.rank_pool import RankPool
from phalanx.verification.reference import Reference


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


def told(report: Report) -> str:
    return f"{report.failure} {[check for check in report.checks if not check.passed]}"


@pytest.mark.parametrize("model", ["gpt", "mla"])  # the others stand among the rows
def test_replicas_equal_one_device(model: str, pool: RankPool) -> None:
    run = replace(tiny_run("train.sequence_length=48"), model=MODELS[model], layout=Layout(data=4))
    report = verify(run, steps=4, pool=pool)
    assert report.passed, told(report)
    assert [check.name for check in report.checks] == [
        "placement", "batches", "loss", "gradients", "gradient norm", "parameters",
    ]  # fmt: skip


@pytest.mark.parametrize("overrides", [("precision.compute=bf16",), ("precision.reduce=bf16",)], ids=["compute", "wire"])
def test_coarse_numbers_pass_in_their_own_range(overrides: tuple[str, ...], pool: RankPool) -> None:
    report = verify(tiny_run("layout.data=2", *overrides), steps=4, pool=pool)
    assert report.passed, told(report)
    assert report.case.coarsest == "bf16"
    assert {check.name: check.accepted for check in report.checks}["gradients"] == 7e-2


def test_a_batch_that_is_cut_otherwise_is_still_the_same_batch(pool: RankPool) -> None:
    report = verify(tiny_run("layout.data=2", "train.batch=6", "train.micro_batch=1"), steps=3, pool=pool)
    assert report.passed, told(report)


def test_a_step_that_overflows_in_one_local_replica_is_skipped_by_all(pool: RankPool) -> None:
    scale = "precision.loss_scale=1048576.0"  # both overflow in the first step, one of them in the second
    run = tiny_run("layout.data=2", "optimizer.sync_every=2", "precision.compute=fp16", scale)
    report = verify(run, steps=4, pool=pool)
    assert report.passed, told(report)
    assert {check.name: check.step for check in report.checks}["gradients"] in (3, 4)  # the first that were taken


def test_steps_that_were_all_skipped_are_no_proof(pool: RankPool) -> None:
    report = verify(tiny_run("layout.data=2", "precision.compute=fp16", "precision.loss_scale=1e9"), steps=2, pool=pool)
    assert not report.passed and report.first is not None
    assert "every step overflowed" in report.first.tensor and "precision.loss_scale = 1e+09" in report.first.tensor


def test_the_report_for_programs_is_plain(pool: RankPool) -> None:
    report = verify(tiny_run("layout.data=2"), steps=2, account=True, pool=pool)
    table = json.loads(json.dumps(report.to_json()))
    assert table["passed"] is True and table["ranks"] == 2 and table["steps"] == 2 and table["precision"] == "fp32"
    assert table["layout"]["data"] == 2 and table["failure"] is None
    assert all(check.keys() >= {"name", "largest", "accepted", "tensor", "step", "passed"} for check in table["checks"])
    assert len(table["accounts"]) == 2


def test_state_and_traffic_of_replicas_are_what_theory_says(pool: RankPool) -> None:
    report = verify(tiny_run("layout.data=4"), steps=2, account=True, pool=pool)
    parameters = report.case.run.model.parameters()
    assert report.theory is not None and report.theory.per_parameter == "16"
    for account in report.accounts:
        state = sum(size for kind, size in account.memory.items() if kind != "activations")
        assert state == pytest.approx(16 * parameters, rel=0.03)
        assert account.memory["activations"] > 0
        assert account.sent["data"]["all-reduce"] == pytest.approx(2 * 4 * parameters, rel=0.03)  # a tree of two stages
    assert report.theory.sent["data"] == pytest.approx(2 * 3 / 4 * 4 * parameters)
    assert "2 times" in report.theory.notes[0] and "1.5 times" in report.theory.notes[0]


def test_with_sequence_a_pipeline_sends_slices(pool: RankPool) -> None:
    run = tiny_run("layout.data=1", "layout.pipeline=2", "layout.tensor=2", "layout.sequence=true")
    report = verify(run, steps=1, account=True, pool=pool)
    sent = [account.sent["pipeline"]["send"] for account in report.accounts]
    assert report.theory is not None and report.theory.sent["pipeline"] == pytest.approx(sum(sent) / len(sent))


def test_programs_ask_for_a_proof_too() -> None:
    report = px.verify(tiny_run("layout.data=2"), steps=1)
    assert report.passed and report.first is None
    with pytest.raises(RunError, match=r"does not divide model\.heads"):
        px.verify(replace(tiny_run(), layout=Layout(tensor=3)))


def test_one_process_that_fails_is_told_as_such(pool: RankPool) -> None:
    case = make_case(tiny_run("layout.data=2"), steps=2)
    broken = replace(case, reference=replace(case.reference, model=replace(case.reference.model, vocab=10)))
    report = prove(broken, pool=pool)
    assert not report.passed and report.failure is not None
    assert report.failure.rank is None and report.failure.trace


def placement(layout: Layout, *found: RankResult) -> dict[str, float]:
    case = make_case(tiny_run("layout.data=2"))
    case = replace(case, plan=replace(case.plan, layout=layout))
    rows = parity._placement(case, list(found), Reference(None, {"w": (4, 2), "v": (3,)}))  # type: ignore[arg-type]
    return {row.tensor: row.difference for row in rows if row.difference}


def test_elements_that_no_rank_holds_are_missed() -> None:
    top, rest = ParamShard(TensorSlice.of((4, 2), (0, 0), (1, 2))), ParamShard(TensorSlice.full((3,)))
    assert placement(Layout(data=2), RankResult(shards={"w": top, "v": rest}), RankResult(shards={"v": rest})) == {"w": 6.0}


def test_a_technique_that_did_nothing_is_missed() -> None:
    whole = {"w": ParamShard(TensorSlice.full((4, 2))), "v": ParamShard(TensorSlice.full((3,)))}
    layout = Layout(pipeline=2, shard=2, context=2, tensor=2, expert=2)
    idle = placement(layout, RankResult(shards=whole))
    assert sorted(idle) == [
        f"layout.{axis} = 2 was not applied" for axis in ("context", "expert", "pipeline", "shard", "tensor")
    ]
    busy = [
        RankResult(shards={name: whole[name]}, split={"shard", "tensor", "expert"}, attends_remotely=True) for name in whole
    ]
    assert placement(layout, *busy) == {}
