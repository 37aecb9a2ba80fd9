from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from ranks import ALONE, run_ranks
from sharded import replicated
from torch import Tensor, nn

from phalanx.models.init import build, materialize
from phalanx.parallel import data_parallel
from phalanx.parallel.buckets import FLAT_BYTES, FlatBucket, ModelParam, flat_bundles, shard_bundles
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard, ShardedModel
from phalanx.spec.model import ModelSpec

SPEC = ModelSpec(vocab=40, dim=16, layers=3, heads=2, ffn=32, init_std=0.1)
WHOLE = 8  # micro-batches of the global batch


def model() -> nn.Module:
    return materialize(build(SPEC), 1, torch.device("cpu"))


def loss(module: nn.Module, number: int) -> Tensor:
    """Of micro-batch `number`; each has another size of gradient, so that the order of additions shows in their bits."""
    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(number))
    logits = module(tokens, torch.arange(12).expand(2, 12))
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()) * (0.1 + number / 3)


@cache
def alone(number: int) -> dict[str, Tensor]:
    """The gradient of one micro-batch, in fp64 and without any buckets."""
    module = model().double()
    loss(module, number).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def expected(numbers: Iterable[int]) -> dict[str, Tensor]:
    parts = [alone(number) for number in numbers]
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def error(got: dict[str, Tensor], numbers: Iterable[int]) -> float:
    """Largest relative difference of any parameter's gradient from the exact sum."""
    want = expected(numbers)
    assert got.keys() == want.keys()
    return max(((got[name].double() - want[name]).norm() / want[name].norm()).item() for name in want)


def accumulate(module: nn.Module, gradients: DataParallel, numbers: Iterable[int]) -> None:
    numbers = list(numbers)
    gradients.begin(len(numbers))
    for number in numbers:
        loss(module, number).backward()
        gradients.after_backward()
    gradients.finish()


def buffers(gradients: DataParallel) -> list[Tensor]:
    return [bucket.buffer for bucket in gradients.buckets if isinstance(bucket, FlatBucket)]


def engine(parameters: Iterable[nn.Parameter], mesh: Mesh, wire: torch.dtype = torch.float32) -> DataParallel:
    held = [OwnedParam(str(number), parameter, ParamShard.full(parameter)) for number, parameter in enumerate(parameters)]
    return replicated(held, mesh, reduce_dtype=wire)


def norm_of(gradients: DataParallel, mesh: Mesh) -> Tensor:
    return ShardedModel([], mesh, gradients, lambda logits, targets: logits).norm()


def share(mesh: Mesh, whole: int = WHOLE) -> range:
    each = whole // mesh.ranks
    return range(mesh.rank * each, (mesh.rank + 1) * each)


def by_name(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def summed(mesh: Mesh, whole: int = WHOLE, wire: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Tensor], float]:
    """Buckets, gradients by name and norm after one step over the whole batch; the second of two, so that the first shows if it stays."""
    module = model()
    gradients = engine(module.parameters(), mesh, wire=wire)
    accumulate(module, gradients, [number + 50 for number in share(mesh, whole)])
    accumulate(module, gradients, share(mesh, whole))
    return [bucket.clone() for bucket in buffers(gradients)], by_name(module), norm_of(gradients, mesh).item()


@pytest.fixture(params=["one bucket", "many buckets"])
def buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "many buckets":
        monkeypatch.setitem(FLAT_BYTES, False, (1 << 10, 5 << 10))
    return str(request.param)


def test_one_two_and_four_ranks_give_the_same_bits_and_three_almost(buckets: str) -> None:
    results = {ranks: run_ranks(summed, ranks) for ranks in (1, 2, 4)}
    flat, _, norm = results[1][0]
    assert (len(flat) > 5) == (buckets == "many buckets")
    for of_ranks in results.values():
        for other, named, other_norm in of_ranks:
            assert all(torch.equal(a, b) for a, b in zip(flat, other, strict=True))
            assert other_norm == norm
            assert error(named, range(WHOLE)) < 1e-5
    whole = torch.cat([tensor.flatten() for tensor in expected(range(WHOLE)).values()])
    assert norm == pytest.approx(whole.norm().item(), rel=1e-5)
    three = run_ranks(summed, 3, 9)
    assert all(torch.equal(a, b) for other in three for a, b in zip(three[0][0], other[0], strict=True))
    assert error(three[0][1], range(9)) < 1e-5


