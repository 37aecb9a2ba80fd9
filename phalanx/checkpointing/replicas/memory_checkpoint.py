"""Copies the state of all ranks into host memory outside the worker processes, while training continues.

Each rank copies what it would write into a checkpoint, as the same file, into memory that it shares with its node's replica server. A step
waits only for this copy, and only before the state changes again; the server then computes checksums, seals the slot, and sends it to the
peer node. Of a rank's slots, the one with the newest state that is complete on all ranks is never written, nor, of three, the one with the
newest state that was compared among replicas and found equal.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import threading
import time
from collections import ChainMap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.checkpointing.format import RankFile, RunMetadata, Sidecar, encode_header
from phalanx.checkpointing.replicas.copy_pace import CopyPace
from phalanx.checkpointing.replicas.replica_server import request
from phalanx.checkpointing.replicas.shm_slots import ADDRESS, HANDOFF_SLOT, SLOTS, RankCopy, SlotDir
from phalanx.checkpointing.save import Ballot, Ranks, Staging, State, failure_text, parts_of, rank_file
from phalanx.checkpointing.state_tensor import StateTensor, WrittenBox, as_state_tensors, file_order, written_boxes
from phalanx.events.records import Copied, Event, Warned
from phalanx.spec.tensor_slice import Box

_TOUCH_BYTES = 2**28  # whose pages are mapped at a time
_TOUCH_THREADS = 4  # that map the pages of a GPU's rank, whose cores wait for the device
_LAG = 2.0  # seconds that a step waits at most for an earlier copy: a server that takes longer hangs, and will be detected
_PATIENCE = 600.0  # seconds that a server may take for the checksums and for sending a copy to its peer

_States = list[dict[str, StateTensor]]
"""Of each device of a rank."""


class _BoxPlace(NamedTuple):
    """A box that a rank writes, whatever its values are."""

    part: int
    """Which of the rank's devices has it."""
    name: str
    local: Box
    box: Box
    """As in `WrittenBox`."""


class SharedStaging(Staging):
    """Staging memory that is shared with the replica server: the header of a rank file, then the copy of the rank's boxes."""

    def __init__(self, device: torch.device, path: Path, header: bytes, *, pin: bool = True):
        """`pin`: not worth its time for a single copy."""
        super().__init__(device, pin=pin)
        self._path, self._header = path, header

    def _map_memory(self, size: int) -> Tensor:
        with self._path.open("r+b") as file:
            area = mmap.mmap(file.fileno(), len(self._header) + size, flags=mmap.MAP_SHARED)
        area[: len(self._header)] = self._header
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        memory = torch.frombuffer(area, dtype=torch.uint8, count=size, offset=len(self._header))
        # The pages exist already. They are mapped now, by reading each once, so that no copy waits for the system. MAP_POPULATE would
        # block other threads that allocate memory, for half a second per GiB.
        with ThreadPoolExecutor(_TOUCH_THREADS if self._accelerator.asynchronous else 1) as pool:
            list(pool.map(lambda part: part[:: mmap.PAGESIZE].amax(), memory.split(_TOUCH_BYTES)))
        return memory

    def map(self, size: int) -> None:
        """Map the memory now. MemoryError if that is impossible."""
        if (problem := self._allocate(size)) is not None:
            raise MemoryError(problem)


