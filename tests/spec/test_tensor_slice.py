"""Slices of tensors against torch's own indexing: cut, put together again, exchanged between layouts."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from phalanx.spec.tensor_slice import Box, TensorSlice, chunk


@pytest.mark.parametrize("length, count", [*product((0, 1, 5, 8), (1, 2, 3, 4))])
def test_chunk_cuts_as_torch_chunk_does(length: int, count: int) -> None:
    rows = torch.arange(length)
    parts = [rows[first : first + size] for first, size in (chunk(length, index, count) for index in range(count))]
    expected = [*rows.chunk(count), *[rows[:0]] * count][:count]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts, expected, strict=True))


def test_cuts_along_two_dimensions_tile_the_tensor() -> None:
    whole = torch.arange(5 * 6).view(5, 6)
    seen = torch.zeros_like(whole)
    for row, column in product(range(2), range(3)):
        part = TensorSlice.full(whole.shape).cut(0, row, 2).cut(1, column, 3)
        assert torch.equal(whole[part.index], whole.chunk(2, 0)[row].chunk(3, 1)[column])
        seen[part.index] += 1
    assert (seen == 1).all()


def test_overlaps_move_every_value_from_one_layout_to_another() -> None:
    whole = torch.arange(16 * 6).view(16, 6)
    full = TensorSlice.full(whole.shape)
    sources = [full.cut(0, rank, 5) for rank in range(5)]
    for target in [full.cut(0, shard, 3).cut(1, column, 2) for shard, column in product(range(3), range(2))]:
        out = whole.new_full(target.shape, -1)
        for source in sources:
            if (common := target.overlap(source)) is not None:
                out[target.local(common).index] = whole[source.index][source.local(common).index]
        assert torch.equal(out, whole[target.index])


def test_scalars_and_empty_parts() -> None:
    scalar = TensorSlice.full(())
    assert scalar.numel == 1 and scalar.overlap(scalar) == scalar.local(scalar) == Box((), ())
    nothing = TensorSlice.full((2, 3)).cut(0, 3, 4)
    assert nothing.numel == 0 and nothing.shape == (0, 3) and nothing.overlap(TensorSlice.full((2, 3))) is None
