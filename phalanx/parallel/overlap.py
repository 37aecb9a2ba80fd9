"""Two passes of a rank side by side, such as the forward of one micro-batch and the backward of another. Where one of them has begun an exchange
between ranks, the other continues, so that messages travel while the device computes.

The passes take turns in two threads, of which one runs at a time: nothing is computed in parallel on the host, and every rank launches the same
operations in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack

from phalanx import accelerator
from phalanx.observe.comm_timer import NamedGroup, began, timed_collective, wait


def run_side_by_side(device: torch.device, forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
    """The results of both. `backward` runs in a thread of its own; a backward has its own threads on GPUs in any case."""
    assert _Turns.current is None, "passes are not nested"
    turns = _Turns.current = _Turns()
    outcome: list[Any] = []

    def other() -> None:
        accelerator.of(device).set_device(device)
        turns.wait_for(_BACKWARD)
        try:
            outcome.append(backward())
        except BaseException as error:  # raised below
            outcome.append(error)
        finally:
            turns.end(_BACKWARD)

    thread = threading.Thread(target=other, name="backward", daemon=True)
    thread.start()
    try:
        result = forward()
    except BaseException:
        turns.end(_FORWARD)
        _Turns.current = None  # the backward is abandoned with the step; it may wait for a rank that is lost
        raise
    turns.end(_FORWARD)
    thread.join()
    _Turns.current = None
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return result, outcome[0]


def possible() -> bool:
    """Whether passes may run side by side: not while operations are observed, as observers see the thread alone that has entered them."""
    return not _len_torch_dispatch_stack()


def exchange(collective: Callable[..., Any], *args: Any, group: NamedGroup, handle: dist.ProcessGroup) -> None:
    """Run a collective: begin it, let the other pass continue, then wait for it."""
    turns = _Turns.current
    if turns is None or torch.compiler.is_compiling():
        timed_collective(collective, *args, group=handle)
        return
    work = collective(*args, group=handle, async_op=True)
    began(work, handle, getattr(collective, "__name__", "exchange"))
    turns.pass_on()
    wait(work, group)


_FORWARD, _BACKWARD = 0, 1


class _Turns:
    """Whose turn it is. A pass that has ended leaves all turns to the other."""

    current: ClassVar[_Turns | None] = None
    """Of the two passes that this process runs side by side."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn, self._ended = _FORWARD, [False, False]

    def wait_for(self, side: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == side)

    def pass_on(self) -> None:
        """Let the other pass continue until it begins an exchange or ends. Only the pass whose turn it is calls this, in whatever thread."""
        with self._changed:
            side = self._turn
            if self._ended[1 - side]:
                return
            self._turn = 1 - side
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == side)

    def end(self, side: int) -> None:
        with self._changed:
            self._ended[side], self._turn = True, 1 - side
            self._changed.notify_all()
