from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from corpora import END, Masked, some_documents, write_tokens

from phalanx.data import corpus as corpus_module
from phalanx.data import token_files
from phalanx.data.corpus import ChainedCorpus, Corpus
from phalanx.data.token_files import TokenFiles
from phalanx.spec.errors import RunError, RunFailed


def agree(found: Corpus, expected: Masked, rng: random.Random) -> None:
    """Everything a corpus answers, against the same documents written out in memory."""
    assert (found.documents, found.tokens) == (expected.documents, expected.tokens)
    for _ in range(40):
        start, stop = sorted(rng.choices(range(found.tokens + 1), k=2))
        if start == stop:
            continue
        assert found.read(start, stop).tolist() == expected.read(start, stop).tolist()
        assert found.starts(start, stop).tolist() == expected.starts(start, stop).tolist()
        own, other = found.mask(start, stop), expected.mask(start, stop)
        assert (None if own is None else own.tolist()) == (None if other is None else other.tolist())
        first, last = sorted(rng.choices(range(found.documents + 1), k=2))
        assert found.bounds(first, last).tolist() == expected.bounds(first, last).tolist()
        position = rng.randrange(found.tokens)
        assert found.find(position) == expected.find(position)


def divided(rng: random.Random, documents: list[list[int]]) -> list[list[list[int]]]:
    """Into parts of any size, empty ones among them."""
    cuts = sorted(rng.choices(range(len(documents) + 1), k=rng.randint(0, 5)))
    return [documents[a:b] for a, b in zip([0, *cuts], [*cuts, len(documents)], strict=True)]


@pytest.mark.parametrize("blocks", [1 << 17, 7, 1])
def test_token_files_of_many_parts_are_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    rng = random.Random(blocks)
    monkeypatch.setattr(token_files, "BLOCKS", blocks)
    monkeypatch.setattr(token_files, "_CHUNK", 5)
    for case in range(25):
        monkeypatch.setattr(token_files, "_SPARSE", rng.choice([2, 1024]))
        documents = some_documents(rng, rng.randint(1, 40), rng.choice([1, 20]))
        parts = divided(rng, documents)
        masks = rng.choice([None, [[rng.choices([True, False], k=len(ids) + 1) for ids in part] for part in parts]])
        flat = None if masks is None else [trained for part in masks for mask in part for trained in mask]
        files = TokenFiles(write_tokens(tmp_path / str(case), parts, masks))
        agree(files, Masked(documents, flat), rng)
        found = files.blocks
        assert 1 <= len(found) - 1 <= blocks
        assert (found[0], found[-1]) == (0, files.tokens)
        assert set(found.tolist()) <= set(files.bounds(0, files.documents).tolist())
        assert (
            len(found) - 1 == len(documents) if len(documents) <= blocks else len(found) - 1 >= min(blocks, len(documents)) // 2
        )


def test_several_folders_of_token_files_are_one_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    for _ in range(25):
        monkeypatch.setattr(corpus_module, "BLOCKS", rng.choice([1 << 17, 5]))
        members: list[Corpus] = []
        documents: list[list[int]] = []
        mask: list[bool] = []
        for i in range(rng.randint(1, 4)):
            own = some_documents(rng, rng.randint(1, 10), 10)
            own_mask = [True] * sum(len(ids) + 1 for ids in own)
            if i % 2:
                own_mask = rng.choices([True, False], k=len(own_mask))
            members.append(Masked(own, own_mask))
            documents, mask = documents + own, mask + own_mask
        chain = ChainedCorpus(members)
        agree(chain, Masked(documents, mask), rng)
        assert set(chain.blocks.tolist()) <= set(chain.bounds(0, chain.documents).tolist())
        assert ChainedCorpus([Masked(ids) for ids in ([[1]], [[2, 3]])]).mask(0, 5) is None


def test_token_files_find_reads_little_for_any_number_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = TokenFiles(write_tokens(tmp_path, [[[1, 2]] * 150_000]))
    assert files.find(3 * 99_999 + 1) == 99_999
    asked: list[int] = []
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: asked.append(len(buffers[0])) or plain(fd, buffers, at))
    assert files.find(3 * 120_001) == 120_001
    assert files.starts(3 * 70_000, 3 * 70_000 + 7).tolist() == [210_000, 210_003, 210_006]
    assert len(asked) == 2
    assert sum(asked) < 200


def test_truncated_or_missing_token_file_is_named_on_opening(tmp_path: Path) -> None:
    write_tokens(tmp_path, [[[1, 2, 3]], [[4]]])
    os.truncate(tmp_path / "p0.tokens", 4)
    os.remove(tmp_path / "p1.index")
    with pytest.raises(RunError) as caught:
        TokenFiles(tmp_path)
    assert f"{tmp_path}/p0.tokens has 4 bytes where tokens.json says 8" in caught.value.problems[0]
    assert f"{tmp_path}/p1.index is missing" in caught.value.problems[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "holds no token files: tokens.json is missing"),
        ("{", "cannot be read"),
        ("[]", 'its "format" is not "phalanx-tokens"'),
        ('{"format": "phalanx-tokens", "version": 9}', "has version 9 and this Phalanx reads 1"),
        ('{"format": "phalanx-tokens", "version": 1}', "is not complete"),
    ],
)
def test_folder_without_token_files_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "tokens.json").write_text(text)
    with pytest.raises(RunError, match=words):
        TokenFiles(tmp_path)


def test_token_file_that_shrinks_or_vanishes_is_an_error(tmp_path: Path) -> None:
    files = TokenFiles(write_tokens(tmp_path, [[[1, 2, 3]]]))
    assert files.read(0, 4).tolist() == [1, 2, 3, END]
    os.truncate(tmp_path / "p0.tokens", 4)
    with pytest.raises(RunFailed, match=r"p0\.tokens has shrunk"):
        files.read(0, 4)
    os.remove(tmp_path / "p0.index")
    with pytest.raises(RunFailed, match=r"p0\.index can no longer be read"):
        files.bounds(0, 1)


def test_token_files_keep_ids_of_a_large_vocabulary(tmp_path: Path) -> None:
    write_tokens(tmp_path, [[[1, 2, 3]]], dtype="uint32")
    np.array([70_000, 2**32 - 1, 5, 100_000], dtype="<u4").tofile(tmp_path / "p0.tokens")
    assert TokenFiles(tmp_path).read(0, 4).tolist() == [70_000, 2**32 - 1, 5, 100_000]
