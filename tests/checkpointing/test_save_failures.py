"""Saves that cannot be written: told with the rank and the reason, nothing is left of them, and the run goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents, various
from ranks import ALONE, differing, run_ranks, tiny_run, tiny_trainer

from phalanx.checkpointing import directory, location, save
from phalanx.checkpointing.location import Local, open_location
from phalanx.checkpointing.save import Saver
from phalanx.events.records import Saved, SaveFailed, Step, Warned
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunFailed
from phalanx.spec.layout import Layout

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
Breaking = Callable[[Mesh, "Trouble"], None]


class Trouble:
    """Whether there is any, for saves of the given steps."""

    def __init__(self, *steps: int):
        self.steps = steps

    def meets(self, path: Path) -> bool:
        return any(f"step-{step:08d}" in str(path) for step in self.steps)


def part_of_rank_1(mesh: Mesh, trouble: Trouble) -> None:
    """The disk is full after rank 1 has written the half of its file."""
    if mesh.rank != 1:
        return
    made, write = location._DirectFile.__init__, location._DirectFile.write

    def make(file: Any, path: Path) -> None:
        made(file, path)
        file.full = trouble.meets(path)

    def fail(file: Any, data: Any) -> None:
        write(file, memoryview(data)[: len(data) // 2])
        if file.full:
            raise FULL
        write(file, memoryview(data)[len(data) // 2 :])

    location._DirectFile.__init__ = make  # type: ignore[method-assign]
    location._DirectFile.write = fail  # type: ignore[method-assign]


def commit_of_rank_0(mesh: Mesh, trouble: Trouble) -> None:
    """It is full when the marker is to be written."""
    if mesh.rank:
        return
    write = Local.write

    def fail(file: Local, chunks: Any) -> None:
        if file.name == directory.MARKER and trouble.meets(file.path):
            raise FULL
        write(file, chunks)

    Local.write = fail  # type: ignore[method-assign]


def sync_of_rank_1(mesh: Mesh, trouble: Trouble) -> None:
    """The disk takes all and then cannot keep it."""
    if mesh.rank != 1:
        return
    fsync = os.fsync

    def fail(fd: int) -> None:
        if trouble.meets(Path(os.readlink(f"/proc/self/fd/{fd}"))):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    os.fsync = fail  # type: ignore[assignment]


def beginning(mesh: Mesh, trouble: Trouble) -> None:
    """Not even a folder can be made."""
    make = Local.make

    def fail(file: Local) -> None:
        if trouble.meets(file.path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file.path))
        make(file)

    Local.make = fail  # type: ignore[method-assign]


BREAKING: dict[Breaking, str] = {
    part_of_rank_1: "rank 1: No space left on device",
    commit_of_rank_0: "rank 0: No space left on device",
    sync_of_rank_1: "rank 1: Input/output error",
    beginning: "Permission denied",
}


def train(mesh: Mesh, folder: Path, breaking: Breaking, trouble: Trouble, asynchronous: bool) -> tuple[list[Any], str | None]:
    breaking(mesh, trouble)
    run = tiny_run("checkpoint.every=2", "checkpoint.keep_last=1", f"checkpoint.async_save={str(asynchronous).lower()}")
    trainer = tiny_trainer(mesh, run, folder)
    told: list[Any] = []
    try:
        for event in trainer.events():
            told.append(event)
            if isinstance(event, SaveFailed) and mesh.rank == 0:
                # Nothing passes for a checkpoint but the one before, and nothing takes room.
                assert [path.name for path in folder.iterdir()] == ["step-00000002"]
                directory.verify(folder / "step-00000002")
    except RunFailed as error:
        return told, str(error)
    return told, None


@pytest.mark.parametrize(
    ("breaking", "asynchronous"),
    [(part_of_rank_1, True), (part_of_rank_1, False), (commit_of_rank_0, True), (sync_of_rank_1, True), (beginning, True)],
)
def test_a_failed_save_is_reported_and_training_continues(breaking: Breaking, asynchronous: bool, tmp_path: Path) -> None:
    layout = Layout(data=1, shard=2)
    results = run_ranks(train, 2, tmp_path, breaking, Trouble(4), asynchronous, layout=layout)
    told, failure = results[0]
    assert failure is None and results[1][1] is None
    assert [event.step for event in told if isinstance(event, Step)] == [1, 2, 3, 4, 5, 6]
    (failed,) = (event for event in told if isinstance(event, SaveFailed))
    assert failed.step == 4 and failed.path == str(tmp_path / "step-00000004")
    assert BREAKING[breaking] in failed.reason
    assert [event.step for event in told if isinstance(event, Saved)] == [2, 6]
    assert told[-1].kind == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]
    directory.verify(tmp_path / "step-00000006")


@pytest.mark.parametrize("breaking", [part_of_rank_1, commit_of_rank_0])
def test_a_run_whose_last_save_fails_fails(breaking: Breaking, tmp_path: Path) -> None:
    results = run_ranks(train, 2, tmp_path, breaking, Trouble(4, 6), True)
    for told, failure in results:
        assert failure is not None and failure.startswith("Step 6 could not be saved: ") and BREAKING[breaking] in failure
        assert all(event.kind != "finished" for event in told)
    assert [event.step for event in results[0][0] if isinstance(event, SaveFailed)] == [4, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"], "the only valid one stays"
    directory.verify(tmp_path / "step-00000002")


def test_a_stopped_run_retries_a_failed_save(tmp_path: Path, monkeypatch: Any) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("checkpoint.every=2"), tmp_path)
    commit, calls = directory.commit, []

    def first_fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise FULL
        return commit(*args)

    monkeypatch.setattr(directory, "commit", first_fails)
    kinds = []
    for event in trainer.events():
        kinds.append((event.kind, getattr(event, "step", None)))
        if kinds[-1] == ("step", 2):
            trainer.stop("by hand")
    assert kinds == [("step", 1), ("step", 2), ("save_failed", 2), ("saved", 2), ("stopped", 2)]


@pytest.mark.parametrize("wait", [False, True], ids=["behind", "waited for"])
def test_save_on_a_full_disk_fails_and_the_next_save_succeeds(
    wait: bool, tmp_path: Path, mount_disk: Callable[[Path, str], Path]
) -> None:
    """A real one: it has room for one checkpoint and a half."""
    folder = mount_disk(tmp_path / "small", "100k")
    saver, small, large = Saver(open_location(folder), ALONE), various(1), {"large": various(1)["model/matrix"].repeat(10, 1)}
    events = saver.save(1, small, wait=wait) + saver.settle()
    events += saver.save(2, {**small, **large}, wait=wait) + saver.settle()
    assert isinstance(events[0], Saved)
    assert isinstance(events[1], SaveFailed) and events[1].reason == "rank 0: No space left on device"
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert differing(contents(folder / "step-00000001"), {name: t for name, t in small.items() if t.numel()}) == []
    events += saver.save(3, small, wait=wait) + saver.settle()  # what the failed one took is there again
    assert isinstance(events[2], Saved)
    saver.close()


def test_a_failed_removal_is_a_warning_and_the_checkpoint_is_complete(tmp_path: Path) -> None:
    def retain(path: location.Location) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    saver = Saver(open_location(tmp_path), ALONE, retain)
    warning, ended = saver.save(1, various(1), wait=True)
    assert isinstance(warning, Warned) and isinstance(ended, Saved)
    complete = f"{tmp_path / 'step-00000001'} is complete"
    assert warning.message == f"{complete}, but what it replaces could not be removed: Read-only file system."
    directory.verify(tmp_path / "step-00000001")
    saver.close()


def test_save_without_memory_for_a_copy_is_synchronous_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "free_memory", lambda: 1000)
    saver, tensors = Saver(open_location(tmp_path), ALONE), various(1)
    saver.prepare(tensors)
    assert saver.save(1, tensors, wait=False) == []
    for tensor in tensors.values():
        tensor.zero_()  # what changes from here on is not in it
    warning, ended = saver.settle()
    assert isinstance(ended, Saved) and ended.stall == ended.seconds
    assert isinstance(warning, Warned) and "GB are needed for it, and 0.00 GB are free" in warning.message
    assert differing(contents(tmp_path / "step-00000001"), {name: t for name, t in various(1).items() if t.numel()}) == []
    monkeypatch.undo()
    assert saver.save(2, various(2), wait=False) == []  # there is room again
    (ended,) = saver.settle()
    assert isinstance(ended, Saved)
    saver.close()


def test_a_new_saver_does_not_see_failures_of_an_earlier_one(tmp_path: Path, monkeypatch: Any) -> None:
    """A program may build a second trainer on the same mesh."""
    with monkeypatch.context() as patched:
        patched.setattr(directory, "commit", lambda *args: (_ for _ in ()).throw(FULL))
        patched.setattr(Local, "write", lambda self, chunks: (_ for _ in ()).throw(FULL))
        (failed,) = Saver(open_location(tmp_path), ALONE).save(1, various(1), wait=True)
        assert isinstance(failed, SaveFailed) and failed.reason == "rank 0: No space left on device"
    (ended,) = Saver(open_location(tmp_path), ALONE).save(1, various(1), wait=True)
    assert isinstance(ended, Saved)
