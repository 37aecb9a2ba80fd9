"""A search's result in plain values: complete, consistent, and its sentences true."""

from __future__ import annotations

import json
from dataclasses import replace

import plans
import pytest

from phalanx.planning.explain import WORDS, beside, pasted, short, told, told_option, why
from phalanx.planning.times import PARTS
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads


def test_everything_is_plain_and_complete() -> None:
    found = plans.found()
    value = told(plans.run(), plans.hardware(), found)
    assert json.loads(json.dumps(value))["best"] == value["best"]
    assert value["model"]["parameters"] == pytest.approx(405.85e9, rel=1e-4) and value["train"]["tokens"] >= 15.6e12
    assert (value["cluster"]["gpus"], value["cluster"]["nodes"]) == (16384, 2048)
    assert value["best"]["memory"] == found.best.memory and value["best"]["split"]["compute"] == 3.5
    assert [other["name"] for other in value["others"]] == ["PP8 DP2 FSDP128 TP8+SP", "PP16v8 ZeRO1×64 TP16+SP"]
    assert value["why_not"][0]["option"]["seconds"] == 6.9 and value["why_not"][1]["option"] is None
    assert (value["considered"], value["fitting"], value["assumed"]) == (374_400, 12_345, list(found.assumed))
    assert value["placement"]["lines"] == [
        "A rank is on node rank // 8, on rail rank % 8; ranks run through tensor, shard, pipeline, the first fastest.",
        "Inside a node: tensor groups of 8.",
        "Over the network: shard groups of 128 span 128 nodes on one rail and pipeline groups of 16 span 16 nodes on one rail.",
    ]
    assert value["placement"]["ranks"] == 16384 and len(value["curve"]) == 2
    assert set(WORDS) == set(PARTS)


def test_what_follows_from_the_step_has_its_interval() -> None:
    value = told_option(plans.option())
    assert value["gpu_hours"] == pytest.approx(54 / 0.9 * 24 * 16384)
    ranges = value["ranges"]
    assert ranges["seconds"] == [4.0, 6.0] and ranges["price"] == pytest.approx([0.8 * 47.2e6, 1.2 * 47.2e6])
    assert ranges["tokens_per_second"] == pytest.approx(
        [16_777_216 / 6, 16_777_216 / 4]
    )  # the tokens of a step, in P90 and P10
    for name, (low, high) in ranges.items():
        assert low < value[name] < high, name
    assert "price" not in told_option(plans.option(price=None))["ranges"]


def test_layouts_have_short_names() -> None:
    assert short(Layout()) == "one device" and short(Layout(data=4)) == "DP4"
    assert short(Layout(data=2, shard=8, tensor=2)) == "DP2 FSDP8 TP2"
    moe = Layout(pipeline=16, data=1, shard=128, zero=1, expert=64, schedule="dualpipev")
    assert short(moe) == "PP16-dualpipev ZeRO1×128 EP64"
    assert short(Layout(data=1, pipeline=4, stages=3, schedule="interleaved-zero-bubble")) == "PP4v3-zb"
    assert short(Layout(data=1, context=4, context_method="ulysses", expert=2, expert_tensor=2)) == "CP4-ulysses EP2×2"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=8),
        Layout(data=1, shard=4, tensor=2, sequence=True),
        Layout(data=2, pipeline=4, schedule="zbv"),
        Layout(data=1, pipeline=2, schedule="interleaved-1f1b", stages=2, shard=2, zero=1, context=2, context_method="gather"),
    ],
)
def test_what_is_pasted_is_the_option_again(layout: Layout) -> None:
    option = plans.option(layout=layout, micro_batch=2, recompute="selective", offload="cpu", compute="bf16")
    text = "[train]\nbatch = 64\nsteps = 1\n[model]\nlayers = 8\ndim = 64\nheads = 4\n".replace(
        "[train]\n", "[train]\nmicro_batch = 2\n"
    )
    rest = pasted(option).replace("[train]\nmicro_batch = 2\n", "")
    run = loads(text + "\n" + rest)
    assert (run.layout, run.train.micro_batch, run.precision.compute) == (layout, 2, "bf16")
    assert (run.memory.recompute, run.memory.offload) == ("selective", "cpu")


def test_where_another_loses_time_most_first() -> None:
    best, worse = plans.option(), plans.option()
    worse = replace(worse, split=worse.split | {"tensor": 2.3, "bubble": 0.2, "data": 0.3501}, seconds=6.6)
    assert [(one["part"], one["seconds"]) for one in beside(best, worse)] == [
        ("tensor", pytest.approx(1.9)),
        ("bubble", pytest.approx(-0.3)),
    ]
    assert beside(best, best) == []


def test_why_says_what_is_so() -> None:
    found = plans.found()
    first, second, third = why(found, "time")
    assert first == "It is the quickest that fits, of 374,400 legal layouts."
    assert second.startswith("70% of a step is computing, 27% is waiting, mostly pipeline bubble;") and "77%" in second
    assert third == "The next, PP8 DP2 FSDP128 TP8+SP, takes 12.0% longer, most of it computing."
    assert "cheapest" in why(found, "price")[0]
    close = replace(found, others=(replace(found.others[0], seconds=5.1), *found.others[1:]))
    assert "PP8 DP2 FSDP128 TP8+SP is within 3% of it" in why(close, "time")[-1]
    quicker = replace(found, others=(replace(found.others[0], seconds=4.97),))
    assert (
        why(quicker, "time")[0] == "It is the simplest of those as quick as the quickest that fits, of 374,400 legal layouts."
    )
    assert why(replace(found, considered=1, others=()), "time")[:1] == ["It is the run file's own layout, judged as it stands."]
