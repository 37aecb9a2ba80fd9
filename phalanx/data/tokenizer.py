"""Text to token ids and back. `dataset` and `ingest` choose a tokenizer by name; sampling from a model decodes with it."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import RunError

Ids = npt.NDArray[np.int32]
Spans = tuple[Ids, npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Ids, and the characters of the text where each begins and ends."""


class TextStream(Protocol):
    """Ids one by one to text, as it becomes certain."""

    def push(self, token: int) -> str:
        """The text this id adds; nothing while a character is not complete."""


class Tokenizer(Protocol):
    """What every tokenizer offers."""

    name: str
    """As the run file has it."""
    vocab: int
    """One more than the largest id."""
    end: int
    """The id that stands behind every document."""
    sha256: str
    """Of what the ids are computed from: with another one the same ids mean other text."""
    chat_template: str | None
    """Jinja source that turns a conversation into text, where the tokenizer brings one."""
    special: dict[str, str]
    """Texts of special tokens, by the names that chat templates use: bos_token, eos_token …"""
    files: list[Path]
    """What a model that uses it is to be kept with."""
    marks: dict[int, str]
    """Special tokens, which decoding drops, by their ids: what a person is shown in their place."""

    def encode(self, text: str, special: bool = True) -> Ids:
        """Ids of a text; `special`: with what the tokenizer puts around one, such as a token that begins it."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The same for many at once, special tokens included."""

    def encode_spans(self, text: str) -> Spans:
        """Ids with the characters they stand for, no special tokens added."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids; special tokens and ids that a padded vocabulary adds are dropped."""

    def stream(self) -> TextStream: ...


class ByteTokenizer:
    """One token per UTF-8 byte, and one that ends a document: any file is text, and no vocabulary has to be fetched."""

    name = "byte"
    vocab = 257
    end = 256
    sha256 = hashlib.sha256(b"phalanx byte tokenizer 1").hexdigest()
    chat_template: str | None = None

    def __init__(self) -> None:
        self.special: dict[str, str] = {}
        self.files: list[Path] = []
        self.marks = {self.end: "<end>"}

    def encode(self, text: str, special: bool = True) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def encode_spans(self, text: str) -> Spans:
        ids = self.encode(text)
        # Every byte that does not continue a character begins one.
        starts = np.cumsum((ids & 0xC0) != 0x80, dtype=np.int64) - 1
        return ids, starts, starts + 1

    def decode(self, ids: npt.ArrayLike) -> str:
        tokens = np.asarray(ids, dtype=np.int64).ravel()
        shown = tokens[(tokens >= 0) & (tokens < self.end)]
        return shown.astype(np.uint8).tobytes().decode(errors="replace")

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if 0 <= token < ByteTokenizer.end else ""


def open_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """The tokenizer that data.tokenizer names, with the end token of data.end_token, or RunError."""
    if name != "byte":
        from phalanx.data.tokenizer import HfTokenizer

        return HfTokenizer(name, end_token)
    if end_token is not None:
        raise RunError([f'data.end_token = "{end_token}", but data.tokenizer = "byte" has an end of its own; leave it out.'])
    return ByteTokenizer()


_FILE = "tokenizer.json"
_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)
"""What transformers keeps beside tokenizer.json; all of it goes along when a model is exported."""
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<|eot_id|>", "<｜end▁of▁sentence｜>")
"""What the end of a text is commonly called, tried in this order where no file says it."""


