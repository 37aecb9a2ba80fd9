"""`phalanx checkpoint`: the real commands, in this process, on checkpoints of a tiny run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents, flip, values
from commands import InProcess
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from safetensors.torch import load_file

from phalanx.checkpointing import directory
from phalanx.checkpointing.location import open_location
from phalanx.events.rundir import RunDir
from phalanx.parallel.mesh import Mesh
from phalanx.spec.dump import dump
from phalanx.spec.layout import Layout
from phalanx.spec.load import load

Phalanx = Callable[..., Any]


@pytest.fixture
def phalanx(here: InProcess) -> Phalanx:
    """The command after `checkpoint`."""
    return lambda *arguments: here("checkpoint", *arguments)


def _train(mesh: Mesh, folder: Path) -> None:
    run = replace(tiny_run("checkpoint.keep_last=3"), layout=mesh.layout)
    trainer = tiny_trainer(mesh, run, folder / "checkpoints")
    for _ in range(3):
        trainer.step()
        trainer.save()
    trainer.close()
    if mesh.rank == 0:
        (folder / "run.toml").write_text(dump(run))
        (folder / "plan.json").write_text(trainer.plan.to_json())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same three steps on one rank (`one`) and on two (`two`)."""
    root = tmp_path_factory.mktemp("trained")
    for name in ("one", "two"):
        (root / name).mkdir()
    _train(Mesh(ALONE.place, ALONE.device, Layout(data=1)), root / "one")
    run_ranks(_train, 2, root / "two", layout=Layout(tensor=2, data=1))
    return root


@pytest.fixture
def one(trained: Path, tmp_path: Path) -> Path:
    """A run directory to do anything with."""
    return Path(shutil.copytree(trained / "one", tmp_path / "one"))


def test_checkpoint_list(phalanx: Phalanx, one: Path, tmp_path: Path) -> None:
    shutil.copytree(one / "checkpoints" / "step-00000003", one / "checkpoints" / "step-00000004.partial")
    values(one / "checkpoints" / "step-00000002").unlink()
    done = phalanx("list", "one", "--json")
    assert done.code == 0, done.err
    rows = done.json["checkpoints"]
    assert [(row["step"], row["leftover"], row["problem"] is None) for row in rows] == [
        (4, True, False), (3, False, True), (2, False, False), (1, False, True),
    ]  # fmt: skip
    assert rows[1]["ranks"] == 1 and rows[1]["layout"]["tensor"] == 1 and rows[1]["version"] is not None
    assert "is missing" in done.shown and "interrupted save" in done.shown and "complete" in done.shown
    checkpoint = "one/checkpoints/step-00000003"
    assert "valid" not in done.shown, "contents were not compared"
    for same in (checkpoint, "one/checkpoints"):
        assert phalanx("list", same, "--json").json["checkpoints"] == rows
    (tmp_path / "empty").mkdir()
    assert "There is no checkpoint in empty/checkpoints." in phalanx("list", "empty").shown


def test_checkpoint_list_verify_finds_a_changed_byte(phalanx: Phalanx, one: Path) -> None:
    flip(values(one / "checkpoints" / "step-00000003"), -1)
    assert phalanx("list", "one", "--json").json["checkpoints"][0]["verified"] is False
    done = phalanx("list", "one", "--verify", "--json")
    newest, *others = done.json["checkpoints"]
    assert newest["step"] == 3 and "does not have the contents that were saved" in newest["problem"]
    assert not newest["verified"] and [(row["problem"], row["verified"]) for row in others] == [(None, True)] * 2
    assert [line.split()[-1] for line in done.shown.splitlines() if line.split() and line.split()[0] in ("1", "2")] == [
        "valid",
        "valid",
    ]


