"""Small decoders of every kind, changed by one-device techniques before they get their memory, as placing does it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.models.init import build, materialize
from phalanx.models.moe import routers
from phalanx.observe.counters import FlopCounter, count_flops
from phalanx.spec.model import PRESETS, ModelSpec
from phalanx.transforms.precision import LossScale, computing

Result = TypeVar("Result")

CPU = torch.device("cpu")
KINDS = {
    "dense": replace(PRESETS["tiny-dense"], vocab=257),
    "moe": replace(PRESETS["tiny-moe"], vocab=257),
    "mla": replace(PRESETS["tiny-mla"], vocab=257, mtp_depth=1),
    "gpt": ModelSpec(
        vocab=257, dim=64, layers=2, heads=4, norm="layer", activation="gelu", positions="learned", bias=True, context=64
    ),
}
Change = Callable[[list[nn.Module]], object]


def made(spec: ModelSpec, *changes: Change) -> nn.Module:
    """A model with its initial weights; each change is made while it has no memory yet."""
    model = build(spec)
    for change in changes:
        change([model])
    return materialize(model, 0, CPU)


def batch(length: int = 48, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions, and the documents that they belong to: two in each row."""
    dice = torch.Generator().manual_seed(1)
    documents = (torch.arange(length) > length // 3).long().expand(rows, length)
    return torch.randint(0, 257, (rows, length), generator=dice), torch.arange(length).expand(rows, length), documents


def loss(model: nn.Module, compute: str = "fp32", length: int = 48, rows: int = 2) -> Tensor:
    tokens, positions, documents = batch(length, rows)
    with computing(compute, CPU):
        logits = model(tokens, positions, documents)
    several = logits if isinstance(logits, tuple) else (logits,)
    return torch.stack([F.cross_entropy(one.flatten(0, 1).float(), tokens.flatten()) for one in several]).sum()


def learned(model: nn.Module, compute: str = "fp32") -> dict[str, Tensor]:
    """Loss, every gradient and every router's counts after two backwards."""
    model.zero_grad()
    for _ in range(2):
        value = loss(model, compute)
        value.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return {"loss": value.detach()} | found | {f"{name} counts": router.counts for name, router in routers(model).items()}


@functools.cache
def learned_plainly(kind: str, compute: str) -> dict[str, Tensor]:
    return learned(made(KINDS[kind]), compute)


def trained(model: nn.Module, compute: str, steps: int) -> float:
    """Mean loss of the last twenty steps on letters each of which has four that may follow, at random. fp16's loss is scaled."""
    dice = random.Random(0)
    after = [dice.sample(range(16), 4) for _ in range(16)]

    def line() -> list[int]:
        return list(accumulate(range(64), lambda letter, _: dice.choice(after[letter]), initial=dice.randrange(16)))

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    scale, losses = LossScale.of(compute, 1024.0), []
    for _ in range(steps):
        rows = torch.tensor([line() for _ in range(4)])
        with computing(compute, CPU):
            logits = model(rows[:, :-1], torch.arange(64).expand(4, 64))
        value = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        (value * scale.value).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale.value
        optimizer.step()
        losses.append(value.item())
    return sum(losses[-20:]) / 20


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names whose tensors differ in any bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest relative difference of two tensors of the same name."""
    assert one.keys() == other.keys()
    return max(((one[n].float() - other[n].float()).norm() / other[n].float().norm().clamp(min=1e-30)).item() for n in other)


def flops(work: Callable[[], Any], parts: list[nn.Module] | None = None) -> FlopCounter:
    """What `work` computes."""
    with count_flops(parts or []) as found:
        work()
    return found


def kept(work: Callable[[], Result]) -> tuple[Result, int]:
    """What `work` returns, and the bytes of all memory made in it that is still held after it.

    After a forward, with its result in hand, that is what waits for the backward. On any device, and by whoever it is held.
    """
    with _Watch() as watch:
        result = work()
    return result, watch.alive()


class _Watch(TorchDispatchMode):
    """Sees every tensor made, and knows its memory without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self._note(out, made=True)
        return out

    def _note(self, tree: Any, made: bool) -> None:
        """What an operation is given before any has made it, such as a parameter, was there before the work and counts nothing."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                # While a weak reference lives its number is not given to another, so that each memory is counted once.
                self._sizes.setdefault(StorageWeakRef(storage), storage.nbytes() if made else 0)

    def alive(self) -> int:
        return sum(size for reference, size in self._sizes.items() if not reference.expired())
