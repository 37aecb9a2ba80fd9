"""A real Slurm of four nodes: the time limit, cancellation, lost nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Hosts
from hosts import available as hosts_available
from slurm_cluster import Slurm, available

from phalanx.events.log import EventReader, read_events
from phalanx.events.records import (
    Event,
    FailureNoticed,
    Finished,
    Recovered,
    RunStarted,
    Step,
    Stopped,
    WorkerStarted,
)
from phalanx.events.rundir import RunDir
from phalanx.launch.slurm import SlurmJob
from phalanx.spec.errors import RunError

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(not hosts_available(), reason="needs root and network namespaces"),
    pytest.mark.skipif(not available(), reason="needs the Debian packages slurm-wlm and munge"),
]

RUN = """
[model]
dim = 64
layers = 2
heads = 2
kv_heads = 2
[train]
batch = 4
micro_batch = 1
sequence_length = 64
steps = {steps}
[optimizer]
schedule = "constant"
[layout]
data = 4
[cluster]
threads = 1
device = "cpu"
nodes = {nodes}
[checkpoint]
every = 50
[resilience]
spares = {spares}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with Hosts(4) as hosts, Slurm(tmp_path / "slurm", hosts) as cluster:
        yield cluster


class Job:
    """`phalanx train --on slurm`, followed; a run on one node does without Slurm."""

    def __init__(
        self,
        slurm: Slurm,
        folder: Path,
        *,
        steps: int,
        nodes: int = 4,
        spares: int = 0,
        settings: tuple[str, ...] = (),
    ):
        self.slurm, self.path = slurm, folder
        folder.mkdir()
        (folder / "run.toml").write_text(RUN.format(steps=steps, nodes=nodes, spares=spares))
        command = [sys.executable, "-m", "phalanx", "train", "run.toml", *settings, "--run-dir", "run"]
        command += ["--on", "slurm"] if nodes > 1 else []
        self.process = subprocess.Popen(
            command, cwd=folder, env=slurm.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = EventReader(folder / "run/events.jsonl")
        self._number = ""

    @property
    def number(self) -> str:
        return self.slurm.run("squeue", "-h", "-o", "%A", "--name=run") or self._number

    def reach(self, step: int) -> None:
        self.until(lambda event: isinstance(event, Step) and event.step >= step)
        self._number = self.number

    def until(self, condition: Callable[[Event], bool], seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not any([condition(event) for event in self._reader.new()]):
            assert time.monotonic() < deadline and self.process.poll() is None, self._failed()
            time.sleep(0.1)

    def _failed(self) -> str:
        self.process.kill()
        output, _ = self.process.communicate()
        logs = {path.name: path.read_text()[-2000:] for path in (self.path / "run/logs").glob("*.log")}
        return f"{output}\n{logs}"

    def end(self, seconds: float = 300.0) -> tuple[int, list[Event], str]:
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, read_events(self.path / "run/events.jsonl"), output


def losses(events: list[Event]) -> dict[int, tuple[float, int | None]]:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}


def test_dry_run_prints_the_script(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(steps=3, nodes=4, spares=0))
    command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--on", "slurm", "--dry-run"]
    done = subprocess.run(
        [*command, 'cluster.slurm=["--time=5"]'], cwd=tmp_path, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=4\n" in done.stdout and "#SBATCH --time=5\n" in done.stdout and "#SBATCH --requeue\n" in done.stdout
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
    done = subprocess.run([*command, "checkpoint.save=false"], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert "#SBATCH --no-requeue\n" in done.stdout, "it would only start from step 0"
    assert not (tmp_path / "runs").exists()
    done = subprocess.run(
        [*command, 'cluster.slurm=["--nodes=5"]'], cwd=tmp_path, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 2 and "cluster.slurm: --nodes=5 is set by Phalanx" in done.stderr


def test_job_at_its_limit_is_saved_and_requeued(tmp_path: Path, slurm: Slurm) -> None:
    code, undisturbed, output = Job(slurm, tmp_path / "alone", steps=150, nodes=1).end()
    assert code == 0, output
    job = Job(slurm, tmp_path / "limit", steps=150)
    job.reach(30)
    slurm.run("scancel", "--signal=USR1", "--batch", job.number)  # as Slurm does before the limit
    code, events, output = job.end()
    assert code == 0 and re.search(r"job \d+: COMPLETED", output), output
    assert slurm.job(job.number)["Restarts"] == "1"
    assert len([event for event in events if isinstance(event, RunStarted)]) == 2
    assert isinstance(events[-1], Finished) and any(isinstance(event, Stopped) for event in events)
    assert losses(events) == losses(undisturbed)
    assert not list((tmp_path / "limit/run/control").glob("settings*"))


def test_cancelled_job_is_saved_and_stays_cancelled(tmp_path: Path, slurm: Slurm) -> None:
    job = Job(slurm, tmp_path / "job", steps=5000)
    job.reach(20)
    slurm.run("scancel", job.number)
    code, events, output = job.end()
    assert code == 75 and "CANCELLED" in output, output
    stopped = next(event for event in events if isinstance(event, Stopped))
    assert (tmp_path / f"job/run/checkpoints/step-{stopped.step:08d}/commit.json").exists()
    assert slurm.job(job.number)["Restarts"] == "0"


@pytest.mark.parametrize("lost", [2, 0], ids=["a node", "the batch host"])
def test_job_continues_without_a_lost_node(tmp_path: Path, slurm: Slurm, lost: int) -> None:
    code, undisturbed, output = Job(slurm, tmp_path / "alone", steps=150, nodes=1).end()
    assert code == 0, output
    job = Job(slurm, tmp_path / "job", steps=150, spares=0)
    job.reach(20)
    slurm.hosts.kill_all(lost)
    code, events, output = job.end()
    assert isinstance(events[-1], Finished), output
    assert {event.node for event in events if isinstance(event, FailureNoticed)} == {lost}
    (recovered,) = (event for event in events if isinstance(event, Recovered))
    print(f"{recovered.action} in {recovered.seconds:.1f} s")
    assert recovered.steps_lost <= 1
    ours, others = losses(events), losses(undisturbed)
    assert ours.keys() == others.keys() and max(abs(ours[step][0] - others[step][0]) for step in ours) <= 1e-4


def test_time_limit_of_slurm_itself(tmp_path: Path, slurm: Slurm) -> None:
    """Slurm sends USR1 before the limit, and the job comes back by itself. However quick the machine is: the run goes on until it has."""
    job = Job(slurm, tmp_path / "limit", steps=100_000, settings=('cluster.slurm=["--time=3"]',))
    job.reach(1)
    job.until(lambda event: isinstance(event, Stopped), 400)
    number = job.number
    slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=60")  # one limit is enough for a test
    job.until(lambda event: isinstance(event, RunStarted), 400)
    (stopped,) = (event for event in read_events(job.path / "run/events.jsonl") if isinstance(event, Stopped))
    print(f"stopped at step {stopped.step}")
    assert stopped.reason == "SIGUSR1" and slurm.job(number)["Restarts"] == "1"
    job.reach(stopped.step + 20)
    slurm.run("scancel", number)
    code, events, output = job.end()
    assert code == 75 and "CANCELLED" in output, output
    done = losses(events)
    code, undisturbed, output = Job(slurm, tmp_path / "alone", steps=max(done), nodes=1).end(900)
    assert code == 0, output
    assert done == losses(undisturbed)


def test_spare_host_steps_in(tmp_path: Path, slurm: Slurm) -> None:
    code, undisturbed, output = Job(slurm, tmp_path / "alone", steps=150, nodes=1, settings=("layout.data=2",)).end()
    assert code == 0, output
    job = Job(slurm, tmp_path / "job", steps=150, nodes=3, spares=1, settings=("layout.data=2",))
    job.reach(20)
    ranks = {
        event.rank: event.host for event in read_events(tmp_path / "job/run/events.jsonl") if isinstance(event, WorkerStarted)
    }
    slurm.hosts.kill_all(int(ranks[1].removeprefix("h")))
    _, events, output = job.end()
    assert isinstance(events[-1], Finished), output
    (recovered,) = (event for event in events if isinstance(event, Recovered))
    print(f"{recovered.action} in {recovered.seconds:.1f} s")
    assert recovered.action == "spare" and recovered.steps_lost <= 1
    assert losses(events) == losses(undisturbed)


def test_neighboring_ranks_are_on_one_switch(tmp_path: Path, slurm: Slurm) -> None:
    code, events, output = Job(slurm, tmp_path / "job", steps=5).end()
    assert code == 0, output
    hosts = {event.rank: int(event.host.removeprefix("h")) for event in events if isinstance(event, WorkerStarted)}
    assert [hosts[rank] % 2 for rank in range(4)] in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_plan_for_the_nodes_of_slurm(tmp_path: Path, slurm: Slurm) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(steps=5, nodes=4, spares=0))
    command = [sys.executable, "-m", "phalanx", "plan", "run.toml", "--on", "slurm"]
    done = subprocess.run(command, cwd=tmp_path, env=slurm.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Slurm has 4 usable nodes with 2 cores and 1.0 GiB each; planned for 4." in done.stdout
    slurm.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test")
    done = subprocess.run(command, cwd=tmp_path, env=slurm.env, capture_output=True, text=True)
    assert done.returncode == 2 and "cluster.nodes = 4, but Slurm has 3 usable nodes" in done.stderr


def test_follower_ends_when_slurm_is_gone(tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    with pytest.raises(RunError, match="Slurm does not know job 77 any more"):
        SlurmJob("77", RunDir(tmp_path)).ended()
    slurm.kill("slurmctld")
    assert SlurmJob("77", RunDir(tmp_path)).ended() is None, "it may come back"
    with pytest.raises(RunError, match="Slurm has not answered for"):
        SlurmJob("77", RunDir(tmp_path), patience=0.0).ended()
