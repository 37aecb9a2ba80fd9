"""Memory replicas of all nodes as a checkpoint: which steps are complete given the nodes that are alive, where each rank's file is, and a
`Location` from which `restore` reads them like any checkpoint. Called by the control plane and by workers. Does not import torch.

Each rank's file is on its own node and on the next one. A step is complete if every rank's file is on some node that is alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpointing import directory
from phalanx.checkpointing.format import sidecar_name
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.replicas.replica_protocol import Address, Caller
from phalanx.checkpointing.replicas.shm_slots import RankCopy, SlotDir, machine_id

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


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A complete state in memory, which can be restored."""

    generation: int
    step: int
    ranks: int
    replicas: tuple[tuple[Replica, ...], ...]
    """By rank: its copies, the one on its own node first."""

    @property
    def nodes(self) -> dict[int, tuple[int, ...]]:
        """By rank: the nodes that have its copy."""
        return {rank: tuple(replica.node for replica in replicas) for rank, replicas in enumerate(self.replicas)}

    @property
    def bytes(self) -> int:
        return sum(replicas[0].copy.size for replicas in self.replicas)


def complete_states(servers: Iterable[Address], token: str) -> list[ReplicaState]:
    """Every state that is complete on those of these replica servers that answer, newest first."""
    found: dict[tuple[int, int, int], dict[int, list[Replica]]] = {}
    for replica in _list_replicas(list(servers), token):
        key = (replica.copy.generation, replica.copy.step, replica.copy.ranks)
        found.setdefault(key, {}).setdefault(replica.copy.rank, []).append(replica)
    states = []
    for (generation, step, ranks), by_rank in sorted(found.items(), reverse=True):
        if len(by_rank) == ranks:
            ordered = (sorted(by_rank[rank], key=lambda replica: replica.node != replica.copy.node) for rank in range(ranks))
            states.append(ReplicaState(generation, step, ranks, tuple(map(tuple, ordered))))
    return states


def newest_state(servers: Iterable[Address], token: str) -> ReplicaState | None:
    """The newest state that is complete on those of these replica servers that answer."""
    return next(iter(complete_states(servers, token)), None)


def set_peers(servers: dict[int, Address], token: str) -> dict[int, int | None]:
    """Tell all replica servers, by node, about each other: each sends its copies to the next. Returns each node's peer, without nodes that
    do not answer."""
    addresses, peers = {str(node): list(address) for node, address in servers.items()}, {}
    for node, address in servers.items():
        with contextlib.suppress(OSError):
            peers[node] = _ask_once(address, token, {"op": "peers", "addresses": addresses})["peer"]
    return peers


def discard(servers: Iterable[Address], token: str, before: int, keep_step: int | None = None) -> None:
    """Free the memory of generations before this one, except copies of `keep_step`."""
    for address in servers:
        with contextlib.suppress(OSError):  # a lost node has nothing to free
            _ask_once(address, token, {"op": "discard", "before": before, "keep_step": keep_step})


def _list_replicas(servers: Sequence[Address], token: str) -> list[Replica]:
    def ask(address: Address) -> dict[str, Any] | None:
        try:
            return _ask_once(address, token, {"op": "list"})
        except OSError:
            return None

    replicas = []
    with ThreadPoolExecutor(max(1, min(32, len(servers)))) as pool:
        for address, answer in zip(servers, pool.map(ask, servers), strict=True):
            if answer is None:
                continue
            where = (answer["node"], (address[0], address[1]), answer["folder"], answer["machine"])
            replicas += [Replica(RankCopy.from_json(table), *where) for table in answer["copies"]]
    return replicas


def _ask_once(address: Address, token: str, message: dict[str, Any]) -> dict[str, Any]:
    caller = Caller(address, token, _PATIENCE)
    try:
        return caller.ask(message)
    finally:
        caller.close()


class MemoryLocation(Location):
    """A complete state in memory as a read-only folder, or a file in it. Ranks send it to each other."""

    def __init__(self, state: ReplicaState, token: str, *, local: bool = True):
        """`local`: read replicas in this machine's own memory without asking its replica server."""
        first = state.replicas[0][0].copy
        assert first.metadata is not None, "rank 0's copy has the run's metadata"
        self.state, self._token, self._local = state, token, local
        self._file: str | None = None
        self._replicas = {replicas[0].copy.file: replicas for replicas in state.replicas}
        sidecars = {name: replicas[0].copy.sidecar.to_json() for name, replicas in self._replicas.items()}
        self._texts = {sidecar_name(name): text for name, text in sidecars.items()}
        self._texts[directory.MARKER] = directory.make_marker(self, state.step, first.metadata, sidecars, first.time).to_json()
        self._callers = _Callers(token)

    @property
    def name(self) -> str:
        return self._file or directory.step_dir(Path(), self.state.step).name

    @property
    def parent(self) -> MemoryLocation:
        assert self._file is not None, "memory replicas have no parent folder"
        return self._at(None)

    def __truediv__(self, name: str) -> MemoryLocation:
        assert self._file is None, "a file has no entries"
        return self._at(name)

    def _at(self, file: str | None) -> MemoryLocation:
        other = object.__new__(MemoryLocation)
        other.__dict__ = self.__dict__ | {"_file": file}
        return other

    def __str__(self) -> str:
        folder = f"memory, generation {self.state.generation}/{directory.step_dir(Path(), self.state.step).name}"
        return f"{folder}/{self._file}" if self._file else folder

    def is_folder(self) -> bool:
        return self._file is None

    def entries(self) -> list[str]:
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        if self._file is not None:
            return {}
        sizes = {name: replicas[0].copy.size for name, replicas in self._replicas.items()}
        return sizes | {name: len(text) for name, text in self._texts.items()}

    def size(self) -> int | None:
        return None if self._file is None else self.parent.sizes().get(self._file)

    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        if self._file in self._texts:
            text = self._texts[self._file]
            return text[begin:] if length is None else text[begin : begin + length]
        if self._file not in self._replicas:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        replicas = self._replicas[self._file]
        size = replicas[0].copy.size - begin
        problems = []
        for replica in sorted(replicas, key=lambda replica: not self._is_local(replica)):
            try:
                return self._read(replica, begin, max(0, size if length is None else min(length, size)))
            except OSError as error:  # the node is gone, or its slot has another step now: try the other copy
                problems.append(f"node {replica.node}: {error}")
        raise OSError(f"no node has {self._file} any more ({'; '.join(problems)})")

    def _is_local(self, replica: Replica) -> bool:
        return self._local and replica.machine == machine_id() and Path(replica.folder).is_dir()

    def _read(self, replica: Replica, begin: int, length: int) -> bytes:
        copy = replica.copy
        if self._is_local(replica):
            slots = SlotDir(Path(replica.folder))
            return slots.read(slots.slot(copy.generation, copy.rank, copy.slot), copy.step, begin, length)
        which = {"generation": copy.generation, "rank": copy.rank, "slot": copy.slot, "step": copy.step}
        return self._callers.at(replica.address).fetch({"op": "read", "begin": begin, "length": length} | which)

    def close(self) -> None:
        self._callers.close()


class _Callers:
    """Connections to replica servers, opened when needed. When pickled, it leaves them behind."""

    def __init__(self, token: str):
        self._token = token
        self._made: dict[Address, Caller] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._token,)

    def at(self, address: Address) -> Caller:
        with self._lock:
            return self._made.setdefault(address, Caller(address, self._token))

    def close(self) -> None:
        with self._lock:
            made, self._made = self._made, {}
        for caller in made.values():
            caller.close()
