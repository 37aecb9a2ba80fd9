"""Context parallelism: the ranks of a group share every sequence; only attention needs the other ranks' positions. Three methods:

    ring      keys and values travel around the ranks; any length, any number of heads
    gather    every rank gathers all keys and values; two collectives, and memory for the keys of the whole sequence
    ulysses   heads are exchanged for positions: each rank attends over the whole sequence with its share of the heads

`parallel/apply` replaces the models' `attend` by one of these; training cuts sequences as `rank_positions` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels.partial_attention import Scoring, wide
from phalanx.observe.comm_timer import began, wait
from phalanx.parallel.context.online_softmax import KVTransport, MaskPlan, Part, VisitBack, attend
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Environment, Mesh
from phalanx.parallel.tensor import computed

_KEYS, _GRADIENTS = 0, 1  # tags: two kinds of messages travel between two ranks at a time


class Scope(Protocol):
    """Which keys a query may see, besides the order of positions."""

    @property
    def documents(self) -> Tensor | None:
        """[B, S] over the whole sequence; None: one document per sequence."""

    @property
    def window(self) -> int | None:
        """The most keys that a query sees; None: no limit."""


def rank_positions(length: int, count: int, index: int, method: str) -> npt.NDArray[np.int64]:
    """The positions of a sequence that the index-th of `count` ranks holds, in its order."""
    if method == "ulysses":
        assert length % count == 0, f"{count} ranks cannot share {length} positions evenly"
        return np.arange(length // count, dtype=np.int64) + index * (length // count)
    assert length % (2 * count) == 0, f"{count} ranks cannot share {length} positions in {2 * count} equal pieces"
    pieces = np.arange(length, dtype=np.int64).reshape(2 * count, -1)
    return pieces[list(piece_pair(index, count))].reshape(-1)


def piece_pair(index: int, count: int) -> tuple[int, int]:
    """The 2 of 2 * count pieces of a sequence that a rank holds: an early and a late one, so that all ranks have equal work.

    With another rank's keys, a rank always computes half of all products: both its pieces against their early one if that rank
    comes before, its late piece against both of theirs if it comes after.
    """
    return index, 2 * count - 1 - index


def swap(parts: list[nn.Module], mesh: Mesh, method: str) -> str:
    """Replace every attention of these models by one over the context group. Returns what was done."""
    group = mesh.group("context", use="context")
    if method == "ulysses":
        shared: SharedAttention = Ulysses(group, mesh.environment, KVTransport())
        words = "heads exchanged for positions"
    else:
        transport: Ring | AllGather = Ring(group) if method == "ring" else AllGather(group)
        shared = SharedAttention(group, mesh.environment, transport)
        first, second = transport.pieces
        words = f"keys and values {transport.words}, queries of pieces {first} and {second} of {transport.count} here"
    # It runs uncompiled between two compiled pieces of a block: messages between ranks are not part of a graph.
    attend_shared = torch.compiler.disable(shared.__call__)
    names = []
    for part in parts:
        for name, module in part.named_modules():
            if not hasattr(module, "attend"):
                continue
            holder, attribute = module, "attend"
            while hasattr(wrapper := getattr(holder, attribute), "inner"):  # wrappers stay; the innermost attention is replaced
                holder, attribute = wrapper, "inner"
            setattr(holder, attribute, attend_shared)
            names.append(name)
    where = f"{len(names)} attentions ({names[0]} … {names[-1]})" if names else "no attention in this stage"
    return f"{where}: {words}, {group.size} ranks {group.ranks} share each sequence"


class SharedAttention:
    """Attention in which queries stay and keys and values travel. It may serve several batches at a time."""

    def __init__(self, group: Group, environment: Environment, transport: KVTransport):
        self._group, self._environment, self._transport = group, environment, transport
        self._plans: WeakKeyDictionary[Any, MaskPlan] = WeakKeyDictionary()
        """By a batch's scope: computed once, by the first block, and freed with the scope."""

    def __call__(
        self,
        q_BHSE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        scope: Scope,
        /,
        *scoring: Any,
    ) -> Tensor:
        q, k, v = (computed(x) for x in (q_BHSE, k_BKSE, v_BKSE))
        return attend(q, k, v, self._transport, self._plan(scope, q.shape[2] * self._group.size), Scoring(*scoring))

    def _plan(self, scope: Scope, length: int) -> MaskPlan:
        plan = self._plans.get(scope)
        if plan is None or plan.length != length:
            documents = scope.documents
            assert documents is None or documents.shape[1] == length, "documents cover the whole sequence"
            # The only time that the host waits for the documents: a plan serves all blocks of a model.
            known = None if documents is None else self._environment.document_ids(documents)
            plan = self._plans[scope] = MaskPlan(length, self._transport.count, documents, known, scope.window)
        return plan


