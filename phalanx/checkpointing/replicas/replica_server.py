"""The process of a node that keeps copies of the state in host memory: it outlives the workers that copied them, sends each on to
a peer node, and hands them out to whoever restores. Started by the launcher, one for each node; never loads torch.

    python -m phalanx.checkpointing.replicas.replica_server       with what it needs in a line of JSON on its standard input

It says where it listens in a line of JSON on its standard output. When its standard input ends, as it does with the process that
started it, it removes everything and ends.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from phalanx.checkpointing.format import BLOCK
from phalanx.checkpointing.replicas import replica_protocol
from phalanx.checkpointing.replicas.replica_protocol import Address, Caller, Connection
from phalanx.checkpointing.replicas.shm_slots import ADDRESS, SLOTS, RankCopy, SlotDir, claim, default_root

_SUMMING = 2  # blocks of one image that are summed at once: training has the cores
_CROWD = 64  # connections that have not proved themselves, kept at a time
_LOOK = 1.0  # seconds between two looks at whether the process that started this one lives
_MACHINE = Path("/proc/sys/kernel/random/boot_id")


class ReplicaServer:
    """Copies of one node of one run."""

    def __init__(self, folder: Path, node: int, token: str, bind: str = "127.0.0.1"):
        """`bind`: the address of the only interface that it listens on."""
        self.shelf, self.node, self._token = SlotDir(folder), node, token
        self._listener = socket.create_server((bind, 0), backlog=1024)
        self.address: Address = self._listener.getsockname()[:2]
        self._peer: tuple[int, Caller] | None = None
        self._room = threading.Lock()
        self._door, self._greeting = (
            threading.Lock(),
            dict[socket.socket, None](),
        )  # who has not proved itself, the oldest first
        self._does: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "reserve": self._reserve,
            "seal": self._seal,
            "list": self._list,
            "forget": self._forget,
            "peers": self._peers,
        }
        # For this node's workers: the folder is this user's alone.
        partial = folder / f"{ADDRESS}.partial"
        partial.write_text(json.dumps({"address": self.address, "token": token, "node": node}))
        os.replace(partial, folder / ADDRESS)

    def serve(self) -> None:
        """Until `close`."""
        while True:
            try:
                sock, where = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # it gave up before it was accepted, or there are no descriptors left just now
                continue
            with self._door:
                self._greeting[sock] = None
                if len(self._greeting) > _CROWD:  # whoever belongs here proves it in milliseconds: the oldest is a stranger
                    oldest = next(iter(self._greeting))
                    del self._greeting[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
            threading.Thread(target=self._talk, args=(sock, where), daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in it
        self._listener.close()

    def _talk(self, sock: socket.socket, where: Address) -> None:
        with sock:
            try:
                link = replica_protocol.accept(sock, self._token)
            except OSError as error:
                _log(f"refused {where[0]}:{where[1]}: {error}")
                return
            finally:
                with self._door:
                    self._greeting.pop(sock, None)
            link.wait(None)  # between two questions of one who belongs here, hours may pass
            with contextlib.suppress(ConnectionError):
                while True:
                    self._answer(link)

    def _answer(self, link: Connection) -> None:
        """One question."""
        message, length = link.receive()
        operation = message.get("op")
        try:
            if operation == "put":
                link.send(self._put(link, message, length))
                return
            link.drop(length)
            if operation == "read":
                self._read(link, message)
                return
            if operation not in self._does:
                raise ValueError(f"there is no operation {operation!r}")
            link.send(self._does[operation](message))
        except ConnectionError:
            raise
        except FileNotFoundError as error:
            link.send({"missing": str(error)})
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            _log(f"{operation}: {type(error).__name__}: {error}")
            link.send({"error": str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"})

    def _reserve(self, message: dict[str, Any]) -> dict[str, Any]:
        """Memory for a worker's two slots; here, and then on the peer."""
        generation, rank, size = (int(message[key]) for key in ("generation", "rank", "bytes"))
        with self._room:
            self.shelf.reserve(generation, rank, size, tuple(message.get("slots", SLOTS)))
        peer = self._peer
        if peer is not None and not message.get("for_peer") and not message.get("alone"):
            try:
                peer[1].ask(message | {"for_peer": True})
            except OSError as error:
                return {"problem": f"node {peer[0]}: {error}"}
        return {}

    def _seal(self, message: dict[str, Any]) -> dict[str, Any]:
        """A worker has copied: take the checksums, make it a copy, send it on. Returns when all this is done."""
        started = time.perf_counter()
        copy = RankCopy.from_json(message["copy"] | {"node": self.node})
        with self.shelf.image(copy.generation, copy.rank, copy.slot).open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as area:
                if len(area) != copy.size:
                    raise ValueError(f"rank {copy.rank} has copied {copy.size} bytes into {len(area)}")
                copy = replace(copy, about=copy.about | {"crc32": _sums(area)})
            self.shelf.seal(copy)
            sealed = time.perf_counter() - started
            peer, problem = None if message.get("alone") else self._peer, None
            if peer is not None:
                try:
                    peer[1].send_file({"op": "put", "copy": copy.to_json()}, file, copy.size)
                except OSError as error:
                    problem = f"node {peer[0]}: {error}"
                    _log(f"step {copy.step} of rank {copy.rank} is not on {problem}")
        at_peer = peer is not None and problem is None
        return {"seconds": sealed, "peer": at_peer, "problem": problem}

    def _put(self, link: Connection, message: dict[str, Any], length: int) -> dict[str, Any]:
        """Another node's copy, taken in block by block and compared with its checksums on the way."""
        left = length
        try:
            copy = RankCopy.from_json(message["copy"])
            if copy.size != length or copy.slot not in SLOTS:
                raise ValueError(f"{length} bytes for a copy of {copy.size} in slot {copy.slot!r}")
            self.shelf.unseal(int(copy.generation), int(copy.rank), copy.slot)
            with self._room:
                self.shelf.reserve(copy.generation, copy.rank, length)
            with (
                self.shelf.image(copy.generation, copy.rank, copy.slot).open("r+b") as file,
                mmap.mmap(file.fileno(), 0) as area,
                memoryview(area) as view,
            ):
                for number, begin in enumerate(range(0, length, BLOCK)):
                    with view[begin : begin + BLOCK] as block:
                        link.take(block)
                        left -= len(block)
                        if zlib.crc32(block) != copy.about["crc32"][number]:
                            raise ValueError(f"bytes {begin} to {begin + len(block)} arrived damaged")
            self.shelf.seal(copy)
        except ConnectionError:
            raise
        except BaseException:
            link.drop(left)
            raise
        return {}

    def _read(self, link: Connection, message: dict[str, Any]) -> None:
        generation, rank, step, begin, length = (int(message[key]) for key in ("generation", "rank", "step", "begin", "length"))
        path = self.shelf.image(generation, rank, str(message["slot"]))
        self.shelf.see(path, step)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            link.send_file({}, file, begin, max(0, min(length, size - begin)))

    def _list(self, message: dict[str, Any]) -> dict[str, Any]:
        copies = [copy.to_json() for copy in self.shelf.copies()]
        return {"node": self.node, "folder": str(self.shelf.folder), "machine": machine(), "copies": copies}

    def _forget(self, message: dict[str, Any]) -> dict[str, Any]:
        self.shelf.forget(int(message["before"]), message.get("but"))
        return {}

    def _peers(self, message: dict[str, Any]) -> dict[str, Any]:
        """Who lives: the next of them in the ring takes this node's copies from now on."""
        living: Mapping[str, list[Any]] = message["addresses"]
        others = sorted(int(node) for node in living if int(node) != self.node)
        after = [node for node in others if node > self.node] or others
        if not after:
            self._peer = None
            return {"peer": None}
        host, port = living[str(after[0])]
        if self._peer is None or self._peer[1].address != (host, port):
            self._peer = (after[0], Caller((host, port), self._token))
        return {"peer": after[0]}


