from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.events.records import Corrupted, Event, Step
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunFailed
from phalanx.spec.layout import Layout
from phalanx.training.hooks import replica_check
from phalanx.training.hooks.replica_check import Checksum, Corruption, ReplicaCheck, Row, confirm, describe, judge
from phalanx.training.trainer import Trainer

W = ("weights", ("tensor",))
S = ("optimizer", ("tensor",))
G = ("gradients", ("tensor",))


def rows(*values: int, slot: Any = W) -> list[Row]:
    return [{W: 7, S: 7, G: 7} | {slot: value} for value in values]


def never(count: int) -> list[Row]:
    return [{} for _ in range(count)]


def test_of_three_replicas_the_one_that_differs_is_guilty() -> None:
    groups = {("tensor",): [(0, 1, 2), (3, 4, 5)]}
    assert judge(rows(1, 1, 1, 2, 2, 2), groups, never(6)) is None
    verdict = judge(rows(1, 1, 1, 2, 5, 2), groups, never(6))
    assert verdict is not None
    assert (verdict.what, verdict.guilty, verdict.suspects) == ("weights", (4,), ())
    assert describe(verdict, 40, ["head.weight"]) == (
        "Step 40 was not applied: the weights on ranks 3, 4 and 5 must be equal but differ (head.weight): rank 4 has the wrong ones."
    )


def test_of_two_replicas_the_one_that_changed_without_an_update_is_guilty() -> None:
    groups = {("tensor",): [(0, 1)]}
    verdict = judge(rows(1, 2), groups, [{}, {W: 33}])
    assert verdict is not None and verdict.guilty == (1,)
    assert "their bits changed without an update before step 33 was applied" in describe(verdict, 40, ["a", "b", "c", "d"])
    assert "(a, b, c and 1 more)" in describe(verdict, 40, ["a", "b", "c", "d"])
    unknown = judge(rows(1, 2), groups, never(2))
    assert unknown is not None and (unknown.guilty, unknown.suspects) == ((), (0, 1))
    assert describe(unknown, 40, ["a"]).endswith("two copies cannot show which of them is wrong.")
    # What has followed from it in tensors that nobody watched is no new suspicion.
    both = judge([{W: 1, S: 1}, {W: 2, S: 2}], groups, [{}, {W: 33}])
    assert both is not None and both.guilty == (1,) and not both.suspects


def test_of_two_gradients_the_one_that_a_repetition_refutes_is_guilty() -> None:
    groups = {("tensor",): [(0, 1)]}
    first = rows(1, 2, slot=G)
    verdict = judge(first, groups, never(2))
    assert verdict is not None and verdict.suspects == (0, 1)
    assert confirm(verdict, first, rows(1, 1, slot=G)).guilty == (1,)
    assert confirm(verdict, first, rows(2, 2, slot=G)).guilty == (0,)
    assert confirm(verdict, first, rows(1, 9, slot=G)).guilty == (1,)  # it computes something else each time
    assert confirm(verdict, first, rows(8, 8, slot=G)).suspects == (0, 1)
    assert confirm(verdict, first, rows(1, 2, slot=G)).suspects == (0, 1)


def test_a_checksum_changes_with_every_bit_and_every_position() -> None:
    dice = torch.Generator().manual_seed(0)
    for dtype, length in ((torch.float32, 5003), (torch.bfloat16, 5003), (torch.float32, 3), (torch.float64, 700)):
        whole = torch.randn(length + 1, generator=dice).to(dtype)
        one, odd = whole[:-1].clone(), torch.empty(length + 1, dtype=dtype)[1:]
        odd.copy_(one)
        expected = Checksum([one]).now().item()
        assert Checksum([odd]).now().item() == expected
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
        for place in range(0, length, 97):
            for bit in (0, dtype.itemsize * 8 - 1):
                flip = -(1 << bit) if bit == dtype.itemsize * 8 - 1 else 1 << bit
                one.view(bits)[place] ^= flip
                assert Checksum([one]).now().item() != expected
                one.view(bits)[place] ^= flip
        one[:2] = one[:2].flip(0)
        assert Checksum([one]).now().item() != expected
    live = [torch.ones(600), torch.zeros(())]
    checksum = Checksum(live)
    before = checksum.now().item()
    live[1] += 1
    assert checksum.now().item() != before


def flip(tensor: Tensor) -> None:
    """The lowest bit of one number."""
    tensor.detach().view(-1).view(torch.int32)[-1] ^= 1


def at(trainer: Trainer, step: int, strike: Callable[[], None]) -> None:
    """When the gradients of a step are complete."""
    accumulate = trainer.stepper.accumulate
    struck: list[int] = []

    def then(*args: Any) -> Any:
        totals = accumulate(*args)
        if trainer.stepper.number == step and not struck:
            struck.append(step)
            strike()
        return totals

    trainer.stepper.accumulate = then  # type: ignore[method-assign]


def struck(
    mesh: Mesh, directory: Path, what: str, rank: int, step: int, *overrides: str
) -> tuple[list[Event], Corruption | None]:
    """A run on which a bit flips on one rank; what was told, and how it ended."""
    trainer = tiny_trainer(mesh, tiny_run("train.steps=9", "resilience.check_every=4", *overrides), directory)
    if mesh.rank == rank:
        one = next(one for one in trainer.sharded.owned if one.name == "blocks.1.mlp.up.weight")
        targets = {
            "weights": lambda: one.value,
            "gradients": lambda: one.gradient,
            "optimizer": lambda: trainer.optimizer.state()["blocks.1.mlp.up.weight/exp_avg"],
        }
        at(trainer, step, lambda: flip(targets[what]()))  # type: ignore[arg-type, return-value]
    told: list[Event] = []
    before: dict[str, Tensor] = {}
    try:
        for event in trainer.events():
            told.append(event)
            if isinstance(event, Step):
                before = copied(trainer.tensors())
    except Corruption as error:
        assert (
            trainer.progress.step == error.step - 1
            and trainer.stepper.pending is None
            and not trainer.stepper.update_incomplete
        )
        changed = [] if what == "gradients" and step % 4 == 0 and mesh.rank == rank else differing(before, trainer.tensors())
        if step == error.step and mesh.rank == rank and what != "gradients":
            assert [name.partition("/")[2] for name in changed] in (
                ["blocks.1.mlp.up.weight"],
                ["blocks.1.mlp.up.weight/exp_avg"],
            )
        else:
            assert changed == []  # nothing of the step was applied
        return told, error
    return told, None


