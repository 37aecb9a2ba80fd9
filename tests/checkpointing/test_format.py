"""A rank's file, read by programs that know nothing of Phalanx: the safetensors library, and torch's reader of such files."""

from __future__ import annotations

import json
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import contents, saved, values
from ranks import ALONE, run_ranks, tiny_run, tiny_trainer
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.format import SavedBox
from phalanx.checkpointing.location import Local
from phalanx.checkpointing.restore import load
from phalanx.checkpointing.state_tensor import DTYPES, ReplicaGroup, StateTensor
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.spec.safetensors_index import SIZES
from phalanx.spec.tensor_slice import Box, TensorSlice


def train_and_save(mesh: Mesh, folder: Path) -> None:
    trainer = tiny_trainer(mesh, tiny_run(), folder)
    trainer.step()
    trainer.save()
    trainer.close()


@pytest.fixture(scope="module")
def by_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks saved: every matrix cut twice."""
    folder = tmp_path_factory.mktemp("four")
    run_ranks(train_and_save, 4, folder, layout=Layout(data=1, shard=2, tensor=2))
    return folder / "step-00000001"


def test_rank_files_are_read_by_the_safetensors_library(by_four: Path) -> None:
    whole, found = contents(by_four), 0
    files = sorted(by_four.glob("*.safetensors"))
    assert [file.name for file in files] == [f"state-0000{rank}-of-00004.safetensors" for rank in range(4)]
    for file in files:
        with safe_open(file, "pt") as opened:
            places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            assert places.keys() == set(opened.keys())
            for name in places:
                box = opened.get_tensor(name)
                theirs = whole[name]
                assert places[name]["whole"] == list(theirs.shape) and box.dtype is theirs.dtype
                region = tuple(slice(o, o + n) for o, n in zip(places[name]["saved_offsets"], box.shape, strict=True))
                assert torch.equal(box, theirs[region])
                found += box.nbytes
    assert found == sum(tensor.nbytes for tensor in whole.values()), "every value once"
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) - min(sizes) < 0.1 * max(sizes), "everybody writes as much as the others"


def test_rank_files_are_read_by_torch_hugging_face_storage_reader(by_four: Path) -> None:
    whole = contents(by_four)
    theirs: dict[str, Tensor] = {name: torch.full_like(tensor, -1) for name, tensor in whole.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(by_four)), no_dist=True)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in whole.items())


def test_number_formats_have_the_safetensors_names_and_sizes(tmp_path: Path) -> None:
    tensors = {word: torch.ones(3, 5).to(dtype) for word, dtype in DTYPES.items()}
    path = saved(tmp_path, 1, tensors, {}, ALONE)
    theirs = load_file(values(path))
    for word, tensor in tensors.items():
        assert theirs[word].dtype is tensor.dtype and SIZES[word] == tensor.dtype.itemsize
        assert torch.equal(theirs[word].view(torch.uint8), tensor.view(torch.uint8))


def test_boxes_are_aligned_to_their_number_format(by_four: Path) -> None:
    for file in by_four.glob("*.safetensors"):
        (length,) = struct.unpack("<Q", file.read_bytes()[:8])
        assert (8 + length) % 64 == 0
        table = json.loads(file.read_bytes()[8 : 8 + length])
        for name, entry in table.items():
            if name != "__metadata__":
                assert entry["data_offsets"][0] % SIZES[entry["dtype"]] == 0


def checked(file: Path, data: bytes) -> format.CheckedFile:
    return format.CheckedFile(Local(file), len(data), format.write_file(Local(file), [data]))


def test_header_round_trip_with_several_boxes_of_a_tensor(tmp_path: Path) -> None:
    boxes = [
        SavedBox("number", "F64", (), Box((), ())),
        SavedBox("a/matrix", "F32", (10, 4), Box((6, 0), (3, 4))),
        SavedBox("a/matrix", "F32", (10, 4), Box((0, 1), (2, 3))),
        SavedBox("naïve “name”", "BF16", (7,), Box((0,), (7,))),
    ]
    head = format.encode_header(boxes)
    data = head + bytes(sum(box.bytes for box in boxes))
    file = checked(tmp_path / "file", data)
    found = format.read_header(file, len(data))
    file.close()
    assert [replace(saved, begin=0) for saved in found] == boxes
    assert [saved.begin - len(head) for saved in found] == [0, 8, 8 + 48, 8 + 48 + 24]
    assert list(json.loads(head[8:]))[:4] == ["number", "a/matrix", "a/matrix#1", "naïve “name”"]


@pytest.mark.parametrize("head", [struct.pack("<Q", 1 << 40), struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_a_foreign_header_is_refused(head: bytes, tmp_path: Path) -> None:
    data = head + bytes(10)
    file = checked(tmp_path / "file", data)
    with pytest.raises((ValueError, KeyError, TypeError)):
        format.read_header(file, len(data))
    file.close()


def test_marker_lists_the_tensors_of_every_stage(by_four: Path, tmp_path: Path) -> None:
    assert directory.read_marker(by_four).names == [sorted(contents(by_four))]
    run_ranks(train_and_save, 2, tmp_path, layout=Layout(data=1, pipeline=2))
    marker = directory.read_marker(tmp_path / "step-00000001")
    first, last = (set(names) for names in marker.names)
    assert not first & last and first | last == set(contents(tmp_path / "step-00000001"))
    assert "model/embed.weight" in first and "model/head.weight" in last
    assert [file.stage for file in marker.rank_files.values()] == [0, 1]


FUSED = torch.arange(24 * 5, dtype=torch.float32).view(24, 5)
SEGMENTS = (12, 6, 6)  # of q, k and v


def part_of_fused(index: int, count: int) -> TensorSlice:
    return TensorSlice.full(FUSED.shape).cut_segments(0, SEGMENTS, index, count)


def local_values(part: TensorSlice) -> Tensor:
    return torch.cat([FUSED[box.index] for box in part.boxes], part.dim)


def save_fused(mesh: Mesh, folder: Path) -> None:
    """A [q|k|v] matrix cut for tensor parallelism: every rank has three boxes of it; ranks 0 and 1 hold the same as 2 and 3."""
    part = part_of_fused(mesh.rank % 2, 2)
    state = StateTensor(local_values(part), part, ReplicaGroup(("tensor",), mesh.rank // 2, 2))
    columns = TensorSlice.full((5, 24)).cut_segments(1, SEGMENTS, mesh.rank % 2, 2)
    turned = StateTensor(local_values(part).T, columns, ReplicaGroup(("tensor",), mesh.rank // 2, 2))
    saved(folder, 1, {"qkv": state, "turned": turned}, {}, mesh)


def test_several_boxes_of_a_tensor_are_saved_by_one_rank_and_loaded_by_any_layout(tmp_path: Path) -> None:
    run_ranks(save_fused, 4, tmp_path)
    path = tmp_path / "step-00000001"
    keys = [list(load_file(file)) for file in sorted(path.glob("*.safetensors"))]
    assert {"turned", "turned#1", "turned#2"} <= set(keys[0]), "extra boxes have names of their own"
    assert sum(tensor.nbytes for file in path.glob("*.safetensors") for tensor in load_file(file).values()) == 2 * FUSED.nbytes
    whole = contents(path)
    assert torch.equal(whole["qkv"], FUSED) and torch.equal(whole["turned"], FUSED.T)
    for count in (1, 2, 3, 6):
        for index in range(count):
            part = part_of_fused(index, count)
            state = StateTensor(torch.full(part.shape, -1.0), part)
            plain = StateTensor(torch.full((24, 5), -1.0)[:4], TensorSlice.of((24, 5), (10, 0), (4, 5)))
            load(path, {"qkv": state})
            load(path, {"qkv": plain})
            assert torch.equal(state.values(), local_values(part))
            assert torch.equal(plain.values(), FUSED[10:14])


def test_a_tensor_saved_whole_is_loaded_into_several_boxes(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, {"qkv": FUSED}, {}, ALONE)
    part = part_of_fused(1, 3)
    state = StateTensor(torch.zeros(part.shape), part)
    load(path, {"qkv": state})
    assert torch.equal(state.values(), local_values(part))
