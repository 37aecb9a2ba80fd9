"""Tokenizers: bytes, or any tokenizer.json of the `tokenizers` library."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import RunError
from phalanx.spec.hub import local_path, missing_message
from phalanx.spec.sources import TOKENIZER_FILE

Ids = npt.NDArray[np.int32]
Spans = tuple[Ids, npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Ids, and for each id the first and the end (exclusive) character of its text."""


Push = Callable[[int], str]
"""Decodes ids one by one: returns the text that an id adds, which is empty while a character is incomplete."""


class Tokenizer(Protocol):
    name: str
    """The value of data.tokenizer."""
    vocab: int
    """Vocabulary size: one more than the largest id."""
    end: int
    """Id of the end token, which follows every document."""
    sha256: str
    """Hash of everything that determines the ids."""
    chat_template: str | None
    """Jinja source of the tokenizer's own chat template, if it has one."""
    special: dict[str, str]
    """Texts of special tokens by their names in chat templates: bos_token, eos_token …"""
    files: list[Path]
    """Files to store with a model that uses this tokenizer."""
    marks: dict[int, str]
    """Display texts of the special tokens that decoding drops, by id."""

    def encode(self, text: str, special: bool = True) -> Ids:
        """Ids of a text; `special`: with the special tokens that the tokenizer adds, such as one at the beginning."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of many texts, special tokens included."""

    def encode_spans(self, text: str) -> Spans:
        """Ids with their character ranges, without added special tokens."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids; special tokens and ids beyond the vocabulary are dropped."""

    def stream(self) -> Push: ...


class ByteTokenizer:
    """One token per byte, and an end token. Accepts any file and needs no vocabulary."""

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
        # Every byte that is not a continuation byte begins a character.
        starts = np.cumsum((ids & 0xC0) != 0x80, dtype=np.int64) - 1
        return ids, starts, starts + 1

    def decode(self, ids: npt.ArrayLike) -> str:
        tokens = np.asarray(ids, dtype=np.int64).ravel()
        shown = tokens[(tokens >= 0) & (tokens < self.end)]
        return shown.astype(np.uint8).tobytes().decode(errors="replace")

    def stream(self) -> Push:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: decoder.decode(bytes([token])) if 0 <= token < self.end else ""


TEMPLATE_FILE = "chat_template.jinja"
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE_FILE,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)
"""Files that transformers stores next to tokenizer.json; an exported model gets all of them."""
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<|eot_id|>", "<｜end▁of▁sentence｜>")
"""Common end tokens, tried in this order if no file names one."""


class HfTokenizer:
    """A tokenizer.json, or a folder with one."""

    def __init__(self, name: str, end_token: str | None = None):
        from tokenizers import Tokenizer as Library

        self.name = name
        path = _find(name)
        folder = path.parent if path.name == TOKENIZER_FILE else None
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RunError(f'data.tokenizer = "{name}": {path} cannot be read ({error.strerror}).') from None
        try:
            self._library = Library.from_buffer(content)
        except Exception as error:  # the library raises nothing more specific
            raise RunError(
                f'data.tokenizer = "{name}": {path} is no tokenizer that the `tokenizers` library can read ({error}).'
            ) from None
        # A tokenizer.json may request truncation or padding, which a corpus must not have.
        self._library.no_truncation()
        self._library.no_padding()
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise RunError(f'data.tokenizer = "{name}": {path} has an empty vocabulary; train it first.')
        self.vocab = max(vocabulary.values()) + 1
        config = _settings(folder)
        self.special = {key: text for key in config if key.endswith("_token") and (text := _text(config[key])) is not None}
        self.chat_template = _chat_template(folder, config)
        self.marks = {i: token.content for i, token in self._library.get_added_tokens_decoder().items() if token.special}
        end_token = _end_token(name, end_token, self.special.get("eos_token"), vocabulary)
        self.end = vocabulary[end_token]
        self.sha256 = hashlib.sha256(content + b"\0" + end_token.encode()).hexdigest()
        self.files = [path, *(folder / other for other in COMPANIONS if (folder / other).is_file())] if folder else [path]
        # The library is faster without offsets, which a corpus does not need; older versions have only the slow call.
        self._fast = getattr(self._library, "encode_batch_fast", self._library.encode_batch)

    def encode(self, text: str, special: bool = True) -> Ids:
        return np.array(self._library.encode(text, add_special_tokens=special).ids, dtype=np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(encoding.ids, dtype=np.int32) for encoding in self._fast(texts)]

    def encode_spans(self, text: str) -> Spans:
        encoding = self._library.encode(text, add_special_tokens=False)
        starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        # Byte-level tokenizers may strip spaces from their spans. A token of spaces alone then has an empty span at its end;
        # it begins where the token before it ends.
        empty = np.flatnonzero(starts[1:] == stops[1:]) + 1
        starts[empty] = stops[empty - 1]
        return np.array(encoding.ids, dtype=np.int32), starts, stops

    def decode(self, ids: npt.ArrayLike) -> str:
        tokens = np.asarray(ids, dtype=np.int64).ravel()
        shown: list[int] = tokens[(tokens >= 0) & (tokens < self.vocab)].tolist()
        return self._library.decode(shown, skip_special_tokens=True)

    def stream(self) -> Push:
        returned: list[int] = []  # the ids whose text was returned last
        pending: list[int] = []

        def push(token: int) -> str:
            # Decodes the last few ids again: the text of an id may depend on its neighbors (spaces, partial characters).
            nonlocal returned, pending
            pending.append(token)
            before, now = self.decode(returned), self.decode(returned + pending)
            if len(now) <= len(before) or now.endswith("\ufffd"):
                return ""
            returned, pending = pending, []
            return now[len(before) :]

        return push


