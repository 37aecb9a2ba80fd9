"""Loading: any box out of any boxes, and only what it needs is read."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import saved
from ranks import ALONE, run_ranks
from torch import Tensor

from phalanx.checkpointing import format, restore
from phalanx.checkpointing.location import Local
from phalanx.checkpointing.restore import load
from phalanx.checkpointing.state_tensor import ReplicaGroup, StateTensor
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunFailed
from phalanx.spec.tensor_slice import TensorSlice

WHOLE = torch.arange(48 * 40, dtype=torch.float32).view(48, 40)
CUBE = torch.arange(6 * 8 * 10, dtype=torch.int64).view(6, 8, 10)


def save_boxes(mesh: Mesh, folder: Path) -> None:
    """Four ranks: a matrix cut into tiles, a cube cut along its middle and held twice, a number held by all."""
    row, column = divmod(mesh.rank, 2)
    tile = WHOLE[row * 24 :, column * 20 :][:24, :20].clone()
    slab = CUBE[:, column * 4 : column * 4 + 4].clone()
    saved(
        folder,
        1,
        {
            "matrix": StateTensor(
                tile, TensorSlice.of((48, 40), (row * 24, column * 20), (24, 20)), ReplicaGroup(("row", "column"), 0, 1)
            ),
            "cube": StateTensor(
                slab, TensorSlice.of((6, 8, 10), (0, column * 4, 0), (6, 4, 10)), ReplicaGroup(("column",), row, 2)
            ),
            "number": StateTensor.full(torch.tensor(7.0), ReplicaGroup((), mesh.rank, 4)),
        },
        {},
        mesh,
    )


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("boxes")
    run_ranks(save_boxes, 4, folder)
    return folder / "step-00000001"


@pytest.mark.parametrize("seed", range(20))
def test_load_assembles_any_box_from_saved_boxes(seed: int, boxes: Path) -> None:
    dice = random.Random(seed)

    def box(whole: Tensor) -> tuple[StateTensor, Tensor]:
        offset = tuple(dice.randrange(size) for size in whole.shape)
        shape = tuple(dice.randrange(1, size - first + 1) for first, size in zip(offset, whole.shape, strict=True))
        expected = whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
        return StateTensor(torch.full_like(expected, -1), TensorSlice.of(whole.shape, offset, shape)), expected

    wanted = {"matrix": box(WHOLE), "cube": box(CUBE), "number": box(torch.tensor(7.0))}
    load(boxes, {name: piece for name, (piece, _) in wanted.items()})
    for piece, expected in wanted.values():
        assert isinstance(piece.tensor, Tensor) and torch.equal(piece.tensor, expected)


def test_load_fills_other_number_formats_and_strides_in_place(boxes: Path) -> None:
    turned, halves = torch.zeros(40, 48, dtype=torch.float64).T, torch.zeros(48, 40, dtype=torch.bfloat16)
    load(boxes, {"matrix": turned})
    assert torch.equal(turned, WHOLE.double()) and not turned.is_contiguous()
    load(boxes, {"matrix": halves})
    assert torch.equal(halves, WHOLE.bfloat16())


def test_load_names_missing_and_mismatched_tensors(boxes: Path) -> None:
    with pytest.raises(RunFailed, match=r"has no tensor other: it was saved by a run with other settings"):
        load(boxes, {"other": torch.zeros(3)})
    with pytest.raises(RunFailed, match=r"has matrix of shape \[48, 40\], but this run has \[40, 48\]"):
        load(boxes, {"matrix": torch.zeros(40, 48)})


def test_load_reads_only_needed_blocks(tmp_path: Path, monkeypatch: Any) -> None:
    block = 8192
    for module in (format, restore):
        monkeypatch.setattr(module, "BLOCK", block)
    rows = torch.randn(4096, 64)
    path = saved(tmp_path, 1, {"rows": rows, "others": torch.randn(4096, 64)}, {}, ALONE)
    counted = []

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def count(file: Local, *args: Any) -> Any:
            found = method(file, *args)
            if file.name.endswith(".safetensors"):
                counted.append(len(found))
            return found

        return count

    monkeypatch.setattr(Local, "read", counting(Local.read))
    monkeypatch.setattr(Local, "read_block", counting(Local.read_block))
    quarter = StateTensor(torch.zeros(1024, 64), TensorSlice.of((4096, 64), (1024, 0), (1024, 64)))
    load(path, {"rows": quarter})
    assert isinstance(quarter.tensor, Tensor) and torch.equal(quarter.tensor, rows[1024:2048])
    # The header's page; a block at either end of the quarter; and one that was on its way when no more was wanted.
    assert quarter.tensor.nbytes <= sum(counted) <= quarter.tensor.nbytes + 4 * block
