"""States off the device: the same bits as on it, within the memory they are allowed, and safe against a sudden end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.holding import ADAMW, NO, YES, everything, give_gradients, read, values
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor, nn

from phalanx.optim.adamw import OffloadedAdamW
from phalanx.optim.offload_stores import FileStore, ScratchFile, split_chunks
from phalanx.optim.optimizer import Optimizer, Resources
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.spec.errors import RunFailed
from phalanx.spec.layout import Layout
from phalanx.spec.run import Memory, Precision
from phalanx.training.trainer import Trainer

CPU, NVME = Memory(offload="cpu"), Memory(offload="nvme", offload_buffer=1)


def big(seed: int = 5) -> list[OwnedParam]:
    """Larger than a buffer of 1 MiB, and cut at odd places: tensors of lengths that no vector divides."""
    dice = torch.Generator().manual_seed(seed)
    shapes = {"a": (37,), "b": (301, 503), "c": (3,), "d": (4, 5, 7), "e": (0, 12), "f": (1021,), "g": (50021, 1)}
    found = []
    for name, shape in shapes.items():
        value = nn.Parameter(torch.randn(shape, generator=dice))
        found.append(OwnedParam(name, value, ParamShard.full(value)))
    return found


def made(held: list[OwnedParam], memory: Memory, folder: Path, precision: Precision | None = None) -> Optimizer:
    return Optimizer(held, ADAMW, precision=precision or Precision(), memory=memory, mesh=ALONE, resources=Resources(folder))


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("memory", [CPU, NVME], ids=["cpu", "nvme"])
def test_offloaded_adamw_equals_adamw_on_the_device_bit_for_bit(
    memory: Memory, moments: str, gradients: torch.dtype, tmp_path: Path
) -> None:
    precision = Precision(optimizer=moments)  # type: ignore[arg-type]
    here, away = big(), big()
    one, two = Optimizer(here, ADAMW, precision=precision), made(away, memory, tmp_path, precision)
    for step in range(4):
        for held, optimizer in ((here, one), (away, two)):
            give_gradients(held, step, dtype=gradients)
            optimizer.step(0.01 / (1 + step), torch.tensor(1.7), NO)
    assert differing(everything(here, one.state()), everything(away, two.state())) == []
    offloaded = two.parts["AdamW"]
    assert isinstance(offloaded, OffloadedAdamW)
    shapes = {param.name: tuple(param.value.shape) for param in away}
    masters = {name: offloaded._store.state(i, "master", shape) for i, (name, shape) in enumerate(shapes.items())}
    assert differing(read(masters), values(away)) == []
    two.close()


@pytest.mark.parametrize("memory", [CPU, NVME], ids=["cpu", "nvme"])
def test_a_skipped_offloaded_step_changes_nothing(memory: Memory, tmp_path: Path) -> None:
    held = big()
    optimizer = made(held, memory, tmp_path)
    for step in range(2):
        give_gradients(held, step)
        optimizer.step(0.01, torch.tensor(1.0), NO)
    before = everything(held, optimizer.state())
    contents = [file.read_bytes() for file in tmp_path.iterdir()]
    give_gradients(held, 2)
    optimizer.step(0.01, torch.tensor(torch.nan), YES)
    assert differing(before, everything(held, optimizer.state())) == []
    assert [file.read_bytes() for file in tmp_path.iterdir()] == contents
    optimizer.close()


def test_offload_without_direct_io_uses_and_drops_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScratchFile, "_try_direct", lambda self: False)
    dropped: list[int] = []
    really = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: (dropped.append(given[2]), really(*given))[1])
    here, away = big(), big()
    one, two = Optimizer(here, ADAMW), made(away, NVME, tmp_path)
    dropped.clear()
    for held, optimizer in ((here, one), (away, two)):
        give_gradients(held, 0)
        optimizer.step(0.01, torch.tensor(1.0), NO)
    assert sum(dropped) == 2 * two.bytes().files  # all that was read and all that was written
    assert "page cache" in two.applied
    assert differing(everything(here, one.state()), everything(away, two.state())) == []
    two.close()


def test_offload_description_is_read_from_the_file(tmp_path: Path) -> None:
    held = big()
    optimizer = made(held, NVME, tmp_path / "folder")
    (file,) = (tmp_path / "folder").iterdir()
    numbers = sum(one.value.numel() for one in held)
    found = optimizer.bytes()
    assert found.device == found.host == 0
    assert 12 * numbers <= found.files == file.stat().st_size < 12 * numbers + 12 * 4096
    assert file.stat().st_blocks * 512 >= found.files  # the space is there, not only promised
    assert found.buffer <= 1 << 20
    assert str(file) in optimizer.applied
    assert f"{found.files} bytes" in optimizer.applied
    optimizer.close()
    assert list((tmp_path / "folder").iterdir()) == []


def test_offloaded_masters_count_as_host_memory(tmp_path: Path) -> None:
    held = big()
    optimizer = made(held, CPU, tmp_path)
    numbers = sum(one.value.numel() for one in held)
    assert 12 * numbers <= optimizer.bytes().host <= 12 * (numbers + 64 * len(held))
    assert "memory of the host" in optimizer.applied


@pytest.mark.parametrize("memory", [CPU, NVME], ids=["cpu", "nvme"])
def test_offloaded_masters_adopt_written_values(memory: Memory, tmp_path: Path) -> None:
    here, away = big(), big()
    one, two = Optimizer(here, ADAMW), made(away, memory, tmp_path)
    for held, optimizer in ((here, one), (away, two)):
        with torch.no_grad():
            for some, other in zip(held, big(seed=6), strict=True):
                some.value.copy_(other.value)
        optimizer.adopt()
        give_gradients(held, 0)
        optimizer.step(0.01, torch.tensor(1.0), NO)
    assert differing(everything(here, one.state()), everything(away, two.state())) == []
    two.close()


def test_a_scratch_file_of_a_dead_process_is_replaced_and_of_a_live_one_refused(tmp_path: Path) -> None:
    stale = tmp_path / "optimizer-0.states"
    stale.write_bytes(b"\xff" * 100_000)
    held = big()
    optimizer = made(held, NVME, tmp_path)
    assert all(not state.any() for state in read(optimizer.state()).values())
    give_gradients(held, 0)
    optimizer.step(0.01, torch.tensor(1.0), NO)
    before = stale.read_bytes()
    with pytest.raises(RunFailed, match="still alive") as caught:
        made(big(), NVME, tmp_path)
    assert str(stale) in str(caught.value)
    assert stale.read_bytes() == before
    optimizer.close()


def test_offload_without_disk_space_fails_before_the_first_step(tmp_path: Path) -> None:
    huge = nn.Parameter(torch.empty(1 << 46, device="meta"))
    with pytest.raises(RunFailed) as caught:
        made([OwnedParam("huge", huge, ParamShard.full(huge))], replace(NVME, offload_buffer=1 << 20), tmp_path)
    status = os.statvfs(tmp_path)
    assert str(tmp_path / "optimizer-0.states") in str(caught.value)
    assert f"{12 << 46} bytes" in str(caught.value)
    free = int(str(caught.value).partition("but ")[2].split()[0])
    assert abs(free - status.f_bavail * status.f_frsize) < 1 << 30


def test_offload_to_a_full_disk_fails_before_the_first_step(tmp_path: Path, mount_disk: Callable[[Path, str], Path]) -> None:
    disk = mount_disk(tmp_path / "disk", "1m")
    with pytest.raises(RunFailed, match=r"would take 2\d{6} bytes for optimizer states, but 10\d{5} bytes are free") as caught:
        made(big(), NVME, disk)
    assert str(disk) in str(caught.value)
    assert sum(file.stat().st_blocks for file in disk.iterdir()) == 0


def test_the_next_chunk_is_read_and_the_last_written_during_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = big()
    optimizer = made(held, NVME, tmp_path)
    begun = {"read": threading.Semaphore(0), "write": threading.Semaphore(0)}
    for name in begun:
        really = getattr(ScratchFile, name)

        def noted(self: ScratchFile, *given: object, name: str = name, really: Callable[..., None] = really) -> None:
            begun[name].release()
            really(self, *given)

        monkeypatch.setattr(ScratchFile, name, noted)
    updates = []
    adamw = optimizer.parts["AdamW"]
    assert isinstance(adamw, OffloadedAdamW)
    count, update = len(adamw._chunks), adamw._update

    def slow(*given: Any) -> None:
        number = len(updates)
        if number == 0:
            assert begun["read"].acquire(timeout=60)
        if number < count - 1:  # an update does not end before the reading of the next portion has begun
            assert begun["read"].acquire(timeout=60)
        if number > 0:
            assert begun["write"].acquire(timeout=60)
        update(*given)
        updates.append(number)

    monkeypatch.setattr(adamw, "_update", slow)
    give_gradients(held, 0)
    optimizer.step(0.01, torch.tensor(1.0), NO)
    assert updates == list(range(count))
    assert count > 5
    optimizer.close()


def unwritable(mesh: Mesh, folder: Path) -> str:
    place = folder / ("file" if mesh.rank else "fine") / "folder"
    try:
        Optimizer(big(), ADAMW, memory=NVME, mesh=mesh, resources=Resources(place))
    except RunFailed as error:
        return str(error)
    return "nothing"


def test_an_offload_folder_that_one_rank_cannot_write_fails_all_ranks_alike(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    first, second = run_ranks(unwritable, 2, tmp_path)
    assert first == second
    assert str(tmp_path / "file" / "folder") in first
    assert "Not a directory" in first
    assert list((tmp_path / "fine" / "folder").iterdir()) == []


def test_an_offload_disk_error_in_a_step_ends_the_run_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = big()
    optimizer = made(held, NVME, tmp_path)
    give_gradients(held, 0)

    def broken(*given: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(RunFailed, match=r"optimizer-0\.states.*Input/output error.*checkpoint is valid"):
        optimizer.step(0.01, torch.tensor(1.0), NO)
    optimizer.close()


def trainer(mesh: Mesh, folder: Path, memory: Memory | None) -> Trainer:
    """Of the tiny run, with its states where `memory` says."""
    run = tiny_run("train.steps=6")
    return tiny_trainer(mesh, replace(run, memory=memory or run.memory), folder / "checkpoints")


def steps(made: Trainer, count: int) -> list[str]:
    found = []
    for _ in range(count):
        step = made.step()
        assert step is not None
        found.append(float.hex(step.loss))
    return found


def trained(mesh: Mesh, folder: Path, memory: Memory | None) -> tuple[list[str], dict[str, Tensor]]:
    """Six steps' losses, with a checkpoint after the third that another trainer goes on from."""
    first = trainer(mesh, folder, memory)
    losses = steps(first, 3)
    first.save()
    first.optimizer.close()
    first.close()
    second = trainer(mesh, folder, memory)
    second.restore()
    second.optimizer.adopt()
    losses += steps(second, 3)
    tensors = copied(second.tensors())
    second.optimizer.close()
    second.close()
    return losses, tensors