def _sums(area: mmap.mmap) -> list[int]:
    """Checksums of an image's blocks, as a checkpoint has them."""
    with memoryview(area) as view, ThreadPoolExecutor(_SUMMING) as pool:
        return list(pool.map(lambda begin: _sum(view, begin), range(0, len(area), BLOCK)))


def _sum(view: memoryview, begin: int) -> int:
    with view[begin : begin + BLOCK] as block:
        return zlib.crc32(block)


def machine() -> str:
    """Names this machine until it is started anew."""
    try:
        return _MACHINE.read_text().strip()
    except OSError:
        return socket.gethostname()


def _log(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", file=sys.stderr, flush=True)


def main() -> NoReturn:
    parent, given = os.getppid(), json.loads(sys.stdin.readline())
    if given.get("folder"):  # claimed by who started this, whose lock it has inherited
        folder = Path(given["folder"])
    else:
        folder, _ = claim(Path(given["root"]) if given.get("root") else default_root(), f"{given['run']}-node{given['node']}")
    holder = ReplicaServer(folder, int(given["node"]), given["token"], given.get("bind", "127.0.0.1"))
    threading.Thread(target=holder.serve, daemon=True).start()
    print(json.dumps({"address": holder.address, "folder": str(folder)}), flush=True)
    # Where what started this has forked others, they keep the pipe open after its death.
    while os.getppid() == parent and not (select.select([0], [], [], _LOOK)[0] and not os.read(0, 4096)):
        pass
    _end(holder)


def _end(holder: ReplicaServer) -> NoReturn:
    holder.close()
    holder.shelf.remove()
    os._exit(0)  # whatever its threads are doing: nobody is left who wants it


if __name__ == "__main__":
    main()
