from __future__ import annotations

import pytest
import torch
import torch._dynamo
from transforms.small import CPU, KINDS, distance, learned, made

from phalanx.models.init import build
from phalanx.transforms import activations, compile, recompute


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
    assert 1 <= graphs() <= 2  # blocks alike share a compilation; the first also makes the mask
    assert not torch._dynamo.utils.counters["graph_break"]


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


def test_what_torch_refuses_is_said_once_and_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh()

    def refusing(graph: torch.fx.GraphModule, inputs: list) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: refusing)
    said: list[str] = []
    model = made(KINDS["dense"], lambda parts: compile.apply(parts, "inductor", said.append))
    assert distance(learned(model), learned(made(KINDS["dense"]))) == 0
    assert said == ["memory.compile: torch cannot compile a part of a block, which runs uncompiled: no such instruction"]
