"""A search's result in plain values: complete, consistent, and its sentences true."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import plans
import pytest

from phalanx.planning.cost.step_time import PARTS
from phalanx.planning.report import PART_LABELS, candidate_json, keys_to_change, part_changes, report_of, run_file_tables, why
from phalanx.planning.search.candidate import Alternative, layout_name
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads


def test_report_json_is_plain_and_complete() -> None:
    found = plans.found()
    value = report_of(plans.run(), plans.hardware(), found).to_json()
    assert json.loads(json.dumps(value))["best"] == value["best"]
    assert value["model"]["parameters"] == pytest.approx(405.85e9, rel=1e-4) and value["train"]["tokens"] >= 15.6e12
    assert (value["cluster"]["gpus"], value["cluster"]["nodes"]) == (16384, 2048)
    assert value["best"]["memory"] == found.best.memory and value["best"]["split"]["compute"] == 3.5
    assert [other["name"] for other in value["others"]] == ["PP8 DP2 FSDP128 TP8+SP", "PP16v8 ZeRO1×64 TP16+SP"]
    assert value["why_not"][0]["candidate"]["seconds"] == 6.9 and value["why_not"][1]["candidate"] is None
    assert (value["considered"], value["fitting"], value["assumed"]) == (374_400, 12_345, list(found.assumptions))
    assert value["placement"]["lines"] == [
        "A rank is on node rank // 8, on rail rank % 8; ranks run through tensor, shard, pipeline, the first fastest.",
        "Inside a node: tensor groups of 8.",
        "Over the network: shard groups of 128 span 128 nodes on one rail and pipeline groups of 16 span 16 nodes on one rail.",
    ]
    assert value["placement"]["ranks"] == 16384 and len(value["curve"]) == 2
    assert set(PART_LABELS) == set(PARTS)


def test_values_derived_from_the_step_have_intervals() -> None:
    value = candidate_json(plans.option())
    assert value["gpu_hours"] == pytest.approx(54 / 0.9 * 24 * 16384)
    ranges = value["ranges"]
    assert ranges["seconds"] == [4.0, 6.0] and ranges["price"] == pytest.approx([0.8 * 47.2e6, 1.2 * 47.2e6])
    assert ranges["tokens_per_second"] == pytest.approx(
        [16_777_216 / 6, 16_777_216 / 4]
    )  # the tokens of a step, in P90 and P10
    for name, (low, high) in ranges.items():
        assert low < value[name] < high, name
    assert "price" not in candidate_json(plans.option(price=None))["ranges"]


def test_layouts_have_short_names() -> None:
    assert layout_name(Layout()) == "one device" and layout_name(Layout(data=4)) == "DP4"
    assert layout_name(Layout(data=2, shard=8, tensor=2)) == "DP2 FSDP8 TP2"
    moe = Layout(pipeline=16, data=1, shard=128, zero=1, expert=64, schedule="dualpipev")
    assert layout_name(moe) == "PP16-dualpipev ZeRO1×128 EP64"
    assert layout_name(Layout(data=1, pipeline=4, stages=3, schedule="interleaved-zero-bubble")) == "PP4v3-zb"
    assert layout_name(Layout(data=1, context=4, context_method="ulysses", expert=2, expert_tensor=2)) == "CP4-ulysses EP2×2"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=8),
        Layout(data=1, shard=4, tensor=2, sequence=True),
        Layout(data=2, pipeline=4, schedule="zbv"),
        Layout(data=1, pipeline=2, schedule="interleaved-1f1b", stages=2, shard=2, zero=1, context=2, context_method="gather"),
    ],
)
def test_run_file_tables_give_the_candidate_again(layout: Layout) -> None:
    option = plans.option(layout=layout, micro_batch=2, recompute="selective", offload="cpu", compute="bf16")
    text = "[train]\nbatch = 64\nsteps = 1\n[model]\nlayers = 8\ndim = 64\nheads = 4\n".replace(
        "[train]\n", "[train]\nmicro_batch = 2\n"
    )
    rest = run_file_tables(option).replace("[train]\nmicro_batch = 2\n", "")
    run = loads(text + "\n" + rest)
    assert (run.layout, run.train.micro_batch, run.precision.compute) == (layout, 2, "bf16")
    assert (run.memory.recompute, run.memory.offload) == ("selective", "cpu")


def test_run_file_tables_give_recompute_every() -> None:
    assert "recompute_every" not in run_file_tables(plans.option(recompute="full"))
    tables = tomllib.loads(run_file_tables(plans.option(recompute="full", recompute_every=2)))
    assert tables["memory"] == {"recompute": "full", "recompute_every": 2, "offload": "none", "compile": False}
    assert candidate_json(plans.option(recompute="full", recompute_every=2))["recompute_every"] == 2


CHANGED = [
    Layout(data=1, shard=8),
    Layout(data=2, shard=4, zero=1),
    Layout(data=8),
    Layout(data=1, shard=4, tensor=2, sequence=True),
    Layout(data=2, pipeline=4, schedule="zbv"),
    Layout(data=2, pipeline=4),
    Layout(data=1, pipeline=2, schedule="interleaved-1f1b", stages=4, shard=2, context=2, context_method="gather"),
    Layout(data=2, pipeline=2, schedule="interleaved-zero-bubble", context=2),
]


@pytest.mark.parametrize("old", range(len(CHANGED)))
@pytest.mark.parametrize("new", range(len(CHANGED)))
def test_keys_to_change_turn_the_best_into_another(old: int, new: int) -> None:
    best = plans.option(layout=CHANGED[old], recompute="full", recompute_every=2)
    other = plans.option(layout=CHANGED[new], micro_batch=2, recompute="selective", offload="cpu")
    keys = keys_to_change(best, other).split()
    if best.layout.stages is not None and other.layout.pipeline == 1:
        assert keys == []  # `stages` would have to go
        return
    run = loads(
        run_file_tables(best).replace("[train]", "[train]\nbatch = 64\nsteps = 1")
        + "\n[model]\nlayers = 8\ndim = 64\nheads = 4\n",
        overrides=keys,
    )
    assert layout_name(run.layout) == layout_name(other.layout) and run.layout.ranks == 8
    assert (run.layout.sequence, run.layout.stages_per_rank) == (other.layout.sequence, other.layout.stages_per_rank)
    memory = run.memory.recompute, run.memory.recompute_every, run.memory.offload
    assert (run.train.micro_batch, *memory) == (2, "selective", 1, "cpu")
    assert keys_to_change(best, best) == ""


def test_keys_to_change_lists_only_different_keys() -> None:
    best = plans.option()
    assert (
        keys_to_change(best, replace(best, layout=replace(best.layout, tensor=16, shard=64)))
        == "layout.shard=64 layout.tensor=16"
    )
    gpipe = replace(best, layout=replace(best.layout, schedule="gpipe", stages=None))
    assert keys_to_change(best, gpipe) == "layout.schedule=gpipe layout.stages=1"
    whole = replace(best, layout=replace(best.layout, data=128, shard=1, zero=3))
    assert (
        keys_to_change(best, whole) == "layout.data=128 layout.shard=1 layout.zero=3"
    )  # else ZeRO-1 would have nothing to spread
    half = replace(best, recompute="full", recompute_every=2)
    assert keys_to_change(best, half) == "memory.recompute=full memory.recompute_every=2"


def test_report_lists_each_alternative_once_and_fixed_keys() -> None:
    found = plans.found()
    twice = (
        *found.alternatives,
        Alternative(candidate=found.runners_up[1], name="wide", reason="?"),
        Alternative(candidate=found.best, name="it", reason="?"),
    )
    value = report_of(plans.run(), plans.hardware(), replace(found, alternatives=twice)).to_json()
    assert [one["name"] for one in value["why_not"]] == ["TP16", "PP128"]
    assert value["why_not"][0]["candidate"]["change"] == value["others"][1]["change"] == "layout.shard=64 layout.tensor=16"
    assert not any("--free" in sentence for sentence in value["why"])
    kept = replace(plans.run(), layout=Layout(tensor=8, pipeline=16))
    assert report_of(kept, plans.hardware(), found).why[-1] == (
        "The search kept the [layout] of the run file (pipeline, tensor): --free searches all layouts and compares."
    )


def test_part_changes_are_sorted_by_size() -> None:
    best, worse = plans.option(), plans.option()
    worse = replace(worse, split=worse.split | {"tensor": 2.3, "bubble": 0.2, "data": 0.3501}, seconds=6.6)
    assert list(part_changes(best, worse).items()) == [
        ("tensor", pytest.approx(1.9)),
        ("bubble", pytest.approx(-0.3)),
    ]
    assert part_changes(best, best) == {}


def test_why_sentences_are_true() -> None:
    found = plans.found()
    first, second, third = why(found, "time")
    assert first == "It is the fastest that fits, of 374,400 legal layouts."
    assert second == (
        "Of a step, 70% is computing, 10% pipeline bubble, 8% tensor exchange, 7% gradients and shards; "
        "the fullest rank uses 77% of its memory."
    )
    assert third == "The next, PP8 DP2 FSDP128 TP8+SP, takes 12.0% longer, most of it computing."
    assert "cheapest" in why(found, "price")[0]
    close = replace(found, runners_up=(replace(found.runners_up[0], seconds=5.1), *found.runners_up[1:]))
    assert "PP8 DP2 FSDP128 TP8+SP is within 3% of it" in why(close, "time")[-1]
    quicker = replace(found, runners_up=(replace(found.runners_up[0], seconds=4.97),))
    assert why(quicker, "time")[0] == "It is the simplest layout among the fastest that fit, of 374,400 legal layouts."
    assert why(replace(found, considered=1, runners_up=()), "time")[:1] == [
        "It is the layout of the run file, evaluated without a search."
    ]
