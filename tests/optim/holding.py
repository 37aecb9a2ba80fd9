"""Parameters as an optimizer finds them, and gradients drawn for them. Imported by tests as `optim.holding`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.checkpointing.state_tensor import OffloadedTensor
from phalanx.models.init import build, materialize
from phalanx.parallel.sharded_model import OwnedParam, ParamShard, extract
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Optimizer as OptimizerSpec

ADAMW = OptimizerSpec(learning_rate=0.01, weight_decay=0.2, beta1=0.85, beta2=0.97, eps=1e-7)
MUON = OptimizerSpec(name="muon", learning_rate=0.01, weight_decay=0.2, beta1=0.85, beta2=0.97, eps=1e-7, momentum=0.9)
MODEL = ModelSpec(vocab=20, dim=12, layers=2, heads=2, ffn=20, norm="layer", bias=True)
ONE, NO, YES = torch.tensor(1.0), torch.tensor(0.0), torch.tensor(1.0)


def holding(seed: int = 0, spec: ModelSpec = MODEL) -> list[OwnedParam]:
    """All parameters of a small model, on one rank."""
    model = materialize(build(spec), seed, torch.device("cpu"))
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():  # biases too: what is zero shows no decay
            p.copy_(0.3 * torch.randn(p.shape, generator=dice))
    return [OwnedParam(name, p, ParamShard.full(p)) for name, p in model.named_parameters()]


def give_gradients(held: list[OwnedParam], step: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
    """The same for the same step, whatever box of a parameter is held."""
    dice = torch.Generator().manual_seed(1000 + step)
    for one in held:
        one.gradient = extract(one.shard.slice, scale * torch.randn(one.shard.slice.whole, generator=dice)).to(dtype).clone()


def values(held: list[OwnedParam]) -> dict[str, Tensor]:
    return {one.name: one.value.detach() for one in held}


def read(states: Mapping[str, Tensor | OffloadedTensor]) -> dict[str, Tensor]:
    """Copies, of states in files too."""
    return {name: state.detach().clone() if isinstance(state, Tensor) else state.read() for name, state in states.items()}


def everything(held: list[OwnedParam], states: Mapping[str, Tensor | OffloadedTensor]) -> dict[str, Tensor]:
    """Copies of all that a step may change."""
    return read(values(held)) | read(states)
