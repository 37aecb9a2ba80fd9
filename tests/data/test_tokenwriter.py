from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from corpora import write_token_files

from phalanx.data.token_files import TokenFiles, TokenMeta, TokenWriter
from phalanx.data.tokenizer import open_tokenizer

WORDS = open_tokenizer("byte")


def test_written_token_files_read_back(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    documents = [dice.integers(0, 256, size) for size in dice.integers(0, 50, 40)]
    masks = [dice.integers(0, 2, len(document)) for document in documents]
    meta = write_token_files(tmp_path, WORDS, documents, masks, per_part=7)
    files = TokenFiles(tmp_path)
    assert files.meta == meta == TokenMeta.read(tmp_path)
    assert len(meta.parts) == 6 and meta.documents == 40
    bounds = files.bounds(0, 40)
    for number, (document, mask) in enumerate(zip(documents, masks, strict=True)):
        assert files.read(bounds[number], bounds[number + 1]).tolist() == [*document, WORDS.end]
        found = files.mask(bounds[number], bounds[number + 1])
        assert found is not None and found.tolist() == [*map(bool, mask), bool(mask[-1]) if len(mask) else False]


def test_written_document_has_one_end_token(tmp_path: Path) -> None:
    write_token_files(tmp_path, WORDS, [[1, WORDS.end], [2], []])
    assert TokenFiles(tmp_path).read(0, 5).tolist() == [1, WORDS.end, 2, WORDS.end, WORDS.end]


def test_written_token_files_match_the_documented_format(tmp_path: Path) -> None:
    """By the words of docs/token-files.md, without the reader."""
    meta = write_token_files(tmp_path, WORDS, [[1, 2], [3]], [[1, 0], [1]])
    tokens, index, mask = ((tmp_path / f"part-000000.{suffix}").read_bytes() for suffix in ("tokens", "index", "mask"))
    assert np.frombuffer(tokens, "<u2").tolist() == [1, 2, 256, 3, 256]
    assert np.frombuffer(index, "<i8").tolist() == [0, 3, 5]
    assert list(mask) == [1, 0, 0, 1, 1]
    assert meta.parts[0].sha256 == hashlib.sha256(tokens + index + mask).hexdigest()


def test_token_file_fingerprint_covers_ids_borders_masks_and_tokenizer(tmp_path: Path) -> None:
    made = [
        write_token_files(tmp_path / "a", WORDS, [[1, 2], [3]]),
        write_token_files(tmp_path / "b", WORDS, [[1, 2], [4]]),
        write_token_files(tmp_path / "c", WORDS, [[1], [2, 3]]),
        write_token_files(tmp_path / "d", WORDS, [[1, 2], [3]], [[1, 1], [1]]),
        write_token_files(tmp_path / "e", WORDS, [[1, 2], [3]], [[1, 1], [0]]),
    ]
    assert len({meta.fingerprint for meta in made}) == len(made)
    assert write_token_files(tmp_path / "f", WORDS, [[1, 2], [3]]).fingerprint == made[0].fingerprint


def test_token_file_is_renamed_only_when_complete(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path, "part-000000", WORDS, masked=False)
    writer.add_batch([np.array([1, 2])])
    assert not list(tmp_path.glob("*.tokens")) and not list(tmp_path.glob("*.index"))
    writer.discard()
    assert not list(tmp_path.iterdir())
    assert TokenWriter(tmp_path, "part-000000", WORDS, masked=False).close() is None
    assert not list(tmp_path.iterdir()), "a part without documents is none"


def test_token_writer_needs_masks_for_all_documents_or_none(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path, "part-000000", WORDS, masked=True)
    with pytest.raises(AssertionError, match="every document of a part has a mask"):
        writer.add_batch([np.array([1, 2])])
    writer.discard()
