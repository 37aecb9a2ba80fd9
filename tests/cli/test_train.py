"""`phalanx train` from outside: its exit codes, what it prints, and the run directory it leaves."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

import pytest
from commands import Ended, FinishedRuns, StepLosses, Workshop

from phalanx._version import __version__
from phalanx.events.records import (
    Evaluated,
    Finished,
    ModelPlaced,
    Restored,
    RunStarted,
    Saved,
    Step,
    StepAccounted,
    WorkerStarted,
)
from phalanx.spec.load import load
from phalanx.spec.model import PRESETS
from phalanx.spec.plan import Plan

ANSI = re.compile(r"\x1b[\[\]()]")
PNG = b"\x89PNG\r\n\x1a\n"


# --- what a run leaves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_prints_json_on_the_last_line(finished: FinishedRuns, ranks: int) -> None:
    run = finished(ranks)
    summary = run.ended.json
    assert (summary["steps"], summary["planned"], summary["finished"], summary["failure"]) == (8, 8, True, None)
    steps = [event for event in run.workshop.events(run.path) if isinstance(event, Step)]
    assert summary["loss"] == steps[-1].loss < summary["first_loss"] == steps[0].loss
    (*_, evaluated) = [event for event in run.workshop.events(run.path) if isinstance(event, Evaluated)]
    assert summary["eval_loss"] == evaluated.loss
    assert summary["tokens"] == sum(step.tokens for step in steps)
    assert summary["tokens_per_second"] > 0
    assert summary["mfu"] is None or 0 < summary["mfu"] < 2
    assert summary["steps_skipped"] == 0
    assert summary["ranks"] == ranks
    assert (run.workshop.path / summary["run_dir"]) == run.path


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_writes_the_run_directory(finished: FinishedRuns, ranks: int) -> None:
    run = finished(ranks)
    settled = ["memory.recompute=none", "memory.offload=none"]  # left out, and nothing has to be traded for memory
    assert load(run.path / "run.toml") == load(run.workshop.run_file, [f"layout.data={ranks}", *settled])
    plan = Plan.from_json((run.path / "plan.json").read_text())
    assert (plan.ranks, plan.micro_batch, plan.accumulation, plan.device, plan.threads) == (ranks, 2, 4 // ranks, "cpu", 1)
    assert {path.name for path in (run.path / "checkpoints").iterdir()} == {"step-00000004", "step-00000008"}
    assert (run.path / "loss.png").read_bytes().startswith(PNG)
    logs = {path.name: path.read_text() for path in (run.path / "logs").iterdir()}
    assert logs == dict.fromkeys(
        ["launch.log", "node-0.log", "replicas-0.log", *(f"rank-{rank}.log" for rank in range(ranks))], ""
    )
    assert not (run.path / "control").exists(), "what supervisors told each other is left behind"


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_writes_events(finished: FinishedRuns, ranks: int) -> None:
    run = finished(ranks)
    events = run.workshop.events(run.path)
    assert isinstance(events[0], RunStarted) and (events[0].ranks, events[0].steps) == (ranks, 8)
    workers = [event for event in events if isinstance(event, WorkerStarted)]
    assert sorted(worker.rank for worker in workers) == list(range(ranks))
    assert len({worker.pid for worker in workers}) == ranks
    assert {(worker.host, worker.device) for worker in workers} == {(os.uname().nodename, "cpu")}
    assert [event.step for event in events if isinstance(event, Step)] == list(range(1, 9))
    assert [event.step for event in events if isinstance(event, Evaluated)] == [4, 8]
    assert [event.step for event in events if isinstance(event, Saved)] == [4, 8]
    assert isinstance(events[-1], Finished) and events[-1].step == 8
    told = [event.time for event in events if not hasattr(event, "rank")]
    assert told == sorted(told)  # ranks write side by side, but one of them tells the run's story
    placed = [event for event in events if isinstance(event, ModelPlaced)]
    assert sorted(event.rank for event in placed) == list(range(ranks))
    assert all(f"summed over {ranks} ranks" in event.applied["data"] for event in placed)
    counted = [event for event in events if isinstance(event, StepAccounted)]
    assert sorted(event.rank for event in counted) == list(range(ranks)) and {event.step for event in counted} == {2}
    # What readers in other languages rely on: one JSON object on each line, its kind under "event".
    lines = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert len(lines) == len(events) and all(isinstance(line["event"], str) and line["time"] > 0 for line in lines)
    (first, *_) = [line for line in lines if line["event"] == "step"]
    assert {"step", "loss", "tokens", "samples", "batch_digest", "learning_rate", "grad_norm", "mfu", "memory"} <= first.keys()


def test_train_prints_plain_lines_without_a_terminal(finished: FinishedRuns) -> None:
    out = finished(2).ended.shown
    assert not ANSI.search(out)
    assert len(re.findall(r"^step [1-8]/8  loss \d", out, re.MULTILINE)) == 8
    assert re.search(r"^step 8  held-out loss \d", out, re.MULTILINE)
    assert "finished 8 steps" in out


def test_one_two_and_four_ranks_have_the_same_losses(finished: FinishedRuns, losses: StepLosses) -> None:
    one, two, four = (losses(finished(n).workshop.events(finished(n).path)) for n in (1, 2, 4))
    assert len(one) == 8
    for other in (two, four):
        for (step, loss, digest), (step_other, loss_other, digest_other) in zip(one, other, strict=True):
            assert (step, digest) == (step_other, digest_other)
            assert loss_other == pytest.approx(loss, rel=1e-5, abs=0), f"step {step} is not within 1e-5 of one rank's"
        assert other == one, "within 1e-5, but not the same bits: micro-batches are no longer added in one order"
    assert finished(1).ended.json["eval_loss"] == finished(4).ended.json["eval_loss"]


# --- on a terminal --------------------------------------------------------------------------------------------------


def on_a_terminal(workshop: Workshop, *arguments: str) -> tuple[int, str, bool]:
    """Run a command on a pseudo-terminal: exit code, all it wrote, and whether the terminal is as it was before."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    before = termios.tcgetattr(slave)
    env = workshop.env({"TERM": "xterm-256color"})
    process = subprocess.Popen(
        workshop.command(*arguments), cwd=workshop.path, env=env, stdin=slave, stdout=slave, stderr=slave
    )
    written = b""
    os.set_blocking(master, False)
    while True:
        ended = process.poll() is not None
        try:
            while block := os.read(master, 65536):
                written += block
        except BlockingIOError:
            pass
        if ended:
            break
        time.sleep(0.02)
    same = termios.tcgetattr(slave) == before
    os.close(slave)
    os.close(master)
    return process.returncode, written.decode(), same


