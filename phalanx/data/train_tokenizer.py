"""Trains a byte-level BPE tokenizer with the `tokenizers` library on the text of some sources, and writes the folder that data.tokenizer
and transformers read. Called by `phalanx tokenizer train`."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.data.chat import ChatTemplate, messages_of
from phalanx.data.ingest import check_limit, check_outside
from phalanx.data.pieces import TokenizePlan, TokenizeSpec, records, source_files, text_kind, text_of
from phalanx.data.record_readers import EMPTY, NOT_UTF8, BadRecord
from phalanx.data.token_files import replace_text
from phalanx.data.tokenizer import TEMPLATE_FILE, ByteTokenizer
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.run import Data, Source
from phalanx.spec.sources import TOKENIZER_FILE

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""The template named "chatml", with answers marked for training."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Where text is cut before pairs are counted: the pattern of GPT-4 and Llama 3. No token reaches across a cut."""
_BYTES = 256
_CONTROL = re.compile(r"<\|[^|<>\s]+\|>")
_SAMPLED = 1 << 20
"""Characters on which the bytes per token are measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerRequest:
    """What to train."""

    vocab: int
    """Tokens in all: bytes and special tokens included."""
    end_token: str = "<|endoftext|>"
    special: tuple[str, ...] = ()
    """Further special tokens."""
    template: str | None = None
    """Text of a chat template."""
    max_bytes: int | None = None
    """Text to read at most, spread over all documents; None: all of it."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The end token, the requested ones, and those that look like special tokens in the template."""
        return tuple(dict.fromkeys((self.end_token, *self.special, *_CONTROL.findall(self.template or ""))))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTokenizer:
    """What was read and made."""

    documents: int
    bytes: int
    vocab: int
    """Fewer than requested if the text has too few different pairs."""
    special: tuple[str, ...]
    skipped: dict[str, int]
    """Bad records by reason."""
    bytes_per_token: float
    """Measured on the beginning of the text."""
    seconds: float


def train_tokenizer(
    request: TokenizerRequest, sources: Sequence[Source], data: Data, out: Path, progress: Callable[[int, int | None], None]
) -> TrainedTokenizer:
    """Trains a tokenizer and writes it into the folder `out`. `progress` gets the bytes read so far and their total, if it is known.
    Raises RunError before it reads anything if the request or the folder cannot be met."""
    begin = time.monotonic()
    _check(request, out)
    texts = _Texts(sources, data, request.max_bytes, progress)
    for plan in texts.plans:
        check_outside(plan, out)
    _make_folder(out)
    try:
        library = _train(request, texts)
        if not texts.documents:
            raise RunError(f"There is no text in {texts.names}: name files that hold some.")
    except BaseException:
        with suppress(OSError):
            out.rmdir()
        raise
    tokens = sum(len(encoding.ids) for encoding in library.encode_batch(texts.sample))
    _write(library, request, out)
    return TrainedTokenizer(
        documents=texts.documents,
        bytes=texts.bytes,
        vocab=library.get_vocab_size(),
        special=request.special_tokens,
        skipped=dict(texts.skipped),
        bytes_per_token=sum(len(text.encode()) for text in texts.sample) / max(1, tokens),
        seconds=time.monotonic() - begin,
    )


def _check(request: TokenizerRequest, out: Path) -> None:
    problems = []
    needed = _BYTES + len(request.special_tokens)
    if request.vocab <= needed:
        problems.append(
            f"--vocab {request.vocab} is too small: {_BYTES} bytes and the special tokens alone are {needed}; "
            "take a few thousand, or the byte tokenizer, which needs no training."
        )
    if bad := [token for token in request.special_tokens if not token.strip()]:
        problems.append(f"--special and --end-token: {bad[0]!r} is no text that could be a token.")
    if out.exists() and not out.is_dir():
        problems.append(f"{out} is a file: name a folder for the tokenizer.")
    elif out.is_dir() and (inside := sorted(path.name for path in out.iterdir())):
        problems.append(f"{out} is not empty and holds {inside[0]}: name another folder.")
    if problems:
        raise RunError(problems)
    if request.template is not None:
        ChatTemplate(request.template, "--chat-template", {"eos_token": request.end_token})


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)  # before the text is read, which may take long
    except OSError as error:
        raise RunError(f"{out} cannot be made ({error.strerror}); name another folder.") from None


