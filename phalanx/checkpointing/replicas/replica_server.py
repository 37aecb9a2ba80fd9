"""The process that keeps memory replicas on one node. It outlives the workers that copied them, sends each copy to a peer node, and serves
them to ranks that restore the state. Started by the launcher, one per node. Does not import torch.

    python -m phalanx.checkpointing.replicas.replica_server       with its settings as a line of JSON on standard input

It writes its address as a line of JSON to standard output. When its standard input ends, because the process that started it has ended,
it removes everything and exits.

Others ask it with `request`. A message is JSON followed by bytes, over TCP, one request per connection. Both sides prove the run's token before
anything else is read, and every message and every block of bytes is sealed (`events/frames`). Nothing is encrypted: it is for the network
inside a cluster, which training's own messages use too.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from phalanx.checkpointing.format import BLOCK
from phalanx.checkpointing.replicas.shm_slots import ADDRESS, SLOTS, RankCopy, SlotDir, machine_id
from phalanx.events import frames
from phalanx.events.frames import Address, Refused
from phalanx.events.rundir import replace_private_file

_CORES_PER_CHECKSUM_THREAD = 4  # most cores are for training; a copy that is not checked yet does not count
_MAX_UNPROVEN = 64  # connections that have not proved the token yet
_POLL = 1.0  # seconds between two checks whether the parent process is alive
_MAX_MESSAGE = 256 << 20  # bytes: names and checksums of a large rank's state are a few megabytes
_SEALED_BLOCK = 1 << 20  # bytes that are sealed together; divides `BLOCK`
_PATIENCE = 60.0  # seconds without a byte after which a server counts as dead

Message = dict[str, Any]


class Connection:
    """A connection to a process that has proved the token."""

    def __init__(self, sock: socket.socket, key: bytes, client: bool):
        self._socket, self._sealer = sock, frames.MessageSealer(key, client, _MAX_MESSAGE)

    def send(self, message: Message, file: BinaryIO | None = None, begin: int = 0, length: int = 0) -> None:
        """Send a message, and bytes of a file after it."""
        self._socket.sendall(self._sealer.pack({"message": message, "bytes": length}))
        if file is None or not length:
            return
        file.seek(begin)
        frame = memoryview(bytearray(frames.SEAL + min(length, _SEALED_BLOCK)))
        while length:
            block = frame[frames.SEAL :][:length]
            if file.readinto(block) != len(block):  # type: ignore[attr-defined]
                raise ConnectionError("a file has become shorter")
            frame[: frames.SEAL] = self._sealer.seal(block)
            self._socket.sendall(frame[: frames.SEAL + len(block)])
            length -= len(block)

    def receive(self) -> tuple[Message, int]:
        """A message, and the number of bytes after it."""
        size = self._sealer.size(self._receive(frames.HEADER))
        match self._sealer.open(self._receive(size)):
            case {"message": dict(message), "bytes": int(length)} if length >= 0:
                return message, length
        raise Refused("it sent a message of another kind")

    def receive_bytes(self, size: int) -> bytearray:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, into: memoryview) -> None:
        """Receive bytes that follow a message: all of them, or a multiple of `_SEALED_BLOCK`."""
        for begin in range(0, len(into), _SEALED_BLOCK):
            seal = self._receive(frames.SEAL)
            with into[begin : begin + _SEALED_BLOCK] as block:
                self._fill(block)
                self._sealer.check(seal, block)

    def drop(self, length: int) -> None:
        """Receive and discard bytes: the other side reads the answer only when it has sent all."""
        buffer = memoryview(bytearray(_SEALED_BLOCK))
        while length:
            part = buffer[:length]
            self.receive_into(part)
            length -= len(part)

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, into: memoryview) -> None:
        received = 0
        while received < len(into):
            with into[received:] as rest:  # released at once: a mapped file cannot be closed while a view of it exists
                count = self._socket.recv_into(rest)
            if not count:
                raise ConnectionError("the connection ended during a message")
            received += count


def request(
    address: Address,
    token: str,
    message: Message,
    *,
    patience: float = _PATIENCE,
    file: BinaryIO | None = None,
    length: int = 0,
) -> tuple[Message, bytearray]:
    """A replica server's answer, and the bytes after it. `file`: its first `length` bytes are sent along.

    Raises Refused if either side does not know the token or something was changed on the way, and OSError with the server's reason if it cannot do what it is asked to.
    """
    sock, key = frames.connect(address, token, frames.REPLICAS, min(frames.HANDSHAKE_SECONDS, patience))
    with sock:
        sock.settimeout(patience)
        connection = Connection(sock, key, client=True)
        connection.send(message, file, 0, length)
        answer, size = connection.receive()
        payload = connection.receive_bytes(size)
    if "missing" in answer:
        raise FileNotFoundError(str(answer["missing"]))
    if "error" in answer:
        raise OSError(str(answer["error"]))
    return answer, payload


class ReplicaServer:
    """Memory replicas of one node of one run."""

    def __init__(self, folder: Path, node: int, token: str, bind: str = "127.0.0.1", ports: range | None = None):
        """`bind`: address of the only interface to listen on. `ports`: take one of these."""
        self.slots, self.node, self._token = SlotDir(folder), node, token
        self._listener = frames.listen(bind, ports, backlog=1024)
        self.address: Address = self._listener.getsockname()[:2]
        self._peers: list[tuple[int, Address]] = []
        self._reserving = threading.Lock()
        # Of all ranks of the node: the first copy of a large state is wanted soon.
        self._checksums = ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)) // _CORES_PER_CHECKSUM_THREAD))
        self._unproven_lock = threading.Lock()
        self._unproven: dict[socket.socket, None] = {}
        """Connections that have not proved the token yet, oldest first."""
        self._operations: dict[str, Callable[[Message], Message | None]] = {
            "reserve": self._reserve,
            "seal": self._seal,
            "list": self._list,
            "discard": lambda message: self.slots.discard(int(message["before"]), message.get("after")),
            "peers": self._set_peers,
        }
        # For this node's workers.
        replace_private_file(folder / ADDRESS, json.dumps({"address": self.address, "token": token, "node": node}))

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
                if len(self._unproven) > _MAX_UNPROVEN:
                    # Members of the run prove the token in milliseconds: the oldest is a stranger.
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
        with sock, contextlib.suppress(ConnectionError):
            try:
                try:
                    key = frames.accept_client(sock, self._token, frames.REPLICAS, self.address)
                finally:
                    with self._unproven_lock:
                        self._unproven.pop(sock, None)
                self._answer(Connection(sock, key, client=False))
            except Refused as error:
                _log(f"refused {frames.format_address(where[:2])}: {error}")

    def _answer(self, link: Connection) -> None:
        """Serve one request."""
        message, length = link.receive()
        operation = message.get("op")
        try:
            if operation == "read":
                self._read(link, message)
            elif operation == "put":
                self._put(link, message, length)
                link.send({})
            elif operation in self._operations:
                link.send(self._operations[operation](message) or {})
            else:
                raise ValueError(f"there is no operation {operation!r}")
        except ConnectionError:
            raise
        except FileNotFoundError as error:
            link.send({"missing": str(error)})
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            _log(f"{operation}: {type(error).__name__}: {error}")
            link.send({"error": str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"})

    def _reserve(self, message: Message) -> Message | None:
        """Allocate a worker's slots, here and on the peers."""
        generation, rank, size = (int(message[key]) for key in ("generation", "rank", "bytes"))
        with self._reserving:
            self.slots.reserve(generation, rank, size, tuple(message["slots"]), tuple(message.get("later", ())))
        if message.get("for_peer") or message.get("alone"):
            return None
        problem = self._tell_peers(lambda address: request(address, self._token, message | {"for_peer": True}))
        return None if problem is None else {"problem": problem}

    def _seal(self, message: Message) -> Message:
        """A worker has copied: compute checksums, seal the slot, send it to the peers. Returns when all of this is done."""
        copy = replace(RankCopy.from_json(message["copy"]), node=self.node)
        with (
            self.slots.slot(copy.generation, copy.rank, copy.slot).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as area,
        ):
            if len(area) != copy.size:
                raise ValueError(f"rank {copy.rank} has copied {copy.size} bytes into a slot of {len(area)}")
            copy = replace(copy, sidecar=replace(copy.sidecar, crc32=_block_sums(area, self._checksums)))
        self.slots.seal(copy)
        if message.get("alone") or not self._peers:
            return {"peer": False, "problem": None}

        def send(address: Address) -> None:
            with self.slots.slot(copy.generation, copy.rank, copy.slot).open("rb") as file:
                request(address, self._token, {"op": "put", "copy": copy.to_json()}, file=file, length=copy.size)

        problem = self._tell_peers(send)
        if problem is not None:
            _log(f"step {copy.step} of rank {copy.rank} is not on {problem}")
        return {"peer": problem is None, "problem": problem}

    def _tell_peers(self, tell: Callable[[Address], object]) -> str | None:
        """Send something to all peers at once; returns what went wrong, or None."""
        peers = self._peers

        def attempt(peer: tuple[int, Address]) -> str | None:
            try:
                tell(peer[1])
            except OSError as error:
                return f"node {peer[0]}: {error}"
            return None

        if len(peers) <= 1:  # no threads for the usual case
            return attempt(peers[0]) if peers else None
        with ThreadPoolExecutor(len(peers)) as pool:
            return next(filter(None, pool.map(attempt, peers)), None)

    def _put(self, link: Connection, message: Message, length: int) -> None:
        """Receive another node's copy block by block, and compare it with its checksums."""
        remaining = length
        try:
            copy = RankCopy.from_json(message["copy"])
            if copy.size != length or copy.slot not in SLOTS:
                raise ValueError(f"{length} bytes for a copy of {copy.size} in slot {copy.slot!r}")
            self.slots.unseal(int(copy.generation), int(copy.rank), copy.slot)
            with self._reserving:
                self.slots.reserve(copy.generation, copy.rank, length, (copy.slot,))
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

    def _read(self, link: Connection, message: Message) -> None:
        generation, rank, step, begin, length = (int(message[key]) for key in ("generation", "rank", "step", "begin", "length"))
        with self.slots.sealed_slot(generation, rank, str(message["slot"]), step).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            link.send({}, file, begin, max(0, min(length, size - begin)))

    def _list(self, message: Message) -> Message:
        copies = [copy.to_json() for copy in self.slots.copies()]
        return {"node": self.node, "folder": str(self.slots.folder), "machine": machine_id(), "copies": copies}

    def _set_peers(self, message: Message) -> None:
        """Given the nodes that are alive: the next ones in the ring receive this node's copies from now on."""
        others = sorted((int(node), (str(host), int(port))) for node, (host, port) in message["addresses"] if node != self.node)
        ring = [other for other in others if other[0] > self.node] + [other for other in others if other[0] < self.node]
        self._peers = ring[: int(message.get("copies", 1))]


def _block_sums(area: mmap.mmap, pool: ThreadPoolExecutor) -> list[int]:
    """Checksums of a slot's blocks, as a checkpoint has them."""

    def block_sum(begin: int) -> int:
        with view[begin : begin + BLOCK] as block:
            return zlib.crc32(block)

    with memoryview(area) as view:
        return list(pool.map(block_sum, range(0, len(area), BLOCK)))


def _log(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", file=sys.stderr, flush=True)


def main() -> NoReturn:
    parent, settings = os.getppid(), json.loads(sys.stdin.readline())
    folder = Path(settings["folder"])  # claimed by the parent process, whose lock this process has inherited
    ports = settings.get("ports")
    server = ReplicaServer(folder, settings["node"], settings["token"], settings["bind"], range(*ports) if ports else None)
    threading.Thread(target=server.serve, daemon=True).start()
    print(json.dumps({"address": server.address}), flush=True)
    # Other processes that the parent has forked may keep the pipe open after its death.
    while os.getppid() == parent and not (select.select([0], [], [], _POLL)[0] and not os.read(0, 4096)):
        pass
    server.close()
    server.slots.remove()
    os._exit(0)  # whatever the threads are doing: nobody needs it any more


if __name__ == "__main__":
    main()
