"""`phalanx tokenize`: text of any kind to token files, in several processes, resumed where it was stopped."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.output import AsJson, console, print_json
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data

RESUMABLE = 75
"""Exit code when it was stopped on request and can be started again, as of a run."""
_DEFAULT = Data()
_KINDS = ("text", "jsonl", "parquet", "hf", "chat", "stdlib")


def tokenize(
    paths: Annotated[
        list[str], typer.Argument(help="Files, folders, globs or URLs; at last the folder to write.", metavar="SRC... OUT")
    ],
    tokenizer: Annotated[str, typer.Option(help='"byte", or a tokenizer.json, or a folder that holds one.')] = "byte",
    end_token: Annotated[str | None, typer.Option(help="Token that ends a document; left out: the tokenizer's own.")] = None,
    source: Annotated[str | None, typer.Option(help=f"{', '.join(_KINDS)}; left out: told by the names.")] = None,
    field: Annotated[str | None, typer.Option(help='Field or column with the text; left out: "text", or "messages".')] = None,
    template: Annotated[
        str | None, typer.Option(help='chat: a Jinja file, or "plain"; left out: the tokenizer\'s own.')
    ] = None,
    prompt_field: Annotated[str, typer.Option(help="chat: field of the question.")] = _DEFAULT.prompt_field,
    answer_field: Annotated[str, typer.Option(help="chat: field of the answer.")] = _DEFAULT.answer_field,
    split: Annotated[str, typer.Option(help="hf: which split.")] = _DEFAULT.split,
    config: Annotated[str | None, typer.Option(help="hf: which configuration.")] = None,
    streaming: Annotated[bool, typer.Option("--streaming", help="hf: read as a stream instead of downloading first.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, max=4096, help="Processes; left out: one per core.")] = None,
    max_bad_records: Annotated[
        int, typer.Option(min=0, help="Records that may be skipped because they cannot be read.")
    ] = _DEFAULT.max_bad_records,
    max_record_bytes: Annotated[
        int, typer.Option(min=1, max=1 << 31, help="Longest record that is read; a longer one is bad.")
    ] = _DEFAULT.max_record_bytes,
    force: Annotated[bool, typer.Option("--force", help="Start over where OUT holds something else.")] = False,
    json: AsJson = False,
) -> None:
    """Turn text into token files; started again with the same arguments, go on where it was stopped."""
    *sources, out = paths
    if not sources and source != "stdlib":
        raise RunError([f"phalanx tokenize {out}: name the text first and the folder to write last: SRC... OUT."])
    if source is not None and source not in _KINDS:
        raise RunError([f"--source {source}: choose one of {', '.join(_KINDS)}."])
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
    """Make the token files and say what they came to."""
    from phalanx.dashboard.data_tables import tokenizing
    from phalanx.data.ingest import Progress, tokenize_into
    from phalanx.data.tokenizer import open_tokenizer

    words = open_tokenizer(data.tokenizer, data.end_token)
    begin, kept = time.monotonic(), [0]
    try:
        with tokenizing(console) as shown:

            def show(progress: Progress) -> None:
                kept.append(progress.kept)
                shown(progress)

            meta = tokenize_into(Path(out).expanduser(), data, data, words, force=force, progress=show)
    except KeyboardInterrupt:
        console.print(f"stopped; what is done is kept in {out}: start again to go on.", soft_wrap=True)
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
