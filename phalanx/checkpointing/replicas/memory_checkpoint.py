"""Copies of the state in host memory, outside the worker processes, all ranks together and behind training. Driven by the trainer
between steps; `checkpointing/replicas/replica_server` keeps them, `checkpointing/replicas/replica_index` finds them again.

Each rank copies what it would write into a checkpoint into memory that it shares with its node's holder, as the very file. The
step waits for this copy alone, and that only before the state changes again; the holder then takes the checksums, makes it a copy,
and sends it on to the peer node. A rank has two slots, and the one of the newest state that is whole on all ranks is not touched.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpointing import format
from phalanx.checkpointing.format import Box
from phalanx.checkpointing.replicas.replica_protocol import Caller
from phalanx.checkpointing.replicas.shm_slots import ADDRESS, HANDOFF_SLOT, SLOTS, RankCopy, SlotDir
from phalanx.checkpointing.restore import failure_text
from phalanx.checkpointing.save import Ranks
from phalanx.checkpointing.shard_io import box, laid_out
from phalanx.checkpointing.staging import Staging
from phalanx.checkpointing.state_tensor import Part, StateTensor, as_state_tensors, written

_SELDOM = 1000  # steps between two copies at most
_LOOK = 0.02  # seconds between two looks at whether all ranks are there
_TOUCHED = 2**28  # bytes whose pages are mapped in one go
_LAG = 2.0  # seconds that a patient one waits at most: a holder that takes longer is frozen, and will be noticed
_PATIENCE = 600.0  # seconds that a holder may take for the checksums and for sending a rank's part to its peer


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """How a copy of all ranks went, as rank 0 knows it."""

    step: int
    failure: str | None = None
    """Why there is none; the one before it is untouched."""
    bytes: int = 0
    seconds: float = 0.0
    """From the moment it holds until it was whole, on the peers too."""
    stall: float = 0.0
    """Seconds of those that training stood still for it."""
    peer: bool = False
    """Every rank's part is on a second node."""
    problem: str | None = None
    """Why it is not, where there is a peer."""
    passed_over: int = 0
    """Copies that were due before it and left out, as the one before them, or the memory, was not ready."""


class SharedStaging(Staging):
    """Memory that is shared with the holder: a header, then the copy of this rank's parts."""

    def __init__(self, device: torch.device, path: Path, head: bytes, *, pin: bool = True):
        """`pin`: on GPUs; not worth its time for a single copy."""
        super().__init__(device, pin=pin)
        self._path, self._head = path, head

    def _obtain(self, size: int) -> Tensor:
        with self._path.open("r+b") as file:
            area = mmap.mmap(file.fileno(), len(self._head) + size, flags=mmap.MAP_SHARED)
        area[: len(self._head)] = self._head
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        memory = torch.frombuffer(area, dtype=torch.uint8, count=size, offset=len(self._head))
        # Its pages are there already: mapped now, so that no copy waits for the system. Each is read once, for that the rest of the
        # process goes on; MAP_POPULATE would hold up whoever asks for memory meanwhile, for half a second per GiB.
        for some in memory.split(_TOUCHED):
            some[:: mmap.PAGESIZE].amax()
        return memory

    def map(self, size: int) -> None:
        """Now, in whatever thread this is: it has to be known whether it can be had."""
        if (problem := self._allocate(size)) is not None:
            raise MemoryError(problem)


def ask_server(shelf: SlotDir, message: dict[str, Any]) -> dict[str, Any]:
    """The holder of this node."""
    # Looked up each time: a holder that was started again listens elsewhere.
    try:
        holder = json.loads((shelf.folder / ADDRESS).read_text())
    except FileNotFoundError:
        raise OSError(f"there is no holder in {shelf.folder} any more") from None
    caller = Caller(tuple(holder["address"]), holder["token"], _PATIENCE)
    try:
        return caller.ask(message)
    finally:
        caller.close()