@pytest.mark.parametrize("layout", [Layout(data=1), Layout(data=2)], ids=["1", "2"])
def test_an_offloaded_run_trains_and_resumes_exactly_as_one_on_the_device(layout: Layout, tmp_path: Path) -> None:
    expected = run_ranks(trained, layout.ranks, tmp_path / "none", None, layout=layout)
    for memory in (CPU, NVME):
        found = run_ranks(trained, layout.ranks, tmp_path / memory.offload, memory, layout=layout)
        for (losses, tensors), (their_losses, their_tensors) in zip(found, expected, strict=True):
            assert losses == their_losses
            assert differing(tensors, their_tensors) == []


def die_in_a_step(folder: Path) -> None:
    """As a process of its own: save after two steps, and be killed while the third one is half written."""
    made = trainer(ALONE, folder, NVME)
    steps(made, 2)
    made.save()
    written = 0
    really = ScratchFile.write

    def write(self: ScratchFile, *given: object) -> None:
        nonlocal written
        really(self, *given)  # type: ignore[arg-type]
        written += 1
        if written == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    ScratchFile.write = write  # type: ignore[method-assign]
    steps(made, 1)


def test_a_kill_during_an_offloaded_step_leaves_a_checkpoint_that_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks of the tiny model's size would be one: make them several.
    monkeypatch.setattr(
        "phalanx.optim.offload_stores.split_chunks", lambda lengths, _, multiple=64: split_chunks(lengths, 2048, multiple)
    )
    pid = os.fork()
    if pid == 0:
        try:
            die_in_a_step(tmp_path)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "offload" / "optimizer-0.states").exists()  # left behind, with half a step in it
    after = trainer(ALONE, tmp_path, NVME)
    after.restore()
    after.optimizer.adopt()
    assert after.progress.step == 2
    assert isinstance(after.optimizer.parts["AdamW"], OffloadedAdamW)
    assert isinstance(after.optimizer.parts["AdamW"]._store, FileStore)
    assert len(after.optimizer.parts["AdamW"]._chunks) > 4
    never_stopped = trainer(ALONE, tmp_path / "other", None)
    assert steps(never_stopped, 6)[2:] == steps(after, 4)
    assert differing(copied(after.tensors()), copied(never_stopped.tensors())) == []
    after.optimizer.close()