def _train(request: TokenizerRequest, texts: _Texts) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=request.vocab,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in request.special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # any text can be written, also one with unknown characters
        show_progress=False,
    )
    library.train_from_iterator(iter(texts), trainer)
    return library


def _write(library: Any, request: TokenizerRequest, out: Path) -> None:
    """Writes the folder; tokenizer.json comes last, so a folder that has one is complete."""
    special = request.special_tokens
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": request.end_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,  # as transformers writes "no limit"
        "additional_special_tokens": [token for token in special if token != request.end_token],
    }
    try:
        if request.template is not None:
            replace_text(out / TEMPLATE_FILE, request.template)
        replace_text(out / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        replace_text(out / TOKENIZER_FILE, library.to_str(pretty=True))
    except OSError as error:
        raise RunFailed(
            f"{out} cannot be written ({error.strerror}): free space or make it writable, and start again."
        ) from None


@dataclass
class _Texts:
    """The texts of all sources, read once."""

    sources: Sequence[Source]
    data: Data
    max_bytes: int | None
    progress: Callable[[int, int | None], None]
    documents: int = 0
    bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    sample: list[str] = field(default_factory=list)
    names: str = ""
    _sampled: int = 0

    def __post_init__(self) -> None:
        self.plans = [self._plan(source) for source in self.sources]
        self.names = ", ".join(plan.spec.name for plan in self.plans)

    def __iter__(self) -> Iterator[str]:
        sizes = [plan.size for plan in self.plans]
        total = sum(size or 0 for size in sizes) if None not in sizes else None
        limit = self.max_bytes
        share = min(1.0, limit / total) if limit is not None and total else 1.0
        seen = read = 0
        for text in self._all():
            seen += 1
            size = len(text.encode())
            read += size
            if int(seen * share) == int((seen - 1) * share):
                continue  # evenly spread over all documents
            if limit is not None and self.bytes + size > limit and self.documents:
                return
            self.documents += 1
            self.bytes += size
            if self._sampled < _SAMPLED:
                self.sample.append(text[: _SAMPLED - self._sampled])
                self._sampled += len(self.sample[-1])
            self.progress(read, total)
            yield text

    def _plan(self, source: Source) -> TokenizePlan:
        kind = text_kind(source)
        spec = TokenizeSpec(kind=kind, source=source, data=self.data, template=None, template_name="")
        return TokenizePlan(spec=spec, tokenizer=ByteTokenizer(), files=source_files(source, kind))

    def _all(self) -> Iterator[str]:
        for plan in self.plans:
            skipped: Counter[str] = Counter()
            examples: dict[str, list[str]] = {}
            for piece in plan.pieces():
                for place, record in records(plan.spec, piece, raw=False):
                    try:
                        yield from _texts_of(record, plan.spec)
                    except BadRecord as bad:
                        skipped[bad.reason] += 1
                        if bad.reason not in examples:
                            examples[bad.reason] = [f"{place()} ({bad.detail})" if bad.detail else place()]
                        check_limit(plan.spec, skipped, examples)
            self.skipped += skipped


def _texts_of(record: Any, spec: TokenizeSpec) -> list[str]:
    """The texts of a record: those of a conversation are its messages, without what a template adds. Raises BadRecord."""
    if spec.kind == "chat" and isinstance(record, dict):
        messages = messages_of(record, spec.field, spec.source.prompt_field, spec.source.answer_field)
        texts = [message.get("content") or "" for message in messages]
    else:
        texts = [str(text_of(record, spec))]
    if not any(texts):
        raise BadRecord(EMPTY)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise BadRecord(NOT_UTF8, str(error)) from None
    return [text for text in texts if text]
