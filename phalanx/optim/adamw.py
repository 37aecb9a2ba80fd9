"""AdamW, with states on the device, or with master weights and moments in host memory or in a file if `memory.offload` asks for it.
The default optimizer.

torch's fused kernel divides gradients and skips a step by itself, without waiting for the host. It needs all tensors in fp32: bf16 gradients or moments pass through it in fp32, a bounded chunk at a time.

With offloading, the device keeps the model's parameters. Gradients are copied to the host, torch's fused CPU kernel updates the masters,
and new values are copied to the device. On a GPU, copies of other chunks overlap with the update, and so do reads and writes of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.kernels.fused_adamw import AdamWRow, AdamWSettings, adamw_
from phalanx.kernels.triton_support import launches_triton
from phalanx.optim.offload_stores import MOMENTS, Allocate, Chunk, HostBuffer, Store, make_store, on_device, split_chunks, trim
from phalanx.optim.optimizer import (
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

KernelRow = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""One tensor's value, gradient, two moments, and number of steps, which counts the present one already."""


def fused_adamw(rows: list[KernelRow], weight_decay: float, update: Update) -> None:
    """torch.optim.AdamW(fused=True) on fp32 tensors. Leaves gradients divided."""
    if not rows:
        return
    values, gradients, means, squares, steps = map(list, zip(*rows, strict=True))
    torch._fused_adamw_(
        values,
        gradients,
        means,
        squares,
        [],
        steps,
        lr=update.learning_rate,
        beta1=update.spec.beta1,
        beta2=update.spec.beta2,
        weight_decay=weight_decay,
        eps=update.spec.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=update.divisor,
        found_inf=update.skip,
    )


def weight_decay(param: OwnedParam, spec: OptimizerSpec) -> float:
    """Matrices decay, norms and biases do not; the shape of the whole parameter decides, not that of the shard."""
    return spec.weight_decay if len(param.shard.slice.whole) >= 2 else 0.0


def _counters(decays: Sequence[float], device: torch.device) -> list[Tensor]:
    """A scalar for each parameter. Those of parameters with the same decay, which one kernel updates, are neighbors in memory."""
    scalars = iter(torch.zeros(len(decays), dtype=torch.float32, device=device).unbind())
    places = {index: next(scalars) for decay in dict.fromkeys(decays) for index, own in enumerate(decays) if own == decay}
    return [places[index] for index in range(len(decays))]


class AdamW(ParamOptimizer):
    """AdamW with states on the device, in fp32 or with bf16 moments."""

    def __init__(self, params: Sequence[OwnedParam], setup: OptimizerSetup):
        self._params = list(params)
        moments, self._decays = setup.moments, [weight_decay(param, setup.spec) for param in params]
        values = [param.value.detach() for param in params]
        self._steps = _counters(self._decays, values[0].device) if values else []
        self._moments = [(torch.zeros_like(v, dtype=moments), torch.zeros_like(v, dtype=moments)) for v in values]
        self._kernel = bool(values) and launches_triton(values[0])
        self._converts_moments = moments != torch.float32
        self._chunk_size = _DEVICE_CHUNK if on_device(params) else _HOST_CHUNK
        self._buffers: dict[str, Tensor] = {}

    def step(self, update: Update) -> None:
        # An empty shard counts steps too: a checkpoint has one count for all shards of a parameter.
        steps = [self._steps[i] for i, param in enumerate(self._params) if is_updated(param)]
        if not steps:
            return
        torch._foreach_add_(steps, 1)
        if self._kernel:
            self._step_with_kernel(update)
            torch._foreach_sub_(steps, [update.skip] * len(steps))
            return
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

    def _step_with_kernel(self, update: Update) -> None:
        spec = update.spec
        for decay in dict.fromkeys(self._decays):
            rows: list[AdamWRow] = []
            for param, own_decay, step, moments in zip(self._params, self._decays, self._steps, self._moments, strict=True):
                if own_decay == decay and param.gradient is not None and param.value.numel():
                    rows.append(AdamWRow(param.value.detach(), param.gradient, *moments, step, param.weight))
                    param.weight_written = param.weight is not None
            settings = AdamWSettings(update.learning_rate, spec.beta1, spec.beta2, spec.eps, decay)
            adamw_(rows, settings, update.divisor, update.skip)

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


