"""`phalanx data inspect` and `phalanx data preview`: look at text before a model does. Neither needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.output import AsJson, console, print_json
from phalanx.dashboard.data_tables import looking_through, show_inspected, show_sample, tokenizing
from phalanx.data import inspect as looking
from phalanx.data import preview as previewing
from phalanx.data.corpus import Corpus
from phalanx.data.dataset import open_corpus, open_dataset
from phalanx.data.token_files import META, TokenFiles
from phalanx.data.tokenizer import Tokenizer, open_tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.load import load
from phalanx.spec.run import Data, MixedSource
from phalanx.spec.sources import kind

app = typer.Typer(help="Look at text: what a source holds, what a step will see.", no_args_is_help=True)

_KINDS = ("text", "jsonl", "parquet", "hf", "chat", "tokens", "stdlib")


@app.command("inspect")
def data(
    what: Annotated[str, typer.Argument(help="A run file, a folder of token files, or text of any kind.", metavar="WHAT")],
    source: Annotated[str | None, typer.Option(help=f"Kind of text: {', '.join(_KINDS)}; left out: told by names.")] = None,
    field: Annotated[str | None, typer.Option(help="Field or column that holds the text.")] = None,
    words: Annotated[str | None, typer.Option("--tokenizer", help="byte, a tokenizer.json or a folder with one.")] = None,
    template: Annotated[str | None, typer.Option(help="chat: a Jinja file, or plain.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Length that best-fit packing is tried for; left out: the run's.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Documents to show.")] = 3,
    width: Annotated[int, typer.Option(min=1, help="Characters of each to show.")] = 200,
    seed: Annotated[int, typer.Option(help="Which documents are shown.")] = 0,
    max_bad_records: Annotated[int | None, typer.Option(min=0, help="Records that may be skipped.")] = None,
    json: AsJson = False,
) -> None:
    """Count documents, tokens, lengths, duplicates and skipped records, and show a sample."""
    given = {
        "source": source, "field": field, "tokenizer": words, "template": template, "max_bad_records": max_bad_records
    }  # fmt: skip
    asked = {key: value for key, value in given.items() if value is not None}
    opened = _run_file(what, asked) if what.endswith(".toml") else _text(what, asked)
    wish = looking.InspectOptions(
        sequence_length=sequence_length or opened.sequence_length, samples=samples, characters=width, seed=seed
    )
    found = {}
    for name, (corpus, skipped) in opened.sources.items():
        with looking_through(console, name) as progress:
            inspected = looking.inspect(corpus, opened.tokenizer, wish, progress)
        about = opened.about(corpus) | {"skipped": skipped}
        show_inspected(console, name, inspected, about)
        found[name] = asdict(inspected) | {"duplicate_share": inspected.duplicate_share} | about
    if json:
        print_json({"sources": found})


@app.command("preview")
def preview(
    run_file: Annotated[Path, typer.Argument(help="The run file.", metavar="RUN.toml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, e.g. train.batch=8.")] = None,
    step: Annotated[int, typer.Option(min=1, help="The step; 1 is the first.")] = 1,
    samples: Annotated[int, typer.Option(min=0, help="Samples of its batch to show.")] = 4,
    width: Annotated[int, typer.Option(min=0, help="Characters of each document to show; 0: all.")] = 1000,
    json: AsJson = False,
) -> None:
    """Print what the model will see at a step: documents, their boundaries, what is masked, padding."""
    run = load(run_file, overrides or [])
    if step > run.steps:
        raise RunError([f"--step {step} never comes: {run_file} ends after {run.steps} steps."])
    with tokenizing(console) as progress:
        dataset = open_dataset(run.data, run.train.sequence_length, run.train.seed, progress)
    digest, shown = 0, list[dict[str, Any]]()
    for batch in previewing.batches(dataset, step, run.batch):
        digest += batch.digest
        rows = batch.rows(0, max(0, samples - len(shown)))
        for row, sample in enumerate(previewing.samples(dataset, rows)):
            show_sample(console, sample, width)
            arrays = ((name, getattr(rows, name)) for name in ("tokens", "targets", "positions", "documents"))
            shown.append(sample.table() | {name: array[row].tolist() for name, array in arrays})
    if len(shown) < run.batch:
        console.print(f"… and {run.batch - len(shown)} more in this batch (--samples shows more)", style="dim")
    console.print(f"step {step}: {run.batch} samples, batch digest {digest:x}", style="bold")
    if json:
        print_json({"step": step, "batch": run.batch, "batch_digest": f"{digest:x}", "samples": shown})


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What there is to inspect."""

    sources: dict[str, tuple[Corpus, dict[str, int]]]
    """Corpus and skipped records of each."""
    tokenizer: Tokenizer | None
    sequence_length: int | None = None
    stored: dict[str, Any] = field(default_factory=dict)
    """What token files without their tokenizer say about it."""

    def about(self, corpus: Corpus) -> dict[str, Any]:
        words = self.tokenizer
        known = {} if words is None else {"tokenizer": words.name, "vocab": words.vocab, "end": words.end}
        return {"dtype": str(corpus.read(0, min(1, corpus.tokens)).dtype)} | self.stored | known


def _run_file(what: str, asked: dict[str, Any]) -> _Opened:
    if unused := [f"--{name.replace('_', '-')}" for name in asked]:
        raise RunError([f"{' and '.join(unused)}: {what} is a run file, which says that itself; leave the option out."])
    run = load(what)
    return _opened(run.data, run.train.sequence_length)


def _text(what: str, asked: dict[str, Any]) -> _Opened:
    if asked.get("source", "text") not in _KINDS:
        raise RunError([f"--source {asked['source']} is not known: choose one of {', '.join(_KINDS)}."])
    paths = () if asked.get("source") == "stdlib" else (what,)
    data = Data(**{"paths": paths} | asked)
    if kind(data) == "tokens" and "tokenizer" not in asked:
        folder = Path(what).parent if Path(what).name == META else Path(what)
        files = TokenFiles(folder.expanduser())
        meta = files.meta
        stored = {"dtype": meta.dtype, "tokenizer": meta.tokenizer, "vocab": meta.vocab, "end": meta.end}
        return _Opened(sources={"tokens": (files, meta.skipped)}, tokenizer=_tokenizer_of(files), stored=stored)
    return _opened(data, None)


def _opened(data: Data, sequence_length: int | None) -> _Opened:
    words = open_tokenizer(data.tokenizer, data.end_token)
    return _Opened(sources=dict(_sources(data, words)), tokenizer=words, sequence_length=sequence_length)


def _sources(data: Data, words: Tokenizer) -> Iterator[tuple[str, tuple[Corpus, dict[str, int]]]]:
    for source in data.mix or (data,):
        name = source.name if isinstance(source, MixedSource) else kind(source)
        with tokenizing(console) as progress:
            opened = open_corpus(source, data, words, progress)
        yield name, opened


def _tokenizer_of(files: TokenFiles) -> Tokenizer | None:
    """The tokenizer that the files name, if it is still there and the same."""
    try:
        words = open_tokenizer(files.meta.tokenizer)
    except RunError:
        return None
    return words if words.sha256 == files.meta.tokenizer_sha256 else None
