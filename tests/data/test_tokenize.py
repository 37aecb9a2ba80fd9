from __future__ import annotations

import random

import numpy as np
import pytest

from phalanx.data.tokenize import tokenizer
from phalanx.spec.errors import RunError


def test_text_survives_the_round_trip() -> None:
    rng = random.Random(0)
    words = tokenizer("byte")
    for text in [
        "",
        "plain",
        "naïve – 語 – 🜁",
        "\0\r\n",
        *("".join(map(chr, rng.choices(range(0xD800), k=50))) for _ in range(50)),
    ]:
        ids = words.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == list(text.encode())
        assert words.decode(ids) == text


def test_what_is_not_text_is_decoded_without_failing() -> None:
    words = tokenizer("byte")
    assert words.decode([104, words.end, 105, words.end]) == "hi"
    assert words.decode([104, 300, -100]) == "h"  # a padded vocabulary, an ignored target
    assert words.decode([0xE8, 0xAA]) == "\ufffd"  # a character cut in half
    assert words.decode([]) == ""


def test_ids_fit_the_vocabulary() -> None:
    words = tokenizer("byte")
    assert words.vocab == 257
    assert words.end == words.vocab - 1
    assert words.encode("\x7fÿ").max() < words.end


def test_an_unknown_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(RunError, match=r'data.tokenizer = "words" is not known; .* "byte"'):
        tokenizer("words")
