"""The loss of an opened model on text: the held-out text of its run, or a source that is named. Called by `phalanx eval` and `px.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from phalanx.data.dataset import open_corpus, open_dataset
from phalanx.data.pack import Batch
from phalanx.evaluation.open_model import Opened, usual_batch
from phalanx.evaluation.score import Measured, documents, held_out, measure, whole
from phalanx.spec.errors import RunError
from phalanx.spec.pinned_names import pin_source
from phalanx.spec.run import Run
from phalanx.spec.sources import kind

if TYPE_CHECKING:
    from phalanx.data.ingest import ProgressCallback

Tokenizing: TypeAlias = "Callable[[], AbstractContextManager[ProgressCallback | None]]"
"""Makes a context whose value shows the progress of tokenization."""
Tracked = Callable[[Iterable[Batch], str, int], Iterable[Batch]]
"""Passes batches on while it shows their progress: batches, name of the source, number of batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """What is evaluated, and how much of it."""

    source: Mapping[str, object] = field(default_factory=dict)
    """Keys of the table [data] that name the source; empty: the held-out text of the run."""
    sequence_length: int | None = None
    """Window length. Default: that of the run."""
    sequences: int | None = None
    """Maximum number of windows per source."""
    batch: int | None = None
    """Sequences per batch. Default: as in training."""
    max_bad_records: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Losses of a model on text."""

    sources: dict[str, Measured]
    """By source: `loss`, `perplexity`, `bits_per_byte` and `tokens`."""
    total: Measured
    """Of all sources together."""
    skipped: dict[str, int]
    """Number of bad records by reason."""
    checkpoint: str
    """The checkpoint or folder that was evaluated."""
    step: int | None
    """Step of the checkpoint; None: a Hugging Face folder."""
    damaged: tuple[str, ...]
    """Newer checkpoints that were skipped because they are damaged, and why."""

    @property
    def loss(self) -> float:
        """Mean loss per token of all sources, in nats."""
        return self.total.loss

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return self.total.perplexity


def text_loss(
    opened: Opened,
    options: TextOptions,
    tracked: Tracked = lambda batches, name, total: batches,
    tokenizing: Tokenizing = nullcontext,
) -> Evaluation:
    """Evaluates a model on text. Raises RunError if there is no
    such text, or nothing to predict in it."""
    compute, mask = opened.compute, opened.run.data.document_mask
    skipped: dict[str, int] = {}
    parts = _given_source(opened, options, tokenizing, skipped) if options.source else _held_out(opened, options, tokenizing)
    measured = {
        name: measure(opened.model, opened.tokenizer, tracked(batches, name, total), compute=compute, document_mask=mask)
        for name, total, batches in parts
    }
    total = sum(measured.values(), Measured())
    if not total.tokens:
        raise RunError("The text has no token to predict: name text of two tokens or more.")
    return Evaluation(
        sources=measured,
        total=total,
        skipped=skipped,
        checkpoint=str(opened.path),
        step=opened.step,
        damaged=tuple(map(str, opened.damaged)),
    )


def _held_out(opened: Opened, options: TextOptions, tokenizing: Tokenizing) -> Iterator[tuple[str, int, Iterator[Batch]]]:
    """The held-out text of the run, by source: name, number of batches, batches."""
    run, batch = opened.run, options.batch or usual_batch(opened)
    if run.train.objective == "dpo":
        raise RunError(
            f"{opened.path} was trained on preferences, of which a model alone has no loss: name text with --path, or use --choices."
        )
    with tokenizing() as progress:
        dataset = open_dataset(run.data, _length(run, options), run.train.seed, progress)
    if not dataset.eval:
        raise RunError(
            f"{opened.path} has no held-out text (data.eval_fraction = 0): name text with --source and --path, or use --choices."
        )
    for name, samples in dataset.eval.items():
        sequences = min(options.sequences or run.train.eval_sequences, samples.count)
        yield name, -(-sequences // batch), held_out(samples, sequences, batch)


def _given_source(
    opened: Opened,
    options: TextOptions,
    tokenizing: Tokenizing,
    skipped: dict[str, int],
) -> Iterator[tuple[str, int, Iterator[Batch]]]:
    """The whole source that the options name."""
    run, batch, length = opened.run, options.batch or usual_batch(opened), _length(opened.run, options)
    no_source = {"source": None, "paths": (), "documents": (), "mix": (), "field": None, "epochs": None}
    limit = {} if options.max_bad_records is None else {"max_bad_records": options.max_bad_records}
    data = replace(run.data, **cast(dict[str, Any], no_source | dict(options.source) | limit))
    data = pin_source(data)
    with tokenizing() as progress:
        corpus, found = open_corpus(data, data, opened.tokenizer, progress)
    skipped |= found
    if data.packing == "best-fit" or kind(data) == "chat":  # an answer without its question would measure nothing
        samples = documents(corpus, length, opened.tokenizer, data)
        count = min(samples.count, options.sequences or samples.count)
        yield kind(data), -(-count // batch), held_out(samples, count, batch)
        return
    windows = -(-(corpus.tokens - 1) // length)
    total = -(-min(windows, options.sequences or windows) // batch)
    yield kind(data), total, whole(corpus, length, batch, document_mask=data.document_mask, sequences=options.sequences)


def _length(run: Run, options: TextOptions) -> int:
    length = options.sequence_length or min(run.train.sequence_length, run.model.context)
    if length > run.model.context:
        raise RunError(f"--sequence-length {length} is longer than the model's context of {run.model.context} tokens.")
    return length
