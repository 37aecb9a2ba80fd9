"""Objects of the Kubernetes API as typed values. `launch/kube_manifest` makes those of a run.

A field of a dataclass here is the field of the same name in the API, in its spelling (`cluster_ip` is clusterIP); None is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from phalanx.launch.kube_api import Object

_CAPITALS = {"ip": "IP", "dns": "DNS"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    name: str | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRef:
    field_path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSource:
    field_ref: FieldRef


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvVar:
    name: str
    value: str | None = None
    value_from: EnvSource | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretRef:
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvFrom:
    secret_ref: SecretRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Exec:
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    exec: Exec
    period_seconds: int
    failure_threshold: int
    timeout_seconds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    limits: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeMount:
    name: str
    mount_path: str
    read_only: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    name: str
    image: str
    command: tuple[str, ...] | None = None
    env: tuple[EnvVar, ...] | None = None
    env_from: tuple[EnvFrom, ...] | None = None
    resources: Resources | None = None
    startup_probe: Probe | None = None
    liveness_probe: Probe | None = None
    volume_mounts: tuple[VolumeMount, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmptyDir:
    medium: str | None = None
    size_limit: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    claim_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigMapVolume:
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    name: str
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: Claim | None = None
    config_map: ConfigMapVolume | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelSelector:
    match_labels: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class AffinityTerm:
    label_selector: LabelSelector
    topology_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedTerm:
    weight: int
    pod_affinity_term: AffinityTerm


@dataclass(frozen=True, kw_only=True, slots=True)
class PodAffinity:
    required_during_scheduling_ignored_during_execution: tuple[AffinityTerm, ...] | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[WeightedTerm, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Affinity:
    pod_affinity: PodAffinity
    pod_anti_affinity: PodAffinity


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSpec:
    restart_policy: str | None = None
    subdomain: str | None = None
    service_account_name: str | None = None
    automount_service_account_token: bool | None = None
    termination_grace_period_seconds: int | None = None
    node_selector: Mapping[str, str] | None = None
    affinity: Affinity | None = None
    containers: tuple[Container, ...]
    volumes: tuple[Volume, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PodTemplate:
    metadata: Metadata
    spec: PodSpec | Object


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitCodes:
    container_name: str
    operator: str
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PodCondition:
    type: str
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRule:
    action: str
    on_exit_codes: ExitCodes | None = None
    on_pod_conditions: tuple[PodCondition, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FailurePolicy:
    rules: tuple[FailureRule, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SuccessRule:
    succeeded_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SuccessPolicy:
    rules: tuple[SuccessRule, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    completion_mode: str
    completions: int
    parallelism: int
    backoff_limit_per_index: int
    pod_failure_policy: FailurePolicy
    success_policy: SuccessPolicy
    pod_replacement_policy: str
    ttl_seconds_after_finished: int | None = None
    template: PodTemplate


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTemplate:
    spec: JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedJob:
    name: str
    replicas: int
    template: JobTemplate


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetNetwork:
    enable_dns_hostnames: bool
    publish_not_ready_addresses: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetFailurePolicy:
    max_restarts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetSpec:
    network: JobSetNetwork
    failure_policy: JobSetFailurePolicy
    ttl_seconds_after_finished: int
    replicated_jobs: tuple[ReplicatedJob, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RayGroup:
    group_name: str | None = None
    replicas: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    ray_start_params: Mapping[str, str]
    template: PodTemplate


@dataclass(frozen=True, kw_only=True, slots=True)
class RayCluster:
    head_group_spec: RayGroup
    worker_group_specs: tuple[RayGroup, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RayJobSpec:
    entrypoint: str
    shutdown_after_job_finishes: bool
    ttl_seconds_after_finished: int
    ray_cluster_spec: RayCluster


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceSpec:
    cluster_ip: str
    publish_not_ready_addresses: bool
    selector: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseSpec:
    lease_transitions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    api_groups: tuple[str, ...]
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    resource_names: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleRef:
    api_group: str
    kind: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    kind: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """One object of the API."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: JobSpec | JobSetSpec | RayJobSpec | ServiceSpec | LeaseSpec | None = None
    data: Mapping[str, str] | None = None
    rules: tuple[Rule, ...] | None = None
    role_ref: RoleRef | None = None
    subjects: tuple[Subject, ...] | None = None

    @property
    def plural(self) -> str:
        """The name of the kind in paths of the API."""
        return f"{self.kind.lower()}s"

    def to_json(self) -> Object:
        result: Object = as_json(self)
        return result


def as_json(value: Any) -> Any:
    """A part as the API spells it."""
    if is_dataclass(value):
        named = {_camel(field.name): getattr(value, field.name) for field in fields(value)}
        return {name: as_json(part) for name, part in named.items() if part is not None}
    if isinstance(value, tuple):
        return [as_json(part) for part in value]
    return dict(value) if isinstance(value, Mapping) else value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(_CAPITALS.get(word, word.capitalize()) for word in rest)
