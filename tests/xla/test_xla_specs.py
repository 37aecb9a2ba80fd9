"""Where the XLA engine puts parameters, by the names of their dimensions. Needs JAX, but no device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from xla_engine import needs_xla

from phalanx.models import init
from phalanx.models.custom import axes_of
from phalanx.spec.check import check
from phalanx.spec.engine import Engine
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Run, Train

MODEL = ModelSpec(dim=40, layers=1, heads=4, kv_heads=2, ffn=62, vocab=257, context=24)


@needs_xla
def test_names_of_dimensions_become_axes_and_odd_sizes_stay_whole() -> None:
    from jax.sharding import PartitionSpec as P

    from phalanx.xla.specs import placements

    module = init.build(MODEL)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    found = placements(shapes, axes_of(module), Layout(data=1, shard=3, tensor=4), MODEL)
    assert found["blocks.0.attention.query.weight"].value == P("tensor", None)  # 40 divides by 4, and nothing by 3
    assert found["blocks.0.attention.key.weight"].value == P(None, None)  # two heads stay whole
    assert found["embed.weight"].value == P(None, None)  # 257 rows
    found = placements(shapes, axes_of(module), Layout(data=1, shard=2, tensor=2), MODEL)
    assert found["blocks.0.attention.key.weight"].value == P("tensor", "shard")
    assert found["blocks.0.mlp.down.weight"].value == P("shard", "tensor")
    assert found["embed.weight"].value == P(None, "shard")  # the next dimension that divides
    assert found["norm.weight"].value == P("shard")


@needs_xla
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_divides_moments_then_gradients_then_values(zero: int) -> None:
    from jax.sharding import PartitionSpec as P

    from phalanx.xla.specs import placements

    module = init.build(MODEL)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    placed = placements(shapes, axes_of(module), Layout(data=1, shard=2, zero=zero), MODEL)["blocks.0.mlp.up.weight"]
    divided, whole = P("shard", None), P(None, None)
    assert placed.moments == divided
    assert placed.gradient == (divided if zero >= 2 else whole)
    assert placed.value == (divided if zero == 3 else whole)


REFUSED = [
    "layout.pipeline=2",
    "layout.context_method=ulysses",
    "precision.compute=fp8",
    "precision.compute=fp16",
    "optimizer.sync_every=2",
    "memory.offload=cpu",
    "memory.cuda_graphs=true",
    "model.mtp_depth=1",
    "lora.rank=2",
    "train.sample_every=5",
    "watch.timeline=true",
]


@pytest.mark.parametrize("setting", REFUSED)
def test_what_the_engine_lacks_is_refused_by_name(setting: str) -> None:
    text = "[train]\nbatch = 8\nsteps = 2\nsequence_length = 64\n[engine]\nname = 'xla'\n"
    given = ["cluster.hosts=hosts"] if "ssh" in setting else ["layout.context=2"]
    key = setting.partition("=")[0]
    with pytest.raises(RunError) as refused:
        loads(text, overrides=[setting, *given])
    assert any(key in problem and 'engine.name = "xla"' in problem for problem in refused.value.problems), refused.value


def test_what_the_engine_has_is_accepted() -> None:
    layout = Layout(data=1, shard=2, context=2, tensor=2, sequence=True, context_method="gather", zero=2)
    run = Run(model=MODEL, layout=layout, engine=Engine(name="xla"), train=Train(batch=8, sequence_length=24, steps=2))
    assert not check(run)
    assert check(replace(run, layout=replace(layout, pipeline=2)))
