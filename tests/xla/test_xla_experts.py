"""Routed experts on virtual devices: equal to the torch engine's dispatch, and each device's work is its share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from xla_child import needs_jax, run_child

pytestmark = needs_jax

EXPERTS, DIM, FFN, ACTIVE = 8, 16, 24, 2
FORMS = {
    "one device": {},
    "expert 2": {"expert": ["shard"]},
    "expert 4": {"expert": ["shard", "tensor"]},
    "expert 8": {"expert": ["data", "shard", "tensor"]},
    "expert_tensor 2": {"expert_tensor": ["tensor"]},
    "expert 2, expert_tensor 2": {"expert": ["shard"], "expert_tensor": ["tensor"]},
    "expert 2 over sequences": {"expert": ["shard"], "sequences": 4},
    "expert 4 over sequences": {"expert": ["shard", "tensor"], "sequences": 4},
}
ROUTES = ("even", "random", "one expert", "odd tokens")
BOUND = 2e-6
"""Of the largest value: sums in another order."""


@dataclass
class Case:
    """Tokens, their experts and what the torch engine makes of them."""

    inputs: list[np.ndarray]
    """Tokens, weights of their experts, and gate, up and down of all experts."""
    chosen: np.ndarray
    pull: np.ndarray
    """Gradient of the result."""
    out: np.ndarray
    gradients: list[np.ndarray]


def case(route: str, tokens: int = 64, dtype: str = "float32") -> Case:
    import torch

    from phalanx.models.moe import Experts, dispatch_locally
    from phalanx.spec.model import Moe

    draw = np.random.default_rng(3)
    tokens = tokens - 4 if route == "odd tokens" else tokens  # 60: no multiple of 8 devices
    chosen = np.stack([draw.permutation(EXPERTS)[:ACTIVE] for _ in range(tokens)])
    if route == "even":
        chosen = np.arange(tokens * ACTIVE).reshape(tokens, ACTIVE) % EXPERTS
    if route == "one expert":
        chosen = np.tile([5, 2], (tokens, 1))
    shapes = [(tokens, DIM), (tokens, ACTIVE), (EXPERTS, FFN, DIM), (EXPERTS, FFN, DIM), (EXPERTS, DIM, FFN)]
    inputs = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    pull = draw.standard_normal((tokens, DIM)).astype(np.float32)
    experts = Experts(DIM, Moe(experts=EXPERTS, active=ACTIVE, ffn=FFN))
    x = torch.tensor(inputs[0]).to(getattr(torch, dtype)).requires_grad_()
    weights = torch.tensor(inputs[1], requires_grad=True)
    stacks = [experts.gate, experts.up, experts.down]
    with torch.no_grad():
        for stack, value in zip(stacks, inputs[2:], strict=True):
            stack.copy_(torch.tensor(value))
    out = dispatch_locally(x, torch.tensor(chosen), weights, experts)
    gradients = torch.autograd.grad(out, [x, weights, *stacks], torch.tensor(pull).to(out.dtype))
    out, *gradients = (value.detach().float().numpy() for value in (out, *gradients))
    return Case(inputs, chosen.astype(np.int32), pull, out, gradients)


def emulated(operand: Any, output: Any, *places: Any, axis_name: Any) -> Any:
    """`jax.lax.ragged_all_to_all` as its documentation describes it, by gathering everything: CPUs do not have it."""
    import jax
    import jax.numpy as jnp

    input_offsets, send_sizes, output_offsets, recv_sizes = places
    me = jax.lax.axis_index(axis_name)
    rows, starts, sizes, ends = (
        jax.lax.all_gather(value, axis_name) for value in (operand, input_offsets, send_sizes, output_offsets)
    )
    place = jnp.arange(len(output))
    for source in range(len(rows)):
        within = place - ends[source, me]
        comes = (within >= 0) & (within < sizes[source, me])
        # A receiver that expects another number of rows would wait for ever.
        agreed = sizes[source, me] == recv_sizes[source]
        value = rows[source].at[jnp.where(comes, starts[source, me] + within, len(operand))].get(mode="fill", fill_value=0)
        output = jnp.where((comes & agreed).reshape(-1, *[1] * (output.ndim - 1)), value, output)
    return output


def layout_of(form: dict[str, Any], exchange: str, **more: Any) -> Any:
    from phalanx.xla.experts import ExpertLayout

    axes = {name: tuple(value) if isinstance(value, list) else value for name, value in form.items()}
    return ExpertLayout(**axes, exchange=exchange, **more)


def mesh() -> Any:
    import jax

    return jax.make_mesh((2, 2, 1, 2), ("data", "shard", "context", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 4)


def value_and_gradients(where: Any, layout: Any) -> Any:
    """A jitted function: the result, and the gradients of tokens, weights and experts, which lie on the devices that have them."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from phalanx.xla.experts import ExpertWeights, dispatch, weight_specs

    def both(*given: Any) -> Any:
        x, weights, *stacks, chosen, pull = given

        def out(x: Any, weights: Any, experts: Any) -> Any:
            return dispatch(x, chosen, weights, experts, where, layout)

        result, back = jax.vjp(out, x, weights, ExpertWeights(*stacks))
        dx, dweights, dexperts = back(pull)
        return result, [dx, dweights, *dexperts]

    if where is None:
        return jax.jit(both)
    tokens, experts = NamedSharding(where, P()), [NamedSharding(where, spec) for spec in weight_specs(layout)]
    return jax.jit(
        both, in_shardings=(tokens, tokens, *experts, tokens, tokens), out_shardings=(tokens, [tokens, tokens, *experts])
    )


