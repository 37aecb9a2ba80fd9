"""A preview says of a batch what the batch itself says: tokens, boundaries, masks, padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_token_files
from evaluation.tiny import bpe

from phalanx.data.dataset import Dataset, open_dataset
from phalanx.data.inspect import SampleView, batches, split_samples
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data, MixedSource

WORDS = ByteTokenizer()
TEXTS = tuple(f"Text {i}: " + "wörd " * (i % 5 + 1) for i in range(40))


def opened(length: int = 48, **values: Any) -> Dataset:
    return open_dataset(Data(source="memory", documents=TEXTS, eval_fraction=0.0, **values), length, seed=3)


def shown(dataset: Dataset, step: int = 1, batch: int = 4) -> list[SampleView]:
    return [sample for part in batches(dataset, step, batch) for sample in split_samples(dataset, part)]


def text_of(sample: SampleView) -> str:
    return "".join(stretch.text for piece in sample.pieces for stretch in piece.texts)


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_preview_pieces_equal_the_window(packing: str) -> None:
    dataset = opened(packing=packing)
    (batch,) = batches(dataset, 2, 4)
    assert batch.samples.tolist() == [4, 5, 6, 7]
    for row, sample in enumerate(split_samples(dataset, batch)):
        ids = batch.tokens[row]
        for piece in sample.pieces:
            text = [*TEXTS[piece.document].encode(), WORDS.end]
            assert ids[piece.first : piece.first + piece.stop - piece.start].tolist() == text[piece.start : piece.stop]
        held = sum(piece.stop - piece.start for piece in sample.pieces)
        assert sample.padding == len(ids) - held
        assert sample.trained == (batch.targets[row] >= 0).sum()
        assert sample.trained + sample.masked + sample.padding == len(ids)
        # Boundaries as attention has them: padding is one more document.
        assert batch.documents[row].max() + 1 == len(sample.pieces) + bool(sample.padding)


def test_preview_shows_whole_documents_as_written() -> None:
    dataset = opened(length=400, packing="best-fit")
    seen = [piece for sample in shown(dataset, batch=dataset.train.count) for piece in sample.pieces]
    assert sorted(piece.document for piece in seen) == list(range(len(TEXTS)))
    for piece in seen:
        first, rest = piece.texts  # the first letter is foretold by nothing
        assert (first.trained, rest.trained) == (False, True)
        assert first.text + rest.text == TEXTS[piece.document] + "<end>"


def test_preview_shows_the_end_of_a_document() -> None:
    assert "<end>" in "".join(map(text_of, shown(opened())))


def test_preview_separates_masked_text(tmp_path: Path) -> None:
    question, answer = list(b"ask: "), list(b"say")
    mask = [False] * len(question) + [True] * len(answer)
    write_token_files(tmp_path, WORDS, [question + answer] * 30, [mask] * 30)
    data = Data(source="tokens", paths=(str(tmp_path),), eval_fraction=0.0, packing="best-fit")
    (sample,) = shown(open_dataset(data, 20, seed=0), batch=1)
    for piece in sample.pieces:
        assert [(stretch.text, stretch.trained) for stretch in piece.texts] == [("ask: ", False), ("say<end>", True)]
    assert (sample.trained, sample.masked, sample.padding) == (2 * 4, 2 * 4, 4)


def test_digests_of_batch_parts_add_up() -> None:
    dataset = opened()
    (whole,) = batches(dataset, 3, 8)
    assert whole.digest == whole.rows(0, 3).digest + whole.rows(3, 8).digest
    moved = dataset.train.batch(np.arange(17, 25))
    assert moved.digest != whole.digest


def test_preview_names_the_sources_of_a_mixture() -> None:
    mix = (
        MixedSource(name="a", source="memory", documents=TEXTS[:20], weight=3.0),
        MixedSource(name="b", source="memory", documents=TEXTS[20:], weight=1.0),
    )
    dataset = open_dataset(Data(mix=mix, eval_fraction=0.0), 16, seed=0)
    found = [sample.source for sample in shown(dataset, batch=16)]
    assert sorted(found) == ["a"] * 12 + ["b"] * 4


def test_preview_of_a_step_beyond_the_epochs_is_refused() -> None:
    dataset = opened(epochs=1.0)
    last = dataset.train.count // 4
    assert len(shown(dataset, step=last)) == 4
    with pytest.raises(RunError, match=f"enough for {last} steps"):
        shown(dataset, step=last + 1)


def test_preview_shows_special_tokens_by_name(tmp_path: Path) -> None:
    path = bpe(tmp_path, around="<s> $A")
    data = Data(
        source="memory",
        documents=("the cat sat", "on the mät"),
        tokenizer=str(path),
        packing="best-fit",
        eval_fraction=0.0,
        cache=str(tmp_path / "cache"),
    )
    dataset = open_dataset(data, 64, seed=0)
    (sample,) = shown(dataset, batch=1)
    assert sorted(text_of(sample).split("</s>")) == ["", "<s>on the mät", "<s>the cat sat"]
    for piece in sample.pieces:
        assert piece.texts[0].text == "<s>" and not piece.texts[0].trained
