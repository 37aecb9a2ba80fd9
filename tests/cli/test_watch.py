"""`phalanx status`, `logs` and `stop` of a run that another process has started."""

from __future__ import annotations

import os
import time
from pathlib import Path

from commands import Workshop

from phalanx.events.run_logs import LogReader, note_size
from phalanx.events.rundir import RunDir


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
