from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo
from transforms.small import CPU, KINDS, distance, learned, made

from phalanx.models.attention import Scope
from phalanx.models.init import build
from phalanx.models.layers import rotary
from phalanx.spec.model import ModelSpec
from phalanx.transforms import activations, compile, recompute
from phalanx.transforms.precision import computing


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_compiled_blocks_compute_the_same_and_are_compiled() -> None:
    fresh()
    plain = learned(made(KINDS["dense"]))
    said: list[str] = []
    found = learned(made(KINDS["dense"], lambda parts: compile.apply(parts, "aot_eager", said.append)))
    assert distance(found, plain) <= 1e-6
    assert said == []
    assert graphs() == 1  # blocks alike share a compilation
    assert not torch._dynamo.utils.counters["graph_break"]


def test_blocks_compiled_together_compute_the_same() -> None:
    fresh()
    spec = replace(KINDS["dense"], layers=4)
    plain = learned(made(spec))
    said: list[str] = []
    assert (
        distance(learned(made(spec, lambda parts: compile.apply(parts, "aot_eager", said.append, together=2))), plain) <= 1e-6
    )
    assert said == []
    assert graphs() == 1  # two chains alike
    model = made(spec, lambda parts: compile.apply(parts, "aot_eager", said.append, together=2))
    tokens = torch.randint(spec.vocab, (2, 8))
    with torch.no_grad():  # every block by itself, as a key-value cache needs it
        assert torch.equal(model(tokens, torch.arange(8).expand(2, 8)), made(spec)(tokens, torch.arange(8).expand(2, 8)))
    assert graphs() == 1


def test_compiled_blocks_are_recomputed_and_moved() -> None:
    fresh()
    said: list[str] = []

    def all_three(parts: list) -> None:
        compile.apply(parts, "aot_eager", said.append)
        recompute.apply(parts, "full", 1)
        activations.apply(parts, CPU)

    assert distance(learned(made(KINDS["moe"], all_three)), learned(made(KINDS["moe"]))) <= 1e-6
    assert graphs() >= 1 and said == []


def test_blocks_that_route_tokens_are_compiled_in_part() -> None:
    sentence = compile.apply([build(KINDS["mla"])], "eager")
    assert sentence == (
        "blocks.0 and the attention of blocks.1 … mtp.0.block (3), which route tokens "
        "compiled by torch.compile (eager), each separately"
    )


PARTITION = "aot_eager_decomp_partition"  # chooses what to store as inductor does, without generating code


def test_compiled_blocks_store_products_and_attention_only() -> None:
    fresh()
    spec = ModelSpec(vocab=257, dim=64, layers=1, heads=4, kv_heads=2, ffn=256, context=256)
    model = made(spec, lambda parts: compile.apply(parts, PARTITION, pytest.fail)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return value

    x = torch.randn(1, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    with computing("bf16", CPU), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        model.blocks["0"](x, Scope(None), rotary(spec, torch.arange(256).expand(1, 256)))  # type: ignore[operator]
    # Per token, in units of the width: the input, queries, keys, values, attention (with heads first and with heads last, unlike inductor), its
    # projection, gates and inner products; not the normalized inputs and the activated product. The rest is small: rotations, statistics.
    products = 1 + 1 + 0.5 + 0.5 + 2 + 1 + 4 + 4
    assert products <= sum(seen.values()) / 2 / 256 / 64 <= products + 0.5


@pytest.mark.parametrize("kind", ["dense", "mla"])
def test_selectively_recomputed_and_compiled_blocks_compute_the_same(kind: str) -> None:
    fresh()

    def both(parts: list) -> None:
        compile.apply(parts, PARTITION, pytest.fail, selective=True)
        recompute.apply(parts, "selective", compiled=True)

    assert distance(learned(made(KINDS[kind], both)), learned(made(KINDS[kind]))) <= 1e-6


def test_half_of_a_block_that_routes_tokens_is_recomputed_the_other_compiled() -> None:
    model = build(KINDS["mla"])
    assert compile.apply([model], "eager", selective=True) == (
        "blocks.0 and the attention of blocks.1 … mtp.0.block (3), which route tokens compiled by torch.compile (eager), each separately"
    )
    assert recompute.apply([model], "selective", 1, compiled=True) == (
        "selective: blocks.1 … mtp.0.block (3), all but matrix products and attention recomputed in the backward"
    )
    assert "forward" not in vars(model.blocks["1"]) and "feed_forward_half" in vars(model.blocks["1"])  # type: ignore[index]
    assert recompute.apply([build(KINDS["dense"])], "selective", 1, compiled=True) is None


def test_what_torch_refuses_is_said_once_and_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()

    def refusing(graph: torch.fx.GraphModule, inputs: list) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: refusing)
    said: list[str] = []
    model = made(KINDS["dense"], lambda parts: compile.apply(parts, "inductor", said.append))
    assert distance(learned(model), learned(made(KINDS["dense"]))) == 0
    assert said == ["memory.compile: torch cannot compile a part of a block, which runs uncompiled: no such instruction"]
