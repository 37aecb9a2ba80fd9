"""The rendered objects against the schemas of Kubernetes, strictly: a misspelled or misplaced field is found."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.kube_manifest import resources
from phalanx.spec.load import loads

pytestmark = pytest.mark.clusters
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")

VERSIONS = ("1.31", "1.34")
CUSTOM = ("JobSet", "RayJob")
RUN = """
[train]
batch = 8
steps = 3
[cluster]
launcher = "kubernetes"
nodes = 4
[cluster.kubernetes]
image = "registry/phalanx:1"
kind = "{kind}"
volume = "data"
secret = "s3"
resources = ["nvidia.com/gpu=8", "cpu=64", "memory=900Gi"]
node_selector = ["pool=h100"]
pod = "{pod}"
"""
Object = dict[str, Any]


@pytest.fixture
def rendered(tmp_path: Path) -> dict[str, list[Object]]:
    """Objects by kind of job. What only a custom kind contains stands for itself: its Job, its pods."""
    pod = tmp_path / "pod.yaml"
    pod.write_text("tolerations: [{key: gpu, operator: Exists}]\npriorityClassName: high\n")
    found = {}
    for kind in ("job", "jobset", "rayjob"):
        objects = [resource.to_json() for resource in resources(loads(RUN.format(kind=kind, pod=pod)), "run", "ab12")]
        found[kind] = [part for value in objects for part in _core_parts(value)]
    return found


def _core_parts(value: Object) -> list[Object]:
    metadata, spec = value["metadata"], value.get("spec", {})
    if value["kind"] == "JobSet":
        jobs = [replicated["template"]["spec"] for replicated in spec["replicatedJobs"]]
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job} for job in jobs]
    if value["kind"] == "RayJob":
        cluster = spec["rayClusterSpec"]
        templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
        return [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]} for template in templates]
    return [value]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_core_object_is_valid(rendered: dict[str, list[Object]], version: str) -> None:
    kinds = {kind: [value["kind"] for value in objects] for kind, objects in rendered.items()}
    shared = ["ConfigMap", "Secret", "Lease", "ServiceAccount", "Role", "RoleBinding"]
    assert kinds == {"job": [*shared, "Service", "Job"], "jobset": [*shared, "Job"], "rayjob": ["ConfigMap", "Pod", "Pod"]}
    for value in (value for objects in rendered.values() for value in objects):
        kubernetes_validate.validate(value, version, strict=True)


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every object with named fields in a value; not maps of the user's own keys, such as labels."""
    if path and path[-1] in ("labels", "annotations", "matchLabels", "limits", "nodeSelector", "selector", "data"):
        return []
    if isinstance(value, dict):
        return [path, *(place for name, part in value.items() for place in places(part, (*path, name)))]
    return (
        [place for index, part in enumerate(value) for place in places(part, (*path, index))] if isinstance(value, list) else []
    )


def test_a_typo_is_found_wherever_it_is(rendered: dict[str, list[Object]]) -> None:
    planted = 0
    for value in rendered["job"]:
        for place in places(value):
            broken = copy.deepcopy(value)
            inner: Any = broken
            for step in place:
                inner = inner[step]
            if not inner:
                continue
            name = next(iter(inner))
            inner[f"{name}x"] = inner[name]
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)
            planted += 1
    assert planted > 60
