"""`phalanx eval`: loss and perplexity of a model on held-out text or any source, or its accuracy on multiple-choice questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from phalanx.cli.output import AsJson, console, print_json
from phalanx.dashboard.data_tables import tokenizing
from phalanx.dashboard.numbers import count, number, percent
from phalanx.spec import hf_config
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

if TYPE_CHECKING:
    from phalanx.data.pack import Batch
    from phalanx.evaluation.open_model import Opened
    from phalanx.evaluation.perplexity import Measured

_KINDS = ("text", "jsonl", "parquet", "hf", "chat", "tokens", "stdlib")


def eval(
    checkpoint: Annotated[str, typer.Argument(help="A run directory, a checkpoint or a Hugging Face folder.", metavar="CKPT")],
    source: Annotated[str | None, typer.Option(help=f"Kind of text instead of what was held out: {', '.join(_KINDS)}.")] = None,
    path: Annotated[list[str] | None, typer.Option(help="Its files, folders, globs or URLs; may be repeated.")] = None,
    field: Annotated[str | None, typer.Option(help="Field or column that holds the text.")] = None,
    split: Annotated[str | None, typer.Option(help="hf: which split.")] = None,
    config: Annotated[str | None, typer.Option(help="hf: which configuration of the dataset.")] = None,
    template: Annotated[str | None, typer.Option(help="chat: a Jinja file, or plain.")] = None,
    choices: Annotated[Path | None, typer.Option(help="Multiple-choice questions in JSONL instead of text.")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Tokens of a window; left out: the run's.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Most windows of each source, or questions, to read.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences at a time; left out: as many as training took.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; left out: the GPU if there is one.")] = None,
    max_bad_records: Annotated[int | None, typer.Option(min=0, help="Records that may be skipped.")] = None,
    json: AsJson = False,
) -> None:
    """Measure a model: held-out loss and perplexity per source, or accuracy on multiple-choice questions."""
    given = {
        "source": source,
        "paths": tuple(path or ()),
        "field": field,
        "split": split,
        "config": config,
        "template": template,
    }
    asked = _Asked(
        given={key: value for key, value in given.items() if value},
        sequence_length=sequence_length,
        sequences=sequences,
        batch=batch,
        max_bad_records=max_bad_records,
    )
    asked.check(checkpoint, choices)
    from phalanx.evaluation.open_model import open_model

    opened = open_model(checkpoint, device)
    result = _loss(opened, asked) if choices is None else _choices(opened, choices, asked)
    if json:
        print_json(result | {"checkpoint": str(opened.path)})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The options of one call."""

    given: dict[str, Any]
    """What was said about a source: keys of the table [data]."""
    sequence_length: int | None
    sequences: int | None
    batch: int | None
    max_bad_records: int | None

    def check(self, checkpoint: str, choices: Path | None) -> None:
        problems = []
        source = self.given.get("source")
        if source is not None and source not in _KINDS:
            problems.append(f"--source {source} is not known: choose one of {', '.join(_KINDS)}.")
        if self.given and not (source or self.given.get("paths")):
            problems.append(f"--{next(iter(self.given))} says something about a source: give --path too, or --source.")
        if self.given and choices is not None:
            problems.append("--choices and a source exclude each other: give one of them.")
        if "://" not in checkpoint and hf_config.is_folder(Path(checkpoint)) and not self.given and choices is None:
            problems.append(
                f"{checkpoint} is a Hugging Face folder, which held nothing out: name text with --path, or --choices."
            )
        if problems:
            raise RunError(problems)


def _choices(opened: Opened, path: Path, asked: _Asked) -> dict[str, Any]:
    from phalanx.evaluation.choices import BadRecords, choose, read_questions
    from phalanx.evaluation.instruments import scorer

    limit = asked.max_bad_records if asked.max_bad_records is not None else opened.run.data.max_bad_records
    bad = BadRecords(path, limit)
    judge = scorer(opened, asked.batch)
    chosen = choose(judge, read_questions(path, bad, asked.sequences), bad)
    console.print(
        f"questions {chosen.questions}, right {percent(chosen.accuracy)}, "
        f"by likelihood per character {percent(chosen.accuracy_normalized)}",
        style="bold",
    )
    for reason, times in bad.reasons.items():
        console.print(f"skipped {times} records: {reason}", style="yellow")
    for place in bad.places:
        console.print(f"  {place}", style="dim", markup=False, soft_wrap=True)
    if chosen.truncated:
        console.print(
            f"{chosen.truncated} questions are longer than the model's context of {judge.context} tokens: "
            "their beginning was left out.",
            style="yellow",
        )
    return {
        "accuracy": chosen.accuracy,
        "accuracy_normalized": chosen.accuracy_normalized,
        "questions": chosen.questions,
        "truncated": chosen.truncated,
        "skipped": dict(bad.reasons),
    }


