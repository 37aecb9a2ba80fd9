"""The process that keeps memory replicas on one node. It outlives the workers that copied them, sends each copy to a peer node, and serves
them to whoever restores the state. Started by the launcher, one per node. Does not import torch.

    python -m phalanx.checkpointing.replicas.replica_server       with its settings as a line of JSON on standard input

It writes its address as a line of JSON to standard output. When its standard input ends, because the process that started it has ended,
it removes everything and exits.
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
from phalanx.checkpointing.replicas.shm_slots import ADDRESS, SLOTS, RankCopy, SlotDir, claim, default_root, machine_id

_CHECKSUM_THREADS = 2  # per copy: the cores are for training
_MAX_UNPROVEN = 64  # connections that have not proved the token yet
_POLL = 1.0  # seconds between two checks whether the parent process is alive

Message = dict[str, Any]


class ReplicaServer:
    """Memory replicas of one node of one run."""

    def __init__(self, folder: Path, node: int, token: str, bind: str = "127.0.0.1"):
        """`bind`: address of the only interface to listen on."""
        self.slots, self.node, self._token = SlotDir(folder), node, token
        self._listener = socket.create_server((bind, 0), backlog=1024)
        self.address: Address = self._listener.getsockname()[:2]
        self._peer: tuple[int, Caller] | None = None
        self._reserving = threading.Lock()
        self._unproven_lock = threading.Lock()
        self._unproven: dict[socket.socket, None] = {}
        """Connections that have not proved the token yet, oldest first."""
        self._operations: dict[str, Callable[[Message], Message]] = {
            "reserve": self._reserve,
            "seal": self._seal,
            "list": self._list,
            "discard": self._discard,
            "peers": self._set_peer,
        }
        # For this node's workers. Only this user can read the folder.
        partial = folder / f"{ADDRESS}.partial"
        partial.write_text(json.dumps({"address": self.address, "token": token, "node": node}))
        os.replace(partial, folder / ADDRESS)

    def serve(self) -> None:
        """Accept connections until `close`."""
        while True:
            try:
                sock, where = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # the client gave up, or there are no free descriptors at the moment
                continue
            with self._unproven_lock:
                self._unproven[sock] = None
                if (
                    len(self._unproven) > _MAX_UNPROVEN
                ):  # members of the run prove the token in milliseconds: the oldest is a stranger
                    oldest = next(iter(self._unproven))
                    del self._unproven[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
            threading.Thread(target=self._serve_connection, args=(sock, where), daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `serve`
        self._listener.close()

    def _serve_connection(self, sock: socket.socket, where: Address) -> None:
        with sock:
            try:
                link = replica_protocol.accept(sock, self._token)
            except OSError as error:
                _log(f"refused {where[0]}:{where[1]}: {error}")
                return
            finally:
                with self._unproven_lock:
                    self._unproven.pop(sock, None)
            link.set_timeout(None)  # hours may pass between two requests
            with contextlib.suppress(ConnectionError):
                while True:
                    self._answer(link)

    def _answer(self, link: Connection) -> None:
        """Serve one request."""
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
            if operation not in self._operations:
                raise ValueError(f"there is no operation {operation!r}")
            link.send(self._operations[operation](message))
        except ConnectionError:
            raise
        except FileNotFoundError as error:
            link.send({"missing": str(error)})
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            _log(f"{operation}: {type(error).__name__}: {error}")
            link.send({"error": str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"})

    def _reserve(self, message: Message) -> Message:
        """Allocate a worker's slots, here and on the peer."""
        generation, rank, size = (int(message[key]) for key in ("generation", "rank", "bytes"))
        with self._reserving:
            self.slots.reserve(generation, rank, size, tuple(message.get("slots", SLOTS)))
        peer = self._peer
        if peer is not None and not message.get("for_peer") and not message.get("alone"):
            try:
                peer[1].ask(message | {"for_peer": True})
            except OSError as error:
                return {"problem": f"node {peer[0]}: {error}"}
        return {}

    def _seal(self, message: Message) -> Message:
        """A worker has copied: compute checksums, seal the slot, send it to the peer. Returns when all of this is done."""
        started = time.perf_counter()
        copy = replace(RankCopy.from_json(message["copy"]), node=self.node)
        with self.slots.slot(copy.generation, copy.rank, copy.slot).open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as area:
                if len(area) != copy.size:
                    raise ValueError(f"rank {copy.rank} has copied {copy.size} bytes into a slot of {len(area)}")
                copy = replace(copy, sidecar=replace(copy.sidecar, crc32=_block_sums(area)))
            self.slots.seal(copy)
            sealed = time.perf_counter() - started
            peer, problem = None if message.get("alone") else self._peer, None
            if peer is not None:
                try:
                    peer[1].send_file({"op": "put", "copy": copy.to_json()}, file, copy.size)
                except OSError as error:
                    problem = f"node {peer[0]}: {error}"
                    _log(f"step {copy.step} of rank {copy.rank} is not on {problem}")
        return {"seconds": sealed, "peer": peer is not None and problem is None, "problem": problem}

    def _put(self, link: Connection, message: Message, length: int) -> Message:
        """Receive another node's copy block by block, and compare it with its checksums."""
        remaining = length
        try:
            copy = RankCopy.from_json(message["copy"])
            if copy.size != length or copy.slot not in SLOTS:
                raise ValueError(f"{length} bytes for a copy of {copy.size} in slot {copy.slot!r}")
            self.slots.unseal(int(copy.generation), int(copy.rank), copy.slot)
            with self._reserving:
                self.slots.reserve(copy.generation, copy.rank, length)
            with (
                self.slots.slot(copy.generation, copy.rank, copy.slot).open("r+b") as file,
                mmap.mmap(file.fileno(), 0) as area,
                memoryview(area) as view,
            ):
                for number, begin in enumerate(range(0, length, BLOCK)):
                    with view[begin : begin + BLOCK] as block:
                        link.receive_into(block)
                        remaining -= len(block)
                        if zlib.crc32(block) != copy.sidecar.crc32[number]:
                            raise ValueError(f"bytes {begin} to {begin + len(block)} arrived damaged")
            self.slots.seal(copy)
        except ConnectionError:
            raise
        except BaseException:
            link.drop(remaining)
            raise
        return {}

    def _read(self, link: Connection, message: Message) -> None:
        generation, rank, step, begin, length = (int(message[key]) for key in ("generation", "rank", "step", "begin", "length"))
        path = self.slots.slot(generation, rank, str(message["slot"]))
        self.slots.check_step(path, step)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            link.send_file({}, file, begin, max(0, min(length, size - begin)))

    def _list(self, message: Message) -> Message:
        copies = [copy.to_json() for copy in self.slots.copies()]
        return {"node": self.node, "folder": str(self.slots.folder), "machine": machine_id(), "copies": copies}

    def _discard(self, message: Message) -> Message:
        self.slots.discard(int(message["before"]), message.get("keep_step"))
        return {}

    def _set_peer(self, message: Message) -> Message:
        """Given the nodes that are alive: the next one in the ring receives this node's copies from now on."""
        addresses: Mapping[str, list[Any]] = message["addresses"]
        others = sorted(int(node) for node in addresses if int(node) != self.node)
        after = [node for node in others if node > self.node] or others
        if not after:
            self._peer = None
            return {"peer": None}
        host, port = addresses[str(after[0])]
        if self._peer is None or self._peer[1].address != (host, port):
            self._peer = (after[0], Caller((host, port), self._token))
        return {"peer": after[0]}


