"""AdamW with master weights and moments off the device: in the host's memory, or in a file. `optim/optimizer` makes it.

The device keeps the model's parameters. Gradients come down, torch's fused CPU kernel updates the masters, new values go up; on a
GPU the copies of other portions run meanwhile, and with a file its reading and writing too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from phalanx.optim.adamw import MOMENTS, Bytes, Move, State, Terms, decay, flat, fused, moving
from phalanx.optim.chunks import Portion, portions
from phalanx.optim.offload.scratch import Buffer, ScratchFile, problem, trim
from phalanx.optim.offload.state_stores import ALIGNED, InFile, InMemory, Store, width
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import OwnedParam
from phalanx.spec.errors import RunFailed
from phalanx.spec.run import Memory
from phalanx.spec.run import Optimizer as OptimizerSpec

_PORTION = 1 << 22  # numbers that are copied at a time where all are in memory


class Offloaded:
    """The states of one rank's parameters."""

    def __init__(self, held: Sequence[OwnedParam], spec: OptimizerSpec, store: Store, cut: list[Portion], moments: torch.dtype):
        self._held, self._spec, self._store, self._portions = list(held), spec, store, cut
        self._decays = [decay(one, spec) for one in held]
        self._steps = [torch.zeros((), dtype=torch.float32) for _ in held]
        self._moments = moments
        largest = max((portion.size for portion in cut), default=0)
        on_gpu = any(one.value.is_cuda for one in held)
        self._traffic: _ByCopies | _InPlace = _ByCopies(held, largest) if on_gpu else _InPlace(held)
        self._wide = {key: torch.empty(largest if moments != torch.float32 else 0) for key in MOMENTS}
        self.adopt()

    def adopt(self) -> None:
        """Take the values as they are for master weights: after somebody else has written them."""
        for number, portion in enumerate(self._portions):
            values = [part.of(flat(self._held[part.index].value)) for part in portion.slices]
            self._store.put(number, "master", values)
        trim()  # what drawing these values took, or reading them from a checkpoint

    def step(self, move: Move) -> None:
        divisor, bad = torch.stack((move.divisor, move.bad)).cpu()  # the host works on them, so it has to know
        if bad.item():
            return
        move = replace(move, divisor=divisor, bad=bad)
        for one, step in zip(self._held, self._steps, strict=True):
            step += moving(one)
        self._traffic.begin()
        for portion in self._portions[:1]:
            self._traffic.fetch(0, portion)
        for number, (portion, record) in enumerate(self._store.walk()):
            for following in self._portions[number + 1 : number + 2]:
                self._traffic.fetch(number + 1, following)
            self._update(portion, record.kinds, self._traffic.gradients(number, portion), move)
            record.busy = self._traffic.give(portion, record.kinds["master"])
        self._traffic.end()

    def _update(self, portion: Portion, kinds: dict[str, Tensor], gradients: list[Tensor | None], move: Move) -> None:
        means, squares = (self._widened(kinds[key], key) for key in MOMENTS)
        terms = {rate: Terms() for rate in self._decays}
        for part, gradient in zip(portion.slices, gradients, strict=True):
            if gradient is not None:
                terms[self._decays[part.index]].add(
                    part.within(kinds["master"]),
                    gradient,
                    (part.within(means), part.within(squares)),
                    self._steps[part.index],
                )
        for rate, some in terms.items():
            fused(some, rate, move)
        for key, new in zip(MOMENTS, (means, squares), strict=True):
            if new.dtype != kinds[key].dtype:
                kinds[key].copy_(new)

    def _widened(self, moment: Tensor, key: str) -> Tensor:
        return moment if moment.dtype == torch.float32 else self._wide[key][: moment.numel()].copy_(moment)

    def state(self) -> dict[str, State]:
        found: dict[str, State] = {}
        for index, (one, step) in enumerate(zip(self._held, self._steps, strict=True)):
            found[f"{one.name}/step"] = step
            for key in MOMENTS:
                found[f"{one.name}/{key}"] = self._store.state(index, key, tuple(one.value.shape))
        return found

    def masters(self) -> dict[str, State]:
        """Master weights by parameter name. They equal the values, which are what a checkpoint takes."""
        return {one.name: self._store.state(i, "master", tuple(one.value.shape)) for i, one in enumerate(self._held)}

    def bytes(self) -> Bytes:
        staged = sum(tensor.numel() * 4 for tensor in self._wide.values()) + self._traffic.staged_bytes
        return self._store.bytes() + Bytes(buffer=staged)

    @property
    def applied(self) -> str:
        return f"{len(self._held)} parameters, master weights in fp32 and moments in {self._moments} {self._store.where}"

    def close(self) -> None:
        self._traffic.end()
        self._store.close()


