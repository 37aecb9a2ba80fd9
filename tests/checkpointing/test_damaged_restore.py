"""A flipped byte in any file of a checkpoint, anywhere: named by whoever looks, and by a run that goes on with the one before."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import flip
from ranks import ALONE, differing, run_ranks, tiny_run, tiny_trainer

from phalanx.checkpointing import directory
from phalanx.checkpointing.directory import DamagedCheckpoint
from phalanx.events.records import CheckpointDamaged, Restored
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunFailed
from phalanx.spec.layout import Layout

LAYOUT = Layout(data=1, pipeline=2, shard=2)
FILES = [f"state-0000{rank}-of-00004.{kind}" for rank in range(4) for kind in ("safetensors", "json")] + [directory.MARKER]


def train_and_save(mesh: Mesh, folder: Path) -> None:
    trainer = tiny_trainer(mesh, tiny_run(), folder)
    for _ in range(2):
        trainer.step()
        trainer.save()
    trainer.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, by four ranks in two stages."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(train_and_save, 4, folder, layout=LAYOUT)
    assert sorted(file.name for file in (folder / "step-00000002").iterdir()) == sorted(FILES)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "checkpoints"))


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_named_and_the_previous_checkpoint_restored(name: str, folder: Path) -> None:
    dice = random.Random(name)
    file = folder / "step-00000002" / name
    good = file.read_bytes()
    trainer = tiny_trainer(ALONE, tiny_run(), folder)
    trainer.restore(folder / "step-00000001")
    before = {name: piece.tensor.clone() for name, piece in trainer.tensors().items()}  # type: ignore[union-attr]
    for place in (0, len(good) - 1, *(dice.randrange(len(good)) for _ in range(3))):
        flip(file, place, dice.randrange(8))
        with pytest.raises(DamagedCheckpoint, match=name) as told:
            directory.verify(folder / "step-00000002")
        assert told.value.path == str(folder / "step-00000002")
        damaged, restored = trainer.restore()
        assert isinstance(damaged, CheckpointDamaged) and isinstance(restored, Restored)
        assert damaged.path == str(folder / "step-00000002") and name in damaged.reason
        assert (restored.step, restored.path) == (1, str(folder / "step-00000001"))
        assert differing(before, trainer.tensors()) == []  # nothing is left of what was read of the damaged one
        file.write_bytes(good)
    assert [event.kind for event in trainer.restore()] == ["restored"]
    trainer.close()


def restored(mesh: Mesh, folder: Path) -> tuple[list[Any], int]:
    trainer = tiny_trainer(mesh, tiny_run(), folder)
    events = trainer.restore()
    trainer.close()
    return events, trainer.progress.step


@pytest.mark.parametrize("name", [FILES[0], FILES[5], FILES[6], directory.MARKER])
def test_all_ranks_skip_a_checkpoint_that_is_damaged_for_some(name: str, folder: Path) -> None:
    file = folder / "step-00000002" / name
    flip(file, file.stat().st_size - 2, 1)
    for events, step in run_ranks(restored, 4, folder, layout=LAYOUT):
        assert [event.kind for event in events] == ["checkpoint_damaged", "restored"]
        assert name in events[0].reason and step == 1


def test_an_unreadable_file_counts_as_damage(folder: Path) -> None:
    file = folder / "step-00000002" / FILES[2]
    size = file.stat().st_size
    file.unlink()
    file.mkdir()  # even for the administrator there is nothing to read
    (events, step), *_ = run_ranks(restored, 2, folder)
    assert [event.kind for event in events] == ["checkpoint_damaged", "restored"] and step == 1
    file.rmdir()
    with file.open("wb") as sparse:  # of the right size
        sparse.truncate(size)
    (events, step), *_ = run_ranks(restored, 2, folder)
    assert [event.kind for event in events] == ["checkpoint_damaged", "restored"] and step == 1
    assert FILES[2] in events[0].reason


def test_a_run_without_a_valid_checkpoint_stops_instead_of_starting_over(folder: Path) -> None:
    for step, name in ((1, FILES[0]), (2, FILES[3])):
        file = folder / f"step-0000000{step}" / name
        flip(file, file.stat().st_size // 2)
    trainer = tiny_trainer(ALONE, tiny_run(), folder)
    with pytest.raises(RunFailed, match="No checkpoint of this run can be loaded") as told:
        trainer.restore()
    assert all(name in str(told.value) for name in ("step-00000001", "step-00000002", FILES[0], FILES[3], "remove them"))
    with pytest.raises(DamagedCheckpoint, match=FILES[3]):  # and one that was asked for by name is not replaced by another
        trainer.restore(folder / "step-00000002")
    trainer.close()
