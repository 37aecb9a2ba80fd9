"""Where this rank is, asked from another of its threads while its main one may hang: read off the stack and torch's own counters, so
that nothing has to be recorded while all is well. The rank's attendant calls it; `recovery/diagnose` compares the answers of all.

It works while the main thread waits in a collective or sleeps, for then that has let go of the interpreter. Where it has not, nobody
in the process can answer: for that `register_stack_dump` has the system's signal write the stacks to a file.

On GPUs the host runs ahead of the device: the ranks are found waiting for their own device, and the numbers are of what was begun.
"""

from __future__ import annotations

import faulthandler
import linecache
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

import torch.distributed as dist
from torch.distributed import distributed_c10d

from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.recovery.diagnose import Frame, blocking_collective, describe_location, task_of

STACK_DUMP_SIGNAL = signal.SIGUSR2
"""Has a rank write the stacks of all its threads; see `register_stack_dump`."""
ALL = "all ranks"
"""The group of all."""
DEVICE = "the device"
"""Waiting for this rank's own GPU."""

_DEEPEST = 300

# As torch numbers them (c10d's OpType).
_KINDS = (
    "broadcast", "all_reduce", "all_reduce", "reduce", "all_gather", "all_gather", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "all_to_all", "send", "recv", "recv", "barrier", "reduce_scatter", "send and recv", "all_reduce",
)  # fmt: skip
_FOR_DEVICE = re.compile(r"\.(tolist|item|synchronize|cpu|wait|query)\(")


class HangReport(TypedDict):
    """Plain values, ready for JSON."""

    stack: str
    """Of the main thread, the innermost call last."""
    threads: dict[str, str]
    """Stacks of the data loader's threads, by name, where the main thread waits for them."""
    at: str
    """The innermost call that counts: file:line function."""
    place: str
    """What this rank does, in words."""
    layer: str | None
    """The innermost module of the model that computes."""
    operation: str | None
    """The collective that this rank waits in; None: it does not wait for others."""
    use: str | None
    """The technique that the collective serves."""
    group: str | None
    """Whose it is: a key of `numbers`."""
    members: list[int] | None
    """The group's ranks; None: all."""
    peer: int | None
    """The rank that a message comes from or goes to."""
    number: int | None
    """How many collectives this rank has begun in that group."""
    numbers: dict[str, int]
    """The same for every group that it is in; groups have the same name on all of their ranks."""
    problem: str | None
    """What went wrong in finding all this out."""


def hang_report(thread_id: int, modules: Mapping[int, str], mesh: Mesh | None) -> HangReport:
    """Where the thread is; never raises. `modules`: names of the model's modules by their `id`. Without a mesh, as far as is known."""
    answer = HangReport(
        stack="", threads={}, at="", place="", layer=None, operation=None, use=None,
        group=None, members=None, peer=None, number=None, numbers={}, problem=None,
    )  # fmt: skip
    try:
        _fill(answer, thread_id, modules, mesh)
    except Exception as error:  # it moves while it is looked at; whatever was found so far is worth having
        answer["problem"] = f"{type(error).__name__}: {error}"
    return answer


