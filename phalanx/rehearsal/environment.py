"""What the real program reads from its data, its files and other ranks, and a rehearsal assumes: every expert gets as many rows as any
other, windows contain several documents, states are in their files. `rehearsal/rehearsed_rank` uses it around a rehearsal.

Each assumption is passed to the program where it would read the values of a tensor on the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.observe.comm_timer import COMM_TIMER
from phalanx.optim.param_optimizer import Resources
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Environment, Mesh
from phalanx.parallel.owned_param import OwnedParam, ParamShard
from phalanx.rehearsal.fake_gpu import replaced
from phalanx.spec.tensor_slice import Box, TensorSlice
from phalanx.transforms.activations import MOVED

ASSUMED = (
    "every expert gets equally many tokens",
    "every window holds several documents, where data.document_mask is on",
    "losses and gradients are finite, and no rank is told to stop",
)


class RehearsedEnvironment(Environment):
    """What a rehearsed rank assumes where a real one asks other ranks or reads tensors."""

    def broadcast_object(self, value: Any, ranks: int) -> Any:
        return value

    def gather_objects(self, value: Any, ranks: int) -> list[Any]:
        return [value] * ranks

    def expert_rows(self, counts: Tensor, across: Group, within: Group, rows: int) -> list[int]:
        """Every rank with experts gets the same number of rows from every other rank."""
        sent = [rows // across.size + (index < rows % across.size) for index in range(across.size)]
        received = [sent[across.index]] * across.size
        return [*sent, *received, *[sum(received)] * within.size]

    def document_ids(self, documents: Tensor) -> None:
        """Unknown, so that all attention needs a mask."""

    def device_mesh(self, build: Callable[[], DeviceMesh]) -> DeviceMesh:
        with _disable_current_modes():
            return build()


def optimizer_resources(mesh: Mesh) -> Resources:
    """Memory, files and peers of an optimizer in a rehearsal: tensors without memory, and boxes computed from those of this rank."""

    def boxes(group: Group, params: Sequence[OwnedParam]) -> list[list[Box]]:
        tensor = mesh.size("tensor")
        return [tiles(group, param.shard, tensor if "tensor" in param.shard.split else 1) for param in params]

    return Resources(folder=Path("offload"), host_buffer=FakeHostBuffer, scratch_file=FakeScratchFile, group_boxes=boxes)


def tiles(group: Group, spot: ParamShard, tensor: int) -> list[Box]:
    """The boxes of all ranks of a group: tensor ranks, which are neighbours, split a matrix along one dimension, and the ranks that share
    state split those parts."""
    shards = group.size // tensor
    for first, second in product(range(2), repeat=2):
        boxes: list[Box] = []
        for index in range(group.size):
            whole = TensorSlice.full(spot.slice.whole)
            boxes += whole.cut(first, index % tensor, tensor).cut(second, index // tensor, shards).boxes
        if boxes[group.index] == spot.slice.boxes[0]:
            return boxes
    raise AssertionError(f"{spot} is split in a way that rehearsals do not support")


def even_counts(counts_E: Tensor, rows: int) -> list[int]:
    """Rows of each expert, as equal as possible: `models/moe.Experts.read_counts` of a rehearsal."""
    experts = len(counts_E)
    return [rows // experts + (index < rows % experts) for index in range(experts)]


class FakeHostBuffer:
    """In place of page-locked host memory: a tensor without memory."""

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


class FakeScratchFile:
    """In place of a file of optimizer states and of its path."""

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
    """Different for different parts of a storage, as the address is that a tensor without memory does not have."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


def to_empty(module: nn.Module, *, device: torch.device, recurse: bool = True) -> nn.Module:
    """In place of `nn.Module.to_empty`: leaves a module that two stages of a rank share as the first stage made it, because torch cannot
    exchange tensors without memory a second time."""
    for child in module.children() if recurse else ():
        to_empty(child, device=device)
    if any(tensor.is_meta for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None):
        module._apply(lambda tensor: torch.empty_like(tensor, device=device), recurse=False)
    return module


@contextlib.contextmanager
def assumptions() -> Iterator[None]:
    """Meanwhile nothing waits for other ranks, and torch treats tensors without memory as tensors with it."""
    complete = COMM_TIMER.complete
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, COMM_TIMER, "complete", complete)
        COMM_TIMER.complete = lambda work: None
        stack.callback(MOVED.discard, FakeTensor)
        MOVED.add(FakeTensor)
        for owner, name, value in (
            # C++ code that sees a GPU starts threads for it, and a process with such threads cannot be forked.
            (torch._C, "_ensureCUDADeviceGuardSet", lambda: None),
            (nn.Module, "to_empty", to_empty),
            (torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
            (FakeTensor, "data_ptr", _address),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield
