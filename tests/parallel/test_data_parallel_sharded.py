from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import ALONE, run_ranks
from sharded import (
    EACH,
    LENGTH,
    MOE,
    ODD,
    STEPS,
    TIED,
    Engine,
    accumulate,
    alone,
    batch,
    descend,
    engine_of,
    gradients,
    loss,
    make,
    numbers,
    prove,
    train,
    worst,
)
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d

from phalanx.models.init import build
from phalanx.parallel import data_parallel
from phalanx.parallel.buckets import SHARD_BYTES, Bucket, ModelParam, own_shard
from phalanx.parallel.data_parallel import DataParallel, Sharding
from phalanx.parallel.fsdp import FullySharded
from phalanx.parallel.mesh import Mesh, abandoned, connect, disconnect
from phalanx.parallel.pipeline.split_backward import backward_input, backward_weight
from phalanx.parallel.sharded_model import OwnedParam, ParamShard, extract
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.training.build import recipe
from phalanx.training.micro_batch import summed_loss
from phalanx.transforms.precision import computing


@pytest.mark.parametrize("kind", ["odd", pytest.param("gpt", marks=pytest.mark.slow), "moe"])
def test_four_ranks_train_as_one(kind: str) -> None:
    prove(Layout(data=1, shard=4), kind)


def test_two_ranks_train_as_one() -> None:
    prove(Layout(data=1, shard=2), "odd")


@pytest.mark.slow
def test_eight_ranks_with_a_hole_in_every_group() -> None:
    prove(Layout(data=2, shard=2, tensor=2), "odd", (2, 3))


@pytest.mark.parametrize(
    ("layout", "zeros"),
    [
        pytest.param(Layout(data=1, shard=2, expert=2), (1, 2, 3), marks=pytest.mark.slow),  # experts that nobody shares
        (Layout(data=2, shard=2, expert=2), (2, 3)),  # shared by others than the rest is
        pytest.param(Layout(data=2, shard=3, expert=3), (2, 3), marks=pytest.mark.slow),  # copies of experts that nobody shares
    ],
)
def test_experts_lie_on_a_mesh_of_their_own(layout: Layout, zeros: tuple[int, ...]) -> None:
    prove(layout, "moe", zeros)


def test_a_step_given_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARD_BYTES, False, 5 << 10)
    prove(Layout(data=2, shard=2), "odd", give_up=2)


@pytest.mark.parametrize("after", [0, 1])
def test_a_rank_that_gives_a_step_up_by_itself_keeps_in_line(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARD_BYTES, False, 5 << 10)
    want = alone("odd", 2).gradients[0]

    def give_up_once(mesh: Mesh) -> None:
        for zero in (1, 2):  # with ZeRO-3 even a forward has messages
            model, engine = make(mesh, ODD, zero)
            mine = numbers(0, mesh.replica, 2)
            engine.begin(EACH)
            for number in mine[: after if mesh.rank == 1 else EACH]:
                loss(model, number, "fp32", 2).backward()
                engine.after_backward()
            engine.finish()
            accumulate(engine, model, mine, "fp32", 2)
            assert worst(gradients(engine, mesh), want) < 1e-5

    run_ranks(give_up_once, 2, layout=Layout(data=1, shard=2))


def spread(kind: str, replicas: int, compute: str, step: int) -> float:
    """How far one process in low precision is from one in fp32: as rounding goes, so far may others be too, and a bit."""
    return 2 * worst(alone(kind, replicas, compute).gradients[step], alone(kind, replicas).gradients[step])


@pytest.mark.parametrize(
    ("kind", "compute"),
    [("odd", "bf16"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("odd", "fp16"), ("moe", "bf16")))],
)
def test_low_precision_stays_near_one_process(kind: str, compute: str) -> None:
    want = alone(kind, 4)
    limits = [spread(kind, 4, compute, step) for step in range(STEPS)]
    assert limits[0] < 0.15

    def on_ranks(mesh: Mesh) -> None:
        for zero in (1, 2, 3):
            got = train(mesh, kind, zero, compute)
            assert all(torch.equal(got.initial[name], want.initial[name]) for name in want.initial)
            assert got.losses == pytest.approx(want.losses, rel=2e-3)
            for step, limit in enumerate(limits):
                assert worst(got.gradients[step], want.gradients[step]) < limit

    run_ranks(on_ranks, 4, layout=Layout(data=2, shard=2), timeout=150)


