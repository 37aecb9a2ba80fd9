"""Network namespaces as hosts: each has an address, a host name and a /dev/shm of its own, and hangs on one bridge. Needs root."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def available() -> bool:
    if os.geteuid():
        return False
    name = f"px{os.getpid()}t"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


_numbers = count()


class Hosts:
    def __init__(self, count: int):
        # A name of its own: the kernel removes the links of a namespace some time after it.
        self.count, self._bridge = count, f"px{os.getpid() % 1_000_000}n{next(_numbers)}"
        self._servers: list[subprocess.Popen[bytes]] = []

    def address(self, host: int) -> str:
        return f"10.78.0.{10 + host}"

    def __enter__(self) -> Self:
        ip("link", "add", self._bridge, "type", "bridge")
        ip("addr", "add", "10.78.0.1/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for host in range(self.count):
            name = self._name(host)
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", self._bridge, "up")
            ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for host in range(self.count):
            self.kill_all(host)
            ip("netns", "del", self._name(host))
        for server in self._servers:
            server.wait()
        ip("link", "del", self._bridge)

    def prefix(self, host: int, private: Path | None = None) -> list[str]:
        """Runs the command that follows it on a host. `private`: a folder that the host does not share with the others."""
        own = f"mkdir -p {private} && mount -t tmpfs tmpfs {private} && " if private is not None else ""
        return [*self.inside(host), "sh", "-c", f'{own}exec "$@"', "sh"]

    def inside(self, host: int) -> list[str]:
        """As `prefix`, with everything shared but /dev/shm. Not `ip netns exec`: it hides /sys/fs/cgroup, which slurmd needs."""
        own = f'hostname h{host} && mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'
        return ["nsenter", f"--net=/run/netns/{self._name(host)}", "unshare", "--uts", "--mount", "sh", "-c", own, "sh"]

    @property
    def outside(self) -> str:
        """The address of this machine, on which the hosts are namespaces, in their network."""
        return "10.78.0.1"

    def start_sshd(self, folder: Path, private: Path) -> Path:
        """Start an ssh server on every host; returns the configuration of a client. `private`: as with `prefix`."""
        folder.mkdir(mode=0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host", "id"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        settings = ["Port 22", f"HostKey {folder}/host", f"AuthorizedKeysFile {folder}/id.pub", "StrictModes no", "UsePAM no"]
        settings += ["PermitRootLogin prohibit-password", "PasswordAuthentication no", "PidFile none"]
        for host in range(self.count):
            file = folder / f"sshd-{host}"
            file.write_text("\n".join([*settings, f"ListenAddress {self.address(host)}", ""]))
            command = [
                *self.prefix(host, private),
                "/usr/sbin/sshd",
                "-D",
                "-f",
                str(file),
                "-E",
                str(folder / f"sshd-{host}.log"),
            ]
            self._servers.append(subprocess.Popen(command, start_new_session=True))
        client = folder / "config"
        client.write_text(f"IdentityFile {folder}/id\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n")
        return client

    def kill_all(self, host: int) -> None:
        """kill -9 everything on a host."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self._name(host)], check=True, capture_output=True, text=True
        ).stdout.split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def cut(self, host: int) -> None:
        """From now on its packets vanish, as with a pulled cable."""
        ip("link", "set", self._name(host), "nomaster")

    def mend(self, host: int) -> None:
        ip("link", "set", self._name(host), "master", self._bridge)

    def shape(self, host: int, rate: int) -> None:
        """From now on it sends and receives this many bits per second at most."""
        name, limit = self._name(host), ["root", "tbf", "rate", f"{rate}bit", "burst", "256kb", "latency", "50ms"]
        for where in (["-n", name], []):
            device = "eth0" if where else name
            subprocess.run(["tc", *where, "qdisc", "replace", "dev", device, *limit], check=True, capture_output=True)

    def _name(self, host: int) -> str:
        return f"{self._bridge}h{host}"