class Ring(KVTransport):
    """Ring attention: every rank's keys and values travel once around the ranks. While a rank attends to one part, the next is
    on its way. Keeps no state between calls."""

    words = "passed round a ring"

    def __init__(self, group: Group):
        self._group, self.pieces, self.count = group, piece_pair(group.index, group.size), 2 * group.size

    def forward(self, k: Tensor, v: Tensor) -> Iterator[Part]:
        message = torch.cat((k.flatten(), v.flatten()))
        for step in range(self._group.size):
            hop = _Hop(message, _KEYS, self._group) if step < self._group.size - 1 else None
            # After this many hops, the pieces of the rank that many places before are here.
            yield piece_pair((self._group.index - step) % self._group.size, self._group.size), *_unpack(message, k, v)
            if hop is not None:
                message = hop.wait()

    def backward(self, k: Tensor, v: Tensor, visit: VisitBack) -> tuple[Tensor, Tensor]:
        summed: _Hop | None = None
        for part in self.forward(k, v):
            # The sum over the previous ranks arrives while this rank computes its own term.
            gradients = torch.zeros(k.numel() + v.numel(), dtype=wide(k.dtype), device=k.device)
            visit(part, *_unpack(gradients, k, v))
            if summed is not None:
                gradients += summed.wait()
            summed = _Hop(gradients, _GRADIENTS, self._group)
        assert summed is not None
        return _unpack(summed.wait(), k, v)  # one more hop after the last rank, to the owner


class _Hop:
    """A message to the next rank, and one of the same kind from the previous rank, in flight."""

    def __init__(self, sent: Tensor, tag: int, group: Group):
        self._sent = group.outgoing(sent)  # keeps the memory until it is sent
        self._received = group.incoming(sent.shape, sent.dtype, sent.device)
        self._group, self._device = group, sent.device
        after, before = self._peers = group.ranks[(group.index + 1) % group.size], group.ranks[group.index - 1]
        send = dist.P2POp(dist.isend, self._sent, after, group.handle, tag)
        receive = dist.P2POp(dist.irecv, self._received, before, group.handle, tag)
        self._works = dist.batch_isend_irecv([send, receive])
        began(self._works[-1], group.handle, "ring", "gradients" if tag == _GRADIENTS else "keys and values")

    def wait(self) -> Tensor:
        # A backend may return one work for both; then it is the one of the receive.
        for work, peer in zip(self._works, self._peers[-len(self._works) :], strict=True):
            wait(work, self._group, peer)
        return self._group.received(self._received, self._device)


