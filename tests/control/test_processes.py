"""The process that keeps copies in memory is there while a run trains, has its newest state, and leaves nothing behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from replica_nodes import newest_state, nodes_of

from phalanx.checkpointing.replicas import replica_index, shm_slots
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.control.processes import ReplicaProcess
from phalanx.events.records import Copied, Warned
from phalanx.events.rundir import RunDir
from phalanx.launch.run_checks import ONE_NODE, replica_problems
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan
from phalanx.spec.run import Cluster


def folders(run: Path) -> set[Path]:
    """Folders of this run's copies: other tests may train at the same time."""
    name = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:8]
    return set(shm_slots.default_root().glob(f"{name}-*"))


def until_gone(folder: Path, within: float = 60.0) -> bool:
    deadline = time.monotonic() + within
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not folder.exists()


def test_a_run_has_its_newest_state_in_memory_and_a_killed_launcher_leaves_none(workshop: Any) -> None:
    command = ["train", "tiny.toml", "layout.data=2", "train.steps=100000", "checkpoint.memory_every=5", "--run-dir", "run"]
    started = workshop.start(*command)
    started.until(lambda: sum(isinstance(event, Copied) for event in workshop.events("run")) >= 2, "two copies")
    (folder,) = folders(workshop.path / "run")
    told = json.loads((folder / shm_slots.ADDRESS).read_text())
    pids = {event.rank: event.pid for event in workshop.events("run") if event.kind == "worker_started"}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)  # the replica server needs none of them
    state = newest_state([tuple(told["address"])], told["token"])
    assert state is not None and state.step % 5 == 0 and nodes_of(state) == {0: (0,), 1: (0,)}
    place = replica_index.MemoryLocation(state, told["token"])
    saved = CheckpointReader(place)
    assert saved.marker.run.progress["step"] == saved.marker.step == state.step
    assert all(torch.isfinite(saved.read(name)).all() for name in saved.names)
    assert {name.partition("/")[0] for name in saved.names} == {"model", "optimizer"}
    saved.close()
    events, bytes_of_copies = workshop.events("run"), sum(replicas[0].copy.size for replicas in state.replicas)
    assert all(event.bytes == bytes_of_copies and not event.peer for event in events if isinstance(event, Copied))
    assert [event.message for event in events if isinstance(event, Warned)] == [ONE_NODE]
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    assert until_gone(folder)
    assert workshop.gone()


def run_dir(path: Path) -> RunDir:
    rundir = RunDir(path)
    rundir.create()
    return rundir


def test_replica_memory_is_freed_even_if_its_process_was_killed(tmp_path: Path) -> None:
    one, other = ReplicaProcess(run_dir(tmp_path)), ReplicaProcess(run_dir(tmp_path))
    assert one.folder != other.folder and one.folder.is_dir()  # two launches beside each other: neither is stale to the other
    assert one.token not in Path(f"/proc/{one._process.pid}/cmdline").read_text()
    os.kill(one._process.pid, signal.SIGKILL)
    one.close()
    other.close()
    assert not one.folder.exists() and not other.folder.exists()


def test_too_little_memory_for_replicas_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    run = loads("[train]\nbatch = 1\nsteps = 1\n[checkpoint]\nmemory_every = 5")
    plan = Plan(
        layout=Layout(),
        device="cpu",
        threads=1,
        micro_batch=1,
        accumulation=1,
        compute="fp32",
        parameters=70_000_000,
        flops_per_token=1.0,
        peak_flops=None,
    )
    monkeypatch.setattr(shm_slots, "free_bytes", lambda folder: 1000 << 20)
    (problem,) = replica_problems(run, plan)
    assert re.search(r"memory_every = 5: .* 70\.0 M parameters take 1,602 MiB .* has 1,000 MiB free", problem)
    (problem,) = replica_problems(replace(run, cluster=Cluster(nodes=4)), plan)
    assert "take 3,204 MiB" in problem, "a neighbor's copies next to each node's own"
    assert not list(replica_problems(loads("[train]\nbatch = 1\nsteps = 1"), plan))


def test_states_in_files_are_not_copied_into_memory() -> None:
    with pytest.raises(RunError, match=r'memory_every = 5 .* memory\.offload = "nvme"'):
        loads('[train]\nbatch = 1\nsteps = 1\n[checkpoint]\nmemory_every = 5\n[memory]\noffload = "nvme"')
