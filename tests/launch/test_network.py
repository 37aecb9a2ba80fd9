"""What a run shows of itself on its machine: the ports that it may use, and nothing of its token."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from strangers import leaks

from phalanx.checkpointing.replicas.shm_slots import default_root
from phalanx.control.protocol import RESUMABLE, AgentSettings
from phalanx.events.records import Step
from phalanx.host.env import python_env
from phalanx.host.host_report import HostQuestion, HostReport, report
from phalanx.launch.host_group import HostGroup
from phalanx.launch.job import Job
from phalanx.launch.launcher import StartedAgent
from phalanx.launch.prepare import Request, prepare
from phalanx.launch.run_checks import address_problems
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Run

RUN = """
[model]
dim = 32
layers = 1
heads = 2
kv_heads = 2
[data]
source = "memory"
documents = ["{text}"]
[train]
batch = 4
micro_batch = 1
sequence_length = 32
steps = 5
[layout]
data = 2
[cluster]
threads = 1
device = "cpu"
{cluster}
""".replace("{text}", "all that glitters is not gold; often have you heard that told. " * 40)


def listeners(pids: list[int]) -> dict[tuple[str, int], str]:
    """Address to the command that listens there."""
    found = {}
    for pid in pids:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr[0], connection.laddr[1]] = " ".join(psutil.Process(pid).cmdline())
    return found


def free_ports(count: int) -> range:
    """That many neighboring ports, free a moment ago."""
    for first in range(30_000, 60_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return range(first, first + count)
    raise AssertionError


def test_run_keeps_to_its_ports_and_its_token_to_itself(tmp_path: Path) -> None:
    ports = free_ports(7)
    text = RUN.replace("{cluster}", f'nodes = 2\nports = "{ports[0]}-{ports[-1]}"')
    with socket.create_server(("127.0.0.1", ports[1])):  # in use by another program
        endless = loads(text, overrides=["train.steps=1000000"])
        running = Job(prepare(endless, "run", Request(directory=tmp_path / "run")))
        token, found, shown = running._settings.token, {}, []
        for event in running.events():
            if isinstance(event, Step) and event.step == 2:
                pids = [child.pid for child in psutil.Process().children(recursive=True)]
                found = listeners(pids)
                shown = leaks(token, [os.getpid(), *pids], [tmp_path, default_root()])
                running.stop()
    assert running.exit_code == RESUMABLE
    ours = {port for (_, port), command in found.items() if "agent" in command or "replica_server" in command}
    assert len(ours) == 4 and ours <= set(ports) - {ports[1]}
    assert {address for address, _ in found} == {"127.0.0.1"}
    assert shown == [] and leaks(token, [], [tmp_path]) == []


def test_ports_that_are_taken_are_counted_before_the_start() -> None:
    ports = free_ports(6)
    run = loads(RUN.replace("{cluster}", f'nodes = 2\nports = "{ports[0]}-{ports[-1]}"'))
    assert address_problems(run) == []
    with socket.create_server(("127.0.0.1", ports[2])):
        (problem,) = address_problems(run)
    assert f'cluster.ports = "{ports[0]}-{ports[-1]}": the run needs 6 free ports' in problem and "widen the range" in problem


def test_settings_of_phalanx_node_are_private(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace("{cluster}", ""))
    words = ["node", "run", "--run-file", "run.toml", "--node", "0", "--nodes", "1", "--launch", "one"]
    before = os.umask(0)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", *words], cwd=tmp_path, env=python_env(), stderr=subprocess.PIPE, text=True
        )
    finally:
        os.umask(before)
    settings, text = tmp_path / "run/control/settings.json", ""
    while process.poll() is None and not text:
        if settings.exists():
            text = settings.read_text()
            pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            shown = leaks(re.findall(r'"token": "([0-9a-f]{64})"', text)[0], pids, [tmp_path])
        time.sleep(0.005)
    _, errors = process.communicate()
    assert process.returncode == 0 and text, errors
    assert shown == [] and not settings.exists(), "the run is over, and so is its token"


class Two(HostGroup):
    """Two hosts that are like this one, but for their addresses."""

    restart_after = None

    def __init__(self, run: Run, *addresses: dict[str, str]):
        super().__init__(run, ["a", "b"])
        self._known = [replace(report(HostQuestion(run_dir="/", launch="")), addresses=each) for each in addresses]

    def _report(self, node: int, question: HostQuestion) -> HostReport:
        return replace(self._known[node], clock=time.time(), reached_at=f"10.0.0.{node}")

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        raise AssertionError


def test_hosts_listen_on_the_interface_that_the_run_names() -> None:
    first, second = {"10.0.0.0": "eth0", "10.1.0.5": "ib0"}, {"10.0.0.1": "eth0", "10.1.0.6": "ib0"}
    for bind, expected in (("127.0.0.1", ["10.0.0.0", "10.0.0.1"]), ("ib0", ["10.1.0.5", "10.1.0.6"])):
        hosts = Two(loads(RUN.replace("{cluster}", f'bind = "{bind}"')), first, second)
        hosts.machine()
        assert [hosts._address(node) for node in range(2)] == expected
    hosts = Two(loads(RUN.replace("{cluster}", 'bind = "ib0"')), first, {"10.0.0.1": "eth0"})
    with pytest.raises(
        RunError, match=r'cluster.bind = "ib0" is not an interface of b that has an address \(these are: eth0\)'
    ):
        hosts.machine()
