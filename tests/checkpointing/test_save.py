from __future__ import annotations

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
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.checkpointing import disk
from phalanx.checkpointing.disk import DamagedCheckpoint, newest_valid
from phalanx.checkpointing.load import load
from phalanx.checkpointing.save import save
from phalanx.parallel.mesh import Mesh


def various(seed: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {
        "model/matrix": torch.randn(37, 53, generator=dice),
        "model/turned": torch.randn(8, 5, generator=dice).T,
        "model/vector": torch.randn(101, generator=dice),
        "optimizer/matrix/step": torch.tensor(float(seed)),
        "low": torch.randn(64, generator=dice).bfloat16(),
        "whole": torch.randint(1 << 40, (9,), generator=dice),
        "special": torch.tensor([0.0, -0.0, torch.inf, 1e-45]),
    }


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def test_what_is_saved_is_loaded_bit_for_bit_into_the_tensors_given(tmp_path: Path) -> None:
    path = save(tmp_path, 7, various(1), {"progress": {"step": 7}}, ALONE)
    assert path == tmp_path / "step-00000007"
    disk.verify(path)
    tensors = various(2)
    same = dict(tensors)
    contents = load(path, tensors, alone=True)
    assert (contents["progress"], contents["step"]) == ({"step": 7}, 7)
    assert bits(tensors) == bits(various(1))
    assert bits(same) == bits(various(1))  # in place: the optimizer and the model hold these very tensors


def test_what_an_interrupted_save_left_is_written_over(tmp_path: Path) -> None:
    left = tmp_path / "step-00000003.partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half a file")
    (left / "stray").write_bytes(b"of another layout")
    path = save(tmp_path, 3, various(1), {}, ALONE)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert not (path / "stray").exists()


def test_a_missing_file_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 3, various(1), {}, ALONE)
    next(path.glob("*.distcp")).unlink()
    tensors = various(2)
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        load(path, tensors, alone=True)
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
def test_what_some_ranks_saved_any_number_restores_bit_for_bit(saving: int, tmp_path: Path) -> None:
    # Four micro-batches of two, so that the number of ranks does not show in the state itself.
    _, saved, _ = run_ranks(train, saving, tmp_path, 3)[0]
    disk.verify(tmp_path / "step-00000003")
    for ranks in (1, 2, 4):
        for events, found, samples in run_ranks(train, ranks, tmp_path, 0):
            assert events == [("restored", None)]
            assert differing(found, saved) == []
            assert samples == 24


def test_a_run_goes_on_across_numbers_of_ranks_as_if_it_had_had_one_all_along(tmp_path: Path) -> None:
    alone = train(ALONE, tmp_path / "alone", 9)
    taken = []
    for ranks in (2, 4, 1):
        events, final, _ = run_ranks(train, ranks, tmp_path / "changing", 3)[0]
        taken += [event for event in events if event[0] == "step"]
    assert taken == [event for event in alone[0] if event[0] == "step"]
    assert differing(final, alone[1]) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_pass_over_a_damaged_checkpoint_together(ranks: int, tmp_path: Path) -> None:
    train(ALONE, tmp_path, 2)
    train(ALONE, tmp_path, 2)
    data = next((tmp_path / "step-00000004").glob("*.distcp"))
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 16
    data.write_bytes(damaged)
    for events, _, samples in run_ranks(train, ranks, tmp_path, 0):
        assert [kind for kind, _ in events] == ["checkpoint_damaged", "restored"]
        assert samples == 16


def test_a_run_that_went_back_behind_a_damaged_checkpoint_saves_and_keeps_its_own(tmp_path: Path) -> None:
    train(ALONE, tmp_path, 2)
    train(ALONE, tmp_path, 2)
    data = next((tmp_path / "step-00000004").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    trainer = tiny_trainer(ALONE, tiny_run("checkpoint.keep_last=1"), tmp_path)
    assert [event.kind for event in trainer.restore()] == ["checkpoint_damaged", "restored"]
    trainer.step()
    path = Path(trainer.save().path)
    trainer.close()
    assert newest_valid(tmp_path)[0] == path == tmp_path / "step-00000003"


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


def check_all(checkpoints: Path) -> list[Path]:
    """Every directory that passes for a checkpoint holds exactly one save; returns them."""
    valid = []
    for path in disk.listed(checkpoints):
        try:
            disk.verify(path)
        except DamagedCheckpoint:
            continue
        tensors = state(-100)
        value = load(path, tensors, alone=True)["value"]
        assert differing(tensors, state(value)) == []
        assert value % 1000 == int(path.name.removeprefix("step-"))
        valid.append(path)
    return valid


def test_a_save_killed_at_any_moment_leaves_nothing_that_passes_for_one(tmp_path: Path) -> None:
    dice = random.Random(5)
    saved = 0

    def save_for_ever() -> NoReturn:
        # Steps 0 … 2 again and again, with other contents each time: later saves replace earlier ones.
        attempt = random.Random().randrange(1, 10_000)
        while True:
            for step in range(3):
                value = 1000 * attempt + step
                path = save(tmp_path, step, state(value), {"value": value}, ALONE)
                disk.prune(tmp_path, 2, path)
            attempt += 1

    for _ in range(10):
        pid = _forked(save_for_ever)
        time.sleep(dice.uniform(0.01, 0.25))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, "the child failed by itself"
        saved += len(check_all(tmp_path))
    assert saved > 0


@pytest.mark.parametrize("call", range(12))
def test_a_commit_killed_between_any_two_of_its_writes_leaves_the_old_or_the_new(call: int, tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), {"value": 1}, ALONE)
    calls = 0

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            nonlocal calls
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return function(*args)

        return counted

    def save_once() -> NoReturn:
        disk._sync = count(disk._sync)  # type: ignore[assignment]
        disk._digest = count(disk._digest)  # type: ignore[assignment]
        Path.rename = count(Path.rename)  # type: ignore[assignment,method-assign]
        Path.write_text = count(Path.write_text)  # type: ignore[assignment,method-assign]
        save(tmp_path, 2, state(2), {"value": 2}, ALONE)
        os._exit(0)

    _, status = os.waitpid(_forked(save_once), 0)
    found, damaged = newest_valid(tmp_path)
    assert damaged == []
    assert found is not None
    assert found in check_all(tmp_path)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        assert found.name == "step-00000002"
    # Whatever was left, the next save works and tidies up.
    path = save(tmp_path, 2, state(2), {"value": 2}, ALONE)
    disk.prune(tmp_path, 2, path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert len(check_all(tmp_path)) == 2
