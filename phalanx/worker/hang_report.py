"""What this rank is doing, for the diagnosis of a hang: read from the stack of the main thread and torch's counters, so that nothing is
recorded while all is well. `worker/control_thread` calls it in another thread; `recovery/diagnose` compares the reports of all ranks.

It works while the main thread is blocked in a collective or sleeps, because both release the GIL. Otherwise no thread of the process can
answer: for that case `register_stack_dump` makes a signal write the stacks to a file.

On GPUs the host runs ahead of the device: ranks appear to wait for their own device, and counters show what was launched.
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
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from phalanx import accelerator
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.recovery.diagnose import Frame, HangReport, blocking_collective, describe_location, task_of

STACK_DUMP_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of all its threads; see `register_stack_dump`."""
ALL = "all ranks"
"""Name of the group of all ranks."""
DEVICE = "the device"
"""Waiting for this rank's own GPU."""

_MAX_DEPTH = 300

# In the order of c10d's OpType.
_KINDS = (
    "broadcast", "all_reduce", "all_reduce", "reduce", "all_gather", "all_gather", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "all_to_all", "send", "recv", "recv", "barrier", "reduce_scatter", "send and recv", "all_reduce",
)  # fmt: skip
_FOR_DEVICE = re.compile(r"\.(tolist|item|synchronize|cpu|wait|query)\(")


def hang_report(thread_id: int, modules: Mapping[int, str], mesh: Mesh | None) -> HangReport:
    """Report what the thread does; never raises. `modules`: names of the model's modules by `id`. `mesh`: None before the model is built."""
    answer = HangReport(
        stack="", threads={}, at="", place="", layer=None, operation=None, use=None,
        group=None, members=None, peer=None, numbers={}, problem=None,
    )  # fmt: skip
    try:
        _fill(answer, thread_id, modules, mesh)
    except Exception as error:  # the stack changes while it is read; a partial report is useful, too
        answer["problem"] = f"{type(error).__name__}: {error}"
    return answer


def register_stack_dump(path: Path) -> None:
    """Make `STACK_DUMP_SIGNAL` append the stacks of all threads to the file, even while the GIL is taken."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open as long as the process lives
    faulthandler.register(STACK_DUMP_SIGNAL, file=file, all_threads=True, chain=False)


def _fill(answer: HangReport, thread_id: int, modules: Mapping[int, str], mesh: Mesh | None) -> None:
    current = sys._current_frames()
    live = _calls(current.get(thread_id))
    if live and live[-1].f_code.co_name == "_engine_run_backward":
        live += _autograd(current)
    frames = [Frame(call.f_code.co_filename, call.f_lineno, call.f_code.co_name) for call in live]
    answer["stack"] = _format(live)
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
                answer["threads"][f"{names[ident]} {ident}"] = _format(calls)
                answer["at"] = str(Frame(inner.f_code.co_filename, inner.f_lineno, inner.f_code.co_name))


def _waiting(answer: HangReport, live: Sequence[FrameType], frames: Sequence[Frame], mesh: Mesh | None) -> None:
    """Fill in what the rank is blocked in, and for whom it waits."""
    blocked = blocking_collective(frames)
    if blocked is None:
        line = linecache.getline(frames[-1].file, frames[-1].line) if frames else ""
        work: Any = (
            next((value for value in live[-1].f_locals.values() if isinstance(value, dist.Work)), None) if live else None
        )
        if work is not None and ".wait(" in line:
            answer["operation"] = _kind(work)
        elif "_c10d_functional." in line:
            answer["operation"] = "collective"  # in compiled code
        elif mesh is not None and accelerator.of(mesh.device).asynchronous and _FOR_DEVICE.search(line):
            answer["operation"] = DEVICE
        return
    answer["operation"], index = blocked
    variables = live[index].f_locals
    group = variables.get("group")
    handle: Any = None
    if isinstance(variables.get("work"), dist.Work):
        answer["operation"], answer["peer"] = variables.get("operation") or _kind(variables["work"]), variables.get("peer")
    if isinstance(group, Group):
        answer["use"], handle = group.use, group.handle
    elif isinstance(group, dist.ProcessGroup):
        handle = group
    owner = next(
        (group_method for call in live[:index][-4:] if isinstance(group_method := call.f_locals.get("self"), Group)), None
    )
    if owner is not None:
        answer["use"], handle = owner.use, owner.handle
    if answer["operation"] in ("send", "recv") and answer["peer"] is None:
        answer["peer"] = _peer(variables, handle)
    if not dist.is_initialized() or answer["operation"] in ("store", "new_group", "init_process_group"):
        return
    handle = handle or dist.group.WORLD
    answer["group"] = next((name for name, other, _ in _groups() if other is handle), None)
    answer["use"] = answer["use"] or (handle.group_desc if handle is not dist.group.WORLD else "step")
    if handle is not dist.group.WORLD:
        answer["members"] = sorted(distributed_c10d._world.pg_group_ranks[handle])


def _peer(variables: Mapping[str, Any], handle: dist.ProcessGroup | None) -> int | None:
    """The other rank of a point-to-point message that torch itself waits for."""
    for name in ("group_dst", "group_src"):
        if isinstance(index := variables.get(name), int):
            return index if handle is None else dist.get_global_rank(handle, index)
    return next((rank for name in ("dst", "src") if isinstance(rank := variables.get(name), int)), None)


def _kind(work: Any) -> str:
    """Name of the collective of a work handle."""
    return dict(enumerate(_KINDS)).get(int(work._get_op_type()), "collective")


def _groups() -> Iterator[tuple[str, dist.ProcessGroup, int]]:
    """Every group of this rank: a name that all its ranks agree on, its handle, and the number of collectives started in it."""
    seen: dict[str, int] = {}
    world = distributed_c10d._world
    for handle in list(world.pg_map):
        name = ALL
        if handle is not dist.group.WORLD:
            name = f"{handle.group_desc} of ranks {_short(sorted(world.pg_group_ranks[handle]))}"
            seen[name] = seen.get(name, 0) + 1  # all ranks create groups of the same ranks in the same order
            name += f", {seen[name]}." if seen[name] > 1 else ""
        number = _number(handle)
        if number is not None:
            yield name, handle, number


def _number(handle: Any) -> int | None:
    try:
        return int(handle._get_sequence_number_for_group())
    except RuntimeError:  # one backend for each kind of device
        try:
            return sum(int(handle._get_backend(kind)._get_sequence_number_for_group()) for kind in handle._device_types)
        except RuntimeError:
            return None


def _short(ranks: Sequence[int]) -> str:
    """A short list of ranks, equal on all of them."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]} ({len(ranks)})"


def _calls(innermost: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while innermost is not None and len(frames) < _MAX_DEPTH:
        frames.append(innermost)
        innermost = innermost.f_back
    return frames[::-1]


def _autograd(current: Mapping[int, FrameType]) -> list[FrameType]:
    """The stack of autograd's thread for a GPU; on CPUs there is none."""
    known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return next((_calls(frame) for ident, frame in current.items() if ident not in known), [])


def _format(calls: Sequence[FrameType]) -> str:
    return "".join(traceback.StackSummary.extract((call, call.f_lineno) for call in calls).format())