def test_matrices_are_low_and_what_is_small_is_not() -> None:
    def on_ranks(mesh: Mesh) -> list[dict[str, str]]:
        found = []
        for zero in (2, 3):
            model, engine = make(mesh, MOE, zero, "bf16")
            seen: dict[str, str] = {}
            found.append(seen)
            for name in ("embed", "blocks.1", "blocks.1.mlp.router", "blocks.1.mlp.experts", "blocks.1.mlp_norm"):
                module = model.get_submodule(name)

                def note(module: nn.Module, args: Any, output: Any, name: str = name, seen: dict[str, str] = seen) -> None:
                    kinds = {str(p.dtype)[6:] for p in module.parameters(recurse=False)}
                    seen[name] = " ".join([*kinds, *([str(output.dtype)[6:]] if isinstance(output, Tensor) else [])])

                module.register_forward_hook(note, prepend=True)
            accumulate(engine, model, [0], "bf16", 1)
            assert all(one.value.dtype == torch.float32 for one in engine.owned)
        return found

    for seen in run_ranks(on_ranks, 2, layout=Layout(data=1, shard=2))[0]:
        assert seen == {
            "embed": "bfloat16 bfloat16",  # made fp32 by the hook behind this one
            "blocks.1": "float32",
            "blocks.1.mlp.router": "float32",
            "blocks.1.mlp.experts": "bfloat16 bfloat16",
            "blocks.1.mlp_norm": "float32 float32",
        }


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (4, 8))])
def test_bytes_of_state_fall_as_the_formula_says(ranks: int) -> None:
    spec = ModelSpec(vocab=1024, dim=128, layers=3, heads=4, ffn=320)

    def measured(mesh: Mesh, zero: int, compute: str) -> float:
        model, engine = make(mesh, spec, zero, compute)
        adam = torch.optim.AdamW([one.value for one in engine.owned])
        for _ in range(2):
            engine.begin(1)
            loss(model, mesh.rank, compute, ranks).backward()
            engine.after_backward()
            engine.finish()
            kept = sum(engine.bytes().values())
            kept += sum(state.nbytes for states in adam.state.values() for state in states.values())
            for one in engine.owned:
                assert one.gradient is not None
                one.value.grad = one.gradient.float()
            adam.step()
            engine.updated()
        return kept / spec.parameters()

    def on_ranks(mesh: Mesh) -> dict[tuple[int, str], float]:
        return {(zero, compute): measured(mesh, zero, compute) for zero in (1, 2, 3) for compute in ("bf16", "fp32")}

    formula = {
        (1, "bf16"): 4 + 12 / ranks,
        (2, "bf16"): 2 + 14 / ranks,
        (3, "bf16"): 16 / ranks,
        (1, "fp32"): 8 + 8 / ranks,
        (2, "fp32"): 4 + 12 / ranks,
        (3, "fp32"): 16 / ranks,
    }
    for found in run_ranks(on_ranks, ranks, layout=Layout(data=1, shard=ranks), timeout=150):
        assert found == pytest.approx(formula, rel=0.03)


def pipelined(parts: list[nn.Module], engine: Engine, of: list[int], compute: str, halves: bool) -> float:
    """All forwards, then all backwards, of two stages on one rank; the second halves come last."""
    engine.begin(len(of), pipelined=True)
    places = torch.arange(LENGTH).expand(2, LENGTH)
    done = []
    for number in of:
        with computing(compute, torch.device("cpu")):
            between = parts[0](batch(number).tokens, places)
            given = between.detach().requires_grad_()
            term = summed_loss(parts[1](given, places), batch(number).targets) / (2 * EACH * 2 * LENGTH)
        done.append((between, given, term))
    later = []
    for between, given, term in done:
        if halves:
            later.append(backward_input(get_gradient_edge(term), None, given))
        else:
            term.backward()
            engine.after_backward(1)
        between.backward(given.grad)
        engine.after_backward(0)
    for rest in later:
        backward_weight(rest)
        engine.after_backward(1)
    engine.finish()
    return sum(term.item() for *_, term in done)


@pytest.mark.parametrize("halves", [False, True])
def test_stages_of_a_pipeline_that_share_an_embedding(halves: bool) -> None:
    want = alone("tied", 2)
    limits = {"fp32": [1e-5] * STEPS, "bf16": [spread("tied", 2, "bf16", step) for step in range(STEPS)]}

    def on_ranks(mesh: Mesh) -> None:
        for zero, compute in ((1, "fp32"), (2, "fp32"), (3, "fp32"), (3, "bf16")):
            model = build(TIED)
            parts: list[nn.Module] = [model.part(0, 2), model.part(2, 4)]  # type: ignore[operator]
            engine = engine_of(mesh, parts, recipe(model, 3), zero, compute, keep=halves)
            assert len({one.name for one in engine.owned}) == len(engine.owned)
            for step in range(STEPS):
                if step == 1:
                    engine.begin(EACH, pipelined=True)  # given up before it began
                    engine.finish()
                term = pipelined(parts, engine, numbers(step, mesh.rank, 2), compute, halves)
                total = mesh.all_reduce(torch.tensor(term, dtype=torch.float64)).item()
                assert total == pytest.approx(want.losses[step], rel=1e-6 if compute == "fp32" else 1e-3)
                assert worst(gradients(engine, mesh), want.gradients[step]) < limits[compute][step]
                descend(engine)

    run_ranks(on_ranks, 2, layout=Layout(data=1, shard=2))


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty((), device="meta"))


