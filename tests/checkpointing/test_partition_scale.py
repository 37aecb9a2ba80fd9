"""Sixteen thousand ranks plan their saves as few do: each by itself, with work that does not grow with their number. And a rank that
loads looks into the files that hold its boxes, not into all. Work is counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import tiny_run

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.directory import CheckpointFiles
from phalanx.checkpointing.restore import load
from phalanx.checkpointing.state_tensor import StateTensor, WrittenBox, raw_bytes, written_boxes
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run
from phalanx.training.build import dry_build_tensors


def big() -> Run:
    return tiny_run(
        "model.layers=16", "model.dim=1024", "model.heads=16", "model.kv_heads=8", "model.ffn=2048", "model.vocab=8192"
    )


def planned(pieces: dict[str, StateTensor]) -> tuple[list[WrittenBox], bytes]:
    """All that a rank does before it writes."""
    boxes = written_boxes(pieces)
    return boxes, format.encode_header([box.saved for box in boxes])


def calls(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What it returns, and how many functions it calls."""
    count = 0

    def seen(frame: Any, event: str, what: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        found = function(*args)
    finally:
        sys.setprofile(before)
    return found, count


@pytest.mark.parametrize("zero", [1, 3])
def test_planning_does_not_grow_with_the_number_of_ranks(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run, work = big(), {}
    for shard in (8, 128):
        layout = Layout(pipeline=16, data=1, shard=shard, tensor=8, zero=zero)
        found = [dry_build_tensors(run, layout, rank) for rank in (0, layout.ranks // 2 + 3, layout.ranks - 1)]
        for meeting in ("all_reduce", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"):
            monkeypatch.setattr(dist, meeting, lambda *_, **__: pytest.fail("ranks do not plan together"))
        planned(found[0])  # what is made the first time is not counted
        plans = [calls(planned, pieces) for pieces in found]
        monkeypatch.undo()
        work[layout.ranks] = max(
            count / (len(pieces) + len(parts)) for ((parts, _), count), pieces in zip(plans, found, strict=True)
        )
        assert all(len(parts) <= len(pieces) for ((parts, _), _), pieces in zip(plans, found, strict=True))
        assert not dist.is_initialized()
    assert work[16_384] <= 1.1 * work[1024], "calls for each piece that it holds and each that it writes"


def whole(name: str, piece: StateTensor) -> torch.Tensor:
    """Values that tell tensors and places apart."""
    count = torch.Size(piece.slice.whole).numel()
    return (torch.arange(count) + format.name_hash(name) % 1000).view(piece.slice.whole).to(piece.tensor.dtype)


def of(name: str, piece: StateTensor) -> torch.Tensor:
    return whole(name, piece)[piece.slice.boxes[0].index].contiguous()


def write_all(folder: Path, run: Run, layout: Layout) -> Path:
    """The checkpoint that all ranks of a layout would write together."""
    partial = directory.begin(folder, 1)
    each = layout.ranks // layout.pipeline
    for rank in range(layout.ranks):
        pieces = dry_build_tensors(run, layout, rank)
        boxes = written_boxes(pieces)
        values = [raw_bytes(of(box.name, box.state)[box.local.index]) for box in boxes]
        names = {name: piece.whole_bytes for name, piece in pieces.items()} if rank % each == 0 else None
        file = format.RankFile(rank, layout.ranks, [box.saved for box in boxes], rank // each, names)
        format.write_rank_file(partial, file, lambda values=values: values)  # type: ignore[misc]
    return Path(str(directory.commit(partial, 1, format.RunMetadata(), layout.ranks)))


def test_a_loading_rank_opens_only_files_with_its_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run("model.layers=4", "model.tied=true")
    layout = Layout(pipeline=2, data=1, shard=16, tensor=2, zero=1)
    saved = write_all(tmp_path, run, layout)
    opened: list[str] = []
    boxes = CheckpointFiles.boxes
    monkeypatch.setattr(CheckpointFiles, "boxes", lambda self, file, sidecar: opened.append(file) or boxes(self, file, sidecar))
    cases = {
        "the same": (layout, 41, 6),  # its own, the rest of what tensor ranks share, and those that hold single numbers
        "another": (Layout(data=1, shard=2, zero=3), 1, 2 * 32),
    }
    for what, (other, rank, most) in cases.items():
        opened.clear()
        pieces = {
            name: StateTensor(torch.zeros(piece.slice.shape, dtype=piece.tensor.dtype), piece.slice)
            for name, piece in dry_build_tensors(run, other, rank).items()
        }
        load(saved, pieces)
        wrong = [name for name, piece in pieces.items() if not torch.equal(piece.tensor, of(name, piece))]
        assert not wrong, what
        assert len(opened) == len(set(opened)) <= most, (what, opened)
