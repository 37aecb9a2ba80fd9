"""Activation checkpointing: recomputes the activations of blocks in the backward instead of storing them. "full" stores a block's input;
"selective" also the results of matrix products, grouped products and attention, which are most of the work and little of the memory. Where ranks
add up a product (`summed`), it stores the sum instead of this rank's part.

Other collectives inside a block are repeated, in the same order on every rank. The recomputed forward gives the same bits, does not count tokens
again, and can run more than once, as split backwards require.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from phalanx.kernels import document_attention, router_product, sink_attention
from phalanx.spec.errors import RunFailed
from phalanx.transforms.blocks import block_number, blocks, named, routes_tokens
from phalanx.transforms.dropout import Dropout

STORED = frozenset(kernel.FORWARD.default for kernel in (document_attention, router_product, sink_attention)) | frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    )
)  # fmt: skip
"""Operations whose results "selective" stores."""
EXPANSION = 32
"""Products that are so many times wider than what they are computed from are not stored: to recompute them costs least per byte. They are the
keys and values of latent attention."""
_EXPANDING = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}
"""Operations and the place of the narrow argument."""
_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
)
"""Of those, the ones of linear layers and experts."""


def apply(
    parts: Sequence[nn.Module], mode: Literal["full", "selective"], every: int = 1, *, compiled: bool = False
) -> str | None:
    """Recompute every N-th block, counted over the whole model; returns a description.

    `compiled`: the compiler does so in the blocks that it compiles, all but those that route tokens; None if there are no others.
    """
    changed = []
    for name, block in blocks(parts, f'memory.recompute = "{mode}"').items():
        if block_number(name, parts) % every == 0 and (mode == "full" or not compiled or routes_tokens(block)):
            # Of a block that routes tokens, the other half is compiled.
            half = compiled and mode == "selective" and hasattr(block, "feed_forward_half")
            attribute = "feed_forward_half" if half else "forward"
            setattr(block, attribute, _recomputed(block, getattr(block, attribute), mode))
            changed.append(name)
    if compiled and mode == "selective" and not changed:
        return None
    stored = "" if mode == "full" else ", all but matrix products and attention"
    return f"{mode}: {named(changed)}{stored} recomputed in the backward" if changed else f"{mode}: no block of this rank"


def _recomputed(block: nn.Module, forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """A block's forward, or a half of it, with activation checkpointing."""
    counters = [module for module in block.modules() if hasattr(module, "counting")]
    masks = next((module.lora_dropout for module in block.modules() if hasattr(module, "lora_dropout")), None)
    assert masks is None or isinstance(masks, Dropout)
    if mode == "selective":
        for module in block.modules():
            for name in getattr(module, "only_added", ()):
                if (layer := dict(module.named_modules()).get(name)) is not None:
                    layer.register_forward_hook(_forget, always_call=False)
    block.work = None  # type: ignore[assignment]  # set while `observe/counters` counts operations

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if mode == "full":
            return nullcontext(), _Recompute(block, counters, nullcontext(), masks)
        store = _Store()
        return store, _Recompute(block, counters, _Replay(store.results), masks)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed


class _Recompute:
    """Around a recomputed forward: routers do not count its tokens again, dropout repeats its masks, and the operation counter knows of it. Entered once for each pass
    of a split backward."""

    def __init__(
        self, block: nn.Module, counters: Sequence[nn.Module], replay: AbstractContextManager[Any], masks: Dropout | None
    ):
        self._work: Any = block.work
        self._counters, self._replay = counters, replay
        self._masks, self._keys = masks, None if masks is None else masks.keys
        self._same_masks: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._set_recomputing(True)
        if self._masks is not None:
            self._same_masks = self._masks.recomputing(self._keys)
        self._same_masks.__enter__()
        self._replay.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._replay.__exit__(*error)
        self._same_masks.__exit__(*error)
        self._set_recomputing(False)

    def _set_recomputing(self, recomputing: bool) -> None:
        if self._work is not None:
            self._work.again += 1 if recomputing else -1
        for module in self._counters:
            module.counting = not recomputing  # type: ignore[assignment]


