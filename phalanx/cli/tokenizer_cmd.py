"""`phalanx tokenizer train`: a tokenizer for one's own text. Does not need torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from phalanx.cli.options import TEXT_KINDS, AsJson, Field, check_source_kind, parse_size
from phalanx.cli.output import console, finish, progress_bar
from phalanx.dashboard.numbers import duration, size
from phalanx.data.train_tokenizer import CHATML, TokenizerRequest, TrainedTokenizer, train_tokenizer
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.load import load
from phalanx.spec.run import Data, Source

_PARTS = 1000  # of the progress bar

app = typer.Typer(help="Train a tokenizer.", no_args_is_help=True)


@app.callback()
def tokenizer() -> None:
    """Train a tokenizer."""


@app.command("train")
def train(
    paths: Annotated[
        list[str],
        Argument(help="A run file, or files, folders, globs or URLs; then the folder to write.", metavar="SRC... OUT"),
    ],
    vocab: Annotated[int, Option(min=1, max=1 << 22, help="Number of tokens: bytes and special tokens included.")] = 32_000,
    end_token: Annotated[str, Option(help="The special token that ends a document.")] = "<|endoftext|>",
    special: Annotated[list[str] | None, Option(help="A further special token; may be repeated.")] = None,
    chat_template: Annotated[
        str | None,
        Option(help='"chatml", or a Jinja file. Its tokens of the form <|name|> become special tokens.'),
    ] = None,
    max_bytes: Annotated[
        str | None, Option(help="Text to read at most, such as 2GB, evenly spread over all documents. Default: all of it.")
    ] = None,
    source: Annotated[str | None, Option(help=f"{', '.join(TEXT_KINDS)}. Default: derived from the file names.")] = None,
    field: Field = None,
    split: Annotated[str | None, Option(help="hf: the split of the dataset.")] = None,
    config: Annotated[str | None, Option(help="hf: the configuration of the dataset.")] = None,
    max_bad_records: Annotated[int | None, Option(min=0, help="Maximum number of bad records to skip.")] = None,
    json: AsJson = False,
) -> None:
    """Train a byte-level BPE tokenizer on text. Writes a folder that data.tokenizer and transformers read."""
    given = {"source": source, "field": field, "split": split, "config": config, "max_bad_records": max_bad_records}
    *texts, out = paths
    data = _data(texts, out, {key: value for key, value in given.items() if value is not None})
    request = TokenizerRequest(
        vocab=vocab,
        end_token=end_token,
        special=tuple(special or ()),
        template=None if chat_template is None else _template(chat_template),
        max_bytes=None if max_bytes is None else parse_size("--max-bytes", max_bytes),
    )
    sources: tuple[Source, ...] = data.mix or (data,)
    with progress_bar("reading", _PARTS) as advance:
        done = 0

        def show(read: int, total: int | None) -> None:
            nonlocal done
            if total and (part := read * _PARTS // total) > done:
                advance(part - done)
                done = part

        trained = train_tokenizer(request, sources, data, Path(out).expanduser(), show)
    _show(trained, request, out)
    finish(json, {"out": out, "requested_vocab": vocab} | asdict(trained))


def _data(texts: list[str], out: str, settings: dict[str, Any]) -> Data:
    """The text to read: that of a run file, or that of the command line."""
    if not texts and settings.get("source") != "stdlib":
        raise RunError(f"phalanx tokenizer train {out}: name the text first and the folder to write last: SRC... OUT.")
    if any(text.endswith(".toml") for text in texts):
        if len(texts) > 1:
            raise RunError(f"{', '.join(texts)}: name one run file, or text without a run file.")
        if unused := [f"--{name.replace('_', '-')}" for name in settings]:
            raise RunError(f"{' and '.join(unused)}: {texts[0]} is a run file and has these settings; remove the option.")
        # The run file may name the tokenizer that is trained now.
        return load(texts[0], ['data.tokenizer="byte"']).data
    refuse(check_source_kind(settings.get("source"), TEXT_KINDS))
    return Data(**{"paths": tuple(texts)} | settings)


def _template(name: str) -> str:
    if name == "chatml":
        return CHATML
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f'--chat-template {name} cannot be read ({reason}); name a Jinja file, or write "chatml".') from None


def _show(trained: TrainedTokenizer, request: TokenizerRequest, out: str) -> None:
    skipped = "".join(f"; {number} skipped ({reason})" for reason, number in trained.skipped.items())
    console.print(f"read {trained.documents:,} documents, {size(trained.bytes)}{skipped}", soft_wrap=True)
    fewer = (
        f", fewer than the {request.vocab:,} requested: the text has no more pairs that repeat"
        if trained.vocab < request.vocab
        else ""
    )
    console.print(
        f"{out}: {trained.vocab:,} tokens{fewer}; {trained.bytes_per_token:.2f} bytes per token, {duration(trained.seconds)}",
        soft_wrap=True,
        markup=False,
    )
    console.print(f"special tokens: {' '.join(trained.special)}", soft_wrap=True, markup=False)
    console.print(f'Use it with data.tokenizer = "{out}".', soft_wrap=True, markup=False)