def differences(exchange: str, forms: list[str], routes: list[str]) -> dict[str, float]:
    """In a child: the largest difference to torch over the result and all gradients, relative to each one's largest value."""
    found = {}
    for name in forms:
        layout = layout_of(FORMS[name], exchange, ragged_all_to_all=emulated)
        function = value_and_gradients(None if name == "one device" else mesh(), layout)
        for route in routes:
            expected = case(route)
            out, gradients = function(*expected.inputs, expected.chosen, expected.pull)
            pairs = zip([out, *gradients], [expected.out, *expected.gradients], strict=True)
            found[f"{exchange}, {name}, {route}"] = max(
                float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in pairs
            )
    return found


def flops(forms: list[str]) -> dict[str, dict[str, float]]:
    """In a child: floating point operations of a forward and backward as XLA counts them on one device, over those of all rows."""
    import jax.numpy as jnp

    from phalanx.xla.grouped_product import pass_count

    draw, tokens, dim, ffn = np.random.default_rng(1), 1024, 128, 256
    chosen = (np.arange(tokens * ACTIVE).reshape(tokens, ACTIVE) % EXPERTS).astype(np.int32)
    shapes = [(tokens, dim), (tokens, ACTIVE), (EXPERTS, ffn, dim), (EXPERTS, ffn, dim), (EXPERTS, dim, ffn)]
    inputs = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    pull, every = np.ones((tokens, dim), np.float32), 18.0 * tokens * ACTIVE * dim * ffn  # 3 products, 2 more of each backward
    found = {}
    for name in forms:
        where = mesh() if name != "undivided" else None
        compiled = value_and_gradients(where, layout_of(FORMS.get(name, {}), "gather")).lower(*inputs, chosen, pull).compile()
        # XLA counts the body of a loop once: this is what a step does only if the loop runs once, as it does if each device's tokens, and so
        # those of any group, choose all experts equally often.
        counts = [jnp.bincount(jnp.asarray(part.reshape(-1)), length=EXPERTS) for part in np.split(chosen, 8)]
        passes = max(int(pass_count(count, tokens * ACTIVE // EXPERTS // 8)) for count in counts)
        found[name] = {"share": compiled.cost_analysis()["flops"] / every, "passes": passes}
    return found


def lowered(platform: str) -> dict[str, Any]:
    """In a child: the collectives of rows, and the operands of the grouped products, in what is lowered for another platform."""
    import re

    expected = case("even")
    layout = layout_of(FORMS["expert 4"], "ragged", product="ragged")
    traced = value_and_gradients(mesh(), layout).trace(*expected.inputs, expected.chosen, expected.pull)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in text.splitlines() if "chlo.ragged_dot" in line]
    return {
        "all_to_alls": len(re.findall(r"custom_call @ragged_all_to_all", text)),
        "products": len(products),
        "local": sum(bool(re.search(rf"tensor<{EXPERTS // 4}x\d+x\d+xf32>", line)) for line in products),
    }


def quick() -> dict[str, Any]:
    """In a child: what the quick tests look at, so that JAX is imported once."""
    routes = ["even", "random", "one expert"]
    return {
        "differences": differences("gather", ["expert 2, expert_tensor 2"], routes)
        | differences("ragged", ["expert 4 over sequences"], routes),
        "flops": flops(["expert 2", "expert 4", "undivided"]),
        "lowered": {platform: lowered(platform) for platform in ("tpu", "cuda")},
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_child(__file__, "quick")


def test_equals_torch(found: dict[str, Any]) -> None:
    assert len(found["differences"]) == 6
    assert {name: error for name, error in found["differences"].items() if not error < BOUND} == {}


@pytest.mark.parametrize("form", ["expert 2", "expert 4"])
def test_a_device_does_its_share(found: dict[str, Any], form: str) -> None:
    work = found["flops"][form]
    assert work["passes"] == 1
    assert 0.99 < 8 * work["share"] < 1.1


def test_work_that_is_not_divided_is_seen(found: dict[str, Any]) -> None:
    assert 8 * found["flops"]["undivided"]["share"] > 7.9


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_rows_travel_by_the_collective(found: dict[str, Any], platform: str) -> None:
    # Rows and their scales there, results back, and each one's gradient. Three products, each with two more in the backward.
    assert found["lowered"][platform] == {"all_to_alls": 6, "products": 9, "local": 9}


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "ragged"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_form_equals_torch(exchange: str, route: str) -> None:
    errors = run_child(__file__, "differences", exchange, list(FORMS), [route], timeout=1200)
    assert len(errors) == len(FORMS)
    assert {name: error for name, error in errors.items() if not error < BOUND} == {}


@pytest.mark.slow
def test_every_form_does_its_share() -> None:
    work = run_child(__file__, "flops", [name for name in FORMS if name != "one device"], timeout=1200)
    assert {name: share for name, share in work.items() if share["passes"] != 1 or not 0.99 < 8 * share["share"] < 1.1} == {}


def refusals() -> list[str]:
    """In a child: what layouts that cannot be say."""
    from phalanx.xla.experts import ExpertWeights, dispatch

    x, weights, *stacks = (np.zeros(shape, np.float32) for shape in ((64, 16), (64, 2), (8, 24, 16), (8, 24, 16), (8, 16, 24)))
    chosen, said = np.zeros((64, 2), np.int32), []
    for axes in (
        {"expert": ("shard",), "sequence": ("context",)},
        {"expert": ("other",)},
        {"expert_tensor": ("tensor",), "sequences": 5},
    ):
        try:
            dispatch(x, chosen, weights, ExpertWeights(*stacks), mesh(), layout_of(axes, "gather"))  # type: ignore[arg-type]
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_refusals() -> None:
    idle, unknown, uneven = run_child(__file__, "refusals")
    assert "['tensor']" in idle and "['other']" in unknown and "5 sequences" in uneven


def in_bf16() -> dict[str, list[list[float]]]:
    """In a child: the distances of result and gradients to those in fp32, of this engine and of torch's, both with tokens in bf16."""
    import jax.numpy as jnp

    exact, torchs, found = case("random"), case("random", dtype="bfloat16"), {}
    for name in ("one device", "expert 4"):
        function = value_and_gradients(None if name == "one device" else mesh(), layout_of(FORMS[name], "gather"))
        x, *others = exact.inputs
        out, gradients = function(jnp.asarray(x, jnp.bfloat16), *others, exact.chosen, jnp.asarray(exact.pull, jnp.bfloat16))
        found[name] = [
            [float(np.abs(np.asarray(value, np.float32) - truth).mean()) for value, truth in zip(values, truths, strict=True)]
            for values, truths in (
                ([out, *gradients], [exact.out, *exact.gradients]),
                ([torchs.out, *torchs.gradients], [exact.out, *exact.gradients]),
            )
        ]
    return found


@pytest.mark.slow
def test_bf16_is_as_near_as_torch() -> None:
    for name, (ours, torchs) in run_child(__file__, "in_bf16").items():
        assert all(0 < one < 1.25 * other for one, other in zip(ours, torchs, strict=True)), (name, ours, torchs)
