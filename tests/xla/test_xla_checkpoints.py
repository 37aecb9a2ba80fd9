"""A run goes from one engine to the other and back, through checkpoints of other layouts and other numbers of processes, and ends as the unbroken run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from replica_nodes import TOKEN, nodes
from xla_engine import SMALL, devices, needs_xla, on_torch, small_run, through_memory, train, train_together

from phalanx.checkpointing import directory
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.spec.layout import Layout
from phalanx.spec.model import Moe
from phalanx.spec.run import Precision

pytestmark = needs_xla


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(data=1, shard=2, tensor=2), Layout(data=2, shard=2, context=2)], ids=["tensor", "context"]
)
def test_bf16_losses_are_those_of_torch(tmp_path: Path, layout: Layout) -> None:
    """Over fifty steps."""
    run = small_run(layout, 50, compute="bf16", model=replace(SMALL, layers=2))
    with devices() as pool:
        torchs = pool.alone(train, on_torch(replace(run, layout=Layout(data=1))), tmp_path / "torch", 50)
        ours = pool.alone(train, run, tmp_path / "xla", 50)
    assert ours.digests == torchs.digests and len(ours.losses) == 50
    assert ours.losses == pytest.approx(torchs.losses, rel=1e-3)
    assert ours.losses[-1] < 0.99 * ours.losses[0]


@pytest.mark.slow
def test_experts_move_between_layouts_and_engines(tmp_path: Path) -> None:
    """Divided among four devices, then among two of eight, then on torch; Muon has another state than AdamW."""
    moe = Moe(experts=4, active=2, ffn=12, bias_rate=0.01)
    base = small_run(Layout(data=1), 3, model=replace(SMALL, layers=2, moe=moe))
    base = replace(
        base, optimizer=replace(base.optimizer, name="muon"), precision=Precision(compute="fp32", newton_schulz="fp32")
    )
    four, two = Layout(data=1, shard=2, tensor=2, expert=4), Layout(data=2, shard=2, context=2, expert=2)
    parts = [(replace(base, layout=four), 1), (replace(base, layout=two), 2), (on_torch(base), 3)]
    with devices() as pool:
        unbroken = pool.alone(train, on_torch(base), tmp_path / "unbroken", 3)
        taken = [pool.alone(train, run, tmp_path / "broken", until) for run, until in parts]
    assert [loss for part in taken for loss in part.losses] == pytest.approx(unbroken.losses, rel=1e-5)
    assert [len(part.files) for part in taken] == [4, 8, 1]


def test_copies_in_memory_outlive_the_arrays(tmp_path: Path) -> None:
    """Those of all devices of a process are one file, in which nothing is twice, and which another layout restores to the bit."""
    precision = Precision(compute="bf16", optimizer="bf16")
    run = replace(small_run(Layout(data=2, shard=2, tensor=2, zero=1), 8), precision=precision)
    other = replace(run, layout=Layout(data=1, shard=4, zero=3))
    with nodes(tmp_path, 1) as (node,), devices() as pool:
        through = pool.alone(through_memory, run, other, node.folder, node.address, TOKEN)
    assert (through.wrong, through.files, through.bytes) == ([], 1, through.whole)


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
