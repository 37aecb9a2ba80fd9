"""The ranks of a job and how they meet: this rank's coordinates in the layout, its groups, its device, small sums over all ranks.

Ranks are numbered pipeline × data × shard × context × tensor, tensor innermost, so that the chattiest groups are neighbours
and stay inside a machine. Experts see the same ranks of a stage as expert_replicate × expert_shard × expert × expert_tensor.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from phalanx.observe.comm_timer import timed_collective
from phalanx.parallel.group import Group
from phalanx.parallel.store import ControlStore
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Place

AXES = ("pipeline", "data", "shard", "context", "tensor")
EXPERT_AXES = ("pipeline", "expert_replicate", "expert_shard", "expert", "expert_tensor")


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank among all. With one rank there is no process group, and every sum is its own term."""

    place: Place
    device: torch.device
    layout: Layout = field(default_factory=Layout)
    _groups: dict[tuple[str, tuple[str, ...]], Group] = field(default_factory=dict, repr=False)
    _made: Counter[tuple[int, ...]] = field(default_factory=Counter, repr=False)
    _alike: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict, repr=False)
    _notes: dict[str, Any] = field(default_factory=dict, repr=False)
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
        """Which share of the batch is this rank's: a number below `layout.replicas`."""
        return self.coordinate("data") * self.layout.shard + self.coordinate("shard")

    @property
    def is_replica_leader(self) -> bool:
        """One rank of each replica, in the first stage: it alone says what all ranks of the replica know."""
        return not (self.coordinate("pipeline") or self.coordinate("context") or self.coordinate("tensor"))

    def size(self, axis: str) -> int:
        """Ranks along an axis of the layout or of the experts' view."""
        return _sizes(self.layout, _view((axis,)))[axis]

    def coordinate(self, axis: str) -> int:
        """This rank's coordinate along an axis."""
        return _coordinates(self.rank, _sizes(self.layout, _view((axis,))))[axis]

    @property
    def stage(self) -> int:
        """This rank's pipeline rank: those with the same number hold parts of the same tensors."""
        return self.coordinate("pipeline")

    @property
    def is_stage_leader(self) -> bool:
        """One rank of each."""
        return self.peer_index()[0] == 0

    def peer_index(self, *axes: str) -> tuple[int, int]:
        """(index, count) of this rank among those of its pipeline rank that have its coordinates along the given axes, which may be
        of the layout and of the experts' view at once."""
        key = tuple(sorted(axes))
        if key not in self._alike:
            each = self.ranks // self.layout.pipeline
            ranks = np.arange(self.stage * each, (self.stage + 1) * each)
            same = np.ones(each, dtype=bool)
            for axis in axes:
                sizes = list(_sizes(self.layout, _view((axis,))).items())
                place = [name for name, _ in sizes].index(axis)
                below = math.prod(size for _, size in sizes[place + 1 :])
                same &= ranks // below % sizes[place][1] == self.coordinate(axis)
            found = ranks[same & ~np.isin(ranks, list(self._lost))]
            self._alike[key] = int(np.searchsorted(found, self.rank)), len(found)
        return self._alike[key]

    def mark_lost(self, ranks: Iterable[int]) -> None:
        """These are gone, or what they hold is of no use: `peer_index` counts the others from now on."""
        self._lost.update(ranks)
        self._alike.clear()

    def covers(self, *axes: str) -> bool:
        """Whether those that are left of this rank's pipeline rank still have all of what is cut along the given axes."""
        each = self.ranks // self.layout.pipeline
        places: list[set[tuple[int, ...]]] = [set(), set()]
        for rank in range(self.stage * each, (self.stage + 1) * each):
            one = tuple(_coordinates(rank, _sizes(self.layout, _view((axis,))))[axis] for axis in axes)
            places[rank in self._lost].add(one)
        return places[1] <= places[0]

    def group(self, *axes: str, use: str) -> Group:
        """The ranks that differ from this one along the given axes only, in rank order. All of them ask for it at the same time.

        `use` names the technique: groups of the same ranks are apart for each, so that their messages never mix and the
        account of what was sent can tell them apart.
        """
        key = (use, axes)
        if key not in self._groups:
            sizes = _sizes(self.layout, _view(axes))
            mine = _coordinates(self.rank, sizes)
            ranges = [range(size) if axis in axes else (mine[axis],) for axis, size in sizes.items()]
            ranks = tuple(_rank(place, sizes) for place in product(*ranges))
            self._groups[key] = self.group_of(ranks, use=use)
        return self._groups[key]

    def group_of(self, ranks: tuple[int, ...], *, use: str) -> Group:
        """A group of ranks given by number, this one among them; every member calls it at the same time."""
        handle = None
        if len(ranks) == self.ranks > 1 and use in ("step", "data"):
            handle = dist.group.WORLD  # what all ranks do in one order anyway needs no connections of its own
        elif len(ranks) > 1:
            self._made[ranks] += 1
            # The generation too: a group of an earlier one takes its name out of torch's register when it is collected, at any time.
            with _named(f"{self.place.generation} {ranks} {self._made[ranks]}"):
                handle = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=use)
        return Group(ranks=ranks, index=ranks.index(self.rank), use=use, handle=handle)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.ranks > 1:
            timed_collective(dist.all_reduce, values)
        return values

    def start_all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dist.Work | None:
        """Begin a reduction over all ranks, in place; wait for the result with `busy.wait`."""
        return dist.all_reduce(values, op=operation, async_op=True) if self.ranks > 1 else None

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.ranks == 1:
            return value
        box = [value]
        timed_collective(dist.broadcast_object_list, box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank; for small plain values."""
        if self.ranks == 1:
            return [value]
        found: list[Any] = [None] * self.ranks
        timed_collective(dist.all_gather_object, found, value)
        return found

    def slow_broadcast(self, seconds: float) -> Callable[[Any], Any]:
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

    def store_add(self, key: str, amount: int) -> int:
        """Add to a number that all ranks see, at any time and from any thread; returns the new one."""
        if self.ranks == 1:
            self._notes[key] = self._notes.get(key, 0) + amount
            return int(self._notes[key])
        return int(_notes().add(key, amount))

    def store_set(self, key: str, text: str) -> None:
        """Leave a word for other ranks, at any time and from any thread."""
        if self.ranks == 1:
            self._notes[key] = text
        else:
            _notes().set(key, text)

    def store_get(self, key: str) -> str:
        """What a rank told, or will tell in a moment."""
        return str(self._notes[key]) if self.ranks == 1 else _notes().get(key).decode()

    def barrier(self) -> None:
        """Wait for all ranks; through gloo, so that a GPU run needs no kernel for it."""
        self.all_reduce(torch.zeros(1))


def _notes() -> dist.Store:
    """The store in which the ranks of this generation met, apart from what torch keeps there."""
    return dist.PrefixStore("notes", distributed_c10d._get_default_store())


@contextmanager
def _named(name: str) -> Iterator[None]:
    """The next group meets under this name. torch would name it by how many groups a rank has made, and ranks of other stages, or
    with other parameters, may have made more: then its members would wait for each other under different names, for ever."""
    named = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = named


def _view(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The numbering of ranks that knows all of these axes."""
    return AXES if all(axis in AXES for axis in axes) else EXPERT_AXES


def _sizes(layout: Layout, view: tuple[str, ...]) -> dict[str, int]:
    if view is AXES:
        return {axis: getattr(layout, axis) or 1 for axis in AXES}
    return {
        "pipeline": layout.pipeline,
        "expert_replicate": layout.expert_data // layout.expert_shard,
        "expert_shard": layout.expert_shard,
        "expert": layout.expert,
        "expert_tensor": layout.expert_tensor,
    }


def _coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """A rank's place along every axis, the last axis running fastest."""
    found, below = {}, math.prod(sizes.values())
    for axis, size in sizes.items():
        below //= size
        found[axis], rank = divmod(rank, below)
    return found


def _rank(coordinates: Sequence[int], sizes: dict[str, int]) -> int:
    """The rank at these places, in the order of the axes."""
    rank = 0
    for place, size in zip(coordinates, sizes.values(), strict=True):
        rank = rank * size + place
    return rank


def connect(place: Place, device: str, timeout: float, layout: Layout | None = None) -> Mesh:
    """Join the other ranks of this generation and take this rank's device. Without a layout every rank is a replica."""
    own = torch.device("cuda", place.local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(own)
    server: dist.Store | None = None
    if place.ranks > 1:
        # Small host-side sums go over gloo on every machine; NCCL carries only what lives on GPUs.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        wait = timedelta(seconds=timeout)
        if place.store is None:
            dist.init_process_group(backend, timeout=wait)
        else:
            server = _server(place, timeout)
            store = dist.PrefixStore(f"generation-{place.generation}", server)
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=wait)
    layout = replace(layout, data=layout.data or 1) if layout else Layout(data=place.ranks)
    assert layout.ranks == place.ranks, f"{layout} has {layout.ranks} ranks, {place.ranks} were started"
    return Mesh(place, own, layout, _store=server)


def _server(place: Place, timeout: float) -> dist.Store:
    """Where the ranks meet: an agent's store, or torch's own."""
    assert place.store is not None
    if place.token is not None:
        return ControlStore(place.store, place.token, place.generation, timeout)
    return dist.TCPStore(*place.store, is_master=False, timeout=timedelta(seconds=timeout))


def disconnect(mesh: Mesh) -> None:
    """Leave in good order: nobody tears sockets down while another still reads."""
    if mesh.ranks > 1 and dist.is_initialized():
        mesh.barrier()
        dist.destroy_process_group()


@contextmanager
def abandoned() -> Iterator[None]:
    """Leave as one must where others are gone. Inside, let go of all that held groups: they go afterwards, behind one's back.

    A group's destructor waits for the group's threads, and one of them may wait in gloo, which does not always wake it when
    connections end: until `resilience.timeout`.
    """
    world = distributed_c10d._world
    groups = list(world.pg_map)
    if dist.is_initialized():
        dist.destroy_process_group()
    else:  # one who was interrupted while it joined has counted and registered what torch does not know how to undo
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
            table.clear()
        world.tags_to_pg.clear()
        world.pg_coalesce_state.clear()
        distributed_c10d._unregister_all_process_groups()
        world.group_count = 0  # the next would be named by it, and the others would wait under another name, for ever
    try:
        yield
    finally:
        while groups:
            threading.Thread(target=[groups.pop()].clear, name="burying", daemon=True).start()