@pytest.mark.parametrize("verb", [("generate", "one", "the", "--tokens", 2), ("export", "one", "out"), ("eval", "one")])
def test_a_skipped_damaged_checkpoint_is_reported(here: InProcess, one: Path, verb: tuple[object, ...]) -> None:
    """A person who names a run directory expects its newest state."""
    file = values(one / "checkpoints" / "step-00000003")
    flip(file, -1)
    if verb[0] == "eval":
        verb = (*verb, "--source", "text", "--path", "text.txt", "--sequences", 1)
        Path("text.txt").write_text("the rank waits for the others " * 40)
    done = here(*verb, "--json")
    assert done.code == 0, done.err
    used, warned = "one/checkpoints/step-00000002", "one/checkpoints/step-00000003"
    assert (done.json["step"], done.json["checkpoint"]) == (2, used)
    (skipped,) = done.json["damaged"]
    assert skipped["path"] == warned and file.name in skipped["reason"]
    (warning,) = (line for line in done.err.splitlines() if line.startswith("warning:"))
    assert warned in warning and skipped["reason"] in warning
    assert f"using step 2 ({used})" in done.err
    flip(file, -1)
    if verb[0] != "export":
        done = here(*verb, "--json")
        assert (done.json["step"], done.json["damaged"]) == (3, []) and "warning" not in done.err


def test_plain_export_reports_a_skipped_damaged_checkpoint(phalanx: Phalanx, one: Path) -> None:
    values(one / "checkpoints" / "step-00000003").unlink()
    done = phalanx("export", "one", "out", "--format", "safetensors", "--json")
    assert done.code == 0 and done.json["step"] == 2 and len(done.json["damaged"]) == 1
    assert "warning: one/checkpoints/step-00000003 is damaged" in done.err and "is missing" in done.err


def test_checkpoint_list_shows_a_renamed_checkpoint(phalanx: Phalanx, one: Path) -> None:
    (one / "checkpoints" / "step-00000002").rename(one / "best")
    done = phalanx("list", "one/best", "--json")
    assert [(row["path"], row["step"], row["problem"]) for row in done.json["checkpoints"]] == [("one/best", 2, None)], done.err


def test_checkpoint_inspect(phalanx: Phalanx, trained: Path) -> None:
    done = phalanx("inspect", trained / "two", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert (found["step"], found["progress"]["samples"], found["seed"], found["ranks"]) == (3, 24, 3, 2)
    assert found["kinds"] == {"model": 140160, "optimizer": 280404}
    state = contents(trained / "two" / "checkpoints" / "step-00000003")
    assert {name: tuple(tensor["shape"]) for name, tensor in found["tensors"].items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    embed = found["tensors"]["model/embed.weight"]
    assert [(box["offset"], box["shape"]) for box in embed["boxes"]] == [([0, 0], [129, 32]), ([129, 0], [128, 32])]
    assert set(found["files"]) == {f"state-0000{rank}-of-00002.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")}
    for text in ("samples seen  24", "tensor 2 (2 ranks)", "model 136.9 KiB", "and 64 more tensors", "[0:129, :]"):
        assert text in done.shown
    assert found["files"]["state-00000-of-00002.json"]["checksum"] in done.shown
    few = phalanx("inspect", trained / "two", "--names", "norm.weight/step")
    assert (
        "optimizer/norm.weight/step" in few.shown
        and "scalar" in few.shown
        and "model/" not in few.shown.partition("tensor ")[2]
    )


def test_checkpoint_inspect_shows_what_another_layout_reads(phalanx: Phalanx, trained: Path) -> None:
    done = phalanx("inspect", trained / "two", "--layout", "pipeline=2,data=2", "--json")
    assert done.code == 0, done.err
    change = done.json["change"]
    assert (change["ranks"], len(change["distinct"]), change["accumulation"]) == (4, 2, 2)
    assert all(row["files"] == 2 for row in change["distinct"])
    assert sum(row["bytes"] for row in change["distinct"]) == sum(done.json["kinds"].values())
    state = contents(trained / "two" / "checkpoints" / "step-00000003")
    cut = {name for name, tensor in state.items() if tensor.ndim > 1}  # each matrix is whole on its stage, and was cut in two
    assert set(change["cut"]) == cut
    assert "On pipeline 2, data 2 (4 ranks)" in done.shown and f"{len(cut)} of 84 tensors are sharded differently" in done.shown
    same = phalanx("inspect", trained / "two", "--layout", trained / "two" / "run.toml", "--json")
    assert same.json["change"]["cut"] == []


def test_checkpoint_verify(phalanx: Phalanx, one: Path) -> None:
    assert "step-00000003: every byte is as saved" in phalanx("verify", "one").shown
    file = values(one / "checkpoints" / "step-00000002")
    flip(file, -7)
    assert phalanx("verify", "one").code == 0
    done = phalanx("verify", "one", "--all", "--json")
    assert (done.code, done.json["valid"]) == (1, False)
    assert [(Path(row["path"]).name, row["valid"]) for row in done.json["checkpoints"]] == [
        ("step-00000003", True), ("step-00000002", False), ("step-00000001", True),
    ]  # fmt: skip
    assert done.json["checkpoints"][1]["damages"][0]["ranges"] == [[0, file.stat().st_size]]
    assert f"{file.name}: it does not have the contents that were saved in bytes 0 to {file.stat().st_size:,}" in done.shown
    assert phalanx("verify", file.parent).code == 1
    assert phalanx("verify", one / "checkpoints" / "step-00000001").code == 0


def test_checkpoint_diff(phalanx: Phalanx, trained: Path, one: Path) -> None:
    steps = [one / "checkpoints" / f"step-0000000{step}" for step in (1, 2, 3)]
    same = phalanx("diff", steps[2], trained / "one", "--json")
    assert (same.code, same.json["same"], same.json["equal"]) == (0, True, 84), same.err
    assert "All 84 tensors are bitwise equal" in same.shown
    done = phalanx("diff", steps[0], steps[1], "--largest", 3, "--json")
    assert done.code == 1 and not done.json["same"]
    assert done.json["metadata"]["step"] == {"a": 1, "b": 2}
    a, b = contents(steps[0]), contents(steps[1])
    apart = {name: (a[name].double() - b[name].double()).abs().max().item() for name in a if not torch.equal(a[name], b[name])}
    assert {row["name"]: row["largest"] for row in done.json["different"]} == apart
    largest = sorted(apart, key=lambda name: (name.endswith("/step"), -apart[name], name))
    assert [row["name"] for row in done.json["different"]] == largest
    assert all(name in done.shown.rpartition("\n{")[0] for name in largest[:3])
    assert f"… and {len(apart) - 3} more (--largest shows them)" in done.shown
    assert phalanx("diff", trained / "one", trained / "two").code == 1  # other sums, so other last digits


def test_resharded_checkpoint_is_equal_and_resumes(phalanx: Phalanx, trained: Path, tmp_path: Path) -> None:
    done = phalanx("reshard", trained / "two", "pipeline=2,shard=2", "out", "--json")
    assert done.code == 0, done.err
    assert (done.json["step"], done.json["ranks"], done.json["layout"]["pipeline"]) == (3, 4, 2)
    assert phalanx("diff", trained / "two", "out").code == 0
    assert phalanx("verify", "out").code == 0
    assert "(4 ranks)" in phalanx("inspect", "out").shown
    run = load(tmp_path / "out" / "run.toml")
    assert (run.layout.pipeline, run.layout.shard, run.layout.data) == (2, 2, 1)
    alone = [tiny_trainer(ALONE, run, folder / "checkpoints") for folder in (trained / "two", tmp_path / "out")]
    for trainer in alone:
        trainer.restore()
        trainer.step()
        trainer.close()
    assert alone[0].progress.step == 4
    assert not differing(*(copied(trainer.tensors()) for trainer in alone))


def test_checkpoint_export_in_every_format(phalanx: Phalanx, trained: Path, tmp_path: Path) -> None:
    state = contents(trained / "two" / "checkpoints" / "step-00000003")
    model = {name.removeprefix("model/"): tensor for name, tensor in state.items() if name.startswith("model/")}
    done = phalanx("export", trained / "two", "plain", "--format", "safetensors", "--optimizer", "--json")
    assert done.code == 0 and done.json["tensors"] == 84, done.err
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.equal(plain[name], tensor) for name, tensor in model.items())
    assert torch.equal(plain["optimizer/norm.weight/exp_avg"], state["optimizer/norm.weight/exp_avg"])
    done = phalanx("export", trained / "two", "model.pt", "--format", "torch", "--dtype", "bf16")
    assert "21 tensors (bfloat16" in done.shown, done.err
    single = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(single[name], tensor.bfloat16()) for name, tensor in model.items())
    done = phalanx("export", trained / "two", "hf", "--json")
    assert done.code == 0 and done.json["family"] == "llama", done.err
    there = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(there["model.embed_tokens.weight"], model["embed.weight"])
    done = phalanx("import", "hf", "imported", "--json")
    assert done.code == 0, done.err
    back = contents(tmp_path / "imported" / "checkpoints" / "step-00000000")
    assert {name.removeprefix("model/") for name in back} == set(model)
    assert all(torch.equal(back[f"model/{name}"], tensor) for name, tensor in model.items())
    assert phalanx("reshard", "imported", "tensor=2", "cut").code == phalanx("diff", "imported", "cut").code == 0