def register_stack_dump(path: Path) -> None:
    """From now on `STACK_DUMP_SIGNAL` adds the stacks of all threads to the file, whoever holds the interpreter. Empty it before asking."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115 - it stays open for as long as the process lives
    faulthandler.register(STACK_DUMP_SIGNAL, file=file, all_threads=True, chain=False)


def _fill(answer: HangReport, thread_id: int, modules: Mapping[int, str], mesh: Mesh | None) -> None:
    current = sys._current_frames()
    live = _calls(current.get(thread_id))
    if live and live[-1].f_code.co_name == "_engine_run_backward":
        live += _autograd(current)
    frames = [Frame(call.f_code.co_filename, call.f_lineno, call.f_code.co_name) for call in live]
    answer["stack"] = _written(live)
    answer["layer"] = next((modules[key] for call in reversed(live) if (key := id(call.f_locals.get("self"))) in modules), None)
    answer["at"], answer["place"] = str(frames[-1]) if frames else "", describe_location(frames, answer["layer"])
    answer["numbers"] = {name: number for name, _, number in _groups()}
    _waiting(answer, live, frames, mesh)
    if answer["operation"] is not None:
        answer["place"] = f"waiting in {answer['operation']}"
    if answer["operation"] is None and task_of(frames) == "the data loader":
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, inner in current.items():
            if names.get(ident, "").startswith("loader"):
                calls = _calls(inner)
                answer["threads"][f"{names[ident]} {ident}"] = _written(calls)
                answer["at"] = str(Frame(inner.f_code.co_filename, inner.f_lineno, inner.f_code.co_name))


def _waiting(answer: HangReport, live: Sequence[FrameType], frames: Sequence[Frame], mesh: Mesh | None) -> None:
    """What the rank waits in, for whom."""
    found = blocking_collective(frames)
    if found is None:
        line = linecache.getline(frames[-1].file, frames[-1].line) if frames else ""
        work: Any = (
            next((value for value in live[-1].f_locals.values() if isinstance(value, dist.Work)), None) if live else None
        )
        if work is not None and ".wait(" in line:
            answer["operation"] = _kind(work)
        elif "_c10d_functional." in line:
            answer["operation"] = "collective"  # of compiled code
        elif mesh is not None and mesh.device.type == "cuda" and _FOR_DEVICE.search(line):
            answer["operation"] = DEVICE
        return
    answer["operation"], index = found
    inside = live[index].f_locals
    group = inside.get("group")
    handle: Any = None
    if isinstance(inside.get("work"), dist.Work):
        answer["operation"], answer["peer"] = inside.get("operation") or _kind(inside["work"]), inside.get("peer")
    if isinstance(group, Group):
        answer["use"], handle = group.use, group.handle
    elif isinstance(group, dist.ProcessGroup):
        handle = group
    owner = next((one for call in live[:index][-4:] if isinstance(one := call.f_locals.get("self"), Group)), None)
    if owner is not None:
        answer["use"], handle = owner.use, owner.handle
    if answer["operation"] in ("send", "recv") and answer["peer"] is None:
        answer["peer"] = _peer(inside, handle)
    if not dist.is_initialized() or answer["operation"] in ("store", "new_group", "init_process_group"):
        return
    handle = handle or dist.group.WORLD
    answer["group"], answer["number"] = next(((name, n) for name, one, n in _groups() if one is handle), (None, None))
    answer["use"] = answer["use"] or (handle.group_desc if handle is not dist.group.WORLD else "step")
    if handle is not dist.group.WORLD:
        answer["members"] = sorted(distributed_c10d._world.pg_group_ranks[handle])


def _peer(inside: Mapping[str, Any], handle: dist.ProcessGroup | None) -> int | None:
    """Of a message that torch itself waits with."""
    for name in ("group_dst", "group_src"):
        if isinstance(index := inside.get(name), int):
            return index if handle is None else dist.get_global_rank(handle, index)
    return next((rank for name in ("dst", "src") if isinstance(rank := inside.get(name), int)), None)


def _kind(work: Any) -> str:
    """The collective that it is of."""
    return dict(enumerate(_KINDS)).get(int(work._get_op_type()), "collective")


def _groups() -> Iterator[tuple[str, dist.ProcessGroup, int]]:
    """Every group of this rank with a name that all of its ranks have for it, and how much was begun in it."""
    seen: dict[str, int] = {}
    world = distributed_c10d._world
    for handle in list(world.pg_map):
        name = ALL
        if handle is not dist.group.WORLD:
            name = f"{handle.group_desc} of ranks {_short(sorted(world.pg_group_ranks[handle]))}"
            seen[name] = seen.get(name, 0) + 1  # groups of the same ranks are made in the same order by all of them
            name += f", {seen[name]}." if seen[name] > 1 else ""
        number = _number(handle)
        if number is not None:
            yield name, handle, number


def _number(handle: Any) -> int | None:
    try:
        return int(handle._get_sequence_number_for_group())
    except RuntimeError:  # it has one backend for each kind of device
        try:
            return sum(int(handle._get_backend(kind)._get_sequence_number_for_group()) for kind in handle._device_types)
        except RuntimeError:
            return None


def _short(ranks: Sequence[int]) -> str:
    """In few words, the same on all."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]} ({len(ranks)})"


def _calls(innermost: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while innermost is not None and len(found) < _DEEPEST:
        found.append(innermost)
        innermost = innermost.f_back
    return found[::-1]


def _autograd(current: Mapping[int, FrameType]) -> list[FrameType]:
    """What autograd's own thread for a GPU runs at present; on a CPU it has none."""
    known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return next((_calls(frame) for ident, frame in current.items() if ident not in known), [])


def _written(calls: Sequence[FrameType]) -> str:
    return "".join(traceback.StackSummary.extract((call, call.f_lineno) for call in calls).format())
