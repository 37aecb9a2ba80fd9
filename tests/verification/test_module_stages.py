"""A plain module, divided into pipeline stages between its own layers, or by positions where it calls for attention, equals one device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import tiny_run

from phalanx.spec.errors import RunError
from phalanx.verification.parity import verify
from phalanx.verification.rank_pool import RankPool

PLAIN = (
    "model.module=plain_gpt:GPT", "model.dim=16", "model.layers=5", "model.heads=2", "model.context=64", "train.sequence_length=32",
)  # fmt: skip


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that counts the module's parameters finds it too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


@pytest.mark.parametrize(
    "settings",
    [
        ("layout.pipeline=2",),
        ("layout.pipeline=2", "model.options.tied=true", "layout.data=2"),
        ("layout.pipeline=2", "layout.shard=2", "layout.zero=3", "layout.schedule=interleaved-zero-bubble"),
        ("layout.pipeline=4", "memory.recompute=full", "layout.schedule=gpipe"),
        ("layout.pipeline=2", "layout.schedule=interleaved-1f1b", "layout.stages=2", "model.options.tied=true"),
        ("layout.context=2", "data.document_mask=false", "memory.recompute=full"),
        ("layout.context=2", "data.document_mask=false", "layout.pipeline=2", "layout.context_method=ulysses"),
    ],
    ids=["1f1b", "tied", "zero3", "recompute", "interleaved", "context", "context-pipeline"],
)
def test_a_plain_module_equals_one_device(settings: tuple[str, ...], pool: RankPool) -> None:
    report = verify(tiny_run(*PLAIN, *settings), steps=3, pool=pool)
    assert report.passed, f"{report.failure} {[check for check in report.checks if not check.passed]}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("layout.context=2",), ["layout.context = 2", "data.document_mask"]),
        (("layout.context=2", "data.document_mask=false", "model.options.masked=true"), ["a mask of its own"]),
        (
            ("layout.tensor=2", "layout.sequence=true", "data.document_mask=false"),
            ["layout.sequence = true", "scaled_dot_product_attention in inner.layers.0 needs all positions"],
        ),
    ],
)
def test_attention_that_ranks_cannot_share_is_refused(settings: tuple[str, ...], words: list[str], pool: RankPool) -> None:
    with pytest.raises(RunError) as refused:
        verify(tiny_run(*PLAIN, *settings), steps=1, pool=pool)
    assert [word for word in words if word not in str(refused.value)] == []
