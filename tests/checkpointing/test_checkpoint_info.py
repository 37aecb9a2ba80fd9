"""What is told of checkpoints from their markers and headers, and by reading them through."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import flip, saved, values
from ranks import ALONE, run_ranks
from safetensors import safe_open

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.checkpoint_info import (
    FileDamage,
    bytes_by_kind,
    describe,
    find_damage,
    layout_text,
    listing,
    matching,
    tensors,
)
from phalanx.checkpointing.directory import DamagedCheckpoint
from phalanx.checkpointing.location import open_location
from phalanx.checkpointing.state_tensor import ReplicaGroup, StateTensor
from phalanx.parallel.mesh import Mesh
from phalanx.spec.tensor_slice import TensorSlice

LAYOUT = {"pipeline": 1, "data": 2, "shard": 1, "tensor": 1, "zero": 3, "sequence": True, "schedule_file": None}
W = torch.arange(40.0).view(10, 4)


def save(mesh: Mesh, folder: Path, step: int) -> Path:
    mine = W[5 * mesh.rank : 5 * mesh.rank + 5] if mesh.ranks > 1 else W
    cut = StateTensor(mine.clone(), TensorSlice.of((10, 4), (5 * mesh.rank, 0), tuple(mine.shape)))
    both = StateTensor.full(torch.arange(6, dtype=torch.int64), ReplicaGroup((), mesh.rank, mesh.ranks))
    state = {"model/w": cut, "optimizer/w/exp_avg": both}
    return saved(folder, step, state, {"layout": LAYOUT, "version": "1.2", "progress": {"samples": 8}}, mesh)


def test_listing_describes_checkpoints_and_leftovers(tmp_path: Path) -> None:
    assert listing(open_location(tmp_path)) == []
    for step in (2, 4, 6, 8):
        save(ALONE, tmp_path, step)
    values(tmp_path / "step-00000004").unlink()
    (tmp_path / "step-00000006" / "commit.json").unlink()
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000010.partial")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000002.replaced.partial")
    (tmp_path / "notes").mkdir()
    found = listing(open_location(tmp_path))
    assert [(one.step, one.leftover) for one in found] == [
        (10, True),
        (8, False),
        (6, False),
        (4, False),
        (2, False),
        (2, True),
    ]
    good = found[1]
    assert (good.problem, good.ranks, good.version, good.layout) == (None, 1, "1.2", LAYOUT)
    files = (tmp_path / "step-00000008").iterdir()
    assert good.bytes == sum(file.stat().st_size for file in files)
    assert good.time is not None and abs(good.time - (tmp_path / "step-00000008").stat().st_mtime) < 60
    assert "no commit.json" in str(found[2].problem) and "is missing" in str(found[3].problem)
    assert directory.leftovers(open_location(tmp_path)) == ["step-00000002.replaced.partial", "step-00000010.partial"]
    # What was set aside for another that never came is put back by the next launch.
    shutil.rmtree(tmp_path / "step-00000002")
    assert directory.leftovers(open_location(tmp_path)) == ["step-00000010.partial"]


def test_layout_text_shows_what_differs_from_one_rank() -> None:
    assert layout_text(LAYOUT) == "data 2, sequence"
    assert layout_text(None) == layout_text({"data": 1, "zero": 3}) == "one rank"
    assert layout_text({"shard": 4, "zero": 2, "schedule": "zbv"}) == "shard 4, zero 2, schedule zbv"


def test_tensors_are_described_as_the_library_reads_them(tmp_path: Path) -> None:
    (path, _) = run_ranks(save, 2, tmp_path, 3)
    marker = directory.read_marker(path)
    found = tensors(open_location(path), marker)
    assert list(found) == ["model/w", "optimizer/w/exp_avg"]
    assert {name: (one.dtype, one.shape, one.bytes) for name, one in found.items()} == {
        "model/w": ("F32", (10, 4), 160),
        "optimizer/w/exp_avg": ("I64", (6,), 48),
    }
    assert bytes_by_kind(found) == {"model": 160, "optimizer": 48}
    for one in found.values():
        for file, box_in_file in one.boxes:
            with safe_open(path / file, "pt") as read:
                values = read.get_tensor(one.name)
            raw = (path / file).read_bytes()[box_in_file.begin : box_in_file.begin + box_in_file.bytes]
            assert tuple(values.shape) == box_in_file.box.shape and values.numpy().tobytes() == raw
            whole = W if one.name == "model/w" else torch.arange(6)
            assert torch.equal(values, whole[box_in_file.box.index])
    assert [one.name for one in matching(found, "exp")] == ["optimizer/w/exp_avg"]
    assert [one.name for one in matching(found, "model/*")] == ["model/w"]
    assert list(matching(found, "*/x")) == []
    assert len(list(matching(found, None))) == 2
    flip(path / "state-00001-of-00002.safetensors", 20)
    with pytest.raises(DamagedCheckpoint, match=r"state-00001-of-00002.safetensors does not have the contents"):
        tensors(open_location(path), marker)


def test_find_damage_names_every_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path, _) = run_ranks(save, 2, tmp_path, 3)
    read: list[int] = []
    assert find_damage(open_location(path), read.append) == []
    assert sum(read) == sum(file.bytes for file in directory.read_marker(path).files.values())
    first, second = "state-00000-of-00002", "state-00001-of-00002"
    flip(path / f"{first}.safetensors", 30)
    os.truncate(path / f"{second}.safetensors", 100)
    flip(path / f"{second}.json", 5)
    size = (path / f"{first}.safetensors").stat().st_size
    assert {one.file: one for one in find_damage(open_location(path))} == {
        f"{first}.safetensors": FileDamage(
            file=f"{first}.safetensors", reason="it does not have the contents that were saved", ranges=((0, size),)
        ),
        f"{second}.safetensors": FileDamage(
            file=f"{second}.safetensors",
            reason=f"it has 100 bytes instead of {directory.parse_marker(open_location(path)).files[f'{second}.safetensors'].bytes}",
        ),
        f"{second}.json": FileDamage(file=f"{second}.json", reason="it does not have the contents that were saved"),
    }
    (path / f"{second}.json").unlink()
    assert "it is missing" in [one.reason for one in find_damage(open_location(path)) if one.file == f"{second}.json"]
    flip(path / "commit.json", 40)
    (only,) = find_damage(open_location(path))
    assert only.file == "commit.json" and "commit.json" in only.reason


def test_find_damage_reports_block_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("format", "checkpoint_info"):
        monkeypatch.setattr(f"phalanx.checkpointing.{module}.BLOCK", 4096)
    assert format.BLOCK == 4096
    big = {"model/w": torch.arange(4096.0)}
    path = saved(tmp_path, 1, big, {}, ALONE)
    file = values(path)
    flip(file, 5000)
    flip(file, 12288)
    (only,) = find_damage(open_location(path))
    assert only.ranges == ((4096, 8192), (12288, 16384))


def test_checkpoint_info_does_not_import_torch(tmp_path: Path) -> None:
    path = save(ALONE, tmp_path, 2)
    program = (
        "import sys\n"
        "from phalanx.cli.main import app\n"
        "for verb in ('list', 'inspect', 'verify'):\n"
        "    app(['checkpoint', verb, sys.argv[1], '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [len(json.loads(line)) > 1 for line in done.stdout.splitlines() if line.startswith("{")] == [True] * 3
    assert describe(open_location(path)).problem is None
