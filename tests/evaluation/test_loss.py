"""Loss on text: every token once, documents apart, as transformers has it for each document by itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import write_token_files
from evaluation.tiny import Pair, bpe, twins
from ranks import ALONE, tiny_trainer

from phalanx.data.corpus import MemoryCorpus
from phalanx.data.pack import IGNORED, Batch, BestFitPacking
from phalanx.data.token_files import TokenFiles
from phalanx.data.tokenizer import ByteTokenizer, open_tokenizer
from phalanx.evaluation.score import Measured, documents, held_out, measure, text_bytes, whole
from phalanx.spec.load import loads
from phalanx.spec.run import Data

TEXTS = ["one small text", "another one, somewhat longer than that", "x", "the last: äöü"]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return twins(vocab=300)


def measured(pair: Pair, batches: Iterable[Batch], document_mask: bool = True) -> Measured:
    return measure(pair.ours, ByteTokenizer(), batches, compute="fp32", document_mask=document_mask)


def test_equals_each_document_by_itself_with_transformers(pair: Pair) -> None:
    """In one window that holds everything, so that no document is cut."""
    nats = tokens = 0.0
    for text in TEXTS:
        ids = [*text.encode(), 256]
        logprob, _ = pair.logprob(ids[:1], ids[1:])  # nothing foretells a document's first token
        nats, tokens = nats - logprob, tokens + len(ids) - 1
    got = measured(pair, whole(MemoryCorpus(TEXTS), 200, 4, document_mask=True))
    assert got.tokens == tokens
    assert got.nats == pytest.approx(nats, rel=1e-5)
    text = sum(len(text.encode()) - 1 for text in TEXTS)
    assert got.bytes == text
    assert got.bits_per_byte == pytest.approx(nats / math.log(2) / text, rel=1e-5)
    assert got.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-5)


def test_documents_in_one_text(pair: Pair) -> None:
    """Without the mask a window is one text: attention and positions run through."""
    corpus = MemoryCorpus(TEXTS)
    stream = corpus.read(0, corpus.tokens).astype(np.int64)
    logits = pair.logits(stream[:-1].tolist())
    keep = np.ones(len(stream) - 1, dtype=bool)
    keep[corpus.starts(1, corpus.tokens) - 1] = False
    logprobs = logits.log_softmax(-1)[torch.arange(len(keep)), torch.from_numpy(stream[1:])].numpy()
    got = measured(pair, whole(corpus, 200, 1, document_mask=False), document_mask=False)
    assert got.tokens == keep.sum()
    assert got.nats == pytest.approx(-logprobs[keep].sum(), rel=1e-5)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 69, 70, 71, 500])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_token_is_predicted_once(length: int, batch: int) -> None:
    corpus = MemoryCorpus(TEXTS)
    stream = corpus.read(0, corpus.tokens).tolist()
    batches = list(whole(corpus, length, batch, document_mask=True))
    tokens = np.concatenate([batch.tokens.ravel() for batch in batches])
    targets = np.concatenate([batch.targets.ravel() for batch in batches])
    assert tokens.tolist() == stream[:-1]
    begins = set(corpus.starts(0, corpus.tokens).tolist())
    assert targets.tolist() == [IGNORED if i + 1 in begins else token for i, token in enumerate(stream[1:])]
    assert all(len(batch.tokens) <= 3 for batch in batches)


def test_a_limit_of_sequences() -> None:
    corpus = MemoryCorpus(TEXTS)
    whole_text = list(whole(corpus, 16, 2, document_mask=True))
    for sequences in (1, 3, 4, 5, 100):
        some = list(whole(corpus, 16, 2, document_mask=True, sequences=sequences))
        assert sum(len(batch.tokens) for batch in some) == min(sequences, 5)
        assert (some[0].tokens[0] == whole_text[0].tokens[0]).all()


def test_a_corpus_of_one_token() -> None:
    assert list(whole(MemoryCorpus([]), 16, 2, document_mask=True)) == []
    assert Measured().bits_per_byte is None and Measured().loss == 0.0


def test_bytes_of_a_tokenizer_that_merges(pair: Pair, tmp_path: Path) -> None:
    words = open_tokenizer(str(bpe(tmp_path)))
    texts = ["the cat sat on the mat", "grüße the dog", "sun"]
    write_token_files(tmp_path / "tokens", words, [words.encode(text) for text in texts])
    corpus = TokenFiles(tmp_path / "tokens")
    (batch,) = whole(corpus, 400, 1, document_mask=True)
    first = sum(len(words.decode(words.encode(text)[:1]).encode()) for text in texts)
    assert text_bytes(batch, words) == sum(len(text.encode()) for text in texts) - first


def test_masked_tokens_do_not_count(pair: Pair, tmp_path: Path) -> None:
    ids = list(b"question answer")
    mask = [i >= 8 for i in range(len(ids))]
    write_token_files(tmp_path / "tokens", ByteTokenizer(), [ids], [mask])
    got = measured(pair, whole(TokenFiles(tmp_path / "tokens"), 64, 1, document_mask=True))
    expected, _ = pair.logprob(ids[:8], [*ids[8:], 256])
    assert got.tokens == len(ids) - 8 + 1
    assert got.nats == pytest.approx(-expected, rel=1e-5)


MIXED = """
[model]
dim = 32
layers = 1
heads = 2

[data]
packing = "{packing}"
document_mask = {mask}
eval_fraction = 0.3

[data.mix.numbers]
source = "memory"
documents = {numbers}

[data.mix.words]
source = "memory"
documents = {words}

[train]
batch = 4
micro_batch = 2
sequence_length = 24
steps = 2
eval_sequences = 5
"""


@pytest.mark.parametrize(("packing", "mask"), [("stream", "true"), ("stream", "false"), ("best-fit", "true")])
def test_held_out_loss_is_what_training_computes(tmp_path: Path, packing: str, mask: str) -> None:
    numbers = json.dumps([" ".join(str(i * j) for j in range(9)) for i in range(60)])
    words = json.dumps([f"some words, {i} times" for i in range(60)])
    run = loads(MIXED.format(packing=packing, mask=mask, numbers=numbers, words=words))
    trainer = tiny_trainer(ALONE, run, tmp_path / "checkpoints")
    trainer.step()
    told = trainer.evaluate()
    trainer.close()
    assert told is not None and set(told.sources) == {"numbers", "words"}
    mask = run.data.document_mask
    got = {
        name: measure(trainer.model, ByteTokenizer(), held_out(samples, 5, 2), compute="fp32", document_mask=mask)
        for name, samples in trainer.data.eval.items()
    }
    for name, source in told.sources.items():
        assert (got[name].loss, got[name].tokens) == (source["loss"], source["tokens"])
        assert got[name].perplexity == pytest.approx(source["perplexity"])
    whole = got["numbers"] + got["words"]
    assert (whole.loss, whole.tokens) == (pytest.approx(told.loss, rel=1e-12), told.tokens)


def test_documents_are_packed_whole_whatever_the_packing_of_training() -> None:
    assert isinstance(documents(MemoryCorpus(TEXTS), 64, ByteTokenizer(), Data(packing="stream")).packing, BestFitPacking)
