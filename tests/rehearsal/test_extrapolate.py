"""A plan of many layers from a step of a few: what is repeated equals a step of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from family_steps import family
from ranks import tiny_run

from phalanx.models.init import build
from phalanx.planning.machines.hardware import hardware
from phalanx.planning.search.search import judge
from phalanx.rehearsal import module_process
from phalanx.rehearsal.extrapolate import Segment, StepProfile, sample_layers
from phalanx.rehearsal.fake_gpu import RehearsalDevice, card
from phalanx.rehearsal.module_process import traced, traced_layers
from phalanx.rehearsal.rehearse import rehearse
from phalanx.rehearsal.result import Rehearsal
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run
from phalanx.worker.measure_process import measure

pytest.importorskip("transformers", "5", reason="models of transformers")
GPU = "a100-sxm-40gb"
DEVICE = RehearsalDevice(card=None)
"""CPUs: the allocator of a GPU rounds, which tells in a small model."""
_SLIDING = ["sliding_attention"] * 2 + ["full_attention"]
FAMILIES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "phi3": ({"num_hidden_layers": 6}, [0, 1, 1, 1, 1, 5]),
    "gemma3": ({"num_hidden_layers": 8, "layer_types": [*_SLIDING, *_SLIDING, *_SLIDING[:2]]}, [0, 1, 2, 1, 1, 2, 1, 7]),
    "deepseek_v3": (
        {"num_hidden_layers": 8, "first_k_dense_replace": 3, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5},
        [0, 1, 1, 3, 3, 3, 3, 7],
    ),
}
"""Each with the layer that stands for each one."""


def deep(kind: str, **layout: Any) -> Run:
    run = tiny_run("train.sequence_length=32", "train.batch=8", "precision.compute=fp32")
    cluster = replace(run.cluster, device=None, gpu=GPU)
    return replace(run, model=family(kind, **FAMILIES[kind][0]), layout=Layout(**{"data": 1} | layout), cluster=cluster)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tensor"), [("gemma3", 1), ("gemma3", 2), ("deepseek_v3", 1), ("deepseek_v3", 2), ("phi3", 2)]
)
def test_a_sample_of_layers_stands_for_all(kind: str, tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = deep(kind, tensor=tensor)
    size = measure(run)
    layers = sample_layers(build(run.model))
    assert layers is not None and list(layers.examples) == FAMILIES[kind][1]
    steps: list[Rehearsal] = []
    monkeypatch.setattr(module_process, "rehearse", lambda *given: steps.append(found := rehearse(*given)) or found)
    sampled = traced(run, size, "fp32", DEVICE)
    assert steps and all(step.profile is not None for step in steps)
    steps.clear()
    whole = traced_layers(run, size, "fp32", DEVICE, None)
    assert steps and all(step.profile is None for step in steps)

    assert sampled.rank_parameters == whole.rank_parameters
    assert sampled.traced_flops_per_token == whole.traced_flops_per_token
    assert sampled.rank_flops_per_token == whole.rank_flops_per_token
    assert sampled.activations == pytest.approx(whole.activations, abs=64)
    assert sampled.recomputed_activations == pytest.approx(whole.recomputed_activations, abs=64)
    plans = [judge(replace(run, model=replace(run.model, measured=found)), hardware(run, None)) for found in (sampled, whole)]
    assert plans[0].split.keys() == plans[1].split.keys()
    for cause, seconds in plans[0].split.items():
        assert seconds == pytest.approx(plans[1].split[cause], rel=1e-2), cause
    assert plans[0].bytes == pytest.approx(plans[1].bytes, rel=1e-2)


def test_segments_are_repeated_in_order() -> None:
    """By hand: 10 bytes before the layers; each stores 3 for its backward, which takes 5 more for a moment."""
    layers = sample_layers(build(family("phi3", num_hidden_layers=5)))
    assert layers is not None and layers.examples == (0, 1, 1, 1, 4)
    segments = [Segment(-1, True, 10, 12), *(Segment(number, True, 3, 4) for number in (0, 1, 4))]
    segments += [Segment(number, False, -3, 5) for number in (4, 1, 0)]
    step = StepProfile(layers, {-1: 7, 0: 100, 1: 1000, 4: 50}, {-1: 1, 1: 2}, tuple(segments))
    assert step.total_flops == 7 + 100 + 3 * 1000 + 50 and step.total_parameters == 1 + 3 * 2
    assert step.peaks() == [12, 14, 17, 20, 23, 26, 30, 27, 24, 21, 18]
    assert replace(step, segments=tuple(segments[:-1])).peaks() is None


LARGE = {
    "llama": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
    "qwen3_moe": {
        "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "num_experts": 128, "num_local_experts": 128, "num_experts_per_tok": 8,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGE)
def test_a_large_model_is_planned_from_three_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    run = deep("phi3", tensor=8)
    run = replace(run, model=family(kind, **LARGE[kind], head_dim=128, vocab_size=128256))
    layers = LARGE[kind]["num_hidden_layers"]
    steps: list[Rehearsal] = []
    monkeypatch.setattr(module_process, "rehearse", lambda *given: steps.append(found := rehearse(*given)) or found)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = traced(run, measure(run), "bf16", RehearsalDevice(card=card(GPU)))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 4 * 2**30
    assert {step.profile.layers.examples for step in steps if step.profile} == {(0, *[1] * (layers - 2), layers - 1)}
    assert all(step.profile for step in steps) and size.activations is not None and size.rank_parameters is not None
    # Norms and routers are whole, and so are the keys and values of four heads.
    assert size.parameters / 8 < size.rank_parameters < 1.02 * size.parameters / 8
