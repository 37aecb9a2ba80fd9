"""The device mesh: this rank's coordinates in the layout, its process groups, its device, and small collectives over all ranks.
`connect` makes it in every rank's program.

Ranks are numbered pipeline × data × shard × context × tensor, tensor innermost, so that the groups that communicate most are
neighbors and stay inside a machine. Experts see the ranks of a stage as expert_replicate × expert_shard × expert × expert_tensor.
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from phalanx import accelerator
from phalanx.observe.comm_timer import began, timed_collective
from phalanx.parallel.group import Group
from phalanx.parallel.store import ControlStore
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Place

AXES = ("pipeline", "data", "shard", "context", "tensor")
EXPERT_AXES = ("pipeline", "expert_replicate", "expert_shard", "expert", "expert_tensor")
_DESTROY_POLL = 0.5  # seconds


class Environment:
    """What a rank learns at run time: values of other ranks, and values of tensors that it reads on the host.

    A rehearsal has no other ranks and its tensors hold no values; it gives `Mesh` an environment with its assumptions.
    """

    def broadcast_object(self, value: Any, ranks: int) -> Any:
        box = [value]
        timed_collective(dist.broadcast_object_list, box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather_objects(self, value: Any, ranks: int) -> list[Any]:
        values: list[Any] = [None] * ranks
        timed_collective(dist.all_gather_object, values, value)
        return values

    def expert_rows(self, counts: Tensor, across: Group, within: Group, rows: int) -> list[int]:
        """Row counts of one expert layer: sent to each rank of `across`, received from each, and the total of each rank of `within`.
        `rows`: how many this rank sends in all."""
        return list(counts.tolist())

    def document_ids(self, documents: Tensor) -> npt.NDArray[np.int64] | None:
        """The document of every position of a batch; None: a boundary may be anywhere."""
        return documents.cpu().numpy()


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank among all ranks. With one rank there is no process group, and collectives return their input."""

    place: Place
    device: torch.device
    layout: Layout = field(default_factory=Layout)
    environment: Environment = field(default_factory=Environment, repr=False)
    via_host: bool = False
    """Whether messages from one rank to one other are copied through host memory: see `Group.via_host`."""
    _groups: dict[tuple[str, tuple[str, ...]], Group] = field(default_factory=dict, repr=False)
    _made: Counter[tuple[int, ...]] = field(default_factory=Counter, repr=False)
    _peer_indices: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict, repr=False)
    _own_notes: dist.Store = field(default_factory=dist.HashStore, repr=False)
    _store: Any = field(default=None, repr=False)  # torch keeps no reference to the Python half of a store
    _lost: set[int] = field(default_factory=set, repr=False)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def ranks(self) -> int:
        return self.place.ranks

    @property
    def replica(self) -> int:
        """Index of this rank's share of the batch, below `layout.replicas`."""
        return self.coordinate("data") * self.layout.shard + self.coordinate("shard")

    @property
    def is_replica_leader(self) -> bool:
        """Whether this rank reports what all ranks of its replica know. One rank per replica does, in the first stage."""
        return not (self.coordinate("pipeline") or self.coordinate("context") or self.coordinate("tensor"))

    def size(self, axis: str) -> int:
        """Number of ranks along an axis of the layout or of the experts' view."""
        if axis == "expert_replicate":
            return self.layout.expert_data // self.layout.expert_shard
        return getattr(self.layout, axis) or 1

    def coordinate(self, axis: str) -> int:
        size, below = self._place(axis)
        return self.rank // below % size

    def _place(self, axis: str) -> tuple[int, int]:
        """Number of ranks along an axis, and distance of two neighbors: the last axis of a view varies fastest."""
        view = _view((axis,))
        return self.size(axis), math.prod(map(self.size, view[view.index(axis) + 1 :]))

    def _peers(self, *axes: str) -> npt.NDArray[np.int64]:
        """The ranks that have this rank's coordinates along the given axes."""
        ranks = np.arange(self.ranks)
        for axis in axes:
            size, below = self._place(axis)
            ranks = ranks[ranks // below % size == self.coordinate(axis)]
        return ranks

    @property
    def stage(self) -> int:
        """This rank's pipeline rank. Ranks of one stage hold parts of the same tensors."""
        return self.coordinate("pipeline")

    @property
    def is_stage_leader(self) -> bool:
        """Whether this is the first rank of its stage."""
        return self.peer_index()[0] == 0

    def peer_index(self, *axes: str) -> tuple[int, int]:
        """(index, count) of this rank among the ranks of its stage that have its coordinates along the given axes. Axes of the layout
        and of the experts' view may be mixed."""
        key = tuple(sorted(axes))
        if key not in self._peer_indices:
            peers = self._peers("pipeline", *axes)
            peers = peers[~np.isin(peers, list(self._lost))]
            self._peer_indices[key] = int(np.searchsorted(peers, self.rank)), len(peers)
        return self._peer_indices[key]

    def mark_lost(self, ranks: Iterable[int]) -> None:
        """Exclude ranks that are gone, or whose state must be discarded, from `peer_index`."""
        self._lost.update(ranks)
        self._peer_indices.clear()

    def covers(self, *axes: str) -> bool:
        """Whether the remaining ranks of this stage still hold all slices of what is cut along the given axes."""
        places = [self._place(axis) for axis in axes]
        slices = {rank: tuple(rank // below % size for size, below in places) for rank in self._peers("pipeline").tolist()}
        return set(slices.values()) == {held for rank, held in slices.items() if rank not in self._lost}

    def group(self, *axes: str, use: str) -> Group:
        """The ranks that differ from this one only along the given axes, in rank order. All of them call it at the same time.

        `use` names the technique. Each use has a group of its own, so that messages never mix and traffic is counted by technique.
        """
        key = (use, axes)
        if key not in self._groups:
            ranks = self._peers(*(axis for axis in _view(axes) if axis not in axes))
            self._groups[key] = self.group_of(tuple(ranks.tolist()), use=use)
        return self._groups[key]

    def group_of(self, ranks: tuple[int, ...], *, use: str) -> Group:
        """A group of the given ranks, this one among them. All members call it at the same time."""
        handle = None
        if len(ranks) == self.ranks > 1 and use in ("step", "data"):
            handle = dist.group.WORLD  # all ranks do these in one order, so they need no connections of their own
        elif len(ranks) > 1:
            self._made[ranks] += 1
            # The generation is part of the name: a group of an earlier one unregisters its name when it is garbage-collected, at any time.
            with _named(f"{self.place.generation} {ranks} {self._made[ranks]}"):
                handle = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=use)
        return Group(ranks=ranks, index=ranks.index(self.rank), use=use, handle=handle, via_host=self.via_host)

    def all_reduce(self, values: Tensor) -> Tensor:
        if self.ranks > 1:
            timed_collective(dist.all_reduce, values)
        return values

    def start_all_reduce(
        self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, label: str = ""
    ) -> dist.Work | None:
        """Begin a reduction over all ranks, in place; wait for it with `comm_timer.wait`. `label` names the values in a timeline."""
        if self.ranks == 1:
            return None
        work = dist.all_reduce(values, op=operation, async_op=True)
        began(work, None, "all_reduce", label)
        return work

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return value if self.ranks == 1 else self.environment.broadcast_object(value, self.ranks)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank; for small plain values."""
        return [value] if self.ranks == 1 else self.environment.gather_objects(value, self.ranks)

    def slow_broadcast(self, seconds: float) -> Callable[[Any], Any]:
        """`broadcast_object` for a value that may take rank 0 up to `seconds`. All ranks call this at once, and later the function
        that it returns, once.

        The others wait in a group with a timeout of its own: the common group must notice a lost rank sooner.
        """
        if self.ranks == 1:
            return lambda value: value
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))

        def broadcast(value: Any) -> Any:
            box = [value]
            dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
            dist.destroy_process_group(group)
            return box[0]

        return broadcast

    @property
    def _notes(self) -> dist.Store:
        """Small values that all ranks share: the rendezvous store of this generation, with a prefix of our own."""
        return self._own_notes if self.ranks == 1 else dist.PrefixStore("notes", distributed_c10d._get_default_store())

    def store_add(self, key: str, amount: int) -> int:
        """Add to a number that all ranks share and return the new value. Any thread may call it at any time."""
        return int(self._notes.add(key, amount))

    def store_set(self, key: str, text: str) -> None:
        """Set a text that all ranks can read. Any thread may call it at any time."""
        self._notes.set(key, text)

    def store_get(self, key: str) -> str:
        """Read a text that a rank has set, or wait until it does."""
        return self._notes.get(key).decode()

    def barrier(self) -> None:
        """Wait for all ranks; over gloo, so that a GPU needs no kernel for it."""
        self.all_reduce(torch.zeros(1))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Inside, a new group uses this name. torch would name it by the number of groups that a rank has made, which may differ between
    stages: its members would wait for each other under different names, forever."""
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original


def _view(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The view of the ranks that has all of these axes."""
    return AXES if all(axis in AXES for axis in axes) else EXPERT_AXES


def connect(place: Place, device: str, timeout: float, layout: Layout | None = None, *, share: bool = False) -> Mesh:
    """Join the other ranks of this generation and select this rank's device. Without a layout every rank is a replica.

    `share`: where this machine, on which all ranks are, has fewer GPUs than ranks, each GPU serves several. Then gloo carries all
    messages, through host memory: it proves what ranks compute, and takes far more time than NCCL.
    """
    kind = accelerator.of(device)
    shared = share and kind.asynchronous and place.ranks > kind.count()
    own = kind.device(place.local_rank % kind.count() if shared else place.local_rank)
    backend = kind.shared_backend if shared else kind.backend
    kind.set_device(own)
    server: dist.Store | None = None
    if place.ranks > 1:
        wait = timedelta(seconds=timeout)
        if place.store is None:
            dist.init_process_group(backend, timeout=wait)
        else:
            if place.token is not None:  # an agent's store; else torch's own
                server = ControlStore(place.store, place.token, place.generation, timeout)
            else:
                server = dist.TCPStore(*place.store, is_master=False, timeout=wait)
            store = dist.PrefixStore(f"generation-{place.generation}", server)
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=wait)
    layout = replace(layout, data=layout.data or 1) if layout else Layout(data=place.ranks)
    assert layout.ranks == place.ranks, f"{layout} has {layout.ranks} ranks, {place.ranks} were started"
    return Mesh(place, own, layout, via_host=shared, _store=server)


def disconnect(mesh: Mesh) -> None:
    """Leave in order: no rank closes its sockets while another still reads."""
    if mesh.ranks > 1 and dist.is_initialized():
        mesh.barrier()
        dist.destroy_process_group()


@contextmanager
def abandoned() -> Iterator[None]:
    """Leave where other ranks are gone. Inside, drop all references to groups; background threads destroy each once theirs is the last.

    A group's destructor waits for the group's threads. One of them may be blocked in gloo, which does not always wake it when
    connections end, until `resilience.timeout`. The garbage collector must not run such a destructor in the main thread.
    """
    world = distributed_c10d._world
    groups = list(world.pg_map)
    if dist.is_initialized():
        dist.destroy_process_group()
    else:  # interrupted while joining: torch has registered groups that it cannot undo
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
            table.clear()
        world.tags_to_pg.clear()
        world.pg_coalesce_state.clear()
        distributed_c10d._unregister_all_process_groups()
        world.group_count = 0  # it names the next group; the others would wait under another name, forever
    try:
        yield
    finally:
        while groups:
            threading.Thread(target=_destroy, args=([groups.pop()],), name="destroy process group", daemon=True).start()


def _destroy(group: list[dist.ProcessGroup]) -> None:
    while sys.getrefcount(group[0]) > 2:  # the list's and the call's
        time.sleep(_DESTROY_POLL)
    group.clear()
