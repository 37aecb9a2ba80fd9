"""What the real program reads off its data, and a rehearsal has to assume: experts get equally many rows, windows hold several
documents, states in files are where they should be. Opened by `rehearsal/rehearsed_rank` around a rehearsal.

Each assumption stands in for one function of the program, at a seam where it reads a tensor's values on the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.models import moe
from phalanx.observe import comm_timer
from phalanx.optim.param_optimizer import Resources
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Environment, Mesh
from phalanx.parallel.owned_param import OwnedParam, ParamShard
from phalanx.spec.tensor_slice import Box, TensorSlice
from phalanx.transforms import activations

ASSUMED = (
    "every expert gets equally many tokens",
    "every window holds several documents, where data.document_mask is on",
    "losses and gradients are finite, and no rank is told to stop",
)


class RehearsedEnvironment(Environment):
    """What a rehearsed rank assumes where a real one learns it."""

    def broadcast_object(self, value: Any, ranks: int) -> Any:
        return value

    def gather_objects(self, value: Any, ranks: int) -> list[Any]:
        return [value] * ranks

    def expert_rows(self, counts: Tensor, across: Group, within: Group, rows: int) -> list[int]:
        """Every rank that holds experts gets equally many rows from every other."""
        sent = [rows // across.size + (index < rows % across.size) for index in range(across.size)]
        received = [sent[across.index]] * across.size
        return [*sent, *received, *[sum(received)] * within.size]

    def document_ids(self, documents: Tensor) -> None:
        """Boundaries may be anywhere, so that every product needs a mask."""

    def device_mesh(self, build: Callable[[], DeviceMesh]) -> DeviceMesh:
        with _disable_current_modes():
            return build()


def optimizer_resources(mesh: Mesh) -> Resources:
    """An optimizer's memory, files and peers in a rehearsal: tensors without memory, and boxes computed from this rank's own."""

    def boxes(group: Group, params: Sequence[OwnedParam]) -> list[list[Box]]:
        tensor = mesh.size("tensor")
        return [tiles(group, param.shard, tensor if "tensor" in param.shard.split else 1) for param in params]

    return Resources(folder=Path("offload"), host_buffer=Room, scratch_file=Scratch, group_boxes=boxes)


def tiles(group: Group, spot: ParamShard, tensor: int) -> list[Box]:
    """Tensor ranks, which are neighbours, cut a matrix along one of its dimensions, and those that share state its parts."""
    shards = group.size // tensor
    for first, second in product(range(2), repeat=2):
        found: list[Box] = []
        for index in range(group.size):
            whole = TensorSlice.full(spot.slice.whole)
            found += whole.cut(first, index % tensor, tensor).cut(second, index // tensor, shards).boxes
        if found[group.index] == spot.slice.boxes[0]:
            return found
    raise AssertionError(f"{spot} is cut in a way that rehearsals do not know")


class _Even:
    """Counts of experts, where one after the other is taken."""

    def __init__(self, rows: int, experts: int):
        self._counts = [rows // experts + (index < rows % experts) for index in range(experts)]

    def tolist(self) -> list[int]:
        return self._counts


class Room:
    """In place of memory of the host that is locked for a GPU: a tensor without memory."""

    def __init__(self, size: int, pin: bool):
        self.bytes = torch.empty(size, dtype=torch.uint8)
        self.view = _View()

    def elements(self, dtype: torch.dtype, first: int, count: int) -> Tensor:
        return self.bytes.narrow(0, first, count * dtype.itemsize).view(dtype)


class _View:
    def __getitem__(self, _: Any) -> _View:
        return self

    def __len__(self) -> int:
        return 0


class Scratch:
    """In place of a file of optimizer states, and of its path."""

    direct = True

    def __init__(self, path: Any, size: int):
        self.name, self.path, self.size = str(path), self, size

    def __str__(self) -> str:
        return self.name

    def stat(self) -> Any:
        return os.stat_result((0, 0, 0, 0, 0, 0, self.size, 0, 0, 0))

    def read(self, *_: Any) -> None:
        pass

    write = read

    def close(self) -> None:
        pass


def _address(tensor: Tensor) -> int:
    """Memory that is not there has no address; this one tells pieces apart as addresses do."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


def given_memory(module: nn.Module, *, device: torch.device, recurse: bool = True) -> nn.Module:
    """In place of `nn.Module.to_empty`: a module that two stages of a rank share keeps what the first gave it, as torch cannot exchange
    tensors without memory a second time."""
    for child in module.children() if recurse else ():
        given_memory(child, device=device)
    if any(one.is_meta for one in (*module._parameters.values(), *module._buffers.values()) if one is not None):
        module._apply(lambda one: torch.empty_like(one, device=device), recurse=False)
    return module


@contextlib.contextmanager
def assumed(rank: Mesh) -> Iterator[None]:
    """While it is open."""
    loop = moe.loop_experts

    def even(x_RD: Tensor, counts_E: Any, *weights: Tensor) -> Tensor:
        return loop(x_RD, _Even(len(x_RD), len(weights[0])), *weights)  # type: ignore[arg-type]

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            # No C++ code is to see a GPU; it would start threads for one, and no process with such can be forked.
            (torch._C, "_ensureCUDADeviceGuardSet", lambda: None),
            (comm_timer.COMM_TIMER, "complete", lambda work: None),  # nobody is waited for
            (moe, "loop_experts", even),
            (nn.Module, "to_empty", given_memory),
            (activations, "MOVED", (*activations.MOVED, FakeTensor)),
            (torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
            (FakeTensor, "data_ptr", _address),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