def test_checkpoint_prune(phalanx: Phalanx, one: Path) -> None:
    folder = one / "checkpoints"
    shutil.copytree(folder / "step-00000001", folder / "step-00000009.partial")
    before = sorted(path.name for path in folder.iterdir())
    dry = phalanx("prune", "one", "--keep-last", 1, "--keep-every", 2, "--dry-run", "--json")
    assert dry.json["removed"] == [f"one/checkpoints/{name}" for name in ("step-00000001", "step-00000009.partial")], dry.err
    assert dry.json["kept"] == [f"one/checkpoints/step-0000000{step}" for step in (3, 2)]
    assert sorted(path.name for path in folder.iterdir()) == before
    assert phalanx("prune", "one", "--keep-every", 2).code == 0  # the run file keeps three
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002", "step-00000003"]
    for step in (1, 2):
        (one / "hf" / f"step-0000000{step}").mkdir(parents=True)
        (one / "hf" / f"step-0000000{step}.logits").touch()
    flip(values(folder / "step-00000003"), -1)  # the newest is not the newest valid one
    done = phalanx("prune", "one", "--keep-last", 1, "--json")
    gone = [f"one/{name}" for name in ("checkpoints/step-00000001", "hf/step-00000001", "hf/step-00000001.logits")]
    assert (done.code, done.json["removed"]) == (0, gone)
    assert sorted(path.name for path in (one / "hf").iterdir()) == ["step-00000002", "step-00000002.logits"]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
    assert "damaged, not removed" in done.shown and "step-00000003 is damaged" in done.shown
    directory.verify(folder / "step-00000002")


def test_checkpoint_prune_refuses_running_jobs_and_invalid_checkpoints(phalanx: Phalanx, one: Path) -> None:
    running = RunDir(one)
    assert running.acquire()
    done = phalanx("prune", "one", "--keep-last", 1)
    assert done.code == 2 and "one is in use by a running job" in done.err
    running.release()
    for path in (one / "checkpoints").iterdir():
        (path / "commit.json").unlink()
    done = phalanx("prune", "one", "--keep-last", 1)
    assert done.code == 2 and "Nothing was removed" in done.err
    assert len(list((one / "checkpoints").iterdir())) == 3
    done = phalanx("prune", "one/checkpoints")
    assert done.code == 2 and "one/checkpoints is not a run directory" in done.err