def _forget(*_: Any) -> None:
    """After a linear layer whose result no gradient needs."""
    mode = getattr(_current, "mode", None)
    if isinstance(mode, _Store):
        mode.forget_product()


def summed(add: Callable[[Tensor], Tensor], product: Tensor) -> Tensor:
    """`add(product)`, a sum over ranks that nothing but the caller reads `product` for. Selective recomputation stores the sum, does not
    repeat the message, and does not store the product."""
    mode = getattr(_current, "mode", None)
    return add(product) if mode is None else mode.summed(add, product)


_current = threading.local()
"""Has the `_Store` or `_Replay` of the block that this thread runs as `mode`."""


@dataclass(slots=True)
class _Result:
    """The result of one operation in a block's forward."""

    func: Any
    value: Any
    """The result without its graph; None: not stored."""
    versions: int
    shape_only: bool = False
    """Nothing reads the elements, and `value` has none."""


class _Mode(TorchDispatchMode):
    """Sees the operations of one block's forward."""

    def __init__(self, results: list[_Result]):
        super().__init__()
        self.results = results

    def __enter__(self) -> Any:
        self._outer, _current.mode = getattr(_current, "mode", None), self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _current.mode = self._outer


class _Store(_Mode):
    """Around the first forward: stores the results of the operations in STORED.

    torch's own pair of modes allows only one backward and fails if autocast has cached a weight.
    """

    def __init__(self) -> None:
        super().__init__([])

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # Most blocks add their last product to the residual stream, and no gradient needs its value. torch stops the recomputed forward
        # before it then; a block that does need it computes it again.
        *_, product, last = _Result(None, None, 0), _Result(None, None, 0), *self.results
        if last.func is summed or last.func in _PRODUCTS:
            last.value = None
        if last.func is summed and product.shape_only:
            product.value = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in STORED:
            self._store(func, out)
            if func in _EXPANDING and out.shape[-1] >= EXPANSION * args[_EXPANDING[func]].shape[-1]:
                self.results[-1].value = None
        return out

    def summed(self, add: Callable[[Tensor], Tensor], product: Tensor) -> Tensor:
        if self.results and self.results[-1].value is not None and _storage(self.results[-1].value) == _storage(product):
            self.forget_product()
        total = add(product)
        self._store(summed, total)
        return total

    def forget_product(self) -> None:
        """Keep only the shape of the last result, if it is that of a matrix product, or of a sum of products over ranks."""
        last = self.results[-1] if self.results else None
        if last is not None and (last.func in _PRODUCTS or last.func is summed) and isinstance(last.value, Tensor):
            last.value, last.shape_only = last.value.new_empty(()).expand(last.value.shape), True

    def _store(self, func: Any, out: Any) -> None:
        # Aliases: autograd attaches its graph to the returned tensors, and the graph must not keep itself alive.
        self.results.append(_Result(func, tree_map_only(Tensor, _alias, out), _versions(out)))


class _Replay(_Mode):
    """Around a recomputed forward: returns the stored results, in the same order."""

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in STORED:
            return func(*args, **(kwargs or {}))
        stored = self._stored(func)
        return func(*args, **(kwargs or {})) if stored is None else stored

    def summed(self, add: Callable[[Tensor], Tensor], product: Tensor) -> Tensor:
        stored = self._stored(summed)
        return add(product) if stored is None else stored

    def _stored(self, func: Any) -> Any:
        """The next result; None: compute it."""
        result = self.results[self._next] if self._next < len(self.results) else None
        self._next += 1
        if result is None or result.func is not func:
            self._refuse("did not repeat the same operations")
        if result.value is None:
            return None
        if not result.shape_only and result.versions != _versions(result.value):
            self._refuse(f"changes the result of {func} in place")
        return tree_map_only(Tensor, _alias, result.value)

    def _refuse(self, reason: str) -> NoReturn:
        raise RunFailed(f'memory.recompute = "selective" cannot be used: a block {reason}; use "full" or "none".')


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _alias(tensor: Tensor) -> Tensor:
    """The same memory and version counter, outside any autograd graph."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(out: Any) -> int:
    """The sum of the version counters of a result's tensors."""
    return sum(part._version for part in (out if isinstance(out, tuple) else (out,)) if isinstance(part, Tensor))