def ask_server(slots: SlotDir, message: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the replica server of this node."""
    # The address is read each time: a server that was restarted has another one.
    try:
        server = json.loads((slots.folder / ADDRESS).read_text())
    except FileNotFoundError:
        raise OSError(f"there is no replica server in {slots.folder} any more") from None
    return request(tuple(server["address"]), server["token"], message, patience=_PATIENCE)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """Rank 0's decision about a copy, for all ranks."""

    next_step: int
    """Step from which on rank 0 decides again."""
    slot: str | None = None
    """The slot to copy into; None: no copy is due yet."""
    off: str | None = None
    """Why no copies are taken any more."""
    number: int = 0
    """Identifies the copy in the ranks' shared store."""
    discard_older: bool = False
    """Whether older generations may be discarded."""


class MemoryCopies:
    """The copies of one generation of a run, on one rank."""

    def __init__(
        self, ranks: Ranks, folder: Path, generation: int = 0, *, patient: bool = False, slots: tuple[str, ...] = SLOTS[:2]
    ):
        """`folder`: of this node's replica server. `patient`: wait for the previous copy rather than skip one, so that a failure never
        costs more than a step."""
        self._ranks, self._slot_dir, self._generation, self._patient = ranks, SlotDir(folder), generation, patient
        self._slot_names = slots
        self._file = RankFile(ranks.rank, ranks.ranks, [])
        self._sidecar, self._header = self._file.sidecar(), b""
        self._boxes: list[_BoxPlace] = []
        """Of the file. They are the same in every copy, and take longer to find than to copy."""
        self._slots: dict[str, SharedStaging] = {}
        self._reserving: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._reserved: dict[str, Ballot] = {}
        """For each slot: whether its memory is ready on all ranks."""
        self._ready: set[str] = set()
        """On rank 0: the slots for which it is."""
        self._ended: list[Event] = []
        self._warned: set[str] = set()
        self._complete: dict[str, int] = {}
        """On rank 0: the steps of slots that are complete on all ranks."""
        self._skipped = 0
        self._stall = 0.0
        self._closed = False
        self.pace: CopyPace | None = None
        """Which of the steps that `take` is called for are copied. None: all of them."""
        self._next_step = 0
        self.off: str | None = None
        """Why no copies are taken; the same on all ranks."""

    def prepare(self, tensors: State | Sequence[State]) -> None:
        """Allocate the memory in the background; all ranks call it together."""
        states = _states(tensors)
        written = [(part, box) for part, state in enumerate(states) for box in written_boxes(state)]
        written.sort(key=lambda pair: file_order(pair[1]))
        self._boxes = [_BoxPlace(part, box.name, box.local, box.box) for part, box in written]
        self._file = rank_file(self._ranks, dict(ChainMap(*states)), [box for _, box in written])
        self._sidecar, self._header = self._file.sidecar(), encode_header(self._file.boxes)
        # Numbered in the store, as these ranks may have copied through another MemoryCopies before.
        number = self._ranks.broadcast_object(self._ranks.store_add("copies", 1) if self._ranks.rank == 0 else 0)
        self._reserved = {slot: Ballot(self._ranks, f"copies-{number}-{slot}") for slot in self._slot_names}
        self._reserving = threading.Thread(target=self._reserve, name="memory for copies", daemon=True)
        self._reserving.start()

    def _reserve(self) -> None:
        """In a thread: allocate the slots through the server, which knows how much is free; map them, and pin them on GPUs. One after the
        other: gigabytes take seconds, and the first copy needs only the first."""
        which = {"generation": self._generation, "rank": self._ranks.rank, "bytes": self._sidecar.size}
        waiting = list(self._slot_names)
        while waiting and not self._closed:
            slot, failure = waiting.pop(0), None
            try:
                ask_server(self._slot_dir, {"op": "reserve", "slots": [slot], "later": waiting} | which)
                path = self._slot_dir.slot(self._generation, self._ranks.rank, slot)
                staging = SharedStaging(self._ranks.device, path, self._header)
                staging.map(self._sidecar.tensors)
                self._slots[slot] = staging
            except BaseException as error:
                failure = failure_text(error)
            with contextlib.suppress(Exception):  # the store is gone, and the generation with it
                if failure is not None:
                    self._reserved[slot].fail(failure)
                self._reserved[slot].done()
            if failure is not None:
                return

    def may_be_due(self, step: int) -> bool:
        """Whether `take` would do anything after this step; the same on all ranks."""
        return self.off is None and step >= self._next_step

    def take(self, step: int, tensors: State | Sequence[State], metadata: RunMetadata, equal: int | None = None) -> None:
        """Start a copy of the current state; all ranks call it together. Call `release` before the state changes. A process with several
        devices gives the state of each; its copy is one file. `equal`: the newest step whose state was found equal among replicas.

        Skipped while the previous copy is in progress on some rank, as training never waits for a peer unless it is `patient`; and while
        the memory is not ready, for which it waits a short time.
        """
        if not self.may_be_due(step):
            return
        started = time.perf_counter()
        patience = _LAG if self.pace is None else 0.0
        if self._reserving is None:
            patience = math.inf
            self.prepare(tensors)
            assert self._reserving is not None
            self._reserving.join()
        turn = self._ranks.broadcast_object(self._decide(step, patience, equal) if self._ranks.rank == 0 else None)
        if turn is None:
            self._skipped += 1
            return
        self.off, self._next_step = turn.off, turn.next_step
        if self.off is not None:
            self._warn(f"There is no copy in memory of step {step}: ", self.off)
        if self.off is None and turn.slot is not None:
            self._copy(turn, turn.slot, step, _states(tensors), metadata, started)

    def _copy(self, turn: _Turn, slot: str, step: int, states: _States, metadata: RunMetadata, started: float) -> None:
        self._join()
        boxes = [WrittenBox(place.name, states[place.part][place.name], place.local, place.box) for place in self._boxes]
        size = sum(box.bytes for box in boxes)
        assert size == self._sidecar.tensors, "the state of a generation does not change its shape"
        ballot = Ballot(self._ranks, f"copies-{turn.number}")
        self._slot_dir.unseal(self._generation, self._ranks.rank, slot)
        self._slots[slot].begin(boxes)
        self._stall = time.perf_counter() - started
        copy = _rank_copy(self._file, self._sidecar, self._generation, slot, step, metadata)
        arguments = (copy, ballot, started, turn.discard_older)
        self._thread = threading.Thread(target=self._seal, args=arguments, name=f"copy of step {step}", daemon=True)
        self._thread.start()

    def _decide(self, step: int, patience: float, equal: int | None) -> _Turn | None:
        """On rank 0: what to do after this step; None: the copy that is due is skipped. `patience`: seconds to wait for the memory."""
        if self._thread is not None and self._patient:
            self._thread.join(_LAG)
        if self._thread is not None and self._thread.is_alive():
            return None
        now, next_step = time.perf_counter(), step + 1
        if self.pace is not None and (due := self.pace.due(step, now)) > step:
            return _Turn(next_step=due)
        keep = [max(self._complete, key=self._complete.__getitem__)] if self._complete else []
        if compares := len(self._slot_names) > 2:
            known = {slot: of for slot, of in self._complete.items() if equal is not None and of <= equal}
            keep += [max(known, key=known.__getitem__)] if known else []
        slot = min((name for name in self._slot_names if name not in keep), key=lambda name: self._complete.get(name, -1))
        if slot not in self._ready:
            if not self._wait_for_all(self._reserved[slot], patience):
                return None
            if (problem := self._reserved[slot].failures()) is not None:
                return _Turn(next_step=next_step, off=problem)
            self._ready.add(slot)
        self._complete.pop(slot, None)
        if self.pace is not None:
            next_step = self.pace.begin(step, now)
        # Before that, a corruption may need the states of the last generation.
        discard_older = self._generation > 0 and bool(known if compares else keep)
        number = self._ranks.store_add("copies", 1)
        return _Turn(next_step=next_step, slot=slot, number=number, discard_older=discard_older)

    def _seal(self, copy: RankCopy, ballot: Ballot, started: float, discard_older: bool) -> None:
        """In a thread: when the copy is in memory, the server does the rest; rank 0 waits for all ranks."""
        peers, failure = _peer_ballot(ballot), None
        answer: dict[str, Any] = {"peer": False, "problem": None}
        try:
            if discard_older:
                ask_server(self._slot_dir, {"op": "discard", "before": self._generation})
            self._slots[copy.slot].chunks()  # waits for the copy
            answer = ask_server(self._slot_dir, {"op": "seal", "copy": copy.to_json()})
        except BaseException as error:
            failure = failure_text(error)
        try:
            if answer["problem"] is not None:
                peers.fail(answer["problem"])
            peers.done(int(answer["peer"]))
            if failure is not None:
                ballot.fail(failure)
            ballot.done(copy.size)
            if copy.rank == 0 and self._wait_for_all(ballot):
                self._report(copy, ballot, started)
        except Exception as error:  # the store is gone, and the run with it
            self._warn(f"There is no copy in memory of step {copy.step}: ", failure_text(error))

    def _report(self, copy: RankCopy, ballot: Ballot, started: float) -> None:
        """On rank 0, when all ranks are done."""
        failure, peers = ballot.failures(), _peer_ballot(ballot)
        skipped, self._skipped = self._skipped, 0
        seconds, stall = time.perf_counter() - started, self._stall + self._slots[copy.slot].device_wait()
        if self.pace is not None:
            self.pace.end(stall)
        if failure is not None:
            self._warn(f"There is no copy in memory of step {copy.step}: ", failure)
            return
        self._complete[copy.slot] = copy.step
        if (problem := peers.failures()) is not None:
            self._warn(f"The copy in memory of step {copy.step} is not whole on a second node: ", problem)
        peer = peers.bytes == self._ranks.ranks
        self._ended.append(Copied(step=copy.step, bytes=ballot.bytes, seconds=seconds, stall=stall, peer=peer, skipped=skipped))

    def _warn(self, what: str, reason: str) -> None:
        """Warns once for each reason: copies are taken every few steps."""
        if reason not in self._warned:
            self._warned.add(reason)
            self._ended.append(Warned(message=f"{what}{reason}."))

    def _wait_for_all(self, ballot: Ballot, seconds: float = math.inf) -> bool:
        deadline = time.monotonic() + seconds
        return ballot.wait(lambda: self._closed or time.monotonic() >= deadline)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def release(self) -> None:
        """Wait until the state may change."""
        started = time.perf_counter()
        for slot in tuple(self._slots.values()):  # another may be added now
            slot.release()
        self._stall += time.perf_counter() - started

    def ended(self) -> list[Event]:
        """The events of copies that have ended since the last call, without waiting. Call it on rank 0, which knows the outcome for all ranks."""
        ended, self._ended = self._ended, []
        return ended

    def settle(self) -> list[Event]:
        """Wait for the copy in progress, all ranks together; returns the events on rank 0."""
        self._join()
        self._ranks.broadcast_object(None)
        return self.ended() if self._ranks.rank == 0 else []

    def close(self) -> None:
        """Wait for this rank's copy, but not for other ranks: when a run fails during a copy, they may be gone."""
        self._closed = True
        for thread in (self._reserving, self._thread):
            if thread is not None:
                thread.join()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()


def write_handoff(
    folder: Path, generation: int, file: RankFile, boxes: list[WrittenBox], step: int, metadata: RunMetadata
) -> None:
    """Copy this rank's share of its live state, `file` with `boxes`, into memory, for the next generation to restore.
    `folder`: the folder of this node's replica server. Raises OSError if there is too little memory."""
    copy = _rank_copy(file, file.sidecar(), generation, HANDOFF_SLOT, step, metadata)
    slots, header = SlotDir(folder), encode_header(file.boxes)
    which = {"generation": generation, "rank": file.rank}
    ask_server(slots, {"op": "reserve", "bytes": copy.size, "slots": [HANDOFF_SLOT], "alone": True} | which)
    devices = (box.state.tensor.device for box in boxes if isinstance(box.state.tensor, Tensor))
    path = slots.slot(generation, file.rank, HANDOFF_SLOT)
    slot = SharedStaging(next(devices, torch.device("cpu")), path, header, pin=False)
    slot.map(copy.size - len(header))
    if boxes:
        slot.begin(boxes)
        slot.chunks()  # waits for the copy
    slot.close()
    ask_server(slots, {"op": "seal", "copy": copy.to_json(), "alone": True})


def _states(tensors: State | Sequence[State]) -> _States:
    return [dict(as_state_tensors(part)) for part in parts_of(tensors)]


def _rank_copy(file: RankFile, sidecar: Sidecar, generation: int, slot: str, step: int, metadata: RunMetadata) -> RankCopy:
    """The description of a copy. The server fills in its node and the checksums."""
    first = file.rank == 0
    return RankCopy(
        node=0, generation=generation, rank=file.rank, ranks=file.ranks, slot=slot, step=step, sidecar=sidecar,
        metadata=metadata if first else None, time=time.time() if first else None,
    )  # fmt: skip


def _peer_ballot(ballot: Ballot) -> Ballot:
    """Counts, as bytes, the ranks whose copies are also on a peer; and why others are not."""
    return Ballot(ballot.ranks, f"{ballot.key}-peer")