def test_a_single_number_is_refused() -> None:
    model, whole = Scalar(), recipe(build(ODD), 3)
    for zero in (1, 3):
        how = Sharding(zero=zero, axes=("data", "shard", "context"))
        build_engine: Callable[..., Any] = FullySharded if zero == 3 else data_parallel.build
        with pytest.raises(RunError, match=r"cannot share the parameter scale, a single number.*give it the shape \[1\]"):
            build_engine([model], {"scale": ParamShard.full(model.scale)}, ALONE, whole, how)


def test_a_parameter_that_some_micro_batches_do_not_reach_gets_the_rest() -> None:
    def on_ranks(mesh: Mesh) -> list[list[float]]:
        found = []
        for zero in (1, 2):
            names = ("often", "rarely", "never")
            parameters = [nn.Parameter(torch.ones(5)) for _ in names]
            often, rarely, _ = parameters
            whole = [ModelParam(n, p, ParamShard.full(p)) for n, p in zip(names, parameters, strict=True)]
            how = Sharding(zero=zero, axes=("data", "shard", "context"))
            engine = DataParallel(whole, mesh, lambda name, tensor, spot: None, how)
            for reached in ({0, 1, 2, 3}, {2}, set()):  # the micro-batches that use `rarely`
                engine.begin(2)
                for number in (2 * mesh.rank, 2 * mesh.rank + 1):
                    ((number + 1) * (often.sum() + (rarely.sum() if number in reached else 0.0))).backward()
                    engine.after_backward()
                engine.finish()
                found.append([_only(one) for one in engine.owned])
        return found

    assert (
        run_ranks(on_ranks, 2, layout=Layout(data=1, shard=2))
        == [[[10.0, 10.0, 0.0], [10.0, 3.0, 0.0], [10.0, 0.0, 0.0]] * 2] * 2
    )


def _only(one: OwnedParam) -> float:
    assert one.gradient is not None
    return float(one.gradient.unique().item())


@pytest.mark.parametrize("zero", [1, 2])
def test_reductions_begin_while_the_backward_still_runs(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARD_BYTES, False, 5 << 10)

    def launched(mesh: Mesh) -> tuple[int, list[int]]:
        model, engine = make(mesh, ODD, zero)
        assert isinstance(engine, DataParallel)
        started = 0
        launch = engine._launch

        def counting(bucket: Bucket) -> None:
            nonlocal started
            started += 1
            launch(bucket)

        monkeypatch.setattr(engine, "_launch", counting)
        counts = []
        engine.begin(2)
        for number in range(2):
            loss(model, number, "fp32", 2).backward()
            counts.append(started)
            engine.after_backward()
            counts.append(started)
        engine.finish()
        return len(engine.buckets), [*counts, started]

    for buckets, counts in run_ranks(launched, 2, layout=Layout(data=1, shard=2)):
        assert buckets > 5
        assert counts == ([0, 0, buckets, buckets, buckets] if zero == 1 else [buckets, buckets, *[2 * buckets] * 3])


