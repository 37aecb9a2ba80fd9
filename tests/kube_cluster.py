"""A Kubernetes cluster for tests: the API server of `kube_server`, a Job controller and kubelets that run pods as processes on hosts that are network
namespaces (`hosts`). A pod's process has the command, the environment and the volumes of its manifest, and nothing else. Needs root."""

from __future__ import annotations

import base64
import shlex
import ssl
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from hosts import Hosts
from kube_server import KubeServer, Object

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
INDEX = "batch.kubernetes.io/job-completion-index"
JOBS, PODS = ("batch/v1", "jobs"), ("v1", "pods")


@dataclass
class Pod:
    name: str
    job: str
    index: int
    host: int
    process: subprocess.Popen[bytes]
    log: Path
    reader: threading.Thread
    asked_to_end: float | None = None
    lost: bool = False
    """Its host is cut off: the cluster sees nothing of it any more."""


@dataclass
class JobState:
    done: bool = False
    failures: dict[int, int] = field(default_factory=dict)


class KubeCluster:
    """`with KubeCluster(folder, hosts)`."""

    def __init__(self, folder: Path, hosts: Hosts, image_env: dict[str, str] | None = None):
        folder.mkdir()
        self.folder, self.hosts, self._image_env = folder, hosts, image_env or {}
        self.claims: dict[str, Path] = {}
        """PersistentVolumeClaims: their folders."""
        self.pods: dict[str, Pod] = {}
        """All that were ever started."""
        self.exits: list[tuple[str, int]] = []
        self._jobs: dict[str, JobState] = {}
        self._closed, self._problem = False, None

    def __enter__(self) -> Self:
        key, certificate = self.folder / "key.pem", self.folder / "ca.crt"
        name = f"subjectAltName=IP:{self.hosts.outside}"
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ]
        subprocess.run(
            [*command, "-subj", "/CN=lab", "-addext", name, "-keyout", key, "-out", certificate],
            check=True,
            capture_output=True,
        )
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
        self.server = KubeServer(self.hosts.outside, tls=tls)
        self.server.logs = lambda pod: self.pods[pod].log if pod in self.pods else None
        self._thread = threading.Thread(target=self._control, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed = True
        self._thread.join()
        for host in range(self.hosts.count):
            self.hosts.kill_all(host)
        for pod in self.pods.values():
            pod.process.wait()
            pod.reader.join()
        self.server.close()

    def claim(self, name: str) -> Path:
        """A PersistentVolumeClaim."""
        path = self.claims[name] = self.folder / name
        path.mkdir()
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        key = ("v1", "persistentvolumeclaims", name)
        self.server.put(key, {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec})
        return path

    def kubeconfig(self) -> Path:
        path, ca = self.folder / "config", base64.b64encode((self.folder / "ca.crt").read_bytes()).decode()
        path.write_text(
            f"current-context: lab\n"
            f"contexts: [{{name: lab, context: {{cluster: lab, user: me, namespace: {self.server.namespace}}}}}]\n"
            f"clusters: [{{name: lab, cluster: {{server: {self.server.url!r}, certificate-authority-data: {ca}}}}}]\n"
            f"users: [{{name: me, user: {{token: a word}}}}]\n"
        )
        return path

    def running(self, index: int) -> Pod | None:
        """The pod of an index that runs now."""
        return next(
            (pod for pod in self.pods.values() if pod.index == index and pod.process.poll() is None and not pod.lost), None
        )

    def lose_host(self, host: int) -> None:
        """Cut a host off, for the cluster, too: its pods are not ready, but do not end."""
        for pod in self.pods.values():
            if pod.host == host and pod.process.poll() is None:
                pod.lost = True
                self._set_status(pod, "Running", ready=False)
        self.hosts.cut(host)

    # --- the Job controller and the kubelets, in one thread ---

    def _control(self) -> None:
        while not self._closed:
            for pod in list(self.pods.values()):
                self._reap(pod)
            for jobset in self.server.of_kind("jobsets").values():
                self._expand(jobset)
            jobs = self.server.of_kind("jobs")
            for pod in self.pods.values():
                if pod.job not in jobs:
                    self._end(pod)
            for name, job in jobs.items():
                self._reconcile(name, job)
            time.sleep(0.1)

    def _expand(self, jobset: Object) -> None:
        """The Job of a JobSet."""
        (replicated,) = jobset["spec"]["replicatedJobs"]
        name = f"{jobset['metadata']['name']}-{replicated['name']}-0"
        if (*JOBS, name) not in self.server.objects:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": replicated["template"]["spec"]}
            self.server.put((*JOBS, name), job)
        ended = self.server.objects[(*JOBS, name)].get("status", {}).get("conditions", [])
        names = {"Complete": "Completed", "Failed": "Failed"}
        conditions = [{"type": names[one["type"]], "status": "True"} for one in ended if one["type"] in names]
        if conditions and "status" not in jobset:
            key = ("jobset.x-k8s.io/v1alpha2", "jobsets", jobset["metadata"]["name"])
            self.server.update(key, lambda value: value.update(status={"conditions": conditions}))

    def _reconcile(self, name: str, job: Object) -> None:
        state = self._jobs.setdefault(name, JobState())
        own = [pod for pod in self.pods.values() if pod.job == name]
        active = [pod for pod in own if (*PODS, pod.name) in self.server.objects and self._phase(pod) == "Running"]
        if state.done or job["spec"].get("suspend"):
            for pod in active:
                self._end(pod)
            if not state.done:
                self._job_status(name, "Suspended", len(active))
            return
        taken = {pod.host for pod in own if pod.process.poll() is None}
        for index in range(job["spec"]["completions"]):
            if (
                not any(pod.index == index for pod in active)
                and state.failures.get(index, 0) <= job["spec"]["backoffLimitPerIndex"]
            ):
                host = next((host for host in range(self.hosts.count) if host not in taken), None)
                if host is not None:
                    taken.add(host)
                    self._start(name, job, index, host)

    def _start(self, job_name: str, job: Object, index: int, host: int) -> None:
        template = job["spec"]["template"]
        name, log = f"{job_name}-{index}-{uuid.uuid4().hex[:5]}", self.folder / f"{job_name}-{index}-{len(self.pods)}.log"
        (container,) = template["spec"]["containers"]
        metadata = {"name": name, "labels": template["metadata"]["labels"], "annotations": {INDEX: str(index)}}
        ip = self.hosts.address(host)
        env = self._environment(container, {"metadata.name": name, "status.podIP": ip}) | {"JOB_COMPLETION_INDEX": str(index)}
        command = [_expanded(word, env) for word in container["command"]]
        script = self._mounts(name, template["spec"], container)
        log.touch()
        # As a container runtime does: every line with its time.
        process = subprocess.Popen(
            [*self.hosts.inside(host), "sh", "-c", f'{script}exec "$@"', "sh", *command],
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        reader = threading.Thread(target=_stamp, args=(process, log), daemon=True)
        reader.start()
        pod = self.pods[name] = Pod(name, job_name, index, host, process, log, reader)
        value = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": template["spec"],
            "status": {"phase": "Running"},
        }
        self.server.put((*PODS, name), value)
        self._set_status(pod, "Running", ready=True)

    def _environment(self, container: Object, fields: dict[str, str]) -> dict[str, str]:
        """The variables of a container: those of the image, the service of the API, and those of the manifest."""
        env = {
            "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": str(ROOT),
            "HOME": "/run/home",
        } | self._image_env
        env |= {"KUBERNETES_SERVICE_HOST": self.server.address, "KUBERNETES_SERVICE_PORT": str(self.server.port)}
        for source in container.get("envFrom", []):
            data = self.server.objects[("v1", "secrets", source["secretRef"]["name"])]["data"]
            env |= {key: base64.b64decode(text).decode() for key, text in data.items()}
        for entry in container.get("env", []):
            env[entry["name"]] = entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        return env

    def _mounts(self, name: str, spec: Object, container: Object) -> str:
        """Shell commands that give a process the volumes of its pod. /run is its own."""
        private = self.folder / "pods" / name
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        script = "mount -t tmpfs tmpfs /run && mkdir -p /run/home && "
        places: list[tuple[Path | None, str]] = [(self._account(private), ACCOUNT)]
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                source = private / mount["name"]
                source.mkdir(parents=True)
                for key, text in self.server.objects[("v1", "configmaps", volume["configMap"]["name"])]["data"].items():
                    (source / key).write_text(text)
            elif "persistentVolumeClaim" in volume:
                source = self.claims[volume["persistentVolumeClaim"]["claimName"]]
            elif volume["emptyDir"].get("medium") == "Memory":
                source = None
            else:
                source = private / mount["name"]
                source.mkdir(parents=True)
            places.append((source, mount["mountPath"]))
        for source, target in places:
            bound = (
                f"mount --bind {shlex.quote(str(source))} {target}" if source else f"mount -t tmpfs -o size=1g tmpfs {target}"
            )
            script += f"mkdir -p {target} && {bound} && "
        return script

    def _account(self, private: Path) -> Path:
        folder = private / "account"
        folder.mkdir(parents=True)
        (folder / "token").write_text("the word of the pods")
        (folder / "namespace").write_text(self.server.namespace)
        (folder / "ca.crt").write_bytes((self.folder / "ca.crt").read_bytes())
        return folder

    def _reap(self, pod: Pod) -> None:
        """A pod has ended, or was deleted."""
        known = (*PODS, pod.name) in self.server.objects
        if not known and not pod.lost:
            self._end(pod)
        if pod.lost or pod.process.poll() is None or not known or self._phase(pod) != "Running":
            return
        code = pod.process.returncode
        code = code if code >= 0 else 128 - code
        self.exits.append((pod.name, code))
        self._set_status(pod, "Succeeded" if code == 0 else "Failed", ready=False, code=code)
        job, state = self.server.objects.get((*JOBS, pod.job)), self._jobs[pod.job]
        if job is None or state.done:
            return
        if code == 0:
            succeeded = [other for other in self.pods.values() if other.job == pod.job and self._phase(other) == "Succeeded"]
            if len(succeeded) >= job["spec"]["successPolicy"]["rules"][0]["succeededCount"]:
                state.done = True
                self._job_status(pod.job, "Complete", 0)
            return
        action = _failure_action(job["spec"]["podFailurePolicy"]["rules"], code)
        if action == "FailJob":
            state.done = True
            self._job_status(pod.job, "Failed", 0)
        elif action == "Count" and not job["spec"].get("suspend"):
            state.failures[pod.index] = state.failures.get(pod.index, 0) + 1

    def _end(self, pod: Pod) -> None:
        """SIGTERM, and SIGKILL after the grace period."""
        if pod.process.poll() is not None:
            return
        if pod.asked_to_end is None:
            pod.asked_to_end = time.monotonic()
            pod.process.terminate()
        elif time.monotonic() - pod.asked_to_end > 120:  # a busy machine
            self.hosts.kill_all(pod.host)

    def _phase(self, pod: Pod) -> str | None:
        value = self.server.objects.get((*PODS, pod.name))
        return None if value is None else str(value["status"]["phase"])

    def _set_status(self, pod: Pod, phase: str, *, ready: bool, code: int | None = None) -> None:
        state: Object = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        status = {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": "node", "state": state}],
        }
        self.server.update((*PODS, pod.name), lambda value: value.update(status=status))

    def _job_status(self, name: str, condition: str, active: int) -> None:
        status = {"conditions": [{"type": condition, "status": "True"}], "active": active}

        def change(value: Object) -> None:
            value["status"] = status

        if self.server.objects[(*JOBS, name)].get("status") != status:
            self.server.update((*JOBS, name), change)


def _failure_action(rules: list[Object], code: int) -> str:
    for rule in rules:
        if code in rule.get("onExitCodes", {}).get("values", []):
            return str(rule["action"])
    return "Count"


def _expanded(word: str, env: dict[str, str]) -> str:
    """As Kubernetes does: $(NAME) is a variable."""
    for name, value in env.items():
        word = word.replace(f"$({name})", value)
    return word


def _stamp(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stdout is not None
    with log.open("a") as file, process.stdout:
        for line in process.stdout:
            stamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "123Z")
            file.write(f"{stamp} {line.decode(errors='replace')}")
            file.flush()
