"""Checkpoints written and read part by part are like any other, and no more of one is in memory than a part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoints import contents, saved
from ranks import ALONE

from phalanx.checkpointing import directory
from phalanx.checkpointing.format import BLOCK, RunMetadata
from phalanx.checkpointing.offline_writer import StreamedTensor, write_checkpoint
from phalanx.checkpointing.restore import CheckpointReader, load
from phalanx.spec.tensor_slice import Box

WHOLE = torch.arange(60.0).view(6, 10)


def streamed(rows: int) -> StreamedTensor:
    def chunk(first: int) -> tuple[Box, Callable[[], torch.Tensor]]:
        part = WHOLE[first : first + rows]
        return (Box((first, 0), tuple(part.shape)), part.clone)

    return StreamedTensor(
        name="model/w", shape=(6, 10), dtype=torch.float32, boxes=[chunk(first) for first in range(0, 6, rows)]
    )


def test_streamed_checkpoints_load_like_any_other(tmp_path: Path) -> None:
    columns = [(Box((0, at), (6, 5)), WHOLE[:, at : at + 5].bfloat16) for at in (0, 5)]
    across = StreamedTensor(name="model/across", shape=(6, 10), dtype=torch.bfloat16, boxes=columns)
    path = write_checkpoint(tmp_path, 0, [streamed(2), across], RunMetadata(version="1"))
    assert path == directory.step_dir(tmp_path, 0)
    directory.verify(path)
    # Into another format: a run computes in its own.
    tensors = {"model/w": torch.zeros(6, 10, dtype=torch.float64), "model/across": torch.zeros(6, 10)}
    marker = load(path, tensors)
    assert (marker.run.version, marker.step) == ("1", 0)
    assert torch.equal(tensors["model/w"], WHOLE.double())
    assert torch.equal(tensors["model/across"], WHOLE)  # whole numbers below 256 are exact in bf16


def test_checkpoint_reader_reads_rows_and_boxes(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a", 0, [streamed(2)])
    apart = CheckpointReader(path)
    whole = CheckpointReader(saved(tmp_path / "b", 7, {"model/w": WHOLE}, {"progress": {"step": 1}}, ALONE))
    assert whole.marker.run.progress == {"step": 1}
    for found in (apart, whole):
        assert found.names == ["model/w"]
        assert found.shape("model/w") == (6, 10) and found.shape("model/none") is None
        assert found.dtype("model/w") is torch.float32
        assert torch.equal(found.read("model/w"), WHOLE)
        assert torch.equal(found.read("model/w", 1, 5), WHOLE[1:5])
        assert torch.equal(found.read_box("model/w", Box((1, 3), (4, 5))), WHOLE[1:5, 3:8])
        found.close()


def test_row_ranges_fill_a_block_in_multiples(tmp_path: Path) -> None:
    rows, columns = 10, BLOCK // 4 // 4  # four rows fill a block
    large = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, columns).contiguous()
    found = CheckpointReader(saved(tmp_path, 1, {"large": large, "small": WHOLE, "number": torch.tensor(3.0)}, {}, ALONE))
    assert found.row_ranges("large") == [(0, 4), (4, 8), (8, 10)]
    assert found.row_ranges("large", 3) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert found.row_ranges("large", 7) == [(0, 7), (7, 10)]  # the fewest that may be taken by themselves
    assert found.row_ranges("small") == [(0, 6)] and found.row_ranges("number") == [(0, 1)]
    assert all(torch.equal(found.read("large", first, last), large[first:last]) for first, last in found.row_ranges("large"))
    assert found.read("number").item() == 3.0
    found.close()


def test_streamed_boxes_of_any_order_and_shape_are_assembled(tmp_path: Path) -> None:
    """Those that follow each other as the values do are written as they come; for others the tensor is made whole first."""
    boxes = {
        "backwards": [((first, 0), (2, 10)) for first in (4, 2, 0)],
        "columns": [((0, 0), (6, 3)), ((0, 3), (6, 7))],
        "tiles": [((row, column), (3, 5)) for row in (0, 3) for column in (0, 5)],
        "row by row": [((row, column), (1, 5)) for row in range(6) for column in (0, 5)],
    }
    tensors = [
        StreamedTensor(
            name=name,
            shape=(6, 10),
            dtype=torch.float32,
            boxes=[
                (Box(o, n), lambda o=o, n=n: WHOLE[o[0] : o[0] + n[0], o[1] : o[1] + n[1]])  # type: ignore[misc]
                for o, n in given
            ],
        )
        for name, given in boxes.items()
    ]
    assert [tensor.in_order for tensor in tensors] == [False, False, False, True]
    found = contents(write_checkpoint(tmp_path, 0, tensors))
    assert found.keys() == boxes.keys() and all(torch.equal(tensor, WHOLE) for tensor in found.values())


PROGRAM = """
import resource, sys, torch
from pathlib import Path
from phalanx.checkpointing.offline_writer import StreamedTensor, write_checkpoint
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.spec.tensor_slice import Box
rows = 4 << 20
def tensor(index):
    chunk = (Box((0,), (rows,)), lambda: torch.full((rows,), float(index)))
    return StreamedTensor(name=f"t{index}", shape=(rows,), dtype=torch.float32, boxes=[chunk])
write_checkpoint(Path(sys.argv[1]) / "first", 0, [tensor(0)])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = write_checkpoint(Path(sys.argv[1]) / "second", 0, [tensor(index) for index in range(20)])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
saved = CheckpointReader(path)
assert all((saved.read(f"t{index}") == index).all() for index in (0, 7, 19))
"""


def test_streamed_writing_needs_the_memory_of_one_box(tmp_path: Path) -> None:
    """The library's writer holds on to all that it has written until the file is closed: 20 tensors of 16 MB."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40