class MemoryCopies:
    """Copies of one generation of a run, on one rank."""

    def __init__(self, ranks: Ranks, folder: Path, generation: int = 0, *, patient: bool = False):
        """`folder`: of this node's holder. `slow_broadcast`: wait for the copy before rather than leave one out, so that a failure never
        costs more than a step."""
        self._ranks, self._shelf, self._generation, self._patient = ranks, SlotDir(folder), generation, patient
        self._parts: list[Part] = []
        self._boxes: list[Box] = []
        self._head = b""
        self._slots: dict[str, SharedStaging] = {}
        self._ready: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._key = ""
        self._problem: str | None = None
        self._found: list[CopyOutcome] = []
        self._whole: str | None = None
        """Rank 0: the slot of the newest state that is whole on all ranks."""
        self._told = self._passed_over = 0
        self._stall = 0.0
        self._left = False
        self.pace: float | None = None
        """The part of training's time that copies may take, where they are to be as frequent as that allows; None: as they are asked for."""
        self._next = 0
        self._cost: float | None = None
        self._last: tuple[int, float] | None = None
        self.off: str | None = None
        """Why none are taken, as all ranks know it."""

    @property
    def _bytes(self) -> int:
        return len(self._head) + sum(part.bytes for part in self._parts)

    def prepare(self, tensors: Mapping[str, Tensor | StateTensor]) -> None:
        """Get the memory ready, in the background; all ranks call it together."""
        self._parts = laid_out(written(as_state_tensors(tensors)))
        self._boxes = [box(part) for part in self._parts]
        self._head = format.header(self._boxes)
        self._key = self._number()
        self._ready = threading.Thread(target=self._reserve, name="memory for copies", daemon=True)
        self._ready.start()

    def _number(self) -> str:
        """A name for what the ranks do next; not counted here, as they may have copied through another of these before."""
        return f"copies-{self._ranks.broadcast_object(self._ranks.store_add('copies', 1) if self._ranks.rank == 0 else 0)}"

    def _reserve(self) -> None:
        """In a thread: memory for both slots, from the holder, which knows what is free; mapped, and pinned on GPUs."""
        failure: BaseException | None = None
        try:
            which = {"generation": self._generation, "rank": self._ranks.rank}
            self._ask({"op": "reserve", "bytes": self._bytes} | which)
            for slot in SLOTS:
                path = self._shelf.image(self._generation, self._ranks.rank, slot)
                self._slots[slot] = SharedStaging(self._ranks.device, path, self._head)
                self._slots[slot].map(self._bytes - len(self._head))
        except BaseException as error:
            failure = error
        with contextlib.suppress(Exception):  # the store is gone, and with it the generation
            if failure is not None:
                self._fail(failure)
            self._ranks.store_add(f"{self._key}-done", 1)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        return ask_server(self._shelf, message)

    def _fail(self, error: BaseException) -> None:
        number = self._ranks.store_add(f"{self._key}-failed", 1)
        words = str(error) if isinstance(error, OSError) else failure_text(error)
        self._ranks.store_set(f"{self._key}-why-{number}", f"rank {self._ranks.rank}: {words}")

    def _failures(self) -> str | None:
        failed = self._ranks.store_add(f"{self._key}-failed", 0)
        return "; ".join(self._ranks.store_get(f"{self._key}-why-{number + 1}") for number in range(failed)) or None

    def take(self, step: int, tensors: Mapping[str, Tensor | StateTensor], contents: dict[str, Any]) -> None:
        """Begin a copy of this moment, by all ranks together; call `release` before the state changes. Left out where the one
        before it is still under way on some rank: training never waits for a peer, unless it is `slow_broadcast`. Left out too as long as
        the memory that was to be prepared is not there; that is waited for, but not for long."""
        if self.off is not None or step < self._next:
            return
        started = time.perf_counter()
        patience = _LAG if self.pace is None else 0.0
        if self._ready is None:  # nobody has thought of it earlier
            patience = math.inf
            self.prepare(tensors)
        plan = self._ranks.broadcast_object(self._decide(step, patience) if self._ranks.rank == 0 else None)
        if plan is None:
            self._passed_over += 1
            return
        self.off, number, slot, old, self._next = plan
        if self.off is not None:
            self._found.append(CopyOutcome(step=step, failure=self.off))
            return
        self._join()
        before, self._parts = self._bytes, laid_out(written(as_state_tensors(tensors)))
        assert self._bytes == before, "the state of a generation does not change its shape"
        self._key = f"copies-{number}"
        self._shelf.unseal(self._generation, self._ranks.rank, slot)
        self._slots[slot].begin(self._parts)
        self._stall = time.perf_counter() - started
        copy = self._copy(step, slot, tensors, contents)
        self._thread = threading.Thread(target=self._seal, args=(copy, started, old), name=f"copy of step {step}", daemon=True)
        self._thread.start()

    def _decide(self, step: int, patience: float) -> tuple[str | None, int, str, bool, int] | None:
        """On rank 0: why not, a number, where to, whether older generations may go, and when it is due again; None: not now.
        `patience`: seconds that the memory is waited for."""
        if self._thread is not None and self._patient:
            self._thread.join(_LAG)
        if self._thread is not None and self._thread.is_alive():
            return None
        problem = None
        if not self._told:  # the first time: is the memory there, on all ranks? For gigabytes that takes a while
            if not self._wait_for_all(patience):
                return None
            problem = self._failures()
        self._told = self._ranks.store_add("copies", 1)
        slot = SLOTS[1] if self._whole == SLOTS[0] else SLOTS[0]
        return problem, self._told, slot, self._whole is not None and self._generation > 0, step + self._interval(step)

    def _interval(self, step: int) -> int:
        """Steps until the next copy: so many that what the last one cost is the allowed part of their time."""
        now, last = time.perf_counter(), self._last
        self._last = step, now
        if self.pace is None or self._cost is None or last is None or step <= last[0]:
            return 1
        each = (now - last[1]) / (step - last[0])
        return max(1, min(_SELDOM, math.ceil(self._cost / (self.pace * each))))

    def _copy(self, step: int, slot: str, tensors: Mapping[str, Tensor | StateTensor], contents: dict[str, Any]) -> RankCopy:
        rank, ranks = self._ranks.rank, self._ranks.ranks
        values = sum(part.bytes for part in self._parts)
        about = format.about(format.file_name(rank, ranks), self._bytes, values, [], self._boxes) | {"stage": self._ranks.stage}
        if self._ranks.is_stage_leader:
            about["names"] = {name: piece.whole_bytes for name, piece in as_state_tensors(tensors).items()}
        return RankCopy(
            node=0,  # the holder knows
            generation=self._generation,
            rank=rank,
            ranks=ranks,
            slot=slot,
            step=step,
            about=about,
            contents=contents | {"time": time.time()} if rank == 0 else None,
        )

    def _seal(self, copy: RankCopy, started: float, old: bool) -> None:
        """In a thread: when the copy is in memory, the holder does the rest; rank 0's waits for all."""
        key, peer = self._key, False
        failure: BaseException | None = None
        self._problem = None
        try:
            if old:
                self._ask({"op": "forget", "before": self._generation})
            self._slots[copy.slot].chunks()  # waits for it
            answer = self._ask({"op": "seal", "copy": copy.to_json()})
            peer, self._problem = bool(answer["peer"]), answer["problem"]
        except BaseException as error:
            failure = error
        try:
            if failure is not None:
                self._fail(failure)
            self._ranks.store_add(f"{key}-bytes", copy.size)
            self._ranks.store_add(f"{key}-peer", int(peer))
            if self._problem is not None:
                self._ranks.store_set(f"{key}-problem", f"rank {copy.rank}: {self._problem}")
                self._ranks.store_add(f"{key}-problems", 1)
            self._ranks.store_add(f"{key}-done", 1)
            if copy.rank == 0 and self._wait_for_all():
                self._found.append(self._outcome(copy, started))
        except Exception as error:  # the store is gone, and with it the run
            self._found.append(CopyOutcome(step=copy.step, failure=failure_text(error)))

    def _outcome(self, copy: RankCopy, started: float) -> CopyOutcome:
        """On rank 0, when all are done."""
        failure, key = self._failures(), self._key
        if failure is None:
            self._whole = copy.slot
        passed_over, self._passed_over = self._passed_over, 0
        seconds, stall = time.perf_counter() - started, self._stall + self._slots[copy.slot].waited()
        self._cost = stall
        return CopyOutcome(
            step=copy.step,
            failure=failure,
            bytes=self._ranks.store_add(f"{key}-bytes", 0),
            seconds=seconds,
            stall=stall,
            peer=self._ranks.store_add(f"{key}-peer", 0) == self._ranks.ranks,
            problem=self._ranks.store_get(f"{key}-problem") if self._ranks.store_add(f"{key}-problems", 0) else None,
            passed_over=passed_over,
        )

    def _wait_for_all(self, seconds: float = math.inf) -> bool:
        until = time.monotonic() + seconds
        while self._ranks.store_add(f"{self._key}-done", 0) < self._ranks.ranks:
            if self._left or time.monotonic() >= until:
                return False
            time.sleep(_LOOK)
        return True

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def release(self) -> None:
        """The state is about to change: wait for what still copies it."""
        started = time.perf_counter()
        for slot in self._slots.values():
            slot.release()
        self._stall += time.perf_counter() - started

    def ended(self) -> list[CopyOutcome]:
        """What has ended since this was asked last, without waiting. To be asked on rank 0, which knows of all."""
        found, self._found = self._found, []
        return found

    def settle(self) -> list[CopyOutcome]:
        """Wait for the copy under way; all ranks call it together. Rank 0 tells."""
        self._join()
        self._ranks.broadcast_object(None)
        return self.ended() if self._ranks.rank == 0 else []

    def close(self) -> None:
        """Wait for this rank's own part. Where a run fails in the middle of a copy the others may be gone: not for them."""
        self._left = True
        for thread in (self._ready, self._thread):
            if thread is not None:
                thread.join()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()


