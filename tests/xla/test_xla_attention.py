"""Attention in JAX: equal to the torch engine's, on one device and divided over virtual ones; TPU's kernel interpreted, and counted in what is
lowered for its platform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from xla_child import needs_jax, run_child

pytestmark = needs_jax

BOUND = 2e-6
"""Of the largest value: sums in another order."""


@dataclass(frozen=True)
class Case:
    """What attention is asked for."""

    heads: int = 4
    kv_heads: int = 4
    width: int = 16
    value_width: int = 16
    length: int = 48
    documents: bool = False
    window: int | None = None
    scale: float | None = None
    cap: float | None = None


CASES = {
    "plain": Case(),
    "documents": Case(documents=True),
    "window": Case(window=7),
    "documents and window": Case(documents=True, window=7),
    "cap": Case(cap=2.0, documents=True),
    "cap and window": Case(cap=2.0, window=9, scale=0.5),
    "GQA": Case(kv_heads=2, documents=True),
    "MQA": Case(kv_heads=1),
    "MLA": Case(width=24, value_width=16, scale=0.3, documents=True),
}


def arrays(case: Case) -> tuple[list[np.ndarray], np.ndarray, np.ndarray | None]:
    """Queries, keys and values; the gradient of the result; documents."""
    draw, batch = np.random.default_rng(5), 4
    shapes = [(case.heads, case.width), (case.kv_heads, case.width), (case.kv_heads, case.value_width)]
    qkv = [draw.standard_normal((batch, heads, case.length, width)).astype(np.float32) for heads, width in shapes]
    pull = draw.standard_normal((batch, case.heads, case.length, case.value_width)).astype(np.float32)
    # Documents of any length, with a boundary at another place in each sequence.
    starts = draw.random((batch, case.length)) < 5 / case.length
    return qkv, pull, starts.cumsum(1).astype(np.int32) if case.documents else None


def by_torch(case: Case, dtype: str = "float32") -> list[np.ndarray]:
    """The result of the torch engine, and the gradients of queries, keys and values."""
    import torch

    from phalanx.models.attention import Scope, attend_locally

    qkv, pull, documents = arrays(case)
    leaves = [torch.tensor(value).to(getattr(torch, dtype)).requires_grad_() for value in qkv]
    scope = Scope(None if documents is None else torch.tensor(documents), window=case.window)
    out = attend_locally(*leaves, scope, case.scale, case.cap)
    gradients = torch.autograd.grad(out, leaves, torch.tensor(pull).to(out.dtype))
    return [value.detach().float().numpy() for value in (out, *gradients)]


def mesh(data: int = 1, shard: int = 1, context: int = 1, tensor: int = 1) -> Any:
    import jax

    axes = ("data", "shard", "context", "tensor")
    devices = np.array(jax.devices()[: data * shard * context * tensor]).reshape(data, shard, context, tensor)
    return jax.sharding.Mesh(devices, axes)


def function(case: Case, devices: Any) -> Any:
    """Of queries, keys, values, gradient and documents in the order of the devices: the result and the gradients."""
    from jax import vjp

    from phalanx.xla.fused_attention import Scoring, attend

    scoring = Scoring(case.window, case.scale, case.cap)

    def both(q: Any, k: Any, v: Any, pull: Any, documents: Any) -> Any:
        out, back = vjp(lambda *qkv: attend(*qkv, documents, scoring, devices), q, k, v)
        return (out, *back(pull))

    return both


def difference(case: Case, devices: Any) -> float:
    """The largest difference to torch of result and gradients, relative to each one's largest value."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    qkv, pull, documents = arrays(case)
    order = devices.positions(case.length)
    given = [value[:, :, order] for value in (*qkv, pull)]
    given.append(None if documents is None else documents[:, order])
    if devices.mesh is None:
        found = jax.jit(function(case, devices))(*given)
    else:
        heads = "tensor" if case.kv_heads % devices.size("tensor") == 0 else None
        stream, keys = (P(("data", "shard"), at, "context") for at in ("tensor", heads))
        specs = [stream, keys, keys, stream, P(("data", "shard"), "context")]
        placed = [None if v is None else NamedSharding(devices.mesh, s) for v, s in zip(given, specs, strict=True)]
        found = jax.jit(function(case, devices), in_shardings=placed)(*given)
    back = np.argsort(order)
    pairs = zip((np.asarray(value)[:, :, back] for value in found), by_torch(case), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def differences(kind: str, sizes: dict[str, int], options: dict[str, Any], names: list[str]) -> dict[str, float]:
    """In a child: the difference of each case."""
    from dataclasses import replace

    from phalanx.xla.fused_attention import Devices

    devices = Devices(mesh=mesh(**sizes) if sizes else None, **options)
    found = {}
    for name in names:
        # Splash takes any length; odd ones fill its blocks.
        case = replace(CASES[name], length=200) if kind == "splash" else CASES[name]
        found[name] = difference(case, devices)
    return found


def lowered(platform: str, sizes: dict[str, int], dtype: str, case: dict[str, Any]) -> dict[str, Any]:
    """In a child: the chosen kernel, and the kernels by name in a forward and backward lowered for another platform."""
    import re

    import jax
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    from phalanx.xla.fused_attention import Devices, Scoring, choose_kernel

    cudnn.check_cudnn_version = lambda: 91000  # there is none here to ask: nothing is compiled or run
    asked = Case(**{"width": 128, "value_width": 128, "length": 256} | case)
    devices = Devices(platform=platform, mesh=mesh(**sizes) if sizes else None)  # type: ignore[arg-type]
    qkv, pull, documents = arrays(asked)
    given = [jax.ShapeDtypeStruct(value.shape, dtype) for value in (*qkv, pull)]
    given.append(documents if documents is None else jax.ShapeDtypeStruct(documents.shape, "int32"))
    text = jax.jit(function(asked, devices)).trace(*given).lower(lowering_platforms=(platform,)).as_text()
    kernel = choose_kernel(given[0], given[4], Scoring(asked.window, asked.scale, asked.cap), devices)
    calls = re.findall(r"@tpu_custom_call|@__cudnn\$\w+", text)
    names = re.findall(r'kernel_name = "(\w+)"', text)
    return {"kernel": kernel.name, "reason": kernel.reason, "calls": sorted(calls), "names": sorted(names)}


LOWERED: dict[str, tuple[str, dict[str, int], str, dict[str, Any]]] = {
    "TPU, divided": ("tpu", {"data": 2, "tensor": 2}, "bfloat16", {"documents": True, "kv_heads": 2}),
    "TPU, context": (
        "tpu",
        {"context": 2, "tensor": 2},
        "bfloat16",
        {"documents": True, "kv_heads": 1, "window": 40, "cap": 3.0},
    ),
    "TPU, MLA": ("tpu", {}, "bfloat16", {"documents": True, "width": 192}),
    "TPU, narrow": ("tpu", {}, "bfloat16", {"documents": True, "width": 64, "value_width": 64}),
    "CUDA, divided": ("cuda", {"data": 2, "tensor": 2}, "bfloat16", {"kv_heads": 2}),
    "CUDA, documents": ("cuda", {"data": 2, "tensor": 2}, "bfloat16", {"documents": True, "kv_heads": 2}),
    "CUDA, window": ("cuda", {}, "bfloat16", {"window": 20}),
    "CUDA, context": ("cuda", {"context": 2}, "bfloat16", {"window": 30}),
    "CUDA, fp32": ("cuda", {}, "float32", {}),
    "CUDA, cap": ("cuda", {}, "bfloat16", {"cap": 2.0}),
}
QUICK: dict[str, tuple[str, dict[str, int], dict[str, Any], list[str]]] = {
    "one device": ("", {}, {}, ["documents and window", "cap", "MLA"]),
    "gather": ("", {"context": 2, "tensor": 2}, {"order": "zigzag"}, ["documents and window"]),
    "ring": ("", {"context": 2, "tensor": 2}, {"context": "ring", "order": "zigzag"}, ["cap"]),
    "splash": ("splash", {"tensor": 2}, {"platform": "tpu", "interpret": True}, ["GQA"]),
}
SPLASH = {"platform": "tpu", "interpret": True}
SLOW: dict[str, tuple[str, dict[str, int], dict[str, Any], list[str]]] = {
    "one device": ("", {}, {}, list(CASES)),
    "2 x 2 x 2": ("", {"data": 2, "shard": 2, "tensor": 2}, {}, list(CASES)),
    "gather": ("", {"data": 2, "context": 2, "tensor": 2}, {}, list(CASES)),
    "gather, zig-zag": ("", {"context": 4, "tensor": 2}, {"order": "zigzag"}, list(CASES)),
    "ring": ("", {"data": 2, "context": 2, "tensor": 2}, {"context": "ring"}, list(CASES)),
    "ring, zig-zag": ("", {"context": 4}, {"context": "ring", "order": "zigzag"}, list(CASES)),
    "splash": ("splash", {}, SPLASH, list(CASES)),
    "splash, divided": ("splash", {"data": 2, "shard": 2, "tensor": 2}, SPLASH, ["documents and window", "GQA", "MQA"]),
    "splash, context": ("splash", {"context": 2, "tensor": 2}, SPLASH, ["documents", "cap and window"]),
    "splash, zig-zag": ("splash", {"context": 2, "tensor": 2}, SPLASH | {"order": "zigzag"}, ["documents and window", "MLA"]),
}


def quick() -> dict[str, Any]:
    """In a child: what the quick tests look at, so that JAX is imported once."""
    return {
        "differences": {name: differences(*asked) for name, asked in QUICK.items()},
        "lowered": {name: lowered(*asked) for name, asked in LOWERED.items()},
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_child(__file__, "quick")


def assert_equal(errors: dict[str, float], cases: list[str]) -> None:
    assert list(errors) == cases
    assert {name: error for name, error in errors.items() if not error < BOUND} == {}


@pytest.mark.parametrize("where", QUICK)
def test_equals_torch(found: dict[str, Any], where: str) -> None:
    assert_equal(found["differences"][where], QUICK[where][3])


@pytest.mark.parametrize("where", ["TPU, divided", "TPU, context", "TPU, MLA", "TPU, narrow"])
def test_splash_is_three_kernels(found: dict[str, Any], where: str) -> None:
    seen = found["lowered"][where]
    assert seen["calls"] == ["@tpu_custom_call"] * 3
    assert [name.split("_")[2] for name in seen["names"]] == ["dkv", "dq", "fwd"]
    assert all("segmented" in name for name in seen["names"])


@pytest.mark.parametrize("where", ["CUDA, divided", "CUDA, documents", "CUDA, window", "CUDA, context"])
def test_cudnn_is_two_kernels(found: dict[str, Any], where: str) -> None:
    kernel = "ScaleBias" if where in ("CUDA, documents", "CUDA, context") else ""
    assert found["lowered"][where]["calls"] == [f"@__cudnn$fmha{kernel}Softmax", f"@__cudnn$fmha{kernel}SoftmaxBackward"]


@pytest.mark.parametrize(("where", "reason"), [("CUDA, fp32", "16 bits"), ("CUDA, cap", "soft cap")])
def test_what_cudnn_has_not_is_plain(found: dict[str, Any], where: str, reason: str) -> None:
    seen = found["lowered"][where]
    assert seen["kernel"] == "plain" and reason in seen["reason"] and seen["calls"] == []


@pytest.mark.slow
@pytest.mark.parametrize("where", SLOW)
def test_every_case_equals_torch(where: str) -> None:
    assert_equal(run_child(__file__, "differences", *SLOW[where], timeout=1800), SLOW[where][3])


def in_bf16() -> dict[str, list[list[float]]]:
    """In a child: for each case the distances of result and gradients to those in fp32, of this engine and of torch's, both in bf16."""
    import jax
    import jax.numpy as jnp

    from phalanx.xla.fused_attention import Devices

    places = {"plain": Devices(), "ring": Devices(mesh=mesh(context=2), context="ring")}
    found = {}
    for where, devices in places.items():
        for name in ("documents and window", "cap", "MLA"):
            qkv, pull, documents = arrays(CASES[name])
            given = [jnp.asarray(value, jnp.bfloat16) for value in (*qkv, pull)]
            ours = jax.jit(function(CASES[name], devices))(*given, documents)
            exact = by_torch(CASES[name])
            found[f"{where}, {name}"] = [
                [
                    float(np.abs(np.asarray(value, np.float32) - truth).mean())
                    for value, truth in zip(values, exact, strict=True)
                ]
                for values in (ours, by_torch(CASES[name], "bfloat16"))
            ]
    return found


@pytest.mark.slow
def test_bf16_is_as_near_as_torch() -> None:
    for name, (ours, torchs) in run_child(__file__, "in_bf16").items():
        assert all(0 < one < 1.25 * other for one, other in zip(ours, torchs, strict=True)), (name, ours, torchs)


def misplaced() -> float:
    """In a child: the difference if an array in zig-zag order is taken for one in rising order."""
    from phalanx.xla.fused_attention import Devices

    class Mistaken(Devices):
        def positions(self, length: int) -> Any:
            self.__dict__["asked"] = self.__dict__.get("asked", 0) + 1
            # The first to ask is the test, which puts the arrays into this order.
            return super().positions(length) if self.__dict__["asked"] == 1 else np.arange(length, dtype=np.int32)

    return difference(CASES["plain"], Mistaken(mesh=mesh(context=2), order="zigzag"))


@pytest.mark.slow
def test_indices_taken_for_positions_are_seen() -> None:
    assert not run_child(__file__, "misplaced") < 1e-2
