"""Plans of LoRA: adapters alone have gradients, optimizer states and checkpoints, and frozen matrices no weight gradients to compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_cases import cluster

from phalanx.planning.cost.footprint import footprint
from phalanx.planning.planner import plan_run
from phalanx.planning.search.search import judge
from phalanx.planning.search.space import all_columns, given_space, pick
from phalanx.spec.adapted_layers import adapter_parameters
from phalanx.spec.layout import Layout
from phalanx.spec.model import PRESETS
from phalanx.spec.plan import Machine, Plan
from phalanx.spec.run import Cluster, Lora, Memory, Precision, Run, Train

RUN = Run(
    model=PRESETS["llama3-8b"],
    train=Train(batch=8, sequence_length=2048, steps=100, micro_batch=1),
    precision=Precision(compute="bf16"),
    memory=Memory(recompute="none", offload="none", compile=False),
    layout=Layout(data=8),
)
LORA = replace(RUN, lora=Lora(rank=16))


def held(run: Run) -> dict[str, float]:
    space = given_space(run, cluster(8))
    return footprint(space.jobs(pick(all_columns(space), slice(0, 1)))).at(0)


def test_only_adapters_have_gradients_and_states() -> None:
    whole, lora = held(RUN), held(LORA)
    adapters = adapter_parameters(LORA.model, LORA.lora)
    assert 1.9 <= lora["gradients"] / adapters <= 4.1 and lora["optimizer"] / adapters <= 8.1
    assert lora["parameters"] < 0.36 * whole["parameters"]  # two bytes instead of six
    assert whole["gradients"] > 50 * lora["gradients"]


def test_a_quantized_base_takes_its_own_bytes() -> None:
    model = LORA.model
    tables = 2 * 2 * model.vocab * model.dim
    plain, int8, nf4 = (held(replace(LORA, lora=Lora(rank=16, base=base)))["parameters"] for base in (None, "int8", "nf4"))
    blocks = (model.parameters() - model.vocab * model.dim * 2) / 2**30
    assert (plain - int8) / 2**30 == pytest.approx(blocks, rel=0.01)
    assert (plain - nf4) / 2**30 == pytest.approx(1.4375 * blocks, rel=0.01)
    assert nf4 > tables  # which stay as they are
    compiled = replace(LORA, memory=replace(LORA.memory, compile=True))
    seconds = [judge(replace(compiled, lora=Lora(rank=16, base=base)), cluster(8)).split["compute"] for base in (None, "nf4")]
    assert seconds[0] < seconds[1] < 1.2 * seconds[0]


def test_a_step_is_faster_and_moves_fewer_bytes() -> None:
    whole, lora = (judge(run, cluster(8)) for run in (RUN, LORA))
    assert 0.6 < lora.split["compute"] / whole.split["compute"] < 0.85
    assert lora.split["data"] < 0.1 * whole.split["data"] + 1e-3 and lora.split["optimizer"] < 0.1 * whole.split["optimizer"]


def test_the_plan_names_what_is_trained() -> None:
    small = replace(
        LORA, model=PRESETS["tiny-dense"], cluster=Cluster(device="cpu"), precision=Precision(), layout=Layout(data=1)
    )
    small = replace(small, model=replace(small.model, vocab=257), train=replace(small.train, sequence_length=64))
    machine = Machine(host="here", cpu="any", cores=2, memory=1 << 34)
    plan = plan_run(small, machine).plan
    assert plan.trained == adapter_parameters(small.model, small.lora) and "of LoRA adapters" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan
    assert plan_run(replace(small, lora=Lora()), machine).plan.trained is None