class _InPlace:
    """The device is the host: gradients are read where they are."""

    def __init__(self, held: Sequence[OwnedParam]):
        self._held = held
        self._staged = torch.empty(0)

    @property
    def staged_bytes(self) -> int:
        return self._staged.numel() * 4

    def begin(self) -> None:
        pass

    def fetch(self, number: int, portion: Portion) -> None:
        pass

    def gradients(self, number: int, portion: Portion) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for part in portion.slices:
            gradient = self._held[part.index].gradient
            if gradient is not None:
                gradient = part.of(gradient.reshape(-1))
                if gradient.dtype != torch.float32:
                    if self._staged.numel() < portion.size:
                        self._staged = torch.empty(portion.size)
                    gradient = part.within(self._staged).copy_(gradient)
            found.append(gradient)
        return found

    def give(self, portion: Portion, master: Tensor) -> None:
        for part in portion.slices:
            part.of(flat(self._held[part.index].value)).copy_(part.within(master))

    def end(self) -> None:
        pass


class _ByCopies:
    """Gradients of the next portion come down while this one is updated, and values of the last one go up."""

    def __init__(self, held: Sequence[OwnedParam], largest: int):
        self._held = held
        self._device = held[0].value.device
        self._down, self._up = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._buffers = [Buffer(largest * 4, pin=True) for _ in range(2)]
        self._staged = [buffer.bytes.view(torch.float32) for buffer in self._buffers]
        self._arrived = [torch.cuda.Event() for _ in range(2)]

    @property
    def staged_bytes(self) -> int:
        return sum(staged.numel() * 4 for staged in self._staged)

    def begin(self) -> None:
        now = torch.cuda.current_stream(self._device)
        self._down.wait_stream(now)  # gradients are complete
        self._up.wait_stream(now)  # and nobody reads the old values any more

    def fetch(self, number: int, portion: Portion) -> None:
        """Begin to copy down; what stood in that memory, two portions ago, has been used."""
        with torch.cuda.stream(self._down):
            for part in portion.slices:
                gradient = self._held[part.index].gradient
                if gradient is not None:
                    part.within(self._staged[number % 2]).copy_(part.of(gradient.reshape(-1)), non_blocking=True)
            self._arrived[number % 2].record(self._down)

    def gradients(self, number: int, portion: Portion) -> list[Tensor | None]:
        self._arrived[number % 2].synchronize()
        staged = self._staged[number % 2]
        return [None if self._held[part.index].gradient is None else part.within(staged) for part in portion.slices]

    def give(self, portion: Portion, master: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._up):
            for part in portion.slices:
                part.of(flat(self._held[part.index].value)).copy_(part.within(master), non_blocking=True)
            return self._up.record_event()

    def end(self) -> None:
        """What comes after on the device sees the new values."""
        torch.cuda.current_stream(self._device).wait_stream(self._up)


def to_host(held: Sequence[OwnedParam], spec: OptimizerSpec, moments: torch.dtype) -> Offloaded:
    """States in the host's memory."""
    cut = portions([one.value.numel() for one in held], _PORTION)
    store = InMemory(cut, moments, pin=any(one.value.is_cuda for one in held))
    return Offloaded(held, spec, store, cut, moments)


def to_file(
    held: Sequence[OwnedParam], spec: OptimizerSpec, moments: torch.dtype, memory: Memory, mesh: Mesh, folder: Path
) -> Offloaded:
    """States in a file in `folder`, worked through in memory.offload_buffer. Ranks that cannot say so to all, before any step."""
    on_gpu = mesh.device.type == "cuda"
    extra = (8 if on_gpu else 4) + (8 if moments != torch.float32 else 0)  # gradients, and moments in fp32
    limit = (memory.offload_buffer << 20) // (3 * width(moments) + extra)
    cut = portions([one.value.numel() for one in held], limit, ALIGNED)
    path, size = folder / f"optimizer-{mesh.rank}.states", sum(portion.size for portion in cut) * width(moments)
    file, trouble = None, None
    try:
        file = ScratchFile(path, size)
    except OSError as error:
        trouble = problem(path, size, error)
    troubles = [found for found in mesh.gather_objects(trouble) if found]
    if troubles:
        if file is not None:
            file.close()
        raise RunFailed("\n".join(troubles))
    assert file is not None
    return Offloaded(held, spec, InFile(file, cut, moments, pin=on_gpu), cut, moments)
