"""Network namespaces as hosts: each has an address, a host name and a /dev/shm of its own, and hangs on one bridge. Needs root."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from phalanx.control.protocol import AgentSettings
from phalanx.events.records import Event, Step
from phalanx.launch.agent_process import AgentProcess
from phalanx.launch.launcher import StartedAgent
from phalanx.launch.local import Local
from phalanx.spec.run import Run


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
    def __init__(self, count: int, ipv6: bool = False):
        """`ipv6`: the hosts have no other addresses."""
        self._network, self._bits = ("fd00:78::", 64) if ipv6 else ("10.78.0.", 24)
        self._flags = ["nodad"] if ipv6 else []  # usable at once
        # A name of its own: the kernel removes the links of a namespace some time after it.
        self.count, self._bridge = count, f"px{os.getpid() % 1_000_000}n{next(_numbers)}"
        self._servers: list[subprocess.Popen[bytes]] = []

    def address(self, host: int) -> str:
        return f"{self._network}{10 + host}"

    def __enter__(self) -> Self:
        ip("link", "add", self._bridge, "type", "bridge")
        ip("addr", "add", f"{self.outside}/{self._bits}", "dev", self._bridge, *self._flags)
        ip("link", "set", self._bridge, "up")
        for host in range(self.count):
            name = self._name(host)
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", self._bridge, "up")
            ip("-n", name, "addr", "add", f"{self.address(host)}/{self._bits}", "dev", "eth0", *self._flags)
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
        own = f"mkdir -p {private} && mount -t tmpfs -o size=256m tmpfs {private} && " if private is not None else ""
        return [*self.inside(host), "sh", "-c", f'{own}exec "$@"', "sh"]

    def inside(self, host: int) -> list[str]:
        """As `prefix`, with everything shared but /dev/shm. Not `ip netns exec`: it hides /sys/fs/cgroup, which slurmd needs."""
        names = "".join(f"{self.address(other)} h{other}\\n" for other in range(self.count))
        own = (
            f"hostname h{host} && mount -t tmpfs -o size=1g tmpfs /dev/shm && cp /etc/hosts /dev/shm/.hosts && "
            f"printf '{names}' >> /dev/shm/.hosts && mount --bind /dev/shm/.hosts /etc/hosts && exec \"$@\""
        )
        return [*self._nsenter(host), "unshare", "--uts", "--mount", "sh", "-c", own, "sh"]

    @property
    def outside(self) -> str:
        """The address of this machine, on which the hosts are namespaces, in their network."""
        return f"{self._network}1"

    def listeners(self, host: int) -> list[tuple[str, int, int]]:
        """Address, port and process id of every TCP listener on a host."""
        listed = subprocess.run([*self._nsenter(host), "ss", "-Hltnp"], check=True, capture_output=True, text=True).stdout
        found = re.findall(r"^LISTEN\s+\S+\s+\S+\s+(\S+):(\d+)\s.*?pid=(\d+)", listed, re.MULTILINE)
        return [(address.strip("[]"), int(port), int(pid)) for address, port, pid in found]

    def redirect(self, host: int, ports: range, towards: dict[str, str]) -> None:
        """Send what a host says to these addresses and ports elsewhere. Needs the Debian package nftables."""
        elsewhere = ", ".join(f"{address} : {other}" for address, other in towards.items())
        rules = "type nat hook output priority -100"
        rule = f"ip daddr {{ {', '.join(towards)} }} tcp dport {ports[0]}-{ports[-1]} dnat to ip daddr map {{ {elsewhere} }}"
        text = f"table ip middle {{\n chain out {{\n {rules};\n {rule}\n }}\n }}\n"
        subprocess.run([*self._nsenter(host), "nft", "-f", "-"], input=text, check=True, text=True)
        liberal = "net.netfilter.nf_conntrack_tcp_be_liberal=1"  # else what ends a connection early may not be passed on
        subprocess.run([*self._nsenter(host), "sysctl", "-q", liberal], check=True)

    def add_address(self, address: str) -> None:
        """Another address of this machine in the network of the hosts."""
        ip("addr", "add", f"{address}/{self._bits}", "dev", self._bridge)

    def start_sshd(self, folder: Path, private: Path) -> Path:
        """Start an ssh server on every host; returns the configuration of a client. `private`: as with `prefix`."""
        folder.mkdir(mode=0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host", "id"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        settings = ["Port 22", f"HostKey {folder}/host", f"AuthorizedKeysFile {folder}/id.pub", "StrictModes no", "UsePAM no"]
        settings += ["PermitRootLogin prohibit-password", "PasswordAuthentication no", "PidFile none"]
        for host in range(self.count):
            settings_of_host = [*settings, f"ListenAddress {self.address(host)}", ""]
            (folder / f"sshd-{host}").write_text("\n".join(settings_of_host))
            self.boot(host, folder, private)
        client = folder / "config"
        client.write_text(f"IdentityFile {folder}/id\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n")
        return client

    def boot(self, host: int, folder: Path, private: Path) -> None:
        """Start the ssh server of a host, as `start_sshd` has configured it, with an empty memory and an empty private folder."""
        command = ["/usr/sbin/sshd", "-D", "-f", str(folder / f"sshd-{host}"), "-E", str(folder / f"sshd-{host}.log")]
        self._servers.append(subprocess.Popen([*self.prefix(host, private), *command], start_new_session=True))

    def kill_all(self, host: int) -> None:
        """kill -9 everything on a host."""
        for pid in self.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self, host: int) -> list[int]:
        """The processes on a host."""
        listed = subprocess.run(["ip", "netns", "pids", self._name(host)], check=True, capture_output=True, text=True).stdout
        return list(map(int, listed.split()))

    def cut(self, host: int) -> None:
        """From now on its packets vanish, as with a pulled cable."""
        ip("link", "set", self._name(host), "nomaster")

    def mend(self, host: int) -> None:
        ip("link", "set", self._name(host), "master", self._bridge)

    def _nsenter(self, host: int) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._name(host)}"]

    def shape(self, host: int, rate: int) -> None:
        """From now on it sends and receives this many bits per second at most."""
        name, limit = self._name(host), ["root", "tbf", "rate", f"{rate}bit", "burst", "256kb", "latency", "50ms"]
        for where in (["-n", name], []):
            device = "eth0" if where else name
            subprocess.run(["tc", *where, "qdisc", "replace", "dev", device, *limit], check=True, capture_output=True)

    def _name(self, host: int) -> str:
        return f"{self._bridge}h{host}"


class OnHosts(Local):
    """Starts each agent on a host of its own."""

    def __init__(self, run: Run, hosts: Hosts, registry: str = "folder"):
        super().__init__(run)
        self._hosts, self.registry = hosts, registry

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        prefix = self._hosts.prefix(settings.node, private=Path(settings.run_dir) if self.registry == "launcher" else None)
        own = replace(settings, bind=self._hosts.address(settings.node))
        return AgentProcess(own, log, wrap=lambda command: [*prefix, *command])


def losses(events: list[Event]) -> dict[int, tuple[float, int | None]]:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}
