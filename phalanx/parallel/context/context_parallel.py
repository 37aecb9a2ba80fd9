"""Context parallelism: the ranks of a group share every sequence, and only attention needs what the others hold. Three ways:

    ring      keys and values travel round the ranks (`parallel/context/ring`); any length, any number of heads
    gather    every rank gathers all keys and values; two collectives, memory of the whole sequence's keys
    ulysses   positions are traded for heads: each rank attends over the whole sequence with its share of the heads

`parallel/apply` swaps the models' `attend` for one of these; the loader cuts sequences as `places` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.parallel.context.kernels import wide
from phalanx.parallel.context.mask import View
from phalanx.parallel.context.online_softmax import KVTransport, Task, Visit, VisitBack, attend
from phalanx.parallel.context.ring import Ring, halves
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh


class Scope(Protocol):
    """What a model says about which keys a query may see, beside the order of positions."""

    @property
    def documents(self) -> Tensor | None:
        """[B, S] over the whole sequence; None: one document per sequence."""


def places(length: int, count: int, index: int, method: str) -> npt.NDArray[np.int64]:
    """Which positions of a sequence the index-th of `count` ranks holds, in its order."""
    if method == "ulysses":
        assert length % count == 0, f"{count} ranks cannot share {length} positions evenly"
        return np.arange(length // count, dtype=np.int64) + index * (length // count)
    assert length % (2 * count) == 0, f"{count} ranks cannot share {length} positions in {2 * count} equal pieces"
    pieces = np.arange(length, dtype=np.int64).reshape(2 * count, -1)
    return pieces[list(halves(index, count))].reshape(-1)


def swap(parts: list[nn.Module], mesh: Mesh, method: str) -> str:
    """Let every attention of these models reach over the context group. Returns what was done."""
    group = mesh.group("context", use="context")
    shared = Ulysses(group) if method == "ulysses" else Parted(Ring(group) if method == "ring" else Gathered(group), group.size)
    # Between two compiled pieces of a block it runs as it stands: messages between ranks are no part of a graph.
    install = torch.compiler.disable(shared.__call__)
    names = []
    for part in parts:
        for name, module in part.named_modules():
            if not hasattr(module, "attend"):
                continue
            holder, seat = module, "attend"
            while hasattr(getattr(holder, seat), "inner"):  # whoever wraps it keeps doing so
                holder, seat = getattr(holder, seat), "inner"
            setattr(holder, seat, install)
            names.append(name)
    where = f"{len(names)} attentions ({names[0]} … {names[-1]})" if names else "no attention in this stage"
    return f"{where}: {shared.words}, {group.size} ranks {group.ranks} share each sequence"


class Parted:
    """Queries stay where they are; keys and values are carried to them. Serves any number of batches at a time."""

    def __init__(self, carrier: KVTransport, count: int):
        self._carrier, self._count = carrier, count
        self._views = _Views(2 * count)

    @property
    def words(self) -> str:
        kind = "keys and values gathered" if isinstance(self._carrier, Gathered) else "keys and values passed round a ring"
        return f"{kind}, queries of pieces {' and '.join(map(str, self._carrier.pieces))} of {2 * self._count} here"

    def __call__(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, scope: Scope, scale: float | None = None, /) -> Tensor:
        q, k, v = _in_one_format(q_BHSE, k_BKSE, v_BKSE)
        view = self._views.of(scope, q.shape[2] * self._count)
        return attend(q, k, v, Task(self._carrier, view, _scale(q, scale)))


class Gathered:
    """All keys and values at once. They are gathered again in the backward rather than kept until then."""

    def __init__(self, group: Group):
        self._group = group
        self.pieces: tuple[int, ...] = halves(group.index, group.size)

    def there(self, k: Tensor, v: Tensor, visit: Visit) -> None:
        visit(range(2 * self._group.size), *self._all(k, v))

    def back(self, k: Tensor, v: Tensor, visit: VisitBack) -> tuple[Tensor, Tensor]:
        whole = self._all(k, v)
        widths = k.shape[-1], v.shape[-1]
        gradients = torch.zeros(*whole[0].shape[:3], sum(widths), dtype=wide(k.dtype), device=k.device)
        dk, dv = gradients.split(widths, dim=-1)
        visit(range(2 * self._group.size), whole, (dk, dv))
        held, _ = self._orders()
        dk, dv = self._group.reduce_scatter(_pieces(gradients, held), 2).split(widths, dim=-1)
        return dk, dv

    def _all(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """In natural order; both with one collective."""
        _, natural = self._orders()
        both = _pieces(self._group.all_gather(torch.cat((k, v), dim=-1), 2), natural)
        k, v = both.split((k.shape[-1], v.shape[-1]), dim=-1)
        return k, v

    def _orders(self) -> tuple[list[int], list[int]]:
        """The pieces as the ranks hold them, and where in that order each piece of the sequence is."""
        held = [piece for index in range(self._group.size) for piece in halves(index, self._group.size)]
        return held, [held.index(piece) for piece in range(len(held))]


def _pieces(x_BKSE: Tensor, order: Sequence[int]) -> Tensor:
    """The equal pieces of a sequence in another order."""
    pieces = x_BKSE.chunk(len(order), dim=2)
    return torch.cat([pieces[number] for number in order], dim=2)


class Ulysses:
    """Each rank attends over the whole sequence with its share of the heads; two exchanges turn one into the other."""

    def __init__(self, group: Group):
        self._group = group
        self._views = _Views(1)
        self.words = "heads exchanged for positions"

    def __call__(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, scope: Scope, scale: float | None = None, /) -> Tensor:
        q, k, v = _in_one_format(q_BHSE, k_BKSE, v_BKSE)
        count = self._group.size
        assert q.shape[1] % count == 0, f"{count} ranks cannot share {q.shape[1]} heads evenly"
        # Every rank needs the same number of key heads, each serving as many of its query heads: repeated until it fits.
        again = math.lcm(k.shape[1], count) // k.shape[1]
        if again > 1:
            k, v = k.repeat_interleave(again, 1), v.repeat_interleave(again, 1)
        q, k, v = self._to_heads(q, k, v)
        view = self._views.of(scope, q.shape[2])
        if view.documents is None:
            return self._to_positions(_causal(q, k, v, scale))
        return self._to_positions(attend(q, k, v, Task(_Here(), view, _scale(q, scale))))

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """[B, H, S/c, E] of each to [B, H/c, S, E], all in one message to each rank."""
        count = self._group.size
        shares = [x.unflatten(1, (count, -1)).movedim(1, 0) for x in tensors]  # [c, B, H/c, S/c, E]
        sizes = [share[0].numel() for share in shares]
        rows = torch.cat([share.flatten(1) for share in shares], dim=1)
        taken = self._group.exchange(rows, [1] * count, [1] * count).split(sizes, dim=1)
        return [
            part.view(count, *share.shape[1:]).movedim(0, 2).flatten(2, 3) for part, share in zip(taken, shares, strict=True)
        ]

    def _to_positions(self, x_BHSE: Tensor) -> Tensor:
        """[B, H/c, S, E] to [B, H, S/c, E]."""
        count = self._group.size
        rows = x_BHSE.unflatten(2, (count, -1)).movedim(2, 0)  # [c, B, H/c, S/c, E]
        taken = self._group.exchange(rows.contiguous(), [1] * count, [1] * count)
        return taken.movedim(0, 1).flatten(1, 2)


class _Here:
    """Keys and values that need no carrying."""

    pieces: tuple[int, ...] = (0,)

    def there(self, k: Tensor, v: Tensor, visit: Visit) -> None:
        visit(self.pieces, k, v)

    def back(self, k: Tensor, v: Tensor, visit: VisitBack) -> tuple[Tensor, Tensor]:
        dk, dv = (torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (k, v))
        visit(self.pieces, (k, v), (dk, dv))
        return dk, dv


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    missing = q.shape[-1] - v.shape[-1]
    if missing > 0 and q.device.type == "cpu":  # CPUs have the kernel that keeps no table of scores for one width only
        return _causal(q, k, F.pad(v, (0, missing)), scale)[..., :-missing]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


class _Views:
    """What each batch's scope means for the pieces: worked out once, by the first block, and forgotten with the scope."""

    def __init__(self, pieces: int):
        self._pieces = pieces
        self._known: WeakKeyDictionary[Any, View] = WeakKeyDictionary()

    def of(self, scope: Scope, length: int) -> View:
        found = self._known.get(scope)
        if found is None or found.length != length:
            documents = scope.documents
            assert documents is None or documents.shape[1] == length, "documents are told of the whole sequence"
            found = self._known[scope] = View(length, self._pieces, documents)
        return found


def _in_one_format(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As attention on one device does by itself: where matrix products are in bf16, so are these."""
    assert q.shape[2] == k.shape[2], "each rank has the keys of its own queries' positions"
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v