@dataclass(frozen=True, slots=True)
class HandoffShare:
    """Which of the files of the handed-over state is this rank's."""

    generation: int
    index: int
    count: int
    stage: int
    names: bool
    """It tells, for its stage, what there is."""


def write_handoff(
    folder: Path, share: HandoffShare, step: int, tensors: Mapping[str, StateTensor], contents: dict[str, Any]
) -> int:
    """Copy, and return when it is there; the bytes. `folder`: of this node's holder. OSError where there is no room."""
    parts = laid_out(written(tensors))
    boxes = [box(part) for part in parts]
    head = format.header(boxes)
    values = sum(part.bytes for part in parts)
    shelf = SlotDir(folder)
    which = {"generation": share.generation, "rank": share.index}
    ask_server(shelf, {"op": "reserve", "bytes": len(head) + values, "slots": [HANDOFF_SLOT], "alone": True} | which)
    device = next(
        (part.piece.tensor.device for part in parts if isinstance(part.piece.tensor, torch.Tensor)), torch.device("cpu")
    )
    slot = SharedStaging(device, shelf.image(share.generation, share.index, HANDOFF_SLOT), head, pin=False)
    slot.map(values)
    if parts:
        slot.begin(parts)
        slot.chunks()  # waits for it
    slot.close()
    about = format.about(format.file_name(share.index, share.count), len(head) + values, values, [], boxes) | {
        "stage": share.stage
    }
    if share.names:
        about["names"] = {name: piece.whole_bytes for name, piece in tensors.items()}
    copy = RankCopy(
        node=0,  # the holder knows
        generation=share.generation,
        rank=share.index,
        ranks=share.count,
        slot=HANDOFF_SLOT,
        step=step,
        about=about,
        contents=contents | {"time": time.time()} if share.index == 0 else None,
    )
    ask_server(shelf, {"op": "seal", "copy": copy.to_json(), "alone": True})
    return copy.size