class OffloadedAdamW(ParamOptimizer):
    """AdamW on states in a store."""

    def __init__(self, params: Sequence[OwnedParam], setup: OptimizerSetup, store: Store):
        self._params, self._store, self._chunks = list(params), store, store.chunks
        self._decays = [weight_decay(param, setup.spec) for param in params]
        self._steps = [torch.zeros((), dtype=torch.float32) for _ in params]
        self._moments = moments = setup.moments
        largest = max((chunk.size for chunk in self._chunks), default=0)
        self._transfer: _DeviceTransfer | _HostTransfer = _HostTransfer(params, self._chunks)
        if on_device(params):
            self._transfer = _DeviceTransfer(params, self._chunks, setup.resources.host_buffer or HostBuffer)
        self._widened = {key: torch.empty(largest if moments != torch.float32 else 0) for key in MOMENTS}
        self.adopt()

    def adopt(self) -> None:
        for number, chunk in enumerate(self._chunks):
            values = [run.of(flat(self._params[run.index].value)) for run in chunk.runs]
            self._store.put_masters(number, values)
        trim()  # memory that initialization or reading a checkpoint took

    def step(self, update: Update) -> None:
        divisor, skip = torch.stack((update.divisor, update.skip)).cpu()  # the host computes, so it waits for them
        if skip.item():
            return
        update = replace(update, divisor=divisor, skip=skip)
        for param, step in zip(self._params, self._steps, strict=True):
            step += is_updated(param)
        self._transfer.begin()
        for number, (chunk, record) in enumerate(self._store.walk()):
            self._update(chunk, record.kinds, self._transfer.gradients(number), update)
            record.copied = self._transfer.send(chunk, record.kinds["master"])
        self._transfer.end()

    def _update(self, chunk: Chunk, kinds: dict[str, Tensor], gradients: list[Tensor | None], update: Update) -> None:
        means, squares = (self._widen(kinds[key], key) for key in MOMENTS)
        by_decay: dict[float, list[KernelRow]] = {decay: [] for decay in self._decays}
        for run, gradient in zip(chunk.runs, gradients, strict=True):
            if gradient is not None:
                master, mean, square = (run.within(kind) for kind in (kinds["master"], means, squares))
                by_decay[self._decays[run.index]].append((master, gradient, mean, square, self._steps[run.index]))
        for decay, rows in by_decay.items():
            fused_adamw(rows, decay, update)
        for key, new in zip(MOMENTS, (means, squares), strict=True):
            if new.dtype != kinds[key].dtype:
                kinds[key].copy_(new)

    def _widen(self, moment: Tensor, key: str) -> Tensor:
        return moment if moment.dtype == torch.float32 else self._widened[key][: moment.numel()].copy_(moment)

    def state(self) -> dict[str, State]:
        states: dict[str, State] = {}
        for index, (param, step) in enumerate(zip(self._params, self._steps, strict=True)):
            states[f"{param.name}/step"] = step
            for key in MOMENTS:
                states[f"{param.name}/{key}"] = self._store.state(index, key, tuple(param.value.shape))
        return states

    def bytes(self) -> StateBytes:
        widened = sum(tensor.nbytes for tensor in self._widened.values())
        return self._store.bytes() + StateBytes(buffer=widened + self._transfer.buffer_bytes)

    @property
    def applied(self) -> str:
        return f"{len(self._params)} parameters, master weights in fp32 and moments in {self._moments} {self._store.where}"

    def close(self) -> None:
        self._transfer.end()
        self._store.close()


class _HostTransfer:
    """Parameters are on the host: gradients are read where they are."""

    def __init__(self, params: Sequence[OwnedParam], chunks: list[Chunk]):
        self._params, self._chunks = params, chunks
        self._buffer = torch.empty(0)

    @property
    def buffer_bytes(self) -> int:
        return self._buffer.nbytes

    def begin(self) -> None:
        pass

    def gradients(self, number: int) -> list[Tensor | None]:
        gradients: list[Tensor | None] = []
        chunk = self._chunks[number]
        for run in chunk.runs:
            gradient = self._params[run.index].gradient
            if gradient is not None:
                gradient = run.of(gradient.reshape(-1))
                if gradient.dtype != torch.float32:
                    if self._buffer.numel() < chunk.size:
                        self._buffer = torch.empty(chunk.size)
                    gradient = run.within(self._buffer).copy_(gradient)
            gradients.append(gradient)
        return gradients

    def send(self, chunk: Chunk, master: Tensor) -> None:
        for run in chunk.runs:
            run.of(flat(self._params[run.index].value)).copy_(run.within(master))

    def end(self) -> None:
        pass


class _DeviceTransfer:
    """While one chunk is updated, gradients of the next come from the device, and values of the last go to it."""

    def __init__(self, params: Sequence[OwnedParam], chunks: list[Chunk], allocate: Allocate):
        self._params, self._chunks = params, chunks
        largest = max((chunk.size for chunk in chunks), default=0)
        self._device = params[0].value.device
        self._kind = accelerator.of(self._device)
        self._down, self._up = self._kind.stream(self._device), self._kind.stream(self._device)
        self._host_buffers = [allocate(largest * 4, True) for _ in range(2)]
        self._buffers: list[Tensor] = [buffer.bytes.view(torch.float32) for buffer in self._host_buffers]
        self._arrived = [self._kind.event() for _ in range(2)]

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def begin(self) -> None:
        now = self._kind.current_stream(self._device)
        self._down.wait_stream(now)  # gradients are complete
        self._up.wait_stream(now)  # and the old values are not read any more
        self._fetch(0)

    def _fetch(self, number: int) -> None:
        """Starts to copy a chunk's gradients to the host. The buffer's last content, of two chunks ago, has been used."""
        with self._kind.use(self._down):
            for run in self._chunks[number].runs if number < len(self._chunks) else ():
                gradient = self._params[run.index].gradient
                if gradient is not None:
                    run.within(self._buffers[number % 2]).copy_(run.of(gradient.reshape(-1)), non_blocking=True)
            self._arrived[number % 2].record(self._down)

    def gradients(self, number: int) -> list[Tensor | None]:
        self._fetch(number + 1)
        self._arrived[number % 2].synchronize()
        runs, buffer = self._chunks[number].runs, self._buffers[number % 2]
        return [None if self._params[run.index].gradient is None else run.within(buffer) for run in runs]

    def send(self, chunk: Chunk, master: Tensor) -> Any:
        with self._kind.use(self._up):
            for run in chunk.runs:
                run.of(flat(self._params[run.index].value)).copy_(run.within(master), non_blocking=True)
            return self._up.record_event()

    def end(self) -> None:
        """Later work on the device sees the new values."""
        self._kind.current_stream(self._device).wait_stream(self._up)


def _make(params: Sequence[OwnedParam], setup: OptimizerSetup) -> ParamOptimizer:
    if setup.memory.offloads:
        return OffloadedAdamW(params, setup, make_store(params, setup))
    return AdamW(params, setup)


KIND = OptimizerKind("AdamW", _make, updates=lambda param: True)
