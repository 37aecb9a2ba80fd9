"""The ranks of a job and how they meet. Training asks it for this rank's place, its device and small sums over all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.spec.place import Place


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank among all. With one rank there is no process group, and every sum is its own term."""

    place: Place
    device: torch.device

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def ranks(self) -> int:
        return self.place.ranks

    @property
    def replica(self) -> int:
        """Which share of the batch is this rank's."""
        return self.place.rank

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(values)
        return values

    def start(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dist.Work | None:
        """Begin a reduction over all ranks, in place; wait for the result with `Work.wait`."""
        return dist.all_reduce(values, op=operation, async_op=True) if self.ranks > 1 else None

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def patient(self, seconds: float) -> Callable[[Any], Any]:
        """`share` for a value that may take rank 0 so long. All ranks call this at once, and what it returns, once, in the end.

        The others wait in a group of its own: in the common one, which must notice a lost rank soon, they would give up.
        """
        if self.ranks == 1:
            return lambda value: value
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))

        def share(value: Any) -> Any:
            box = [value]
            dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
            dist.destroy_process_group(group)
            return box[0]

        return share

    def barrier(self) -> None:
        """Wait for all ranks; through gloo, so that a GPU run needs no kernel for it."""
        self.sum(torch.zeros(1))


def connect(place: Place, device: str, timeout: float) -> Mesh:
    """Join the other ranks of this generation and take this rank's device."""
    own = torch.device("cuda", place.local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(own)
    if place.ranks > 1:
        # Small host-side sums go over gloo on every machine; NCCL carries only what lives on GPUs.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        wait = timedelta(seconds=timeout)
        if place.store is None:
            dist.init_process_group(backend, timeout=wait)
        else:
            host, port = place.store
            server = dist.TCPStore(host, port, is_master=False, timeout=wait)
            store = dist.PrefixStore(f"generation-{place.generation}", server)
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=wait)
    return Mesh(place, own)


def disconnect(mesh: Mesh) -> None:
    """Leave in good order: nobody tears sockets down while another still reads."""
    if mesh.ranks > 1 and dist.is_initialized():
        mesh.barrier()
        dist.destroy_process_group()


def resident_bytes() -> int:
    """Memory of this process in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