def test_train_shows_a_live_display_on_a_terminal(workshop: Workshop) -> None:
    code, text, same = on_a_terminal(workshop, "train", "tiny.toml", "layout.data=2")
    assert code == 0, text
    assert same, "the terminal's settings were changed"
    assert "step 8/8" in text and "finished 8 steps" in text
    assert "Traceback" not in text
    hidden, shown = text.rfind("\x1b[?25l"), text.rfind("\x1b[?25h")
    assert 0 <= hidden < shown, "the cursor was hidden and not shown again"
    assert not re.search(r"^step 3/8  loss", text, re.MULTILINE), "plain step lines on a terminal"


# --- the same run again ---------------------------------------------------------------------------------------------


def test_train_numbers_run_directories(workshop: Workshop, finished: FinishedRuns) -> None:
    """A finished run and a different one are left alone; one that was killed is, where --fresh says so."""
    runs = workshop.path / "runs"
    for name, seed in (("tiny", 0), ("tiny-2", 5)):
        shutil.copytree(finished(1).path, runs / name)
        text = (runs / name / "run.toml").read_text()
        (runs / name / "run.toml").write_text(text.replace("steps = 8", "steps = 5000").replace("seed = 0", f"seed = {seed}"))
    lines = (runs / "tiny-2" / "events.jsonl").read_text().splitlines(keepends=True)
    (runs / "tiny-2" / "events.jsonl").write_text("".join(lines[:-1]))  # all but that it has finished
    killed = workshop.start("train", "tiny.toml", "train.steps=5000")
    killed.until(workshop.reached("runs/tiny-3", 3), "step 3 in a directory of its own")
    killed.process.kill()
    killed.wait()
    assert workshop.gone()
    before = {path: path.lstat().st_mtime_ns for path in runs.rglob("*")}
    fresh = workshop.start("train", "tiny.toml", "train.steps=5000", "--fresh")
    fresh.until(workshop.reached("runs/tiny-4", 3), "step 3 of the fresh run")
    fresh.process.terminate()
    ended = fresh.wait()
    assert ended.code == 75
    assert "--run-dir runs/tiny-4" in ended.shown, "the same command would not go on with this run, as it says --fresh"
    assert not [event for event in workshop.events("runs/tiny-4") if isinstance(event, Restored)]
    assert {path: path.lstat().st_mtime_ns for path in before} == before, "a run that is none of its business was touched"


def test_finished_run_is_reported_and_can_be_extended(finished: FinishedRuns, losses: StepLosses) -> None:
    workshop = finished(1).workshop
    again = workshop.copy("ranks-1", "again")
    ended = workshop.train("--run-dir", again)
    assert "finished 8 steps" in ended.shown and ended.json["loss"] == finished(1).ended.json["loss"]
    assert losses(workshop.events(again)) == losses(workshop.events("ranks-1")), "it was trained again"
    longer = workshop.train("--run-dir", again, "train.steps=9")
    assert longer.json["steps"] == 9
    assert [event.step for event in workshop.events(again) if isinstance(event, Restored)] == [8, 8]
    assert [event.step for event in workshop.events(again) if isinstance(event, Step)] == list(range(1, 10))


def refused(ended: Ended, *parts: str) -> None:
    assert ended.code == 2, ended
    assert "Traceback" not in ended.shown + ended.err
    problems = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert any(all(part in line for part in parts) for line in problems), ended


