"""The file that lists hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launch.hosts import Host, read_hosts
from phalanx.spec.errors import RunError


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