@pytest.mark.parametrize(
    ("what", "rank", "step", "found"),
    [("weights", 0, 2, 4), ("gradients", 2, 4, 4), ("optimizer", 1, 6, 8)],
)
def test_corruption_on_one_of_three_ranks_is_named_and_no_rank_applies_the_step(
    what: str, rank: int, step: int, found: int, tmp_path: Path
) -> None:
    overrides = ("train.batch=12",)
    results = run_ranks(struck, 3, tmp_path, what, rank, step, *overrides)
    for told, error in results:
        assert error is not None and isinstance(error, RunFailed)
        assert (error.step, error.verdict.guilty, error.verdict.suspects) == (found, (rank,), ())
        assert error.last_agreed == (found - 1 if what == "gradients" and step == found else 3 if found == 8 else 0)
        corrupted = [event for event in told if isinstance(event, Corrupted)]
        assert [(event.step, event.rank, event.what) for event in corrupted] == [(found, rank, error.verdict.what)]
        assert "blocks.1.mlp.up.weight" in corrupted[0].message and f"rank {rank} has the wrong ones" in corrupted[0].message
    if step == found:
        assert results[0][1].verdict.what == what


@pytest.mark.parametrize(
    ("what", "step", "layout", "overrides"),
    [
        pytest.param("weights", 4, Layout(data=2), (), marks=pytest.mark.slow),
        ("weights", 3, Layout(data=2), ()),  # between two comparisons, too
        ("optimizer", 4, Layout(data=2), ()),
        ("gradients", 4, Layout(data=2), ()),
        pytest.param("weights", 3, Layout(data=2, shard=2, zero=3), (), marks=pytest.mark.slow),
        pytest.param("gradients", 4, Layout(data=2, tensor=2), (), marks=pytest.mark.slow),
        pytest.param("weights", 4, Layout(data=1, context=2), (), marks=pytest.mark.slow),
        ("weights", 4, Layout(data=2, pipeline=2), ()),
        pytest.param(
            "optimizer", 4, Layout(data=1, shard=2, context=2, zero=1), ("train.sequence_length=16",), marks=pytest.mark.slow
        ),
    ],
)
def test_corruption_on_one_of_two_ranks_is_named(
    what: str, step: int, layout: Layout, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_check, "_MAX_SHARE", 1.0)  # however busy this machine is
    rank = layout.ranks - 1
    for _, error in run_ranks(struck, layout.ranks, tmp_path, what, rank, step, *overrides, layout=layout):
        assert error is not None and (error.verdict.what, error.verdict.guilty, error.step) == (what, (rank,), 4)


def test_corruption_that_cannot_be_attributed_makes_both_ranks_suspects(tmp_path: Path) -> None:
    """A wrong gradient that was applied shows later as other weights, which nobody has changed at rest."""
    for _, error in run_ranks(struck, 2, tmp_path, "gradients", 1, 2):
        assert error is not None
        assert (error.verdict.what, error.verdict.guilty, error.verdict.suspects, error.last_agreed) == (
            "weights",
            (),
            (0, 1),
            0,
        )
        assert [event.rank for event in error.events] == [None]
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.verdict.suspects, again.last_agreed) == (str(error), (0, 1), 0)


def undisturbed(mesh: Mesh, directory: Path, *overrides: str) -> int | None:
    trainer = tiny_trainer(mesh, tiny_run("train.steps=3", "resilience.check_every=1", *overrides), directory)
    for _ in trainer.events():
        pass
    (check,) = [hook for hook in trainer.hooks._hooks if isinstance(hook, ReplicaCheck)]
    return check.last_agreed


MOE = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=16", "model.moe.bias_rate=0.01")


@pytest.mark.parametrize(
    ("layout", "overrides", "compared"),
    [
        pytest.param(Layout(data=4), ("optimizer.name=muon", "precision.reduce=bf16"), True, marks=pytest.mark.slow),
        (Layout(data=2, expert=2), MOE, True),
        pytest.param(Layout(data=2, shard=2, zero=2), ("precision.compute=bf16",), True, marks=pytest.mark.slow),
        (Layout(data=2), ("optimizer.sync_every=2",), True),
        pytest.param(Layout(data=2), ("memory.offload=cpu",), True, marks=pytest.mark.slow),
        pytest.param(Layout(data=1, tensor=2), (), False, marks=pytest.mark.slow),
        (Layout(data=1, shard=2, zero=3), (), True),  # the optimizer's counts of steps, at least
    ],
)
def test_replicas_of_an_undisturbed_run_agree_in_every_step(
    layout: Layout, overrides: tuple[str, ...], compared: bool, tmp_path: Path
) -> None:
    found = run_ranks(undisturbed, layout.ranks, tmp_path, *overrides, layout=layout)
    assert found == [2 if compared else None] * layout.ranks


def test_check_every_0_never_compares_replicas(tmp_path: Path) -> None:
    assert run_ranks(struck, 2, tmp_path, "weights", 1, 4, "resilience.check_every=0")[0][1] is None
