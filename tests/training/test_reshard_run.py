"""A resharded checkpoint is, file by file, what the ranks of that layout would have saved."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from checkpoints import saved
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer

from phalanx.checkpointing import directory
from phalanx.checkpointing.checkpoint_info import tensors
from phalanx.checkpointing.find_checkpoint import find
from phalanx.checkpointing.location import open_location
from phalanx.checkpointing.offline_writer import Cuts, read_needs
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.parallel.mesh import Mesh
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import load
from phalanx.spec.run import Run
from phalanx.spec.tensor_slice import Box
from phalanx.training.reshard_run import on_layout, on_saved_layout, write

MOE = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=16", "model.moe.bias_rate=0.1")
CASES = {
    "tensor=2": (),
    "pipeline=2,shard=2": (),
    "data=2,shard=2,zero=1": ("optimizer.name=muon",),
    "data=2,expert=2,context=2": MOE,
    "shard=2,tensor=2": ("model.tied=true", "precision.compute=bf16"),
}


def trained(run: Run, folder: Path) -> Path:
    """A checkpoint of a few steps on one rank, in a run directory; where it is."""
    alone = Mesh(ALONE.place, ALONE.device, Layout(data=1))
    run = replace(run, layout=alone.layout)
    trainer = tiny_trainer(alone, run, folder / "checkpoints")
    for _ in range(2):
        trainer.step()
    path = Path(trainer.save().path)
    trainer.close()
    (folder / "run.toml").write_text(dump(run))
    return path


def saved_again(mesh: Mesh, run: Run, path: Path, folder: Path) -> Path:
    trainer = tiny_trainer(mesh, run, folder)
    trainer.restore(path)
    again = Path(trainer.save().path)
    trainer.close()
    return again


def resharded(path: Path, asked: str, out: Path) -> Path:
    found = find(path, verify=False)
    saved = CheckpointReader(found.checkpoint)
    try:
        return Path(str(write(saved, found, on_layout(found, saved.marker, asked), str(out))))
    finally:
        saved.close()


@pytest.mark.parametrize("asked", CASES)
def test_reshard_writes_the_files_that_the_layout_would_have_saved(asked: str, tmp_path: Path) -> None:
    run = tiny_run(*CASES[asked])
    path = trained(run, tmp_path / "run")
    out = resharded(path, asked, tmp_path / "out")
    layout = load(tmp_path / "out" / "run.toml").layout
    expected, *_ = run_ranks(saved_again, layout.ranks, run, path, tmp_path / "expected", layout=layout)
    names = sorted(file.name for file in expected.iterdir())
    assert sorted(file.name for file in out.iterdir()) == names and len(names) == 2 * layout.ranks + 1
    for name in names:
        if name != "commit.json":
            assert (out / name).read_bytes() == (expected / name).read_bytes(), name
    ours, theirs = directory.read_marker(out), directory.read_marker(expected)
    assert (ours.step, ours.names, ours.files) == (theirs.step, theirs.names, theirs.files)
    for key in ("progress", "seed", "data", "layout"):
        assert getattr(ours.run, key) == getattr(theirs.run, key), key
    plans = [json.loads(marker.run.plan or "") for marker in (ours, theirs)]
    assert plans[0]["layout"] == asdict(layout) == plans[1]["layout"]
    assert plans[0]["accumulation"] == plans[1]["accumulation"]


def test_resharding_there_and_back_loses_nothing(tmp_path: Path) -> None:
    run = tiny_run()
    path = trained(run, tmp_path / "run")
    there = resharded(path, "pipeline=2,tensor=2", tmp_path / "there")
    back = resharded(there.parent.parent, "data=1", tmp_path / "back")
    assert (back / "state-00000-of-00001.safetensors").read_bytes() == (path / "state-00000-of-00001.safetensors").read_bytes()
    trainers = [tiny_trainer(ALONE, run, tmp_path / "none") for _ in range(2)]
    for trainer, place in zip(trainers, (path, there), strict=True):
        trainer.restore(place)
        trainer.step()
    assert not differing(*(copied(trainer.tensors()) for trainer in trainers))


def test_reshard_to_the_layout_of_a_run_file_and_to_the_saved_one(tmp_path: Path) -> None:
    path = trained(tiny_run(), tmp_path / "run")
    found, marker = find(path, verify=False), directory.read_marker(path)
    other = tmp_path / "other.toml"
    other.write_text(dump(tiny_run("layout.tensor=2", "layout.sequence=true", "layout.data=2")))
    assert on_layout(found, marker, str(other)).layout == Layout(tensor=2, sequence=True, data=2)
    assert on_layout(found, marker, " layout.tensor = 2, zero=3 ").layout == Layout(tensor=2, data=1)
    then = on_saved_layout(found, marker)
    assert then is not None and then.layout == Layout(data=1) and then.distinct == [0]
    # Only the first of each two replicas holds something that no other rank looked at does.
    assert on_layout(found, marker, "data=2,tensor=2,pipeline=2").distinct == [0, 1, 4, 5]


def test_tensors_of_all_ranks_of_a_layout_add_up(tmp_path: Path) -> None:
    path = trained(tiny_run(), tmp_path / "run")
    found, marker = find(path, verify=False), directory.read_marker(path)
    held = tensors(open_location(path), marker)
    laid = on_layout(found, marker, "pipeline=2,shard=2")
    cuts: Cuts = {}
    read = list(read_needs(held, laid.holds, laid.distinct, cuts))
    numbers = sum(item.bytes for name, item in held.items() if name.endswith("/step"))
    whole = sum(item.bytes for item in held.values())
    assert [item.files for item in read] == [1] * 4
    assert sum(item.bytes for item in read) == whole + numbers  # a single number is read by both ranks of its stage
    assert {piece.boxes for piece in cuts["model/embed.weight"]} == {
        (Box((0, 0), (129, 32)),),
        (Box((129, 0), (128, 32)),),
    }


def test_an_impossible_reshard_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    path = trained(tiny_run(), tmp_path / "run")
    for asked, said in {
        "tensor=3": "layout.tensor = 3 does not divide model.heads = 4",
        "tensr=2": "did you mean layout.tensor",
        "tensor=two": "layout.tensor",
        "tensor": 'The layout "tensor" is not understood at tensor: give degrees such as tensor=2',
        "": "is not understood: give degrees",
        "none.toml": "none.toml",
    }.items():
        with pytest.raises(RunError, match=said):
            resharded(path, asked, tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(RunError, match="taken already exists"):
        resharded(path, "tensor=2", tmp_path / "taken")
    found, marker = find(path, verify=False), directory.read_marker(path)
    with pytest.raises(RunError, match=r"holds 2 replicas, each with a state of its own .*: take data=2"):
        on_layout(found, replace(marker, run=replace(marker.run, replicas=2)), "data=4")
    smaller = (tmp_path / "run" / "run.toml").read_text().replace("ffn = 64", "ffn = 32")
    (tmp_path / "run" / "run.toml").write_text(smaller)
    with pytest.raises(
        RunError, match=r"has model/blocks.0.mlp.gate.weight of shape \[64, 32\], the model of its run file \[32, 32\]"
    ):
        resharded(path, "tensor=2", tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run", "taken"]


def test_reshard_refuses_to_drop_tensors_that_no_rank_holds(tmp_path: Path) -> None:
    path = trained(tiny_run(), tmp_path / "run")
    source = CheckpointReader(path)
    state = {name: source.read(name) for name in source.names} | {"model/extra": source.read("model/norm.weight")}
    contents = source.marker.run.to_json()
    more = saved(tmp_path / "more", 2, state, contents, ALONE)
    with pytest.raises(RunError, match="has model/extra, which no rank of the layout would hold"):
        resharded(more, "tensor=2", tmp_path / "out")
    assert not (tmp_path / "out").exists()