def _unpack(message: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message, shaped like k and v."""
    return message[: k.numel()].view(k.shape), message[k.numel() :].view(v.shape)


class AllGather(KVTransport):
    """Gathers all keys and values at once, and again in the backward instead of keeping them."""

    words = "gathered"

    def __init__(self, group: Group):
        self._group, self.pieces, self.count = group, piece_pair(group.index, group.size), 2 * group.size
        self._by_rank = [piece for index in range(group.size) for piece in piece_pair(index, group.size)]

    def forward(self, k: Tensor, v: Tensor) -> Iterator[Part]:
        """All in natural order, with one collective."""
        natural = [self._by_rank.index(piece) for piece in range(len(self._by_rank))]
        both = _pieces(self._group.all_gather(torch.cat((k, v), dim=-1), 2), natural)
        k, v = both.split((k.shape[-1], v.shape[-1]), dim=-1)
        yield range(self.count), k, v

    def backward(self, k: Tensor, v: Tensor, visit: VisitBack) -> tuple[Tensor, Tensor]:
        [part] = self.forward(k, v)
        widths = k.shape[-1], v.shape[-1]
        gradients = torch.zeros(*part[1].shape[:3], sum(widths), dtype=wide(k.dtype), device=k.device)
        visit(part, *gradients.split(widths, dim=-1))
        dk, dv = self._group.reduce_scatter(_pieces(gradients, self._by_rank), 2).split(widths, dim=-1)
        return dk, dv


def _pieces(x_BKSE: Tensor, order: Sequence[int]) -> Tensor:
    """A sequence with its equal pieces in another order."""
    pieces = x_BKSE.chunk(len(order), dim=2)
    return torch.cat([pieces[number] for number in order], dim=2)


class Ulysses(SharedAttention):
    """Each rank attends over the whole sequence with its share of the heads: one all-to-all before attention, one after it."""

    def __call__(
        self,
        q_BHSE: Tensor,
        k_BKSE: Tensor,
        v_BKSE: Tensor,
        scope: Scope,
        /,
        *scoring: Any,
    ) -> Tensor:
        q, k, v = (computed(x) for x in (q_BHSE, k_BKSE, v_BKSE))
        count = self._group.size
        assert q.shape[1] % count == 0, f"{count} ranks cannot share {q.shape[1]} heads evenly"
        # Every rank needs the same number of key heads, each for the same number of query heads: repeat them until they divide.
        again = math.lcm(k.shape[1], count) // k.shape[1]
        if again > 1:
            k, v = k.repeat_interleave(again, 1), v.repeat_interleave(again, 1)
        q, k, v = self._to_heads(q, k, v)
        plan = self._plan(scope, q.shape[2])
        scale, cap, sinks_H = Scoring(*scoring)
        if plan.is_plain and cap is None and sinks_H is None:
            return self._to_positions(_causal(q, k, v, scale))
        own_H = None if sinks_H is None else sinks_H.chunk(count)[self._group.index]
        return self._to_positions(attend(q, k, v, self._transport, plan, Scoring(scale, cap, own_H)))

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """[B, H, S/c, E] of each to [B, H/c, S, E], in one message to each rank."""
        count = self._group.size
        shares = [x.unflatten(1, (count, -1)).movedim(1, 0) for x in tensors]  # [c, B, H/c, S/c, E]
        sizes = [share[0].numel() for share in shares]
        rows = torch.cat([share.flatten(1) for share in shares], dim=1)
        received = self._group.exchange(rows, [1] * count, [1] * count).split(sizes, dim=1)
        return [
            part.view(count, *share.shape[1:]).movedim(0, 2).flatten(2, 3) for part, share in zip(received, shares, strict=True)
        ]

    def _to_positions(self, x_BHSE: Tensor) -> Tensor:
        """[B, H/c, S, E] to [B, H, S/c, E]."""
        count = self._group.size
        rows = x_BHSE.unflatten(2, (count, -1)).movedim(2, 0)  # [c, B, H/c, S/c, E]
        received = self._group.exchange(rows.contiguous(), [1] * count, [1] * count)
        return received.movedim(0, 1).flatten(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    missing = q.shape[-1] - v.shape[-1]
    if missing > 0 and q.device.type == "cpu":  # the CPU kernel without a score table needs one width
        return _causal(q, k, F.pad(v, (0, missing)), scale)[..., :-missing]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
