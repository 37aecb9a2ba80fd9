"""A CutPlan applied to a model as its fields say, with a thread for each rank: small enough to be read against the plan's definition. Imported by
tests as `cut_threads`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.parallel.tensor import KvSelect
from phalanx.spec.cut_plan import CutPlan, ParamCut
from phalanx.spec.tensor_slice import chunk
from phalanx.tracing.infer_cuts import part_graphs
from phalanx.tracing.part_graph import PartGraph


class Group:
    """Ranks that are threads. Every collective is called by all of them in the same order."""

    def __init__(self, ranks: int):
        self.ranks, self.barrier = ranks, threading.Barrier(ranks, timeout=60)
        self.given: list[Any] = [None] * ranks
        self.sums = 0

    def all(self, rank: int, value: Tensor) -> list[Tensor]:
        self.given[rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def sum(self, rank: int, value: Tensor) -> Tensor:
        return torch.stack(self.all(rank, value.detach())).sum(0)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.ranks
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        broken = (threading.BrokenBarrierError,)
        for error in sorted(errors, key=lambda e: isinstance(e, broken)):
            raise error
        return results


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rank: int) -> Tensor:
        ctx.group, ctx.rank = group, rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.sum(ctx.rank, gradient), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rank: int) -> Tensor:
        if rank == 0:
            group.sums += 1
        return group.sum(rank, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


class _Gather(torch.autograd.Function):
    """Of logits cut by the vocabulary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rank: int) -> Tensor:
        ctx.group, ctx.rank = group, rank
        return torch.cat(group.all(rank, x.detach()), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.chunk(ctx.group.ranks, -1)[ctx.rank], None, None


def own_part(whole: Tensor, cut: ParamCut, rank: int, ranks: int) -> Tensor:
    return torch.cat([piece.chunk(ranks, cut.dim)[rank] for piece in whole.split(list(cut.sizes), cut.dim)], cut.dim)


def losses(
    model: nn.Module, plan: CutPlan, tokens: Tensor, targets: Tensor
) -> tuple[list[Tensor], list[dict[str, Tensor]], int]:
    """Loss and gradients on every rank, those of whole parameters complete, and the sums over the ranks of a forward."""
    group = Group(plan.ranks)
    graphs = part_graphs(model, plan)
    parts = [applied(copy.deepcopy(model), plan, graphs, group, rank) for rank in range(plan.ranks)]

    def work(rank: int) -> Tensor:
        logits = parts[rank](tokens, positions(tokens))
        if logits.shape[-1] != model_vocabulary(model):
            logits = _Gather.apply(logits, group, rank)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        return loss.detach()

    found = group.run(work)
    gradients = [{name: p.grad for name, p in part.named_parameters() if p.grad is not None} for part in parts]
    for name in plan.partial:
        given = [each[name] for each in gradients if name in each]
        for each in gradients:
            each[name] = torch.stack(given).sum(0)
    return found, gradients, group.sums


def positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens).clone()


def model_vocabulary(model: nn.Module) -> int:
    return next(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))


def applied(model: nn.Module, plan: CutPlan, graphs: dict[str, PartGraph], group: Group, rank: int) -> nn.Module:
    """This rank's part of a model."""
    _shrink(model, plan, rank)
    for each in plan.divided:
        target: Any = model.get_submodule(each.module)
        *steps, last = each.attribute.split(".")
        for step in steps:
            setattr(target, step, copy.copy(getattr(target, step)))
            target = getattr(target, step)
        setattr(target, last, each.on(rank, plan.ranks))

    def enter(x: Tensor) -> Tensor:
        return _Enter.apply(x, group, rank)

    def leave(x: Tensor) -> Tensor:
        return _Leave.apply(x, group, rank)

    module: Any = model
    if hasattr(model, "project"):
        module.project = lambda x, weight: F.linear(enter(x), weight)
    for path in plan.rewritten:
        module = model.get_submodule(path)
        module.forward = graphs[path].forward(module, rank, enter, leave)
    for path in plan.selects:
        module = model.get_submodule(path)
        module.attend = _Select(module.attend, rank, plan.ranks)
    for seam in plan.leaves:
        module = model.get_submodule(seam.module)
        if isinstance(module, nn.Embedding):
            module.forward = _lookup(module.forward, module, chunk(module.num_embeddings, rank, plan.ranks)[0], leave)
        else:
            module.forward = _once(module.forward, module, leave)
    for entered in plan.enters:
        module = model.get_submodule(entered.module)
        module.register_forward_pre_hook(_entering(entered.argument, enter), with_kwargs=True)
    return model


class _Select:
    """KvSelect, for head counts that are seen when it is called."""

    def __init__(self, inner: Any, rank: int, ranks: int):
        self.inner, self.rank, self.ranks = inner, rank, ranks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        own = q.shape[1]
        heads = range(self.rank * own, (self.rank + 1) * own)
        return KvSelect(self.inner, heads, own * self.ranks // k.shape[1])(q, k, v, *rest)


def _shrink(model: nn.Module, plan: CutPlan, rank: int) -> None:
    first = {id(p): name for name, p in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if (cut := plan.params.get(first[id(parameter)])) is not None:
            part = made.setdefault(id(parameter), nn.Parameter(own_part(parameter.detach(), cut, rank, plan.ranks).clone()))
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, part)


def _entering(argument: int | str, enter: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(argument, int):
            return (*args[:argument], enter(args[argument]), *args[argument + 1 :]), kwargs
        return args, kwargs | {argument: enter(kwargs[argument])}

    return hook


def _once(whole: Callable[..., Any], module: Any, leave: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The bias is added once, after the sum."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        bias = getattr(module, "bias", None)
        if not isinstance(bias, Tensor):
            return leave(whole(*args, **kwargs))
        module._parameters["bias"] = torch.zeros_like(bias)
        part = whole(*args, **kwargs)
        module._parameters["bias"] = bias
        return leave(part) + bias

    return forward


def _lookup(
    whole: Callable[[Tensor], Tensor], module: nn.Embedding, first: int, leave: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    module.padding_idx = None

    def forward(tokens: Tensor) -> Tensor:
        rows = module.weight.shape[0]
        local = tokens - first
        absent = (local < 0) | (local >= rows)
        return leave(whole(local.masked_fill(absent, 0)).masked_fill(absent[..., None], 0.0))

    return forward
