"""A real Ray cluster of several raylets, in namespaces of its own: Ray's own tools would end every Ray process of the machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import available

from phalanx.events.log import read_events
from phalanx.events.records import ControllerChanged, Event, FailureNoticed, Recovered, Step

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(not available(), reason="needs root and network namespaces"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]

STEPS = 900  # Ray takes 14 s to give up a lost node, and only then another can take its place

RUN = """
[model]
dim = 64
layers = 2
heads = 2
kv_heads = 2
[train]
batch = 4
micro_batch = 1
sequence_length = 64
steps = {steps}
[layout]
data = 2
[cluster]
threads = 1
device = "cpu"
nodes = {nodes}
[resilience]
spares = {spares}
"""

# Starts raylets and the command; kills the raylet that has the controller after `lose` steps, and adds one 5 s later.
DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster
from phalanx.events.log import EventReader
from phalanx.events.records import Recovered, Step
raylets, lose = int(sys.argv[1]), int(sys.argv[2])
size = {"object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **size})
nodes = [cluster.add_node(num_cpus=1, wait=False, **size) for _ in range(raylets)]
cluster.wait_for_nodes(120)
command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--on", "ray", "--run-dir", "run"]
process = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": cluster.address})
reader, lost, added = EventReader(Path("run/events.jsonl")), 0.0, False
while process.poll() is None:
    for event in reader.new():
        if isinstance(event, Step) and event.step == lose:
            cluster.remove_node(nodes[-1], allow_graceful=False)
            lost = time.monotonic()
    if lost and not added and time.monotonic() > lost + 5:
        cluster.add_node(num_cpus=1, wait=False, **size)
        added = True
    time.sleep(0.05)
cluster.shutdown()
sys.exit(process.returncode)
"""


def train(folder: Path, *, steps: int, nodes: int, spares: int, lose: int = -1) -> list[Event]:
    folder.mkdir()
    (folder / "run.toml").write_text(RUN.format(steps=steps, nodes=nodes, spares=spares))
    (folder / "driver.py").write_text(DRIVER)
    own = 'ip link set lo up; mount -t tmpfs tmpfs /dev/shm; mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; exec "$@"'
    alone = ["unshare", "--net", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child", "sh", "-c", own, "sh"]
    command = [*alone, sys.executable, "driver.py", str(nodes), str(lose)]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return read_events(folder / "run/events.jsonl")


def losses(events: list[Event]) -> dict[int, tuple[float, int | None]]:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "run.toml").write_text(RUN.format(steps=STEPS, nodes=1, spares=0))
    command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--run-dir", "run"]
    subprocess.run(command, cwd=folder, env=os.environ, check=True, capture_output=True)
    events = read_events(folder / "run/events.jsonl")
    shutil.rmtree(folder)
    return events


def test_spare_replaces_a_killed_raylet(tmp_path: Path, undisturbed: list[Event]) -> None:
    events = train(tmp_path / "ray", steps=STEPS, nodes=3, spares=1, lose=20)
    assert losses(events) == losses(undisturbed)
    recovered = [event for event in events if isinstance(event, Recovered)]
    print("; ".join(f"{event.action} from {event.source} in {event.seconds:.1f} s" for event in recovered))
    assert len([event for event in events if isinstance(event, FailureNoticed)]) <= 1, "the lost raylet may have had no ranks"
    assert all(event.steps_lost <= 1 for event in recovered)


def test_run_shrinks_and_grows_with_the_cluster(tmp_path: Path, undisturbed: list[Event]) -> None:
    events = train(tmp_path / "ray", steps=STEPS, nodes=2, spares=0, lose=20)
    assert losses(events).keys() == losses(undisturbed).keys()
    assert max(abs(losses(events)[step][0] - loss) for step, (loss, _) in losses(undisturbed).items()) <= 1e-5
    recovered = [event for event in events if isinstance(event, Recovered)]
    print("; ".join(f"{event.action} from {event.source} at step {event.step} in {event.seconds:.1f} s" for event in recovered))
    assert [event.action for event in recovered] == ["shrink", "grow"]
    assert any(isinstance(event, FailureNoticed) for event in events)
    assert len([event for event in events if isinstance(event, ControllerChanged)]) <= 1
