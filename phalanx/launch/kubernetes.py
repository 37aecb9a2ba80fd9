"""The Kubernetes launcher: creates the objects of a run (`launch/kube_manifest`) and follows its pods. In every pod `phalanx node` does the rest.

The command's machine has a run directory with what the pods print: the records of the run, and the logs of ranks unless they are on a shared
volume. The run goes on without the command.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from queue import Empty, SimpleQueue

from phalanx.control.protocol import RESUMABLE
from phalanx.events.log import RecordWriter
from phalanx.events.run_logs import note_size
from phalanx.events.rundir import RunDir, replace_file
from phalanx.launch.kube_api import ApiError, KubeApi, Object, connect, import_yaml
from phalanx.launch.kube_manifest import CONTAINER, FAILED, RUN_LABEL, problems, resources
from phalanx.launch.kube_objects import Resource
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.run import Kubernetes, Run

_KINDS = {"job": ("jobs", "batch/v1"), "jobset": ("jobsets", "jobset.x-k8s.io/v1alpha2"), "rayjob": ("rayjobs", "ray.io/v1")}
_ENDED = {"Complete": 0, "Failed": 1, "Suspended": RESUMABLE, "Deleted": RESUMABLE}
_WORDS = {"Completed": "Complete", "SUCCEEDED": "Complete", "FAILED": "Failed", "STOPPED": "Suspended"}
_RETRY = 1.0  # seconds until a watch or a log that has ended is asked for again
_LAST_WORDS = 8  # lines of a failed pod's output that are shown
_LAST_LINES = 10.0  # seconds in which the last lines of ended pods arrive
_LOG = re.compile(r"\[((?:rank|node|replicas)-\d+|launch)\] (.*)")
_RECORD = '{"event": '


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """A created job. Implements `launch/launcher.SubmittedJob`."""

    api: KubeApi
    kind: str
    name: str
    follower: PodFollower | None = None

    @property
    def title(self) -> str:
        return f"{self.kind} {self.api.namespace}/{self.name}"

    @property
    def remarks(self) -> str:
        return "To stop it, `phalanx stop` with its run directory; to follow it, the same command again."

    def ended(self) -> str | None:
        """How the job has ended; None while it waits or runs, or the API server does not answer now."""
        try:
            found = self.api.find(self._path)
        except (OSError, ApiError):
            return None
        if found is None:
            return "Deleted"
        status = found.get("status") or {}
        names: list[str] = [one["type"] for one in status.get("conditions") or [] if one.get("status") == "True"]
        names += [status.get("jobStatus", ""), status.get("jobDeploymentStatus", "")]
        busy = any(part.get("active") or part.get("terminating") for part in (status, *status.get("replicatedJobsStatus", ())))
        for name in (_WORDS.get(name, name) for name in names):
            if name in _ENDED and not (name == "Suspended" and busy):
                return name
        return None

    def news(self) -> list[str]:
        return [] if self.follower is None else list(self.follower.news())

    def exit_code(self, state: str) -> int:
        return _ENDED[state]

    def stop(self) -> None:
        """The pods get SIGTERM, the run saves, and no pod is started again."""
        try:
            self.api.patch(self._path, {"spec": {"suspend": True}})
        except (OSError, ApiError) as error:
            raise RunError(
                f"{self.title} cannot be stopped ({error}): try again, or `kubectl delete {self.kind} {self.name}`."
            ) from None

    def close(self) -> None:
        """If the job has ended, read the last lines of its pods."""
        if self.follower is not None:
            self.follower.close(0.0 if self.ended() is None else _LAST_LINES)

    @property
    def _path(self) -> str:
        return f"{self.api.path(*_KINDS[self.kind])}/{self.name}"


def manifest(run: Run, run_name: str) -> str:
    """The objects of a run as YAML."""
    yaml = import_yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        """Writes text of several lines as it is."""

    def text(dumper: Dumper, value: str) -> object:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    documents = [resource.to_json() for resource in resources(run, run_name, secrets.token_hex(3))]
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000))


def open_api(run: Run) -> KubeApi:
    """The API server of a run whose settings are complete."""
    refuse(problems(run))
    return connect(run.cluster.kubernetes)


def submit(api: KubeApi, run: Run, rundir: RunDir) -> KubernetesJob:
    """Create the objects of a run, or continue with the job that is running already. RunError if they cannot be created; then none is left."""
    running = find_job(rundir)
    if running is None or running.ended() is not None:
        kind = run.cluster.kubernetes.kind
        objects = resources(run, rundir.path.name, secrets.token_hex(3))
        refuse(list(_missing(api, run.cluster.kubernetes)))
        for resource in objects:
            _create(api, resource, dry_run=True)
        _create_all(api, objects)
        running = KubernetesJob(api, kind, objects[-1].metadata.name or "")
        rundir.exit_file.unlink(missing_ok=True)
        rundir.launch_id = running.name
        replace_file(rundir.run_file, dump(run))
        about = {"kind": kind, "name": running.name, "namespace": api.namespace, "context": run.cluster.kubernetes.context}
        replace_file(rundir.job_file, json.dumps(about))
    follower = PodFollower(running, rundir)
    follower.start()
    return KubernetesJob(running.api, running.kind, running.name, follower)


def find_job(rundir: RunDir) -> KubernetesJob | None:
    """The job whose run directory this is; None if it is of no Kubernetes job."""
    try:
        about = json.loads(rundir.job_file.read_text())
    except (OSError, ValueError):
        return None
    api = connect(Kubernetes(namespace=about["namespace"], context=about["context"]))
    return KubernetesJob(api, about["kind"], about["name"])


def catch_up(rundir: RunDir) -> None:
    """Bring the run directory of a Kubernetes job up to date, unless another command does so."""
    if (job := find_job(rundir)) is not None and rundir.acquire():
        try:
            with contextlib.suppress(OSError, ApiError):  # what is known is shown
                PodFollower(job, rundir).read_once()
            note_end(rundir, job)
        finally:
            rundir.release()


def note_end(rundir: RunDir, job: KubernetesJob) -> None:
    """Note in the run directory if the job has ended."""
    if (state := job.ended()) is not None:
        rundir.control.mkdir(exist_ok=True)
        replace_file(rundir.exit_file, f"{job.exit_code(state)}\n")


def _missing(api: KubeApi, settings: Kubernetes) -> Iterator[str]:
    """What the run names that is not in the cluster. Objects that may not be read are left to the pods."""
    wanted = {
        "volume": ("persistentvolumeclaims", "PersistentVolumeClaim", settings.volume),
        "secret": ("secrets", "Secret", settings.secret),
        "service_account": ("serviceaccounts", "ServiceAccount", settings.service_account),
    }
    for key, (plural, kind, name) in wanted.items():
        if name is None:
            continue
        try:
            found = api.find(f"{api.path(plural)}/{name}")
        except ApiError as error:
            if error.status != http.client.FORBIDDEN:
                raise RunError(f"{api.server} refuses: {error}.") from None
            continue
        except OSError as error:
            raise _unreachable(api, error) from None
        if found is None:
            yield (
                f'cluster.kubernetes.{key} = "{name}": there is no such {kind} in namespace {api.namespace}: create it, or correct the '
                "name or cluster.kubernetes.namespace."
            )
        elif key == "volume" and "ReadWriteMany" not in (found.get("spec") or {}).get("accessModes", ["ReadWriteMany"]):
            yield (
                f'cluster.kubernetes.volume = "{name}" cannot be written by pods of several hosts: it needs access mode ReadWriteMany; or '
                "use checkpoint.url."
            )


def _create_all(api: KubeApi, objects: list[Resource]) -> None:
    """Create objects of which the last one owns the others: all, or none."""
    created: list[str] = []
    try:
        for resource in objects:
            made = _create(api, resource)
            created.append(f"{_collection(api, resource)}/{resource.metadata.name}")
        owner = {"apiVersion": made["apiVersion"], "kind": made["kind"], "name": made["metadata"]["name"]}
        reference = {**owner, "uid": made["metadata"]["uid"], "controller": False, "blockOwnerDeletion": False}
        for path in created[:-1]:
            api.patch(path, {"metadata": {"ownerReferences": [reference]}})
    except BaseException as error:
        for path in reversed(created):
            with contextlib.suppress(OSError, ApiError):
                api.delete(path)
        if isinstance(error, OSError | ApiError):
            raise RunError(
                f"{api.server} fails while the job is created ({error}): nothing is left of it; try again."
            ) from None
        raise


def _create(api: KubeApi, resource: Resource, *, dry_run: bool = False) -> Object:
    kind, name = resource.kind, resource.metadata.name
    try:
        return api.create(_collection(api, resource), resource.to_json(), dry_run=dry_run)
    except OSError as error:
        raise _unreachable(api, error) from None
    except ApiError as error:
        if error.status == http.client.FORBIDDEN and kind in ("ServiceAccount", "Role", "RoleBinding"):
            remedy = "ask for a service account with the rights that docs/kubernetes.md lists, and set cluster.kubernetes.service_account"
        elif error.status == http.client.FORBIDDEN:
            remedy = "ask for the right, or choose another cluster.kubernetes.namespace or context"
        elif error.status == http.client.UNAUTHORIZED:
            remedy = "renew the credentials of your kubeconfig; `kubectl get pods` must work"
        elif error.status == http.client.NOT_FOUND and kind in ("JobSet", "RayJob"):
            remedy = f'install the controller of {kind} in the cluster, or set cluster.kubernetes.kind = "job"'
        elif error.status == http.client.NOT_FOUND:
            remedy = "create the namespace, or correct cluster.kubernetes.namespace"
        else:
            remedy = "look at `--dry-run`, cluster.kubernetes.pod and cluster.kubernetes.resources"
        raise RunError(f"{kind} {name} cannot be created in namespace {api.namespace} ({error}): {remedy}.") from None


def _unreachable(api: KubeApi, error: OSError) -> RunError:
    return RunError(f"The Kubernetes API at {api.server} cannot be reached ({error}): `kubectl get pods` must work here.")


def _collection(api: KubeApi, resource: Resource) -> str:
    return api.path(resource.plural, resource.api_version)


@dataclass(slots=True)
class _Pod:
    """A pod that is followed."""

    node: str
    since: str | None = None
    """Time of the last line that was read."""
    running: bool = False
    told: set[str] = field(default_factory=set)
    """What has been told about it."""
    failed: int | None = None
    """Exit code with which it has ended the job."""
    thread: threading.Thread | None = None


class PodFollower:
    """Writes what the pods of a run print into its run directory on this machine, and says what keeps pods from starting."""

    def __init__(self, job: KubernetesJob, rundir: RunDir):
        self._api, self._rundir = job.api, rundir
        self._query = {"labelSelector": f"{RUN_LABEL}={job.name}"}
        self._writer = RecordWriter(rundir.events_file)
        self._lock = threading.Lock()
        self._news: SimpleQueue[str] = SimpleQueue()
        self._pods: dict[str, _Pod] = {}
        self._closed = False
        self._positions = rundir.control / "pods.json"
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self._positions.read_text())
            self._pods = {name: _Pod(**entry) for name, entry in known.items()}

    def start(self) -> None:
        threading.Thread(target=self._watch, name="pods", daemon=True).start()

    def read_once(self) -> None:
        """Read what the pods have printed up to now."""
        listed = self._api.get(f"{self._api.path('pods')}?labelSelector={self._query['labelSelector']}")
        for value in listed["items"]:
            self._on_pod(value, follow=False)
        self._save_positions()

    def news(self) -> Iterator[str]:
        with contextlib.suppress(Empty):
            while True:
                yield self._news.get_nowait()

    def close(self, patience: float) -> None:
        """End, after at most this many seconds for what the pods have printed."""
        deadline = time.monotonic() + patience
        for pod in list(self._pods.values()):
            if pod.thread is not None:
                pod.thread.join(max(0.0, deadline - time.monotonic()))
        self._closed = True
        self._save_positions()
        for name, pod in self._pods.items():
            if pod.failed is not None:
                log = self._rundir.logs / f"node-{pod.node}.log"
                words = log.read_text(errors="replace").splitlines()[-_LAST_WORDS:] if log.exists() else []
                self._news.put("\n".join([f"Pod {name} has ended with exit code {pod.failed}. Its last words:", *words]))

    def _watch(self) -> None:
        while not self._closed:
            try:
                for change in self._api.watch(self._api.path("pods"), self._query):
                    if self._closed:
                        return
                    if change.kind == "DELETED" and (pod := self._pods.get(change.value["metadata"]["name"])) is not None:
                        pod.running = False
                    elif change.kind in ("ADDED", "MODIFIED"):
                        self._on_pod(change.value, follow=True)
            except OSError:
                pass
            except ApiError as error:
                if error.status == http.client.FORBIDDEN:
                    self._news.put(f"The pods cannot be followed ({error}). The run goes on: ask for the right to watch pods.")
                    return
            time.sleep(_RETRY)

    def _on_pod(self, value: Object, *, follow: bool) -> None:
        name, status = value["metadata"]["name"], value.get("status") or {}
        index = (value["metadata"].get("annotations") or {}).get("batch.kubernetes.io/job-completion-index", "0")
        pod = self._pods.setdefault(name, _Pod(index))
        for problem in _pod_problems(name, status):
            if problem not in pod.told:
                pod.told.add(problem)
                self._news.put(problem)
        pod.running = status.get("phase") == "Running"
        for one in status.get("containerStatuses") or []:
            if (code := one["state"].get("terminated", {}).get("exitCode")) in FAILED:
                pod.failed = code
        started = [
            one for one in status.get("containerStatuses") or [] if one["name"] == CONTAINER and "waiting" not in one["state"]
        ]
        if not started:
            return
        if not follow:
            self._read(name, pod, follow=False)
        elif pod.thread is None:
            pod.thread = threading.Thread(target=self._follow, args=(name, pod), name=f"log of {name}", daemon=True)
            pod.thread.start()

    def _follow(self, name: str, pod: _Pod) -> None:
        """Read what a pod prints until it has ended and everything is read."""
        while not self._closed:
            ended = not pod.running
            if self._read(name, pod, follow=True) and ended:
                return
            time.sleep(_RETRY)

    def _read(self, name: str, pod: _Pod, *, follow: bool) -> bool:
        """Read what a pod prints from now on; returns whether that ended without an error."""
        last = pod.since
        try:
            for stamp, text in self._api.log(name, container=CONTAINER, since=last, follow=follow):
                if self._closed:
                    return False
                if last is None or stamp > last:  # the API counts whole seconds
                    self._write(pod, stamp, text)
                    pod.since = stamp
        except OSError:
            return False
        except ApiError as error:
            return error.status == http.client.NOT_FOUND
        return True

    def _write(self, pod: _Pod, stamp: str, text: str) -> None:
        with self._lock:
            if text.startswith(_RECORD):
                self._writer.write(text)
                return
            tagged = _LOG.fullmatch(text)
            path = self._rundir.logs / f"{tagged[1] if tagged else f'node-{pod.node}'}.log"
            with path.open("a") as file:
                file.write(f"{tagged[2] if tagged else text}\n")
            with contextlib.suppress(ValueError):
                # Times have nanoseconds, which Python does not read.
                note_size(
                    path, path.stat().st_size, datetime.fromisoformat(re.sub(r"\.(\d{1,6})\d*", r".\1", stamp)).timestamp()
                )

    def _save_positions(self) -> None:
        self._rundir.control.mkdir(exist_ok=True)
        replace_file(
            self._positions, json.dumps({name: {"node": pod.node, "since": pod.since} for name, pod in self._pods.items()})
        )


def _pod_problems(name: str, status: Object) -> Iterator[str]:
    """What keeps a pod from starting."""
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield (
                f"Pod {name} waits for a host: {condition.get('message', condition.get('reason', ''))} Lower cluster.nodes or "
                "cluster.kubernetes.resources, or add hosts."
            )
    for one in status.get("containerStatuses") or []:
        waiting = one["state"].get("waiting") or {}
        reason = waiting.get("reason", "")
        if "Image" in reason:
            yield (
                f"Pod {name} cannot get its image {one.get('image', '')} ({reason}: {waiting.get('message', '')}): correct "
                "cluster.kubernetes.image, or give the pods imagePullSecrets with cluster.kubernetes.pod."
            )
        elif reason.startswith("Create") or reason.endswith("Error"):
            yield f"Pod {name} cannot start ({reason}: {waiting.get('message', '')}): `kubectl describe pod {name}` says more."