def _loss(opened: Opened, asked: _Asked) -> dict[str, Any]:
    from phalanx.evaluation.instruments import meter
    from phalanx.evaluation.perplexity import Measured

    measure = meter(opened)
    parts = _given(opened, asked) if asked.given else _held_out(opened, asked)
    found = {
        name: measure.measure(track(batches, name, total, console=console, transient=True, disable=not console.is_terminal))
        for name, total, batches in parts
    }
    whole = sum(found.values(), Measured())
    if not whole.tokens:
        raise RunError(["There is no token to predict in this text: name text of two tokens or more."])
    _show(found, whole)
    return whole.table() | {"sources": {name: measured.table() for name, measured in found.items()}}


def _held_out(opened: Opened, asked: _Asked) -> Iterator[tuple[str, int, Iterator[Batch]]]:
    """What the run itself held out, source by source: its name, the number of batches, the batches."""
    from phalanx.data.dataset import open_dataset
    from phalanx.evaluation.instruments import usual_batch
    from phalanx.evaluation.perplexity import held_out

    run, batch = opened.run, asked.batch or usual_batch(opened)
    with tokenizing(console) as progress:
        dataset = open_dataset(run.data, _length(opened.run, asked), run.train.seed, progress)
    if not dataset.eval:
        raise RunError(
            [f"{opened.path} held nothing out (data.eval_fraction = 0): name text with --source and --path, or use --choices."]
        )
    for name, samples in dataset.eval.items():
        sequences = min(asked.sequences or run.train.eval_sequences, samples.count)
        yield name, -(-sequences // batch), held_out(samples, sequences, batch)


def _given(opened: Opened, asked: _Asked) -> Iterator[tuple[str, int, Iterator[Batch]]]:
    """All of the source that the command line names."""
    from phalanx.data.dataset import open_corpus
    from phalanx.evaluation.instruments import usual_batch
    from phalanx.evaluation.perplexity import documents, held_out, whole
    from phalanx.spec.sources import kind

    run, batch, length = opened.run, asked.batch or usual_batch(opened), _length(opened.run, asked)
    nothing = {"source": None, "paths": (), "documents": (), "mix": (), "field": None, "epochs": None}
    limit = {} if asked.max_bad_records is None else {"max_bad_records": asked.max_bad_records}
    data = replace(run.data, **(nothing | asked.given | limit))
    with tokenizing(console) as progress:
        corpus, skipped = open_corpus(data, data, opened.tokenizer, progress)
    for reason, times in skipped.items():
        console.print(f"skipped {times} records: {reason}", style="yellow")
    if data.packing == "best-fit" or kind(data) == "chat":  # an answer cut off from its question would measure nothing
        samples = documents(corpus, length, opened.tokenizer, data)
        count = min(samples.count, asked.sequences or samples.count)
        yield kind(data), -(-count // batch), held_out(samples, count, batch)
        return
    windows = -(-(corpus.tokens - 1) // length)
    total = -(-min(windows, asked.sequences or windows) // batch)
    yield kind(data), total, whole(corpus, length, batch, document_mask=data.document_mask, sequences=asked.sequences)


def _length(run: Run, asked: _Asked) -> int:
    length = asked.sequence_length or min(run.train.sequence_length, run.model.context)
    if length > run.model.context:
        raise RunError([f"--sequence-length {length} is longer than the model's context of {run.model.context} tokens."])
    return length


def _show(found: dict[str, Measured], whole: Measured) -> None:
    table = Table(box=None, header_style="bold")
    for title in ("source", "loss", "perplexity", "bits/byte", "tokens"):
        table.add_column(title, justify="left" if title == "source" else "right")
    for name, measured in [*found.items(), *([("all", whole)] if len(found) > 1 else [])]:
        values = (measured.loss, measured.perplexity, measured.bits_per_byte)
        table.add_row(name, *map(number, values), count(measured.tokens))
    console.print(table)
