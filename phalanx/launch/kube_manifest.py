"""The Kubernetes objects of a run: a Job, a JobSet or a RayJob, and what its pods need. `launch/kubernetes` creates them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.control.protocol import NOT_SAVED, RESUMABLE
from phalanx.launch.kube_api import Object, read_yaml
from phalanx.launch.kube_objects import (
    Affinity,
    AffinityTerm,
    Claim,
    ConfigMapVolume,
    Container,
    EmptyDir,
    EnvFrom,
    EnvSource,
    EnvVar,
    Exec,
    ExitCodes,
    FailurePolicy,
    FailureRule,
    FieldRef,
    JobSetFailurePolicy,
    JobSetNetwork,
    JobSetSpec,
    JobSpec,
    JobTemplate,
    LabelSelector,
    LeaseSpec,
    Metadata,
    PodAffinity,
    PodCondition,
    PodSpec,
    PodTemplate,
    Probe,
    RayCluster,
    RayGroup,
    RayJobSpec,
    ReplicatedJob,
    Resource,
    Resources,
    RoleRef,
    Rule,
    SecretRef,
    ServiceSpec,
    Subject,
    SuccessPolicy,
    SuccessRule,
    Volume,
    VolumeMount,
    WeightedTerm,
    as_json,
)
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError, refuse, toml
from phalanx.spec.run import Run

HOME = "/run/phalanx"
"""Folder of the pods in which the files of a run are."""
CONTAINER = "node"
RUN_LABEL = "phalanx/run"
FAILED = (1, 2, NOT_SAVED)
"""Exit codes of `phalanx node` after which no other pod needs to go on: the run has failed, cannot start, or was stopped without being saved."""
_ALIVE = f"{HOME}/work/alive"
_MARGIN = 20  # seconds that the processes of a pod have to end after the run has saved
_KEEP = 7 * 86400  # seconds that a finished job and its logs stay
_START_SECONDS = 600  # in which a pod's Python starts
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_WATCH = ("get", "list", "watch", "patch", "update")
_MAX_NAME = 40  # characters: pods and labels add to it


def job_name(run_name: str, launch: str) -> str:
    """The name of all objects of a launch."""
    words = re.sub("[^a-z0-9]+", "-", run_name.lower()).strip("-")[: _MAX_NAME - len(launch) - 1].strip("-")
    return f"{words or 'run'}-{launch}"


def run_folder(run: Run, run_name: str) -> str:
    """The run directory as the pods see it: on the shared volume, or in each pod its own."""
    settings = run.cluster.kubernetes
    return f"{settings.mount if settings.volume else f'{HOME}/work'}/{run_name}"


def problems(run: Run) -> list[str]:
    """What the run file lacks for pods."""
    settings, table = run.cluster.kubernetes, "cluster.kubernetes"
    found = []
    if settings.image is None:
        found.append(f"{table}.image is missing: name a container image with Phalanx, such as registry.example.com/phalanx:1.")
    saves = run.checkpoint.save and run.command.program is None  # a program saves where it likes
    if saves and settings.volume is None and run.checkpoint.url is None:
        found.append(
            f"The pods share no folder for checkpoints: set {table}.volume to a PersistentVolumeClaim that many pods can write "
            "(ReadWriteMany), or checkpoint.url to an object store, such as s3://bucket/folder; or save none with checkpoint.save = false."
        )
    for name, value in (("namespace", settings.namespace), ("volume", settings.volume), ("secret", settings.secret)):
        if value is not None and not _NAME.fullmatch(value):
            found.append(f"{table}.{name} = {toml(value)} is no name of a Kubernetes object: use a-z, 0-9 and - only.")
    for name, pairs in (("resources", settings.resources), ("node_selector", settings.node_selector)):
        found += [f"{table}.{name}: {pair} is not NAME=VALUE." for pair in pairs if not re.fullmatch("[^=]+=[^=]*", pair)]
    if not settings.mount.startswith("/"):
        found.append(f"{table}.mount = {toml(settings.mount)} is not an absolute path.")
    return found


def resources(run: Run, run_name: str, launch: str) -> list[Resource]:
    """The objects of a run, in the order in which they are created; the last one owns the others. RunError lists what is missing."""
    refuse(problems(run))
    return _Renderer(run, run_name, launch).all()


class _Renderer:
    def __init__(self, run: Run, run_name: str, launch: str):
        self._run, self._settings = run, run.cluster.kubernetes
        self._run_name, self._name = run_name, job_name(run_name, launch)
        self._labels = {RUN_LABEL: self._name, "app.kubernetes.io/managed-by": "phalanx"}
        self._metadata = Metadata(name=self._name, labels=self._labels)
        self._account = self._settings.service_account or self._name

    def all(self) -> list[Resource]:
        settings = self._settings
        if settings.kind == "rayjob":
            return [self._run_file(), self._resource("ray.io/v1", "RayJob", spec=self._rayjob())]
        account = [] if settings.service_account else self._rights()
        shared = [self._run_file(), self._state(), self._lease(), *account]
        if settings.kind == "jobset":
            return [*shared, self._resource("jobset.x-k8s.io/v1alpha2", "JobSet", spec=self._jobset())]
        return [*shared, self._service(), self._resource("batch/v1", "Job", spec=self._job(keep=_KEEP))]

    def _resource(self, api_version: str, kind: str, **content: Any) -> Resource:
        return Resource(api_version=api_version, kind=kind, metadata=self._metadata, **content)

    def _run_file(self) -> Resource:
        run = self._run
        if self._settings.volume and run.data.cache == type(run.data)().cache:  # tokenized once, for all pods
            run = replace(run, data=replace(run.data, cache=f"{self._settings.mount}/cache"))
        return self._resource("v1", "ConfigMap", data={"run.toml": dump(run)})

    def _state(self) -> Resource:
        """Settings of the agents, with the token, and what a new controller must know. Node 0 writes it."""
        return self._resource("v1", "Secret", data={})

    def _lease(self) -> Resource:
        return self._resource("coordination.k8s.io/v1", "Lease", spec=LeaseSpec(lease_transitions=0))

    def _rights(self) -> list[Resource]:
        """A service account that can do what `launch/kube_registry` does, and no more."""
        ours = (self._name,)
        rules = (
            Rule(api_groups=("",), resources=("secrets",), resource_names=ours, verbs=_WATCH),
            Rule(
                api_groups=("coordination.k8s.io",),
                resources=("leases",),
                resource_names=ours,
                verbs=_WATCH,
            ),
            Rule(api_groups=("",), resources=("pods",), verbs=("get", "delete")),
            Rule(api_groups=("",), resources=("pods/status",), verbs=("patch",)),
        )
        role = RoleRef(api_group="rbac.authorization.k8s.io", kind="Role", name=self._name)
        return [
            self._resource("v1", "ServiceAccount"),
            self._resource("rbac.authorization.k8s.io/v1", "Role", rules=rules),
            self._resource(
                "rbac.authorization.k8s.io/v1",
                "RoleBinding",
                role_ref=role,
                subjects=(Subject(kind="ServiceAccount", name=self._name),),
            ),
        ]

    def _service(self) -> Resource:
        """Headless: the host names of the pods resolve. Phalanx itself uses their addresses."""
        spec = ServiceSpec(cluster_ip="None", publish_not_ready_addresses=True, selector={RUN_LABEL: self._name})
        return self._resource("v1", "Service", spec=spec)

    def _job(self, keep: int | None) -> JobSpec:
        """One pod per node. Pods that end before the run are started again, by their exit code."""
        disrupted = (PodCondition(type="DisruptionTarget", status="True"),)
        rules = (
            FailureRule(action="Ignore", on_pod_conditions=disrupted),
            FailureRule(action="Ignore", on_exit_codes=ExitCodes(container_name=CONTAINER, operator="In", values=(RESUMABLE,))),
            FailureRule(action="FailJob", on_exit_codes=ExitCodes(container_name=CONTAINER, operator="In", values=FAILED)),
        )
        return JobSpec(
            completion_mode="Indexed",
            completions=self._run.cluster.nodes,
            parallelism=self._run.cluster.nodes,
            backoff_limit_per_index=self._run.resilience.restarts,
            pod_failure_policy=FailurePolicy(rules=rules),
            # A run is over when any pod says so: one that was lost may never come back.
            success_policy=SuccessPolicy(rules=(SuccessRule(succeeded_count=1),)),
            pod_replacement_policy="Failed",
            ttl_seconds_after_finished=keep,
            template=self._pod(self._agent(), restart_policy="Never", subdomain=self._name, service_account_name=self._account),
        )

    def _jobset(self) -> JobSetSpec:
        return JobSetSpec(
            network=JobSetNetwork(enable_dns_hostnames=True, publish_not_ready_addresses=True),
            failure_policy=JobSetFailurePolicy(max_restarts=0),
            ttl_seconds_after_finished=_KEEP,
            replicated_jobs=(ReplicatedJob(name=CONTAINER, replicas=1, template=JobTemplate(spec=self._job(keep=None))),),
        )

    def _rayjob(self) -> RayJobSpec:
        """The Ray launcher inside a Ray cluster of the run's own."""
        nodes, folder = self._run.cluster.nodes, run_folder(self._run, self._run_name)
        head = replace(self._container("ray-head"), resources=None)
        workers = RayGroup(
            group_name="nodes",
            replicas=nodes,
            min_replicas=nodes,
            max_replicas=nodes,
            ray_start_params={},
            template=self._pod(self._container("ray-worker"), automount_service_account_token=False),
        )
        return RayJobSpec(
            entrypoint=f"phalanx train {HOME}/config/run.toml --on ray --run-dir {folder}",
            shutdown_after_job_finishes=True,
            ttl_seconds_after_finished=_KEEP,
            ray_cluster_spec=RayCluster(
                # No CPUs: the head runs the command, but no node of the run.
                head_group_spec=RayGroup(ray_start_params={"num-cpus": "0"}, template=self._pod(head)),
                worker_group_specs=(workers,),
            ),
        )

    def _pod(self, container: Container, **content: Any) -> PodTemplate:
        settings, same_run = self._settings, LabelSelector(match_labels={RUN_LABEL: self._name})
        near = AffinityTerm(label_selector=same_run, topology_key="topology.kubernetes.io/zone")
        host = AffinityTerm(label_selector=same_run, topology_key="kubernetes.io/hostname")
        spec = PodSpec(
            termination_grace_period_seconds=math.ceil(self._run.resilience.preemption_notice) + _MARGIN,
            node_selector=_pairs(settings.node_selector) or None,
            # A pod is a host of the plan: tensor groups are inside it, and copies in memory are on another machine.
            affinity=Affinity(
                pod_affinity=PodAffinity(
                    preferred_during_scheduling_ignored_during_execution=(WeightedTerm(weight=100, pod_affinity_term=near),)
                ),
                pod_anti_affinity=PodAffinity(required_during_scheduling_ignored_during_execution=(host,)),
            ),
            containers=(container,),
            volumes=self._volumes(),
            **content,
        )
        return PodTemplate(metadata=Metadata(labels=self._labels), spec=_extended(spec, settings.pod))

    def _container(self, name: str) -> Container:
        settings = self._settings
        assert settings.image is not None
        mounts = [
            VolumeMount(name="config", mount_path=f"{HOME}/config", read_only=True),
            VolumeMount(name="work", mount_path=f"{HOME}/work"),
            VolumeMount(name="shm", mount_path="/dev/shm"),
        ]
        if settings.volume:
            mounts.append(VolumeMount(name="shared", mount_path=settings.mount))
        limits = _pairs(settings.resources)
        return Container(
            name=name,
            image=settings.image,
            env_from=(EnvFrom(secret_ref=SecretRef(name=settings.secret)),) if settings.secret else None,
            resources=Resources(limits=limits) if limits else None,
            volume_mounts=tuple(mounts),
        )

    def _agent(self) -> Container:
        """The container of an Indexed Job's pod. The Job itself sets JOB_COMPLETION_INDEX, the number of the node."""

        def of_pod(name: str, path: str) -> EnvVar:
            return EnvVar(name=name, value_from=EnvSource(field_ref=FieldRef(field_path=path)))

        folder = run_folder(self._run, self._run_name)
        command = ("phalanx", "node", folder, "--run-file", f"{HOME}/config/run.toml", "--bind", "$(POD_IP)")
        return replace(
            self._container(CONTAINER),
            command=(*command, "--alive-file", _ALIVE),
            env=(
                of_pod("POD_NAME", "metadata.name"),
                of_pod("POD_IP", "status.podIP"),
                EnvVar(name="PHALANX_LAUNCH", value=self._name),
                EnvVar(name="PHALANX_NODES", value=str(self._run.cluster.nodes)),
                EnvVar(name="PHALANX_SHARED", value="1" if self._settings.volume else "0"),
            ),
            startup_probe=_probe(f"test -e {_ALIVE}", period=5, failures=_START_SECONDS // 5),
            liveness_probe=_probe(f'test -n "$(find {_ALIVE} -mmin -2)"', period=30, failures=3),
        )

    def _volumes(self) -> tuple[Volume, ...]:
        # Memory that a pod's /dev/shm takes counts as the pod's own; it holds the copies of the state.
        shm = EmptyDir(medium="Memory", size_limit=_pairs(self._settings.resources).get("memory"))
        shared = self._settings.volume
        return (
            Volume(name="config", config_map=ConfigMapVolume(name=self._name)),
            Volume(name="work", empty_dir=EmptyDir()),
            Volume(name="shm", empty_dir=shm),
            *((Volume(name="shared", persistent_volume_claim=Claim(claim_name=shared)),) if shared else ()),
        )


def _probe(script: str, period: int, failures: int) -> Probe:
    command = ("sh", "-c", script)
    return Probe(exec=Exec(command=command), period_seconds=period, failure_threshold=failures, timeout_seconds=10)


def _pairs(words: tuple[str, ...]) -> dict[str, str]:
    return dict(pair for word in words if len(pair := word.split("=", 1)) == 2)


def _extended(spec: PodSpec, file: str | None) -> PodSpec | Object:
    """The spec of a pod with the fields of the user's file merged into it."""
    if file is None:
        return spec
    try:
        more = read_yaml(Path(file).expanduser())
    except (OSError, ValueError) as error:
        raise RunError(
            f"cluster.kubernetes.pod = {toml(file)} cannot be read ({error}): name a YAML file of pod fields."
        ) from None
    if "containers" in more:
        raise RunError(f"{file}: containers is set by Phalanx: remove it; [cluster.kubernetes] sets image and resources.")
    merged: Object = _merged(as_json(spec), more)
    return merged


def _merged(value: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396); lists, such as volumes, are appended."""
    if isinstance(value, list) and isinstance(patch, list):
        return [*value, *patch]
    if not isinstance(patch, dict):
        return patch
    base = value if isinstance(value, dict) else {}
    changed = {name: _merged(base.get(name), part) for name, part in patch.items()}
    return {name: part for name, part in {**base, **changed}.items() if part is not None}
