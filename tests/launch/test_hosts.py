"""The file that lists hosts, and what they must agree on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.host.probe import this_machine
from phalanx.launch.host_report import HostQuestion, HostReport, report
from phalanx.launch.hosts import Host, disagreements, read_hosts, shortages
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Gpu


def write(folder: Path, text: str) -> Path:
    (folder / "hosts.txt").write_text(text)
    return folder / "hosts.txt"


def test_hosts_with_and_without_settings(tmp_path: Path) -> None:
    text = "# ours\nnode-a\n\nnode-b slots=4   # four GPUs\nme@10.0.0.7 port=2222 bind=192.168.7.7 python=/opt/x/bin/python\n"
    assert read_hosts(write(tmp_path, text)) == [
        Host(name="node-a"),
        Host(name="node-b", slots=4),
        Host(name="10.0.0.7", user="me", port=2222, bind="192.168.7.7", python="/opt/x/bin/python"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lists no host: write one name or address per line"),
        ("# nothing\n", "lists no host"),
        (
            "a\nb slot=2",
            'hosts.txt:2: "slot=2" is not a setting of a host: known are bind, slots, switch, port, user, python, as in slots=4, did you mean slots?',
        ),
        ("a slots=0", "slots=0 is not a positive whole number"),
        ("a port=ssh", "port=ssh is not a positive whole number"),
        ("a bind=eth0", "bind=eth0 is not an IP address"),
        ("a bind=0.0.0.0", "bind=0.0.0.0 means every interface"),
        ("slots=2", '"slots=2" is not a host'),
        ("-oProxyCommand=x", '"-oProxyCommand=x" is not a host'),
        ("a\nb\na", "a is listed 2 times: remove 1 of them"),
    ],
)
def test_bad_hosts_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RunError) as error:
        read_hosts(write(tmp_path, text))
    assert words in str(error.value) and "hosts.txt" in str(error.value)


def test_missing_hosts_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere\.txt cannot be read \(No such file or directory\)"):
        read_hosts(tmp_path / "nowhere.txt")


@pytest.fixture(scope="module")
def same() -> HostReport:
    return report(HostQuestion(run_dir="/nowhere/run", launch="1", paths=("/", "/nowhere/data")))


def test_this_machine_reports(same: HostReport) -> None:
    assert same.machine == this_machine() and not same.sees_run_dir and same.missing == ("/nowhere/data",)
    assert "127.0.0.1" not in same.addresses and same.free_disk > 0 and len(same.code) == 64


def problems(*reports: HostReport) -> list[str]:
    names = [chr(ord("a") + number) for number in range(len(reports))]
    return list(disagreements(names, reports, [(reports[0].clock - 1, reports[0].clock + 1)] * len(reports)))


def test_equal_hosts_agree(same: HostReport) -> None:
    assert not problems(same) and not problems(same, replace(same, clock=same.clock + 0.5), same)


def test_a_host_that_differs_is_named(same: HostReport) -> None:
    other = replace(same, versions={**same.versions, "torch": "2.0.0"})
    (sentence,) = problems(same, other, same)
    assert sentence.startswith("torch of b is 2.0.0, but ") and "remove the host" in sentence
    (sentence,) = problems(same, same, replace(same, code="0" * 64))
    assert sentence.startswith("Phalanx's source code of c is 000000000000")
    (sentence,) = problems(same, replace(same, clock=same.clock + 300), same)
    assert sentence.startswith("The clock of b is 299 s ahead of the others")
    (sentence,) = problems(same, replace(same, clock=same.clock - 300), same)
    assert sentence.startswith("The clock of b is 299 s behind the others")
    (sentence,) = problems(same, replace(same, machine=replace(same.machine, gpus=(Gpu(name="x", memory=1),))), same)
    assert sentence.startswith("the number of GPUs of b is 1 GPUs") and "slots=N" in sentence


def test_a_full_host_is_named(same: HostReport) -> None:
    roomy = replace(same, free_disk=1 << 30, free_memory=same.machine.memory)
    assert not list(shortages(["a", "b"], [roomy, roomy], Path("/runs/x")))
    (sentence,) = shortages(["a", "b"], [roomy, replace(roomy, free_disk=3 << 20)], Path("/runs/x"))
    assert sentence.startswith("b has 3 MiB free for /runs/x")
    (sentence,) = shortages(["a", "b"], [replace(roomy, free_memory=1 << 20), roomy], Path("/runs/x"))
    assert sentence.startswith("a has 1 MiB of its ")
