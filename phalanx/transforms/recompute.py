"""Activation checkpointing: recomputes the activations of blocks in the backward instead of storing them. "full" stores a block's input;
"selective" also the results of matrix products, grouped products and attention, which are most of the work and little of the memory.

Both repeat the collectives inside a block, in the same order on every rank. The recomputed forward gives the same bits, does not count tokens
again, and can run more than once, as split backwards require.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from phalanx.kernels.document_attention import FORWARD
from phalanx.spec.errors import RunFailed
from phalanx.transforms.blocks import blocks, named

STORED = frozenset([FORWARD.default]) | frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    )
)  # fmt: skip
"""Operations whose results "selective" stores."""


def apply(parts: Sequence[nn.Module], mode: Literal["full", "selective"], every: int = 1) -> str:
    """Recompute every N-th block, counted over the whole model; returns a description."""
    changed = []
    for name, block in blocks(parts, f'memory.recompute = "{mode}"').items():
        if _number(name, parts) % every == 0:
            block.forward = _recomputed(block, mode)
            changed.append(name)
    stored = "" if mode == "full" else ", all but matrix products and attention"
    return f"{mode}: {named(changed)}{stored} recomputed in the backward" if changed else f"{mode}: no block of this rank"


def _number(name: str, parts: Sequence[nn.Module]) -> int:
    """A block's index in the whole model, so that the choice of blocks does not depend on the layout."""
    kind, number, *_ = name.split(".")
    layers: int = getattr(parts[0].spec, "layers", 0) if kind == "mtp" else 0
    return int(number) + layers


def _recomputed(block: nn.Module, mode: str) -> Callable[..., Any]:
    """The block's forward with activation checkpointing."""
    forward, counters = block.forward, [module for module in block.modules() if hasattr(module, "counting")]
    block.work = None  # type: ignore[assignment]  # set while `observe/counters` counts operations

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if mode == "full":
            return nullcontext(), _Recompute(block, counters, nullcontext())
        store = _Store()
        return store, _Recompute(block, counters, _Replay(store.results))

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputed


class _Recompute:
    """Around a recomputed forward: routers do not count its tokens again, and the operation counter knows of it. Entered once for each pass
    of a split backward."""

    def __init__(self, block: nn.Module, counters: Sequence[nn.Module], replay: AbstractContextManager[Any]):
        self._work: Any = block.work
        self._counters, self._replay = counters, replay

    def __enter__(self) -> None:
        self._set_recomputing(True)
        self._replay.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._replay.__exit__(*error)
        self._set_recomputing(False)

    def _set_recomputing(self, recomputing: bool) -> None:
        if self._work is not None:
            self._work.again += 1 if recomputing else -1
        for module in self._counters:
            module.counting = not recomputing  # type: ignore[assignment]


class _Store(TorchDispatchMode):
    """Around the first forward: stores the results of the operations in STORED.

    torch's own pair of modes allows only one backward and fails if autocast has cached a weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[Any, Any, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in STORED:
            # Aliases: autograd attaches its graph to the returned tensors, and the graph must not keep itself alive.
            self.results.append((func, tree_map_only(Tensor, _alias, out), _versions(out)))
        return out


class _Replay(TorchDispatchMode):
    """Around a recomputed forward: returns the stored results, in the same order."""

    def __init__(self, results: list[tuple[Any, Any, int]]):
        super().__init__()
        self._results, self._next = results, 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in STORED:
            return func(*args, **(kwargs or {}))
        stored, out, versions = self._results[self._next] if self._next < len(self._results) else (None, None, 0)
        self._next += 1
        if stored is not func or versions != _versions(out):
            how = "did not repeat the same operations" if stored is not func else f"changes the result of {func} in place"
            raise RunFailed(f'memory.recompute = "selective" cannot be used: a block {how}; use "full" or "none".')
        return tree_map_only(Tensor, _alias, out)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory and version counter, outside any autograd graph."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(out: Any) -> int:
    """The sum of the version counters of a result's tensors."""
    return sum(part._version for part in (out if isinstance(out, tuple) else (out,)) if isinstance(part, Tensor))
