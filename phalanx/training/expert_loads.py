"""How evenly a model uses its experts: the loads of recent steps, the figure of the fullest expert in every `step` record, and from time to time a
record of all layers. `training/step` fills it; it is a hook of the trainer, which takes its records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.events.records import Event, ExpertLoads
from phalanx.parallel.expert import Loads, imbalance
from phalanx.training.hooks import StepHook
from phalanx.training.step_totals import Outcome

LOAD_STEPS = 20
"""Steps over which expert loads are reported: the load of one small batch is mostly chance."""
_EXPERTS = 1024
"""Experts of all layers whose loads are recorded every `LOAD_STEPS` steps. Of more, less often, so that events.jsonl stays
small: of DeepSeek-V3's 14,848 it is 150 kB every 300 steps, about as much as the records of these steps."""


def steps_between(experts: int) -> int:
    """Steps from one record to the next, for so many experts in all layers together."""
    return LOAD_STEPS * max(1, -(-experts // _EXPERTS))


class RecentLoads(StepHook):
    """The loads of the last steps, which are the same on all ranks."""

    def __init__(self, loads: Loads, steps: int, device: torch.device):
        """`steps`: of the whole run; its last one is recorded, too."""
        self._loads, self._steps, self._every = loads, steps, steps_between(loads.size)
        self._accelerator = accelerator.of(device)
        self._recent: deque[Tensor] = deque(maxlen=LOAD_STEPS)
        self._copied: Callable[[], Tensor] | None = None
        self._record: ExpertLoads | None = None

    def add(self, loads: Mapping[str, Tensor]) -> None:
        """Tokens of each expert in the step in progress, by the router's name."""
        if loads:
            self._recent.append(torch.cat(list(loads.values())))

    def fullest(self, step: int) -> list[Tensor]:
        """Load of the fullest expert over the mean, in the worst layer; empty without experts. Where this step is recorded, its loads start on
        their way to the host here, before the results of the step: whoever waits for those has them, too."""
        self._copied = None
        if not self._recent:
            return []
        row = torch.stack(tuple(self._recent)).sum(0)
        if step % self._every == 0 or step in (LOAD_STEPS, self._steps):
            self._copied = self._accelerator.copy_to_host(row)
        return [imbalance(self._loads.split(row).values())]

    def on_step_taken(self, step: int, outcome: Outcome) -> None:
        if self._copied is not None:
            layers = self._loads.split(self._copied())
            tokens = {name.removesuffix(".mlp.router"): row.long().tolist() for name, row in layers.items()}
            self._record, self._copied = ExpertLoads(step=step, steps=len(self._recent), tokens=tokens), None

    def take_events(self) -> list[Event]:
        record, self._record = self._record, None
        return [] if record is None else [record]
