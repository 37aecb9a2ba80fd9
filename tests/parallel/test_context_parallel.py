"""Context parallelism against attention on one device: what each rank computes of a shared sequence, put together, is the same."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import ALONE, run_ranks
from sharded import replicated
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from phalanx.kernels import partial_attention as kernels
from phalanx.models.attention import Scope, attend_locally
from phalanx.models.init import build, materialize
from phalanx.parallel.context import context_parallel, online_softmax
from phalanx.parallel.context.context_parallel import piece_pair
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard, ShardedModel
from phalanx.spec.layout import Layout
from phalanx.spec.model import Mla, ModelSpec

METHODS = ["ring", "gather", "ulysses"]
LENGTH = 48

# Heads, key heads, width of queries and keys, width of values.
EQUAL, GROUPED, SINGLE, NARROW = (4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 6, 6), (4, 4, 12, 8)
SHAPES = [EQUAL, GROUPED, SINGLE, NARROW]


def documents(batch: int, length: int, kind: str) -> Tensor | None:
    """Which document each position is of. `uneven`: some longer than a piece, some shorter, cut in other places in each row."""
    if kind == "none":
        return None
    dice = np.random.default_rng(5)
    table = np.zeros((batch, length), dtype=np.int32)
    for row in table[1:] if kind == "uneven" else table:  # the first row stays one document
        cuts = dice.choice(np.arange(1, length), size=4 if kind == "uneven" else length // 3, replace=False)
        row[:] = np.isin(np.arange(length), cuts).cumsum()
    return torch.from_numpy(table)


def inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, batch: int = 3, length: int = LENGTH
) -> list[Tensor]:
    """Queries, keys, values of the whole sequence, and the gradient of the result."""
    heads, key_heads, width, value_width = shape
    dice = torch.Generator().manual_seed(1)
    sizes = ((heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width))
    return [torch.randn(batch, number, length, size, generator=dice).to(dtype) for number, size in sizes]


def expected(case: Case) -> list[Tensor]:
    """Result and gradients by torch's own attention on the whole sequence, in fp64."""
    q, k, v, gradient = (x.double().requires_grad_() for x in case.tensors)
    sinks = None if case.sinks is None else case.sinks.double().requires_grad_()
    places = torch.arange(q.shape[2])
    distance = places[:, None] - places
    mask = (distance >= 0) & (distance < (case.window or q.shape[2]))
    if case.table is not None:
        mask = (mask & (case.table[:, :, None] == case.table[:, None]))[:, None]
    if case.cap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale, enable_gqa=True)
    else:
        scale = q.shape[-1] ** -0.5 if case.scale is None else case.scale
        scores = torch.einsum("bhse,bhte->bhst", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
        scores = scores if case.cap is None else torch.tanh(scores / case.cap) * case.cap
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        out = weights @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v) if sinks is None else (q, k, v, sinks), gradient)]


class Bare(nn.Module):
    """As little as an attention can be."""

    def __init__(self) -> None:
        super().__init__()
        self.attend: Callable[..., Tensor] = attend_locally


def swapped(mesh: Mesh, method: str) -> Callable[..., Tensor]:
    module = Bare()
    context_parallel.swap([module], mesh, method)
    return module.attend


def here(mesh: Mesh, method: str, whole: Tensor, dim: int) -> Tensor:
    """This rank's part of a sequence."""
    mine = context_parallel.rank_positions(whole.shape[dim], mesh.size("context"), mesh.coordinate("context"), method)
    return whole.index_select(dim, torch.from_numpy(mine)).contiguous()


def together(parts: list[Tensor], method: str, dim: int) -> Tensor:
    """The sequence from what each rank has of it."""
    length = sum(part.shape[dim] for part in parts)
    order = np.concatenate([context_parallel.rank_positions(length, len(parts), index, method) for index in range(len(parts))])
    return torch.cat(parts, dim).index_select(dim, torch.from_numpy(order.argsort()))


