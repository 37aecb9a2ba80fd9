"""Folders of safetensors: what the library writes is read, what is written the library reads, and damage is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from phalanx.checkpointing.hf_folder import WeightsFolder, WeightsWriter
from phalanx.spec.errors import RunError

TENSORS = {
    "vector": torch.arange(10.0),
    "matrix": torch.arange(12.0).view(3, 4).to(torch.bfloat16),
    "stack": torch.arange(24.0).view(2, 3, 4).to(torch.float16),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_weights_folder_reads_rows_of_library_files(folder: Path) -> None:
    files = WeightsFolder(folder)
    assert set(files.names) == set(TENSORS)
    assert files.rows("vector", 2, 5).tolist() == [[2.0], [3.0], [4.0]]
    assert torch.equal(files.rows("matrix", 1, 3), TENSORS["matrix"][1:3])
    assert torch.equal(files.rows("stack", 2, 5), TENSORS["stack"].view(6, 4)[2:5])
    assert files.dtype("matrix") is torch.bfloat16
    files.check(SHAPES, [], [])


def test_weights_writer_files_are_read_by_the_library(tmp_path: Path) -> None:
    writer = WeightsWriter(tmp_path, {name: (SHAPES[name], tensor.dtype) for name, tensor in TENSORS.items()}, 1 << 30)
    writer.write("stack", TENSORS["stack"].view(6, 4)[4:], 4)  # in any order, in parts
    writer.write("vector", TENSORS["vector"][:, None])
    writer.write("stack", TENSORS["stack"].view(6, 4)[:4])
    writer.write("matrix", TENSORS["matrix"][:, 1:3], 0, column=1)
    writer.write("matrix", TENSORS["matrix"][:, :1], 0, column=0)
    writer.write("matrix", TENSORS["matrix"][:, 3:], 0, column=3)
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) and found[name].dtype is tensor.dtype for name, tensor in TENSORS.items())
    assert (writer.files, writer.bytes) == (1, 40 + 24 + 48)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_weights_writer_shards_respect_the_size_limit(tmp_path: Path) -> None:
    tensors = {f"t{index}": ((10, 10), torch.float32) for index in range(7)}
    writer = WeightsWriter(tmp_path, tensors, 900)
    for name in tensors:
        writer.write(name, torch.full((10, 10), float(name[1])))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2800
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{shard}-of-00004.safetensors" for shard in range(1, 5)]
    files = WeightsFolder(tmp_path)
    assert all((files.rows(name, 0, 10) == float(name[1])).all() for name in tensors)
    for file in tmp_path.glob("*.safetensors"):
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 900


def test_a_tensor_larger_than_the_shard_size_has_its_own_shard(tmp_path: Path) -> None:
    writer = WeightsWriter(tmp_path, {"a": ((100,), torch.float32), "b": ((1,), torch.float32)}, 8)
    assert writer.files == 2


def _refusal(folder: Path, wanted: dict[str, tuple[int, ...]] | None = None) -> str:
    with pytest.raises(RunError) as refused:
        WeightsFolder(folder).check(SHAPES if wanted is None else wanted, [], [["matrix", "stack"]] if wanted is None else [])
    return "\n".join(refused.value.problems)


def test_weights_folder_names_all_mismatched_tensors(folder: Path) -> None:
    said = _refusal(folder, {"vector": (11,), "matrix": (3, 4), "missing": (1,)})
    assert "the tensor vector has shape [10]; config.json asks for [11]" in said
    assert "lacks the tensor missing, of shape [1]" in said
    assert "has the tensor stack" in said and str(folder / "model.safetensors") in said
    assert "matrix" not in said


def test_weights_folder_checks_number_formats(folder: Path) -> None:
    assert "matrix in BF16, stack in F16" in _refusal(folder)
    save_file({"a": torch.ones(3, dtype=torch.int64)}, folder / "model.safetensors")
    assert "the tensor a is in I64" in _refusal(folder, {"a": (3,)})


def test_weights_folder_limits_the_list_of_problems(folder: Path) -> None:
    said = _refusal(folder, SHAPES | {f"missing{index}": (1,) for index in range(25)})
    assert "… and 15 more like these." in said


@pytest.mark.parametrize("bytes_kept", [0, 5, 60, -1])
def test_a_truncated_safetensors_file_is_refused(folder: Path, bytes_kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:bytes_kept])
    said = _refusal(folder)
    assert str(file) in said and "cut short" in said


@pytest.mark.parametrize(
    "header",
    [
        b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', b"\xff\xfe{}",
    ],
)  # fmt: skip
def test_a_malformed_safetensors_header_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    said = _refusal(tmp_path)
    assert "does not have a safetensors header" in said


def test_an_inconsistent_safetensors_header_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    assert "the tensor a of shape [3] in F32 needs 12 bytes, but the header gives it 8" in _refusal(tmp_path)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"a": [0, 8], "b": [0, 8]}, "the tensor b begins at byte"),
        ({"a": [0, 8], "b": [16, 24]}, "the tensor b begins at byte"),
        ({"a": [0, 8], "b": [8, 16]}, "bytes, of which its tensors need"),
        ({"a\n": [0, 24]}, "does not have a safetensors header"),
    ],
)
def test_a_safetensors_file_with_gaps_is_refused(tmp_path: Path, places: dict[str, list[int]], said: str) -> None:
    """As the library does: such a file is another model's header, or was damaged."""
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}
            for name, (begin, end) in places.items()
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 24)
    assert said in _refusal(tmp_path)


def _sharded(folder: Path) -> dict[str, dict[str, str]]:
    writer = WeightsWriter(folder, {"a": ((4,), torch.float32), "b": ((4,), torch.float32)}, 16)
    for name in "ab":
        writer.write(name, torch.ones(4, 1))
    index: dict[str, dict[str, str]] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index


def test_a_damaged_safetensors_index_is_named(tmp_path: Path) -> None:
    index = _sharded(tmp_path)
    file = tmp_path / "model.safetensors.index.json"
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index["weight_map"]["c"] = first
    file.write_text(json.dumps(index))
    assert f"places the tensor c in {first}, which does not have it" in _refusal(tmp_path, {})
    file.write_text(json.dumps({"weight_map": {"a": first, "b": "../b.safetensors"}}))
    assert "'../b.safetensors', which is not a file of this folder" in _refusal(tmp_path, {})
    file.write_text(json.dumps({"weight_map": {"a": first, "b": None}}))
    assert f"{file} is not the index" in _refusal(tmp_path, {})
    file.write_text('{"weight_map": ')
    assert f"{file} is not the index" in _refusal(tmp_path, {})
    file.write_text(json.dumps({"weight_map": {"a": first, "b": second}}))
    (tmp_path / second).unlink()
    assert f"{tmp_path / second} is missing" in _refusal(tmp_path, {})


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "holds no weights" in _refusal(tmp_path, {})
    (tmp_path / "pytorch_model.bin").touch()
    assert "It has pytorch_model.bin" in _refusal(tmp_path, {})
    assert "is not a folder" in _refusal(tmp_path / "nowhere", {})
