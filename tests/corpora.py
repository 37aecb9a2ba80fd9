"""Corpora for tests of the data room, written out by hand: token files without the code that writes them, and one in memory."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import IndexedCorpus
from phalanx.data.pack import Batch, Packing
from phalanx.data.samples import Samples
from phalanx.data.token_files import Part, TokenMeta, TokenWriter, write_meta
from phalanx.data.tokenizer import ByteTokenizer, Tokenizer

END = 256


class Masked(IndexedCorpus):
    """Documents of ids in memory, some of which may not be targets."""

    fingerprint = "masked"

    def __init__(self, documents: Sequence[Sequence[int]], mask: Sequence[bool] | None = None):
        super().__init__(np.cumsum([0, *(len(ids) + 1 for ids in documents)]))
        self.ids = np.array([token for ids in documents for token in (*ids, END)])
        self.trained = None if mask is None else np.array(mask)
        self.reads = 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        self.reads += 1
        return self.ids[start:stop]

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        return None if self.trained is None else self.trained[start:stop]


def one_window(windows: Packing | Samples, number: int) -> Batch:
    """One window or sample by its number."""
    return Batch(*(array[0] for array in windows.batch(np.array([number]))))


def some_documents(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Documents of different ids, an empty one now and then."""
    return [rng.choices(range(256), k=rng.randint(0 if rng.random() < 0.2 else 1, longest)) for _ in range(count)]


def write_tokens(
    folder: Path,
    parts: Sequence[Sequence[Sequence[int]]],
    masks: Sequence[Sequence[Sequence[bool]]] | None = None,
    **changed: object,
) -> Path:
    """Token files of documents, part by part; a mask per document covers its end token too."""
    folder.mkdir(parents=True, exist_ok=True)
    described = []
    for i, documents in enumerate(parts):
        ids = [token for document in documents for token in (*document, END)]
        np.array(ids, dtype="<u2").tofile(folder / f"p{i}.tokens")
        np.array(np.cumsum([0, *(len(document) + 1 for document in documents)]), dtype="<i8").tofile(folder / f"p{i}.index")
        if masks is not None:
            np.array([trained for mask in masks[i] for trained in mask], dtype=np.bool_).tofile(folder / f"p{i}.mask")
        described.append({"name": f"p{i}", "documents": len(documents), "tokens": len(ids), "sha256": ""})
    meta = {
        "format": "phalanx-tokens",
        "version": 1,
        "dtype": "uint16",
        "tokenizer": "byte",
        "tokenizer_sha256": ByteTokenizer.sha256,
        "vocab": 257,
        "end": END,
        "masked": masks is not None,
        "documents": sum(map(len, parts)),
        "tokens": sum(len(document) + 1 for documents in parts for document in documents),
        "skipped": {},
        "parts": described,
        "fingerprint": str([[list(document) for document in documents] for documents in parts]),
    } | changed
    (folder / "tokens.json").write_text(json.dumps(meta))
    return folder


def write_token_files(
    folder: Path,
    words: Tokenizer,
    documents: Iterable[Sequence[int]],
    masks: Iterable[Sequence[int]] | None = None,
    *,
    per_part: int | None = None,
) -> TokenMeta:
    """Token files of documents that are ids already, `per_part` documents to a part. An end token is trained on like the id before."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Part] = []
    writer: TokenWriter | None = None
    paired = ((ids, None) for ids in documents) if masks is None else zip(documents, masks, strict=True)
    for ids, mask in paired:
        if writer is None:
            writer = TokenWriter(folder, f"part-{len(parts):06d}", words, masked=masks is not None)
        if mask is None:
            writer.add_batch([np.asarray(ids)])
        else:
            trained = np.array([*mask, *mask[-1:]] if len(mask) else [False], dtype=np.bool_)
            writer.add_batch([np.array([*ids, words.end])], [trained])
        if writer.documents == per_part:
            parts += [part] if (part := writer.close()) else []
            writer = None
    if writer is not None and (part := writer.close()):
        parts.append(part)
    return write_meta(folder, words, parts, masked=masks is not None, skipped={})
