"""Saves behind training: they hold the moment they began at, one at a time, in memory that is used again."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.checkpointing import directory, format, location, save
from phalanx.checkpointing.format import RunMetadata
from phalanx.checkpointing.location import open_location
from phalanx.checkpointing.save import Saver, Staging
from phalanx.checkpointing.state_tensor import ReplicaGroup, StateTensor, written_boxes
from phalanx.events.records import Saved, SaveFailed
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.spec.tensor_slice import TensorSlice

MOE = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=16", "model.moe.bias_rate=0.1")


def state(value: float) -> dict[str, Tensor]:
    return {f"tensor {index}": torch.full((100, 50), float(value + index)) for index in range(5)}


def slow_copies(monkeypatch: Any, seconds: float) -> None:
    """A copy that takes long enough for whoever does not wait for it to be found out."""
    copy = save._copy

    def slowly(*args: Any) -> None:
        time.sleep(seconds)
        copy(*args)

    monkeypatch.setattr(save, "_copy", slowly)


def slow_writing(monkeypatch: Any, seconds: float) -> None:
    sync = location._DirectFile.sync

    def slowly(file: Any) -> None:
        time.sleep(seconds)
        sync(file)

    monkeypatch.setattr(location._DirectFile, "sync", slowly)


def test_changes_after_release_do_not_reach_the_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    slow_copies(monkeypatch, 0.05)
    saver, tensors = Saver(open_location(tmp_path), ALONE), state(1)
    assert saver.save(3, tensors, RunMetadata(extra={"value": 1}), wait=False) == []
    saver.release()
    for tensor in tensors.values():
        tensor.fill_(-1)
    (ended,) = saver.settle()
    assert isinstance(ended, Saved) and (ended.step, ended.path) == (3, str(tmp_path / "step-00000003"))
    assert differing(contents(tmp_path / "step-00000003"), state(1)) == []
    directory.verify(tmp_path / "step-00000003")
    saver.close()


def test_buffers_are_copied_before_save_returns(tmp_path: Path, monkeypatch: Any) -> None:
    slow_copies(monkeypatch, 0.05)
    counter = torch.tensor([5.0, 6.0])
    piece = StateTensor(counter, TensorSlice.full((2,)), is_buffer=True)
    saver = Saver(open_location(tmp_path), ALONE)
    saver.save(1, {**state(1), "counter": piece}, wait=False)
    counter.fill_(0)
    saver.release()
    saver.settle()
    assert contents(tmp_path / "step-00000001")["counter"].tolist() == [5.0, 6.0]
    saver.close()


def train(mesh: Mesh, folder: Path, overrides: tuple[str, ...]) -> list[Any]:
    trainer = tiny_trainer(mesh, tiny_run("checkpoint.every=1", "checkpoint.keep_last=99", *overrides), folder)
    return list(trainer.events())


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(1, MOE), (2, ("optimizer.sync_every=2",)), (2, ("memory.offload=cpu", "optimizer.name=adamw"))],
    ids=["experts", "local steps", "offloaded"],
)
def test_asynchronous_checkpoints_equal_synchronous_ones(
    ranks: int, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: Any
) -> None:
    slow_copies(monkeypatch, 0.002)
    (events, *_) = run_ranks(train, ranks, tmp_path / "behind", overrides)
    run_ranks(train, ranks, tmp_path / "waited", (*overrides, "checkpoint.async_save=false"))
    saves = [event for event in events if isinstance(event, Saved)]
    assert [event.step for event in saves] == [1, 2, 3, 4, 5, 6]
    for event in saves:
        name = Path(event.path).name
        directory.verify(tmp_path / "behind" / name)
        assert differing(contents(tmp_path / "behind" / name), contents(tmp_path / "waited" / name)) == []
        assert 0 < event.stall <= event.seconds and 0 < event.write_seconds <= event.seconds
        assert event.bytes_per_second == pytest.approx(event.bytes / event.write_seconds)


def test_training_continues_while_a_save_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    slow_writing(monkeypatch, 0.3)  # of three files
    trainer = tiny_trainer(ALONE, tiny_run("checkpoint.every=2", "train.steps=3", "data.eval_fraction=0"), tmp_path)
    events = list(trainer.events())
    assert [(event.kind, event.step) for event in events] == [  # type: ignore[attr-defined]
        ("step", 1), ("step", 2), ("step", 3), ("saved", 2), ("saved", 3), ("finished", 3),
    ]  # fmt: skip
    behind, waited = (event for event in events if isinstance(event, Saved))
    assert behind.stall < behind.seconds and waited.stall == waited.seconds


def saving_twice(mesh: Mesh, folder: Path) -> tuple[list[int], bool]:
    saver, tensors = Saver(open_location(folder), mesh), state(1)
    pieces = {name: StateTensor.full(tensor, ReplicaGroup((), mesh.rank, mesh.ranks)) for name, tensor in tensors.items()}
    writing, most = 0, 0
    write, lock = format.write_file, threading.Lock()

    def watched(*args: Any) -> Any:
        nonlocal writing, most
        with lock:
            writing += 1
            most = max(most, writing)
        time.sleep(0.05)
        try:
            return write(*args)
        finally:
            with lock:
                writing -= 1

    format.write_file = watched  # type: ignore[assignment]
    told = []
    for step in (1, 2, 3):
        told += [event.step for event in saver.save(step, pieces, wait=False) if isinstance(event, Saved)]
        assert told == list(range(1, step)), "the one before has ended"
        saver.release()
        for tensor in tensors.values():
            tensor.add_(1)
    assert saver.ended() == [] or mesh.rank
    told += [event.step for event in saver.settle() if isinstance(event, Saved)]
    saver.close()
    return told, most == 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_second_save_waits_for_the_first(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(saving_twice, ranks, tmp_path) == [([1, 2, 3], True)] * ranks
    for step in (1, 2, 3):
        assert differing(contents(tmp_path / f"step-0000000{step}"), state(step)) == []  # what it held when it began


def test_staging_memory_has_the_size_of_the_rank_file_and_is_reused() -> None:
    parts = written_boxes({name: StateTensor.full(tensor) for name, tensor in state(1).items()})
    area = Staging(torch.device("cpu"))
    area.prepare(parts)
    places = set()
    for value in (1, 2, 3):
        parts = written_boxes({name: StateTensor.full(tensor) for name, tensor in state(value).items()})
        area.begin(parts)
        assert area._memory is not None and len(area._memory) == sum(part.bytes for part in parts) == 5 * 100 * 50 * 4
        assert area._memory is not None
        places.add(area._memory.data_ptr())
        assert b"".join(area.chunks()) == b"".join(part.state.tensor.numpy().tobytes() for part in parts)  # type: ignore[union-attr]
    assert len(places) == 1
    fewer = written_boxes({"one": StateTensor.full(torch.ones(3))})
    area.begin(fewer)
    assert len(area._memory) == 12 and b"".join(area.chunks()) == torch.ones(3).numpy().tobytes()
    area.close()
    assert area._memory is None


class Unreadable:
    dtype = torch.float32
    broken = True

    def read(self, into: Tensor | None = None) -> Tensor:
        if self.broken:
            raise OSError(5, "Input/output error")
        return torch.ones(4)

    def write(self, values: Tensor) -> None: ...


def test_only_the_first_optimizer_step_after_a_save_waits_for_the_copy() -> None:
    """What it waited is told with the save; later ones would put their nothing in its place."""
    area, waits = Staging(torch.device("cpu")), []
    for _ in range(2):
        assert area.begin(written_boxes({name: StateTensor.full(tensor) for name, tensor in state(1).items()})) is None
        assert area._copying is not None
        join = area._copying.join
        area._copying.join = lambda *args, join=join: (waits.append(1), join(*args))[1]  # type: ignore[method-assign]
        for _ in range(3):
            area.release()
    assert len(waits) == 2
    area._copying = None
    area.close()


def test_a_failed_copy_fails_only_its_save(tmp_path: Path) -> None:
    source = Unreadable()
    saver, tensors = Saver(open_location(tmp_path), ALONE), {"it": StateTensor(source, TensorSlice.full((4,)))}
    saver.save(1, tensors, wait=False)
    saver.release()
    (failed,) = saver.settle()
    assert isinstance(failed, SaveFailed) and failed.reason == "rank 0: Input/output error"
    source.broken = False
    saver.save(2, tensors, wait=False)
    (ended,) = saver.settle()
    assert isinstance(ended, Saved) and [path.name for path in directory.list_checkpoints(tmp_path)] == ["step-00000002"]
    saver.close()


def alone_in_the_end(mesh: Mesh, folder: Path) -> str | None:
    save._PATIENCE = 0.5
    saver = Saver(open_location(folder), mesh)
    if mesh.rank:
        saver._write = lambda *args: None  # type: ignore[method-assign]  # it is lost before it has written
    saver.save(1, state(1), wait=False)
    saver.close()
    return next((event.reason for event in saver._ended if isinstance(event, SaveFailed)), None)


def test_closing_during_a_save_does_not_wait_for_lost_ranks(tmp_path: Path) -> None:
    failure = "rank 0: not all ranks have written their parts"
    assert run_ranks(alone_in_the_end, 2, tmp_path) == [failure, None]
    assert directory.list_checkpoints(tmp_path) == []


def of_a_shape(mesh: Mesh, folder: Path) -> bool:
    """Every rank restores what all of them saved behind the next steps."""
    run = tiny_run("checkpoint.every=2", "train.steps=5", *MOE)
    trainer = tiny_trainer(mesh, run, folder)
    moments = {}
    for event in trainer.events():
        if event.kind == "step":
            moments[event.step] = copied(trainer.tensors())  # type: ignore[attr-defined]
    for step in (4, 5):
        again = tiny_trainer(mesh, run, folder)
        again.restore(folder / f"step-0000000{step}")
        if differing(moments[step], again.tensors()):
            return False
        again.close()
    return True


def test_every_rank_saves_the_state_of_the_same_step(tmp_path: Path, monkeypatch: Any) -> None:
    slow_copies(monkeypatch, 0.003)
    assert run_ranks(of_a_shape, 4, tmp_path, layout=Layout(data=1, shard=2, pipeline=2)) == [True] * 4
