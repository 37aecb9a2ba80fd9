"""Runs in pods: every command of the rendered manifests as a process with the environment of its pod, against a server that speaks as much of the
API as they need."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import object_store
import pytest
from hosts import Hosts
from hosts import available as hosts_available
from kube_cluster import KubeCluster
from xla_engine import needs_xla

from phalanx.events.log import EventReader, read_events
from phalanx.events.records import ControllerChanged, Event, FailureNoticed, Finished, Recovered, RunStarted, Step, Stopped

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(not hosts_available(), reason="needs root and network namespaces"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, for the certificate of the API server"),
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
launcher = "kubernetes"
nodes = 4
[cluster.kubernetes]
image = "phalanx:test"
{where}
[checkpoint]
every = 50
{url}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubeCluster]:
    with Hosts(5) as hosts, KubeCluster(tmp_path / "kube", hosts) as cluster:
        yield cluster


class Job:
    """`phalanx train` with the kubernetes launcher, followed."""

    def __init__(self, cluster: KubeCluster, folder: Path, *, steps: int, where: str = 'volume = "data"', url: str = ""):
        self.cluster, self.path = cluster, folder
        folder.mkdir()
        if 'volume = "data"' in where:
            cluster.claim("data")
        (folder / "run.toml").write_text(RUN.format(steps=steps, where=where, url=url))
        self._reader = EventReader(folder / "run/events.jsonl")
        self.start()

    def start(self, *more: str) -> None:
        command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--run-dir", "run", *more]
        self.process = subprocess.Popen(
            command,
            cwd=self.path,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(
                signal.signal, signal.SIGINT, signal.SIG_DFL
            ),  # which shells ignore in what they start in the background
        )

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig()), "CUDA_VISIBLE_DEVICES": ""}

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "phalanx", *words]
        return subprocess.run(command, cwd=self.path, env=self.env, capture_output=True, text=True, timeout=300)

    def reach(self, step: int) -> None:
        self.until(lambda event: isinstance(event, Step) and event.step >= step)

    def until(self, condition: Callable[[Event], bool], seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not any([condition(event) for event in self._reader.new()]):
            assert time.monotonic() < deadline and self.process.poll() is None, self._failed()
            time.sleep(0.1)

    def _failed(self) -> str:
        self.process.kill()
        output, _ = self.process.communicate()
        logs = {pod.log.name: pod.log.read_text()[-3000:] for pod in self.cluster.pods.values()}
        texts = "\n".join(f"--- {name}\n{text}" for name, text in logs.items())
        return f"{output}\n{self.cluster.exits}\n{texts}"

    def end(self) -> tuple[int, list[Event], str]:
        try:
            output, _ = self.process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            pytest.fail(self._failed())
        return self.process.returncode, read_events(self.path / "run/events.jsonl"), output


def losses(events: list[Event]) -> dict[int, tuple[float, int | None]]:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, int | None]]:
    return alone(tmp_path_factory.mktemp("alone"), 150)


def alone(folder: Path, steps: int) -> dict[int, tuple[float, int | None]]:
    """The losses of the same run on this machine alone."""
    (folder / "run.toml").write_text(RUN.format(steps=steps, where="", url=""))
    command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--run-dir", "run", "--on", "local", "cluster.nodes=1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    return losses(read_events(folder / "run/events.jsonl"))


def near(ours: dict[int, tuple[float, int | None]], others: dict[int, tuple[float, int | None]]) -> bool:
    same_batches = {step: digest for step, (_, digest) in ours.items()} == {
        step: digest for step, (_, digest) in others.items()
    }
    return same_batches and max(abs(ours[step][0] - others[step][0]) for step in ours) <= 1e-4


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_run_trains_through_the_rendered_manifests(
    tmp_path: Path, cluster: KubeCluster, kind: str, undisturbed: dict[int, tuple[float, int | None]]
) -> None:
    job = Job(cluster, tmp_path / "job", steps=150, where=f'volume = "data"\nkind = "{kind}"')
    job.reach(20)
    token = token_of(cluster)
    status = job.command("status", "run")
    assert status.returncode == 0 and ": running, step " in status.stderr + status.stdout, status
    code, events, output = job.end()
    assert code == 0 and re.search(rf"{kind} lab/run-\w+: Complete", output), output
    assert losses(events) == undisturbed
    # The shared run directory has everything, too.
    shared = cluster.claims["data"] / "run"
    assert losses(read_events(shared / "events.jsonl")) == undisturbed and (shared / "plan.json").exists()
    assert (shared / "checkpoints/step-00000150/commit.json").exists()
    # The token is nowhere but in the Secret, and not even there after the end.
    (secret,) = cluster.server.of_kind("secrets").values()
    assert "settings" not in secret["data"]
    for root in (shared, job.path, cluster.folder / "pods"):
        assert not any(token in path.read_bytes() for path in root.rglob("*") if path.is_file())
    assert not any(token in pod.log.read_bytes() for pod in cluster.pods.values())


def test_any_program_runs_in_pods_and_survives_a_killed_one(tmp_path: Path, cluster: KubeCluster) -> None:
    cluster.claim("data")
    script = Path(__file__).parents[2] / "examples/launch_ddp.py"
    launch = [sys.executable, "-m", "phalanx", "launch", "--run-dir", "run", "--nodes", "2"]
    program = ["--", sys.executable, str(script), "--steps", "60", "--seconds", "0.1"]
    kubernetes = ["--on", "kubernetes", "--set", "cluster.kubernetes.image=phalanx:test"]
    kubernetes += ["--set", "cluster.kubernetes.volume=data", "--set", "cluster.device=cpu"]
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig()), "CUDA_VISIBLE_DEVICES": ""}
    for name in ("calm", "job"):
        (tmp_path / name).mkdir()
    calm = subprocess.run([*launch, *program], cwd=tmp_path / "calm", env=env, capture_output=True, text=True)
    assert calm.returncode == 0, calm
    job = subprocess.Popen(
        [*launch, *kubernetes, *program],
        cwd=tmp_path / "job",
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log, deadline = cluster.claims["data"] / "run/logs/rank-0.log", time.monotonic() + 200
    while not log.exists() or "step 20 " not in log.read_text():
        assert time.monotonic() < deadline and job.poll() is None, job.communicate()[0]
        time.sleep(0.1)
    pod = cluster.running(1)
    assert pod is not None
    cluster.hosts.kill_all(pod.host)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output
    events = read_events(tmp_path / "job/run/events.jsonl")
    assert any(isinstance(event, Recovered) for event in events), output

    def losses_in(text: str) -> dict[str, str]:
        return dict(re.findall(r"^(step \d+) loss (\S+)$", text, re.MULTILINE))

    assert losses_in(log.read_text()) == losses_in((tmp_path / "calm/run/logs/rank-0.log").read_text())


def token_of(cluster: KubeCluster) -> bytes:
    (secret,) = cluster.server.of_kind("secrets").values()
    return str(json.loads(base64.b64decode(secret["data"]["settings"]))["token"]).encode()


@pytest.fixture
def bucket(cluster: KubeCluster) -> Iterator[str]:
    """An object store that the pods reach, by the variables of a Secret."""
    with object_store.serve(cluster.hosts.outside) as store:
        data = {name: base64.b64encode(value.encode()).decode() for name, value in store.env().items()}
        value = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}, "data": data}
        cluster.server.put(("v1", "secrets", "s3"), value)
        yield f"s3://{store.bucket()}/run"


def test_controllers_pod_is_killed_where_pods_share_nothing(
    tmp_path: Path, cluster: KubeCluster, bucket: str, undisturbed: dict[int, tuple[float, int | None]]
) -> None:
    job = Job(cluster, tmp_path / "job", steps=150, where='secret = "s3"', url=f'url = "{bucket}"')
    job.reach(20)
    leader = int(lease(cluster)["holderIdentity"].partition("-")[0])
    pod = cluster.running(leader)
    assert pod is not None
    cluster.hosts.kill_all(pod.host)
    code, events, output = job.end()
    assert code == 0 and isinstance(events[-1], Finished), output
    (change,) = (event for event in events if isinstance(event, ControllerChanged))
    assert lease(cluster)["leaseTransitions"] == change.term == 2 and change.node != leader
    (failure,) = (event for event in events if isinstance(event, FailureNoticed))
    recovered = [event for event in events if isinstance(event, Recovered)]
    print([(one.action, f"{one.seconds:.1f} s", one.steps_lost) for one in recovered])
    assert failure.node == leader and recovered[0].steps_lost <= 1
    assert near(losses(events), undisturbed)
    started = [name for name, other in cluster.pods.items() if other.index == leader]
    assert len(started) == 2, "the Job has replaced the pod"
    written = {path.name for path in (tmp_path / "kube/pods").glob("*/work/run/logs/*.log") if path.stat().st_size}
    arrived = {path.name for path in (job.path / "run/logs").glob("*.log")}
    assert "node-0.log" in arrived >= written, "what agents, and ranks that noticed the loss, have printed"


@needs_xla
def test_killed_pod_of_the_xla_engine(
    tmp_path: Path, cluster: KubeCluster, undisturbed: dict[int, tuple[float, int | None]]
) -> None:
    """All processes are new afterwards; the run is that of the torch engine."""
    job = Job(cluster, tmp_path / "job", steps=150, url='[engine]\nname = "xla"')
    job.reach(60)
    pod = cluster.running(2)
    assert pod is not None
    cluster.hosts.kill_all(pod.host)
    code, events, output = job.end()
    assert code == 0 and isinstance(events[-1], Finished), output
    recovered = [event for event in events if isinstance(event, Recovered)]
    print([(one.action, one.source, one.step, f"{one.seconds:.1f} s") for one in recovered])
    assert recovered and all(one.steps_lost <= 1 for one in recovered)
    assert near(losses(events), undisturbed)


def lease(cluster: KubeCluster) -> dict[str, Any]:
    (value,) = cluster.server.of_kind("leases").values()
    return dict(value["spec"])


def test_run_outlives_the_api_server_and_broken_watches(
    tmp_path: Path, cluster: KubeCluster, undisturbed: dict[int, tuple[float, int | None]]
) -> None:
    job = Job(cluster, tmp_path / "job", steps=150)
    shared = EventReader(cluster.claims["data"] / "run/events.jsonl")
    job.reach(10)
    cluster.server.compact()  # every watch and log ends; the next watch gets 410
    job.reach(20)
    cluster.server.down = True
    cluster.server.end_watches()
    begin, before = time.monotonic(), [event for event in shared.new() if isinstance(event, Step)][-1].step
    while time.monotonic() - begin < 8:  # three times as long as a node may lead without the API
        time.sleep(0.1)
    cluster.server.down = False
    code, events, output = job.end()
    assert code == 0 and isinstance(events[-1], Finished), output
    assert not any(isinstance(event, FailureNoticed | ControllerChanged) for event in events) and losses(events) == undisturbed
    during = [event.step for event in events if isinstance(event, Step) and event.step > before]
    print(f"{len(during)} steps after step {before}, when the API server went away")
    assert lease(cluster)["holderIdentity"].startswith("0-"), "nobody else has taken over"


def test_stopped_run_is_saved_and_the_same_command_resumes_it(
    tmp_path: Path, cluster: KubeCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    steps = 400  # so that a quick machine is not done before it is stopped
    undisturbed = alone(tmp_path_factory.mktemp("long"), steps)
    job = Job(cluster, tmp_path / "job", steps=steps)
    job.reach(20)
    job.process.send_signal(signal.SIGINT)  # the command ends, the run does not
    output, _ = job.process.communicate(timeout=60)
    assert job.process.returncode == 0 and "The job goes on" in output, output
    (name,) = cluster.server.of_kind("jobs")
    stopped = job.command("stop", "run")
    assert stopped.returncode == 0 and "run: stopped" in stopped.stderr + stopped.stdout, stopped
    assert {code for _, code in cluster.exits} == {75} and len(cluster.exits) == 4, "all have saved, none was started again"
    (event,) = (event for event in read_events(job.path / "run/events.jsonl") if isinstance(event, Stopped))
    assert (cluster.claims["data"] / f"run/checkpoints/step-{event.step:08d}/commit.json").exists()
    again = job.command("stop", "run")
    assert again.returncode == 2 and "is not running" in again.stderr
    job.start()
    code, events, output = job.end()
    assert code == 0 and isinstance(events[-1], Finished), output
    assert set(cluster.server.of_kind("jobs")) > {name}
    assert len([event for event in events if isinstance(event, RunStarted)]) == 2 and losses(events) == undisturbed


def test_evicted_pod_saves_and_the_job_starts_all_again(
    tmp_path: Path, cluster: KubeCluster, undisturbed: dict[int, tuple[float, int | None]]
) -> None:
    job = Job(cluster, tmp_path / "job", steps=150)
    job.reach(20)
    pod = cluster.running(2)
    assert pod is not None
    pod.process.terminate()
    code, events, output = job.end()
    assert code == 0 and [code for _, code in cluster.exits].count(75) == 4, (cluster.exits, output)
    assert len([event for event in events if isinstance(event, RunStarted)]) == 2
    assert any(isinstance(event, Stopped) for event in events) and losses(events) == undisturbed


def test_pod_on_a_host_that_is_cut_off_is_replaced(
    tmp_path: Path, cluster: KubeCluster, undisturbed: dict[int, tuple[float, int | None]]
) -> None:
    job = Job(cluster, tmp_path / "job", steps=5000)
    job.reach(20)
    pod = cluster.running(3)
    assert pod is not None
    cluster.lose_host(pod.host)
    job.until(lambda event: isinstance(event, Recovered) and event.action == "shrink")
    job.until(lambda event: isinstance(event, Recovered) and event.action == "grow")
    new = cluster.running(3)
    assert new is not None and new.host == 4 and pod.name not in cluster.server.of_kind("pods")
    assert job.command("stop", "run").returncode == 0
    code, events, output = job.end()
    assert code == 75, output
    ours = losses(events)
    assert all(ours[step][1] == undisturbed[step][1] for step in undisturbed.keys() & ours.keys()), "the same batches"


def test_failed_run_fails_the_job(tmp_path: Path, cluster: KubeCluster) -> None:
    job = Job(cluster, tmp_path / "job", steps=150, url='url = "/proc/no/such/folder"')
    code, _, output = job.end()
    assert code == 1 and ": Failed" in output, output
    assert cluster.exits[0][1] == 2 and len([pod for pod in cluster.pods.values() if pod.index == 0]) == 1
    assert "has ended with exit code 2" in output and "checkpoint.url" in output
