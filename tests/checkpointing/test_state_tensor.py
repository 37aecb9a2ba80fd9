"""Who writes what: whatever is laid end to end, every byte is written once, and everybody writes the same amount."""

from __future__ import annotations

import random

import pytest
import torch

from phalanx.checkpointing.state_tensor import ReplicaGroup, StateTensor, partition, written_boxes
from phalanx.spec.tensor_slice import TensorSlice


def line(dice: random.Random) -> list[tuple[int, int]]:
    """Pieces as (rows, bytes of a row): none, single numbers, vectors and matrices, some much larger than all others together."""
    kinds = [
        lambda: (1, dice.choice([1, 2, 4, 8])),
        lambda: (dice.randrange(1, 300), dice.choice([1, 2, 4])),
        lambda: (dice.randrange(1, 100), 4 * dice.randrange(1, 1000)),
        lambda: (dice.randrange(1, 4), 4 * dice.randrange(1, 100_000)),
        lambda: (dice.randrange(0, 2), 0),
    ]
    return [dice.choice(kinds)() for _ in range(dice.randrange(0, 30))]


@pytest.mark.parametrize("seed", range(40))
def test_partition_covers_every_row_once_and_evenly(seed: int) -> None:
    dice = random.Random(seed)
    rows, count = line(dice), dice.choice([1, 2, 3, 4, 7, 8, 64, 1000])
    shares = [partition(rows, ReplicaGroup(("a",), index, count)) for index in range(count)]
    for number, (length, size) in enumerate(rows):
        ranges = [share[number] for share in shares if share[number][0] < share[number][1]]
        covered = [row for first, last in ranges for row in range(first, last)]
        assert covered == (list(range(length)) if size else []), "in the order of ranks, none left out, none twice"
    largest = max((size for _, size in rows), default=0)
    total = sum(length * size for length, size in rows)
    for share in shares:
        mine = sum((last - first) * size for (first, last), (_, size) in zip(share, rows, strict=True))
        assert abs(mine - total / count) <= largest + 1  # a row at either end, of which one is another rank's; and rounding


def test_partition_skips_mirrored_tensors() -> None:
    assert partition([(5, 4), (1, 8)], ReplicaGroup((), 1, 0)) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("seed", range(10))
def test_partition_splits_every_replica_group_by_itself(seed: int) -> None:
    """Four ranks, 2 × 2: some tensors are held by all, some cut in two along either axis, some in four."""
    dice = random.Random(seed)
    kinds = [(), ("tensor",), ("shard",), ("shard", "tensor")]
    shapes = {f"t{n}": ((4 * dice.randrange(1, 20), *dice.choice([(), (3,), (2, 5)])), dice.choice(kinds)) for n in range(20)}
    found = {name: torch.zeros(shape, dtype=torch.int64) for name, (shape, _) in shapes.items()}
    sizes = []
    for rank in range(4):
        place = {"shard": rank // 2, "tensor": rank % 2}
        pieces = {}
        for name, (shape, split) in shapes.items():
            index, parts = 0, 2 ** len(split)
            for axis in split:
                index = 2 * index + place[axis]
            length = shape[0] // parts
            others = [axis for axis in place if axis not in split]
            among = sum(place[axis] << at for at, axis in enumerate(reversed(others)))
            box = torch.zeros(length, *shape[1:], dtype=torch.int64)
            offset = (index * length, *[0] * (len(shape) - 1))
            pieces[name] = StateTensor(
                box, TensorSlice.of(shape, offset, tuple(box.shape)), ReplicaGroup(split, among, 4 // parts)
            )
        parts_of_rank = written_boxes(pieces)
        assert len({part.name for part in parts_of_rank}) == len(parts_of_rank), "one range of rows of each tensor"
        for part in parts_of_rank:
            found[part.name][part.box.index] += 1
        sizes.append(sum(part.bytes for part in parts_of_rank))
    assert all((tensor == 1).all() for tensor in found.values())
    assert max(sizes) - min(sizes) <= 4 * 2 * 10 * 8  # a row at either end, in each of the four kinds
