"""Tokens on their way to experts that lie on several ranks, and back. `parallel/expert` puts it in place of a layer's dispatch.

A layer's own dispatch sorts tokens by expert, hands the rows to its experts and adds up what comes back. All that changes here
is whom it hands them to: `Spread` looks like the experts of one device.

    rows, sorted by expert      of this rank's own tokens
      exchange over `across`    each row to one of the ranks that hold its expert
      gather over `within`      and from there to the others, which hold other slices of the same expert
      order by expert           stable: sources in the order of ranks
      experts
      back the same way         parts of an output are added where the row came to, in the order of ranks

So a row crosses the far links once each way, however many ranks share an expert, and ranks may have any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.group import Group

# Shapes: R rows (one per token and chosen expert), E experts of the layer, L of them on this rank, P ranks of `across`,
# Q of `within`.


@dataclass(frozen=True, slots=True)
class Seats:
    """The ranks that hold all experts of a layer between them, as this one sees them."""

    across: Group
    """They hold other experts."""
    within: Group
    """They hold other slices of this rank's experts."""
    everyone: Group
    """All of them, `within` running fastest."""


class Dispatch:
    """A layer's own dispatch, given experts that are spread over ranks."""

    def __init__(self, local: Callable[..., Tensor], count: int, seats: Seats):
        """`count`: experts of the layer, on all ranks together."""
        self._local, self._count, self.seats = local, count, seats

    def __call__(self, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: Callable[..., Tensor], /) -> Tensor:
        return self._local(x_TD, chosen_TK, weights_TK, Spread(experts, self._count, self.seats))


class Spread:
    """All experts of a layer, some of them on this rank. Called like theirs: rows sorted by expert, and how many each gets.

    It keeps nothing from one call to the next, so a forward may be repeated for its backward. All ranks call it together;
    one that gets no row takes part like the others, and its experts a gradient of zero.
    """

    def __init__(self, own: Callable[..., Tensor], count: int, seats: Seats):
        self._own, self.count, self._seats = own, count, seats

    def __call__(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        across, within = self._seats.across, self._seats.within
        traffic = _agree(counts_E, self._seats, len(x_RD))
        x_RD = across.exchange(x_RD, traffic.given, traffic.taken)
        x_RD = _gather(x_RD, within, traffic.sizes)
        order_R, back_R = traffic.order()
        y_RD = self._own(_Reorder.apply(x_RD, order_R, back_R), traffic.counts_QPL.sum((0, 1)))
        y_RD = _scatter(_Reorder.apply(y_RD, back_R, order_R), within, traffic.sizes)
        return across.exchange(y_RD, traffic.taken, traffic.given)


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Who sends how many rows to whom in one layer."""

    given: list[int]
    """From this rank to each of `across`."""
    taken: list[int]
    """From each of `across` to this rank."""
    sizes: list[int]
    """That each of `within` has taken."""
    counts_QPL: Tensor
    """Rows for each expert of this rank, by where they come from and in the order that they lie in."""

    def order(self) -> tuple[Tensor, Tensor]:
        """Brings the rows, all experts of one source behind those of another, into the order of experts; and back."""
        counts_QPL, device = self.counts_QPL, self.counts_QPL.device
        experts_QPL = torch.arange(counts_QPL.shape[-1], device=device).expand_as(counts_QPL)
        # With its length given, the GPU need not be asked for it.
        experts_R = experts_QPL.flatten().repeat_interleave(counts_QPL.flatten(), output_size=sum(self.sizes))
        order_R = experts_R.argsort(stable=True)
        back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=device))
        return order_R, back_R


def _agree(counts_E: Tensor, seats: Seats, rows: int) -> _Traffic:
    """Tell every rank how many rows its experts get from this one: one small exchange.

    Messages have their lengths on the host. On a GPU it waits here for the counts to be known: once in a layer's forward, never
    in a backward.
    """
    across, within, everyone = seats.across, seats.within, seats.everyone
    counts_PL = counts_E.view(across.size, -1)
    ones = [1] * everyone.size
    counts_PQL = everyone.all_to_all(counts_PL.repeat_interleave(within.size, 0), ones, ones).view(across.size, within.size, -1)
    taken_P, sizes_Q = counts_PQL[:, within.index].sum(-1), counts_PQL.sum((0, 2))
    known = read(torch.cat((counts_PL.sum(-1), taken_P, sizes_Q)), seats, rows)
    given, taken, sizes = known[: across.size], known[across.size : -within.size], known[-within.size :]
    return _Traffic(given, taken, sizes, counts_PQL.transpose(0, 1))


def read(counts: Tensor, seats: Seats, rows: int) -> list[int]:
    """Counts on the host: rows for each of `across`, rows from each of them, rows that each of `within` has. A rehearsal, whose
    tensors hold no numbers, puts its assumption in the place of this function."""
    return list(counts.tolist())


def _gather(x_RD: Tensor, group: Group, sizes: list[int]) -> Tensor:
    """The rows of all, of whom each has another number: a collective that wants equal parts could not."""
    if group.size == 1:
        return x_RD
    return group.exchange(x_RD.repeat(group.size, 1), [len(x_RD)] * group.size, sizes)


def _scatter(y_RD: Tensor, group: Group, sizes: list[int]) -> Tensor:
    """This rank's rows of the sum over the group; the other way round of `_gather`."""
    if group.size == 1:
        return y_RD
    own = sizes[group.index]
    return group.exchange(y_RD, sizes, [own] * group.size).view(group.size, own, y_RD.shape[1]).sum(0)


class _Reorder(torch.autograd.Function):
    """Rows in another order. Its backward takes them from there too: indexing's own would add to zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.saved_tensors[0]], None, None
