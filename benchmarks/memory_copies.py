"""In-memory replicas of the state: how long a step waits for one, how long until the peer node has it, and how long a restore takes.

Two nodes, each with its own replica server on this machine and two CPU ranks.

    python benchmarks/memory_copies.py [--megabytes 100] [--copies 5]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phalanx.checkpointing.format import RunMetadata
from phalanx.checkpointing.replicas.memory_checkpoint import MemoryCopies
from phalanx.checkpointing.replicas.replica_index import MemoryLocation, complete_states, set_peers
from phalanx.checkpointing.replicas.shm_slots import claim, default_root
from phalanx.checkpointing.restore import load
from phalanx.checkpointing.state_tensor import NO_REPLICAS, StateTensor
from phalanx.events.records import Copied
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.verification.rank_pool import RankPool

TOKEN = "benchmark"
TENSORS = 20


def pieces(mesh: Mesh, rows: int) -> dict[str, StateTensor]:
    """The state of a rank: rows of its own of every tensor."""
    whole = (rows * mesh.ranks, 256)
    return {
        f"t{number}": StateTensor(
            torch.full((rows, 256), 1.0 + mesh.rank), TensorSlice.of(whole, (rows * mesh.rank, 0), (rows, 256)), NO_REPLICAS
        )
        for number in range(TENSORS)
    }


def copy(mesh: Mesh, folders: list[str], rows: int, count: int) -> list[tuple[float, float, bool]]:
    copies = MemoryCopies(mesh, Path(folders[mesh.rank // 2]))
    state, results = pieces(mesh, rows), []
    copies.prepare(state)
    time.sleep(2.0)  # in a run, the steps before the first copy give it this time
    for step in range(count):
        copies.take(step, state, RunMetadata())
        copies.release()  # at once: no forward and backward pass hides the copy
        results += copies.settle()
    copies.close()
    complete = [copy for copy in results if isinstance(copy, Copied) and copy.peer]
    assert len(complete) == len(results), results
    return [(copy.stall, copy.seconds, copy.peer) for copy in complete]


def restore(mesh: Mesh, place: MemoryLocation, rows: int) -> float:
    state = pieces(mesh, rows)
    for piece in state.values():
        assert isinstance(piece.tensor, torch.Tensor)
        piece.tensor.zero_()
    mesh.barrier()
    started = time.perf_counter()
    load(place, state)
    seconds = time.perf_counter() - started
    assert all(
        bool((piece.tensor == 1.0 + mesh.rank).all()) for piece in state.values() if isinstance(piece.tensor, torch.Tensor)
    )
    return seconds


def start_server(node: int, folder: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    command = [sys.executable, "-m", "phalanx.checkpointing.replicas.replica_server"]
    slots, lock = claim(Path(folder) / str(node), "bench")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[lock])
    assert process.stdin is not None and process.stdout is not None
    settings = {"node": node, "folder": str(slots), "token": TOKEN, "bind": "127.0.0.1"}
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    process.stdin.flush()
    return process, json.loads(process.stdout.readline()) | {"folder": str(slots)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=100.0, help="megabytes of each rank")
    parser.add_argument("--copies", type=int, default=5)
    args = parser.parse_args()
    rows = int(args.megabytes * 1e6 / TENSORS / 256 / 4)
    with tempfile.TemporaryDirectory(dir=default_root().parent) as folder, RankPool(4) as pool:
        servers = [start_server(node, folder) for node in range(2)]
        addresses = [tuple(hello["address"]) for _, hello in servers]
        set_peers(dict(enumerate(addresses)), TOKEN)
        copies = pool.run(copy, Layout(data=4), [hello["folder"] for _, hello in servers], rows, args.copies)[0]
        print(f"{args.megabytes:.0f} MB per rank, {args.copies} copies, medians of 4 ranks on 2 nodes, all on this machine:")
        print(f"  a step waits           {median(stall for stall, _, _ in copies):.3f} s")
        print(f"  complete, also on peers  {median(seconds for _, seconds, _ in copies):.3f} s")
        state = complete_states(addresses, TOKEN)[0]
        for label, local in (("from this node's memory", True), ("over TCP", False)):
            seconds = pool.run(restore, Layout(data=4), MemoryLocation(state, TOKEN, local=local), rows)
            print(f"  restored {label:24}{max(seconds):.3f} s")
        servers[1][0].kill()
        servers[1][0].wait()
        start = time.perf_counter()
        state = complete_states(addresses, TOKEN)[0]
        print(f"  node 1 lost: found in  {time.perf_counter() - start:.3f} s")
        seconds = pool.run(restore, Layout(data=4), MemoryLocation(state, TOKEN, local=False), rows)
        print(f"  restored from the peer's copy over TCP  {max(seconds):.3f} s")
        for process, _ in servers:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
