"""How many tokens a tokenizer has, read off its file without loading it: the run file is resolved before anything heavy is.
Called by `spec/load` for a model that takes its vocabulary from the tokenizer, and by `spec/check_data`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from phalanx.spec.dump import toml
from phalanx.spec.errors import RunError
from phalanx.spec.run import TOKENIZER_VOCAB
from phalanx.spec.words import either

FILE = "tokenizer.json"


def vocabulary(tokenizer: str) -> int:
    """Tokens of what `data.tokenizer` names: its largest id plus one; RunError where that cannot be read."""
    if tokenizer in TOKENIZER_VOCAB:
        return TOKENIZER_VOCAB[tokenizer]
    given = f"data.tokenizer = {toml(tokenizer)}"
    try:
        path = Path(tokenizer).expanduser()
        path = path / FILE if path.is_dir() else path
        stamp = path.stat()
        return _tokens(path, stamp.st_mtime_ns, stamp.st_size)
    except FileNotFoundError:
        if Path(tokenizer).expanduser().is_dir():
            raise RunError([f"{given} is a folder without {FILE}: name one that `tokenizers` or transformers wrote."]) from None
        names = either(toml(name) for name in TOKENIZER_VOCAB)
        remedy = f"give {names}, a {FILE}, or a folder that holds one; paths are taken from {Path.cwd()}."
        raise RunError([f"{given} does not exist: {remedy}"]) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a home directory that nobody has
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError([f"{given} cannot be read ({reason}): check the path and its permissions."]) from None
    except ValueError as error:
        raise RunError([f"{given} is no tokenizer ({error}): give a {FILE} that `tokenizers` wrote."]) from None


@lru_cache(16)
def _tokens(path: Path, changed_at: int, size: int) -> int:
    """Kept by the file's time and size, as a vocabulary of megabytes is asked for several times while a run is read."""
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None
    ids = set(_ids(tree)) if isinstance(tree, dict) else set()
    if not ids:
        raise ValueError(f"{path} lists no vocabulary")
    return max(ids) + 1


def _ids(tree: dict[str, Any]) -> Iterable[int]:
    model, added = tree.get("model"), tree.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):  # BPE, WordPiece, WordLevel: token to id
        yield from (number for number in vocab.values() if type(number) is int)
    elif isinstance(vocab, list):  # Unigram: pieces in the order of their ids
        yield from range(max(0, len(vocab) - 1), len(vocab))
    if isinstance(added, list) and vocab:
        yield from (token["id"] for token in added if isinstance(token, dict) and type(token.get("id")) is int)
