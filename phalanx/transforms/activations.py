"""Activation offload: the activations of blocks wait for their backward in host memory. `parallel/apply` calls it after
recomputation, so that only stored activations move, and before blocks are sharded.

On GPUs copies overlap the computation, on a separate stream: out while the next block computes, back while the following block runs
its backward. On CPUs, which have only one memory, tensors are copied too, so that tests there exercise this path.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from phalanx import accelerator
from phalanx.transforms.blocks import blocks, named

_MIN_BYTES = 1 << 20
"""Smaller tensors stay on the device: a copy has a fixed cost."""
MOVED: set[type] = {Tensor, nn.Buffer}
"""Types of tensors that may move. A rehearsal adds torch's fake tensors while it runs."""
_IN_FLIGHT = 1
"""Blocks whose copies may still be in flight while the next block computes."""


def apply(parts: Sequence[nn.Module], device: torch.device, min_bytes: int | None = None) -> str:
    """Offload the blocks' activations to host memory; returns a description. Tensors under `min_bytes` bytes stay."""
    asynchronous = accelerator.of(device).asynchronous
    if min_bytes is None:
        min_bytes = _MIN_BYTES if asynchronous else 0
    offloader = Offloader(device, min_bytes)
    by_name = blocks(parts, 'memory.activations = "cpu"')
    for block in by_name.values():
        block.forward = offloader.around(block.forward)
    how = "pinned, overlapping the computation" if asynchronous else "copied, although it is the same memory"
    return f"activations of {named(list(by_name))} wait in host memory: {how}"


class Offloader:
    """Moves activations to host memory and back, for all blocks of one rank."""

    def __init__(self, device: torch.device, min_bytes: int):
        self.min_bytes = min_bytes
        self.accelerator = accelerator.of(device)
        self.stream = self.accelerator.stream(device)
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()
        """(event after the copies, their sources) of each block whose copies are in flight."""
        self._last: Callable[[], _BlockForward | None] = lambda: None
        """A weak reference to the last block's forward."""

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            shared = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
            run = _BlockForward(self, self._last, {leaf.untyped_storage().data_ptr() for leaf in shared})
            with saved_tensors_hooks(run.pack, lambda packed: packed.restore() if isinstance(packed, _Offloaded) else packed):
                out = forward(*args, **kwargs)
            self._last = weakref.ref(run)
            sources = run.take_sources()
            if self.stream is not None:
                self._leaving.append((self.stream.record_event(), sources))
                self.release(_IN_FLIGHT)
            return out

        return offloaded

    def release(self, in_flight: int = 0) -> None:
        """Release the sources of finished copies, for all blocks but the last few, without blocking the host."""
        while len(self._leaving) > in_flight:
            event, _ = self._leaving.popleft()
            # From here on the computation comes after the copy, so that the source's memory may be reused.
            self.accelerator.current_stream().wait_event(event)


class _BlockForward:
    """One forward of one block: decides which saved tensors are offloaded, and prefetches them together."""

    def __init__(self, offloader: Offloader, previous: Callable[[], _BlockForward | None], shared: set[int]):
        """`shared`: addresses of tensors that several blocks use, which stay on the device."""
        self.offloader, self.stream, self._previous, self._shared = offloader, offloader.stream, previous, shared
        self._tensors: weakref.WeakValueDictionary[int, _Offloaded] = weakref.WeakValueDictionary()
        self._prefetched = False
        # References to the tensors keep their addresses from being reused meanwhile.
        self._seen: dict[tuple[Any, ...], tuple[Tensor, _Offloaded]] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Offloaded:
        if self._stays(tensor):
            return tensor
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        if key not in self._seen:
            self._seen[key] = (tensor.detach(), _Offloaded(tensor, self))
            self._tensors[len(self._seen)] = self._seen[key][1]
        offloaded = self._seen[key][1]
        offloaded.uses += 1
        return offloaded

    def _stays(self, tensor: Tensor) -> bool:
        return (
            not tensor.is_floating_point()
            or (self.stream is not None and tensor.device.type == "cpu")  # bookkeeping of activation checkpointing
            or tensor.numel() * tensor.element_size() < self.offloader.min_bytes
            or type(tensor) not in MOVED  # parameters, and tensor subclasses
            or tensor.untyped_storage().data_ptr() in self._shared
            or _of_parameter(tensor)
        )

    def take_sources(self) -> list[Tensor]:
        """The tensors whose copies are in flight; drops its own references."""
        tensors = [tensor for tensor, _ in self._seen.values()]
        self._seen.clear()
        return tensors

    def prefetch_previous(self) -> None:
        """Start fetching for the previous block, whose backward comes next; only once, as a backward may run in two passes."""
        previous = self._previous()
        if previous is not None and not previous._prefetched:
            previous._prefetched = True
            for tensor in list(previous._tensors.values()):
                tensor.fetch()


class _Offloaded:
    """One tensor in host memory."""

    def __init__(self, tensor: Tensor, run: _BlockForward):
        self._run, self._device = run, tensor.device
        self._accelerator = run.offloader.accelerator
        self._fetched: Tensor | None = None
        self._arrived: Any = None
        self.uses = 0
        """How often autograd saved it; all uses share one copy."""
        self._uses_left = 0
        if run.stream is None:
            self._host = _like(tensor, tensor.device).copy_(tensor)
            return
        self._host = _like(tensor, torch.device("cpu"), pinned=True)
        run.stream.wait_stream(self._accelerator.current_stream(tensor.device))
        with self._accelerator.use(run.stream):
            self._host.copy_(tensor, non_blocking=True)

    def fetch(self) -> None:
        if self._fetched is None and self._run.stream is not None:
            # On the stream of the copy to the host, and so after that copy.
            with self._accelerator.use(self._run.stream):
                self._fetched = _like(self._host, self._device).copy_(self._host, non_blocking=True)
                self._arrived = self._run.stream.record_event()
            self._uses_left = self.uses

    def restore(self) -> Tensor:
        """The tensor on the device; also starts to prefetch the previous block."""
        if self._run.stream is None:
            return self._host
        self._run.offloader.release()
        self.fetch()
        self._run.prefetch_previous()
        tensor, current = self._fetched, self._accelerator.current_stream(self._device)
        assert tensor is not None and self._arrived is not None, "fetched above"
        current.wait_event(self._arrived)
        tensor.record_stream(current)  # allocated on the copy stream, which must not reuse it before this stream is done
        self._uses_left -= 1
        if self._uses_left <= 0:
            self._fetched = self._arrived = None  # a second backward fetches it again
        return tensor


_FROM_PARAMETER = ("TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "ToCopyBackward0")


def _of_parameter(tensor: Tensor) -> bool:
    """Whether it is a view or a cast of a parameter, which is on the device anyway."""
    node = tensor.grad_fn
    while node is not None and node.name() in _FROM_PARAMETER:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", tensor), nn.Parameter)


def _like(tensor: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
    """Memory for a copy with the same strides, if they are dense: with other strides kernels may add in another order."""
    shape = torch.empty_like(tensor, device="meta")
    return torch.empty_strided(shape.shape, shape.stride(), dtype=tensor.dtype, device=device, pin_memory=pinned)
