"""Kernels as operations of torch: compilers, rehearsals and activation checkpointing see one operation, not what is in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


@cache
def has_triton() -> bool:
    """torch's CPU builds come without it."""
    return find_spec("triton") is not None


def launches_triton(tensor: Tensor) -> bool:
    """Whether kernels on this tensor's device are Triton's. A rehearsal has tensors of a GPU on a machine without Triton."""
    return tensor.is_cuda and (has_triton() or is_fake(tensor))


def operation(name: str, *, mutates: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
    """The function as torch's operation `phalanx::NAME`. `mutates`: arguments that it changes."""
    return torch.library.custom_op(f"phalanx::{name}", mutates_args=mutates)
