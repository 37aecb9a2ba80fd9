"""Activations of blocks wait for their backward in the machine's memory instead of the device's. `parallel/apply` calls it after
recomputation, so that what is moved is only what that keeps, and before blocks are sharded.

On GPUs copies run beside the computation, on a stream of their own: out while the next block computes, and back while the block
behind is at its backward. At most two blocks' activations are on the device in a forward. On CPUs, where there is one memory only,
each is copied all the same, so that what is proven there is this path.

What stays: parameters and their casts, whole numbers and masks, what several blocks share, and tensors too small to be worth it.
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

from phalanx.transforms.blocks import blocks, named, wrap

_SMALLEST = 1 << 20
"""Bytes under which a tensor stays: on GPUs a copy has a price of its own."""
MOVED: tuple[type, ...] = (Tensor, nn.Buffer)
"""Kinds of tensors that may go; a rehearsal's are of another."""
_IN_FLIGHT = 1
"""Blocks whose copies may still be on their way while the next computes."""


def apply(parts: Sequence[nn.Module], device: torch.device, smallest: int | None = None) -> str:
    """Make the blocks' activations wait in the machine's memory; says which. Tensors under `smallest` bytes stay."""
    if smallest is None:
        smallest = _SMALLEST if device.type == "cuda" else 0
    mover = Mover(device, smallest)
    found = blocks(parts, 'memory.activations = "cpu"')
    for block in found.values():
        wrap(block, mover.around)
    how = (
        "in pinned memory, moved beside the computation" if device.type == "cuda" else "copied, although it is the same memory"
    )
    return f"activations of {named(list(found))} wait in the machine's memory: {how}"


class Mover:
    """Takes activations away and brings them back, for all blocks of one rank."""

    def __init__(self, device: torch.device, smallest: int):
        self._smallest = smallest
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._last: weakref.ref[_Load] | None = None

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            shared = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
            load = _Load(self, self._last() if self._last else None)
            packer = _Packer(load, self._smallest, {leaf.untyped_storage().data_ptr() for leaf in shared})
            with saved_tensors_hooks(packer.pack, _unpack):
                out = forward(*args, **kwargs)
            self._last = weakref.ref(load)
            taken = packer.taken()
            if self.stream is not None:
                self._leaving.append((self.stream.record_event(), taken))
                self.let_go(_IN_FLIGHT)
            return out

        return moved

    def let_go(self, still: int = 0) -> None:
        """Hold on to what is being copied until the copy is done, for all blocks but the last few, without the host waiting."""
        while len(self._leaving) > still:
            event, _ = self._leaving.popleft()
            # From here on the computation comes after the copy, so that its memory may be used again.
            torch.cuda.current_stream().wait_event(event)


class _Load:
    """What one forward of one block has moved: brought back together, ahead of time."""

    def __init__(self, mover: Mover, before: _Load | None):
        self.mover, self.stream = mover, mover.stream
        self._before = weakref.ref(before) if before is not None else None
        self._away: list[weakref.ref[_Away]] = []
        self._ahead = False

    def add(self, away: _Away) -> None:
        self._away.append(weakref.ref(away))

    def fetch(self) -> None:
        """Begin to bring back what is not here."""
        for reference in self._away:
            if (away := reference()) is not None:
                away.fetch()

    def fetch_before(self) -> None:
        """Begin with the block in front, whose backward comes next; once, or a backward in two passes would fetch it for nothing."""
        before = self._before() if self._before is not None else None
        if before is not None and not before._ahead:
            before._ahead = True
            before.fetch()


class _Away:
    """One tensor that was moved."""

    def __init__(self, tensor: Tensor, load: _Load):
        self._load, self._device = load, tensor.device
        self._here: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self.uses = 0
        """How often it was saved: of one copy, all users get the same."""
        self._left = 0
        load.add(self)
        if load.stream is None:
            self._host = _like(tensor, tensor.device).copy_(tensor)
            return
        self._host = _like(tensor, torch.device("cpu"), pinned=True)
        load.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(load.stream):
            self._host.copy_(tensor, non_blocking=True)

    def fetch(self) -> None:
        if self._here is None and self._load.stream is not None:
            # On the stream it left by, so after its arrival in the machine's memory.
            with torch.cuda.stream(self._load.stream):
                self._here = _like(self._host, self._device).copy_(self._host, non_blocking=True)
                self._arrived = self._load.stream.record_event()
            self._left = self.uses

    def back(self) -> Tensor:
        if self._load.stream is None:
            return self._host
        self._load.mover.let_go()
        if self._here is None:
            self.fetch()
        self._load.fetch_before()
        here, current = self._here, torch.cuda.current_stream(self._device)
        assert here is not None and self._arrived is not None, "fetched above"
        current.wait_event(self._arrived)
        here.record_stream(current)  # it was made on the other stream, which must not reuse it before this one is done with it
        self._left -= 1
        if self._left <= 0:
            self._here = self._arrived = None  # a second backward fetches it again
        return here


class _Packer:
    """Decides, during one forward of a block, what goes and what stays."""

    def __init__(self, load: _Load, smallest: int, shared: set[int]):
        self._load, self._smallest, self._shared = load, smallest, shared
        # Holding the tensor itself keeps its address from being given to another meanwhile.
        self._seen: dict[tuple[Any, ...], tuple[Tensor, _Away]] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Away:
        if self._stays(tensor):
            return tensor
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        if key not in self._seen:
            self._seen[key] = (tensor.detach(), _Away(tensor, self._load))
        away = self._seen[key][1]
        away.uses += 1
        return away

    def taken(self) -> list[Tensor]:
        """The tensors that are on their way; forgets them."""
        tensors = [tensor for tensor, _ in self._seen.values()]
        self._seen.clear()
        return tensors

    def _stays(self, tensor: Tensor) -> bool:
        return (
            not tensor.is_floating_point()
            or (self._load.stream is not None and not tensor.is_cuda)  # there already: a recomputation's own bookkeeping
            or tensor.numel() * tensor.element_size() < self._smallest
            or tensor.untyped_storage().data_ptr() in self._shared
            or type(tensor) not in MOVED  # parameters, and subclasses that know better
            or _of_parameter(tensor)
        )


def _unpack(packed: Tensor | _Away) -> Tensor:
    return packed.back() if isinstance(packed, _Away) else packed


_FROM_PARAMETER = ("TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "ToCopyBackward0")


def _of_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter seen from another side or in another format: it is there anyway."""
    node = tensor.grad_fn
    while node is not None and node.name() in _FROM_PARAMETER:
        node = node.next_functions[0][0]
    leaf = getattr(node, "variable", tensor)
    return isinstance(leaf, nn.Parameter)


def _like(tensor: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
    """Room for a copy. Strides are kept where they fill their memory, since kernels may add in another order otherwise."""
    shape = torch.empty_like(tensor, device="meta")
    return torch.empty_strided(shape.shape, shape.stride(), dtype=tensor.dtype, device=device, pin_memory=pinned)
