from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from checkpoints import flip, saved, values, various
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.checkpointing import directory, location
from phalanx.checkpointing.directory import DamagedCheckpoint, newest, verify
from phalanx.checkpointing.location import Local, open_location
from phalanx.checkpointing.restore import load
from phalanx.parallel.mesh import Mesh


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def test_load_restores_tensors_in_place_bitwise(tmp_path: Path) -> None:
    path = saved(tmp_path, 7, various(1), {"progress": {"step": 7}}, ALONE)
    assert path == tmp_path / "step-00000007"
    directory.verify(path)
    tensors = various(2)
    same = dict(tensors)
    marker = load(path, tensors)
    assert (marker.run.progress, marker.step) == ({"step": 7}, 7)
    assert bits(tensors) == bits(various(1))
    assert bits(same) == bits(various(1))  # in place: the optimizer and the model hold these very tensors


def test_a_save_replaces_leftovers_of_an_interrupted_one(tmp_path: Path) -> None:
    left = tmp_path / "step-00000003.partial"
    left.mkdir()
    (left / "state-00000-of-00001.safetensors").write_bytes(b"half a file")
    (left / "stray").write_bytes(b"of another layout")
    path = saved(tmp_path, 3, various(1), {}, ALONE)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert not (path / "stray").exists()


def test_a_missing_file_is_reported_before_loading(tmp_path: Path) -> None:
    path = saved(tmp_path, 3, various(1), {}, ALONE)
    values(path).unlink()
    tensors = various(2)
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        load(path, tensors)
    assert bits(tensors) == bits(various(2))


def train(mesh: Mesh, directory: Path, steps: int) -> tuple[list[Any], dict[str, Tensor], int]:
    """Go on from what is there by that many steps, and save."""
    trainer = tiny_trainer(mesh, tiny_run("train.steps=9"), directory)
    events: list[Any] = trainer.restore()
    found = copied(trainer.tensors())
    samples = trainer.progress.samples
    for _ in range(steps):
        events.append(trainer.step())
    if steps:
        events.append(trainer.save())
    trainer.close()
    return [(event.kind, getattr(event, "loss", None)) for event in events], found if not steps else trainer.tensors(), samples


@pytest.mark.parametrize("saving", [1, 2, 4])
def test_any_number_of_ranks_restores_bitwise(saving: int, tmp_path: Path) -> None:
    # Four micro-batches of two, so that the number of ranks does not show in the state itself.
    _, saved, _ = run_ranks(train, saving, tmp_path, 3)[0]
    directory.verify(tmp_path / "step-00000003")
    for ranks in (1, 2, 4):
        for events, found, samples in run_ranks(train, ranks, tmp_path, 0):
            assert events == [("restored", None)]
            assert differing(found, saved) == []
            assert samples == 24


def test_a_run_resumed_on_other_rank_counts_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    alone = train(ALONE, tmp_path / "alone", 9)
    taken = []
    for ranks in (2, 4, 1):
        events, final, _ = run_ranks(train, ranks, tmp_path / "changing", 3)[0]
        taken += [event for event in events if event[0] == "step"]
    assert taken == [event for event in alone[0] if event[0] == "step"]
    assert differing(final, alone[1]) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_skip_a_damaged_checkpoint_together(ranks: int, tmp_path: Path) -> None:
    train(ALONE, tmp_path, 2)
    train(ALONE, tmp_path, 2)
    data = values(tmp_path / "step-00000004")
    flip(data, data.stat().st_size // 2, 4)
    for events, _, samples in run_ranks(train, ranks, tmp_path, 0):
        assert [kind for kind, _ in events] == ["checkpoint_damaged", "restored"]
        assert samples == 16


def test_a_run_behind_a_damaged_checkpoint_keeps_its_own_save(tmp_path: Path) -> None:
    train(ALONE, tmp_path, 2)
    train(ALONE, tmp_path, 2)
    data = values(tmp_path / "step-00000004")
    flip(data, data.stat().st_size - 1)
    trainer = tiny_trainer(ALONE, tiny_run("checkpoint.keep_last=1"), tmp_path)
    assert [event.kind for event in trainer.restore()] == ["checkpoint_damaged", "restored"]
    trainer.step()
    path = Path(trainer.save().path)
    trainer.close()
    assert path == tmp_path / "step-00000003"
    assert newest(tmp_path, check=verify)[0] == open_location(path)


def _forked(work: Callable[[], NoReturn]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forking beside threads
        pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            sys.stderr.flush()
            os._exit(1)
    return pid


def state(value: int) -> dict[str, Tensor]:
    return {f"tensor {i}": torch.full((20_000,), float(value + i)) for i in range(8)}


def check_all(checkpoints: Path) -> list[location.Location]:
    """Every directory that passes for a checkpoint holds exactly one save; returns them."""
    valid = []
    for path in directory.list_checkpoints(checkpoints):
        try:
            directory.verify(path)
        except DamagedCheckpoint:
            continue
        tensors = state(-100)
        value = load(path, tensors).run.extra["value"]
        assert differing(tensors, state(value)) == []
        assert value % 1000 == int(path.name.removeprefix("step-"))
        valid.append(path)
    return valid


def test_a_save_killed_at_any_time_leaves_only_complete_checkpoints(tmp_path: Path) -> None:
    dice = random.Random(5)
    passed = 0

    def save_for_ever() -> NoReturn:
        # Steps 0 … 2 again and again, with other contents each time: later saves replace earlier ones.
        attempt = random.Random().randrange(1, 10_000)
        while True:
            for step in range(3):
                value = 1000 * attempt + step
                path = saved(tmp_path, step, state(value), {"value": value}, ALONE)
                directory.prune(tmp_path, 2, open_location(path))
            attempt += 1

    for _ in range(10):
        pid = _forked(save_for_ever)
        time.sleep(dice.uniform(0.01, 0.25))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, "the child failed by itself"
        passed += len(check_all(tmp_path))
    assert passed > 0


def killed_at(call: int, work: Callable[[], Any]) -> bool:
    """Do it in a process that is killed at the given one of its calls to the file system; False: it was over before."""
    calls = itertools.count()

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return counted

    def work_once() -> NoReturn:
        for name in ("make", "write", "sync", "rename", "remove"):
            setattr(Local, name, count(getattr(Local, name)))
        for name in ("write", "sync", "close"):
            setattr(location._DirectFile, name, count(getattr(location._DirectFile, name)))
        os.fsync = count(os.fsync)  # type: ignore[assignment]
        work()
        os._exit(0)

    _, status = os.waitpid(_forked(work_once), 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return os.WIFSIGNALED(status)


def test_a_save_killed_between_any_two_writes_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    saved(tmp_path, 1, state(1), {"value": 1}, ALONE)
    for call in itertools.count():
        killed = killed_at(call, lambda: saved(tmp_path, 2, state(2), {"value": 2}, ALONE))
        found, damaged = newest(tmp_path, check=verify)
        assert damaged == []
        assert found is not None and found in check_all(tmp_path)
        if not killed:
            assert found.name == "step-00000002"
            break
        # Whatever was left, the next save works and tidies up.
        path = saved(tmp_path, 2, state(2), {"value": 2}, ALONE)
        directory.prune(tmp_path, 2, open_location(path))
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
        assert len(check_all(tmp_path)) == 2
        path.rename(tmp_path / "step-00000002.removed.partial")
        directory.prune(tmp_path, 1, open_location(tmp_path / "step-00000001"))
    assert call > 15


def test_a_replacement_killed_between_any_two_writes_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Also where it is the only checkpoint: for an instant the old one is aside and the new one not yet there."""
    saved(tmp_path, 1, state(1001), {"value": 1001}, ALONE)
    for call in itertools.count():
        killed = killed_at(call, lambda: saved(tmp_path, 1, state(2001), {"value": 2001}, ALONE))
        directory.restore_replaced(tmp_path)  # as every run does that goes on
        assert [path.name for path in check_all(tmp_path)] == ["step-00000001"]
        if not killed:
            break
        path = saved(tmp_path, 1, state(1001), {"value": 1001}, ALONE)
        directory.prune(tmp_path, 1, open_location(path))
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    assert call > 15
