from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.models.attention import Scope
from phalanx.models.decoder import AXES, INITIAL, Decoder
from phalanx.models.init import build, materialize
from phalanx.spec.model import PRESETS, Mla, ModelSpec, Moe

GPT = ModelSpec(
    vocab=41, dim=24, layers=2, heads=3, ffn=40, context=32,
    norm="layer", activation="gelu", positions="learned", bias=True, tied=True,
)  # fmt: skip
LLAMA = ModelSpec(vocab=41, dim=24, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=40, context=32)
QWEN = replace(LLAMA, qk_norm=True, head_dim=10, tied=True)
BIASED = replace(LLAMA, bias=True)
GEMMA = replace(
    LLAMA, qk_norm=True, tied=True, norm_place="both", norm_zero_centered=True, activation="geglu", scale_embedding=True, window=5,
    global_every=2, rope_local_theta=100.0, attention_cap=5.0, logit_cap=10.0, query_scalar=6, qkv_bias=True,
)  # fmt: skip
MIXTRAL = replace(LLAMA, moe=Moe(experts=5, active=2, ffn=36))
LATENT = Mla(kv_rank=14, q_rank=18, nope_dim=6, rope_dim=4, value_dim=7)
DEEPSEEK = replace(
    LLAMA, kv_heads=None, head_dim=None, layers=3, mla=LATENT,
    moe=Moe(experts=6, active=2, ffn=20, shared=2, dense_layers=1, router="sigmoid", groups=3, active_groups=2, scale=2.5),
)  # fmt: skip
STRAIGHT = replace(DEEPSEEK, mla=replace(LATENT, q_rank=None), moe=None)
FAMILIES = {
    "gpt": GPT, "llama": LLAMA, "qwen": QWEN, "biased": BIASED, "gemma": GEMMA, "mixtral": MIXTRAL, "deepseek": DEEPSEEK, "straight": STRAIGHT,
}  # fmt: skip
WITH_AHEAD = FAMILIES | {
    f"{name}, ahead": replace(FAMILIES[name], mtp_depth=2) for name in ("gpt", "qwen", "biased", "mixtral", "deepseek")
}


def first_match(table: dict[str, object], name: str) -> str:
    return next(pattern for pattern in table if fnmatchcase(name, pattern))


def sizes(spec: ModelSpec) -> dict[str, set[int]]:
    """What a dimension of each name may measure."""
    known = {
        "vocab": {spec.rows},
        "model": {spec.dim},
        "joined": {2 * spec.dim},
        "position": {spec.context},
        "ffn": {spec.hidden},
    }
    if spec.moe is not None:
        known |= {"route": {spec.moe.experts}, "expert": {spec.moe.experts}}
        known["ffn"] = {spec.hidden, spec.moe.ffn, spec.moe.shared * spec.moe.ffn}
    mla = spec.mla
    if mla is None:
        return known | {"heads": {spec.heads * spec.head}, "kv_heads": {spec.kv * spec.head}, "head": {spec.head}}
    widths = (mla.nope_dim + mla.rope_dim, mla.nope_dim + mla.value_dim, mla.value_dim)
    known |= {"heads": {spec.heads * width for width in widths}, "kv_rank": {mla.kv_rank, mla.kv_rank + mla.rope_dim}}
    return known | ({} if mla.q_rank is None else {"query_rank": {mla.q_rank}})


@pytest.mark.parametrize("family", WITH_AHEAD)
def test_axes_name_the_dimensions_of_every_parameter(family: str) -> None:
    spec = WITH_AHEAD[family]
    known = sizes(spec)
    for name, parameter in build(spec).named_parameters():
        names = AXES[first_match(AXES, name)]
        assert len(names) == parameter.ndim, name
        for axis, size in zip(names, parameter.shape, strict=True):
            assert size in known[axis], (name, axis)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ahead", [0, 1])
def test_axes_cover_every_preset(preset: str, ahead: int) -> None:
    spec = replace(PRESETS[preset], vocab=PRESETS[preset].vocab or 257, layers=min(PRESETS[preset].layers, 5), mtp_depth=ahead)
    for name, parameter in build(spec).named_parameters():
        assert len(AXES[first_match(AXES, name)]) == parameter.ndim, name


def test_every_line_of_both_tables_is_the_first_match_of_some_parameter() -> None:
    names = {name for spec in WITH_AHEAD.values() for name, _ in build(spec).named_parameters()}
    assert {first_match(AXES, name) for name in names} == set(AXES)
    assert {first_match(INITIAL, name) for name in names} == set(INITIAL)


@pytest.mark.parametrize("family", WITH_AHEAD)
def test_initial_values_follow_the_kind_of_module(family: str) -> None:
    model = build(WITH_AHEAD[family])
    expected = {}
    for path, module in model.named_modules():
        for kind, _ in module.named_parameters(recurse=False):
            norm = isinstance(module, nn.LayerNorm | nn.RMSNorm)
            writes = path.endswith((".output", ".down")) or kind == "down"  # into the residual stream
            weight = "ones" if norm else "residual" if writes else "normal"
            expected[f"{path}.{kind}"] = "zeros" if kind == "bias" else weight
    assert {name: INITIAL[first_match(INITIAL, name)] for name, _ in model.named_parameters()} == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_the_spec_counts_what_the_module_holds(preset: str) -> None:
    spec = replace(PRESETS[preset], vocab=PRESETS[preset].vocab or 257)
    model = build(spec)
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == spec.parameters()


