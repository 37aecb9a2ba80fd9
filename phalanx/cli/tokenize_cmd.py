"""`phalanx tokenize`: turns text of any kind into token files, in several processes, resumable."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.options import TEXT_KINDS, AsJson, Field, Template, check_source_kind
from phalanx.cli.output import console, print_json
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data

RESUMABLE = 75
"""Exit code after a stop on request that can be resumed, as of a run."""
_DEFAULT = Data()


def tokenize(
    paths: Annotated[
        list[str], typer.Argument(help="Files, folders, globs or URLs, then the folder to write.", metavar="SRC... OUT")
    ],
    tokenizer: Annotated[str, typer.Option(help='"byte", a tokenizer.json, or a folder with one.')] = "byte",
    end_token: Annotated[str | None, typer.Option(help="Token that ends a document. Default: that of the tokenizer.")] = None,
    source: Annotated[str | None, typer.Option(help=f"{', '.join(TEXT_KINDS)}. Default: derived from the file names.")] = None,
    field: Field = None,
    template: Template = None,
    prompt_field: Annotated[str, typer.Option(help="chat: field with the question.")] = _DEFAULT.prompt_field,
    answer_field: Annotated[str, typer.Option(help="chat: field with the answer.")] = _DEFAULT.answer_field,
    split: Annotated[str, typer.Option(help="hf: the split of the dataset.")] = _DEFAULT.split,
    config: Annotated[str | None, typer.Option(help="hf: the configuration of the dataset.")] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="hf: read the dataset as a stream instead of downloading it first.")
    ] = False,
    processes: Annotated[int | None, typer.Option(min=1, max=4096, help="Number of processes. Default: one per core.")] = None,
    max_bad_records: Annotated[
        int, typer.Option(min=0, help="Maximum number of bad records to skip.")
    ] = _DEFAULT.max_bad_records,
    max_record_bytes: Annotated[
        int, typer.Option(min=1, max=1 << 31, help="Maximum size of a record; a longer one is bad.")
    ] = _DEFAULT.max_record_bytes,
    force: Annotated[bool, typer.Option("--force", help="Start over if OUT holds token files of something else.")] = False,
    json: AsJson = False,
) -> None:
    """Turn text into token files. After a stop or a crash, the same command resumes."""
    *sources, out = paths
    if not sources and source != "stdlib":
        raise RunError(f"phalanx tokenize {out}: name the text first and the folder to write last: SRC... OUT.")
    if problems := check_source_kind(source, TEXT_KINDS):
        raise RunError(problems)
    given: dict[str, Any] = {"source": source, "paths": tuple(sources), "field": field, "template": template}
    data = replace(
        _DEFAULT,
        **given,
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
    summary = _work(data, out, force=force)
    if json:
        print_json(summary)
    else:
        _print(summary)


def _work(data: Data, out: str, *, force: bool) -> dict[str, Any]:
    """Makes the token files; returns the object that --json prints."""
    from phalanx.dashboard.data_tables import tokenizing
    from phalanx.data.ingest import Progress, tokenize_into
    from phalanx.data.tokenizer import open_tokenizer

    opened = open_tokenizer(data.tokenizer, data.end_token)
    begin, kept = time.monotonic(), [0]
    try:
        with tokenizing(console) as shown:

            def show(progress: Progress) -> None:
                kept.append(progress.kept)
                shown(progress)

            meta = tokenize_into(Path(out).expanduser(), data, data, opened, force=force, progress=show)
    except KeyboardInterrupt:
        console.print(f"Stopped. Finished parts are in {out}: run the same command to resume.", soft_wrap=True)
        raise typer.Exit(RESUMABLE) from None
    seconds = time.monotonic() - begin
    made = meta.tokens - kept[-1] if len(kept) > 1 else 0
    return {
        "out": out,
        "documents": meta.documents,
        "tokens": meta.tokens,
        "skipped": meta.skipped,
        "parts": len(meta.parts),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(made / seconds, 1),
        "fingerprint": meta.fingerprint,
    }


def _print(summary: dict[str, Any]) -> None:
    from phalanx.dashboard.numbers import count, duration

    skipped = "".join(f"; {number} skipped ({reason})" for reason, number in summary["skipped"].items())
    speed = f", {count(summary['tokens_per_second'])} tok/s" if summary["tokens_per_second"] else ""
    console.print(
        f"{summary['out']}: {summary['documents']:,} documents, {summary['tokens']:,} tokens in {summary['parts']} parts, "
        f"{duration(summary['seconds'])}{speed}{skipped}",
        soft_wrap=True,
    )
