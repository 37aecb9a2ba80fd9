"""What a person gets wrong: every mistake is told with its key or path, with exit code 2, and nothing is begun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from commands import FinishedRuns, Workshop

from phalanx.cli.main import main
from phalanx.watch.sinks import sink

Usage = namedtuple("Usage", "total used free")
Refuse = Callable[..., list[str]]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and directory below, with what would change if one were written."""
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


@pytest.fixture
def refuse(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command in this process, see it refused as it should be, and return the lines that say why."""
    monkeypatch.chdir(workshop.path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def check(*arguments: object, parts: tuple[str, ...]) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["phalanx", *map(str, arguments)])
        children, before = set(psutil.Process().children()), snapshot(workshop.path)
        with pytest.raises(SystemExit) as leaving:
            main()
        out, err = capfd.readouterr()
        assert leaving.value.code == 2, out + err
        assert "Traceback" not in out + err
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        if not lines:  # typer's own words about the command line
            assert "╭─ Error ─" in err, err
            lines = err.splitlines()
        for part in parts:
            assert any(part in line for line in lines), f"{part!r} is not in {err}"
        assert snapshot(workshop.path) == before, "something was written"
        assert set(psutil.Process().children()) == children
        return lines

    return check


# --- the command line -----------------------------------------------------------------------------------------------

COMMANDS = {
    "unknown verb": (["trian", "tiny.toml"], ("'trian'", "'train'")),
    "no run file": (["train"], ("RUN.toml",)),
    "unknown option": (["train", "tiny.toml", "--bogus"], ("--bogus",)),
    "option without value": (["train", "tiny.toml", "--run-dir"], ("--run-dir",)),
    "argument that no verb takes": (["models", "llama"], ("llama",)),
    "missing run file": (["train", "tinny.toml"], ("tinny.toml", "tiny.toml")),
    "run file in a missing folder": (["train", "no/where.toml"], ("no/where.toml",)),
    "run file is a folder": (["train", "text"], ("text", "folder")),
    "override without value": (["train", "tiny.toml", "train.steps"], ("train.steps", "key=value")),
    "override with nothing after =": (["train", "tiny.toml", "train.steps="], ("train.steps",)),
    "override with nothing before =": (["train", "tiny.toml", "=5"], ("=5", "key=value")),
    "override that is cut off": (["train", "tiny.toml", 'data.paths=["text"'], ("data.paths", "close its brackets")),
    "override without table": (["train", "tiny.toml", "steps=5"], ("steps", "train.steps")),
    "override of a table": (["train", "tiny.toml", "train=5"], ("train", "table")),
    "no checkpoint": (["generate"], ("CKPT",)),
    "no tokens": (["generate", "text", "--tokens", "0"], ("--tokens",)),
    "negative temperature": (["generate", "text", "x", "--temperature", "-1"], ("--temperature",)),
    "impossible probability": (["generate", "text", "x", "--top-p", "2"], ("--top-p",)),
    "checkpoint that is not there": (["generate", "no/where"], ("no/where",)),
    "checkpoint that is a file": (["generate", "tiny.toml"], ("tiny.toml", "not a directory")),
    "folder without checkpoints": (["generate", "text"], ("text", "no checkpoint")),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_invalid_command_lines_are_refused(refuse: Refuse, case: str) -> None:
    arguments, parts = COMMANDS[case]
    refuse(*arguments, parts=parts)


# --- the run file ---------------------------------------------------------------------------------------------------

KEYS = {
    "unknown key": (["train.stepz=5"], ("train.stepz", "train.steps")),
    "unknown table": (["trane.steps=5"], ("trane", "train")),
    "word for a number": (["train.steps=many"], ("train.steps", "many", "integer")),
    "fraction for an integer": (["train.steps=1.5"], ("train.steps = 1.5",)),
    "number for a switch": (["data.shuffle=3"], ("data.shuffle", "true or false")),
    "number for a list of paths": (["data.paths=true"], ("data.paths",)),
    "negative steps": (["train.steps=-1"], ("train.steps = -1",)),
    "no steps": (["train.steps=0"], ("train.steps = 0",)),
    "number that is not one": (["train.clip=nan"], ("train.clip",)),
    "endless learning rate": (["optimizer.learning_rate=inf"], ("optimizer.learning_rate", "finite")),
    "more than half held out": (["data.eval_fraction=0.9"], ("data.eval_fraction",)),
    "sequence of one token": (["train.sequence_length=1"], ("train.sequence_length",)),
    "unknown choice": (["optimizer.schedule=cosin"], ("optimizer.schedule", '"cosine"')),
    "unknown device": (["cluster.device=tpu"], ("cluster.device", '"tpu"')),
    "unknown preset": (["model.preset=lama3-8b"], ("model.preset", "llama3-8b")),
    "batch by ranks": (["layout.data=3"], ("train.batch = 8", "layout.data")),
    "micro-batch by batch": (["train.micro_batch=3"], ("train.micro_batch = 3",)),
    "micro-batch by a rank's share": (["layout.data=8", "train.micro_batch=2"], ("train.micro_batch = 2",)),
    "heads by key/value heads": (["model.heads=4", "model.kv_heads=3"], ("model.kv_heads = 3", "model.heads = 4")),
    "width by heads": (["model.heads=5", "model.kv_heads=5"], ("model.heads = 5", "model.dim = 32")),
    "odd heads": (["model.head_dim=7"], ("model.head_dim = 7",)),
    "vocabulary too small": (["model.vocab=100"], ("model.vocab = 100", "257")),
    "steps and tokens": (["train.tokens=1000"], ("train.steps = 8", "train.tokens = 1000")),
    "batch and tokens of it": (["train.batch_tokens=64"], ("train.batch = 8", "train.batch_tokens = 64")),
    "positions beyond the table": (["model.positions=learned", "model.context=16"], ("train.sequence_length = 32", "model.context")),
    "decay of another schedule": (["optimizer.decay_steps=2"], ("optimizer.decay_steps", "wsd")),
    "evaluation of nothing": (["data.eval_fraction=0"], ("train.eval_every", "data.eval_fraction")),
    "no GPU": (["cluster.device=cuda"], ("cluster.device", "no GPU")),
    "more ranks than cores carry": (["train.batch=200000", "layout.data=100000"], ("100000", "layout.data")),
    "more ranks than are allowed": (["cluster.cpu_ranks=2000"], ("cluster.cpu_ranks = 2000", "1024")),
    "model too big": (["model.dim=131072", "model.layers=100"], ("GiB", "use a smaller model")),
    "unknown key of a mixture": (["data.mix.wiki.wieght=1"], ("data.mix.wiki.wieght", "data.mix.wiki.weight")),
    "source beside a mixture": (["data.mix.code.source=stdlib"], ("data.paths", "[data.mix.code]")),
    "missing tokenizer": (["data.tokenizer=gone.json"], ("data.tokenizer", "gone.json", "does not exist")),
    "folder without a tokenizer": (["data.tokenizer=text"], ("data.tokenizer", "tokenizer.json")),
    "text for a tokenizer": (["data.tokenizer=text/0.txt"], ("data.tokenizer", "not JSON")),
    "missing weights": (["model.from=gone"], ("model.from", '"gone"', "does not exist")),
    "folder without weights": (["model.from=text"], ("model.from", '"text"', "config.json")),
    "preset and weights": (["model.from=text", "model.preset=tiny-dense"], ("model.from", "model.preset", "remove one")),
    "class without a module": (["model.module=MyModel"], ("model.module", "package.module:Class")),
    "options of no module": (["model.options.width=3"], ("model.options.width", "model.module")),
    "more experts than there are": (["model.moe={experts=2, active=3, ffn=8}"], ("model.moe.active = 3", "at most 2")),
    "experts without a width": (["model.moe={experts=2, active=1}"], ("model.moe.ffn is missing",)),
    "heads that ranks cannot share": (["layout.tensor=5"], ("layout.tensor = 5", "model.heads", "set it to")),
    "more stages than layers": (["layout.pipeline=9"], ("layout.pipeline = 9", "model.layers")),
    "a schedule of no pipeline": (["layout.schedule=zbv"], ('layout.schedule = "zbv"', "layout.pipeline = 1")),
    "experts of a dense model": (["layout.data=2", "layout.expert=2"], ("layout.expert = 2", "[model.moe]")),
    "slices without ranks": (["layout.sequence=true"], ("layout.sequence = true", "layout.tensor = 1")),
    "states of Muon elsewhere": (["memory.offload=cpu", "optimizer.name=muon"], ("memory.offload", "optimizer.name", "adamw")),
    "nothing but spares": (["resilience.spares=2", "cluster.nodes=2"], ("resilience.spares = 2", "cluster.nodes = 2", "at most 1")),
    "more nodes than ranks": (["cluster.nodes=3"], ("cluster.nodes = 3", "the layout has 1 rank", "at most 1", "spares = 2")),
    "more nodes than ranks and spares": (
        ["cluster.nodes=5", "resilience.spares=1", "layout.data=2"], ("cluster.nodes = 5 - resilience.spares = 1", "at most 3"),
    ),
    "someone else's address": (["cluster.bind=192.0.2.7"], ('cluster.bind = "192.0.2.7"', "not an address of this machine", "127.0.0.1")),
    "every interface": (["cluster.bind=0.0.0.0"], ('cluster.bind = "0.0.0.0"', "every interface", "127.0.0.1")),
    "every interface of another kind": (["cluster.bind=::"], ('cluster.bind = "::"', "every interface", "127.0.0.1")),
    "no address": (["cluster.bind=nowhere0"], ('cluster.bind = "nowhere0"', "neither an IP address nor an interface", "127.0.0.1")),
    "no ports": (["cluster.ports=40000"], ('cluster.ports = "40000"', '"40000-40100"')),
    "ports of the system": (["cluster.ports=80-90"], ('cluster.ports = "80-90"', "1024", "65535")),
    "ports backwards": (["cluster.ports=40100-40000"], ('cluster.ports = "40100-40000"', "rise")),
    "too few ports": (
        ["cluster.ports=40000-40002", "cluster.nodes=2", "layout.data=2"],
        ('cluster.ports = "40000-40002" has 3 ports', "needs 6 for cluster.nodes = 2", '"40000-40005"'),
    ),
    "no patience": (["resilience.heartbeat=0"], ("resilience.heartbeat = 0", "greater than 0")),
    "going back too late": (["resilience.rollback_after=9", "resilience.max_skipped=2"], ("rollback_after = 9", "resilience.max_skipped = 2")),
    "two mistakes": (["train.steps=-1", "model.vocab=100"], ("train.steps = -1", "model.vocab = 100")),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_invalid_keys_are_refused(refuse: Refuse, case: str) -> None:
    overrides, parts = KEYS[case]
    refuse("train", "tiny.toml", *overrides, parts=parts)


FILES = {
    "broken syntax": (b"[train\nsteps = 5\n", ("tiny.toml:1",)),
    "text without quotes": (b"[data]\nsource = stdlib\n", ("tiny.toml:2", "quotes")),
    "key given twice": (b"[train]\nsteps = 5\nsteps = 6\n", ("tiny.toml:3", "earlier line")),
    "not UTF-8": (b"[train]\nsteps = 5 # \xff\n", ("tiny.toml:2", "UTF-8")),
    "empty": (b"", ("train.batch", "train.steps")),
    "unknown key on its line": (b"[train]\nbatch = 8\nsteps = 5\n\n[model]\ndims = 32\n", ("tiny.toml:6", "model.dims", "model.dim")),
    "binary": (bytes(range(256)) * 16, ("tiny.toml",)),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_invalid_run_files_are_refused(refuse: Refuse, workshop: Workshop, case: str) -> None:
    content, parts = FILES[case]
    workshop.run_file.write_bytes(content)
    refuse("train", "tiny.toml", parts=parts)


def test_problems_are_printed_as_json(refuse: Refuse, capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "train", "tiny.toml", "train.steps=-1", "model.vocab=100", "--json"],
            capture_output=True,
            text=True,
        )
    problems = json.loads(done.stdout)["error"]
    assert [line for line in done.stderr.splitlines()] == [f"error: {problem}" for problem in problems]
    assert len(problems) == 2


# --- the text -------------------------------------------------------------------------------------------------------


def empty_file(folder: Path) -> None:
    (folder / "empty.txt").touch()


def short_file(folder: Path) -> None:
    (folder / "short.txt").write_text("too short")


def one_window(folder: Path) -> None:
    (folder / "one.txt").write_text("x" * 60)  # a window needs 33 tokens, and the held-out one as many


def empty_folder(folder: Path) -> None:
    (folder / "nothing").mkdir()


def broken_link(folder: Path) -> None:
    (folder / "link.txt").symlink_to("gone.txt")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


TEXTS: dict[str, tuple[Callable[[Path], None] | None, list[str], tuple[str, ...]]] = {
    "missing path": (None, ["data.paths=txet"], ("data.paths", "txet")),
    "one of two is missing": (None, ['data.paths=["text", "more"]'], ("data.paths", "more")),
    "pattern without matches": (None, ["data.paths=text/*.rst"], ("data.paths", "text/*.rst")),
    "empty file": (empty_file, ["data.paths=empty.txt"], ("data.paths", "empty.txt")),
    "empty folder": (empty_folder, ["data.paths=nothing"], ("data.paths", "nothing")),
    "shorter than a window": (short_file, ["data.paths=short.txt"], ("train.sequence_length = 32",)),
    "link to nothing": (broken_link, ["data.paths=link.txt"], ("data.paths", "link.txt")),
    "neither file nor folder": (pipe, ["data.paths=pipe"], ("data.paths", "pipe")),
    "field of plain text": (None, ["data.source=text", "data.field=body"], ("data.field", '"jsonl"')),
    "no paths": (None, ["data.paths=[]"], ("data.paths",)),
    "paths that nobody reads": (None, ["data.source=stdlib"], ("data.paths", "stdlib")),
    "no documents": (None, ["data.source=memory", "data.paths=[]"], ("data.documents",)),
    "empty documents": (None, ["data.source=memory", "data.paths=[]", 'data.documents=["", ""]'], ("data.documents",)),
    "nothing left to hold out": (one_window, ["data.paths=one.txt", "data.eval_fraction=0.001"], ("data.eval_fraction",)),
}


@pytest.mark.parametrize("case", TEXTS)
def test_invalid_text_sources_are_refused(refuse: Refuse, workshop: Workshop, case: str) -> None:
    prepare_folder, overrides, parts = TEXTS[case]
    if prepare_folder is not None:
        prepare_folder(workshop.path)
    refuse("train", "tiny.toml", *overrides, parts=parts)


# --- where to write -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["tiny.toml/below/a/file", "/proc/phalanx-run", "/dev/null/run"])
def test_run_directory_that_cannot_be_made_is_refused(refuse: Refuse, path: str) -> None:
    refuse("train", "tiny.toml", "--run-dir", path, parts=(path, "--run-dir"))


def test_run_directory_that_is_a_file_is_refused(refuse: Refuse, workshop: Workshop) -> None:
    refuse("train", "tiny.toml", "--run-dir", "tiny.toml", parts=("--run-dir tiny.toml", "file"))
    refuse("train", "tiny.toml", "--run-dir", "text/0.txt", parts=("text/0.txt is inside text (data.paths)", "--run-dir"))
    (workshop.path / "runs").write_text("not a directory")
    refuse("train", "tiny.toml", parts=("runs/tiny", "--run-dir"))


def test_run_directory_with_other_files_is_refused(refuse: Refuse, workshop: Workshop) -> None:
    (workshop.path / "old").mkdir()
    (workshop.path / "old" / "run.toml").write_text("[train]\nsteps =")
    refuse("train", "tiny.toml", "--run-dir", "old", parts=("old/run.toml:2",))


def test_full_disk_is_reported_before_training(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(2**30, 2**30 - 2**20, 2**20))
    refuse("train", "tiny.toml", parts=("runs/tiny", "1 MiB free", "--run-dir"))
    refuse("train", "tiny.toml", "--run-dir", "deep/down/run", parts=("deep/down/run", "1 MiB free"))


@pytest.fixture
def small_disk(tmp_path: Path, mount_disk: Callable[[Path, str], Path]) -> Path:
    return mount_disk(tmp_path / "small", "4m")


def test_full_disk_of_a_real_mount_is_reported(refuse: Refuse, small_disk: Path) -> None:
    refuse("train", "tiny.toml", "--run-dir", small_disk / "run", parts=(str(small_disk / "run"), "4 MiB free"))
    assert list(small_disk.iterdir()) == []


def test_missing_package_is_reported_by_the_command(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "find_spec", lambda name: None)
    refuse("train", "tiny.toml", "watch.wandb=true", parts=("watch.wandb", "phalanx[wandb]"))
    lines = refuse("train", "tiny.toml", "watch.tensorboard=true", "layout.data=3", parts=("layout.data",))
    assert len(lines) == 1, "the run file's own problems come first"
    refuse("train", "tiny.toml", "watch.tensorboard=true", "cluster.cpu_ranks=5", parts=("watch.tensorboard", "cpu_ranks"))


def test_settings_survive_a_crash_while_they_are_written(
    workshop: Workshop, finished: FinishedRuns, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished(1).path, workshop.path / "run")
    before = (workshop.path / "run" / "run.toml").read_bytes()
    monkeypatch.chdir(workshop.path)

    def torn(path: Path, text: str, encoding: str | None = None) -> None:
        path.write_bytes(text.encode()[:10])
        raise MemoryError

    monkeypatch.setattr(Path, "write_text", torn)
    monkeypatch.setattr(sys, "argv", ["phalanx", "train", "tiny.toml", "--run-dir", "run", "train.steps=9"])
    with pytest.raises(MemoryError):
        main()
    assert (workshop.path / "run" / "run.toml").read_bytes() == before


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(workshop: Workshop, finished: FinishedRuns) -> Path:
    copied = workshop.path / "run"
    shutil.copytree(finished(1).path, copied)
    return copied


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoints_are_refused(refuse: Refuse, run: Path) -> None:
    for checkpoint in (run / "checkpoints").iterdir():
        flip(next(checkpoint.glob("*.safetensors")))
    refuse("generate", "run", parts=("run has no checkpoint", "step-00000008", "step-00000004", ".safetensors"))
    refuse("generate", "run/checkpoints/step-00000008", parts=("step-00000008 is damaged", ".safetensors"))
    (run / "checkpoints" / "step-00000008" / "commit.json").unlink()
    refuse("generate", "run/checkpoints/step-00000008", parts=("step-00000008 is damaged", "commit.json"))


def test_checkpoint_with_missing_files_is_refused(refuse: Refuse, run: Path) -> None:
    newest = run / "checkpoints" / "step-00000008"
    next(newest.glob("*.safetensors")).unlink()
    refuse("generate", newest.relative_to(run.parent), parts=("step-00000008", "missing"))
    (newest / "commit.json").write_text("{")
    refuse("generate", newest.relative_to(run.parent), parts=("step-00000008", "commit.json"))


def test_checkpoint_with_a_broken_run_file_is_refused(refuse: Refuse, run: Path) -> None:
    (run / "run.toml").write_text((run / "run.toml").read_text().replace("dim = 32", "dim = x"))
    refuse("generate", "run", parts=("run/run.toml", "dim"))


def test_invalid_device_for_generate_is_refused(refuse: Refuse, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refuse("generate", "run", "--device", "cuda", parts=("--device cuda", "torch sees no such device"))
    refuse("generate", "run", "--device", "tpu", parts=("--device tpu", "cpu or cuda"))


# --- the real command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "tiny.toml", "train.steps=-1"], (b"train.steps = -1",)),
        (["train", "tinny.toml"], (b"tinny.toml",)),
        (["train", "tiny.toml", b"data.paths=\xff.txt"], (b"data.paths", b"Unicode")),
        (["train", "tiny.toml", "--run-dir", "tiny.toml"], (b"--run-dir tiny.toml",)),
        (["generate", "text", "x"], (b"text has no checkpoint",)),
    ],
)
def test_invalid_arguments_of_the_real_command(
    workshop: Workshop, arguments: list[str | bytes], parts: tuple[bytes, ...]
) -> None:
    before = snapshot(workshop.path)
    command = [str(Path(sys.executable).with_name("phalanx")), *arguments]
    done = subprocess.run(command, cwd=workshop.path, env=workshop.env({"CUDA_VISIBLE_DEVICES": ""}), capture_output=True)
    assert done.returncode == 2, done
    assert b"Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(b"error: ")]
    assert all(part in line for part in parts)
    assert snapshot(workshop.path) == before
    assert workshop.gone(within=0)
