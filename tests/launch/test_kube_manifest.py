"""The rendered objects of a run. tests/clusters validates them against the schemas of Kubernetes, and runs their commands."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.control.protocol import NOT_SAVED, RESUMABLE
from phalanx.launch.kube_manifest import job_name, resources
from phalanx.launch.kubernetes import manifest
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Run

RUN = """
[train]
batch = 8
steps = 3
[cluster]
launcher = "kubernetes"
nodes = 4
[cluster.kubernetes]
image = "registry/phalanx:1"
resources = ["nvidia.com/gpu=8", "memory=900Gi"]
node_selector = ["pool=h100"]
[resilience]
preemption_notice = 60.5
"""


def run(*overrides: str) -> Run:
    return loads(RUN, overrides=["cluster.kubernetes.volume=data", *overrides])


def rendered(*overrides: str) -> dict[str, dict[str, Any]]:
    return {resource.kind: resource.to_json() for resource in resources(run(*overrides), "My_Run", "ab12")}


def test_indexed_job_with_what_its_pods_need() -> None:
    objects = rendered()
    assert list(objects) == ["ConfigMap", "Secret", "Lease", "ServiceAccount", "Role", "RoleBinding", "Service", "Job"]
    assert {value["metadata"]["name"] for value in objects.values()} == {"my-run-ab12"}
    spec = objects["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    actions = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in spec["podFailurePolicy"]["rules"]]
    assert actions == [("Ignore", None), ("Ignore", [RESUMABLE]), ("FailJob", [1, 2, NOT_SAVED])]
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 1}]} and spec["podReplacementPolicy"] == "Failed"
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 61 + 20 and pod["nodeSelector"] == {"pool": "h100"}
    assert pod["restartPolicy"] == "Never" and pod["serviceAccountName"] == "my-run-ab12"
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8", "memory": "900Gi"}}
    assert container["command"][:3] == ["phalanx", "node", "/run/phalanx/shared/My_Run"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "900Gi"}
    assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "data"}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    # The run that the pods read is the run, with its tokenized data on the shared volume.
    read = loads(objects["ConfigMap"]["data"]["run.toml"])
    assert read == replace(run(), data=replace(run().data, cache="/run/phalanx/shared/cache"))
    assert objects["Secret"]["data"] == {}, "the token is made in a pod"


def test_rights_of_the_pods_are_for_their_own_objects() -> None:
    rules = rendered()["Role"]["rules"]
    for rule in rules:
        assert rule["resources"] in (["pods"], ["pods/status"]) or rule["resourceNames"] == ["my-run-ab12"]
        assert "create" not in rule["verbs"] and "*" not in rule["verbs"]
    mine = rendered("cluster.kubernetes.service_account=mine")
    assert not {"ServiceAccount", "Role", "RoleBinding"} & mine.keys()
    assert mine["Job"]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


def test_jobset_has_the_same_job() -> None:
    objects = rendered("cluster.kubernetes.kind=jobset")
    assert "Service" not in objects, "a JobSet makes its own"
    jobset = objects["JobSet"]["spec"]
    (replicated,) = jobset["replicatedJobs"]
    assert jobset["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    job = rendered()["Job"]["spec"]
    del job["ttlSecondsAfterFinished"]  # only of the whole
    assert replicated["template"]["spec"] == job and replicated["replicas"] == 1


def test_rayjob_runs_the_ray_launcher() -> None:
    objects = rendered("cluster.kubernetes.kind=rayjob")
    assert list(objects) == ["ConfigMap", "RayJob"]
    spec = objects["RayJob"]["spec"]
    assert spec["entrypoint"] == "phalanx train /run/phalanx/config/run.toml --on ray --run-dir /run/phalanx/shared/My_Run"
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (4, 4, 4)
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    assert "resources" not in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]


def test_pod_file_is_merged(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(
        "tolerations: [{key: gpu, operator: Exists}]\nterminationGracePeriodSeconds: 300\nvolumes: [{name: more, emptyDir: {}}]\n"
    )
    pod = rendered(f"cluster.kubernetes.pod={file}")["Job"]["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}] and pod["terminationGracePeriodSeconds"] == 300
    assert [volume["name"] for volume in pod["volumes"]] == ["config", "work", "shm", "shared", "more"]
    file.write_text("containers: []\n")
    with pytest.raises(RunError, match="containers is set by Phalanx"):
        rendered(f"cluster.kubernetes.pod={file}")
    with pytest.raises(RunError, match="cannot be read"):
        rendered(f"cluster.kubernetes.pod={tmp_path}/none.yaml")


def test_what_is_missing_is_reported_at_once() -> None:
    bad = loads(RUN.replace('image = "registry/phalanx:1"', ""), overrides=["cluster.kubernetes.namespace=My_Space"])
    with pytest.raises(RunError) as error:
        resources(bad, "run", "x")
    image, storage, namespace = error.value.problems
    assert "cluster.kubernetes.image is missing" in image and "checkpoint.url" in storage and "My_Space" in namespace
    nowhere = loads(RUN, overrides=["checkpoint.save=false"])
    assert resources(nowhere, "run", "x")[-1].kind == "Job", "a run that saves nothing needs no storage"
    with pytest.raises(RunError, match="gpu is not NAME=VALUE"):
        resources(run("cluster.kubernetes.resources=gpu"), "run", "x")


@pytest.mark.parametrize("name", ["run", "My Run!", "_", "a" * 200, "-x-"])
def test_names_are_those_of_kubernetes(name: str) -> None:
    made = job_name(name, "ab12cd")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", made) and len(made) <= 40 and made.endswith("-ab12cd")


def test_yaml_reads_back() -> None:
    text = manifest(run(), "quickstart")
    documents = list(yaml.safe_load_all(text))
    assert [value["kind"] for value in documents] == [resource.kind for resource in resources(run(), "quickstart", "x")]
    assert loads(documents[0]["data"]["run.toml"]).cluster.nodes == 4
    assert "run.toml: |" in text and "*id" not in text, "for people to read"


def test_the_page_is_true() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    objects = {one.kind: one.to_json() for one in resources(loads(f"{block}\n[train]\nbatch = 8\nsteps = 3\n"), "run", "x")}
    table = page.partition("| resource | verbs |\n|---|---|\n")[2]
    documented = {
        (resource, verb)
        for names, verbs in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.M)
        for resource in names.split(", ")
        for verb in verbs.split(", ")
    }
    granted = {
        (".".join(filter(None, (resource, *rule["apiGroups"]))), verb)
        for rule in objects["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert documented == granted
