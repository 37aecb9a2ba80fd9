from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_tokenizers import CHATML, save_bpe, save_unigram

from phalanx.data.tokenizer import open_tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import TOKENIZER_VOCAB

TEXTS = ["", "plain", "The quick brown fox", "naïve – 語 – 🜁", "tabs\tand\r\nlines\n", " leading and trailing "]


def test_tokenizer_round_trip() -> None:
    rng = random.Random(0)
    words = open_tokenizer("byte")
    for text in [*TEXTS, "\0\r\n", *("".join(map(chr, rng.choices(range(0xD800), k=50))) for _ in range(50))]:
        ids = words.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == list(text.encode())
        assert words.decode(ids) == text


def test_tokenizer_decodes_invalid_ids() -> None:
    words = open_tokenizer("byte")
    assert words.decode([104, words.end, 105, words.end]) == "hi"
    assert words.decode([104, 300, -100]) == "h"  # a padded vocabulary, an ignored target
    assert words.decode([0xE8, 0xAA]) == "\ufffd"  # a character cut in half
    assert words.decode([]) == ""


def test_token_ids_fit_the_vocabulary() -> None:
    words = open_tokenizer("byte")
    assert words.vocab == 257 == TOKENIZER_VOCAB["byte"]
    assert words.end == words.vocab - 1
    assert words.encode("\x7fÿ").max() < words.end


@pytest.mark.parametrize("save", [save_bpe, save_unigram])
def test_a_tokenizer_json_gives_the_ids_of_its_library(save: Callable[[Path], Path], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(save(tmp_path) / "tokenizer.json"))
    for name in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        words = open_tokenizer(name)
        assert words.vocab == library.get_vocab_size()
        assert words.end == library.token_to_id("<|endoftext|>")
        for text, ids in zip(TEXTS, words.encode_batch(TEXTS), strict=True):
            assert ids.dtype == np.int32
            assert ids.tolist() == words.encode(text).tolist() == library.encode(text).ids
            assert words.decode(ids) == library.decode(ids.tolist())


def test_special_tokens_are_added_like_the_library_unless_disabled(tmp_path: Path) -> None:
    words = open_tokenizer(str(save_bpe(tmp_path, bos=True)))
    begin = words.encode("", special=True).tolist()
    assert len(begin) == 1
    assert words.encode("fox").tolist() == begin + words.encode("fox", special=False).tolist()
    assert words.encode_batch(["fox"])[0].tolist() == words.encode("fox").tolist()
    assert words.encode_spans("fox")[0].tolist() == words.encode("fox", special=False).tolist()


def test_truncation_and_padding_of_a_tokenizer_file_are_disabled(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(save_bpe(tmp_path) / "tokenizer.json"))
    expected = library.encode("a long text " * 50).ids
    library.enable_truncation(4)
    library.enable_padding(length=4)
    library.save(str(tmp_path / "tokenizer.json"))
    words = open_tokenizer(str(tmp_path))
    assert words.encode("a long text " * 50).tolist() == expected
    assert len(words.encode("fox")) < 4


@pytest.mark.parametrize("name", ["byte", "bpe", "unigram"])
def test_token_spans_cover_their_text(name: str, tmp_path: Path) -> None:
    saved = {"bpe": save_bpe, "unigram": save_unigram}
    words = open_tokenizer(str(saved[name](tmp_path)) if name in saved else name)
    text = "The lazy dog – 語!"
    ids, starts, stops = words.encode_spans(text)
    assert len(ids) == len(starts) == len(stops)
    assert (np.diff(starts) >= 0).all() and starts[0] == 0 and stops[-1] == len(text)
    if name != "byte":
        dog = [i for i in range(len(ids)) if starts[i] <= text.index("dog") < stops[i]]
        assert "d" in words.decode(ids[dog])


