from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoints import saved
from ranks import ALONE, run_ranks
from torch import Tensor

from phalanx.checkpointing.restore import CheckpointReader, Difference, compare, compare_metadata
from phalanx.checkpointing.state_tensor import ReplicaGroup, StateTensor
from phalanx.parallel.mesh import Mesh
from phalanx.spec.tensor_slice import TensorSlice

STATE = {
    "model/w": torch.randn(7, 6, generator=torch.Generator().manual_seed(0)),
    "model/b": torch.tensor([math.nan, -0.0, math.inf, 1.0]),
    "optimizer/w/step": torch.tensor(3.0),
}


def differences(a: Path, b: Path) -> dict[str, Difference]:
    return {found.name: found for found in compare(CheckpointReader(a), CheckpointReader(b)) if isinstance(found, Difference)}


def save(path: Path, state: dict[str, Tensor], **contents: object) -> Path:
    return saved(path, 3, state, {"progress": {"samples": 24}, "seed": 0} | contents, ALONE)


def cut(mesh: Mesh, path: Path) -> None:
    """Columns of one tensor to each rank, and the others shared."""
    pieces = {name: StateTensor.full(tensor, ReplicaGroup((), mesh.rank, mesh.ranks)) for name, tensor in STATE.items()}
    columns = STATE["model/w"][:, 2 * mesh.rank : 2 * mesh.rank + 2].clone()
    pieces["model/w"] = StateTensor(columns, TensorSlice.of((7, 6), (0, 2 * mesh.rank), (7, 2)))
    saved(path, 3, pieces, {"progress": {"samples": 24}, "seed": 0, "layout": {"tensor": 3}}, mesh)


def test_checkpoints_of_different_layouts_compare_equal(tmp_path: Path) -> None:
    one = save(tmp_path / "one", STATE)
    run_ranks(cut, 3, tmp_path / "three")
    a, b = CheckpointReader(one), CheckpointReader(tmp_path / "three" / "step-00000003")
    assert list(compare(a, b)) == sorted(STATE)  # a NaN is the same as itself
    assert compare_metadata(a, b) == {}  # a layout is not part of the state


def test_each_kind_of_difference_is_reported(tmp_path: Path) -> None:
    other = {name: tensor.clone() for name, tensor in STATE.items()}
    other["model/w"][6, 5] += 0.5
    other["model/w"][0, 0] *= 1.25
    other["model/b"][1] = 0.0
    other["optimizer/w/step"] += 1
    a = save(tmp_path / "a", STATE | {"model/old": torch.ones(2), "model/shape": torch.ones(2, 3), "model/f": torch.ones(2)})
    b = save(
        tmp_path / "b", other | {"model/new": torch.ones(2), "model/shape": torch.ones(3, 2), "model/f": torch.ones(2).half()}
    )
    found = differences(a, b)
    assert {name: one.kind for name, one in found.items()} == {
        "model/w": "values", "model/b": "values", "optimizer/w/step": "values", "model/old": "only in A", "model/new": "only in B",
        "model/shape": "shape", "model/f": "format",
    }  # fmt: skip
    w = found["model/w"]
    apart = (other["model/w"].double() - STATE["model/w"].double()).abs()
    ratio = apart / torch.maximum(other["model/w"].double().abs(), STATE["model/w"].double().abs())
    assert (w.unequal, w.values) == (2, 42)
    assert (w.largest, w.relative) == (apart.max().item(), ratio.max().item())
    b_ = found["model/b"]
    assert (b_.unequal, b_.largest, b_.relative) == (1, 0.0, 0.0)  # a sign of zero: a bit, but no distance
    assert (found["optimizer/w/step"].largest, found["optimizer/w/step"].relative) == (1.0, 0.25)
    assert (found["model/shape"].a, found["model/shape"].b) == ("[2, 3]", "[3, 2]")
    assert (found["model/f"].a, found["model/f"].b, found["model/f"].unequal) == ("float32", "float16", 0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_against_a_number_is_an_infinite_difference(value: float, tmp_path: Path) -> None:
    other = STATE["model/w"].clone()
    other[2, 3] = value
    a, b = save(tmp_path / "a", STATE), save(tmp_path / "b", STATE | {"model/w": other})
    found = differences(a, b)["model/w"]
    assert (found.unequal, found.largest, found.relative) == (1, math.inf, math.inf)


def test_integers_and_metadata_are_compared(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"model/n": torch.tensor([1, 2, 3])}, data="x")
    b = save(tmp_path / "b", {"model/n": torch.tensor([1, 2, 7])}, data="y", version="2")
    assert differences(a, b)["model/n"].largest == 4.0
    assert compare_metadata(CheckpointReader(a), CheckpointReader(b)) == {"data": ("x", "y")}
