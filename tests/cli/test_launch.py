"""`phalanx launch`: programs that are not Phalanx's own, started, kept alive and stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import Ended, Started, Workshop, signal_to

from phalanx.events.log import read_events
from phalanx.events.records import Event, FailureNoticed, Finished, Recovered, Stopped, WorkerStarted

EXAMPLE = Path(__file__).parents[2] / "examples" / "launch_ddp.py"

# One rank of a program without torch: it meets the others at MASTER_PORT, says so, and counts steps that survive a restart.
PROGRAM = """\
import json, os, signal, socket, sys, time
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = os.environ["PHALANX_RUN_DIR"]
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(where)
    peers = [server.accept()[0] for _ in range(ranks - 1)]
else:
    while True:
        try:
            peers = [socket.create_connection(where)]
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
def save_and_end(number, frame):
    print("asked to end", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save_and_end)
print("variables", json.dumps(dict(os.environ)), flush=True)
path = os.path.join(folder, f"count-{rank}")
count = int(open(path).read()) if os.path.exists(path) else 0
while not os.path.exists(os.path.join(folder, "enough")):
    count += 1
    with open(path + ".part", "w") as file:
        file.write(str(count))
    os.replace(path + ".part", path)
    if sys.argv[1:] != ["silent"] or count < 20:
        os.utime(os.environ["PHALANX_PROGRESS"])
    time.sleep(0.02)
