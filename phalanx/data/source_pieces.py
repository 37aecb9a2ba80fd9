"""Cuts a source into pieces that are tokenised apart, each into one part of the token files. `ingest` makes the plan.

Where the cuts are follows from the source alone, never from the number of processes, so the files are the same for any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from phalanx.data.chat import ChatTemplate, template_of
from phalanx.data.files import SourceFile, find_files, is_compressed, is_web, paths_key, stdlib_files
from phalanx.data.table_records import dataset_rows, row_groups, saved_dataset_files
from phalanx.data.text_records import BadRecord
from phalanx.data.token_files import VERSION
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data, Source
from phalanx.spec.sources import kinds

_PIECE = 16 << 20
"""Bytes of a piece: seconds of work, so that little is lost when a run is killed and all processes end together."""
_MOST_PIECES = 4096
"""A corpus that would have more gets larger ones: a folder of token files stays one that opens at once."""
_MOST_FILES = 4096
"""Small text files in one piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeSpec:
    """How records become ids; what a worker has to know."""

    kind: str
    field: str
    max_record_bytes: int
    tokenizer: str
    end_token: str | None
    template: str | None
    """chat: its text."""
    template_name: str
    prompt_field: str
    answer_field: str
    name: str
    """What to call the source in places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one worker tokenises in one go."""

    number: int
    paths: tuple[str, ...] = ()
    start: int = 0
    """Byte, row group or row that it begins with."""
    stop: int | None = None
    """Byte or row group before which it ends; None: all of it."""
    rows: tuple[str | BadRecord, ...] | None = None
    """The records themselves, where the parent reads them."""
    size: int = 0
    """Bytes, for the progress."""

    @property
    def part(self) -> str:
        return f"part-{self.number:06d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizePlan:
    """A source that is to be tokenised."""

    recipe: TokenizeSpec
    words: Tokenizer
    paths_key: str
    """How the run file calls its paths."""
    identity: dict[str, Any]
    """All that the ids follow from: equal, and so are the token files."""
    size: int | None
    """Bytes as stored; None: not known."""
    pieces: Callable[[], Iterator[Piece]]

    @property
    def key(self) -> str:
        """The identity as a name."""
        from json import dumps

        return hashlib.sha256(dumps(self.identity, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def masked(self) -> bool:
        return self.recipe.kind == "chat"


def make_plan(source: Source, data: Data, words: Tokenizer) -> TokenizePlan:
    """Looks at names and sizes; nothing is read but a template."""
    kind = _kind(source)
    if kind == "tokens":
        raise RunError([f"{paths_key(source)} holds token files already; there is nothing to tokenise."])
    name, template = template_of(source, words) if kind == "chat" else ("", None)
    if template is not None:
        ChatTemplate(template, name, words.special)  # found wrong here, not in a worker
    recipe = TokenizeSpec(
        kind=kind,
        field=source.field or ("messages" if kind == "chat" else "text"),
        max_record_bytes=data.max_record_bytes,
        tokenizer=words.name,
        end_token=data.end_token,
        template=template,
        template_name=name,
        prompt_field=source.prompt_field,
        answer_field=source.answer_field,
        name=", ".join(source.paths) or kind,
    )
    files = _files(source, kind)
    sizes = [file.size for file in files]
    documents = [text for text in source.documents if text] if kind == "memory" else []
    if kind == "memory" and not documents:
        raise RunError(['data.source = "memory" but data.documents holds no text; give it at least one.'])
    return TokenizePlan(
        recipe=recipe,
        words=words,
        paths_key=paths_key(source),
        identity=_identity(source, recipe, words, files, documents),
        size=sum(size or 0 for size in sizes) if files and None not in sizes else None,
        pieces=partial(_pieces, source, recipe, files, documents),
    )


def _kind(source: Source) -> str:
    told = kinds(source)
    if len(told) > 1:
        raise RunError(
            [
                f"{paths_key(source)} names files of several kinds ({', '.join(told)}); say which is meant (data.source, --source)."
            ]
        )
    return told[0] if told else "text"


def _files(source: Source, kind: str) -> list[SourceFile]:
    if kind == "memory":
        return []
    if kind == "stdlib":
        _, sizes = stdlib_files()
        return [SourceFile(path, size, "") for path, size in sorted(sizes.items())]
    return saved_dataset_files(source) if kind == "hf" else find_files(source, kind)


def _identity(
    source: Source, recipe: TokenizeSpec, words: Tokenizer, files: Sequence[SourceFile], documents: Sequence[str]
) -> dict[str, Any]:
    own: dict[str, Any] = {
        "version": VERSION,
        "source": recipe.kind,
        "tokenizer": words.sha256,
        "max_record_bytes": recipe.max_record_bytes,
        "files": [list(asdict(file).values()) for file in files],
    }
    if recipe.kind in ("jsonl", "parquet", "hf", "chat"):
        own["field"] = recipe.field
    if recipe.kind == "hf":
        own |= {"dataset": list(source.paths), "split": source.split, "config": source.config}
    if recipe.kind == "memory":
        own["documents"] = hashlib.sha256("\0".join(documents).encode(errors="replace")).hexdigest()
    if recipe.template is not None:
        own |= {"prompt_field": recipe.prompt_field, "answer_field": recipe.answer_field}
        own["template"] = hashlib.sha256(recipe.template.encode()).hexdigest()
        # The texts of special tokens stand outside tokenizer.json, and templates write them.
        own["special_tokens"] = dict(sorted(words.special.items()))
    return own


def _pieces(source: Source, recipe: TokenizeSpec, files: Sequence[SourceFile], documents: Sequence[str]) -> Iterator[Piece]:
    size = max(_PIECE, sum(file.size or 0 for file in files) // _MOST_PIECES)
    if recipe.kind == "memory":
        return _of_rows(documents, size)
    if recipe.kind == "hf":
        return _of_rows(dataset_rows(source, recipe.field, recipe.max_record_bytes), size)
    if recipe.kind == "parquet":
        return _of_row_groups([(file, row_groups(file.path, recipe.field)) for file in files], size)
    if recipe.kind in ("text", "stdlib"):
        return _of_documents(files, size)
    return _of_lines(files, size)


def _of_lines(files: Sequence[SourceFile], size: int) -> Iterator[Piece]:
    """Byte ranges, whose lines are those that begin in it; a packed file can only be read from its beginning."""
    number = 0
    for file in files:
        whole = file.size is None or is_compressed(file.path) or is_web(file.path)
        ends = [None] if whole else [*range(size, file.size or 0, size), file.size]
        begin = 0
        for end in ends:
            length = (file.size or 0) if end is None else end - begin
            yield Piece(number=number, paths=(file.path,), start=begin, stop=end, size=length)
            number, begin = number + 1, end or 0


def _of_documents(files: Sequence[SourceFile], size: int) -> Iterator[Piece]:
    number, paths, held = 0, list[str](), 0
    for file in files:
        if paths and (held + (file.size or 0) > size or len(paths) == _MOST_FILES):
            yield Piece(number=number, paths=tuple(paths), size=held)
            number, paths, held = number + 1, [], 0
        paths.append(file.path)
        held += file.size or 0
    yield Piece(number=number, paths=tuple(paths), size=held)


def _of_row_groups(files: Sequence[tuple[SourceFile, list[int]]], size: int) -> Iterator[Piece]:
    number = 0
    for file, groups in files:
        begin, held = 0, 0
        stored = (file.size or 0) / max(1, sum(groups))  # how much of the file a byte of a row group stands for
        for group, length in enumerate(groups):
            held += length
            if held >= size or group == len(groups) - 1:
                yield Piece(number=number, paths=(file.path,), start=begin, stop=group + 1, size=int(held * stored))
                number, begin, held = number + 1, group + 1, 0


def _of_rows(rows: Iterable[str | BadRecord], size: int) -> Iterator[Piece]:
    number, first, held, length = 0, 0, list[str | BadRecord](), 0
    for row in rows:
        held.append(row)
        length += len(row) if isinstance(row, str) else 0
        if length >= size or len(held) >= size >> 4:  # many empty rows make a piece, too
            yield Piece(number=number, start=first, rows=tuple(held), size=length)
            number, first, held, length = number + 1, first + len(held), [], 0
    if held:
        yield Piece(number=number, start=first, rows=tuple(held), size=length)
