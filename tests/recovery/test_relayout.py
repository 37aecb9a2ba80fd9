"""The layout for the ranks that are left, held against every layout there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from phalanx.recovery.relayout import Legal, relayout
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec, Moe

LegalFor = Callable[..., Legal]
EXPERTS = ModelSpec(dim=32, layers=4, heads=4, kv_heads=2, ffn=64, vocab=257, moe=Moe(experts=8, active=2, ffn=16))
CUBE = Layout(pipeline=2, data=2, tensor=2)


def degrees(layout: Layout | None) -> tuple[int | None, ...]:
    """Pipeline, data, shard, context, tensor."""
    assert layout is not None
    return layout.pipeline, layout.data, layout.shard, layout.context, layout.tensor


def test_relayout_returns_the_wanted_layout_if_all_ranks_are_there(legal_for: LegalFor) -> None:
    assert relayout(CUBE, 8, legal_for(12)) == relayout(CUBE, 100, legal_for(12)) == CUBE


@pytest.mark.parametrize(
    ("ranks", "expected"), [(15, (2, 3, 1, 1, 2)), (12, (2, 3, 1, 1, 2)), (11, (2, 2, 1, 1, 2)), (5, (2, 1, 1, 1, 2))]
)
def test_data_degree_shrinks_first(legal_for: LegalFor, ranks: int, expected: tuple[int, ...]) -> None:
    assert degrees(relayout(Layout(pipeline=2, data=4, tensor=2), ranks, legal_for(24))) == expected


def test_a_shorter_pipeline_where_more_ranks_work_then(legal_for: LegalFor) -> None:
    """8 → 6 → 4 ranks, tensor groups untouched."""
    assert degrees(relayout(CUBE, 6, legal_for(12))) == (1, 3, 1, 1, 2)
    assert degrees(relayout(CUBE, 4, legal_for(12))) == (2, 1, 1, 1, 2)


def test_replicas_must_divide_the_batch(legal_for: LegalFor) -> None:
    assert degrees(relayout(CUBE, 7, legal_for(8))) == (2, 1, 1, 1, 2)  # 8 sequences are not for 3 replicas


@pytest.mark.parametrize(
    ("wanted", "ranks", "expected"),
    [
        (Layout(data=1, shard=8), 7, (1, 1, 6, 1, 1)),
        (Layout(data=2, shard=4), 7, (1, 2, 3, 1, 1)),
        (Layout(data=2, shard=4), 5, (1, 1, 4, 1, 1)),
        (Layout(data=2, context=2, tensor=2), 7, (1, 3, 1, 1, 2)),
        (Layout(data=1, context=2, tensor=4), 7, (1, 3, 1, 2, 1)),  # one change rather than two
        (Layout(data=1, pipeline=4), 3, (3, 1, 1, 1, 1)),
        (Layout(data=1, tensor=4), 3, (1, 3, 1, 1, 1)),
    ],
)
def test_other_degrees_shrink_if_data_cannot(
    legal_for: LegalFor, wanted: Layout, ranks: int, expected: tuple[int, ...]
) -> None:
    assert degrees(relayout(wanted, ranks, legal_for(12))) == expected


def test_settings_go_with_the_degree_that_they_belong_to(legal_for: LegalFor) -> None:
    wanted = Layout(
        pipeline=2,
        data=1,
        shard=2,
        tensor=2,
        zero=2,
        sequence=True,
        schedule="interleaved-1f1b",
        stages=2,
        stage_split="measured",
    )
    legal = legal_for(8)
    assert relayout(wanted, 5, legal) == replace(wanted, shard=1, zero=3)
    assert relayout(wanted, 5, lambda layout: layout.shard == 2 and legal(layout)) == Layout(
        data=1, shard=2, tensor=2, zero=2, sequence=True, stage_split="measured"
    )
    assert relayout(wanted, 1, legal) == Layout(
        data=1, stage_split="measured"
    )  # the checks refuse zero = 2, sequence and a schedule here


def test_a_schedule_file_is_for_its_own_number_of_ranks(tmp_path: Path) -> None:
    own = str(tmp_path / "own.csv")
    smaller = relayout(Layout(pipeline=4, data=1, schedule_file=own), 3, lambda layout: True)
    assert smaller == Layout(pipeline=3, data=1)
    assert relayout(Layout(pipeline=4, data=2, schedule_file=own), 4, lambda layout: True) == Layout(
        pipeline=4, data=1, schedule_file=own
    )


def test_experts_are_shared_among_the_ranks_of_a_stage(legal_for: LegalFor) -> None:
    wanted = Layout(data=4, tensor=2, expert=4)
    found = [relayout(wanted, ranks, legal_for(12, EXPERTS)) for ranks in (8, 7, 4, 3)]
    assert [(layout.ranks, layout.expert) for layout in found if layout] == [(8, 4), (6, 2), (4, 4), (3, 1)]


def test_diverging_replicas_keep_their_data_degree(legal_for: LegalFor) -> None:
    """Where replicas differ, whoever says what is legal refuses another number of them: other degrees give way."""
    legal = legal_for(8, sync_every=4)
    assert degrees(relayout(Layout(data=2, tensor=4), 7, lambda layout: layout.data == 2 and legal(layout))) == (1, 2, 1, 1, 2)


def test_relayout_returns_none_if_nothing_is_legal(legal_for: LegalFor) -> None:
    assert relayout(CUBE, 0, legal_for(12)) is None
    assert relayout(CUBE, 7, lambda layout: layout.ranks == 8) is None


@pytest.mark.parametrize("batch", [8, 12, 30])
@pytest.mark.parametrize(
    "wanted",
    [
        CUBE,
        Layout(data=2, shard=3, tensor=2),
        Layout(pipeline=4, data=1, context=2),
        Layout(pipeline=2, data=3, tensor=2, expert=3),
    ],
    ids=str,
)
def test_no_layout_uses_more_ranks(legal_for: LegalFor, wanted: Layout, batch: int) -> None:
    legal = legal_for(
        batch, EXPERTS if wanted.expert > 1 else ModelSpec(dim=32, layers=4, heads=4, kv_heads=2, ffn=64, vocab=257)
    )
    numbers = range(1, wanted.ranks + 1)
    for ranks in numbers:
        most = max(
            pipeline * data * shard * context * tensor
            for pipeline, data, shard, context, tensor in product(
                range(1, wanted.pipeline + 1), numbers, numbers, range(1, wanted.context + 1), range(1, wanted.tensor + 1)
            )
            if pipeline * data * shard * context * tensor <= ranks
            and legal(Layout(pipeline=pipeline, data=data, shard=shard, context=context, tensor=tensor))
        )
        found = relayout(wanted, ranks, legal)
        assert found is not None and legal(found) and found.ranks == most


@pytest.mark.parametrize(
    "wanted",
    [CUBE, Layout(data=2, shard=6), Layout(pipeline=3, data=2, shard=2, tensor=2), Layout(data=4, tensor=2, expert=4)],
    ids=str,
)
def test_knowing_the_batch_changes_no_answer(legal_for: LegalFor, wanted: Layout) -> None:
    legal = legal_for(24, EXPERTS if wanted.expert > 1 else ModelSpec(dim=32, layers=6, heads=4, kv_heads=2, ffn=64, vocab=257))
    for ranks in range(wanted.ranks + 2):
        assert relayout(wanted, ranks, legal, batch=24) == relayout(wanted, ranks, legal)


def test_a_wide_shard_of_many_ranks_is_found_at_once() -> None:
    """All numbers of ranks from 16,383 down to the half are passed over without a question."""
    asked: list[Layout] = []

    def legal(layout: Layout) -> bool:
        asked.append(layout)
        return True

    found = relayout(Layout(data=1, shard=16384), 16376, legal, batch=16384)
    assert found is not None and found.ranks == 8192 and len(asked) == 1