def test_the_size_of_buckets_can_be_set_and_changes_no_bit() -> None:
    params = [ModelParam(name, parameter, ParamShard.full(parameter)) for name, parameter in model().named_parameters()]
    whole, small = flat_bundles(params), flat_bundles(params, 5 << 10)
    assert len(whole) == 1 < 5 < len(small) and [param for bundle in small for param in bundle] == whole[0]
    sizes = [sum(param.parameter.numel() * 4 for param in bundle) for bundle in small]
    assert all(size <= 5 << 10 or len(bundle) == 1 for size, bundle in zip(sizes, small, strict=True))
    assert len(shard_bundles(params, 4)) < len(shard_bundles(params, 4, 5 << 10))


def test_the_order_of_additions_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    # Guards the test above: added up in place, one after the other, the same micro-batches give other bits.
    tree = summed(ALONE)[0]
    monkeypatch.setattr(data_parallel, "_tree_order", lambda count: [(0, False)] * (count - 1))
    assert not all(torch.equal(a, b) for a, b in zip(tree, summed(ALONE)[0], strict=True))


@pytest.mark.parametrize("each", [1, 3, 5, 6])
def test_the_bits_are_the_same_for_any_number_of_micro_batches_per_rank(each: int) -> None:
    flat, _, _ = summed(ALONE, 4 * each)
    for ranks in (2, 4):
        for others, _, _ in run_ranks(summed, ranks, 4 * each):
            assert all(torch.equal(a, b) for a, b in zip(flat, others, strict=True))


@pytest.mark.parametrize("each", [1, 2, 3, 4, 5, 6, 7])
def test_any_number_of_micro_batches_adds_up(each: int) -> None:
    _, named, _ = summed(ALONE, each)
    assert error(named, range(each)) < 1e-5


