"""Clusters, nodes, GPUs and networks of one's own: a few keys of the run file, or TOML files whose template is an entry of the catalogue."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from phalanx.planning import planner
from phalanx.planning.machines.catalogue import entries
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.hardware import hardware
from phalanx.planning.machines.part_template import kind_of, template
from phalanx.planning.request import PlanRequest
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Run

SMALL = '[model]\npreset = "llama3.2-1b"\nvocab = 128256\n[train]\nbatch = 64\nsequence_length = 2048\nsteps = 100\n'
OURS = 'gpu = "a100-sxm-40gb"\nnodes = 4\nnetwork = "ethernet-100"\nnics = 1'


def run(cluster: str) -> Run:
    return loads(f"{SMALL}[cluster]\n{cluster}\n")


def built(cluster: str) -> Hardware:
    return hardware(run(cluster), None)


def problems(cluster: str) -> str:
    with pytest.raises(RunError) as caught:
        built(cluster)
    return "\n".join(caught.value.problems)


def test_four_lines_describe_nodes_with_one_port() -> None:
    """The data sheet of one's own machines: 4 hosts of 8 A100 of 40 GB, one port of 100 Gbit/s in each."""
    made = built(OURS)
    assert (made.gpus, made.nodes, made.node, made.nics) == (32, 4, 8, 1)
    assert made.network == pytest.approx(100e9 / 8 / 8), "one port of 12.5 GB/s, shared by eight GPUs"
    assert made.gpu.memory == pytest.approx(39.6 * 2**30)
    assert not made.rails, "one port is on no rail"
    said = "\n".join(made.assumed)
    assert "4 nodes with 8 × NVIDIA A100 SXM 40 GB, 39.6 GiB each" in said
    assert "A node has 1 port of 100 Gbit/s Ethernet: 12.5 GB/s in all, 1.56 GB/s per device (IEEE 802.3)." in said


def test_ports_that_nobody_set_are_reported_with_the_key_that_sets_them() -> None:
    said = "\n".join(built('gpu = "a100-sxm-40gb"\ngpus = 32\nnetwork = "ethernet-100"').assumed)
    assert "8 ports of 100 Gbit/s Ethernet (as many as NVIDIA DGX A100 has; cluster.nics sets their number)" in said
    assert "100 GB/s in all, 12.5 GB/s per device" in said
    assert "cluster.nics" not in "\n".join(built('name = "h100-1024"').assumed), "a published cluster has its own ports"


def test_nodes_of_another_size() -> None:
    half = built('gpu = "h100-sxm"\ngpus_per_node = 4\nnodes = 2\nnics = 2')
    full = built('gpu = "h100-sxm"\nnodes = 2')
    assert (half.gpus, half.node, half.island, half.nodes) == (8, 4, 4, 2)
    assert half.network == pytest.approx(full.network / 2) and half.power == pytest.approx(full.power or 0)
    assert half.host_memory == pytest.approx(full.host_memory / 2)
    pairs = built('gpu = "h100-nvl"\ngpus_per_node = 4\nnodes = 2')
    assert pairs.island == 2, "bridges join pairs, however many there are"
    with pytest.raises(
        RunError, match=r"cluster.gpus = 16 is not cluster.nodes = 4 times cluster.gpus_per_node = 8, which is 32"
    ):
        built('gpu = "h100-sxm"\ngpus = 16\nnodes = 4\ngpus_per_node = 8')
    with pytest.raises(RunError, match=r"cluster.nics = 2 is part of a cluster .* set cluster.gpu"):
        run("nics = 2")