def difference(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()  # the largest of some numbers may be any if one is none
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Case(NamedTuple):
    tensors: list[Tensor]
    table: Tensor | None
    scale: float | None = None
    window: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None


def several(mesh: Mesh, cases: list[Case]) -> dict[str, list[list[Tensor]]]:
    """Result and gradients on this rank, by method and case; all forwards before all backwards, as a pipeline may have it."""
    found: dict[str, list[list[Tensor]]] = {}
    for method in METHODS:
        attend, begun = swapped(mesh, method), []
        for tensors, table, scale, window, cap, sinks in cases:
            q, k, v, gradient = (here(mesh, method, x, 2) for x in tensors)
            leaves = [x.requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks.clone()]))]
            begun.append((attend(*leaves[:3], Scope(table, window=window), scale, cap, *leaves[3:]), leaves, gradient))
        found[method] = [[out.detach(), *torch.autograd.grad(out, leaves, gradient)] for out, leaves, gradient in begun]
    return found


def compare(count: int, cases: list[Case]) -> dict[str, list[float]]:
    """Largest relative difference of result and gradients from one device's, by method and case."""
    found = run_ranks(several, count, cases, layout=Layout(data=1, context=count))
    worst: dict[str, list[float]] = {method: [] for method in METHODS}
    for number, case in enumerate(cases):
        wanted = expected(case)
        for method in METHODS:
            got = [together([of[method][number][which] for of in found], method, 2) for which in range(4)]
            assert [x.dtype for x in got] == [case.tensors[0].dtype] * 4
            if case.sinks is not None:
                got.append(sum(of[method][number][4] for of in found))
            worst[method].append(max(difference(*pair) for pair in zip(got, wanted, strict=True)))
    return worst