def _block_sums(area: mmap.mmap) -> list[int]:
    """Checksums of a slot's blocks, as a checkpoint has them."""

    def block_sum(begin: int) -> int:
        with view[begin : begin + BLOCK] as block:
            return zlib.crc32(block)

    with memoryview(area) as view, ThreadPoolExecutor(_CHECKSUM_THREADS) as pool:
        return list(pool.map(block_sum, range(0, len(area), BLOCK)))


def _log(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", file=sys.stderr, flush=True)


def main() -> NoReturn:
    parent, settings = os.getppid(), json.loads(sys.stdin.readline())
    if settings.get("folder"):  # claimed by the parent process, whose lock this process has inherited
        folder = Path(settings["folder"])
    else:
        root = Path(settings["root"]) if settings.get("root") else default_root()
        folder, _ = claim(root, f"{settings['run']}-node{settings['node']}")
    server = ReplicaServer(folder, int(settings["node"]), settings["token"], settings.get("bind", "127.0.0.1"))
    threading.Thread(target=server.serve, daemon=True).start()
    print(json.dumps({"address": server.address, "folder": str(folder)}), flush=True)
    # Other processes that the parent has forked may keep the pipe open after its death.
    while os.getppid() == parent and not (select.select([0], [], [], _POLL)[0] and not os.read(0, 4096)):
        pass
    server.close()
    server.slots.remove()
    os._exit(0)  # whatever the threads are doing: nobody needs it any more


if __name__ == "__main__":
    main()
