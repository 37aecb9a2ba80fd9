"""Log-likelihoods equal what transformers computes one text at a time, whatever the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.tiny import CONTEXT, Pair, bpe, twins

from phalanx.data.tokenizer import ByteTokenizer, open_tokenizer
from phalanx.evaluation.score import Request, Scorer
from phalanx.models.init import build, materialize
from phalanx.spec.errors import RunError
from phalanx.spec.model import PRESETS


@pytest.fixture(scope="module")
def pair() -> Pair:
    return twins(vocab=300)


def scorer(pair: Pair, **values: Any) -> Scorer:
    return Scorer(pair.ours, ByteTokenizer(), context=CONTEXT, **values)


def test_equals_one_text_at_a_time_with_transformers(pair: Pair) -> None:
    dice = torch.Generator().manual_seed(0)
    requests = [
        Request(*(torch.randint(300, (int(n),), generator=dice).tolist() for n in lengths))
        for lengths in [(1, 1), (5, 3), (20, 1), (2, 30), (31, 12), (60, 4), (7, 7)]
    ]
    expected = [pair.logprob(request.context, request.continuation) for request in requests]
    for batch in (1, 3, 16):
        got = scorer(pair, batch=batch).scores(requests)
        torch.testing.assert_close(
            torch.tensor([score.logprob for score in got]), torch.tensor([value for value, _ in expected]), atol=1e-4, rtol=1e-5
        )
        assert [score.greedy for score in got] == [greedy for _, greedy in expected]
        assert all(score.dropped == 0 for score in got)


def test_greedy(pair: Pair) -> None:
    start = [5, 6, 7]
    likeliest = pair.greedy(start, 4)
    other = [*likeliest[:3], (likeliest[3] + 1) % 300]
    yes, no = scorer(pair).scores([Request(start, likeliest), Request(start, other)])
    assert yes.greedy and not no.greedy


def test_a_context_too_long_loses_its_beginning(pair: Pair) -> None:
    long = [int(token) for token in torch.randint(300, (CONTEXT + 25,), generator=torch.Generator().manual_seed(2))]
    answer = [3, 4, 5]
    (score,) = scorer(pair).scores([Request(long, answer)])
    expected, _ = pair.logprob(long[-(CONTEXT - 2) :], answer)  # one token more than the context: the last is never read
    assert score.dropped == 27
    assert score.logprob == pytest.approx(expected, abs=1e-4)
    with pytest.raises(RunError, match="has a continuation of 65 tokens"):
        scorer(pair).scores([Request([1], [2] * (CONTEXT + 1))])


def test_spaces_move_to_the_continuation(pair: Pair) -> None:
    bytes_ = scorer(pair)
    assert bytes_.encode("a b  ", "c") == Request(list(b"a b"), list(b"  c"))
    assert bytes_.encode("", "c") == Request([256], list(b"c"))
    assert bytes_.encode("   ", "c") == Request([256], list(b"   c"))


def test_nothing_is_certain(pair: Pair) -> None:
    judge = scorer(pair)
    requests = [judge.encode("a b", ""), judge.encode("a b", "c"), judge.encode("", "")]
    assert [request.continuation for request in requests] == [[], [99], []]
    scores = judge.scores(requests)
    assert scores[0] == scores[2] == (0.0, True, 0) and scores[1].logprob < 0


def test_experts_and_latent_attention_are_scored_alike_in_any_batch() -> None:
    dice = torch.Generator().manual_seed(3)
    requests = [
        Request(*(torch.randint(257, (int(n),), generator=dice).tolist() for n in lengths))
        for lengths in [(1, 9), (12, 3), (30, 2), (4, 4), (50, 1)]
    ]
    for preset in ("tiny-moe", "tiny-mla"):
        model = materialize(build(replace(PRESETS[preset], vocab=257)), 0, torch.device("cpu")).eval()
        alone, together = (
            [score.logprob for score in Scorer(model, ByteTokenizer(), context=CONTEXT, batch=batch).scores(requests)]
            for batch in (1, 5)
        )
        assert together == pytest.approx(alone, rel=1e-5)


def test_boundaries_of_a_tokenizer_that_merges(pair: Pair, tmp_path: Path) -> None:
    words = open_tokenizer(str(bpe(tmp_path)))
    judge = Scorer(pair.ours, words, context=CONTEXT)
    for context, choice in [("the cat", " sat"), ("the cat ", "sat"), ("the ca", "t"), ("th", "e"), ("", "the")]:
        request = judge.encode(context, choice)
        assert request.continuation, (context, choice)
        assert words.decode([*request.context, *request.continuation]) == context + choice
    assert words.decode(judge.encode("the cat", " sat").continuation) == " sat"
    assert judge.encode("the cat ", "sat") == judge.encode("the cat", " sat")
    # "the" is one token: nothing of it can be given as context, so all of it is asked for.
    assert judge.encode("th", "e") == Request([words.end], words.encode("the").tolist())


def test_what_a_tokenizer_puts_around_texts(pair: Pair, tmp_path: Path) -> None:
    words = open_tokenizer(str(bpe(tmp_path, around="<s> $A </s>")))
    begin, end = words.encode("", special=True).tolist()
    judge = Scorer(pair.ours, words, context=CONTEXT)
    plain = words.encode("the cat sat", special=False).tolist()
    request = judge.encode("the cat", " sat")
    assert [*request.context, *request.continuation] == [begin, *plain] and end == words.end
    assert judge.encode("", "the").context == [begin]
    assert judge.prompt("<s>the cat") == judge.prompt("the cat"), "a text that brings it along is not begun twice"


@pytest.mark.parametrize("length", [1, 5, CONTEXT - 1, CONTEXT, CONTEXT + 1, 2 * CONTEXT, 3 * CONTEXT + 7])
def test_rolling_asks_for_each_token_once(pair: Pair, length: int) -> None:
    text = "".join(chr(97 + i % 26) for i in range(length))
    requests = scorer(pair).rolling(text)
    assert [token for request in requests for token in request.continuation] == list(text.encode())
    assert requests[0].context == [256]
    done = len(requests[0].continuation)
    for request in requests[1:]:
        before = list(text.encode())[:done]
        assert request.context == before[-len(request.context) :]
        assert len(request.context) + len(request.continuation) == CONTEXT + 1, "as much before as fits"
        done += len(request.continuation)
