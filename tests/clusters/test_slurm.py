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
from phalanx.events.records import Event, FailureNoticed, Finished, Recovered, RunStarted, Step, Stopped

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
    """`phalanx train --on slurm`, followed."""

    def __init__(self, slurm: Slurm, folder: Path, *, steps: int, nodes: int = 4, spares: int = 0, on: str | None = "slurm"):
        self.slurm, self.path = slurm, folder
        folder.mkdir()
        (folder / "run.toml").write_text(RUN.format(steps=steps, nodes=nodes, spares=spares))
        command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--run-dir", "run", *(["--on", on] if on else [])]
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

    def end(self) -> tuple[int, list[Event], str]:
        output, _ = self.process.communicate(timeout=300)
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
    assert not (tmp_path / "runs").exists()
    done = subprocess.run(
        [*command, 'cluster.slurm=["--nodes=5"]'], cwd=tmp_path, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 2 and "cluster.slurm: --nodes=5 is set by Phalanx" in done.stderr


def test_job_at_its_limit_is_saved_and_requeued(tmp_path: Path, slurm: Slurm) -> None:
    code, undisturbed, output = Job(slurm, tmp_path / "alone", steps=150, nodes=1, on=None).end()
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
    code, undisturbed, output = Job(slurm, tmp_path / "alone", steps=150, nodes=1, on=None).end()
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