class HfTokenizer:
    """A tokenizer.json, or a folder that holds one."""

    def __init__(self, name: str, end_token: str | None = None):
        from tokenizers import Tokenizer as Library

        self.name = name
        path = _find(name)
        beside = path.parent if path.name == _FILE else None
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RunError([f'data.tokenizer = "{name}": {path} cannot be read ({error.strerror}).']) from None
        try:
            self._library = Library.from_buffer(content)
        except Exception as error:  # the library raises nothing more specific
            raise RunError(
                [f'data.tokenizer = "{name}": {path} is no tokenizer that the `tokenizers` library can read ({error}).']
            ) from None
        # A file may ask for texts to be cut or filled up to a length: a corpus is neither.
        self._library.no_truncation()
        self._library.no_padding()
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise RunError([f'data.tokenizer = "{name}": {path} has an empty vocabulary; train it first.'])
        self.vocab = max(vocabulary.values()) + 1
        config = _settings(beside)
        self.special = {key: text for key in config if key.endswith("_token") and (text := _text(config[key])) is not None}
        self.chat_template = _template(beside, config)
        self.marks = {i: token.content for i, token in self._library.get_added_tokens_decoder().items() if token.special}
        ending = _ending(name, end_token, self.special.get("eos_token"), vocabulary)
        self.end = vocabulary[ending]
        self.sha256 = hashlib.sha256(content + b"\0" + ending.encode()).hexdigest()
        self.files = [path, *(beside / other for other in _BESIDE if (beside / other).is_file())] if beside else [path]
        # Without offsets, which a corpus has no use for, the library works faster; older ones know only the slow way.
        self._fast = getattr(self._library, "encode_batch_fast", self._library.encode_batch)

    def encode(self, text: str, special: bool = True) -> Ids:
        return np.array(self._library.encode(text, add_special_tokens=special).ids, dtype=np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(encoding.ids, dtype=np.int32) for encoding in self._fast(texts)]

    def encode_spans(self, text: str) -> Spans:
        encoding = self._library.encode(text, add_special_tokens=False)
        starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        # Byte-level tokenizers may cut spaces off their spans, which leaves none of a token that is nothing but spaces, at
        # the place where it ends: it begins where the one before it ends.
        nothing = np.flatnonzero(starts[1:] == stops[1:]) + 1
        starts[nothing] = stops[nothing - 1]
        return np.array(encoding.ids, dtype=np.int32), starts, stops

    def decode(self, ids: npt.ArrayLike) -> str:
        tokens = np.asarray(ids, dtype=np.int64).ravel()
        shown: list[int] = tokens[(tokens >= 0) & (tokens < self.vocab)].tolist()
        return self._library.decode(shown, skip_special_tokens=True)

    def stream(self) -> TextStream:
        return _Stream(self)


class _Stream:
    """Decodes the last few ids anew with each one: what an id adds may depend on its neighbours (spaces, half characters)."""

    def __init__(self, words: HfTokenizer):
        self._words = words
        self._ids: list[int] = []
        self._from = 0  # the first id that is decoded again
        self._read = 0  # ids whose text has been given out

    def push(self, token: int) -> str:
        self._ids.append(token)
        before = self._words.decode(self._ids[self._from : self._read])
        now = self._words.decode(self._ids[self._from :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._from, self._read = self._read, len(self._ids)
        return now[len(before) :]


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / _FILE).is_file():
            return path / _FILE
        older = [other for other in ("tokenizer.model", "vocab.json", "vocab.txt") if (path / other).is_file()]
        how = (
            f"it has only {older[0]}: convert it with transformers (AutoTokenizer.from_pretrained(…).save_pretrained(…))"
            if older
            else "name a folder that does"
        )
        raise RunError([f'data.tokenizer = "{name}": the folder {path.absolute()} holds no {_FILE}; {how}.'])
    if not path.is_file():
        raise RunError(
            [
                f'data.tokenizer = "{name}" is not known; write "byte", or the path of a {_FILE} or of a folder that holds one '
                f"(tried {path.absolute()})."
            ]
        )
    return path


def _settings(folder: Path | None) -> dict[str, Any]:
    """What the files beside say, the one that transformers believes first on top."""
    found: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if folder is None or not (path := folder / file).is_file():
            continue
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError([f"{path} cannot be read ({error}); correct it, or name {_FILE} alone in another folder."]) from None
        if isinstance(table, dict):
            found |= {key: value for key, value in table.items() if value is not None}
    return found


def _text(token: object) -> str | None:
    """A special token is written as its text, or as a table that has it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _template(folder: Path | None, config: Mapping[str, Any]) -> str | None:
    if folder is not None and (path := folder / "chat_template.jinja").is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise RunError([f"{path} cannot be read ({error})."]) from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _ending(name: str, asked: str | None, own: str | None, vocabulary: Mapping[str, int]) -> str:
    if asked is not None:
        if asked in vocabulary:
            return asked
        raise RunError(
            [
                f'data.end_token = "{asked}" is no token of data.tokenizer = "{name}"; {_candidates(vocabulary)}, or leave it out.'
            ]
        )
    for token in (own, *_ENDS):
        if token is not None and token in vocabulary:
            return token
    raise RunError(
        [f'data.tokenizer = "{name}" does not say which token ends a document; set data.end_token: {_candidates(vocabulary)}.']
    )


def _candidates(vocabulary: Mapping[str, int]) -> str:
    """Tokens that look as if they were made for it."""
    marked = [token for token in vocabulary if len(token) > 2 and token[0] in "<[" and token[-1] in ">]"]
    shown = sorted(marked, key=lambda token: (not any(word in token for word in ("end", "eo", "/s", "SEP")), vocabulary[token]))
    return f"among its tokens are {', '.join(shown[:6])}" if shown else "none of its tokens looks like one"