@pytest.mark.parametrize("family", WITH_AHEAD)
def test_the_spec_counts_what_the_module_holds_in_small(family: str) -> None:
    # No preset has a gated feed-forward with biases, or predicts ahead.
    spec = WITH_AHEAD[family]
    held = {name: p.numel() for name, p in build(spec).named_parameters()}
    assert sum(held.values()) == spec.parameters()
    idle = 0.0
    if spec.moe is not None:
        routed = sum(count for name, count in held.items() if ".experts." in name)
        idle = routed * (1 - spec.moe.active / spec.moe.experts)
    assert spec.active_parameters() == pytest.approx(sum(held.values()) - idle, abs=0.1)


@pytest.mark.parametrize("family", WITH_AHEAD)
def test_the_spec_counts_the_products_that_a_forward_takes(family: str) -> None:
    # A window saves nothing here: attention is computed over the whole table.
    spec, length = replace(WITH_AHEAD[family], window=None, global_every=None, rope_local_theta=None), 16
    # fp64 goes through the loop of experts, and plain attention: products that torch's own counter knows.
    model = materialize(build(spec), 5, torch.device("cpu")).double().train()
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = attend_plainly
    tokens, positions = torch.randint(41, (1, length)), torch.arange(length)[None]
    with FlopCounterMode(display=False) as counted:
        model(tokens, positions)
    assert 3 * counted.get_total_flops() == length * spec.flops_per_token(length)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, scope: Scope, *_: float | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def lively(spec: ModelSpec) -> Decoder:
    """Weights so large that a wrongly attended position could not go unseen."""
    return materialize(build(replace(spec, init_std=0.3)), 5, torch.device("cpu")).requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_as_if_alone(family: str) -> None:
    model = lively(FAMILIES[family])
    dice = torch.Generator().manual_seed(2)
    lengths = (11, 1, 9)
    texts = [torch.randint(41, (2, length), generator=dice) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    documents = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)]).expand(2, -1)
    packed = model(torch.cat(texts, dim=1), positions, documents).split(lengths, dim=1)
    for text, logits in zip(texts, packed, strict=True):
        alone = model(text, torch.arange(text.shape[1]).expand(2, -1))
        torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_have_their_own_boundaries(family: str) -> None:
    model = lively(FAMILIES[family])
    tokens = torch.randint(41, (2, 12), generator=torch.Generator().manual_seed(3))
    positions = torch.stack((torch.arange(12), torch.cat((torch.arange(5), torch.arange(7)))))
    documents = torch.stack((torch.zeros(12), torch.cat((torch.zeros(5), torch.ones(7))))).int()
    both = model(tokens, positions, documents)
    for row in range(2):
        one = slice(row, row + 1)
        torch.testing.assert_close(both[one], model(tokens[one], positions[one], documents[one]), atol=1e-5, rtol=1e-5)
    # And the boundary in the second row changes something.
    assert (both[1] - model(tokens, positions, None)[1]).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_no_position_sees_what_follows_it(family: str) -> None:
    model = lively(FAMILIES[family])
    tokens = torch.randint(41, (1, 12), generator=torch.Generator().manual_seed(4))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 41
    positions = torch.arange(12)[None]
    for documents in (None, torch.zeros(1, 12, dtype=torch.int32)):
        before, after = model(tokens, positions, documents), model(changed, positions, documents)
        torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-6, rtol=1e-6)
        assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_rotary_positions_are_relative_and_learned_ones_are_not() -> None:
    tokens = torch.randint(41, (1, 10), generator=torch.Generator().manual_seed(5))
    here, there = torch.arange(10)[None], torch.arange(20, 30)[None]
    llama, gpt = lively(LLAMA), lively(GPT)
    torch.testing.assert_close(llama(tokens, here), llama(tokens, there), atol=1e-4, rtol=1e-4)
    assert (gpt(tokens, here) - gpt(tokens, there)).abs().max() > 0.1


def test_attention_can_be_replaced_from_outside() -> None:
    model = lively(LLAMA)
    seen = []

    def attend(q, k, v, scope):  # type: ignore[no-untyped-def]
        seen.append((tuple(q.shape), tuple(k.shape), scope.documents))
        return torch.zeros_like(q)

    for block in model.blocks.values():
        block.attention.attend = attend
    tokens, positions = torch.zeros(1, 6, dtype=torch.long), torch.arange(6)[None]
    model(tokens, positions)
    assert seen == [((1, 4, 6, 8), (1, 2, 6, 8), None)] * 2


@pytest.mark.parametrize("family", WITH_AHEAD)
def test_bf16_gives_the_gradients_of_fp32_roughly(family: str) -> None:
    spec = replace(WITH_AHEAD[family], init_std=0.1)
    if spec.moe is not None:  # a token that rounding sends elsewhere would be a difference of another kind
        spec = replace(spec, moe=replace(spec.moe, active=spec.moe.experts, groups=1, active_groups=1))
    tokens = torch.randint(41, (2, 24), generator=torch.Generator().manual_seed(6))
    found = []
    for enabled in (False, True):
        model = materialize(build(spec), 5, torch.device("cpu"))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = model(tokens, torch.arange(24).expand(2, 24))
        for logits in out if spec.mtp_depth else (out,):
            assert logits.dtype == (torch.bfloat16 if enabled else torch.float32)
            nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward(retain_graph=True)
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        other = found[1][name]
        assert gradient is not None and other is not None and other.dtype == torch.float32
        if gradient.norm() > 1e-6:  # a bias of keys, for one, has none but rounding
            assert (gradient - other).norm() < 0.05 * gradient.norm(), name