@pytest.fixture(params=["fused", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the parts are computed with; blocks and tables so small that the sequences of the tests have many."""
    monkeypatch.setattr(online_softmax, "_BLOCK", 5)
    monkeypatch.setattr(online_softmax, "_WIDEST", 2)
    if request.param == "plain":
        monkeypatch.setattr(kernels, "_choose", lambda *_: "plain")
        monkeypatch.setattr(kernels, "_SCORES", 400)
    return str(request.param)


@pytest.mark.parametrize("count", [2, 4])
def test_results_and_gradients_are_those_of_one_device(count: int, kernel: str) -> None:
    cases = [Case(inputs(shape), documents(3, LENGTH, kind)) for shape in SHAPES for kind in ("none", "uneven", "short")]
    cases.append(Case(inputs(NARROW), documents(3, LENGTH, "uneven"), 0.7))
    cases.append(Case(inputs(GROUPED, batch=1), torch.zeros(1, LENGTH, dtype=torch.int64), 0.2))
    for worst in compare(count, cases).values():
        assert max(worst) < 2e-6


@pytest.mark.parametrize("count", [2, 4])
def test_windows_are_those_of_one_device(count: int, kernel: str) -> None:
    # Shorter than a block, longer than a piece, longer than half of the sequence, and without an effect.
    cases = [
        Case(inputs(GROUPED), documents(3, LENGTH, kind), None, n) for n in (2, 7, 19, 30, 99) for kind in ("none", "uneven")
    ]
    for worst in compare(count, cases).values():
        assert max(worst) < 2e-6


def test_soft_caps_are_those_of_one_device(kernel: str) -> None:
    cases = [Case(inputs(shape), documents(3, LENGTH, "uneven"), 0.4, 9, 0.8) for shape in (EQUAL, GROUPED, NARROW)]
    cases.append(Case(inputs(GROUPED), None, 0.4, None, 0.8))
    for worst in compare(2, cases).values():
        assert max(worst) < 2e-6
    for case in cases:
        leaves = [x.clone().requires_grad_() for x in case.tensors[:3]]
        out = attend_locally(*leaves, Scope(case.table, window=case.window), case.scale, case.cap)
        found = [out.detach(), *torch.autograd.grad(out, leaves, case.tensors[3])]
        assert max(difference(*pair) for pair in zip(found, expected(case), strict=True)) < 2e-6


@pytest.mark.parametrize("count", [2, 4])
def test_sinks_are_those_of_one_device(count: int, kernel: str) -> None:
    """Each rank has the gradient of the sinks from its own queries, or of its own heads."""
    sinks = torch.tensor([1.5, -0.5, 0.0, 3.0])
    cases = [
        Case(inputs(shape), documents(3, LENGTH, kind), None, window, cap, sinks)
        for shape in (GROUPED, SINGLE, NARROW)
        for kind in ("none", "uneven")
        for window, cap in ((None, None), (9, None), (19, 0.8))
    ]
    for worst in compare(count, cases).values():
        assert max(worst) < 3e-6


@pytest.mark.parametrize("count", [3, 4])
def test_the_ranks_need_not_divide_the_key_heads(count: int) -> None:
    cases = [Case(inputs((12, 2, 8, 4)), documents(3, LENGTH, kind)) for kind in ("none", "uneven")]
    cases += [Case(inputs((12, 6, 8, 8)), documents(3, LENGTH, "uneven"))]
    for worst in compare(count, cases).values():
        assert max(worst) < 2e-6


def test_bf16_is_as_near_as_on_one_device(kernel: str) -> None:
    cases = [Case(inputs(shape, torch.bfloat16), documents(3, LENGTH, kind)) for shape in SHAPES for kind in ("none", "uneven")]
    alone = []
    for case in cases:
        leaves = [x.clone().requires_grad_() for x in case.tensors[:3]]
        out = attend_locally(*leaves, Scope(case.table))
        found = [out.detach(), *torch.autograd.grad(out, leaves, case.tensors[3])]
        alone.append(max(difference(*pair) for pair in zip(found, expected(case), strict=True)))
    for worst in compare(4, cases).values():
        for shared, one in zip(worst, alone, strict=True):
            assert shared < 1.5 * one < 0.01


def test_places_are_dealt_out_once_and_in_the_order_of_the_method() -> None:
    assert [context_parallel.rank_positions(16, 2, index, "ring").tolist() for index in (0, 1)] == [
        [0, 1, 2, 3, 12, 13, 14, 15],
        [4, 5, 6, 7, 8, 9, 10, 11],
    ]
    for method in METHODS:
        dealt = np.concatenate([context_parallel.rank_positions(48, 4, index, method) for index in range(4)])
        assert dealt.dtype == np.int64
        assert (np.sort(dealt) == np.arange(48)).all()
    assert (context_parallel.rank_positions(48, 3, 1, "gather") == context_parallel.rank_positions(48, 3, 1, "ring")).all()
    assert context_parallel.rank_positions(48, 3, 1, "ulysses").tolist() == list(range(16, 32))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_rank_of_the_ring_has_the_same_to_do_in_every_step(count: int) -> None:
    plan = online_softmax.MaskPlan(length=16 * count, pieces=2 * count, documents=None)
    for mine in range(count):
        for theirs in range(count):
            (tile,) = plan.tiles(piece_pair(mine, count), piece_pair(theirs, count))
            rows, keys = tile.queries[1] - tile.queries[0], tile.keys[1] - tile.keys[0]
            assert rows * keys // (2 if tile.causal else 1) == 2 * 8 * 8
            assert tile.causal == (mine == theirs)


def test_documents_cost_a_mask_only_where_one_ends_and_nothing_where_none_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_softmax, "_BLOCK", 4)
    documents = torch.tensor([[0] * 6 + [1] * 10])
    plan = online_softmax.MaskPlan(16, 4, documents, documents.numpy())
    assert plan.tiles((0,), (0,)) == [online_softmax.Tile((0, 4), (0, 4), causal=True, masked=False)]
    assert plan.tiles((1,), (0,)) == [online_softmax.Tile((0, 4), (0, 4), causal=False, masked=True)]
    assert plan.tiles((1,), (1,)) == [online_softmax.Tile((0, 4), (0, 4), causal=True, masked=True)]
    assert plan.tiles((2,), (0,)) == []
    assert plan.tiles((3,), (2,)) == [online_softmax.Tile((0, 4), (0, 4), causal=False, masked=False)]
    assert plan.tiles((0, 1), (2, 3)) == []


def test_keys_outside_of_every_window_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_softmax, "_BLOCK", 4)
    plan = online_softmax.MaskPlan(16, 4, None, window=5)
    assert plan.tiles((0,), (0,)) == [online_softmax.Tile((0, 4), (0, 4), causal=True, masked=False)]
    assert plan.tiles((1,), (0, 1)) == [
        online_softmax.Tile((0, 4), (4, 8), causal=True, masked=False),
        online_softmax.Tile((0, 4), (0, 4), causal=False, masked=True),
    ]
    assert plan.tiles((2, 3), (0,)) == []
    assert plan.tiles((0, 3), (2, 3))[-1] == online_softmax.Tile((4, 8), (0, 4), causal=False, masked=True)
    assert online_softmax.MaskPlan(16, 4, None, window=16).is_plain


# Whole models.

DENSE = ModelSpec(vocab=40, dim=16, layers=2, heads=4, kv_heads=2, ffn=32, init_std=0.1)
LATENT = ModelSpec(
    vocab=40,
    dim=16,
    layers=2,
    heads=4,
    ffn=32,
    init_std=0.1,
    mla=Mla(q_rank=8, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=6),
)


def batch(replica: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Tokens, targets, positions, documents."""
    dice = torch.Generator().manual_seed(7 + replica)
    tokens, targets = torch.randint(40, (2, 3, 32), generator=dice)
    targets[0, 5:9] = -100
    return tokens, targets, torch.arange(32).expand(3, 32), documents(3, 32, kind)


def loss(model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor, table: Tensor | None) -> Tensor:
    return F.cross_entropy(model(tokens, positions, table).flatten(0, 1).float(), targets.flatten(), reduction="sum")


def step(mesh: Mesh, spec: ModelSpec, method: str, kind: str, how: str) -> tuple[float, dict[str, Tensor]]:
    """Sum of losses and every gradient over all ranks, of a batch of two micro-batches."""
    model = materialize(build(spec), 1, torch.device("cpu"))
    held = [OwnedParam(name, parameter, ParamShard.full(parameter)) for name, parameter in model.named_parameters()]
    placed = ShardedModel([model], mesh, replicated(held, mesh), loss=F.cross_entropy)
    if mesh.size("context") > 1:
        context_parallel.swap([model], mesh, method)
    if how == "recomputed":
        for block in model.get_submodule("blocks").children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    total = torch.zeros(())
    each = 2 // mesh.layout.replicas
    placed.engine.begin(each)
    for number in range(mesh.replica * each, (mesh.replica + 1) * each):
        tokens, targets, positions, table = batch(number, kind)
        mine = [here(mesh, method, x, 1) for x in (tokens, targets, positions)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "bf16"):
            found = loss(model, *mine, table)
            with torch.no_grad():
                assert loss(model, *mine, table).item() == found.item()
        found.backward()
        placed.engine.after_backward()
        total += found.detach()
    placed.finish()
    shares = mesh.layout.ranks // mesh.layout.replicas // mesh.size("context")  # ranks that have the same to tell
    return mesh.all_reduce(total).item() / shares, {
        one.name: one.gradient.clone() for one in placed.owned if one.gradient is not None
    }


def steps(mesh: Mesh, cases: list[tuple[ModelSpec, str, str, str]]) -> list[tuple[float, dict[str, Tensor]]]:
    return [step(mesh, *case) for case in cases]


@cache
def alone(spec: ModelSpec, kind: str, how: str) -> tuple[float, dict[str, Tensor]]:
    return step(ALONE, spec, "ring", kind, how)


@pytest.mark.parametrize("layout", [Layout(data=1, context=4), Layout(data=2, context=2)])
def test_a_model_has_the_loss_and_gradients_of_one_device(layout: Layout) -> None:
    kinds = [(DENSE, "none", "kept"), (DENSE, "uneven", "recomputed"), (DENSE, "uneven", "bf16"), (LATENT, "short", "kept")]
    cases = [(spec, method, kind, how) for method in METHODS for spec, kind, how in kinds]
    found = run_ranks(steps, layout.ranks, cases, layout=layout)
    for case, by_rank in zip(cases, zip(*found, strict=True), strict=True):
        spec, _, kind, how = case
        exact = how != "bf16"
        wanted_loss, wanted = alone(spec, kind, "kept" if exact else how)
        for value, gradients in by_rank:
            assert value == pytest.approx(wanted_loss, rel=1e-6 if exact else 1e-4)
            assert gradients.keys() == wanted.keys()
            worst = max((difference(gradient, wanted[name]), name) for name, gradient in gradients.items())
            assert worst[0] < (1e-5 if exact else 0.02), (case, worst)


class Wrapped:
    """Some other technique's own attend, with the real one inside."""

    def __init__(self) -> None:
        self.inner: Callable[..., Tensor] = attend_locally

    def __call__(self, *args: Any) -> Tensor:
        return 2 * self.inner(*args)


def test_what_is_wrapped_stays_wrapped_and_the_words_say_what_was_done() -> None:
    def swap(mesh: Mesh) -> list[str]:
        said = []
        for method in METHODS:
            model = nn.ModuleDict({"first": Bare(), "other": nn.Linear(2, 2), "last": Bare()})
            wrapped = model["last"].attend = Wrapped()
            said.append(context_parallel.swap([model], mesh, method))
            assert model["last"].attend is wrapped
            assert wrapped.inner is model["first"].attend
            assert wrapped.inner is not attend_locally
            q, k, v, _ = (here(mesh, method, x, 2) for x in inputs(GROUPED))
            assert torch.equal(wrapped(q, k, v, Scope(None)), 2 * model["first"].attend(q, k, v, Scope(None)))
        return said

    said = run_ranks(swap, 2, layout=Layout(data=1, context=2))
    assert said[1] == [
        "2 attentions (first … last): keys and values passed round a ring, queries of pieces 1 and 2 of 4 here,"
        " 2 ranks (0, 1) share each sequence",
        "2 attentions (first … last): keys and values gathered, queries of pieces 1 and 2 of 4 here,"
        " 2 ranks (0, 1) share each sequence",
        "2 attentions (first … last): heads exchanged for positions, 2 ranks (0, 1) share each sequence",
    ]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return found


def memory(mesh: Mesh, length: int, kind: str) -> tuple[int, int]:
    """Elements of the largest tensor of a forward and backward, and by how many bytes this process has grown."""
    mine = length // mesh.size("context")
    q, k, v, gradient = (torch.randn(1, 1, mine, 8) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    table = None if kind == "none" else (torch.arange(length) // (length // 5))[None]
    attend = swapped(mesh, "ring")
    attend(*(x[:, :, :8] for x in leaves), Scope(None)).sum().backward()  # what the first call needs is not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Largest() as largest:
        attend(*leaves, Scope(table)).backward(gradient)
    return largest.elements, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


@pytest.mark.parametrize("kind", ["none", "long"])
def test_no_rank_keeps_a_table_of_all_scores_and_each_keeps_less_the_more_there_are(kind: str) -> None:
    length = 16384
    found = {count: run_ranks(memory, count, length, kind, layout=Layout(data=1, context=count)) for count in (2, 4)}
    for count, of_ranks in found.items():
        pair = (length // (2 * count)) ** 2  # scores of one piece's queries with one piece's keys
        for largest, grown in of_ranks:
            assert largest <= pair
            assert grown < 4 * length**2 // 16  # a table of all scores would take 4 bytes for each, a gigabyte
    if kind == "none":
        assert max(largest for largest, _ in found[4]) * 2 == max(largest for largest, _ in found[2])
