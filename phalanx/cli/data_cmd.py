"""`phalanx data inspect` and `phalanx data preview` show text as training will read it; `phalanx tokenize` turns it into token files. None
of them needs torch."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from phalanx.cli.options import SOURCE_KINDS, TEXT_KINDS, AsJson, Field, Overrides, RunFile, Template, check_source_kind
from phalanx.cli.output import console, finish, print_json, progress_bar
from phalanx.control.protocol import RESUMABLE
from phalanx.dashboard.data_tables import SourceFormat, show_inspected, show_sample, tokenizing
from phalanx.dashboard.numbers import count, duration
from phalanx.data.corpus import Corpus
from phalanx.data.dataset import open_corpus, open_dataset, source_name
from phalanx.data.ingest import Progress, tokenize_into
from phalanx.data.inspect import InspectOptions, batches, split_samples
from phalanx.data.inspect import inspect as inspect_corpus
from phalanx.data.token_files import META, TokenFiles
from phalanx.data.tokenizer import Tokenizer, open_tokenizer
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.json_value import JsonObject
from phalanx.spec.load import load
from phalanx.spec.pinned_names import pin_data
from phalanx.spec.run import Data
from phalanx.spec.sources import kind

_DEFAULT = Data()

app = typer.Typer(help="Inspect sources of text, and preview the batch of a step.", no_args_is_help=True)


@app.command("inspect")
def inspect(
    what: Annotated[
        str,
        Argument(help="A run file, a folder of token files, or a file, folder, glob or URL with text.", metavar="WHAT"),
    ],
    source: Annotated[str | None, Option(help=f"{', '.join(SOURCE_KINDS)}. Default: derived from the file names.")] = None,
    field: Field = None,
    tokenizer: Annotated[
        str | None, Option(help='"byte", a tokenizer.json, a folder with one, or a name of the Hugging Face hub.')
    ] = None,
    template: Template = None,
    sequence_length: Annotated[
        int | None, Option(min=2, help="Window length for the padding of best-fit packing. Default: that of the run.")
    ] = None,
    samples: Annotated[int, Option(min=0, help="Number of documents to show.")] = 3,
    width: Annotated[int, Option(min=1, help="Characters to show per document.")] = 200,
    seed: Annotated[int, Option(help="Seed of the choice of documents.")] = 0,
    max_bad_records: Annotated[int | None, Option(min=0, help="Maximum number of bad records to skip.")] = None,
    json: AsJson = False,
) -> None:
    """Count documents, tokens, lengths, duplicates and skipped records of a source, and show some documents."""
    given = {
        "source": source, "field": field, "tokenizer": tokenizer, "template": template, "max_bad_records": max_bad_records
    }  # fmt: skip
    settings = {key: value for key, value in given.items() if value is not None}
    sources, opened, length = _open(what, settings)
    options = InspectOptions(sequence_length=sequence_length or length, samples=samples, characters=width, seed=seed)
    reports = {}
    for name, (corpus, skipped) in sources.items():
        with progress_bar(f"reading {name}", corpus.tokens) as progress:
            report = inspect_corpus(corpus, opened, options, progress)
        about = _format(corpus, skipped, opened)
        show_inspected(console, name, report, about)
        reports[name] = asdict(report) | {"duplicate_share": report.duplicate_share} | asdict(about)
    finish(json, {"sources": reports})


@app.command("preview")
def preview(
    run_file: RunFile,
    overrides: Overrides = None,
    step: Annotated[int, Option(min=1, help="The step; the first is 1.")] = 1,
    samples: Annotated[int, Option(min=0, help="Number of samples to show.")] = 4,
    width: Annotated[int, Option(min=0, help="Characters to show per document; 0 shows all.")] = 1000,
    json: AsJson = False,
) -> None:
    """Print the batch of a step as the model will read it: documents, boundaries, masks and padding."""
    run = load(run_file, overrides or [])
    if step > run.steps:
        raise RunError(f"--step {step} is beyond the end: {run_file} has {run.steps} steps.")
    with tokenizing(console) as progress:
        dataset = open_dataset(run.data, run.train.sequence_length, run.train.seed, progress)
    digest, shown = 0, list[JsonObject]()
    for batch in batches(dataset, step, run.batch):
        digest += batch.digest
        rows = batch.rows(0, max(0, samples - len(shown)))
        for row, sample in enumerate(split_samples(dataset, rows)):
            show_sample(console, sample, width)
            arrays = ((name, getattr(rows, name)) for name in ("tokens", "targets", "positions", "documents"))
            shown.append(sample.table() | {name: array[row].tolist() for name, array in arrays})
    if len(shown) < run.batch:
        console.print(f"… and {run.batch - len(shown)} more in this batch (--samples shows more)", style="dim")
    console.print(f"step {step}: {run.batch} samples, batch digest {digest:x}", style="bold")
    finish(json, {"step": step, "batch": run.batch, "batch_digest": f"{digest:x}", "samples": shown})


def _open(what: str, settings: dict[str, Any]) -> tuple[dict[str, tuple[Corpus, dict[str, int]]], Tokenizer | None, int | None]:
    """Each source by name with the number of its skipped records by reason; their tokenizer; the sequence length of a run file."""
    data, sequence_length = Data(), None
    if what.endswith(".toml"):
        if unused := [f"--{name.replace('_', '-')}" for name in settings]:
            raise RunError(f"{' and '.join(unused)}: {what} is a run file and has these settings; remove the option.")
        run = load(what)
        data, sequence_length = run.data, run.train.sequence_length
    else:
        refuse(check_source_kind(settings.get("source")))
        data = Data(**{"paths": () if settings.get("source") == "stdlib" else (what,)} | settings)
        if kind(data) == "tokens" and "tokenizer" not in settings:
            files = TokenFiles((Path(what).parent if Path(what).name == META else Path(what)).expanduser())
            return {"tokens": (files, files.meta.skipped)}, _tokenizer_of(files), None
        data = pin_data(data)
    tokenizer = open_tokenizer(data.tokenizer, data.end_token)
    sources = {}
    for source in data.mix or (data,):
        with tokenizing(console) as progress:
            sources[source_name(source)] = open_corpus(source, data, tokenizer, progress)
    return sources, tokenizer, sequence_length


def _format(corpus: Corpus, skipped: dict[str, int], tokenizer: Tokenizer | None) -> SourceFormat:
    dtype = str(corpus.read(0, min(1, corpus.tokens)).dtype)
    if tokenizer is not None:
        return SourceFormat(dtype=dtype, tokenizer=tokenizer.name, vocab=tokenizer.vocab, end=tokenizer.end, skipped=skipped)
    assert isinstance(corpus, TokenFiles), "only token files can be read without their tokenizer"
    meta = corpus.meta
    return SourceFormat(dtype=dtype, tokenizer=meta.tokenizer, vocab=meta.vocab, end=meta.end, skipped=skipped)


def _tokenizer_of(files: TokenFiles) -> Tokenizer | None:
    """The tokenizer that the meta file names, if it exists and is unchanged."""
    try:
        tokenizer = open_tokenizer(files.meta.tokenizer)
    except RunError:
        return None
    return tokenizer if tokenizer.sha256 == files.meta.tokenizer_sha256 else None


def tokenize(
    paths: Annotated[
        list[str], Argument(help="Files, folders, globs or URLs, then the folder to write.", metavar="SRC... OUT")
    ],
    tokenizer: Annotated[
        str, Option(help='"byte", a tokenizer.json, a folder with one, or a name of the Hugging Face hub.')
    ] = "byte",
    end_token: Annotated[str | None, Option(help="Token that ends a document. Default: that of the tokenizer.")] = None,
    source: Annotated[str | None, Option(help=f"{', '.join(TEXT_KINDS)}. Default: derived from the file names.")] = None,
    field: Field = None,
    template: Template = None,
    prompt_field: Annotated[str, Option(help="chat: field with the question.")] = _DEFAULT.prompt_field,
    answer_field: Annotated[str, Option(help="chat: field with the answer.")] = _DEFAULT.answer_field,
    split: Annotated[str, Option(help="hf: the split of the dataset.")] = _DEFAULT.split,
    config: Annotated[str | None, Option(help="hf: the configuration of the dataset.")] = None,
    streaming: Annotated[
        bool, Option("--streaming", help="hf: read the dataset as a stream instead of downloading it first.")
    ] = False,
    processes: Annotated[int | None, Option(min=1, max=4096, help="Number of processes. Default: one per core.")] = None,
    max_bad_records: Annotated[int, Option(min=0, help="Maximum number of bad records to skip.")] = _DEFAULT.max_bad_records,
    max_record_bytes: Annotated[
        int, Option(min=1, max=1 << 31, help="Maximum size of a record; a longer one is bad.")
    ] = _DEFAULT.max_record_bytes,
    force: Annotated[bool, Option("--force", help="Start over if OUT holds token files of something else.")] = False,
    json: AsJson = False,
) -> None:
    """Turn text into token files. After a stop or a crash, the same command resumes."""
    *sources, out = paths
    if not sources and source != "stdlib":
        raise RunError(f"phalanx tokenize {out}: name the text first and the folder to write last: SRC... OUT.")
    refuse(check_source_kind(source, TEXT_KINDS))
    kinds: dict[str, Any] = {"source": source, "template": template}  # checked above, and when it is read
    data = Data(
        **kinds,
        paths=tuple(sources),
        field=field,
        prompt_field=prompt_field,
        answer_field=answer_field,
        split=split,
        config=config,
        streaming=streaming,
        tokenizer=tokenizer,
        end_token=end_token,
        processes=processes,
        max_bad_records=max_bad_records,
        max_record_bytes=max_record_bytes,
    )
    _tokenize(data, out, force=force, json=json)


def _tokenize(data: Data, out: str, *, force: bool, json: bool) -> None:
    """Makes the token files and reports them."""
    data = pin_data(data)
    opened = open_tokenizer(data.tokenizer, data.end_token)
    begin, progresses = time.monotonic(), list[Progress]()
    try:
        with tokenizing(console) as shown:

            def show(progress: Progress) -> None:
                progresses[:] = [progress]
                shown(progress)

            meta = tokenize_into(Path(out).expanduser(), data, data, opened, force=force, progress=show)
    except KeyboardInterrupt:
        console.print(f"Stopped. Finished parts are in {out}: run the same command to resume.", soft_wrap=True)
        raise typer.Exit(RESUMABLE) from None
    seconds = time.monotonic() - begin
    speed = sum(meta.tokens - last.kept for last in progresses) / seconds
    if json:
        table = {name: getattr(meta, name) for name in ("documents", "tokens", "skipped", "fingerprint")}
        speeds = {"seconds": round(seconds, 3), "tokens_per_second": round(speed, 1)}
        print_json({"out": out, "parts": len(meta.parts)} | table | speeds)
        return
    skipped = "".join(f"; {number} skipped ({reason})" for reason, number in meta.skipped.items())
    console.print(
        f"{out}: {meta.documents:,} documents, {meta.tokens:,} tokens in {len(meta.parts)} parts, "
        f"{duration(seconds)}{f', {count(speed)} tok/s' if speed else ''}{skipped}",
        soft_wrap=True,
    )
