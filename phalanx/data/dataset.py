"""From the [data] table of a run to samples. The launcher calls it to find problems early, each rank to train."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.data.pack import Part, Samples, Windows
from phalanx.data.source import fingerprint, open_documents
from phalanx.data.split import Spans, split
from phalanx.data.tokenize import ByteTokenizer, tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data

_HELD_OUT = 0  # the seed of what is held out: runs that differ in train.seed are still compared on the same text


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A run's text, ready to be sampled."""

    train: Samples
    eval: Samples | None
    """Held-out samples, in an order of their own, so that a few stand for all; None where data.eval_fraction = 0."""
    fingerprint: str
    """Changes when a file is added, removed, renamed or resized; a resumed run compares it."""
    tokens: int
    """Tokens to train on in one epoch, end tokens included."""
    tokenizer: ByteTokenizer


def open_dataset(data: Data, sequence_length: int, seed: int) -> Dataset:
    """Costs one look at each file's size, whatever the text's length; the text is read when samples are."""
    words = tokenizer(data.tokenizer)
    documents = open_documents(data)
    train_spans, eval_spans = split(documents.lengths, data.eval_fraction, _HELD_OUT)
    parts: dict[Part, Spans] = {"train": train_spans}
    if data.eval_fraction > 0:
        parts["eval"] = eval_spans
    windows: dict[Part, Windows] = {}
    problems: list[str] = []
    for part, spans in parts.items():
        try:
            windows[part] = Windows(
                documents, spans, sequence_length, end=words.end, document_mask=data.document_mask, part=part
            )
        except RunError as error:
            problems += error.problems
    if problems:
        raise RunError(problems)
    return Dataset(
        train=Samples(windows["train"], seed, data.shuffle),
        eval=Samples(windows["eval"], _HELD_OUT, shuffle=True) if "eval" in windows else None,
        fingerprint=fingerprint(documents),
        tokens=windows["train"].tokens,
        tokenizer=words,
    )
