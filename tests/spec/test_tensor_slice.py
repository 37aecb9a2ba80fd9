"""Slices of tensors against torch's own indexing: cut, put together again, exchanged between layouts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from phalanx.spec.tensor_slice import Box, TensorSlice, chunk


def local(whole: Tensor, part: TensorSlice) -> Tensor:
    out = whole.new_full(part.shape, -1)
    for theirs, mine in part.regions():
        out[mine.index] = whole[theirs.index]
    return out


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
        assert torch.equal(local(whole, part), whole.chunk(2, 0)[row].chunk(3, 1)[column])
        seen[part.boxes[0].index] += 1
    assert (seen == 1).all()


def test_a_fused_matrix_gives_each_rank_a_chunk_of_every_segment() -> None:
    q, k, v = torch.randn(8, 3), torch.randn(4, 3), torch.randn(4, 3)
    fused = torch.cat([q, k, v])
    for rank in range(2):
        part = TensorSlice.full(fused.shape).cut_segments(0, (8, 4, 4), rank, 2)
        assert part.shape == (8, 3) and len(part.boxes) == 3
        assert torch.equal(local(fused, part), torch.cat([x.chunk(2)[rank] for x in (q, k, v)]))


def test_chunks_of_a_fused_slice_follow_the_local_rows() -> None:
    fused = torch.arange(16 * 2).view(16, 2)
    part = TensorSlice.full(fused.shape).cut_segments(0, (8, 4, 4), 1, 2)
    mine = local(fused, part)
    for shard in range(3):
        assert torch.equal(local(fused, part.cut(0, shard, 3)), mine.chunk(3)[shard])
    assert torch.equal(local(fused, part.cut(1, 1, 2)), mine.chunk(2, 1)[1])


def test_overlaps_move_every_value_from_one_layout_to_another() -> None:
    whole = torch.arange(16 * 6).view(16, 6)
    full = TensorSlice.full(whole.shape)
    sources = [full.cut_segments(0, (8, 4, 4), rank, 2) for rank in range(2)]
    for target in [full.cut(0, shard, 3).cut(1, column, 2) for shard, column in product(range(3), range(2))]:
        out = whole.new_full(target.shape, -1)
        for source in sources:
            for mine, theirs in target.overlaps(source):
                out[mine.index] = local(whole, source)[theirs.index]
        assert torch.equal(out, local(whole, target))


def test_scalars_and_empty_parts() -> None:
    scalar = TensorSlice.full(())
    assert scalar.numel == 1 and list(scalar.overlaps(scalar)) == [(Box((), ()), Box((), ()))]
    nothing = TensorSlice.full((2, 3)).cut(0, 3, 4)
    assert nothing.empty and nothing.shape == (0, 3) and not list(nothing.overlaps(TensorSlice.full((2, 3))))
