"""AdamW with its states on the device. `optim/optimizer` hands it parameters; `optim/offload/offloaded_adamw` uses its kernel.

The arithmetic is torch's fused kernel, which divides gradients and refuses a bad step by itself, without asking the host. It wants
all its numbers in one format: gradients or moments in bf16 go through it in fp32, a bounded portion at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.checkpointing.state_tensor import OffloadedTensor
from phalanx.optim.chunks import Portion, portions
from phalanx.parallel.owned_param import OwnedParam
from phalanx.spec.run import Optimizer as OptimizerSpec

State = Tensor | OffloadedTensor

MOMENTS = ("exp_avg", "exp_avg_sq")

_PORTION = {"cuda": 1 << 24, "cpu": 1 << 18}
"""Numbers that are converted at a time: enough to keep a GPU busy; few enough to stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Where the optimizer's state lies."""

    device: int = 0
    host: int = 0
    """In this machine's memory, on behalf of a device."""
    files: int = 0
    buffer: int = 0
    """Memory of the host that state passes through on its way between a file and the device."""

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host, self.files + other.files, self.buffer + other.buffer)


@dataclass(frozen=True, slots=True)
class Move:
    """What one step is told."""

    spec: OptimizerSpec
    learning_rate: float
    divisor: Tensor
    """Every gradient is divided by it. An fp32 scalar beside the numbers, as is `bad`."""
    bad: Tensor
    """1: change nothing."""


@dataclass(slots=True)
class Terms:
    """What the kernel reads and writes, tensor by tensor."""

    values: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    """Each counts the present step already."""

    def add(self, value: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], step: Tensor) -> None:
        self.values.append(value)
        self.gradients.append(gradient)
        self.means.append(moments[0])
        self.squares.append(moments[1])
        self.steps.append(step)


def fused(terms: Terms, decay: float, move: Move) -> None:
    """torch.optim.AdamW(fused=True), on tensors that are all in fp32. Gradients are left divided."""
    if not terms.values:
        return
    torch._fused_adamw_(
        terms.values,
        terms.gradients,
        terms.means,
        terms.squares,
        [],
        terms.steps,
        lr=move.learning_rate,
        beta1=move.spec.beta1,
        beta2=move.spec.beta2,
        weight_decay=decay,
        eps=move.spec.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=move.divisor,
        found_inf=move.bad,
    )


def decay(one: OwnedParam, spec: OptimizerSpec) -> float:
    """Matrices decay, norms and biases do not; what a rank's part looks like does not matter."""
    return spec.weight_decay if len(one.shard.slice.whole) >= 2 else 0.0


def moving(one: OwnedParam) -> bool:
    """Whether a step changes it: a frozen parameter has no gradient."""
    return one.gradient is not None or not one.value.numel()


def flat(tensor: Tensor) -> Tensor:
    """The same memory, in one dimension."""
    assert tensor.is_contiguous(), f"a parameter's part of shape {tuple(tensor.shape)} is not in one piece"
    return tensor.detach().view(-1)


class AdamW:
    """On the device, in fp32 or with moments in bf16."""

    def __init__(self, held: Sequence[OwnedParam], spec: OptimizerSpec, moments: torch.dtype):
        self._held, self._spec = list(held), spec
        self._decays = [decay(one, spec) for one in held]
        values = [one.value.detach() for one in held]
        self._steps = [torch.zeros((), dtype=torch.float32, device=value.device) for value in values]
        self._moments = [(torch.zeros_like(v, dtype=moments), torch.zeros_like(v, dtype=moments)) for v in values]
        self._converted = moments != torch.float32
        self._staged: dict[str, Tensor] = {}

    def step(self, move: Move) -> None:
        # A part without numbers counts too: the ranks that hold the others count, and a checkpoint has one number for all.
        steps = [self._steps[i] for i, one in enumerate(self._held) if moving(one)]
        if not steps:
            return
        torch._foreach_add_(steps, 1)
        alive = [i for i, one in enumerate(self._held) if one.gradient is not None and one.value.numel()]
        for rate in dict.fromkeys(self._decays):
            terms, converted = Terms(), []
            for i in (i for i in alive if self._decays[i] == rate):
                if self._converted or self._gradient(i).dtype != torch.float32:
                    converted.append(i)
                else:
                    terms.add(self._held[i].value.detach(), self._gradient(i), self._moments[i], self._steps[i])
            fused(terms, rate, move)
            self._in_portions(converted, rate, move)
        torch._foreach_sub_(steps, [move.bad] * len(steps))

    def state(self) -> dict[str, State]:
        found: dict[str, State] = {}
        for one, step, (mean, square) in zip(self._held, self._steps, self._moments, strict=True):
            found |= {f"{one.name}/step": step, f"{one.name}/exp_avg": mean, f"{one.name}/exp_avg_sq": square}
        return found

    def bytes(self) -> Bytes:
        return Bytes(device=sum(size(tensor) for pair in self._moments for tensor in pair))

    @property
    def applied(self) -> str:
        if not self._held:
            return "nothing"
        moment = self._moments[0][0]
        return f"{len(self._held)} parameters, moments {moment.dtype} on {moment.device}, {self.bytes().device} bytes"

    def _gradient(self, index: int) -> Tensor:
        gradient = self._held[index].gradient
        assert gradient is not None
        return gradient

    def _in_portions(self, indices: list[int], rate: float, move: Move) -> None:
        """What is not in fp32 is copied to fp32, portion by portion, and moments back."""
        if not indices:
            return
        limit = _PORTION[self._held[indices[0]].value.device.type]
        for portion in portions([self._held[i].value.numel() for i in indices], limit):
            self._convert(portion, indices, rate, move)

    def _convert(self, portion: Portion, indices: list[int], rate: float, move: Move) -> None:
        terms = Terms()
        kept: list[Tensor] = []
        widened: list[Tensor] = []
        for part in portion.slices:
            i = indices[part.index]
            gradient = part.of(self._gradient(i).reshape(-1))
            if gradient.dtype != torch.float32:
                gradient = part.within(self._stage("gradient", gradient, portion.size)).copy_(gradient)
            mean, square = (part.of(flat(moment)) for moment in self._moments[i])
            if self._converted:
                kept += (mean, square)
                mean, square = (part.within(self._stage(key, mean, portion.size)) for key in MOMENTS)
                widened += (mean, square)
            terms.add(part.of(flat(self._held[i].value)), gradient, (mean, square), self._steps[i])
        if kept:
            torch._foreach_copy_(widened, kept)
        fused(terms, rate, move)
        if kept:
            torch._foreach_copy_(kept, widened)

    def _stage(self, use: str, like: Tensor, length: int) -> Tensor:
        """fp32 numbers beside `like`, the same memory every time."""
        if use not in self._staged or self._staged[use].numel() < length:
            self._staged[use] = torch.empty(length, dtype=torch.float32, device=like.device)
        return self._staged[use]


def size(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
