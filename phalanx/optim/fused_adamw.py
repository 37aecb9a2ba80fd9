"""torch's fused AdamW kernel, which divides gradients and skips a step by itself, without waiting for the host. Called by `optim/adamw`
and `optim/offload/offloaded_adamw`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.optim.param_optimizer import Update
from phalanx.parallel.owned_param import OwnedParam
from phalanx.spec.run import Optimizer as OptimizerSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class KernelArgs:
    """The tensor lists of the fused kernel."""

    values: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    """These count the present step already."""

    def add(self, value: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], step: Tensor) -> None:
        self.values.append(value)
        self.gradients.append(gradient)
        self.means.append(moments[0])
        self.squares.append(moments[1])
        self.steps.append(step)


def fused_adamw(args: KernelArgs, weight_decay: float, update: Update) -> None:
    """torch.optim.AdamW(fused=True) on fp32 tensors. Leaves gradients divided."""
    if not args.values:
        return
    torch._fused_adamw_(
        args.values,
        args.gradients,
        args.means,
        args.squares,
        [],
        args.steps,
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