def test_token_spans_of_spaces_are_restored(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    library = Tokenizer.from_file(str(save_bpe(tmp_path) / "tokenizer.json"))
    library.post_processor = processors.ByteLevel(trim_offsets=True)  # as Llama 3 and GPT-2 have it
    library.save(str(tmp_path / "tokenizer.json"))
    text = "fox:  <|im_end|>  fox"
    encoded = library.encode(text)
    assert encoded.tokens == ["fo", "x", ":", "ĠĠ", "<|im_end|>", "Ġ", "Ġfox"]
    assert [start for start, _ in encoded.offsets] == [0, 2, 3, 6, 6, 17, 18]
    assert open_tokenizer(str(tmp_path)).encode_spans(text)[1].tolist() == [0, 2, 3, 4, 6, 16, 18]


@pytest.mark.parametrize("name", ["byte", "bpe", "unigram"])
def test_token_stream_equals_decoding_at_once(name: str, tmp_path: Path) -> None:
    saved = {"bpe": save_bpe, "unigram": save_unigram}
    words = open_tokenizer(str(saved[name](tmp_path)) if name in saved else name)
    text = "The quick brown fox, naïve – 語 – 🜁 end"
    ids = words.encode(text)
    push = words.stream()
    pieces = [push(int(token)) for token in ids]
    assert "".join(pieces) == words.decode(ids)
    assert sum(map(bool, pieces)) > len(pieces) // 4, "it comes piece by piece"
    assert not any("\ufffd" in piece for piece in pieces) or name == "unigram"
    assert words.stream()(words.end) == ""


def test_end_token_is_requested_then_configured_then_guessed(tmp_path: Path) -> None:
    folder = save_bpe(tmp_path, eos="<|im_end|>")
    ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert open_tokenizer(str(folder)).end == ids["<|im_end|>"]
    assert open_tokenizer(str(folder), "<|im_start|>").end == ids["<|im_start|>"]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_start|>"}}))
    assert open_tokenizer(str(folder)).end == ids["<|im_start|>"]
    (folder / "tokenizer_config.json").unlink()
    assert open_tokenizer(str(folder)).end == ids["<|endoftext|>"]
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert open_tokenizer(str(folder)).end == ids["<|im_end|>"]
    with pytest.raises(RunError, match=r'data.end_token = "</s>" is no token of .*<\|endoftext\|>'):
        open_tokenizer(str(folder), "</s>")


def test_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "<stop>": 1}, unk_token="a")).save(str(tmp_path / "words.json"))
    with pytest.raises(RunError, match=r"set data.end_token: .*<stop>"):
        open_tokenizer(str(tmp_path / "words.json"))
    assert open_tokenizer(str(tmp_path / "words.json"), "<stop>").end == 1


def test_tokenizer_hash_covers_everything_that_determines_ids(tmp_path: Path) -> None:
    first, second = save_bpe(tmp_path / "a"), save_unigram(tmp_path / "b")
    hashes = {open_tokenizer(str(first)).sha256, open_tokenizer(str(second)).sha256, open_tokenizer("byte").sha256}
    hashes.add(open_tokenizer(str(first), "<|im_end|>").sha256)
    assert len(hashes) == 4
    assert open_tokenizer(str(first / "tokenizer.json")).sha256 == open_tokenizer(str(first)).sha256


def test_chat_template_is_found_where_transformers_stores_it(tmp_path: Path) -> None:
    folder = save_bpe(tmp_path, template=CHATML)
    words = open_tokenizer(str(folder))
    assert words.chat_template == CHATML
    assert {path.name for path in words.files} == {"tokenizer.json", "tokenizer_config.json"}
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_tokenizer(str(folder)).chat_template == "yes"
    (folder / "chat_template.jinja").write_text("own file")
    assert open_tokenizer(str(folder)).chat_template == "own file"
    assert folder / "chat_template.jinja" in open_tokenizer(str(folder)).files
    assert open_tokenizer("byte").chat_template is None


def test_an_unknown_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(RunError, match=r'data.tokenizer = "words" is not known; .*"byte"'):
        open_tokenizer("words")
    with pytest.raises(RunError, match=r'data.end_token = "x", but data.tokenizer = "byte"'):
        open_tokenizer("byte", "x")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[1, 2]", b"\x00\xff\xfe", b'{"version": "1.0", "model": {"type": "None"}}']
)
def test_a_broken_tokenizer_is_refused_with_its_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(RunError, match=r"tokenizer\.json is no tokenizer that the `tokenizers` library can read"):
        open_tokenizer(str(tmp_path))


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no tokenizer\.json; name a folder that does"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(RunError, match=r"only tokenizer\.model: convert it"):
        open_tokenizer(str(tmp_path))


def test_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    (save_bpe(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(RunError, match=r"tokenizer_config\.json cannot be read"):
        open_tokenizer(str(tmp_path))
