"""`phalanx launch` on ssh and Slurm, and with JAX: programs that are not Phalanx's own, kept alive through kills."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts
from hosts import available as hosts_available
from slurm_cluster import Slurm, available

from phalanx.events.log import read_events
from phalanx.events.records import FailureNoticed, Finished, Recovered, RunStarted, WorkerStarted

pytestmark = [pytest.mark.clusters]
needs_slurm = [
    pytest.mark.skipif(not hosts_available(), reason="needs root and network namespaces"),
    pytest.mark.skipif(not available(), reason="needs the Debian packages slurm-wlm and munge"),
]
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs the package jax")

EXAMPLES = Path(__file__).parents[2] / "examples"
JAX = ("--env", "JAX_PLATFORMS=cpu", "--env", "JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with Hosts(4) as hosts, Slurm(tmp_path / "slurm", hosts) as cluster:
        yield cluster


class Launched:
    """`phalanx launch` of an example, followed."""

    def __init__(self, folder: Path, script: str, steps: int, *options: str, env: dict[str, str] | None = None):
        folder.mkdir(exist_ok=True)
        self.run_dir = folder / "run"
        program = [sys.executable, str(EXAMPLES / script), "--steps", str(steps), "--seconds", "0.1"]
        command = [sys.executable, "-m", "phalanx", "launch", "--run-dir", "run", *options, "--", *program]
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    @property
    def losses(self) -> dict[str, str]:
        log = self.run_dir / "logs/rank-0.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return dict(re.findall(r"^(step \d+) loss (\S+)$", "\n".join(lines), re.MULTILINE))

    def reach(self, step: int) -> None:
        deadline = time.monotonic() + 240.0
        while f"step {step}" not in self.losses:
            assert time.monotonic() < deadline and self.process.poll() is None, self.end()
            time.sleep(0.1)

    def pid(self, rank: int) -> int:
        events = read_events(self.run_dir / "events.jsonl")
        return [event.pid for event in events if isinstance(event, WorkerStarted) and event.rank == rank][-1]

    def end(self) -> tuple[int, str]:
        try:
            output, _ = self.process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
        return self.process.returncode, output


@pytest.mark.parametrize("script", ["launch_ddp.py", pytest.param("launch_jax.py", marks=needs_jax)])
@pytest.mark.parametrize("on", ["local", pytest.param("slurm", marks=needs_slurm)])
def test_plain_script_survives_kills(tmp_path: Path, script: str, on: str, request: pytest.FixtureRequest) -> None:
    slurm = request.getfixturevalue("slurm") if on == "slurm" else None
    options = ["--nodes", "2", *(JAX if "jax" in script else ())]
    calm = Launched(tmp_path / "calm", script, 60, *options)
    code, output = calm.end()
    assert code == 0, output
    job = Launched(tmp_path / "job", script, 60, "--on", on, *options, env=slurm.env if slurm is not None else None)
    for rank, step in ((1, 15), (0, 30)):
        job.reach(step)
        os.kill(job.pid(rank), signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    events = read_events(job.run_dir / "events.jsonl")
    recovered = [event for event in events if isinstance(event, Recovered)]
    print(f"{script} on {on}: started again in {[round(event.seconds, 1) for event in recovered]} s")
    assert len(recovered) == 2 and isinstance(events[-1], Finished)
    assert job.losses == calm.losses


@pytest.mark.skipif(not hosts_available(), reason="needs root and network namespaces")
@pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="needs the Debian package openssh-server")
def test_plain_script_survives_the_loss_of_an_ssh_host(tmp_path: Path) -> None:
    """A spare takes its place. The program saves in the run directory, which the hosts share here."""
    calm = Launched(tmp_path / "calm", "launch_ddp.py", 60, "--nodes", "2")
    code, output = calm.end()
    assert code == 0, output
    with Hosts(3) as hosts:
        client = hosts.start_sshd(tmp_path / "ssh", tmp_path / "private")
        names = tmp_path / "hosts.txt"
        names.write_text("".join(f"{hosts.address(host)}\n" for host in range(3)))
        options = ["--on", "ssh", "--hosts", str(names), "--spares", "1", "--set", f"cluster.ssh=ssh -F {client}"]
        job = Launched(tmp_path / "job", "launch_ddp.py", 60, *options)
        job.reach(15)
        hosts.kill_all(1)
        code, output = job.end()
    assert code == 0, output
    events = read_events(job.run_dir / "events.jsonl")
    (recovered,) = (event for event in events if isinstance(event, Recovered))
    print(f"started again in {recovered.seconds:.1f} s")
    assert recovered.action == "spare" and isinstance(events[-1], Finished)
    assert {event.host for event in events if isinstance(event, WorkerStarted)} == {"h0", "h1", "h2"}
    assert job.losses == calm.losses


@pytest.mark.skipif(not (hosts_available() and available()), reason="needs root, network namespaces, slurm-wlm and munge")
def test_slurm_job_is_requeued_and_continues_without_a_node(tmp_path: Path, slurm: Slurm) -> None:
    options = ["--on", "slurm", "--nodes", "3", "--min-nodes", "2"]
    job = Launched(tmp_path / "job", "launch_ddp.py", 120, *options, env=slurm.env)
    job.reach(20)
    number = slurm.run("squeue", "-h", "-o", "%A", "--name=run")
    slurm.run("scancel", "--signal=USR1", "--batch", number)  # as Slurm does before the limit
    job.reach(50)
    slurm.hosts.kill_all(2)
    code, output = job.end()
    assert code == 0 and "COMPLETED" in output, output
    assert slurm.job(number)["Restarts"] == "1"
    events = read_events(job.run_dir / "events.jsonl")
    assert sum(isinstance(event, RunStarted) for event in events) == 2
    assert [event.cause for event in events if isinstance(event, FailureNoticed)] == ["node lost"]
    (recovered,) = [event for event in events if isinstance(event, Recovered)]
    print(f"{recovered.action} in {recovered.seconds:.1f} s")
    assert (recovered.action, recovered.ranks) == ("shrink", 2) and isinstance(events[-1], Finished)
