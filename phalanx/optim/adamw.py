"""AdamW, with states on the device or offloaded (`optim/offloaded_adamw`). The default optimizer.

The fused kernel needs all tensors in fp32: bf16 gradients or moments pass through it in fp32, a bounded chunk at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.optim.fused_adamw import MOMENTS, Chunk, KernelRow, fused_adamw, split_chunks, weight_decay
from phalanx.optim.offloaded_adamw import offloaded
from phalanx.optim.param_optimizer import (
    OptimizerKind,
    OptimizerSetup,
    ParamOptimizer,
    State,
    StateBytes,
    Update,
    flat,
    is_updated,
)
from phalanx.parallel.sharded_model import OwnedParam
from phalanx.spec.run import Optimizer as OptimizerSpec

_DEVICE_CHUNK, _HOST_CHUNK = 1 << 24, 1 << 18
"""Elements converted at a time: enough to keep a GPU busy; few enough to stay in the cache of a CPU core."""


class AdamW(ParamOptimizer):
    """AdamW with states on the device, in fp32 or with bf16 moments."""

    def __init__(self, params: Sequence[OwnedParam], spec: OptimizerSpec, moments: torch.dtype):
        self._params = list(params)
        self._decays = [weight_decay(param, spec) for param in params]
        values = [param.value.detach() for param in params]
        self._steps = [torch.zeros((), dtype=torch.float32, device=value.device) for value in values]
        self._moments = [(torch.zeros_like(v, dtype=moments), torch.zeros_like(v, dtype=moments)) for v in values]
        self._converts_moments = moments != torch.float32
        on_device = any(accelerator.of(value.device).asynchronous for value in values)
        self._chunk_size = _DEVICE_CHUNK if on_device else _HOST_CHUNK
        self._buffers: dict[str, Tensor] = {}

    def step(self, update: Update) -> None:
        # An empty shard counts steps too: a checkpoint has one count for all shards of a parameter.
        steps = [self._steps[i] for i, param in enumerate(self._params) if is_updated(param)]
        if not steps:
            return
        torch._foreach_add_(steps, 1)
        updated = [i for i, param in enumerate(self._params) if param.gradient is not None and param.value.numel()]
        for decay in dict.fromkeys(self._decays):
            rows: list[KernelRow] = []
            converted = []
            for i in (i for i in updated if self._decays[i] == decay):
                if self._converts_moments or self._gradient(i).dtype != torch.float32:
                    converted.append(i)
                else:
                    rows.append((self._params[i].value.detach(), self._gradient(i), *self._moments[i], self._steps[i]))
            fused_adamw(rows, decay, update)
            for chunk in split_chunks([self._params[i].value.numel() for i in converted], self._chunk_size):
                self._step_chunk(chunk, converted, decay, update)
        torch._foreach_sub_(steps, [update.skip] * len(steps))

    def state(self) -> dict[str, State]:
        states: dict[str, State] = {}
        for param, step, (mean, square) in zip(self._params, self._steps, self._moments, strict=True):
            states |= {f"{param.name}/step": step, f"{param.name}/exp_avg": mean, f"{param.name}/exp_avg_sq": square}
        return states

    def bytes(self) -> StateBytes:
        return StateBytes(device=sum(tensor.nbytes for pair in self._moments for tensor in pair))

    @property
    def applied(self) -> str:
        if not self._params:
            return "nothing"
        moment = self._moments[0][0]
        return f"{len(self._params)} parameters, moments {moment.dtype} on {moment.device}, {self.bytes().device} bytes"

    def _gradient(self, index: int) -> Tensor:
        gradient = self._params[index].gradient
        assert gradient is not None
        return gradient

    def _step_chunk(self, chunk: Chunk, indices: list[int], decay: float, update: Update) -> None:
        """Updates parameters whose gradients or moments are not in fp32: copies them to fp32, and moments back."""
        rows: list[KernelRow] = []
        stored: list[Tensor] = []
        widened: list[Tensor] = []
        for run in chunk.runs:
            i = indices[run.index]
            gradient = run.of(self._gradient(i).reshape(-1))
            if gradient.dtype != torch.float32:
                gradient = run.within(self._buffer("gradient", gradient, chunk.size)).copy_(gradient)
            mean, square = (run.of(flat(moment)) for moment in self._moments[i])
            if self._converts_moments:
                stored += (mean, square)
                mean, square = (run.within(self._buffer(key, mean, chunk.size)) for key in MOMENTS)
                widened += (mean, square)
            rows.append((run.of(flat(self._params[i].value)), gradient, mean, square, self._steps[i]))
        if stored:
            torch._foreach_copy_(widened, stored)
        fused_adamw(rows, decay, update)
        if stored:
            torch._foreach_copy_(stored, widened)

    def _buffer(self, use: str, like: Tensor, length: int) -> Tensor:
        """An fp32 buffer on the device of `like`, the same one every time."""
        if use not in self._buffers or self._buffers[use].numel() < length:
            self._buffers[use] = torch.empty(length, dtype=torch.float32, device=like.device)
        return self._buffers[use]


def _make(params: Sequence[OwnedParam], setup: OptimizerSetup) -> ParamOptimizer:
    if setup.memory.offloads:
        return offloaded(params, setup)
    return AdamW(params, setup.spec, setup.moments)


KIND = OptimizerKind("AdamW", _make, updates=lambda param: True)
