"""Ring attention: every rank's keys and values travel once round the ring of ranks, and meet each rank's queries on the way. While
one part is attended to, the next is already under way. A way of keys to queries for `parallel/context/online_softmax`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.observe.comm_timer import wait
from phalanx.parallel.context.kernels import wide
from phalanx.parallel.context.online_softmax import Visit, VisitBack
from phalanx.parallel.group import Group

_KEYS, _GRADIENTS = 0, 1  # tags: two kinds of messages are under way between two ranks at a time


def halves(index: int, count: int) -> tuple[int, int]:
    """Which 2 of 2 * count pieces of a sequence are a rank's: an early and a late one, so that all ranks have the same to do.

    With another rank's keys that is always half of all products: both pieces against their early one if that rank comes
    before, the late piece against both of theirs if it comes after.
    """
    return index, 2 * count - 1 - index


class Ring:
    """Of the ranks of a group, each sending to the next. It keeps nothing between calls."""

    def __init__(self, group: Group):
        self._group = group
        self.pieces: tuple[int, ...] = halves(group.index, group.size)

    def there(self, k: Tensor, v: Tensor, visit: Visit) -> None:
        message = _pack(k, v)
        for step in range(self._group.size):
            hop = self._start(message, _KEYS) if step < self._group.size - 1 else None
            visit(self._origin(step), *_unpack(message, k, v))
            if hop is not None:
                message = hop.wait()

    def back(self, k: Tensor, v: Tensor, visit: VisitBack) -> tuple[Tensor, Tensor]:
        message = _pack(k, v)
        home: _Hop | None = None
        for step in range(self._group.size):
            hop = self._start(message, _KEYS) if step < self._group.size - 1 else None
            # The sum of what the ranks before have added arrives while this rank computes what it adds.
            gradients = torch.zeros(message.numel(), dtype=wide(k.dtype), device=k.device)
            visit(self._origin(step), _unpack(message, k, v), _unpack(gradients, k, v))
            if home is not None:
                gradients += home.wait()
            home = self._start(gradients, _GRADIENTS)
            if hop is not None:
                message = hop.wait()
        assert home is not None
        return _unpack(home.wait(), k, v)  # after the last rank there is one more hop, to the owner

    def _origin(self, step: int) -> tuple[int, int]:
        """The pieces that have come to this rank after so many hops."""
        return halves((self._group.index - step) % self._group.size, self._group.size)

    def _start(self, message: Tensor, tag: int) -> _Hop:
        return _Hop(message, tag, self._group)


class _Hop:
    """A message to the next rank, and one of the same kind from the rank before, under way."""

    def __init__(self, sent: Tensor, tag: int, group: Group):
        self._sent = sent  # until it has left
        self._works: list[dist.Work] = []
        self._peers: tuple[int, ...] = ()
        self._taken = sent
        self._group = group
        if group.handle is None:
            return
        self._taken = torch.empty_like(sent)
        after, before = self._peers = group.ranks[(group.index + 1) % group.size], group.ranks[group.index - 1]
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, group.handle, tag),
                dist.P2POp(dist.irecv, self._taken, before, group.handle, tag),
            ]
        )

    def wait(self) -> Tensor:
        """What has come."""
        # A backend may make one work of both; what is waited for then is what comes.
        for work, peer in zip(self._works, self._peers[-len(self._works) :], strict=True):
            wait(work, self._group, peer)
        return self._taken


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Both in one message."""
    return torch.cat((k.flatten(), v.flatten()))


def _unpack(message: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message, shaped like k and v."""
    return message[: k.numel()].view(k.shape), message[k.numel() :].view(v.shape)
