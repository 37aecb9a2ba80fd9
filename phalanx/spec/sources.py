"""What can be read off the files that [data] names without loading them: the kind of each source, and the size of the tokenizer.
Called by `spec/load`, `spec/check`, `spec/dump` and by the data room when it opens a source."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from phalanx.spec.errors import RunError, either, toml
from phalanx.spec.hub import local_path, missing_message, parse
from phalanx.spec.run import TOKENIZER_VOCAB, Source

TOKENIZER_FILE = "tokenizer.json"

_COMPRESSED = (".gz", ".zst", ".zstd")
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_TOKENS = "tokens.json"
_SAVED_DATASET = ("dataset_dict.json", "state.json")
"""Files that `datasets` writes into a folder it saves: for several splits, for one."""
_MAX_MATCHES = 10_000
"""Matches to look at of a pattern without a suffix."""


def kind(source: Source) -> str:
    """The kind of a source, given or inferred from its file names; "text" if they do not tell. `kinds` finds disagreements."""
    return next(iter(kinds(source)), "text")


def kinds(source: Source) -> list[str]:
    """Every kind that the file names of a source indicate, in their order; more than one is a mistake in the run file.

    Empty if nothing indicates a kind: a path without a suffix at which no file exists now.
    """
    if source.source is not None:
        return [source.source]
    if not source.paths:
        return ["memory" if source.documents else "stdlib"]
    return list(dict.fromkeys(kind for path in source.paths if (kind := _kind_of_path(path)) is not None))


def _kind_of_path(path: str) -> str | None:
    if "://" in path:
        return _kind_of_name(path.partition("?")[0].rstrip("/"))
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return _kind_of_folder(path)
    suffix = os.path.splitext(path)[1]
    if os.path.lexists(path) or (suffix and not glob.has_magic(suffix)):
        return _kind_of_name(path)
    matches = sorted(islice(glob.iglob(path, recursive=True), _MAX_MATCHES)) if glob.has_magic(path) else []
    if not matches and suffix.strip(".*?"):  # such as "*.jsonl*", of which there is none now
        return _kind_of_name(path.rstrip("*?"))
    return next((kind for match in matches if (kind := _kind_of_path(match)) is not None), None)


def _kind_of_name(path: str) -> str:
    name = os.path.basename(path).lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return "tokens" if name == _TOKENS else _KINDS.get(os.path.splitext(name)[1], "text")


def _kind_of_folder(path: str) -> str | None:
    """By its marker file, else by its first file in alphabetical order, not counting hidden files, README and LICENSE."""
    if os.path.isfile(os.path.join(path, _TOKENS)):
        return "tokens"
    if any(os.path.isfile(os.path.join(path, name)) for name in _SAVED_DATASET):
        return "hf"
    return next(map(_kind_of_name, _files(path)), None)


def _files(path: str) -> Iterator[str]:
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith((".", "_")) and os.path.splitext(name)[0].upper() not in ("README", "LICENSE"):
                yield os.path.join(folder, name)


def vocabulary_size(tokenizer: str) -> int:
    """The vocabulary size of `data.tokenizer`: its largest token id plus one. Raises RunError if it cannot be read."""
    if tokenizer in TOKENIZER_VOCAB:
        return TOKENIZER_VOCAB[tokenizer]
    given = f"data.tokenizer = {toml(tokenizer)}"
    try:
        path = local_path(tokenizer) if parse(tokenizer) else Path(tokenizer).expanduser()
        path = path / TOKENIZER_FILE if path.is_dir() else path
        stamp = path.stat()
        return _largest_id(path, stamp.st_mtime_ns, stamp.st_size) + 1
    except FileNotFoundError:
        if (why := missing_message(tokenizer)) is not None:
            raise RunError(f"{given}: {why}") from None
        if Path(tokenizer).expanduser().is_dir():
            missing = f"{given} is a folder without {TOKENIZER_FILE}: name one that `tokenizers` or transformers wrote."
            raise RunError(missing) from None
        names = either(toml(name) for name in TOKENIZER_VOCAB)
        remedy = (
            f"give {names}, a {TOKENIZER_FILE}, a folder that holds one, or a name of the Hugging Face hub; paths are taken from "
            f"{Path.cwd()}."
        )
        raise RunError(f"{given} does not exist: {remedy}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of a user who does not exist
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(f"{given} cannot be read ({reason}): check the path and its permissions.") from None
    except ValueError as error:
        raise RunError(f"{given} is not a tokenizer ({error}): give a {TOKENIZER_FILE} that `tokenizers` wrote.") from None


@lru_cache(16)
def _largest_id(path: Path, changed_at: int, size: int) -> int:
    """Cached by the file's time and size: loading one run asks for a vocabulary of megabytes several times."""
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None
    ids = set(_ids(tree)) if isinstance(tree, dict) else set()
    if not ids:
        raise ValueError(f"{path} lists no vocabulary")
    return max(ids)


def _ids(tree: dict[str, Any]) -> Iterable[int]:
    model, added = tree.get("model"), tree.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):  # BPE, WordPiece, WordLevel: token to id
        yield from (number for number in vocab.values() if type(number) is int)
    elif isinstance(vocab, list):  # Unigram: pieces in the order of their ids
        yield from range(max(0, len(vocab) - 1), len(vocab))
    if isinstance(added, list) and vocab:
        yield from (token["id"] for token in added if isinstance(token, dict) and type(token.get("id")) is int)
