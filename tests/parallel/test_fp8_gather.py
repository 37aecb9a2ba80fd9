from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import ODD, SAMPLE_AXES, accumulate, descend, evaluate, gradients, numbers, values
from torch import Tensor, nn

from phalanx.models.init import build
from phalanx.parallel.data_parallel import Sharding
from phalanx.parallel.fsdp import FullySharded
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ParamShard
from phalanx.spec.errors import RunFailed
from phalanx.spec.layout import Layout
from phalanx.training.build import recipe
from phalanx.transforms import compile, fp8, recompute
from phalanx.transforms.fp8 import Linear8, rounded_weight
from phalanx.transforms.fp8_numbers import E4M3, rounded
from phalanx.transforms.fp8_weight import Weight8

CPU = torch.device("cpu")
LINEARS = sum(isinstance(module, nn.Linear) for module in build(ODD).blocks.modules())  # type: ignore[union-attr, operator]


def in_fp8(mesh: Mesh, gather: bool, *changes: Callable[[list[nn.Module]], Any]) -> tuple[nn.Module, FullySharded]:
    """A model whose blocks compute in fp8, its weights gathered in fp8 or in bf16."""
    model = build(ODD)
    fp8.apply([model], "tensor", CPU)
    for change in changes:
        change([model])
    shards = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    how = Sharding(zero=3, axes=SAMPLE_AXES, compute="fp8", fp8_gather=gather)
    return model, FullySharded([model], shards, mesh, recipe(model, 3), how)


@contextmanager
def counted() -> Iterator[list[Tensor]]:
    """What this rank sends to be gathered."""
    name = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "all_gather_into_tensor"
    plain, sent = getattr(torch.distributed, name), list[Tensor]()

    def counting(output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(input_tensor)
        return plain(output_tensor, input_tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, name, counting)
        yield sent


def trained(mesh: Mesh, gather: bool, *changes: Callable[[list[nn.Module]], Any]) -> tuple[list[Any], dict[torch.dtype, int]]:
    """Losses, gradients and values of two steps; the bytes that were sent to be gathered, by format."""
    model, engine = in_fp8(mesh, gather, *changes)
    found: list[Any] = []
    replicas = mesh.layout.replicas
    with counted() as sent:
        for step in range(2):
            found.append(accumulate(engine, model, numbers(step, mesh.replica, replicas), "bf16", replicas))
            found.append(gradients(engine, mesh))
            descend(engine)
            found.append(evaluate(model, "bf16"))
    found.append(values(engine, mesh))
    dtypes = {tensor.dtype for tensor in sent}
    return found, {dtype: sum(tensor.nbytes for tensor in sent if tensor.dtype == dtype) for dtype in dtypes}


def equal(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs) if isinstance(theirs, dict) else ours == theirs


@pytest.mark.parametrize("change", ["nothing", "recomputed", pytest.param("compiled", marks=pytest.mark.slow)])
def test_training_gives_the_same_bits_for_half_of_the_bytes(change: str) -> None:
    said: list[str] = []
    changes: list[Callable[[list[nn.Module]], Any]] = {
        "nothing": [],
        "recomputed": [lambda parts: recompute.apply(parts, "selective")],
        "compiled": [lambda parts: compile.apply(parts, "aot_eager", said.append)],
    }[change]

    def on_ranks(mesh: Mesh) -> None:
        ours, in_8 = trained(mesh, True, *changes)
        theirs, in_16 = trained(mesh, False, *changes)
        assert len(ours) == len(theirs) and all(map(equal, ours, theirs))
        assert said == []  # nothing that could not be compiled
        # Blocks have nothing but linear layers and norms, which no rank gathers; the rest is embedding and head.
        assert in_8.keys() == {torch.uint8, torch.bfloat16} and in_16.keys() == {torch.bfloat16}
        assert in_16[torch.bfloat16] == 2 * in_8[torch.uint8] + in_8[torch.bfloat16]

    run_ranks(on_ranks, 2, layout=Layout(data=1, shard=2), timeout=150)


@pytest.mark.parametrize("layout", [Layout(data=1, shard=4), Layout(data=2, shard=2)])
def test_gathered_weights_are_those_that_one_device_rounds(layout: Layout) -> None:
    """Of four ranks, the last has no row of a key matrix, and shares of others differ in size."""

    def on_ranks(mesh: Mesh) -> None:
        model, engine = in_fp8(mesh, True)
        assert f"; {LINEARS} weights of " in engine.applied() and "gathered in fp8" in engine.applied()
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def note(name: str, module: nn.Module) -> None:
            weight = module.weight
            assert isinstance(weight, Weight8) and weight.dtype == torch.bfloat16
            seen[f"{name}.weight"] = weight.numbers.view(torch.uint8).clone(), weight.scale.clone()

        for name, module in model.named_modules():
            if isinstance(module, Linear8):
                module.register_forward_pre_hook(lambda module, args, name=name: note(name, module))
        for step in range(2):  # the values differ, and so may the scales
            whole = values(engine, mesh)
            accumulate(engine, model, [step], "bf16", 1)
            assert len(seen) == LINEARS
            for name, (found, scale) in seen.items():
                wanted = rounded(whole[name].to(torch.bfloat16), E4M3, "tensor")
                assert torch.equal(found, wanted.values.view(torch.uint8)) and torch.equal(scale, wanted.scale), name
                assert torch.equal(found, rounded_weight(whole[name], "tensor").values.view(torch.uint8)), name
            for one in engine.owned:
                one.value.data.mul_(3.0)
            engine.updated(stepped=True)

    run_ranks(on_ranks, 4, layout=layout, timeout=150)


def test_what_does_not_compute_in_fp8_is_gathered_as_before() -> None:
    """Blocks in bf16, and weights with a scale per row."""

    def on_ranks(mesh: Mesh) -> None:
        for scaling, blocks in (("row", None), ("tensor", range(1, 3))):
            model = build(ODD)
            fp8.apply([model], scaling, CPU, blocks)  # type: ignore[arg-type]
            shards = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
            how = Sharding(zero=3, axes=SAMPLE_AXES, compute="fp8", fp8_gather=True)
            engine = FullySharded([model], shards, mesh, recipe(model, 3), how)
            with counted() as sent:
                accumulate(engine, model, [0], "bf16", 1)
            # Of each forward and backward; a backward gathers nothing that its forward left gathered.
            assert sum(tensor.dtype == torch.uint8 for tensor in sent) == (0 if blocks is None else 2 * len(blocks))
            assert all(one.gradient is not None and torch.isfinite(one.gradient).all() for one in engine.owned)

    run_ranks(on_ranks, 2, layout=Layout(data=1, shard=2), timeout=150)


def test_a_weight_that_is_read_outside_of_its_layer_is_refused() -> None:
    def on_ranks(mesh: Mesh) -> None:
        model, engine = in_fp8(mesh, True)
        layer: Any = next(module for module in model.modules() if isinstance(module, Linear8))
        layer.register_forward_pre_hook(lambda module, args: (args[0] + module.weight.square().mean(),))
        engine.begin(1)
        with pytest.raises(RunFailed, match=r"reads one outside of its layer \(aten\.pow.*remove precision\.fp8_gather"):
            evaluate(model, "bf16")

    run_ranks(on_ranks, 2, layout=Layout(data=1, shard=2), timeout=150)
