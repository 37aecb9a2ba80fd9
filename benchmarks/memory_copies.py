"""Copies of the state in host memory: how long a step waits for one, how long until it is on the peer node, and how long it takes to
restore from it. Two nodes, each a holder of its own on this machine, with two CPU ranks each.

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

from phalanx.checkpointing.replicas.memory_checkpoint import MemoryCopies
from phalanx.checkpointing.replicas.replica_index import MemoryLocation, newest_state, set_peers
from phalanx.checkpointing.replicas.shm_slots import default_root
from phalanx.checkpointing.restore import load
from phalanx.checkpointing.state_tensor import NO_REPLICAS, StateTensor
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.verification.rank_pool import Pool

TOKEN = "of the benchmark"
TENSORS = 20


def pieces(mesh: Mesh, rows: int) -> dict[str, StateTensor]:
    """Each rank has rows of its own."""
    whole = (rows * mesh.ranks, 256)
    return {
        f"t{number}": StateTensor(
            torch.full((rows, 256), 1.0 + mesh.rank), TensorSlice.of(whole, (rows * mesh.rank, 0), (rows, 256)), NO_REPLICAS
        )
        for number in range(TENSORS)
    }


def copy(mesh: Mesh, folders: list[str], rows: int, count: int) -> list[tuple[float, float, bool]]:
    copies = MemoryCopies(mesh, Path(folders[mesh.rank // 2]))
    state, told = pieces(mesh, rows), []
    copies.prepare(state)
    time.sleep(2.0)  # as steps before the first copy would give it
    for step in range(count):
        copies.take(step, state, {"step": step})
        copies.release()  # at once: as if there were no forward and backward to hide the copy behind
        told += copies.settle()
    copies.close()
    assert all(one.failure is None and one.peer for one in told), told
    return [(one.stall, one.seconds, one.peer) for one in told]


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


def holder(node: int, folder: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    command = [sys.executable, "-m", "phalanx.checkpointing.replicas.replica_server"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"run": "bench", "node": node, "root": f"{folder}/{node}", "token": TOKEN}).encode() + b"\n")
    process.stdin.flush()
    return process, json.loads(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=100.0, help="of each rank")
    parser.add_argument("--copies", type=int, default=5)
    given = parser.parse_args()
    rows = int(given.megabytes * 1e6 / TENSORS / 256 / 4)
    with tempfile.TemporaryDirectory(dir=default_root().parent) as folder, Pool(4) as pool:
        holders = [holder(node, folder) for node in range(2)]
        addresses = [tuple(said["address"]) for _, said in holders]
        set_peers(dict(enumerate(addresses)), TOKEN)
        told = pool.run(copy, Layout(data=4), [said["folder"] for _, said in holders], rows, given.copies)[0]
        print(f"{given.megabytes:.0f} MB per rank, {given.copies} copies, medians of 4 ranks on 2 nodes, all on this machine:")
        print(f"  a step waits           {median(stall for stall, _, _ in told):.3f} s")
        print(f"  whole, also on peers   {median(seconds for _, seconds, _ in told):.3f} s")
        state = newest_state(addresses, TOKEN)
        assert state is not None
        for words, local in (("from this node's memory", True), ("over TCP", False)):
            taken = pool.run(restore, Layout(data=4), MemoryLocation(state, TOKEN, local=local), rows)
            print(f"  restored {words:24}{max(taken):.3f} s")
        holders[1][0].kill()
        holders[1][0].wait()
        found = time.perf_counter()
        state = newest_state(addresses, TOKEN)
        assert state is not None
        print(f"  node 1 lost: found in  {time.perf_counter() - found:.3f} s")
        taken = pool.run(restore, Layout(data=4), MemoryLocation(state, TOKEN, local=False), rows)
        print(f"  restored from the peer's copy over TCP  {max(taken):.3f} s")
        for process, _ in holders:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
