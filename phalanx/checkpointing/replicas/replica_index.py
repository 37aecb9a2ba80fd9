"""Memory replicas of all nodes as a checkpoint: which steps are complete given the nodes that are alive, where each rank's file is, and a
`Location` from which `restore` reads them like any checkpoint. Called by the control plane and by workers. Does not import torch.

Each rank's file is on its own node and on the next one. A step is complete if every rank's file is on some node that is alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.checkpointing import directory
from phalanx.checkpointing.format import sidecar_name
from phalanx.checkpointing.location import Local, Location
from phalanx.checkpointing.replicas.replica_server import request
from phalanx.checkpointing.replicas.shm_slots import RankCopy, SlotDir, machine_id
from phalanx.events.frames import Address

_PATIENCE = 5.0  # seconds within which a live replica server answers


@dataclass(frozen=True, slots=True)
class Replica:
    """A rank's copy on one node."""

    copy: RankCopy
    node: int
    """The node that has it: the rank's own, or its peer."""
    address: Address
    folder: str
    machine: str


@dataclass(frozen=True)
class ReplicaState:
    """A complete state in memory, which can be restored."""

    generation: int
    step: int
    ranks: int
    replicas: tuple[tuple[Replica, ...], ...]
    """By rank: its copies, the one on its own node first."""

    @cached_property
    def rank_files(self) -> dict[str, tuple[Replica, ...]]:
        return {replicas[0].copy.sidecar.file: replicas for replicas in self.replicas}

    @cached_property
    def other_files(self) -> dict[str, bytes]:
        """Sidecars and marker, as a checkpoint on disk has them."""
        first = self.replicas[0][0].copy
        assert first.metadata is not None, "rank 0's copy has the run's metadata"
        sidecars = {name: replicas[0].copy.sidecar.to_json() for name, replicas in self.rank_files.items()}
        marker = directory.make_marker(str(self), self.step, first.metadata, sidecars, first.time)
        return {sidecar_name(name): text for name, text in sidecars.items()} | {directory.MARKER: marker.to_json()}

    def __str__(self) -> str:
        return f"memory, generation {self.generation}/{directory.step_name(self.step)}"


def complete_states(servers: Iterable[Address], token: str) -> list[ReplicaState]:
    """Every state that is complete on those of these replica servers that answer, newest first."""
    by_state: dict[tuple[int, int, int], dict[int, list[Replica]]] = {}
    for replica in _list_replicas(list(servers), token):
        key = (replica.copy.generation, replica.copy.step, replica.copy.ranks)
        by_state.setdefault(key, {}).setdefault(replica.copy.rank, []).append(replica)
    states = []
    for (generation, step, ranks), by_rank in sorted(by_state.items(), reverse=True):
        if len(by_rank) == ranks:
            ordered = (sorted(by_rank[rank], key=lambda replica: replica.node != replica.copy.node) for rank in range(ranks))
            states.append(ReplicaState(generation, step, ranks, tuple(map(tuple, ordered))))
    return states


def _list_replicas(servers: Sequence[Address], token: str) -> list[Replica]:
    def ask(address: Address) -> list[Replica]:
        try:
            answer, _ = request(address, token, {"op": "list"}, patience=_PATIENCE)
        except OSError:
            return []
        where = (answer["node"], address, answer["folder"], answer["machine"])
        return [Replica(RankCopy.from_json(table), *where) for table in answer["copies"]]

    with ThreadPoolExecutor(max(1, min(32, len(servers)))) as pool:
        return [replica for replicas in pool.map(ask, servers) for replica in replicas]


def set_peers(servers: dict[int, Address], token: str, copies: int = 1) -> None:
    """Tell all replica servers, by node, about each other: each sends its copies to the next, or to the next N."""
    for address in servers.values():
        with contextlib.suppress(OSError):  # a lost node sends nothing
            request(address, token, {"op": "peers", "addresses": list(servers.items()), "copies": copies}, patience=_PATIENCE)


def discard(servers: Iterable[Address], token: str, *, before: int = 0, after: int | None = None) -> None:
    """Free the memory of generations before this one, and forget copies of later steps than `after`."""
    for address in servers:
        with contextlib.suppress(OSError):  # a lost node has nothing to free
            request(address, token, {"op": "discard", "before": before, "after": after}, patience=_PATIENCE)


@dataclass(frozen=True, eq=False)
class MemoryLocation(Location):
    """A complete state in memory as a read-only folder, or a file in it. Ranks send it to each other."""

    state: ReplicaState
    token: str = field(repr=False)
    local: bool = True
    """Read replicas in this machine's own memory without asking its replica server."""
    file: str | None = None

    @property
    def name(self) -> str:
        return self.file or directory.step_name(self.state.step)

    @property
    def parent(self) -> MemoryLocation:
        assert self.file is not None, "memory replicas have no parent folder"
        return replace(self, file=None)

    def __truediv__(self, name: str) -> MemoryLocation:
        assert self.file is None, "a file has no entries"
        return replace(self, file=name)

    def __str__(self) -> str:
        return f"{self.state}/{self.file}" if self.file else str(self.state)

    def is_folder(self) -> bool:
        return self.file is None

    def entries(self) -> list[str]:
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        if self.file is not None:
            return {}
        sizes = {name: replicas[0].copy.size for name, replicas in self.state.rank_files.items()}
        return sizes | {name: len(text) for name, text in self.state.other_files.items()}

    def size(self) -> int | None:
        return None if self.file is None else self.parent.sizes().get(self.file)

    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        if self.file in self.state.other_files:
            return self.state.other_files[self.file][begin:][:length]
        if self.file not in self.state.rank_files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        problems = []
        for replica in sorted(self.state.rank_files[self.file], key=lambda replica: not self._is_local(replica)):
            size = max(0, replica.copy.size - begin)
            try:
                return self._read(replica, begin, size if length is None else min(length, size))
            except OSError as error:  # the node is gone, or its slot has another step now: try the other copy
                problems.append(f"node {replica.node}: {error}")
        raise OSError(f"no node has {self.file} any more ({'; '.join(problems)})")

    def _is_local(self, replica: Replica) -> bool:
        return self.local and replica.machine == machine_id() and Path(replica.folder).is_dir()

    def _read(self, replica: Replica, begin: int, length: int) -> bytes:
        which: Any = {key: getattr(replica.copy, key) for key in ("generation", "rank", "slot", "step")}
        if self._is_local(replica):
            return Local(SlotDir(Path(replica.folder)).sealed_slot(**which)).read(begin, length)
        return bytes(request(replica.address, self.token, {"op": "read", "begin": begin, "length": length} | which)[1])
