from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from phalanx.models.dense import AXES, INITIAL, Decoder
from phalanx.models.init import build, materialize
from phalanx.spec.model import ModelSpec
from phalanx.spec.presets import PRESETS

GPT = ModelSpec(
    vocab=41, dim=24, layers=2, heads=3, ffn=40, context=32,
    norm="layer", activation="gelu", positions="learned", bias=True, tied=True,
)  # fmt: skip
LLAMA = ModelSpec(vocab=41, dim=24, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=40, context=32)
QWEN = replace(LLAMA, qk_norm=True, head_dim=10, tied=True)
BIASED = replace(LLAMA, bias=True)
FAMILIES = {"gpt": GPT, "llama": LLAMA, "qwen": QWEN, "biased": BIASED}


def first_match(table: dict[str, object], name: str) -> str:
    return next(pattern for pattern in table if fnmatchcase(name, pattern))


@pytest.mark.parametrize("family", FAMILIES)
def test_axes_name_the_dimensions_of_every_parameter(family: str) -> None:
    spec = FAMILIES[family]
    sizes = {
        "vocab": spec.rows,
        "model": spec.dim,
        "place": spec.context,
        "heads": spec.heads * spec.head,
        "kv_heads": spec.kv * spec.head,
        "head": spec.head,
        "ffn": spec.hidden,
    }
    for name, parameter in build(spec).named_parameters():
        assert tuple(sizes[axis] for axis in AXES[first_match(AXES, name)]) == tuple(parameter.shape), name


def test_every_line_of_both_tables_is_the_first_match_of_some_parameter() -> None:
    names = {name for spec in FAMILIES.values() for name, _ in build(spec).named_parameters()}
    assert {first_match(AXES, name) for name in names} == set(AXES)
    assert {first_match(INITIAL, name) for name in names} == set(INITIAL)


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_follow_the_kind_of_module(family: str) -> None:
    model = build(FAMILIES[family])
    expected = {}
    for path, module in model.named_modules():
        for kind, _ in module.named_parameters(recurse=False):
            norm = isinstance(module, nn.LayerNorm | nn.RMSNorm)
            writes = path.endswith((".output", ".down"))  # into the residual stream
            weight = "ones" if norm else "residual" if writes else "normal"
            expected[f"{path}.{kind}"] = weight if kind == "weight" else "zeros"
    assert {name: INITIAL[first_match(INITIAL, name)] for name, _ in model.named_parameters()} == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_the_spec_counts_what_the_module_holds(preset: str) -> None:
    spec = replace(PRESETS[preset], vocab=PRESETS[preset].vocab or 257)
    model = build(spec)
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == spec.parameters()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spec_counts_what_the_module_holds_in_small(family: str) -> None:
    # No preset has a gated feed-forward with biases.
    assert sum(p.numel() for p in build(FAMILIES[family]).parameters()) == FAMILIES[family].parameters()


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

    for block in model.blocks:
        block.attention.attend = attend
    tokens, positions = torch.zeros(1, 6, dtype=torch.long), torch.arange(6)[None]
    model(tokens, positions)
    assert seen == [((1, 4, 6, 8), (1, 2, 6, 8), None)] * 2