"""


class Launched:
    """`phalanx launch` of the program, in a folder of its own."""

    def __init__(self, workshop: Workshop, *options: str, program: tuple[str, ...] = (sys.executable, "program.py")):
        self.workshop, self.run_dir = workshop, workshop.path / "run"
        (workshop.path / "program.py").write_text(PROGRAM)
        self.started: Started = workshop.start("launch", "--run-dir", "run", *options, "--json", "--", *program)

    def events(self) -> list[Event]:
        return read_events(self.run_dir / "events.jsonl")

    def count(self, rank: int = 0) -> int:
        path = self.run_dir / f"count-{rank}"
        return int(path.read_text()) if path.exists() else 0

    def runs(self, ranks: int) -> None:
        """Wait until so many ranks count, after whatever has happened."""
        before = [self.count(rank) for rank in range(ranks)]
        self.started.until(
            lambda: all(self.count(rank) > before[rank] + 1 for rank in range(ranks)), f"{ranks} ranks that count"
        )

    def process(self, rank: int) -> psutil.Process:
        """The newest process of a rank."""
        pids = [event.pid for event in self.events() if isinstance(event, WorkerStarted) and event.rank == rank]
        return psutil.Process(pids[-1])

    def recovered(self, times: int) -> None:
        self.started.until(lambda: self.recoveries() >= times, f"{times} recoveries")

    def recoveries(self) -> int:
        return sum(isinstance(event, Recovered) for event in self.events())

    def end(self) -> Ended:
        (self.run_dir / "enough").touch()
        return self.started.wait()

    def variables(self, rank: int) -> list[dict[str, str]]:
        """The environment of each start of a rank."""
        lines = (self.run_dir / f"logs/rank-{rank}.log").read_text().splitlines()
        return [json.loads(line.removeprefix("variables ")) for line in lines if line.startswith("variables ")]


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path / "shop")
    yield workshop
    workshop.close()


def test_every_rank_gets_the_variables_of_torchrun(workshop: Workshop) -> None:
    launched = Launched(workshop, "--nodes", "2", "--nproc-per-node", "2", "--env", "MINE=a b")
    launched.runs(4)
    status = workshop.run("status", "run", "--json")
    ended = launched.end()
    assert ended.code == 0 and ended.json["failures"] == 0, ended
    assert status.json["state"] == "running" and status.json["hosts"] == {os.uname().nodename: [0, 1, 2, 3]}, status
    for rank in range(4):
        (own,) = launched.variables(rank)
        assert (own["RANK"], own["LOCAL_RANK"], own["NODE_RANK"]) == (str(rank), str(rank % 2), str(rank // 2))
        assert (own["WORLD_SIZE"], own["LOCAL_WORLD_SIZE"], own["GROUP_WORLD_SIZE"]) == ("4", "2", "2")
        assert (own["JAX_PROCESS_ID"], own["JAX_NUM_PROCESSES"], own["MINE"]) == (str(rank), "4", "a b")
        assert own["OMP_NUM_THREADS"] == "1"
        assert not re.search(r"\b[0-9a-f]{64}\b", json.dumps(own))  # the run's token
    assert (
        len({own["MASTER_PORT"] + own["JAX_COORDINATOR_ADDRESS"] for rank in range(4) for own in launched.variables(rank)}) == 1
    )
    assert isinstance(launched.events()[-1], Finished)
    assert "variables" in ended.shown  # the output of rank 0
    assert workshop.run("status", "run", "--json").json["state"] == "finished"


def test_words_after_two_dashes_are_the_programs(workshop: Workshop) -> None:
    plain = workshop.run("launch", "--", "echo", "--json")
    assert (plain.code, plain.err) == (0, "") and "--json" in plain.out.splitlines(), plain
    asked = workshop.run("launch", "--json", "--", "echo", "hello")
    assert asked.json["exit_code"] == 0 and "hello" in asked.err.splitlines(), asked


@pytest.mark.slow
def test_ddp_script_survives_a_kill_with_the_same_result(workshop: Workshop) -> None:
    options = ["launch", "--ranks-per-node", "2", "--json"]
    script = ["--", sys.executable, EXAMPLE, "--steps", "20", "--seconds", "0.05"]
    calm = workshop.run(*options, "--run-dir", "calm", *script)
    assert calm.code == 0, calm
    started = workshop.start(*options, "--run-dir", "killed", *script)
    log = workshop.path / "killed/logs/rank-0.log"
    started.until(lambda: log.exists() and "step 10 " in log.read_text(), "step 10")
    events = read_events(workshop.path / "killed/events.jsonl")
    os.kill(next(event.pid for event in events if isinstance(event, WorkerStarted) and event.rank == 1), signal.SIGKILL)
    ended = started.wait()
    assert ended.code == 0 and ended.json["recovered"] == 1, ended

    def last(run: str) -> dict[str, str]:
        lines = (workshop.path / run / "logs/rank-0.log").read_text().splitlines()
        return dict(line.split(" loss ") for line in lines if " loss " in line)

    assert last("killed") == last("calm")


def test_program_that_fails_the_same_way_three_times_ends(workshop: Workshop) -> None:
    script = "import sys; sys.stderr.write('ValueError: no such column\\n'); sys.exit(3)"
    launched = Launched(workshop, program=(sys.executable, "-c", script))
    ended = launched.started.wait()
    assert ended.code == 1, ended
    assert "failed 3 times in the same way" in ended.err and "exit code 3: ValueError: no such column" in ended.err
    assert sum(isinstance(event, FailureNoticed) for event in launched.events()) == 3
    assert workshop.run("status", "run").shown.startswith("run: failed")


def test_number_of_restarts_is_limited(workshop: Workshop) -> None:
    launched = Launched(workshop, "--restarts", "1")
    launched.runs(1)
    launched.process(0).kill()
    launched.recovered(1)
    launched.runs(1)
    launched.process(0).kill()
    ended = launched.started.wait()
    assert ended.code == 1 and "2 failures within an hour, and resilience.restarts = 1" in ended.err, ended


def test_stop_gives_the_program_time_and_it_continues_later(workshop: Workshop) -> None:
    launched = Launched(workshop, "--ranks-per-node", "2")
    launched.runs(2)
    launched.started.process.send_signal(signal.SIGTERM)
    ended = launched.started.wait()
    assert ended.code == 75 and "asked to end" in ended.shown, ended
    assert isinstance(launched.events()[-1], Stopped)
    count = launched.count()
    again = Launched(workshop, "--ranks-per-node", "2")
    again.runs(2)
    assert again.end().code == 0 and again.count() > count


def test_program_that_ignores_the_request_to_end_is_killed(workshop: Workshop) -> None:
    stubborn = "trap '' TERM; touch $PHALANX_RUN_DIR/ready; while :; do sleep 0.1; done"
    launched = Launched(workshop, "--notice", "0.5", program=("bash", "-c", stubborn))
    launched.started.until(lambda: (launched.run_dir / "ready").exists(), "the program")
    launched.started.process.send_signal(signal.SIGTERM)
    assert launched.started.wait().code == 75


def test_everything_that_a_program_started_ends_with_it(workshop: Workshop) -> None:
    shell = "sleep 987654 & python3 -c 'import time; time.sleep(987654)' & touch $PHALANX_RUN_DIR/ready-$TORCHELASTIC_RESTART_COUNT; wait"
    launched = Launched(workshop, "--notice", "0.5", program=("bash", "-c", shell))
    launched.started.until(lambda: (launched.run_dir / "ready-0").exists(), "the program")
    first = launched.process(0).children(recursive=True)
    assert len(first) >= 2
    launched.process(0).kill()  # the shell, not what it has started
    launched.started.until(lambda: (launched.run_dir / "ready-1").exists(), "the program again")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in first)
    second = launched.process(0).children(recursive=True)
    agent = launched.process(0).parent()
    assert agent is not None
    agent.kill()  # the process that watches it
    launched.started.until(lambda: (launched.run_dir / "ready-2").exists(), "the program once more")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in second)
    launched.started.process.send_signal(signal.SIGTERM)
    assert launched.started.wait().code == 75


def test_rank_without_progress_is_restarted(workshop: Workshop) -> None:
    launched = Launched(workshop, "--hang", "2", program=(sys.executable, "program.py", "silent"))
    launched.recovered(1)
    ended = launched.end()
    assert ended.code == 0, ended
    failure = next(event for event in launched.events() if isinstance(event, FailureNoticed))
    assert failure.cause == "hung" and "has not touched its progress file" in failure.message


@pytest.mark.parametrize(("options", "action"), [(("--spares", "1"), "spare"), (("--min-nodes", "1"), "shrink")])
def test_lost_host_is_replaced_or_done_without(workshop: Workshop, options: tuple[str, ...], action: str) -> None:
    nodes = 2 + ("--spares" in options)
    launched = Launched(workshop, "--nodes", str(nodes), "--ranks-per-node", "1", *options)
    launched.runs(2)
    (launcher,) = [psutil.Process(launched.started.pid)]
    agents = [child for child in launcher.children() if "phalanx.control.agent" in child.cmdline()]
    ranks = {process.pid for process in launched.process(1).parents()}
    (host,) = [agent for agent in agents if agent.pid in ranks]
    for process in [host, *host.children(recursive=True)]:
        signal_to(process, signal.SIGKILL)
    launched.recovered(1)
    launched.runs(2 if action == "spare" else 1)
    ended = launched.end()
    assert ended.code == 0, ended
    (recovered,) = [event for event in launched.events() if isinstance(event, Recovered)]
    assert (recovered.action, recovered.source, recovered.ranks) == (action, "program", 2 if action == "spare" else 1)
    last = launched.variables(0)[-1]
    assert (last["WORLD_SIZE"], last["TORCHELASTIC_RESTART_COUNT"]) == (str(recovered.ranks), "1")


def test_invalid_launches_are_refused(workshop: Workshop) -> None:
    for options, words in (
        (["launch"], "give the program after --"),
        (["launch", "--", "no-such-program"], "no-such-program is not a program on PATH"),
        (["launch", "--spares", "1", "--", "true"], "resilience.spares = 1 of cluster.nodes = 1 leaves no node"),
        (["launch", "--nodes", "2", "--min-nodes", "3", "--", "true"], "command.min_nodes = 3 is more than the 2 nodes"),
        (["launch", "--env", "NOTHING", "--", "true"], '"NOTHING" is no variable'),
        (["launch", "--on", "moon", "--", "true"], 'cluster.launcher = "moon" is unknown'),
    ):
        ended = workshop.run(*options)
        assert ended.code == 2 and words in ended.err, ended
    assert not (workshop.path / "runs").exists()
    (workshop.path / "command.toml").write_text('[command]\nprogram = ["true"]\n')
    refused = workshop.run("train", "command.toml")
    assert refused.code == 2 and "start it with `phalanx launch --run-file command.toml`" in refused.err
    done = workshop.run("launch", "--run-file", "command.toml")
    assert done.code == 0, done
    words = ("--on", "slurm", "--nodes", "3", "--dry-run")
    script = workshop.run("launch", *words, "--", "python", "train.py")
    assert script.code == 0 and "#SBATCH --nodes=3\n" in script.out, script
    assert workshop.run("launch", *words, "--json", "--", "python", "train.py").json == {"submission": script.out}
