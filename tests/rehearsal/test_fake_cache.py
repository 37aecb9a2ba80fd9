"""Cached results equal torch's own: a rehearsal with the cache has the same events as one without, and operations whose results
shapes do not determine always run in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from ranks import TINY
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.rehearsal import fake_cache, fake_gpu, op_tracker
from phalanx.rehearsal.rehearsed_rank import rehearsed_program
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

FOUR = "model.layers=4"
MOE = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=16", "model.moe.shared=1", "model.moe.router=sigmoid")
MLA = ("model.mla.kv_rank=8", "model.mla.q_rank=16")
CASES: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "dense": (Layout(data=2), ()),
    "zero 1, tensor, sequence": (Layout(data=2, shard=2, zero=1, tensor=2, sequence=True), ()),
    "zero 2, layer norm, fp16": (Layout(data=1, shard=2, zero=2), ("model.norm=layer", "precision.compute=fp16")),
    "zero 3, full": (Layout(data=2, shard=2, zero=3), ("memory.recompute=full",)),
    "zero 3, uneven, bf16 states": (
        Layout(data=1, shard=3, zero=3),
        ("train.batch=3", "model.ffn=20", "precision.optimizer=bf16"),
    ),
    "experts, zero 1": (Layout(data=1, shard=2, zero=1, expert=2), MOE),
    "experts, latent attention, zero 3": (Layout(data=1, shard=4, zero=3, expert=2, expert_tensor=2), (*MOE, *MLA)),
    "latent attention, selective": (Layout(data=2), (*MLA, "memory.recompute=selective")),
    "1f1b, tied, zero 2": (Layout(data=1, pipeline=2, shard=2, zero=2), (FOUR, "model.tied=true")),
    "interleaved, every second": (
        Layout(data=1, pipeline=2, schedule="interleaved-1f1b"),
        (FOUR, "memory.recompute=full", "memory.recompute_every=2"),
    ),
    "zbv, tensor": (Layout(data=1, pipeline=2, tensor=2, schedule="zbv"), (FOUR,)),
    "dualpipev, experts, zero 3": (Layout(data=1, pipeline=2, shard=2, zero=3, expert=2, schedule="dualpipev"), (FOUR, *MOE)),
    "offload": (Layout(data=1, shard=2, zero=2), ("memory.offload=cpu", "memory.loss_chunk=8")),
    "states in files": (Layout(data=2), ("memory.offload=nvme",)),
    "activations on the host, fp8": (Layout(data=2), ("memory.activations=cpu", "precision.compute=fp8")),
    "ring": (Layout(data=1, context=2), ()),
    "ulysses": (Layout(data=1, context=2, context_method="ulysses"), ("data.document_mask=false",)),
    "muon": (Layout(data=1, shard=2, zero=3, tensor=2), ("optimizer.name=muon",)),
    "local steps": (Layout(data=2), ("optimizer.sync_every=2",)),
}
QUICK = ("zero 1, tensor, sequence", "experts, latent attention, zero 3", "dualpipev, experts, zero 3", "muon")


class Plain:
    """In place of the cache: always calls torch."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


def record(run: Run, plan: Plan, card: fake_gpu.Card | None) -> dict[str, Any]:
    """Every event of a step's memory, every message and operation."""
    with rehearsed_program(run, plan, plan.layout.ranks - 1, fake_gpu.RehearsalDevice(card=card)) as (program, seen):
        program.step(plan.accumulation)
        found: dict[str, Any] = {
            "messages": list(seen.messages),
            "flops": dict(seen.flops),
            "repeated": dict(seen.repeated),
        }
        for name, ledger in (("device", seen.device), ("host", seen.host)):
            pieces = [
                (ledger.sizes[number], ledger.origins[number], ledger.components.get(number), ledger.streams[number])
                for number in range(1, len(ledger.sizes))
            ]
            # What goes together, as autocast's copies of weights do, goes in an order that hangs on addresses.
            runs = [sorted(run) if gone else list(run) for gone, run in groupby(ledger.events, lambda event: event < 0)]
            found[name] = runs, pieces
        return found


