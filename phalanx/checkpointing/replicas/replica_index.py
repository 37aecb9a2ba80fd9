"""A copy of the state in the memory of nodes, as a checkpoint: which step is whole given the nodes that live, who has what, and a
place from which `checkpointing/restore` reads it like any other. For whoever recovers a run; never loads torch.

Each rank's file lies on its own node and on the next one. A step is whole where every rank's file is on some node that lives.
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

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.location import Location, Sink
from phalanx.checkpointing.replicas.replica_protocol import Address, Caller
from phalanx.checkpointing.replicas.replica_server import machine
from phalanx.checkpointing.replicas.shm_slots import RankCopy, SlotDir

_PATIENCE = 5.0  # seconds in which a living holder says what it has


@dataclass(frozen=True, slots=True)
class Replica:
    """A rank's copy, and who keeps it."""

    copy: RankCopy
    node: int
    """Of the holder: the rank's own, or its peer."""
    address: Address
    folder: str
    machine: str


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A state that can be restored."""

    generation: int
    step: int
    ranks: int
    kept: tuple[tuple[Replica, ...], ...]
    """By rank: its copies, that of its own node first."""

    @property
    def nodes(self) -> dict[int, tuple[int, ...]]:
        """By rank: the nodes that have its part."""
        return {rank: tuple(one.node for one in found) for rank, found in enumerate(self.kept)}

    @property
    def bytes(self) -> int:
        return sum(found[0].copy.size for found in self.kept)


def complete_states(holders: Iterable[Address], token: str) -> list[ReplicaState]:
    """Every state that the living among these holders have all of, the newest first. One that does not answer is dead."""
    found: dict[tuple[int, int, int], dict[int, list[Replica]]] = {}
    for one in _listed(list(holders), token):
        key = (one.copy.generation, one.copy.step, one.copy.ranks)
        found.setdefault(key, {}).setdefault(one.copy.rank, []).append(one)
    states = []
    for (generation, step, ranks), kept in sorted(found.items(), reverse=True):
        if len(kept) == ranks:
            ordered = (sorted(kept[rank], key=lambda one: one.node != one.copy.node) for rank in range(ranks))
            states.append(ReplicaState(generation, step, ranks, tuple(map(tuple, ordered))))
    return states


def newest_state(holders: Iterable[Address], token: str) -> ReplicaState | None:
    """The newest state that the living among these holders have all of."""
    return next(iter(complete_states(holders, token)), None)


def set_peers(holders: dict[int, Address], token: str) -> dict[int, int | None]:
    """Tell all living holders, by node, of each other: each sends its copies to the next from now on. Returns who sends to whom;
    without those that do not answer."""
    addresses, peers = {str(node): list(address) for node, address in holders.items()}, {}
    for node, address in holders.items():
        with contextlib.suppress(OSError):
            peers[node] = _once(address, token, {"op": "peers", "addresses": addresses})["peer"]
    return peers


def discard(holders: Iterable[Address], token: str, before: int, but: int | None = None) -> None:
    """Give back the memory of generations before this one, except of step `but`: before memory for the next is taken."""
    for address in holders:
        with contextlib.suppress(OSError):  # one that is lost has nothing to forget
            _once(address, token, {"op": "forget", "before": before, "but": but})


def _listed(holders: Sequence[Address], token: str) -> list[Replica]:
    def ask(address: Address) -> dict[str, Any] | None:
        try:
            return _once(address, token, {"op": "list"})
        except OSError:
            return None

    found = []
    with ThreadPoolExecutor(max(1, min(32, len(holders)))) as pool:
        for address, answer in zip(holders, pool.map(ask, holders), strict=True):
            if answer is None:
                continue
            where = (answer["node"], (address[0], address[1]), answer["folder"], answer["machine"])
            found += [Replica(RankCopy.from_json(table), *where) for table in answer["copies"]]
    return found


def _once(address: Address, token: str, message: dict[str, Any]) -> dict[str, Any]:
    caller = Caller(address, token, _PATIENCE)
    try:
        return caller.ask(message)
    finally:
        caller.close()


def _name(step: int) -> str:
    return directory.step_dir(Path(), step).name


class MemoryLocation:
    """A state in memory as a folder, or one of its files: a Location that can be read. It travels between ranks as it is."""

    renames = False

    def __init__(self, state: ReplicaState, token: str, *, local: bool = True):
        """`local`: read what is in this machine's own memory without asking its holder."""
        contents = state.kept[0][0].copy.contents
        assert contents is not None, "rank 0 keeps what is not in tensors"
        self.state, self._token, self._local = state, token, local
        self._file: str | None = None
        self._kept = {found[0].copy.file: found for found in state.kept}
        beside = {name: found[0].copy.text for name, found in self._kept.items()}
        self._texts = {format.beside(name): text for name, text in beside.items()}
        self._texts[directory.MARKER] = directory.marker(self, contents | {"step": state.step}, beside)
        self._callers = _Callers(token)

    @property
    def name(self) -> str:
        return self._file or _name(self.state.step)

    @property
    def parent(self) -> MemoryLocation:
        assert self._file is not None, "copies in memory have no folder around them"
        return self._at(None)

    def __truediv__(self, name: str) -> MemoryLocation:
        assert self._file is None, "a file has nothing inside"
        return self._at(name)

    def _at(self, file: str | None) -> MemoryLocation:
        one = object.__new__(MemoryLocation)
        one.__dict__ = self.__dict__ | {"_file": file}
        return one

    def __str__(self) -> str:
        return f"memory, generation {self.state.generation}/{_name(self.state.step)}" + (f"/{self._file}" if self._file else "")

    def is_folder(self) -> bool:
        return self._file is None

    def entries(self) -> list[str]:
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        if self._file is not None:
            return {}
        sizes = {name: found[0].copy.size for name, found in self._kept.items()}
        return sizes | {name: len(text) for name, text in self._texts.items()}

    def size(self) -> int | None:
        return None if self._file is None else self.parent.sizes().get(self._file)

    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        if self._file in self._texts:
            text = self._texts[self._file]
            return text[begin:] if length is None else text[begin : begin + length]
        if self._file not in self._kept:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        kept = self._kept[self._file]
        size = kept[0].copy.size - begin
        problems = []
        for one in sorted(kept, key=lambda one: not self._near(one)):
            try:
                return self._read(one, begin, max(0, size if length is None else min(length, size)))
            except OSError as error:  # this node is gone, or has gone on to another step: the other copy is as good
                problems.append(f"node {one.node}: {error}")
        raise OSError(f"no node has {self._file} any more ({'; '.join(problems)})")

    def _near(self, one: Replica) -> bool:
        return self._local and one.machine == machine() and Path(one.folder).is_dir()

    def _read(self, one: Replica, begin: int, length: int) -> bytes:
        copy = one.copy
        if self._near(one):
            shelf = SlotDir(Path(one.folder))
            return shelf.read(shelf.image(copy.generation, copy.rank, copy.slot), copy.step, begin, length)
        which = {"generation": copy.generation, "rank": copy.rank, "slot": copy.slot, "step": copy.step}
        return self._callers.at(one.address).fetch({"op": "read", "begin": begin, "length": length} | which)

    def close(self) -> None:
        self._callers.close()

    def unfinished(self) -> list[str]:
        return []

    def make(self) -> None:
        raise self._fixed()

    def sink(self) -> Sink:
        raise self._fixed()

    def sync(self) -> None: ...
    def rename(self, to: Location) -> None:
        raise self._fixed()

    def remove(self) -> None:
        raise self._fixed()

    def _fixed(self) -> OSError:
        return OSError(errno.EROFS, "copies in memory are written by their ranks alone", str(self))


class _Callers:
    """Connections to holders, made when they are needed, and not taken along to other processes."""

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
