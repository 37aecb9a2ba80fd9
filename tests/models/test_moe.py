from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.models.init import build, materialize
from phalanx.models.moe import Experts, MoE, Router, ZeroUnusedGradients, balance, dispatch_locally, loop_experts, routers
from phalanx.spec.model import ModelSpec, Moe

CPU = torch.device("cpu")
PLAIN = Moe(experts=6, active=2, ffn=24)
SIGMOID = Moe(experts=8, active=3, ffn=24, shared=1, router="sigmoid", groups=4, active_groups=2, scale=2.5, bias_rate=0.01)
KINDS = {"softmax": PLAIN, "sigmoid": SIGMOID}
SPEC = ModelSpec(vocab=41, dim=16, layers=2, heads=2, ffn=32, context=64, moe=PLAIN)


def lively(moe: Moe, dim: int = 16, dtype: torch.dtype = torch.float32) -> MoE:
    layer = MoE(dim, moe)
    dice = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=dice) * 0.3)
    return layer.to(dtype)


def rows(count: int, dim: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def one_by_one(layer: MoE, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Token after token through its experts, in fp64: what any dispatch must give."""
    gate, up, down = (weight.double() for weight in (layer.experts.gate, layer.experts.up, layer.experts.down))
    out = []
    for x, chosen, weights in zip(x_TD.double(), chosen_TK.tolist(), weights_TK.double(), strict=True):
        parts = [down[e] @ (torch.nn.functional.silu(gate[e] @ x) * (up[e] @ x)) for e in chosen]
        out.append(sum(w * part for w, part in zip(weights, parts, strict=True)))
    return torch.stack(out)  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [[5, 5, 5, 5, 5, 5], [0, 12, 0, 1, 17, 0], [30, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 30]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_equals_the_loop(counts: list[int], dtype: torch.dtype) -> None:
    experts = lively(PLAIN).experts
    given, found = rows(30).to(dtype), []
    each = torch.tensor(counts)
    for grouped in (True, False):
        x = given.clone().requires_grad_()
        weights = [weight.detach().to(dtype).requires_grad_() for weight in (experts.gate, experts.up, experts.down)]
        if grouped:
            held = Experts(16, PLAIN)
            held.gate, held.up, held.down = (torch.nn.Parameter(weight.detach()) for weight in weights)
            y, weights = held(x, each), [held.gate, held.up, held.down]
        else:
            y = loop_experts(x, counts, *weights)
        (y.float() ** 2).sum().backward()
        found.append([y.detach(), x.grad, *(weight.grad for weight in weights)])
    exact = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and one.abs().max() > 0
        torch.testing.assert_close(one, other, **exact)
    for weight in found[0][2:]:
        assert all((weight[e] == 0).all() for e, count in enumerate(counts) if count == 0)  # nobody came, nothing to learn


@pytest.mark.parametrize(("count", "ffn"), [(0, 24), (30, 0)], ids=["no rows", "no width"])
def test_experts_without_rows_or_width_give_zeros_and_learn_zeros(count: int, ffn: int) -> None:
    experts = lively(replace(PLAIN, ffn=ffn)).experts
    x = rows(count).requires_grad_()
    y = experts(x, torch.tensor([count, 0, 0, 0, 0, 0]))
    assert y.shape == (count, 16) and not y.any()
    y.sum().backward()
    for found in (x, *experts.parameters()):  # not None: whoever waits for a gradient would wait for ever
        assert found.grad is not None and found.grad.shape == found.shape and not found.grad.any()


def test_what_a_gpu_leaves_unwritten_for_experts_without_rows_is_no_gradient() -> None:
    weight = torch.ones(3, 2, 2, requires_grad=True)
    y = ZeroUnusedGradients.apply(weight, torch.tensor([2, 0, 1]))
    assert torch.equal(y, weight)
    unwritten = torch.ones(3, 2, 2)
    unwritten[1] = torch.nan
    y.backward(unwritten)
    assert weight.grad is not None and weight.grad[:, 0, 0].tolist() == [1, 0, 1]


def test_it_is_the_grouped_product_that_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    real = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *a, **k: used.append(a[0].dtype) or real(*a, **k))
    each = torch.tensor([1, 2, 3, 4, 5, 6])
    lively(PLAIN).experts(rows(21), each)
    assert used == [torch.float32] * 3
    used.clear()
    lively(PLAIN, dtype=torch.float64).experts(rows(21).double(), each)  # not offered: fp64,
    lively(replace(PLAIN, ffn=23)).experts(rows(21), each)  # and rows that are no whole 16 bytes
    lively(PLAIN, dim=18).experts(rows(21, 18), each)
    assert used == []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lively(PLAIN)(rows(21)[None])
    assert used == [torch.bfloat16] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_reaches_every_expert_it_chose(kind: str) -> None:
    layer = lively(KINDS[kind])
    x = rows(40)
    crowd = torch.zeros(40, 2, dtype=torch.int64)
    crowd[:, 1] = 3  # all tokens want the same two: none may be turned away
    routed = layer.router(x[None])
    for chosen, weights in ((crowd, rows(40, 2).abs()), (routed[0], routed[1].detach())):
        y = dispatch_locally(x, chosen, weights, layer.experts)
        torch.testing.assert_close(y.double(), one_by_one(layer, x, chosen, weights), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_tokens_taken_one_by_one(kind: str) -> None:
    layer = lively(KINDS[kind], dtype=torch.float64)
    x = rows(12).double().requires_grad_()
    inputs = [x, *layer.experts.parameters()]
    chosen, weights = layer.router(x[None])
    weights = weights.double()
    fast = torch.autograd.grad((dispatch_locally(x, chosen, weights, layer.experts) ** 2).sum(), inputs, retain_graph=True)
    slow = torch.autograd.grad((one_by_one(layer, x, chosen, weights) ** 2).sum(), inputs)
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


def test_shared_experts_take_every_token() -> None:
    layer, x = lively(SIGMOID), rows(10)[None]
    assert layer.shared is not None
    chosen, weights = layer.router(x)
    routed = dispatch_locally(x[0], chosen, weights, layer.experts)
    torch.testing.assert_close(layer(x)[0] - routed, layer.shared(x)[0], atol=1e-6, rtol=1e-5)


def test_dispatch_can_be_replaced_from_outside() -> None:
    model = materialize(build(SPEC), 1, CPU)
    seen = []

    def dispatch(x, chosen, weights, experts):  # type: ignore[no-untyped-def]
        seen.append((tuple(x.shape), tuple(chosen.shape), tuple(weights.shape), experts))
        return torch.zeros_like(x)

    for block in model.blocks.values():  # type: ignore[union-attr]
        block.mlp.dispatch = dispatch  # type: ignore[union-attr]
    model(torch.zeros(2, 6, dtype=torch.int64), torch.arange(6).expand(2, 6))
    assert seen == [((12, 16), (12, 2), (12, 2), block.mlp.experts) for block in model.blocks.values()]  # type: ignore[union-attr]


def test_dispatch_needs_only_something_that_is_called_like_experts() -> None:
    layer, x = lively(SIGMOID), rows(20)[None]
    asked: list[list[int]] = []

    class Elsewhere:
        count = 8

        def __call__(self, x_RD: Tensor, counts_E: Tensor, /, *scales_R: Tensor) -> Tensor:
            asked.append(counts_E.tolist())
            return layer.experts(x_RD, counts_E, *scales_R)

    class Scaled(Elsewhere):
        takes_scales = True

    chosen, weights = layer.router(x)
    y = dispatch_locally(x[0], chosen, weights, layer.experts)
    assert torch.equal(dispatch_locally(x[0], chosen, weights, Scaled()), y)
    # Experts without scales: results are multiplied after the last product instead of before it.
    torch.testing.assert_close(dispatch_locally(x[0], chosen, weights, Elsewhere()), y, atol=1e-6, rtol=1e-5)
    assert asked == [torch.bincount(chosen.flatten(), minlength=8).tolist()] * 2


def test_groups_limit_the_choice() -> None:
    router = Router(16, replace(SIGMOID, active=2, active_groups=1))
    scores = torch.tensor([[0.9, 0.1, 0.65, 0.6, 0.8, 0.3, 0.0, 0.0]])  # the best expert's group is not the best pair's
    assert sorted(router.choose(scores)[0].tolist()) == [2, 3]
    router.moe = replace(router.moe, active_groups=2)
    assert sorted(router.choose(scores)[0].tolist()) == [2, 4]  # groups (2, 3) and (4, 5)
    router.moe = replace(router.moe, active_groups=4)
    assert sorted(router.choose(scores)[0].tolist()) == [0, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_the_router_computes_in_fp32_whatever_the_rest_does(kind: str) -> None:
    layer, x = lively(KINDS[kind]), rows(64)[None]
    chosen, weights = layer.router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, weights_again = layer.router(x)
        y = layer(x)
    assert torch.equal(chosen, again) and torch.equal(weights, weights_again) and weights.dtype == torch.float32
    torch.testing.assert_close(y.float(), layer(x), atol=5e-2, rtol=5e-2)


def test_tokens_are_counted_in_training_only() -> None:
    router = lively(PLAIN).router
    x = rows(30).view(2, 15, 16)
    with torch.no_grad():
        chosen, _ = router(x)
    assert router.counts.tolist() == [0] * 6
    router(x)
    router(x)
    assert router.counts.tolist() == (2 * torch.bincount(chosen.flatten(), minlength=6)).tolist()
    assert router.counts.sum() == 2 * 30 * 2  # no token dropped


def test_buffers_begin_at_zero_and_the_bias_is_saved() -> None:
    model = materialize(build(replace(SPEC, moe=SIGMOID, layers=2)), 1, CPU)
    assert len(routers(model)) == 2
    for router in routers(model).values():
        assert router.bias is not None and router.bias.dtype == torch.float32
        assert router.bias.tolist() == [0.0] * 8 and router.counts.tolist() == [0] * 8
    saved = {name for name in model.state_dict() if name not in dict(model.named_parameters())}
    assert saved == {"blocks.0.mlp.router.bias", "blocks.1.mlp.router.bias"}
    assert next(iter(routers(build(SPEC)).values())).bias is None  # softmax without bias_rate, as Mixtral's


@pytest.mark.parametrize("kind", KINDS)
def test_rebalancing_evens_a_skewed_router(kind: str) -> None:
    router = Router(16, replace(KINDS[kind], bias_rate=0.01))
    dice = torch.Generator().manual_seed(2)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=dice) * 0.2)
        router.weight[0] += 0.3  # x has a mean: nearly every token likes expert 0 best
    x = torch.randn(8, 64, 16, generator=dice) + 0.3

    def load() -> float:
        router.counts.zero_()
        router(x)
        return float(router.counts.max() / router.counts.float().mean())

    before = load()
    for _ in range(200):
        router.rebalance(router.counts)
        after = load()
    assert before > 1.8
    assert after < 1.3
    _, weights = router(x)
    if router.moe.normalize:  # the bias weighs nothing
        torch.testing.assert_close(weights.sum(-1), torch.full((512,), router.moe.scale))


@pytest.mark.parametrize(
    ("spread", "step"),
    [(0.0, 0.0005), (0.05, 0.003), (3.0, 0.01)],
    ids=["at first a twentieth of the rate", "six hundredths of the spread of the biases", "never more than the rate"],
)
def test_a_step_of_rebalancing_follows_what_is_missing_and_the_spread_of_the_biases(spread: float, step: float) -> None:
    router = Router(16, SIGMOID)
    assert router.bias is not None
    before = spread * torch.tensor([1.0, -1.0] * 4)
    router.bias.copy_(before)
    router.rebalance(torch.tensor([9, 3, 6, 6, 0, 24, 0, 0]))  # the mean is 6
    torch.testing.assert_close(router.bias - before, step * torch.tensor([-0.5, 0.5, 0, 0, 1, -1, 1, 1]), rtol=1e-4, atol=1e-6)


def test_the_balancing_loss_is_the_published_one() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = rows(40, 6)
    counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=6)
    expected = mixtral.load_balancing_loss_func((logits,), 6, 2) / 2  # there it is 2 when even, the number of choices
    torch.testing.assert_close(balance(logits.softmax(-1)[None], counts[None]) / 40, expected)
    even = torch.full((3, 7, 6), 0.1)
    torch.testing.assert_close(balance(even, torch.full((3, 6), 5)), torch.tensor(21.0))  # 1 for each token


def gradients(moe: Moe, batches: list[Tensor], loss_scale: float) -> dict[str, Tensor]:
    model = materialize(build(replace(SPEC, moe=moe, init_std=0.3)), 3, CPU)
    for router in routers(model).values():
        router.loss_scale = loss_scale
    for tokens in batches:
        (model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens)).sum() * 0).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_the_balancing_loss_does_not_depend_on_micro_batches(kind: str) -> None:
    moe = replace(KINDS[kind], balance_loss=0.5)
    tokens = torch.randint(41, (4, 12), generator=torch.Generator().manual_seed(4))
    whole = gradients(moe, [tokens], 1 / 48)
    assert whole["blocks.0.mlp.router.weight"].abs().max() > 1e-5
    assert whole["blocks.1.mlp.experts.gate"].abs().max() == 0  # it teaches the router and what lies before it
    assert whole["embed.weight"].abs().max() > 1e-7
    for parts in (tokens.split(1), tokens.split(2), tokens.split((1, 3))):
        for name, gradient in gradients(moe, list(parts), 1 / 48).items():
            torch.testing.assert_close(gradient, whole[name], atol=1e-7, rtol=1e-4)
    doubled = gradients(moe, [tokens], 1 / 24)
    for name, gradient in whole.items():
        torch.testing.assert_close(doubled[name], 2 * gradient, atol=1e-7, rtol=1e-4)


def test_the_balancing_loss_has_the_gradient_of_itself() -> None:
    router = lively(replace(SIGMOID, balance_loss=0.5)).router
    router.loss_scale = 0.25
    x = rows(30).view(2, 15, 16)
    chosen, weights = router(x)
    (through,) = torch.autograd.grad(weights.sum() * 0, router.weight)
    counts = torch.stack([torch.bincount(part.flatten(), minlength=8) for part in chosen.view(2, -1)])
    (direct,) = torch.autograd.grad(0.25 * 0.5 * balance((x @ router.weight.T).sigmoid(), counts), router.weight)
    torch.testing.assert_close(through, direct)