def compare(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, settings = CASES[case]
    tiny = TINY.replace("kv_heads = 2\n", "")  # latent attention has none
    run = replace(loads(tiny, overrides=("train.micro_batch=1", "train.batch=4", *settings)), layout=layout)
    card = fake_gpu.CARDS["h200"] if case != "zero 3, uneven, bf16 states" else None
    plan = Plan(
        layout=layout,
        device="cuda" if card else "cpu",
        threads=1,
        micro_batch=1,
        accumulation=run.batch // layout.replicas,
        compute=run.precision.compute or ("bf16" if card else "fp32"),
        parameters=0,
        flops_per_token=0.0,
        peak_flops=None,
    )
    made = 0

    def counted(make: Callable[..., fake_cache.Answer]) -> Callable[..., fake_cache.Answer]:
        def maker(*args: Any) -> fake_cache.Answer:
            answer = make(*args)

            def count(given: tuple[Any, ...]) -> Any:
                nonlocal made
                made += 1
                return answer(given)

            return count

        return maker

    for name in ("_new", "_view"):
        monkeypatch.setattr(fake_cache, name, counted(getattr(fake_cache, name)))
    with_it = record(run, plan, card)
    assert made > len(with_it["device"][1]) / 2  # it was used
    monkeypatch.setattr(op_tracker, "FakeCache", Plain)
    without = record(run, plan, card)
    assert len(without["device"][1]) > 100
    for name, found in without.items():
        assert with_it[name] == found, name


@pytest.mark.parametrize("case", QUICK)
def test_rehearsal_with_the_cache_has_the_same_events_as_without(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK])
def test_rehearsal_with_the_cache_has_the_same_events_in_every_other_layout(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(case, monkeypatch)


class Asked(TorchDispatchMode):
    def __init__(self, how: Any):
        super().__init__()
        self.how = how

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.how(func, args, kwargs or {})


def out_is_given(x: Tensor) -> list[Tensor]:
    room = torch.empty(4, 4)
    return [torch.mm(x, x, out=room), room]


def shares(x: Tensor) -> list[Tensor]:
    first, second = x[:2], x[2:]
    alone = torch.empty(4, 4)[:2]
    return [first.view_as(second), first.view_as(alone), alone.view_as(first), torch.broadcast_tensors(alone, first)[0], x]


def changes(x: Tensor) -> list[Tensor]:
    other = torch.empty(4, 4)
    kept = other[1]
    return [x.add_(x), x.add_(other), other.set_(x), kept, torch.empty(3).resize_(9), torch.empty(9).resize_(9), x.t_()]


def numbers(x: Tensor) -> list[Tensor]:
    whole = (x > 0) + 0
    floats = whole * 1.0
    torch.set_default_dtype(torch.float64)
    try:
        return [whole * 1.0, torch.empty(3), floats, whole * 1, whole * True, torch.tensor([1.0, 2.0])]
    finally:
        torch.set_default_dtype(torch.float32)


def signs(x: Tensor) -> list[Tensor]:
    spread = torch.complex(x, x)
    return [x[0], spread[0].conj(), spread.conj()[0], spread.conj().imag[0], x[0]]


def empty_memory(x: Tensor) -> list[Tensor]:
    rows = [x[1].view(2, 2)]
    x.untyped_storage().resize_(0)
    return [*rows, x[1].view(2, 2), x]


def chances(x: Tensor) -> list[Tensor]:
    return [torch.rand_like(x), torch.dropout(x, 0.5, True), x.bernoulli_(), torch.randn(3), *x.split(2), *torch.max(x, 0)]


def learned(x: Tensor) -> list[Tensor]:
    weight = torch.nn.Parameter(torch.empty(4, 4))
    hidden = (x @ weight).view(-1)
    (gradient,) = torch.autograd.grad(hidden.sum(), weight)
    with torch.no_grad():
        apart = (x @ weight).view(-1)
    return [hidden, gradient, apart, hidden.detach(), weight]


def told(tensors: list[Tensor]) -> list[Any]:
    """All that can be asked of them, and which of them share memory."""
    places = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (
            (
                tensor.shape,
                tensor.stride(),
                tensor.storage_offset(),
                tensor.dtype,
                tensor.device,
                tensor.layout,
                tensor.is_leaf,
            ),
            (tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor._is_view(), tensor._version),
            (tensor.untyped_storage().nbytes(), places.index(place), torch._C._dispatch_keys(tensor), vars(tensor).keys()),
        )
        for tensor, place in zip(tensors, places, strict=True)
    ]


@pytest.mark.parametrize("program", [out_is_given, shares, changes, numbers, signs, empty_memory, chances, learned])
def test_results_that_shapes_do_not_determine_equal_torchs(program: Callable[[Tensor], list[Tensor]]) -> None:
    with FakeTensorMode(), Asked(Plain()):
        wanted = [told(program(torch.empty(4, 4))) for _ in range(3)]
    with FakeTensorMode(), Asked(fake_cache.FakeCache()):
        found = [told(program(torch.empty(4, 4))) for _ in range(3)]
    assert found == wanted
