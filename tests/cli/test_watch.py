"""`phalanx status`, `logs` and `stop` of a run that another process has started."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from commands import InProcess, Workshop

from phalanx.events.log import EventLog
from phalanx.events.records import Recovered, RunStarted
from phalanx.events.run_logs import LogReader, note_size
from phalanx.events.rundir import RunDir
from phalanx.spec.layout import Layout


def test_a_run_is_seen_and_stopped_from_elsewhere(workshop: Workshop) -> None:
    command = workshop.start("train", "tiny.toml", "train.steps=5000", "layout.data=2", "--run-dir", "run")
    command.until(workshop.reached("run", 5), "step 5")
    status = workshop.run("status", "run", "--json").json
    assert (status["state"], status["steps"], status["ranks"]) == ("running", 5000, 2) and status["step"] >= 5
    assert list(status["hosts"].values()) == [[0, 1]]
    stopped = workshop.run("stop", "run")
    assert stopped.code == 0 and "run: stopped" in stopped.shown, stopped
    assert command.wait().code == 75
    status = workshop.run("status", "run", "--json").json
    assert status["state"] == "stopped" and status["checkpoint"].endswith(f"step-{status['step']:08d}")
    refused = workshop.run("stop", "run")
    assert refused.code == 2 and "run is not running: there is nothing to stop." in refused.err


def test_a_killed_launcher_leaves_nothing_to_stop(workshop: Workshop) -> None:
    """Its launch file stays behind; `status`, `stop`, `logs --follow` and `runs` agree that nothing runs."""
    command = workshop.start("train", "tiny.toml", "train.steps=5000", "--run-dir", "runs/killed")
    command.until(workshop.reached("runs/killed", 2), "step 2")
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL and workshop.gone()
    assert (workshop.path / "runs/killed/control/launch").exists()
    stopped = workshop.run("stop", "runs/killed")
    assert stopped.code == 2 and "runs/killed is not running: there is nothing to stop." in stopped.err, stopped
    assert not (workshop.path / "runs/killed/control/stop").exists()
    assert workshop.run("status", "runs/killed", "--json").json["state"] == "interrupted"
    assert [run["state"] for run in workshop.run("runs", "--json").json["runs"]] == ["interrupted"]
    assert workshop.run("logs", "runs/killed", "--follow").code == 0


def test_stop_names_a_process_that_takes_no_requests(workshop: Workshop, here: InProcess) -> None:
    """As under torchrun: the run directory is locked, and no launcher of Phalanx reads requests. `status` calls it running, too."""
    rundir = RunDir(workshop.path / "run")
    rundir.create()
    sizes = {"ranks": 1, "steps": 9, "parameters": 1, "micro_batch": 1, "accumulation": 1}
    log = EventLog(rundir.events_file)
    log.emit(RunStarted(version="0", device="cpu", layout=asdict(Layout(data=1)), compute="fp32", **sizes))
    log.close()
    assert rundir.acquire()
    try:
        stopped = here("stop", rundir.path)
        assert stopped.code == 2 and "takes no requests" in stopped.err and "SIGTERM" in stopped.err
        assert here("status", rundir.path, "--json").json["state"] == "running"
    finally:
        rundir.release()
    assert here("status", rundir.path, "--json").json["state"] == "interrupted"
    assert "is not running" in here("stop", rundir.path).err


def test_a_run_that_outlives_the_host_with_its_lock_is_running(tmp_path: Path) -> None:
    """Started on each host by an engine: its controller touches its file, until the run notes its end."""
    rundir = RunDir(tmp_path)
    rundir.create()
    rundir.launch_id = "slurm-1"
    rundir.settings_file.write_text("{}")
    (node := rundir.control / "node-00001.json").write_text("{}")
    assert not rundir.in_use and rundir.is_running
    os.utime(node, (time.time() - 3600,) * 2)
    assert not rundir.is_running
    node.touch()
    rundir.exit_file.write_text("75\n")
    assert not rundir.is_running


@pytest.mark.slow
def test_a_run_on_two_hosts_is_stopped_after_the_loss_of_the_first(workshop: Workshop) -> None:
    """The lock is gone with the first host, but the run goes on: `status` calls it running, and `stop` reaches it."""
    settings = ("train.steps=5000", "layout.data=2", "checkpoint.every=50")
    place = ("--nodes", 2, "--launch", "test-1", "--bind", "127.0.0.1")
    first, second = (
        workshop.start("node", "run", *settings, "--run-file", "tiny.toml", "--node", number, *place) for number in (0, 1)
    )
    second.until(workshop.reached("run", 5), "step 5")
    assert workshop.run("status", "run", "--json").json["state"] == "running"
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second.until(lambda: any(isinstance(event, Recovered) for event in workshop.events("run")), "the recovery")
    rundir = RunDir(workshop.path / "run")
    assert not rundir.in_use and rundir.is_running
    assert workshop.run("status", "run", "--json").json["state"] == "running"
    stopped = workshop.run("stop", "run")
    assert stopped.code == 0 and "run: stopped" in stopped.shown, stopped
    assert second.wait().code == 75
    assert "is not running" in workshop.run("stop", "run").err


def test_logs_name_the_rank_and_show_failures_first(workshop: Workshop) -> None:
    ended = workshop.run(
        "train", "tiny.toml", "layout.data=2", "resilience.restarts=0", "--run-dir", "run", "--chaos", "kill rank=1 step=3"
    )
    assert ended.code == 1
    for rank in range(2):
        with (workshop.path / f"run/logs/rank-{rank}.log").open("a") as file:
            file.write(f"a line of rank {rank}\n")
    shown = workshop.run("logs", "run").shown
    failure, zero, one = (
        shown.index(words) for words in ("killed by SIGKILL", "[rank 0] a line of rank 0", "[rank 1] a line of")
    )
    assert failure < zero and failure < one
    assert "[rank 0]" not in workshop.run("logs", "run", "--rank", "1").shown
    assert workshop.run("logs", "run", "--grep", "of rank [0]").shown.count("a line of") == 1
    refused = workshop.run("logs", "run", "--grep", "[")
    assert refused.code == 2 and "--grep [ is not a regular expression" in refused.err
    nowhere = workshop.run("logs", "elsewhere")
    assert nowhere.code == 2 and "elsewhere holds no run: name a run directory" in nowhere.err


def test_lines_of_all_logs_are_in_the_order_of_time(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    reader = LogReader(rundir)
    first, second = rundir.rank_log(0), rundir.rank_log(1)
    first.write_text("a\nc\n")
    second.write_text("b\nunfinished")
    for log, size, when in ((first, 2, 1.0), (second, 2, 2.0), (first, 4, 3.0), (second, 12, 4.0)):
        note_size(log, size, when)
    assert [(line.time, line.source, line.text) for line in reader.new()] == [
        (1.0, "rank 0", "a"),
        (2.0, "rank 1", "b"),
        (3.0, "rank 0", "c"),
    ]
    assert reader.new() == []
    with second.open("a") as file:
        file.write(" line\nlate\n")
    now = time.time()
    os.utime(second, (now, now))
    assert [(line.source, line.text) for line in reader.new()] == [("rank 1", "unfinished line"), ("rank 1", "late")]