def test_resume_with_other_settings_is_refused(finished: FinishedRuns) -> None:
    workshop = finished(1).workshop
    files = sorted((finished(1).path).rglob("*"))
    ended = workshop.run("train", "tiny.toml", "--run-dir", "ranks-1", "train.seed=7", "optimizer.beta1=0.8")
    refused(ended, "ranks-1", "train.seed: 0 → 7", "optimizer.beta1: 0.9 → 0.8")
    refused(workshop.run("train", "tiny.toml", "--run-dir", "ranks-1", "--fresh"), "ranks-1", "--fresh")
    assert sorted((finished(1).path).rglob("*")) == files
    assert load(finished(1).path / "run.toml").train.seed == 0


def test_resume_with_changed_text_is_refused(workshop: Workshop, finished: FinishedRuns) -> None:
    shutil.copytree(finished(1).path, workshop.path / "run")
    with (workshop.path / "text" / "1.txt").open("a") as file:
        file.write("one more line\n")
    refused(workshop.run("train", "tiny.toml", "--run-dir", "run", "train.steps=9"), "data.source", "step-00000008", "--fresh")
    assert load(workshop.path / "run" / "run.toml").steps == 8
    (workshop.path / "text" / "1.txt").rename(workshop.path / "text" / "3.txt")
    refused(workshop.run("train", "tiny.toml", "--run-dir", "run", "train.steps=9"), "data.source")


def test_run_directory_in_use_is_refused(workshop: Workshop) -> None:
    first = workshop.start("train", "tiny.toml", "train.steps=5000", "--run-dir", "run")
    first.until(workshop.reached("run", 1), "step 1")
    refused(workshop.run("train", "tiny.toml", "train.steps=5000", "--run-dir", "run"), "--run-dir run", "in use")
    assert first.process.poll() is None
    first.process.terminate()
    assert first.wait().code == 75


# --- the rest of the command ----------------------------------------------------------------------------------------


def test_train_writes_tensorboard_files(workshop: Workshop) -> None:
    workshop.train("watch.tensorboard=true", "--run-dir", "run")
    (file,) = (workshop.path / "run" / "tensorboard").glob("events.out.tfevents.*")
    data = file.read_bytes()
    for name in (b"train/loss", b"eval/loss", b"speed/tokens_per_second"):
        assert name in data


def test_train_ignores_modules_of_the_working_directory(workshop: Workshop) -> None:
    """`python -m phalanx` trains, and files of the working directory are not taken for Python's own modules by workers."""
    for name in ("queue", "socket", "torch", "tempfile"):
        (workshop.path / f"{name}.py").write_text("raise RuntimeError('a file of the working directory was imported')\n")
    program = [sys.executable, "-P", "-m", "phalanx"]
    ended = workshop.run("train", "tiny.toml", "train.steps=2", "--json", program=program)
    assert ended.code == 0, ended
    assert ended.json["steps"] == 2


def test_train_survives_a_closed_output(workshop: Workshop) -> None:
    """As in `phalanx schema | head -1`: nothing is said about it."""
    env = workshop.env()
    with subprocess.Popen(
        workshop.command("schema"), cwd=workshop.path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


Quick = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Quick:
    def run(*arguments: str, program: str = "phalanx") -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name(program)), *arguments]
        folder = tmp_path_factory.mktemp("quick")
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=240)
        assert list(folder.iterdir()) == []
        return done

    return run


def test_version_command(quick: Quick) -> None:
    done = quick("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"phalanx {__version__}\n", "")
    assert quick("-m", "phalanx", "--version", program="python").stdout == done.stdout


def test_schema_command(quick: Quick) -> None:
    done = quick("schema")
    assert (done.returncode, done.stderr) == (0, "")
    schema = json.loads(done.stdout)
    assert schema["properties"]["train"]["properties"]["steps"]
    assert json.loads(quick("schema", "--json").stdout) == schema


def test_models_command(quick: Quick) -> None:
    done = quick("models", "--json")
    assert done.returncode == 0, done.stderr
    models = {row["name"]: row for row in json.loads(done.stdout)["models"]}
    assert models.keys() == PRESETS.keys()
    assert models["llama3-8b"]["parameters"] == 8_030_261_248
    assert "llama3-8b" in done.stderr, "the table is missing"
    plain = quick("models")
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, done.stderr, "")


def test_doctor_command(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('a file of the working directory was imported')\n")
    command = [str(Path(sys.executable).with_name("phalanx")), "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["problems"] else 0)
    assert "Traceback" not in done.stderr and done.stderr.startswith(f"phalanx    {__version__}")
    assert report["phalanx"] == __version__
    assert report["torch"]["gloo"] is True and report["machine"]["cores"] >= 1


def test_help_names_every_verb(quick: Quick) -> None:
    done = quick("--help")
    assert done.returncode == 0
    for verb in ("train", "generate", "models", "doctor", "schema"):
        assert re.search(rf"\b{verb}\b", done.stdout)
