"""What one step of a launch costs a rank in messages and memory: the second step is counted, when nothing is done for the first
time any more. The trainer takes its steps through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeVar

from torch import Tensor

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.events.records import ModelPlaced, StepAccounted
from phalanx.observe.flop_count import counted
from phalanx.observe.traffic import Account, Live
from phalanx.parallel.sharded_model import ShardedModel

Result = TypeVar("Result")

_COUNTED = 2


class Accounting:
    """Counts one step, once."""

    def __init__(
        self, placed: ShardedModel, held: Callable[[], ModelPlaced], state: Callable[[], dict[str, StateTensor]], *, on: bool
    ):
        """`on`: not where blocks are compiled, which a look at every operation would stop."""
        self._placed, self._mesh, self._held, self._state, self._on = placed, placed.mesh, held, state, on
        self._taken = 0
        self._found: StepAccounted | None = None

    def around(self, step: int, work: Callable[[], Result]) -> Result:
        """Do the work of the step of that number."""
        self._taken += 1
        if not self._on or self._taken != _COUNTED:
            return work()
        with ExitStack() as stack:
            account = stack.enter_context(Account())
            live = stack.enter_context(Live(_tensors(self._state()), self._mesh.device))
            counter = stack.enter_context(counted(self._placed.parts))
            result = work()
        held = self._held()
        self._found = StepAccounted(
            step=step,
            rank=self._mesh.rank,
            sent=account.sent,
            memory={
                "parameters": held.parameters,
                "gradients": held.gradients,
                "optimizer": held.optimizer,
                "activations": live.peak,
            },
            flops={"all": counter.flops, "repeated": counter.repeated},
        )
        return result

    def take(self) -> StepAccounted | None:
        """What was counted, once."""
        found, self._found = self._found, None
        return found


def _tensors(state: dict[str, StateTensor]) -> Iterator[Tensor]:
    return (piece.tensor for piece in state.values() if isinstance(piece.tensor, Tensor))
