"""Every legal layout and no other, held to the checks that refuse a run file."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest
from planning_cases import SMALL, SPARSE, cluster, run_of

from phalanx.planning.cost.job_table import OFFLOAD, RECOMPUTE
from phalanx.planning.search.space import all_columns, given_space, layout_of, space
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.layout import Layout, Schedule
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Memory, Optimizer, Run

METHODS = ("ring", "gather", "ulysses")


def legal(run: Run, gpus: int, micro_batch: int) -> bool:
    """By the run file's own checks, and what is looked at when a run is settled on a machine."""
    layout = run.layout
    if layout.ranks != gpus or any(True for _ in layout_findings(run)) or run.batch % layout.replicas:
        return False
    return run.batch // layout.replicas % micro_batch == 0


def listed(run: Run, gpus: int) -> set[tuple[Layout, int, str, str]]:
    found = space(run, cluster(gpus))
    work = found.jobs(all_columns(found))
    assert isinstance(work.pipeline, type(work.recompute))
    return {
        (layout_of(run, work, row), int(work.micro_batch[row]), RECOMPUTE[work.recompute[row]], OFFLOAD[work.offload[row]])
        for row in range(len(work.pipeline))
    }


def drawn_run(draw: random.Random) -> tuple[Run, int]:
    heads = draw.choice((2, 3, 4, 6, 8))
    model = replace(
        draw.choice((SMALL, SMALL, SPARSE)), heads=heads, kv_heads=draw.choice((None, 1)), dim=16 * heads, layers=draw.choice((1, 2, 3, 5)),
        ffn=draw.choice((3, 5, 64)), vocab=draw.choice((5, 257)), mtp_depth=draw.choice((0, 0, 0, 1)),
    )  # fmt: skip
    if model.moe is not None:
        model = replace(
            model,
            moe=replace(
                model.moe, experts=draw.choice((2, 4, 6)), active=2, ffn=draw.choice((3, 64)), dense_layers=draw.choice((0, 1))
            ),
        )
    memory = Memory(
        compile=draw.random() < 0.1,
        activations=draw.choice(("device", "device", "cpu")),
        recompute_every=draw.choice((1, 1, 2)),
    )
    optimizer = Optimizer(name=draw.choice(("adamw", "adamw", "muon")), sync_every=draw.choice((1, 1, 1, 4)))
    run = run_of(model, draw.choice((4, 6, 8, 12)), draw.choice((8, 12, 16, 18)), memory=memory, optimizer=optimizer)
    return run, draw.choice((1, 2, 4, 6, 8))


def drawn_layout(draw: random.Random, gpus: int, model: ModelSpec) -> Layout:
    """Degrees whose product is right; the rest at random, legal or not."""
    degrees = dict.fromkeys(("pipeline", "data", "shard", "context", "tensor"), 1)
    rest = gpus
    while rest > 1:
        prime = next(n for n in (2, 3, 5, 7, 11) if rest % n == 0)
        degrees[draw.choice(list(degrees))] *= prime
        rest //= prime
    schedule = draw.choice(get_args(Schedule)) if degrees["pipeline"] > 1 and draw.random() < 0.7 else "1f1b"
    usual = 1 if schedule in ("gpipe", "1f1b") else 2
    stages = draw.choice((None, 1, 2, 3)) if degrees["pipeline"] > 1 else None
    return Layout(
        **degrees,
        zero=draw.choice((1, 2, 3)) if degrees["shard"] > 1 or draw.random() < 0.05 else 3,
        sequence=draw.random() < (0.5 if degrees["tensor"] > 1 else 0.05),
        context_method=draw.choice(METHODS) if degrees["context"] > 1 else "ring",
        schedule=schedule,
        stages=None if stages == usual else stages,
        expert=draw.choice((1, 1, 2, 3, 4)) if model.moe else 1,
        expert_tensor=draw.choice((1, 1, 1, 2)) if model.moe else 1,
    )


def test_no_legal_layout_is_missed_and_no_illegal_one_listed() -> None:
    draw = random.Random(8)
    seen = {True: 0, False: 0}
    for _ in range(60):
        run, gpus = drawn_run(draw)
        known = listed(run, gpus)
        for _ in range(40):
            layout = drawn_layout(draw, gpus, run.model)
            micro, mode, place = draw.choice((1, 1, 2, 3)), draw.choice(RECOMPUTE), draw.choice(OFFLOAD)
            asked = replace(run, layout=layout, memory=replace(run.memory, recompute=mode, offload=place))  # type: ignore[arg-type]
            expected = legal(asked, gpus, micro)
            seen[expected] += 1
            assert ((layout, micro, mode, place) in known) == expected, (asked.model, layout, micro, mode, place)
        for layout, micro, mode, place in draw.sample(sorted(known, key=repr), min(10, len(known))):
            asked = replace(run, layout=layout, memory=replace(run.memory, recompute=mode, offload=place))  # type: ignore[arg-type]
            assert legal(asked, gpus, micro), (asked.model, layout, micro, mode, place)
    assert min(seen.values()) > 300, seen


def test_space_counts_all_candidates() -> None:
    for model in (SMALL, SPARSE):
        found = space(run_of(model, 16, 64), cluster(8))
        bases = found.joined(found.degrees(), "micro_batches")
        assert found.count(bases) == len(all_columns(found)["pipeline"]) == found.jobs(all_columns(found)).size()


@pytest.mark.parametrize(
    "given",
    [
        Layout(tensor=4),
        Layout(pipeline=2, schedule="zbv"),
        Layout(shard=2, zero=1),
        Layout(data=2),
        Layout(tensor=2, sequence=True),
    ],
)
def test_layout_keys_of_the_run_file_are_fixed(given: Layout) -> None:
    run = run_of(SMALL, 16, 64, layout=given)
    layouts = [layout for layout, *_ in listed(run, 8)]
    assert layouts
    for name in ("pipeline", "data", "shard", "tensor", "zero", "sequence", "schedule"):
        value = getattr(given, name)
        if value != getattr(Layout(), name):
            assert {getattr(layout, name) for layout in layouts} == {value}


def test_given_micro_batch_and_savings_are_fixed() -> None:
    run = run_of(SMALL, 16, 64, memory=Memory(recompute="full", offload="cpu"))
    run = replace(run, train=replace(run.train, micro_batch=2))
    assert {(micro, mode, place) for _, micro, mode, place in listed(run, 8)} == {(2, "full", "cpu")}


def test_given_space_fills_in_replicas() -> None:
    run = run_of(SMALL, 24, 64, layout=Layout(tensor=2))
    found = given_space(run, cluster(16))
    assert found.run.layout == Layout(tensor=2, data=8)
    assert {layout_of(run, found.jobs(all_columns(found)), row) for row in range(5)} == {Layout(tensor=2, data=8)}