def _find(name: str) -> Path:
    path = local_path(name)
    if path.is_dir():
        if (path / TOKENIZER_FILE).is_file():
            return path / TOKENIZER_FILE
        other_files = [other for other in ("tokenizer.model", "vocab.json", "vocab.txt") if (path / other).is_file()]
        remedy = (
            f"it has only {other_files[0]}: convert it with transformers (AutoTokenizer.from_pretrained(…).save_pretrained(…))"
            if other_files
            else "name a folder that does"
        )
        raise RunError(f'data.tokenizer = "{name}": the folder {path.absolute()} holds no {TOKENIZER_FILE}; {remedy}.')
    if not path.is_file():
        if (why := missing_message(name)) is not None:
            raise RunError(f'data.tokenizer = "{name}": {why}')
        raise RunError(
            f'data.tokenizer = "{name}" is not known; write "byte", the path of a {TOKENIZER_FILE} or of a folder that holds one, or a '
            f"name of the Hugging Face hub (tried {path.absolute()})."
        )
    return path


def _settings(folder: Path | None) -> dict[str, Any]:
    """The settings next to tokenizer.json; tokenizer_config.json takes precedence, as in transformers."""
    settings: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if folder is None or not (path := folder / file).is_file():
            continue
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(
                f"{path} cannot be read ({error}); correct it, or name {TOKENIZER_FILE} alone in another folder."
            ) from None
        if isinstance(table, dict):
            settings |= {key: value for key, value in table.items() if value is not None}
    return settings


def _text(token: object) -> str | None:
    """The text of a special token, which is written as a string or as a table with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _chat_template(folder: Path | None, config: Mapping[str, Any]) -> str | None:
    if folder is not None and (path := folder / TEMPLATE_FILE).is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read ({error}).") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _end_token(name: str, requested: str | None, own: str | None, vocabulary: Mapping[str, int]) -> str:
    if requested is not None:
        if requested in vocabulary:
            return requested
        raise RunError(
            f'data.end_token = "{requested}" is no token of data.tokenizer = "{name}"; {_candidates(vocabulary)}, or remove it.'
        )
    for token in (own, *_ENDS):
        if token is not None and token in vocabulary:
            return token
    raise RunError(
        f'data.tokenizer = "{name}" does not say which token ends a document; set data.end_token: {_candidates(vocabulary)}.'
    )


def _candidates(vocabulary: Mapping[str, int]) -> str:
    """Names tokens that look like end tokens."""
    marked = [token for token in vocabulary if len(token) > 2 and token[0] in "<[" and token[-1] in ">]"]
    shown = sorted(marked, key=lambda token: (not any(word in token for word in ("end", "eo", "/s", "SEP")), vocabulary[token]))
    return f"among its tokens are {', '.join(shown[:6])}" if shown else "none of its tokens looks like one"


def open_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """Opens the tokenizer of data.tokenizer with the end token of data.end_token; raises RunError if there is none."""
    if name != "byte":
        return HfTokenizer(name, end_token)
    if end_token is not None:
        raise RunError(
            f'data.end_token = "{end_token}", but data.tokenizer = "byte" has an end token of its own; remove the key.'
        )
    return ByteTokenizer()
