"""`torchrun -m phalanx train`: torchrun's processes become the ranks."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from commands import Ended, FinishedRuns, StepLosses, Workshop

from phalanx.events.records import Finished, WorkerStarted

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", "-m", "phalanx"]
ENV = {"OMP_NUM_THREADS": "1"}  # torchrun says at length that it sets this, if nobody has


def test_torchrun_takes_the_steps_of_phalanx_train(workshop: Workshop, finished: FinishedRuns, losses: StepLosses) -> None:
    ended = workshop.run("train", "tiny.toml", "--run-dir", "run", "--json", program=TORCHRUN, env=ENV)
    assert ended.code == 0, ended
    assert "Traceback" not in ended.err
    summary = ended.json
    assert (summary["steps"], summary["ranks"], summary["finished"]) == (8, 2, True)
    events = workshop.events("run")
    assert sorted(event.rank for event in events if isinstance(event, WorkerStarted)) == [0, 1]
    assert isinstance(events[-1], Finished)
    assert losses(events) == losses(finished(2).workshop.events(finished(2).path))
    assert ended.shown.count("finished 8 steps") == 1, "more than one rank prints"
    for name in ("run.toml", "plan.json", "loss.png", "checkpoints/step-00000008"):
        assert (workshop.path / "run" / name).exists()


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("layout.data=4", ("torchrun started 2 ranks", "--nproc-per-node=4")),
        pytest.param("train.stps=4", ("train.stps", "train.steps"), marks=pytest.mark.slow),
    ],
)
def test_torchrun_reports_an_error_once(workshop: Workshop, override: str, parts: tuple[str, ...]) -> None:
    ended = workshop.run("train", "tiny.toml", override, program=TORCHRUN, env=ENV)
    assert ended.code != 0
    (problem,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert all(part in problem for part in parts)
    assert "phalanx/cli" not in ended.err, "a traceback of ours"
    assert not (workshop.path / "runs").exists()


def rank_of_torchrun(workshop: Workshop, rank: int, port: int, *words: str, **more: str) -> Ended:
    """One rank, with the variables of torchrun and without torchrun."""
    place = {"TORCHELASTIC_RUN_ID": "none", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = [sys.executable, "-m", "phalanx"]
    return workshop.run("train", "tiny.toml", *words, "--json", program=program, env=ENV | place | store | more)


def test_a_port_in_use_is_named(workshop: Workshop) -> None:
    """Where rank 0 opens the store itself, as with torchrun's etcd rendezvous."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        ended = rank_of_torchrun(workshop, 0, port)
    assert ended.code == 2 and "Traceback" not in ended.err, ended
    (problem,) = ended.json["error"]
    assert (
        problem.startswith(f"MASTER_PORT = {port}: another process uses this port of 127.0.0.1") and "--standalone" in problem
    )
    assert f"error: {problem}\n" in ended.err
    assert not (workshop.path / "runs").exists()


def test_a_rank_that_meets_nobody_says_where(workshop: Workshop) -> None:
    """For example in a shell that torchrun's variables were exported to."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    ended = rank_of_torchrun(workshop, 1, port, "resilience.timeout=1", TORCHELASTIC_USE_AGENT_STORE="True")
    assert ended.code == 2 and "Traceback" not in ended.err, ended
    (problem,) = ended.json["error"]
    assert problem.startswith(f"MASTER_ADDR = 127.0.0.1, MASTER_PORT = {port}: rank 1 cannot meet the other ranks there")
    assert "TORCHELASTIC_RUN_ID" in problem
    assert not (workshop.path / "runs").exists()


@pytest.mark.slow
def test_the_traceback_of_torchrun_and_its_remedy_are_documented(workshop: Workshop) -> None:
    """torchrun opens the port of --master-port before it starts a rank: its traceback is its own, and names what the page names."""
    torchrun, page = TORCHRUN[0], (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    with socket.create_server(("", 0)) as taken:
        chosen = ["--master-port", str(taken.getsockname()[1])]
        program = [torchrun, *chosen, "--nproc-per-node", "2", "-m", "phalanx"]
        ended = workshop.run("train", "tiny.toml", program=program, env=ENV)
        last = ended.err.strip().splitlines()[-1]
        assert ended.code == 1 and "EADDRINUSE" in last and "phalanx/" not in ended.err, ended
        assert last.partition(":")[0] == "torch.distributed.DistNetworkError" and "torch.distributed.DistNetworkError" in page
        assert not (workshop.path / "runs").exists()
        remedied = workshop.run("train", "tiny.toml", program=[torchrun, "--standalone", *program[1:]], env=ENV)
        assert remedied.code == 0 and "--standalone" in page, remedied
