from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from phalanx.models.attention import KVCache
from phalanx.models.decoder import Decoder
from phalanx.models.init import build, materialize
from phalanx.models.sampling import Sampling, draw, generate
from phalanx.spec.model import Mla, ModelSpec, Moe, RopeScaling

VOCAB = 37
NEVER = -1  # no token ends the text
DRAWS = 4000
LLAMA = ModelSpec(vocab=VOCAB, dim=32, layers=3, heads=4, kv_heads=2, ffn=64, qk_norm=True, init_std=0.4)
GPT = replace(LLAMA, kv_heads=None, qk_norm=False, norm="layer", activation="gelu", positions="learned", bias=True, context=64)
MIXED = replace(LLAMA, moe=Moe(experts=6, active=2, ffn=32), mtp_depth=1)
LATENT = replace(
    LLAMA, kv_heads=None, qk_norm=False,
    mla=Mla(kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, value_dim=10),
    moe=Moe(experts=6, active=2, ffn=32, shared=1, dense_layers=1, router="sigmoid", groups=3, active_groups=2),
    rope_scaling=RopeScaling(kind="yarn", factor=8.0, original_context=16, mscale_all_dim=1.0),
)  # fmt: skip
CAPPED = replace(LLAMA, attention_cap=2.0, logit_cap=4.0, window=9, global_every=2, query_scalar=5)
GREEDY = Sampling(temperature=0)


def model(spec: ModelSpec) -> Decoder:
    return materialize(build(spec), 8, torch.device("cpu")).requires_grad_(False)


def text(spec: ModelSpec, sampling: Sampling, count: int = 30, end: int = NEVER) -> list[int]:
    return list(generate(model(spec), [5, 6, 7], count, end, sampling))


@torch.no_grad()
def greedy_without_memory(spec: ModelSpec, count: int) -> list[int]:
    decoder, tokens = model(spec), [5, 6, 7]
    for _ in range(count):
        logits = decoder(torch.tensor([tokens]), torch.arange(len(tokens))[None])
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[3:]


@pytest.mark.parametrize("spec", [LLAMA, GPT, MIXED, LATENT, CAPPED], ids=["rope", "learned", "experts", "latent", "capped"])
def test_remembering_keys_and_values_changes_no_token(spec: ModelSpec) -> None:
    expected = greedy_without_memory(spec, 40)
    assert len(set(expected)) > 4  # not one token over and over, which anything would get right
    assert text(spec, GREEDY, 40) == expected


def test_latent_attention_remembers_the_narrow_vectors_only() -> None:
    decoder, memory = model(LATENT), [KVCache() for _ in range(3)]
    decoder(torch.tensor([[5, 6, 7]]), torch.arange(3)[None], kv_cache=memory)
    for kept in memory:
        assert kept.keys is not None and kept.values is not None
        assert (kept.keys.shape, kept.values.shape) == ((1, 1, 3, 16), (1, 1, 3, 4))


def test_one_prompt_token_is_enough() -> None:
    decoder = model(LLAMA)
    tokens = [3, *generate(decoder, [3], 12, NEVER, GREEDY)]
    again = decoder(torch.tensor([tokens]), torch.arange(13)[None])[0].argmax(-1).tolist()
    assert tokens[1:] == again[:12]


@pytest.mark.parametrize("narrow", [Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-4)], ids=str)
def test_the_narrowest_draw_is_the_greedy_one(narrow: Sampling) -> None:
    assert text(LLAMA, narrow) == text(LLAMA, GREEDY)


def test_the_seed_decides() -> None:
    torch.manual_seed(0)
    one = text(LLAMA, Sampling(seed=1))
    torch.manual_seed(1)
    assert text(LLAMA, Sampling(seed=1)) == one
    assert text(LLAMA, Sampling(seed=2)) != one


def test_it_stops_after_the_end_token() -> None:
    whole = text(LLAMA, GREEDY)
    end = next(token for token in whole[5:] if token not in whole[:5])
    assert text(LLAMA, GREEDY, end=end) == whole[: whole.index(end) + 1]


def test_it_stops_where_learned_positions_run_out() -> None:
    # Positions 0 … 63: the last of them still predicts one token, which has no place itself.
    assert len(text(GPT, GREEDY, 1000)) == 64 - 3 + 1
    assert list(generate(model(GPT), [1] * 65, 10, NEVER, GREEDY)) == []
    assert len(text(LLAMA, GREEDY, 100)) == 100


def frequencies(logits: torch.Tensor, sampling: Sampling, draws: int = DRAWS) -> torch.Tensor:
    dice = torch.Generator().manual_seed(sampling.seed)
    counts = Counter(draw(logits, sampling, dice) for _ in range(draws))
    return torch.tensor([counts[i] / draws for i in range(len(logits))], dtype=torch.float64)


PROBABILITIES = torch.tensor([0.05, 0.4, 0.02, 0.3, 0.08, 0.15], dtype=torch.float64)


@pytest.mark.parametrize(
    ("sampling", "kept", "power"),
    [
        (Sampling(), [0, 1, 2, 3, 4, 5], 1.0),
        (Sampling(temperature=0.5, seed=1), [0, 1, 2, 3, 4, 5], 2.0),
        (Sampling(top_k=3, seed=2), [1, 3, 5], 1.0),
        (Sampling(top_k=100, seed=2), [0, 1, 2, 3, 4, 5], 1.0),
        (Sampling(top_p=0.75, seed=3), [1, 3, 5], 1.0),  # 0.4 + 0.3 is not enough yet
        (Sampling(top_p=0.65, seed=4), [1, 3], 1.0),
        (Sampling(temperature=2.0, top_k=4, top_p=0.6, seed=5), [1, 3], 0.5),  # of the four: 0.34, 0.30, 0.21, 0.15
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling: Sampling, kept: list[int], power: float) -> None:
    expected = torch.zeros_like(PROBABILITIES)
    expected[kept] = PROBABILITIES[kept] ** power
    expected /= expected.sum()
    got = frequencies(PROBABILITIES.log().float() + 3.0, sampling)  # logits may be shifted
    error = (expected * (1 - expected) / DRAWS).sqrt()
    assert ((got - expected).abs() <= 4.5 * error).all(), (got, expected)
