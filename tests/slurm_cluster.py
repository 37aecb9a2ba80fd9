"""A real Slurm whose nodes are network namespaces: munged, slurmctld and one slurmd per host, all in one folder. Needs root and Debian's packages
slurm-wlm and munge."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from hosts import Hosts

CONF = """\
ClusterName=test
SlurmctldHost=localhost({controller})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
TopologyPlugin=topology/tree
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=20
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
MinJobAge=300
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def available() -> bool:
    return all(shutil.which(program) for program in ("slurmctld", "slurmd", "munged", "nsenter"))


class Slurm:
    """Node n0 is host 0 of `hosts`, and so on. Even nodes are on one switch, odd ones on another."""

    def __init__(self, folder: Path, hosts: Hosts):
        self.folder, self.hosts = folder, hosts
        self.env = dict(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._start_all()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start_all(self) -> None:
        self.folder.mkdir(mode=0o755)
        names = [f"n{host}" for host in range(self.hosts.count)]
        for name in ("state", *(f"spool-{name}" for name in names)):
            (self.folder / name).mkdir()
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(self.hosts.count + 1)]
            port, *ports = (each.getsockname()[1] for each in sockets)
        lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr={self.hosts.address(host)} Port={ports[host]} CPUs=2 RealMemory=1000 State=UNKNOWN"
            for host, name in enumerate(names)
        ]
        even, odd = ",".join(names[::2]), ",".join(names[1::2])
        (self.folder / "topology.conf").write_text(
            f"SwitchName=leaf0 Nodes={even}\nSwitchName=leaf1 Nodes={odd}\nSwitchName=top Switches=leaf[0-1]\n"
        )
        conf = self.folder / "slurm.conf"
        conf.write_text(CONF.format(folder=self.folder, controller=self.hosts.outside, port=port, nodes="\n".join(lines)))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        paths = {"key-file": key, **{name: self.folder / name for name in ("socket", "pid-file", "log-file", "seed-file")}}
        paths["socket"] = self.folder / "munge.socket"
        self._start("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in paths.items()))
        self.until(lambda: paths["socket"].exists(), "munged")
        self._start("slurmctld", "-D", "-c", "-f", str(conf))
        for host, name in enumerate(names):
            self._start(*self.hosts.inside(host), "slurmd", "-D", "-N", name, "-f", str(conf))
        self.until(lambda: self.run("sinfo", "-h", "-N", "-o", "%t").split().count("idle") == len(names), "idle nodes")

    def _start(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            )

    def kill(self, daemon: str) -> None:
        """Kill the daemons of this name."""
        for process in self._daemons:
            if daemon in process.args:
                process.kill()
                process.wait()

    def until(self, condition: object, what: str, seconds: float = 180.0) -> None:
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}; see {self.folder}"
            time.sleep(0.1)

    def run(self, *command: str) -> str:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60).stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        text = self.run("scontrol", "-o", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in self.run("squeue", "-h", "-o", "%A").split():
            self.run("scancel", "-s", "KILL", "--full", number)
        for daemon in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon.pid, signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
