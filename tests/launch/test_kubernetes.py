"""Creating and following a job, against a server that speaks as much of the API: what is refused before anything is created, what is removed after
a failure, and what arrives in the run directory."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kube_server import KubeServer, kubeconfig

from phalanx.events.log import read_events
from phalanx.events.records import Finished, Warned, encode
from phalanx.events.run_logs import LogReader
from phalanx.events.rundir import RunDir
from phalanx.launch import kubernetes
from phalanx.launch.kube_api import connect
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Kubernetes, Run

SOON = 30.0  # seconds that a busy machine may take
RUN = '[train]\nbatch = 8\nsteps = 3\n[cluster]\nlauncher = "kubernetes"\n[cluster.kubernetes]\nimage = "x"\nvolume = "data"\n'


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    with closing(KubeServer()) as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", server)))
        claim("data", server)
        yield server


def claim(name: str, server: KubeServer, mode: str = "ReadWriteMany") -> None:
    value = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": {"accessModes": [mode]}}
    server.put(("v1", "persistentvolumeclaims", name), value)


def run(*overrides: str) -> Run:
    return loads(RUN, overrides=list(overrides))


def submit(folder: Path, *overrides: str) -> kubernetes.KubernetesJob:
    rundir, asked = RunDir(folder / "run"), run(*overrides)
    rundir.create()
    return kubernetes.submit(kubernetes.open_api(asked), asked, rundir)


def creations(server: KubeServer) -> list[str]:
    return [line for line in server.requests if line.startswith("POST") and "dryRun" not in line]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


REFUSALS: dict[str, tuple[Callable[[KubeServer], None], list[str], list[str]]] = {
    "no volume": (lambda s: s.remove(("v1", "persistentvolumeclaims", "data")), [], ["no such PersistentVolumeClaim", "create it"]),
    "volume of one host": (lambda s: claim("data", s, "ReadWriteOnce"), [], ["ReadWriteMany"]),
    "no secret": (lambda s: None, ["cluster.kubernetes.secret=s3"], ['secret = "s3"', "no such Secret"]),
    "no account": (lambda s: None, ["cluster.kubernetes.service_account=me"], ["no such ServiceAccount"]),
    "no namespace": (lambda s: None, ["cluster.kubernetes.namespace=other"], ["namespace other"]),
    "forbidden": (lambda s: s.forbidden.add(("create", "jobs")), [], ["Job run-", "cannot create", "ask for the right"]),
    "forbidden role": (lambda s: s.forbidden.add(("create", "roles")), [], ["Role run-", "cluster.kubernetes.service_account"]),
    "unreachable": (lambda s: setattr(s, "down", True), [], ["cannot be reached", "kubectl get pods"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_anything_is_created(tmp_path: Path, server: KubeServer, case: str) -> None:
    plant, overrides, parts = REFUSALS[case]
    plant(server)
    with pytest.raises(RunError) as error:
        submit(tmp_path, *overrides)
    assert all(part in str(error.value) for part in parts), error.value
    assert not creations(server) and not (tmp_path / "run/kubernetes.json").exists()


@pytest.mark.parametrize("count", range(8))
def test_partly_created_objects_are_removed(tmp_path: Path, server: KubeServer, count: int) -> None:
    server.fail_after = count
    with pytest.raises(RunError):
        submit(tmp_path)
    assert len(creations(server)) == count + 1
    assert {plural for _, plural, _ in server.objects} == {"persistentvolumeclaims"}


def test_job_owns_its_objects_and_the_same_command_follows_it(tmp_path: Path, server: KubeServer) -> None:
    job = submit(tmp_path)
    assert len(server.objects) == 9 and job.ended() is None
    again = submit(tmp_path)
    assert again.name == job.name and len(server.objects) == 9, "it runs already"
    job.stop()
    (spec,) = (value["spec"] for value in server.of_kind("jobs").values())
    assert spec["suspend"] is True
    server.update(("batch/v1", "jobs", job.name), lambda value: value.update(status=status("Suspended", active=1)))
    assert job.ended() is None, "its pods still save"
    server.update(("batch/v1", "jobs", job.name), lambda value: value.update(status=status("Suspended")))
    assert job.ended() == "Suspended" and job.exit_code("Suspended") == 75
    resumed = submit(tmp_path)
    assert resumed.name != job.name and len(server.of_kind("jobs")) == 2
    resumed.api.delete(f"/apis/batch/v1/namespaces/lab/jobs/{resumed.name}")
    assert resumed.ended() == "Deleted" and not any(name == resumed.name for *_, name in server.objects), (
        "nothing of it is left"
    )


def status(condition: str, active: int = 0) -> dict[str, object]:
    return {"conditions": [{"type": condition, "status": "True"}], "active": active}


def test_dry_run_needs_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-m", "phalanx", "train", "run.toml"]
    env = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    done = subprocess.run([*command, "--dry-run"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "kind: Job\n" in done.stdout and not (tmp_path / "runs").exists(), done.stderr
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "needs a kubeconfig" in done.stderr and not (tmp_path / "runs").exists()


def pod(server: KubeServer, job: str, state: dict[str, object], phase: str = "Running", **more: object) -> None:
    metadata = {
        "name": f"{job}-0",
        "labels": {"phalanx/run": job},
        "annotations": {"batch.kubernetes.io/job-completion-index": "2"},
    }
    value = {"phase": phase, "containerStatuses": [{"name": "node", "image": "x", "state": state}], **more}
    server.put(("v1", "pods", f"{job}-0"), {"metadata": metadata, "status": value})


def test_output_of_pods_arrives_once_whatever_happens_to_the_connection(tmp_path: Path, server: KubeServer) -> None:
    output = tmp_path / "output"
    records = [Warned(message=f"word {number}", time=float(number)) for number in range(6)]

    def write(second: int, *lines: str) -> None:
        with output.open("a") as file:
            file.writelines(f"2026-11-17T05:00:{second:02d}.123456789Z {line}\n" for line in lines)

    write(1, encode(records[0]), "[rank-3] first", "plain words")
    server.logs = lambda name: output
    job = submit(tmp_path)
    rundir = RunDir(tmp_path / "run")
    pod(server, job.name, {"running": {}})
    until(lambda: read_events(rundir.events_file) == records[:1])
    for second, disturb in enumerate([server.end_watches, server.compact, lambda: setattr(server, "down", True)], 2):
        disturb()
        write(second, encode(records[second - 1]), f"[rank-3] line {second}")
        time.sleep(0.1)
        server.down = False
        server.end_watches()
        until(lambda count=second: read_events(rundir.events_file) == records[:count])
    job.close()  # the command ends
    write(7, encode(records[4]), "[rank-3] last")
    kubernetes.catch_up(rundir)
    assert read_events(rundir.events_file) == records[:5]
    pod(server, job.name, {"terminated": {"exitCode": 0}}, phase="Succeeded")
    write(8, encode(Finished(step=3, time=9.0)))
    server.update(("batch/v1", "jobs", job.name), lambda value: value.update(status=status("Complete")))
    kubernetes.catch_up(rundir)
    assert read_events(rundir.events_file)[-1] == Finished(step=3, time=9.0) and rundir.exit_file.read_text() == "0\n"
    lines = [(line.source, line.text) for line in LogReader(rundir).new()]
    ranks = [text for source, text in lines if source == "rank 3"]
    assert ranks == ["first", "line 2", "line 3", "line 4", "last"] and ("node 2", "plain words") in lines


def test_user_hears_why_pods_do_not_start(tmp_path: Path, server: KubeServer) -> None:
    job = submit(tmp_path)
    heard: list[str] = []

    def hears(*parts: str) -> bool:
        heard.extend(job.news())
        return any(all(part in text for part in parts) for text in heard)

    pod(server, job.name, {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, phase="Pending")
    until(lambda: hears("cannot get its image x", "ImagePullBackOff", "cluster.kubernetes.image"))
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available."}
    pod(server, job.name, {}, phase="Pending", conditions=[condition])
    until(lambda: hears("waits for a host", "0/3 nodes are available", "cluster.nodes"))
    assert len(heard) == 2, "each once"


def test_kubeconfig_with_a_plugin_and_errors(tmp_path: Path, server: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "login"
    answer = {"kind": "ExecCredential", "status": {"token": "fresh"}}
    plugin.write_text(f'#!/bin/sh\n[ -n "$KUBERNETES_EXEC_INFO" ] && [ "$FOR" = me ] && echo \'{json.dumps(answer)}\'\n')
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    config = json.loads((tmp_path / "config").read_text())
    exec_ = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "env": [{"name": "FOR", "value": "me"}]}
    config["users"][0]["user"] = {"exec": exec_}
    (tmp_path / "config").write_text(json.dumps(config))
    assert connect(Kubernetes())._token() == "fresh"
    exec_["env"] = []
    (tmp_path / "config").write_text(json.dumps(config))
    with pytest.raises(RunError, match="gives no credentials"):
        connect(Kubernetes())
    with pytest.raises(RunError, match=r"none of its contexts \(lab\)"):
        connect(Kubernetes(context="other"))
    for broken in ("[", "7", "{}", '{"current-context": "a", "contexts": [{"name": "a", "context": {"cluster": "b"}}]}'):
        (tmp_path / "config").write_text(broken)
        with pytest.raises(RunError, match=r"valid kubeconfig|contexts"):
            connect(Kubernetes())
