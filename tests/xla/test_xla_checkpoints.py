"""A run goes from one engine to the other and back, through checkpoints of other layouts and other numbers of processes, and ends as the unbroken run."""

from __future__ import annotations

from pathlib import Path

import pytest
from xla_engine import devices, needs_xla, on_torch, small_run, train, train_together

from phalanx.checkpointing import directory
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.spec.layout import Layout

pytestmark = needs_xla


def test_torch_to_xla_to_torch(tmp_path: Path) -> None:
    """Two steps each. The layout of the second part has tensor parallelism, and its state lies on four devices of one process; that of the third on
    four devices of two."""
    torch_run = on_torch(small_run(Layout(data=1), 8))
    xla_run, on_two = small_run(Layout(data=1, shard=2, tensor=2), 8), small_run(Layout(data=2, shard=2), 8, each=2)
    broken = tmp_path / "broken"
    with devices() as pool:
        unbroken = pool.alone(train, torch_run, tmp_path / "unbroken", 8)
        parts = [pool.alone(train, run, broken, until) for run, until in ((torch_run, 2), (xla_run, 4))]
        parts.append(train_together(on_two, broken, 6))
        parts.append(pool.alone(train, torch_run, broken, 8))
    losses = [loss for part in parts for loss in part.losses]
    assert losses == pytest.approx(unbroken.losses, rel=1e-5)
    assert [digest for part in parts for digest in part.digests] == unbroken.digests
    assert parts[-1].evaluated == pytest.approx(unbroken.evaluated, rel=1e-5)
    assert [len(part.files) for part in parts] == [1, 4, 4, 1]  # a file for each device
    checkpoints = directory.list_checkpoints(tmp_path / "broken" / "checkpoints")
    readers = [CheckpointReader(path) for path in checkpoints]
    for reader in readers:
        assert reader.names == readers[0].names
        for name in reader.names:
            assert reader.shape(name) == readers[0].shape(name) and reader.dtype(name) == readers[0].dtype(name)
        reader.close()
