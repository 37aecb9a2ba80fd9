from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import saved
from ranks import ALONE
from safetensors.torch import load_file

from phalanx.checkpointing import offline_writer
from phalanx.checkpointing.offline_writer import to_safetensors, to_torch
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.spec.errors import RunError

STATE = {
    "model/w": torch.randn(6, 5),
    "model/experts": torch.randn(3, 4, 5),
    "model/half": torch.randn(7).bfloat16(),
    "model/bias": torch.arange(3, dtype=torch.int64),
    "optimizer/w/exp_avg": torch.randn(6, 5),
    "optimizer/w/step": torch.tensor(3.0),
}
MODEL = {name.removeprefix("model/"): tensor for name, tensor in STATE.items() if name.startswith("model/")}
ALL = MODEL | {name: tensor for name, tensor in STATE.items() if name.startswith("optimizer/")}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointReader:
    monkeypatch.setattr("phalanx.checkpointing.restore.BLOCK", 40)  # two rows at a time
    return CheckpointReader(saved(tmp_path / "checkpoints", 1, STATE, {}, ALONE))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("optimizer", [False, True])
def test_plain_export_writes_whole_tensors_to_safetensors(
    optimizer: bool, checkpoint: CheckpointReader, tmp_path: Path
) -> None:
    expected = ALL if optimizer else MODEL
    one = to_safetensors(checkpoint, tmp_path / "one", optimizer=optimizer, dtype=None, shard_size=10**9)
    assert same(load_file(tmp_path / "one" / "model.safetensors"), expected)
    assert (one.files, one.tensors) == (1, len(expected))
    assert one.bytes == sum(tensor.nbytes for tensor in expected.values())
    many = to_safetensors(checkpoint, tmp_path / "many", optimizer=optimizer, dtype=None, shard_size=200)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert many.files == len(files) > 1
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: load_file(tmp_path / "many" / file)[name].shape for name, file in index.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_export_writes_a_file_for_torch_load(mmap: bool, checkpoint: CheckpointReader, tmp_path: Path) -> None:
    to_torch(checkpoint, tmp_path / "new" / "all.pt", optimizer=True, dtype=None)
    assert same(torch.load(tmp_path / "new" / "all.pt", weights_only=True, mmap=mmap), ALL)
    to_torch(checkpoint, tmp_path / "model.pt", optimizer=False, dtype=None)
    assert same(torch.load(tmp_path / "model.pt", weights_only=True), MODEL)
    assert not list(tmp_path.rglob("*.partial"))


def test_plain_export_converts_weights_but_not_states(checkpoint: CheckpointReader, tmp_path: Path) -> None:
    cast = {n: t.half() if t.is_floating_point() and "optimizer" not in n else t for n, t in ALL.items()}
    to_torch(checkpoint, tmp_path / "half.pt", optimizer=True, dtype=torch.float16)
    assert same(torch.load(tmp_path / "half.pt", weights_only=True), cast)
    told = to_safetensors(checkpoint, tmp_path / "half", optimizer=True, dtype=torch.float16, shard_size=10**9)
    assert same(load_file(tmp_path / "half" / "model.safetensors"), cast)
    assert told.formats == ("float16", "float32", "int64")


def test_plain_export_keeps_existing_files_and_removes_partial_ones(
    checkpoint: CheckpointReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(RunError, match="taken already exists"):
        to_torch(checkpoint, tmp_path / "taken", optimizer=False, dtype=None)
    with pytest.raises(RunError, match="taken already exists"):
        to_safetensors(checkpoint, tmp_path / "taken", optimizer=False, dtype=None, shard_size=1000)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(offline_writer, "raw_bytes", full)
    with pytest.raises(offline_writer.RunFailed, match=r"out.pt could not be written: No space left on device"):
        to_torch(checkpoint, tmp_path / "out.pt", optimizer=False, dtype=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "taken"]