def test_checkpoint_verbs_need_no_run_directory(
    phalanx: Phalanx, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lone = Path(shutil.copytree(trained / "two" / "checkpoints" / "step-00000003", tmp_path / "lone"))
    assert phalanx("inspect", "lone", "--layout", "shard=2").code == 0
    assert phalanx("reshard", "lone", "data=1", "out").code == phalanx("diff", "lone", "out").code == 0
    assert phalanx("export", "lone", "hf").code == 0
    started = tiny_trainer(ALONE, tiny_run("model.from=lone"), tmp_path / "new")
    started.load_initial_weights()
    expected = {name: tensor for name, tensor in contents(lone).items() if name.startswith("model/")}
    got = {name: tensor for name, tensor in copied(started.tensors()).items() if name.startswith("model/")}
    assert not differing(expected, got)


BAD = {
    "no such path": (["list", "nowhere"], "nowhere is not a directory"),
    "a file": (["inspect", "one/run.toml"], "one/run.toml is not a directory"),
    "nothing to verify": (["verify", "empty"], "empty has no checkpoint to load (there is none in empty/checkpoints)"),
    "nothing to compare": (["diff", "one", "empty"], "empty has no checkpoint to load"),
    "unknown degree": (["reshard", "one", "tensr=2", "out"], "did you mean layout.tensor"),
    "impossible degree": (["inspect", "one", "--layout", "tensor=3"], "layout.tensor = 3 does not divide model.heads = 4"),
    "no layout": (["inspect", "one", "--layout", "two"], 'The layout "two" is not understood at two'),
    "degree given twice": (["reshard", "one", "tensor=2,tensor=1", "out"], "gives tensor more than once"),
    "missing run file": (["inspect", "one", "--layout", "none.toml"], "none.toml"),
    "taken place": (["reshard", "one", "tensor=2", "one"], "one already exists"),
    "unknown name": (["inspect", "one", "--names", "nose"], "--names nose: one/checkpoints/step-00000003 has no such tensor"),
    "unknown format": (["export", "one", "out", "--format", "onnx"], "--format onnx: choose hf, peft, safetensors, torch"),
    "unknown dtype": (
        ["export", "one", "out", "--format", "torch", "--dtype", "int8"],
        "--dtype int8: choose fp32, bf16, fp16",
    ),
    "no size": (
        ["export", "one", "out", "--format", "safetensors", "--shard-size", "big"],
        '--shard-size "big" is not an amount',
    ),
    "states for transformers": (
        ["export", "one", "out", "--optimizer"],
        "--optimizer: a Hugging Face folder has no optimizer state",
    ),
    "nothing to keep": (["prune", "one", "--keep-last", "0"], "--keep-last"),
    "not a run": (["prune", "empty"], "empty is not a run directory, because it has no run.toml"),
    "damaged": (["diff", "one/checkpoints/step-00000001", "one"], "step-00000001 is damaged: its file state-"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_checkpoint_verbs_refuse_mistakes(mistake: str, phalanx: Phalanx, one: Path, tmp_path: Path) -> None:
    arguments, said = BAD[mistake]
    (tmp_path / "empty").mkdir()
    flip(values(one / "checkpoints" / "step-00000001"), 10)
    before = sorted(tmp_path.rglob("*"))
    done = phalanx(*arguments)
    assert (done.code, said in done.err) == (2, True), done.err
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoint_command_in_a_process(trained: Path) -> None:
    command = [sys.executable, "-P", "-m", "phalanx", "checkpoint", "list", str(trained / "one"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["checkpoints"]) == 3


def test_checkpoint_verbs_at_a_url(phalanx: Phalanx, trained: Path, one: Path) -> None:
    url = "memory://bucket/checkpoints"
    done = phalanx("reshard", trained / "two", "pipeline=2", url)
    assert done.code == 0, done.err
    assert phalanx("diff", trained / "two", url).code == phalanx("verify", url, "--all").code == 0
    assert phalanx("export", f"{url}/step-00000003", "hf").code == 0
    assert phalanx("inspect", url, "--json").json["ranks"] == 2
    again = phalanx("reshard", trained / "two", "pipeline=2", url)
    assert again.code == 2 and f"{url}/step-00000003 is already there" in again.err
    # A run directory whose checkpoints lie there; and what an interrupted save left, which has a name but no marker.
    text = (one / "run.toml").read_text().replace("[checkpoint]\n", f'[checkpoint]\nurl = "{url}"\n')
    (one / "run.toml").write_text(text)
    (open_location(url) / "step-00000004" / "state-00000-of-00001.safetensors").write([])
    rows = phalanx("list", "one", "--json").json["checkpoints"]
    assert [(row["step"], row["problem"] is None) for row in rows] == [(4, False), (3, True)]
    assert phalanx("prune", "one", "--json").json["removed"] == [f"{url}/step-00000004"]
    assert open_location(url).entries() == ["step-00000003"]
    done = phalanx("list", "memory://bucket/none")
    assert done.code == 2 and "is a URL that there is nothing at" in done.err
    done = phalanx("list", "nostore://bucket/none")
    assert done.code == 2 and "nostore://bucket/none cannot be looked at" in done.err
