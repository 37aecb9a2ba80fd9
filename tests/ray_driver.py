"""Starts a Ray cluster and a command in it, and does something to the cluster when the run has taken so many steps. A program of its own: Ray's
tools end every Ray process that they see, so tests run it in namespaces of its own.

    python ray_driver.py RAYLETS STEP FAULT COMMAND…      FAULT: none, raylet, worker, drain
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from phalanx.events.log import EventReader
from phalanx.events.records import Step, WorkerStarted

SIZE = {"object_store_memory": 100 << 20}
RETURN = 5.0  # seconds after which another raylet takes the place of a lost one


def main() -> int:
    raylets, at, fault, *command = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SIZE})
    nodes = [cluster.add_node(num_cpus=1, wait=False, **SIZE) for _ in range(int(raylets))]
    cluster.wait_for_nodes(120)
    begin = time.time()
    process = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": cluster.address})
    reader, workers, hit = EventReader(Path("run/events.jsonl")), dict[int, int](), 0.0
    while process.poll() is None:
        for event in reader.new():
            if isinstance(event, WorkerStarted) and event.rank is not None:
                workers[event.rank] = event.pid
            elif isinstance(event, Step) and event.step == 1:
                print(f"first step after {time.time() - begin:.1f} s", flush=True)
            elif fault != "none" and isinstance(event, Step) and event.step >= int(at) and not hit:
                hit = time.monotonic()
                victim = next(node for node in nodes if raylet(node) in ancestors(workers[1]))
                if fault == "raylet":
                    cluster.remove_node(victim, allow_graceful=False)
                elif fault == "worker":
                    os.kill(workers[1], signal.SIGKILL)
                elif fault == "drain":
                    drain(cluster.address, victim.node_id, 20)
        if hit and fault == "raylet" and time.monotonic() > hit + RETURN:
            cluster.add_node(num_cpus=1, wait=False, **SIZE)
            hit = float("inf")
        time.sleep(0.05)
    if fault == "drain":
        print("the drained raylet has ended by itself" if raylet(victim) == 0 else "the drained raylet still runs")
    cluster.shutdown()
    return process.returncode


def drain(address: str, node: str, seconds: int) -> None:
    reason = [
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "test",
        "--deadline-remaining-seconds",
        str(seconds),
    ]
    subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address, "--node-id", node, *reason],
        check=True,
    )


def raylet(node: object) -> int:
    """The process of a node's raylet; 0: it has ended."""
    (info,) = node.all_processes["raylet"]  # type: ignore[attr-defined]
    return 0 if info.process.poll() is not None else info.process.pid


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        found.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


if __name__ == "__main__":
    sys.exit(main())