def test_the_engines_say_what_they_have_done() -> None:
    def on_ranks(mesh: Mesh) -> list[str]:
        return [make(mesh, ODD, zero, compute)[1].applied() for zero, compute in ((1, "bf16"), (2, "fp32"), (3, "fp32"))]

    first, second, third = run_ranks(on_ranks, 2, layout=Layout(data=1, shard=2))[1]
    # The second of two ranks has what is left of the rows when the first has taken the larger half.
    whole, own = ODD.parameters(), sum(p[(len(p) + 1) // 2 :].numel() for p in build(ODD).parameters())
    assert first == (
        f"optimizer state of {own:,} of {whole:,} elements, gradients whole, parameters whole in bfloat16 and float32; "
        "embed.weight: 128 of 257 rows, among 2 ranks"
    )
    assert second == (
        f"optimizer state of {own:,} of {whole:,} elements, their gradients too, parameters whole in float32; "
        "embed.weight: 128 of 257 rows, among 2 ranks"
    )
    assert third == (
        f"parameters, gradients and optimizer state: {own:,} of {whole:,} elements; embed.weight: 128 of 257 rows, "
        "as (Shard(dim=0),) on a mesh of (2,)"
    )


def test_groups_of_a_generation_are_freed_when_the_next_is_built() -> None:
    layout = Layout(data=1, shard=2)

    def on_ranks(joined: Mesh) -> int:
        disconnect(joined)
        groups = []
        for generation in (1, 2, 3):
            mesh = connect(replace(joined.place, generation=generation), "cpu", 30, layout)
            model, engine = make(mesh, ODD, 3, "fp32")
            accumulate(engine, model, [0], "fp32", 1)
            if generation < 3:
                groups += map(weakref.ref, distributed_c10d._world.pg_map)
                mesh.barrier()
                del mesh, model, engine
                with abandoned():
                    gc.collect()
        assert len(groups) >= 4
        deadline = time.monotonic() + 60  # background threads destroy them
        while any(group() for group in groups) and time.monotonic() < deadline:
            time.sleep(0.05)
        return sum(group() is not None for group in groups)

    assert run_ranks(on_ranks, 2, layout=layout) == [0, 0]


def test_few_experts_are_cut_twice_and_boxes_have_no_gaps() -> None:
    experts = ParamShard(TensorSlice.full((2, 6, 3)), expert=True)
    boxes = [own_shard(experts, index, 4) for index in range(4)]
    assert [(box.slice.offset, box.slice.shape, room) for box, room in boxes] == [
        ((0, 0, 0), (1, 3, 3), 9),
        ((0, 3, 0), (1, 3, 3), 9),
        ((1, 0, 0), (1, 3, 3), 9),
        ((1, 3, 0), (1, 3, 3), 9),
    ]
    assert {box.split for box, _ in boxes} == {("expert_shard",)}
    whole = torch.arange(36).view(2, 6, 3)
    for index, (box, room) in enumerate(boxes):
        assert torch.equal(extract(box.slice, whole).flatten(), whole.flatten()[index * room : (index + 1) * room])


def with_masters() -> tuple[DataParallel, OwnedParam, nn.Parameter]:
    """ZeRO-0 as on GPUs: one of its parameters, as the optimizer and as the model know it."""
    model = build(ODD)
    shards = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    how = Sharding(axes=("data", "shard", "context"), compute="bf16", masters=True)
    engine = data_parallel.build([model], shards, ALONE, recipe(model, 3), how)
    owned = next(one for one in engine.owned if one.name == "blocks.0.mlp.up.weight")
    return engine, owned, model.get_parameter(owned.name)


def test_master_weights_beside_low_ones_and_sums_in_fp32() -> None:
    """The model computes with bf16 weights, and what bf16 could not add up is added in fp32."""
    engine, owned, parameter = with_masters()
    assert (parameter.dtype, owned.value.dtype, owned.weight is not None) == (torch.bfloat16, torch.float32, True)
    terms = [1.0, *[2.0**-9] * 64]  # each is lost beside 1 in bf16, all of them are 0.125
    engine.begin(len(terms))
    for term in terms:
        (parameter * term).sum().backward()
        engine.after_backward()
    engine.finish()
    assert owned.gradient is not None and owned.gradient.dtype == torch.float32
    assert torch.equal(owned.gradient, torch.full_like(owned.gradient, sum(terms)))
    with torch.no_grad():
        owned.value.fill_(0.3)
    engine.updated()
    assert torch.equal(parameter, torch.full_like(parameter, 0.3))
    with torch.no_grad():
        owned.value.fill_(0.7)
    owned.weight_written = True
    engine.updated(stepped=True)
    assert torch.equal(parameter, torch.full_like(parameter, 0.3)), "an optimizer that says so has written it"
    engine.updated()
    assert torch.equal(parameter, torch.full_like(parameter, 0.7))


def test_sums_in_fp32_of_split_backwards_which_call_no_hooks() -> None:
    engine, owned, parameter = with_masters()
    terms = [1.0, *[2.0**-9] * 64]
    engine.begin(len(terms), pipelined=True)
    for term in terms:
        more = torch.full_like(parameter, term)
        parameter.grad = more if parameter.grad is None else parameter.grad + more
        engine.after_backward(0)
    engine.finish()
    assert owned.gradient is not None and torch.equal(owned.gradient, torch.full_like(owned.gradient, sum(terms)))


def test_one_micro_batch_leaves_gradients_where_the_backward_put_them() -> None:
    engine, owned, parameter = with_masters()
    engine.begin(1)
    parameter.sum().backward()
    engine.after_backward()
    engine.finish()
    assert owned.gradient is not None and owned.gradient.dtype == torch.bfloat16 and owned.gradient is parameter.grad
