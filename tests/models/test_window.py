"""Sliding-window attention: what a position sees, in training and in generation, and what it counts for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.models.attention import KVCache
from phalanx.models.init import build, materialize
from phalanx.models.sampling import Sampling, generate
from phalanx.schedules.stage_split import flop_costs
from phalanx.spec.check import check
from phalanx.spec.model import Mla, ModelSpec
from phalanx.spec.run import Run

SPEC = ModelSpec(vocab=40, dim=32, layers=3, heads=4, kv_heads=2, ffn=48, init_std=0.2, window=4)
LENGTH = 24
LATENT = Mla(kv_rank=8, nope_dim=6, rope_dim=4, value_dim=6)


def changed(spec: ModelSpec, place: int, documents: torch.Tensor | None = None) -> list[int]:
    """The positions whose logits change with the token at one of them."""
    model = materialize(build(spec), 1, torch.device("cpu"))
    tokens = torch.randint(40, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    other = tokens.clone()
    other[0, place] = (other[0, place] + 1) % 40
    positions = torch.arange(LENGTH)[None]
    with torch.no_grad():
        apart = (model(tokens, positions, documents) - model(other, positions, documents)).abs().amax((0, 2))
    return apart.nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("spec", "last"),
    [
        (SPEC, 2 + 3 * 3),  # three more positions with every block
        (replace(SPEC, window_from=2), LENGTH - 1),
        (replace(SPEC, global_every=3), LENGTH - 1),
        (replace(SPEC, global_every=4), 2 + 3 * 3),  # there is no fourth block
        (replace(SPEC, window=1), 2),
        (replace(SPEC, kv_heads=None, mla=LATENT), 2 + 3 * 3),
    ],
)
def test_a_position_reaches_as_far_as_the_windows_of_all_blocks(spec: ModelSpec, last: int) -> None:
    assert changed(spec, 2) == list(range(2, last + 1))


def test_a_window_ends_with_its_document() -> None:
    documents = torch.tensor([[0] * 5 + [1] * (LENGTH - 5)], dtype=torch.int32)
    assert changed(SPEC, 2, documents) == [2, 3, 4]
    assert changed(SPEC, 5, documents) == list(range(5, 5 + 3 * 3 + 1))


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, global_every=2), replace(SPEC, kv_heads=None, mla=LATENT)])
@pytest.mark.parametrize("prompt", [1, 3, 9])
def test_generation_continues_as_the_whole_text_does(spec: ModelSpec, prompt: int) -> None:
    model = materialize(build(spec), 1, torch.device("cpu"))
    text = [7, 3, 9, 12, 1, 30, 22, 8, 5][:prompt]
    found = list(generate(model, text, 12, end=-1, sampling=Sampling(temperature=0)))
    for number, token in enumerate(found):
        whole = torch.tensor([text + found[:number]])
        with torch.no_grad():
            logits = model(whole, torch.arange(whole.shape[1])[None])
        assert int(logits[0, -1].argmax()) == token


def test_the_cache_of_a_window_does_not_grow() -> None:
    cache, keys = KVCache(4), torch.randn(1, 2, 9, 8)
    assert cache.extend(keys, keys)[0].shape[2] == 9, "the prompt sees all of its own keys"
    for _ in range(3):
        cache.extend(keys[:, :, :1], keys[:, :, :1])
        assert cache.keys is not None and cache.keys.shape[2] == 4


@pytest.mark.parametrize("change", [{}, {"global_every": 2}, {"window_from": 1}, {"mtp_depth": 2}])
def test_attention_counts_what_the_windows_hold(change: dict[str, int]) -> None:
    spec, length = replace(SPEC, window=2000, **change), 9000  # type: ignore[arg-type]
    seen = sum(np.minimum(np.arange(1, length + 1), window or length).mean() for window in spec.windows)
    counted = spec.flops_per_token(length, causal=True) - spec.flops_per_token(0)
    # The closed form counts a triangle as half of its square, without half of the diagonal.
    assert counted == pytest.approx(12 * spec.heads * spec.head * seen, rel=1e-3)
    without = [replace(spec, window=window).flops_per_token(length) for window in (length, None)]
    assert without[0] == without[1]


def test_stages_are_cut_by_what_their_blocks_attend_to() -> None:
    costs = flop_costs(replace(SPEC, layers=4, global_every=2), 4096).blocks
    assert costs[0] == costs[2] < costs[1] == costs[3]
    assert flop_costs(replace(SPEC, window=None), 4096) == flop_costs(replace(SPEC, window=4096), 4096)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"window": None, "global_every": 2}, "model.global_every = 2 says which blocks attend without a window"),
        ({"window": None, "rope_local_theta": 100.0}, "model.rope_local_theta = 100.0 is for blocks with a window"),
        ({"norm": "layer", "norm_zero_centered": True}, "model.norm_zero_centered = true belongs to RMS norms"),
        ({"mla": LATENT, "kv_heads": None, "attention_cap": 2.0}, "model.attention_cap = 2.0 has no meaning with"),
        ({"positions": "learned", "rope_local_theta": 10.0}, "model.rope_local_theta = 10.0 is a base of rotary positions"),
        ({"rope_fraction": 0.4}, "model.rope_fraction = 0.4 gives 3 of the 8 channels of a head"),
        ({"rope_fraction": 1.5}, "model.rope_fraction = 1.5 gives 12 of the 8 channels"),
        ({"rope_fraction": 0.5, "positions": "learned"}, "model.rope_fraction = 0.5 is a part of heads"),
        ({"window_from": 3}, "model.window = 4 has no effect: model.window_from = 3 leaves it to none of the 3 blocks."),
    ],
)
def test_settings_without_a_meaning_are_refused(change: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in check(Run(model=replace(SPEC, **change))))
