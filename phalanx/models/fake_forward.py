"""One forward of a model that has no memory yet, on fake tensors: to look at what it calls. Unlike on the meta device, a module can tell that
there are no values, and does not ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

SHAPE = (1, 8)
"""Sequences and positions."""


def fake_forward(model: nn.Module, watch: Callable[[Mapping[str, Tensor]], AbstractContextManager[object]]) -> None:
    """Calls the model as training does. `watch`: makes, from the parameters by name, what is entered around the call.

    Layers are in evaluation mode, as a module may draw random numbers in training. Raises whatever the model raises.
    """
    with FakeTensorMode() as fake:
        parameters = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in model.named_parameters()}
        buffers = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in model.named_buffers()}
        positions_BS = torch.zeros(SHAPE, dtype=torch.int64)
        tokens_BS = torch.zeros_like(positions_BS)
    with torch.no_grad(), _evaluated(model), fake, watch(parameters):
        functional_call(model, parameters | buffers, (tokens_BS, positions_BS, None))


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
