"""Layouts that are left open: what a search puts in the place of replicas, what is promised, and what a run that goes on keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.planning.planner import choose, keep_layout, plan_run
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Gpu, Machine, Plan
from phalanx.spec.run import Cluster, Memory, Run, Train

GIB = 2**30
SMALL = ModelSpec(vocab=257)
LLAMA_8B = ModelSpec(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)
LLAMA_1B = ModelSpec(dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=128256, tied=True)


def laptop(cores: int = 8, memory: int = 16 * GIB, **more: object) -> Machine:
    machine = Machine(host="laptop", cpu="some", cores=cores, memory=memory, core_flops=1e11)
    return replace(machine, **more)  # type: ignore[arg-type]


def server(gpus: int = 8, memory: int = 80 * GIB) -> Machine:
    cards = (Gpu(name="NVIDIA H100 80GB HBM3", memory=memory),) * gpus
    return Machine(host="server", cpu="some", cores=96, memory=1024 * GIB, core_flops=1e11, gpus=cards)


def run_of(model: ModelSpec = SMALL, batch: int = 32, sequence: int = 1024, **tables: object) -> Run:
    return Run(model=model, train=Train(batch=batch, sequence_length=sequence, steps=10), **tables)  # type: ignore[arg-type]


def test_a_model_too_large_for_replicas_is_shared() -> None:
    settled = plan_run(run_of(LLAMA_8B), server())
    plan = settled.plan
    assert plan.ranks == 8 and plan.layout.shard * plan.layout.tensor * plan.layout.pipeline > 1
    assert plan.promise is not None and plan.promise.total_memory <= 80 * GIB
    assert plan.promise.total_memory == pytest.approx(sum(plan.promise.memory.values()))
    assert settled.run.layout == Layout(), "what was left open stays so in the run, and is in the plan"
    assert settled.run.train.micro_batch is None
    assert "auto" not in (settled.run.memory.recompute, settled.run.memory.offload)


def test_recomputation_or_offload_where_no_layout_fits() -> None:
    memory = plan_run(run_of(LLAMA_1B, batch=2, sequence=8192), server(1, memory=28 * GIB)).run.memory
    assert memory.recomputes or memory.offloads


def test_given_memory_settings_are_not_changed() -> None:
    with pytest.raises(RunError, match="smaller model"):
        plan_run(run_of(LLAMA_8B, memory=Memory(recompute="none", offload="none")), server(1))


def test_no_memory_is_saved_where_replicas_fit() -> None:
    memory = plan_run(run_of(), laptop()).run.memory
    assert (memory.recompute, memory.offload) == ("none", "none")
    asked = Memory(recompute="full")
    assert plan_run(run_of(memory=asked), laptop()).run.memory == replace(asked, offload="none")


def test_cores_train_replicas_unless_those_do_not_fit() -> None:
    run = run_of(LLAMA_1B, batch=4)
    assert choose(run, laptop(4, memory=128 * GIB)).layout == Layout(data=4)
    tight = choose(run, laptop(4, memory=64 * GIB))
    assert tight.ranks * tight.threads <= 4
    assert tight.promise is not None and tight.promise.total_memory * tight.ranks <= 64 * GIB


def test_requested_ranks_are_used() -> None:
    for ranks in (1, 2, 4):
        assert choose(run_of(cluster=Cluster(cpu_ranks=ranks)), laptop(2)).layout == Layout(data=ranks)
        assert choose(run_of(), laptop(2), ranks).layout == Layout(data=ranks)


def test_more_ranks_than_cores_promise_no_more_speed() -> None:
    two, four = (choose(run_of(cluster=Cluster(cpu_ranks=n, threads=1)), laptop(2)).promise for n in (2, 4))
    assert two is not None and four is not None and four.seconds >= two.seconds


def test_twice_the_cores_promise_nearly_twice_the_speed() -> None:
    few, many = (choose(run_of(), laptop(cores)).promise for cores in (2, 4))
    assert few is not None and many is not None and 1.6 < few.seconds / many.seconds < 2.2


def test_custom_module_has_no_promise() -> None:
    own = replace(SMALL, module="mine:Model")
    size = choose(run_of(), laptop())
    from phalanx.spec.plan import Size

    plan = choose(run_of(own), laptop(), size=Size(parameters=size.parameters, active=size.parameters, flops_per_token=1.0))
    assert plan.promise is None and plan.layout == Layout(data=8)


def test_plan_round_trips_through_json() -> None:
    plan = choose(run_of(LLAMA_8B), server())
    assert plan.promise is not None and plan.placement is not None
    assert Plan.from_json(plan.to_json()) == plan


def test_resumed_run_keeps_its_layout_on_the_same_machine() -> None:
    run, machine = run_of(), laptop(4)
    before = replace(choose(run, machine), layout=Layout(data=2))
    kept = keep_layout(run, machine, before)
    assert kept is not None and kept.plan.layout == before.layout and kept.plan.micro_batch == before.micro_batch
    assert kept.run.layout == Layout() and kept.run.train.micro_batch is None
    assert keep_layout(run, laptop(8), before) is None, "another machine: the plan is made anew"
    assert keep_layout(replace(run, cluster=Cluster(cpu_ranks=4)), machine, before) is None, "somebody asks for other ranks"
    assert keep_layout(replace(run, layout=Layout(data=4)), machine, before) is None, "somebody asks for another layout"
    assert keep_layout(run, machine, before, ranks=4) is None


def test_measured_constants_override_fitted_ones() -> None:
    slow = laptop(2, measured=(("cpu.overhead", 5.0), ("cpu.fixed_memory", float(GIB)), ("cuda.overhead", 100.0)))
    usual, measured = choose(run_of(), laptop(2)).promise, choose(run_of(), slow).promise
    assert usual is not None and measured is not None
    assert measured.seconds == pytest.approx(usual.seconds + 5.0, rel=1e-3, abs=0.01)
    assert measured.memory["fixed"] - usual.memory["fixed"] == pytest.approx(GIB - 285 * 2**20, rel=1e-6)