@pytest.mark.parametrize("each", [1, 3, 5])
def test_any_number_of_micro_batches_adds_up_on_two_ranks(each: int, buckets: str) -> None:
    for _, named, _ in run_ranks(summed, 2, 2 * each):
        assert error(named, range(2 * each)) < 1e-5


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bf16_on_the_wire_costs_precision_but_all_ranks_agree(ranks: int, buckets: str) -> None:
    whole = 2 * ranks
    results = run_ranks(summed, ranks, whole, torch.bfloat16)
    for flat, named, _ in results:
        assert 1e-4 < error(named, range(whole)) < 1e-2
        assert all(bucket.dtype == torch.float32 for bucket in flat)
        assert all(torch.equal(a, b) for a, b in zip(flat, results[0][0], strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("after", [0, 1])
def test_a_rank_that_gives_a_step_up_keeps_in_line(ranks: int, after: int, buckets: str) -> None:
    def give_up_once(mesh: Mesh) -> dict[str, Tensor]:
        module = model()
        gradients = engine(module.parameters(), mesh)
        numbers = share(mesh, 2 * mesh.ranks)
        if mesh.rank == 1:
            gradients.begin(len(numbers))
            for number in numbers[:after]:
                loss(module, number).backward()
                gradients.after_backward()
            gradients.finish()  # the others complete theirs
        else:
            accumulate(module, gradients, numbers)
        accumulate(module, gradients, numbers)
        return by_name(module)

    for named in run_ranks(give_up_once, ranks):
        assert error(named, range(2 * ranks)) < 1e-5


@pytest.mark.parametrize("ranks", [2, 4])
def test_reductions_begin_while_the_backward_still_runs(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FLAT_BYTES, False, (1 << 10, 5 << 10))

    def launched_in_time(mesh: Mesh) -> list[tuple[int, int, int]]:
        module = model()
        gradients = engine(module.parameters(), mesh)
        started = 0
        in_flight = gradients._sums[False][0][1]
        add = in_flight.add

        def counting(*collective: Any) -> None:
            nonlocal started
            started += 1
            add(*collective)

        monkeypatch.setattr(in_flight, "add", counting)
        counts = []
        for _ in range(2):
            started = 0
            gradients.begin(2)
            loss(module, 0).backward()
            early = started  # this micro-batch is not the last: nothing may travel yet
            gradients.after_backward()
            loss(module, 1).backward()
            in_time = started
            gradients.after_backward()
            gradients.finish()
            counts.append((early, in_time, started))
        assert len(gradients.buckets) > 5
        return [(early, in_time - len(gradients.buckets), after - in_time) for early, in_time, after in counts]

    assert run_ranks(launched_in_time, ranks) == [[(0, 0, 0)] * 2] * ranks


def test_the_optimizer_and_the_buckets_see_the_same_gradients() -> None:
    module = model()
    gradients = engine(module.parameters(), ALONE)
    accumulate(module, gradients, [0, 1, 2])
    assert sum(bucket.numel() for bucket in buffers(gradients)) == SPEC.parameters()
    norm = norm_of(gradients, ALONE).item()
    for bucket in buffers(gradients):
        bucket.mul_(0.25)
    assert norm_of(gradients, ALONE).item() == pytest.approx(norm / 4)
    for name, tensor in by_name(module).items():
        assert torch.allclose(tensor.double() * 4, expected(range(3))[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_parameter_that_some_micro_batches_do_not_reach_gets_the_rest(ranks: int, buckets: str) -> None:
    def some(mesh: Mesh) -> list[tuple[float, float]]:
        torch.manual_seed(0)
        often, rarely = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))
        gradients = engine([often, rarely], mesh)
        seen = []
        for reached in ({0, 1, 2, 3, 4, 5, 6, 7}, {3}, set(), {0, 6, 7}):  # the micro-batches that use `rarely`
            gradients.begin(len(share(mesh)))
            for number in share(mesh):
                ((number + 1) * (often.sum() + (rarely.sum() if number in reached else 0.0))).backward()
                gradients.after_backward()
            gradients.finish()
            assert often.grad is not None
            assert rarely.grad is not None
            seen.append((often.grad.unique().item(), rarely.grad.unique().item()))
        return seen

    assert run_ranks(some, ranks) == [[(36.0, 36.0), (36.0, 4.0), (36.0, 0.0), (36.0, 1.0 + 7.0 + 8.0)]] * ranks


def test_parameters_that_are_not_trained_have_no_place_in_the_buckets() -> None:
    module = model()
    module.get_submodule("embed").requires_grad_(False)
    gradients = engine(module.parameters(), ALONE)
    accumulate(module, gradients, [0])
    assert sum(bucket.numel() for bucket in buffers(gradients)) == SPEC.parameters() - 40 * 16
    assert module.get_parameter("embed.weight").grad is None


def test_a_parameter_larger_than_a_bucket_gets_one_and_types_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FLAT_BYTES, False, (16, 64))
    sizes = [(3, torch.float32), (100, torch.float32), (4, torch.float32), (8, torch.float64), (8, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    gradients = engine(parameters, ALONE)
    assert {bucket.dtype for bucket in buffers(gradients)} == {torch.float32, torch.float64}
    gradients.begin(1)
    sum((number + 1.0) * p.sum() for number, p in enumerate(parameters)).backward()  # type: ignore[union-attr]
    gradients.after_backward()
    gradients.finish()
    for number, p in enumerate(parameters):
        assert p.grad is not None
        assert torch.equal(p.grad, torch.full_like(p, number + 1.0))
    assert sum(bucket.sum().item() for bucket in buffers(gradients)) == 1 * 3 + 2 * 100 + 3 * 4 + 4 * 8 + 5 * 8
    assert [bucket.numel() for bucket in buffers(gradients)] == [8, 8, 4, 100, 3]
