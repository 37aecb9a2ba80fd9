"""From any layout to any other: what is restored is what was saved, bit for bit, and the run goes on as the first would have.

The layouts are drawn, for models of every kind: dense and with experts, tied and untied; a few pairs that differ in everything are
proven at each run of the tests, all of them in the slow suite.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents
from ranks import differing, run_ranks, tiny_run, tiny_trainer

from phalanx.events.records import Step
from phalanx.parallel.mesh import Mesh
from phalanx.spec.check import check
from phalanx.spec.layout import Layout
from phalanx.spec.run import Memory, Run
from phalanx.verification.cases import MODELS, generate_layouts

BASE = tiny_run(
    "optimizer.eps=1e-4",  # at 1e-8, Adam makes visible differences of gradients that differ in their last bits
    "optimizer.learning_rate=1e-3",
    "optimizer.warmup_steps=0",
    "precision.compute=fp32",
)
BEFORE, AFTER = 3, 5
"""Steps before the save and after it."""
EACH = 9
"""Layouts for each kind of model."""
OFFLOADS = (Memory(offload="none"), Memory(offload="cpu"), Memory(), Memory(offload="nvme", offload_buffer=1))


@cache
def drawn() -> dict[str, list[Run]]:
    """For each kind of model, layouts of 1 to 8 ranks in an order that nobody chose, with states here, on the host and in files."""
    found: dict[str, list[Run]] = {kind: [] for kind in MODELS}
    for ranks, most in ((1, 1), (2, 2), (3, 1), (4, 2), (6, 1), (8, 2)):
        few: dict[str, int] = dict.fromkeys(MODELS, 0)
        for run in generate_layouts(BASE, ranks, count=15, seed=1):
            kind = next(kind for kind, model in MODELS.items() if model == run.model)
            # One sequence in each micro-batch: how many are taken together decides what the balance of experts is measured on.
            run = replace(run, train=replace(run.train, micro_batch=1, steps=BEFORE + AFTER))
            if few[kind] < most and not check(run):
                few[kind] += 1
                found[kind].append(run)
    for kind, runs in found.items():
        random.Random(kind).shuffle(runs)
        found[kind] = [
            replace(run, memory=replace(run.memory, offload=one.offload, offload_buffer=one.offload_buffer))
            for run, one in zip(runs, OFFLOADS * len(runs), strict=False)
        ]
    return found


def begin(mesh: Mesh, run: Run, folder: Path) -> list[Any]:
    """Some steps, a save, and on without a break; what the steps after the save said."""
    trainer = tiny_trainer(mesh, run, folder / "checkpoints")
    for _ in range(BEFORE):
        trainer.step()
    trainer.save()
    taken = [trainer.step() for _ in range(AFTER)]
    trainer.close()
    return taken


def go_on(mesh: Mesh, run: Run, folder: Path, other: Path) -> list[Any]:
    """The same steps on another layout; what was restored is saved again first."""
    trainer = tiny_trainer(mesh, run, other / "checkpoints")
    assert [event.kind for event in trainer.restore(folder / "checkpoints" / f"step-{BEFORE:08d}")] == ["restored"]
    trainer.save()
    taken = [trainer.step() for _ in range(AFTER)]
    trainer.close()
    return taken


def prove(one: Run, other: Run, folder: Path) -> None:
    first = run_ranks(begin, one.layout.ranks, one, folder / "one", layout=one.layout, timeout=300)[0]
    second = run_ranks(go_on, other.layout.ranks, other, folder / "one", folder / "other", layout=other.layout, timeout=300)[0]
    path = Path("checkpoints") / f"step-{BEFORE:08d}"
    saved, again = contents(folder / "one" / path), contents(folder / "other" / path)
    assert differing(saved, again) == []
    assert {name.split("/")[0] for name in saved} == {"model", "optimizer"}
    assert all(isinstance(step, Step) for step in (*first, *second))
    for unbroken, resumed in zip(first, second, strict=True):
        assert (resumed.step, resumed.samples, resumed.batch_digest) == (unbroken.step, unbroken.samples, unbroken.batch_digest)
        assert resumed.loss == pytest.approx(unbroken.loss, rel=1e-5, abs=0)


def of(model: str, memory: Memory | None = None, **degrees: Any) -> Run:
    train = replace(BASE.train, micro_batch=1, steps=BEFORE + AFTER, sequence_length=24)
    return replace(BASE, model=MODELS[model], layout=Layout(**{"data": 1} | degrees), train=train, memory=memory or Memory())


QUICK = {
    "tied, from a pipeline to shards in files": (
        of("gpt", pipeline=2, schedule="zbv"),
        of("gpt", Memory(offload="nvme", offload_buffer=1), shard=2),
    ),
    "experts, from one rank to tensor ranks": (of("moe"), of("moe", tensor=2, sequence=True, expert=2)),
    "from shards on the host to replicas of a pipeline": (
        of("dense", Memory(offload="cpu"), shard=2, zero=1),
        of("dense", data=2, pipeline=2),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("experts") else name for name in QUICK]
)
def test_some_pairs_of_layouts_restore_each_others_checkpoints(name: str, tmp_path: Path) -> None:
    prove(*QUICK[name], tmp_path)


@pytest.mark.slow
def test_drawn_layout_pairs_cover_every_axis() -> None:
    assert all(len(runs) == EACH and len({run.layout for run in runs}) == EACH for runs in drawn().values())
    assert EACH * len(MODELS) >= 30
    runs = [run for found in drawn().values() for run in found]
    assert {run.layout.ranks for run in runs} == {1, 2, 3, 4, 6, 8}
    assert {run.layout.zero for run in runs if run.layout.shard > 1} == {1, 2, 3}
    assert {run.memory.offload for run in runs} == {"auto", "none", "cpu", "nvme"}
    assert {(run.model.tied, run.model.moe is not None) for run in runs} == {(True, False), (False, False), (False, True)}
    assert any(run.layout.expert > 1 for run in runs) and any(run.layout.expert_tensor > 1 for run in runs)
    assert len({run.layout.schedule for run in runs if run.layout.pipeline > 1}) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("place", range(EACH))
@pytest.mark.parametrize("kind", MODELS)
def test_every_pair_of_layouts_restores_each_others_checkpoints(kind: str, place: int, tmp_path: Path) -> None:
    """From each layout to the next, and from the last to the first."""
    runs = drawn()[kind]
    one, other = runs[place], runs[(place + 1) % EACH]
    print(f"from {one.layout} with {one.memory}\nto {other.layout} with {other.memory}")  # shown where it fails
    prove(one, other, tmp_path)
