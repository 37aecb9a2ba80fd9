"""What Ray costs: step time and start of the Ray launcher, next to the local launcher on the same machine beside the same idle Ray cluster.

    python benchmarks/ray_overhead.py [--pairs 24] [--steps 200] [--ranks 2] [--raylets 4]

Starts a Ray cluster in namespaces of its own (needs root: Ray's tools end every Ray process that they see). Runs take turns, one local and one
under Ray, in changing order. A step counts from the 20th on. Ends with the median of the pairs' ratios and the interval that holds the true
median with 90 % probability: two runs of the same kind differ by several percent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from common import machine_load, train_command

ALONE = "PHALANX_BENCHMARK_ALONE"
OWN = 'ip link set lo up; mount -t tmpfs tmpfs /dev/shm; mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; exec "$@"'
WARM_UP = 20
RUN = """
[model]
dim = 64
layers = 2
heads = 2
kv_heads = 2
[data]
eval_fraction = 0.0
[train]
batch = {batch}
micro_batch = 1
sequence_length = 64
steps = {steps}
[layout]
data = {ranks}
[cluster]
device = "cpu"
threads = 1
"""
OBJECT_STORE = {"object_store_memory": 100 << 20}


def train(folder: Path, name: str, address: str | None) -> tuple[float, float]:
    """Median seconds of a step, and seconds from the command to the end of the first."""
    on = ["--on", "ray"] if address is not None else []
    environment = os.environ | ({} if address is None else {"RAY_ADDRESS": address})
    begin = time.time()
    done = subprocess.run(
        [*train_command(folder / "run.toml", folder / name), *on], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    records = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    return median(step["seconds"] for step in steps[WARM_UP:]), steps[0]["time"] - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--raylets", type=int, default=4)
    args = parser.parse_args()
    if ALONE not in os.environ:
        if os.geteuid():
            raise SystemExit("No figure: network namespaces need root.")
        prefix = ["unshare", "--net", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child", "sh", "-c", OWN, "sh"]
        raise SystemExit(subprocess.run([*prefix, sys.executable, *sys.argv], env=os.environ | {ALONE: "1"}).returncode)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **OBJECT_STORE})
    for _ in range(args.raylets):
        cluster.add_node(num_cpus=args.ranks, wait=False, **OBJECT_STORE)
    cluster.wait_for_nodes(120)
    ratios, starts = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN.format(batch=2 * args.ranks, steps=args.steps, ranks=args.ranks))
        for pair in range(args.pairs + 1):
            jobs = {"local": None, "ray": cluster.address}
            order = list(jobs) if pair % 2 else list(jobs)[::-1]
            found = {job: train(folder, f"{job}-{pair}", jobs[job]) for job in order}
            if pair == 0:
                continue  # Ray starts workers of its own, and files are read for the first time
            (local, local_start), (ray, ray_start) = found["local"], found["ray"]
            ratios.append(ray / local)
            starts.append(ray_start - local_start)
            print(
                f"step: local {local * 1e3:.1f} ms, Ray {ray * 1e3:.1f} ms; first step: local {local_start:.1f} s, Ray {ray_start:.1f} s"
            )
    cluster.shutdown()
    low, high = interval(ratios)
    print(
        f"a step under Ray: {median(ratios) - 1:+.1%} of {len(ratios)} pairs (90 % interval {low - 1:+.1%} to {high - 1:+.1%}); "
        f"start {median(starts):+.1f} s ({machine_load()})"
    )


def interval(values: list[float]) -> tuple[float, float]:
    """Between which the median of many more values would be, with a probability of 90 %: whatever their distribution is."""
    outside = max(0, int((len(values) - 1.645 * len(values) ** 0.5) / 2))
    return sorted(values)[outside], sorted(values)[-1 - outside]


if __name__ == "__main__":
    main()