@pytest.mark.parametrize("name", entries("clusters"))
def test_template_of_a_cluster_loads_to_the_same_machines(name: str, tmp_path: Path) -> None:
    file = tmp_path / "copy.toml"
    file.write_text(template("clusters", name))
    assert built(f'name = "{file}"') == built(f'name = "{name}"')


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in ("nodes", "gpus", "links") for name in entries(kind)])
def test_template_of_a_part_loads_to_the_same_part(kind: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "copy.toml"
    file.write_text(template(kind, name))
    key = {"nodes": "node", "gpus": "gpu", "links": "network"}[kind]
    base = "" if key == "gpu" else 'gpu = "h100-sxm"\ngpus = 64\n'
    assert built(f'{base}{key} = "{file}"') == built(f'{base}{key} = "{name}"')


def test_template_plans_as_the_cluster_does(tmp_path: Path) -> None:
    file = tmp_path / "copy.toml"
    file.write_text(template("clusters", "a100-1024").replace("gpus = 1024", "gpus = 16"))
    own = planner.plan(PlanRequest(run(f'name = "{file}"')))
    known = planner.plan(PlanRequest(run('name = "a100-1024"\ngpus = 16')))
    assert own.best == known.best and own.runners_up == known.runners_up


def test_own_files_for_cluster_node_and_network(tmp_path: Path) -> None:
    """A cluster file refers to others next to it, whatever the working directory is."""
    (tmp_path / "net.toml").write_text('name = "our ring"\ngbps = 40\n')
    (tmp_path / "box.toml").write_text('like = "pcie4-box"\nname = "our box"\ngpus = 2\nnics = 2\nnetwork = "net.toml"\n')
    (tmp_path / "ours.toml").write_text(
        'name = "Ours"\nnodes = 3\nnode = "box.toml"\n[gpu]\nlike = "l40s"\nname = "our card"\nmemory = 40\n'
    )
    made = built(f'name = "{tmp_path}/ours.toml"')
    assert (made.name, made.gpus, made.node, made.nodes, made.nics) == ("Ours", 6, 2, 3, 2)
    assert made.network == pytest.approx(40e9 / 8) and made.gpu.memory == 40 * 2**30
    assert made.gpu.peak("bf16") == built('gpu = "l40s"').gpu.peak("bf16")
    said = "\n".join(made.assumed)
    assert "2 ports of our ring: 10 GB/s in all, 5 GB/s per device" in said
    assert "our box: host_memory, storage, power, link, host_link, rails as of A server with eight PCIe 4.0 GPUs" in said
    apart = built(f'gpu = "l40s"\ngpus = 6\nnode = "{tmp_path}/box.toml"\nnetwork = "{tmp_path}/net.toml"')
    assert (apart.node, apart.network) == (made.node, made.network)


def test_everything_wrong_with_a_file_is_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(
        'gpus = 0\nstorrage = 3\nrails = 1\n\n[gpu]\nlike = "h100-sxm"\nmemory = "80"\n\n[node]\nnics = -1\n\n'
        '[node.network]\ngbps = 100\nbandwidth = 12.5\nkind = "wifi"\n\n[measured]\ngemmm = 0.6\n'
    )
    said = problems(f'name = "{file}"').splitlines()
    expected = [
        f"{file}:1: gpus = 0 must be above 0 and at most 10,000,000.",
        f"{file}:2: storrage is not a key of such a file: did you mean storage?",
        f"{file}:3: rails = 1 is an integer, but true or false is expected.",
        f'{file}:7: gpu.memory = "80" is a string, but a number is expected.',
        f"{file}:10: node.nics = -1 must be above 0 and at most 1,024.",
        f'{file}:15: node.network.kind = "wifi" is unknown: it must be "network", "island" or "host".',
        f"{file}:13: node.network.gbps = 100 sets the speed, and bandwidth does too: keep one of them.",
        f"{file}:18: measured.gemmm is not a key of [measured]: did you mean gemm?",
    ]
    assert sorted(said) == sorted(expected)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('gpu = "h100-smx"\ngpus = 8\n', (":1: gpu = ", "h100-sxm", "`phalanx clusters`")),
        ('gpu = "h100-sxm"\ngpus = 8\nnode = "dgx-h10"\n', (":3: node = ", "dgx-h100")),
        ('gpu = "h100-sxm"\ngpus = 8\n[node]\nlink = "nvlink9"\n', (":4: node.link = ", "nvlink")),
        ('gpu = "h100-sxm"\ngpus = 8\n[node]\nlike = "dgx"\n', (":4: node.like = ", "dgx-")),
        ('gpu = "h100-sxm"\ngpus = 8\n[node]\nisland = 3\n', (":4: node.island = 3 does not divide the 8 devices", "divisor of 8")),
        ('gpu = "h100-sxm"\ngpus = 8\nfailures = "none"\n', (":3: failures = ", "a table of failures")),
        ('gpu = "h100-sxm"\ngpus = 8\nnodes = 1\n', (":3: nodes = 1", "keep one of them")),
        ('gpu = "h100-sxm"\ngpus = 8\nnetwork = "none.toml"\n', (":3: network = ", "No such file")),
        ("gpus = 8\n[gpu]\nmemory = 40\nbandwidth = 900\nbf16 = 100\n", ("gpu.node is missing", "[node]")),
        ("gpus = 8\n[gpu]\nmemory = 4\nbandwidth = 9\nbf16 = 1\n[node]\ngpus = 2\n", ("node.nics is missing", "node.link is missing")),
        ("gpu = \n", ("is not valid TOML", "line 1")),
        ('gpu = "h100-sxm"\ngpus = 8\n[network]\nname = "x"\n', ("network.bandwidth is missing", "gbps in Gbit/s")),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_name_the_place_and_the_remedy(text: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(text)
    said = problems(f'name = "{file}"')
    assert str(file) in said and all(part in said for part in parts), said


def test_templates_are_toml_with_units() -> None:
    text = template("clusters", "h100-16384")
    assert tomllib.loads(text)["node"]["network"]["bandwidth"] == 50
    assert "GB/s in one direction" in text and "# network ports of one host" in text
    assert kind_of("laptop", "show") == "clusters" and kind_of("dgx-a100", "show") == "nodes"
    with pytest.raises(RunError, match="did you mean dgx-a100"):
        kind_of("dgxa100", "show")


def test_examples_of_the_documentation_load(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "catalogue.md").read_text()
    *in_run_files, own = [block.partition("```")[0] for block in text.split("```toml\n")[1:]]
    assert len(in_run_files) == 3 and all(loads(SMALL + block) for block in in_run_files)
    assert hardware(loads(SMALL + in_run_files[-1]), None).assumed[2] in text, "the sentence that the page quotes"
    file = tmp_path / "ours.toml"
    file.write_text(own)
    made = built(f'name = "{file}"')
    assert (made.gpus, made.nodes, made.nics, made.gpu.memory) == (32, 8, 2, 64 * 2**30)
    assert made.network == pytest.approx(2 * 50e9 / 8 / 4)
