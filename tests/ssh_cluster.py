"""Hosts that share no folder, reached by ssh, with checkpoints in an object store. Imported by tests as `ssh_cluster`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hosts import Hosts, losses
from object_store import Store, serve

from phalanx.events.log import EventReader, read_events
from phalanx.events.records import Event


class Cluster(NamedTuple):
    hosts: Hosts
    folder: Path
    store: Store
    client: Path

    def train(self, run_dir: str, *words: str) -> subprocess.Popen[bytes]:
        settings = [f"checkpoint.url=s3://{self.store.bucket()}/run", f"cluster.ssh=ssh -F {self.client}"]
        command = [sys.executable, "-m", "phalanx", "train", "run.toml", *settings, "--run-dir", f"private/{run_dir}", *words]
        with (self.folder / f"{run_dir}.out").open("wb") as output:  # not a pipe that nobody empties
            return subprocess.Popen(
                command, cwd=self.folder, env=os.environ | self.store.env(), stdout=output, stderr=subprocess.STDOUT
            )

    def follow(self, process: subprocess.Popen[bytes], run_dir: str, on_event: Callable[[Event], None]) -> list[Event]:
        """Call back for every event until the run has ended; returns its events."""
        reader = EventReader(self.folder / "private" / run_dir / "events.jsonl")
        while process.poll() is None:
            for event in reader.new():
                on_event(event)
            time.sleep(0.05)
        assert process.returncode == 0, (self.folder / f"{run_dir}.out").read_text()[-4000:]
        return read_events(self.folder / "private" / run_dir / "events.jsonl")


@contextlib.contextmanager
def three_hosts(folder: Path, run: str) -> Iterator[Cluster]:
    (folder / "private").mkdir()
    with Hosts(3) as hosts, serve(hosts.outside) as store:
        client = hosts.start_sshd(folder / "ssh", folder / "private")
        (folder / "hosts.txt").write_text("".join(f"{hosts.address(host)}\n" for host in range(3)))
        (folder / "run.toml").write_text(run)
        yield Cluster(hosts, folder, store, client)


def compare(events: list[Event], undisturbed: list[Event]) -> None:
    ours, others = losses(events), losses(undisturbed)
    assert ours.keys() == others.keys()
    assert {step: digest for step, (_, digest) in ours.items()} == {step: digest for step, (_, digest) in others.items()}
    assert max(abs(ours[step][0] - others[step][0]) for step in ours) <= 1e-5
