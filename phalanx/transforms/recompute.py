"""Activations of blocks computed again in the backward instead of kept. `parallel/apply` calls it before blocks are sharded.

"full" keeps what enters a block; "selective" also the results of matrix products, grouped products and attention, which are most
of the work and little of the memory. Both repeat collectives inside a block, in the order that every rank repeats them in.
The repeated forward gives the same bits, counts no token a second time, and may be asked for more than once, as backwards that
take inputs and weights apart do.
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

from phalanx.spec.errors import RunFailed
from phalanx.transforms.blocks import blocks, named, wrap

_ATEN = torch.ops.aten
KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._scaled_mm.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operations whose results "selective" keeps."""


def apply(parts: Sequence[nn.Module], mode: Literal["full", "selective"], every: int = 1) -> str:
    """Make every so manieth block, counted over the whole model, forget its activations; says which."""
    done = []
    for name, block in blocks(parts, f'memory.recompute = "{mode}"').items():
        if _number(name, parts) % every == 0:
            wrap(block, _repeated(block, mode))
            done.append(name)
    kept = "" if mode == "full" else ", all but matrix products and attention"
    return f"{mode}: {named(done)}{kept} computed again in the backward" if done else f"{mode}: no block of this rank"


def _number(name: str, parts: Sequence[nn.Module]) -> int:
    """A block's place in the whole model, so that the layout does not decide which blocks recompute."""
    kind, number, *_ = name.split(".")
    layers: int = getattr(parts[0].spec, "layers", 0) if kind == "mtp" else 0
    return int(number) + layers


def _repeated(block: nn.Module, mode: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    counters = [module for module in block.modules() if hasattr(module, "counting")]
    block.work = None  # type: ignore[assignment]  # whoever counts operations, while somebody does: see `observe/counters`

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if mode == "full":
            return nullcontext(), _Again(block, counters)
        keep = _Keep()
        return keep, _Again(block, counters, _Replay(keep.results))

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def repeated(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        return repeated

    return around


class _Again:
    """Around a repeated forward: routers have counted its tokens already, and who counts operations is told."""

    def __init__(self, block: nn.Module, counters: Sequence[nn.Module], inner: AbstractContextManager[Any] | None = None):
        self._work: Any = block.work
        self._counters, self._inner = counters, inner

    def __enter__(self) -> None:
        if self._work is not None:
            self._work.again += 1
        for module in self._counters:
            module.counting = False  # type: ignore[assignment]
        if self._inner is not None:
            self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._inner is not None:
            self._inner.__exit__(*error)
        for module in self._counters:
            module.counting = True  # type: ignore[assignment]
        if self._work is not None:
            self._work.again -= 1


class _Keep(TorchDispatchMode):
    """Around a first forward: notes the results of the operations that are kept.

    torch has such a pair of its own, which allows one backward only and stumbles where autocast has cached a weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[Any, Any, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in KEPT:
            # Aliases: autograd is about to hang its graph, which must not keep itself alive, on what is returned.
            self.results.append((func, tree_map_only(Tensor, _alias, out), _versions(out)))
        return out


class _Replay(TorchDispatchMode):
    """Around a repeated forward: gives back what was kept, in the same order."""

    def __init__(self, results: list[tuple[Any, Any, int]]):
        super().__init__()
        self._results, self._next = results, 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KEPT:
            return func(*args, **(kwargs or {}))
        kept, out, versions = self._results[self._next] if self._next < len(self._results) else (None, None, 0)
        self._next += 1
        if kept is not func or versions != _versions(out):
            how = "did not do the same operations again" if kept is not func else f"changes the result of {func} in place"
            raise RunFailed(f'memory.recompute = "selective" cannot be: a block {how}; use "full" or "none".')
        return tree_map_only(Tensor, _alias, out)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory and the same count of changes in place, without a place in any graph."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(out: Any) -> int:
    """How often the tensors of a result have been changed in place."""
    return sum(part._version for part in (out if isinstance(out, tuple) else (out,)) if isinstance(part, Tensor))
