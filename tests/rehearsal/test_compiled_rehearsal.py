"""`phalanx rehearse` of a run of the XLA engine: what the compiler makes of its step, against closed formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from xla_engine import DEVICES, devices, needs_xla, plan_of, plant_missing_constraint, small_run

from phalanx.host.env import use_virtual_devices
from phalanx.parallel.mesh import Mesh
from phalanx.rehearsal.compiled_process import CompiledProgram
from phalanx.rehearsal.compiled_rehearsal import MOST_DEVICES, CompiledRehearsal, fewer_replicas, rehearse_compiled
from phalanx.rehearsal.fake_gpu import RehearsalDevice
from phalanx.rehearsal.rehearse import Job
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Run

MODEL = ModelSpec(dim=64, layers=1, heads=4, kv_heads=2, ffn=128, vocab=264, context=16)


def rehearsed(run: Run, **more: Any) -> CompiledRehearsal:
    return rehearse_compiled(Job(run, replace(plan_of(run), **more), RehearsalDevice(card=None, node=4, island=4)))


def matrices(model: ModelSpec) -> int:
    """Parameters of matrix products."""
    attention = 2 * model.dim * model.heads * model.head + 2 * model.dim * model.kv * model.head
    return model.layers * (attention + 3 * model.dim * model.hidden) + model.vocab * model.dim


@needs_xla
def test_bytes_operations_and_messages_of_a_device() -> None:
    """Two replicas of four devices; eight samples, of which each device group computes two, one at a time."""
    layout = Layout(data=2, shard=2, tensor=2)
    result = rehearsed(small_run(layout, 1, model=MODEL))
    program, spec = result.program, MODEL
    # All but the norms are divided over both axes; norms over `shard` alone.
    norms = 3 * spec.dim
    held = (spec.parameters() - norms) // 4 + norms // 2
    assert program.parameters == 4 * held and program.optimizer == 8 * held
    tokens = 2 * spec.context / layout.tensor  # a device's share
    products = 3 * 2 * matrices(spec)
    scores = 2 * 2 * 3 * spec.layers * spec.heads * spec.head * spec.context
    assert program.flops == pytest.approx(tokens * (products + scores), rel=0.02)
    assert set(program.formats) == {"f32 f32"}
    # Each replica's gradients, in fp32, at least in a ring of two; only the table of the embedding is added up whole.
    between = [kinds.get("all-reduce", 0) for axes, kinds in result.to_json()["sent"].items() if "data" in axes]
    assert 4 * held <= sum(between) < 4 * 4 * held
    assert result.to_json()["tiers"].keys() == {"node", "across"}
    assert not program.rematerializations and not program.endless
    assert result.fits and result.compiled_for == 8 and program.compile_seconds > 0


def compiled_without_constraint(mesh: Mesh, run: Run) -> CompiledProgram:
    use_virtual_devices(DEVICES)
    plant_missing_constraint()
    from phalanx.rehearsal.compiled_process import compiled_program

    return compiled_program(run, plan_of(run))


@needs_xla
@pytest.mark.slow
def test_a_missing_constraint_is_reported() -> None:
    layout = Layout(data=2, shard=2, context=2, context_method="gather")
    with devices() as pool:
        program = pool.alone(compiled_without_constraint, small_run(layout, 1, model=MODEL))
    assert program.rematerializations


@needs_xla
@pytest.mark.slow
def test_a_layout_with_many_replicas_is_compiled_with_fewer() -> None:
    """What replicas send is that of all of them, and everything else that of a layout that is compiled as it is."""
    model = replace(MODEL, layers=1)
    few, many = Layout(data=4, shard=2), Layout(data=4 * MOST_DEVICES, shard=2)
    run = small_run(few, 1, model=model)
    large = replace(run, layout=many, train=replace(run.train, batch=many.replicas))
    small, shrunk = rehearsed(run), rehearsed(large)
    assert shrunk.compiled_for == MOST_DEVICES and shrunk.ranks == many.ranks and "256 of 2,048" in shrunk.notes[0]
    assert shrunk.program.flops == small.program.flops and shrunk.program.parameters == small.program.parameters
    sent = [result.to_json()["sent"]["data"]["all-reduce"] for result in (small, shrunk)]
    assert sent[1] / sent[0] == pytest.approx((1 - 1 / many.data) / (1 - 1 / few.data), rel=0.01)


def test_replicas_are_left_out_only_where_devices_are_too_many() -> None:
    assert fewer_replicas(Layout(data=2, shard=128)) == Layout(data=2, shard=128)
    assert fewer_replicas(Layout(data=100, shard=16)) == Layout(data=10, shard=16)
    with pytest.raises(RunError, match=r"256 devices, but .* lower layout\.shard"):
        fewer_replicas(Layout(data=2, shard=256))
