from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess
import sys

import psutil
import pytest

from phalanx.host import interfaces
from phalanx.host.env import python_env, worker_env
from phalanx.host.probe import probe
from phalanx.planning.planner import choose
from phalanx.spec.load import loads


def test_addresses_are_those_that_the_system_lists() -> None:
    kinds = ("AF_INET", "AF_INET6")
    listed = {
        ipaddress.ip_address(one.address.partition("%")[0]): name
        for name, several in psutil.net_if_addrs().items()
        for one in several
        if one.family.name in kinds and psutil.net_if_stats()[name].isup
    }
    assert interfaces.addresses() == listed


def test_every_loopback_address_is_on_lo() -> None:
    assert (
        interfaces.interface_of("127.0.0.1") == interfaces.interface_of("127.9.8.7") == interfaces.interface_of("::1") == "lo"
    )
    assert interfaces.interface_of("198.51.100.7") is None  # reserved for documentation


SECONDARY = """
import json, subprocess
from phalanx.host.interfaces import interface_of
for command in ("link add first type bridge", "addr add 10.7.0.1/24 dev first", "addr add 10.7.0.2/24 dev first label first:2",
                "addr add 10.8.0.1/24 dev first", "link set first up"):
    subprocess.run(["ip", *command.split()], check=True)
print(json.dumps([interface_of(f"10.{network}.0.{host}") for network, host in ((7, 1), (7, 2), (8, 1), (9, 1))]))
"""


def test_secondary_addresses_are_found() -> None:
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if (
        shutil.which("ip") is None
        or subprocess.run([*alone, "ip", "link", "add", "x", "type", "bridge"], capture_output=True).returncode
    ):
        pytest.skip("no network of its own can be had here")
    done = subprocess.run([*alone, sys.executable, "-c", SECONDARY], capture_output=True, text=True, env=python_env())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["first", "first", "first", None]


def test_workers_use_the_interface_of_their_address_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = choose(loads("[train]\nbatch = 1\nsteps = 1\n"), probe(""), 1)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(interfaces, "addresses", lambda: {ipaddress.ip_address("10.0.0.5"): "ib0"})

    def names(bind: str) -> tuple[str | None, str | None]:
        env = worker_env(plan, bind)
        return env.get("GLOO_SOCKET_IFNAME"), env.get("NCCL_SOCKET_IFNAME")

    assert names("127.0.0.1") == ("lo", "=lo")
    assert names("10.0.0.5") == ("ib0", "=ib0")
    assert "NCCL_SOCKET_FAMILY" not in worker_env(plan, "10.0.0.5")
    assert worker_env(plan, "::1")["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth8")
    assert names("127.0.0.1") == names("10.0.0.5") == ("eth7", "eth8")
