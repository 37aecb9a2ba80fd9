"""Problems between the keys of [data], and of each source of a mixture. Called by `spec/check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from phalanx.spec.dump import toml
from phalanx.spec.errors import RunError
from phalanx.spec.finding import Finding
from phalanx.spec.run import Run, Source
from phalanx.spec.sources import kinds
from phalanx.spec.tokenizer_size import vocabulary
from phalanx.spec.words import either, shown

_OWNERS = {
    "documents": ("memory",),
    "split": ("hf",),
    "config": ("hf",),
    "streaming": ("hf",),
    "prompt_field": ("chat",),
    "answer_field": ("chat",),
    "template": ("chat",),
    "field": ("jsonl", "parquet", "hf", "chat"),
    "paths": ("text", "jsonl", "parquet", "hf", "chat", "tokens"),
}
"""Which kinds of source read which keys; the others are read by all."""


def data_findings(run: Run) -> Iterator[Finding]:
    """Problems between the keys of [data], and with model.vocab."""
    yield from _vocabulary(run)
    if run.data.mix:
        yield from _mixture(run)
        for source in run.data.mix:
            yield from _source(source, f"data.mix.{source.name}")
    else:
        yield from _source(run.data, "data")
    if run.data.packing == "best-fit" and not run.data.document_mask:
        yield Finding(
            ("data.document_mask", "data.packing"),
            'data.document_mask = false makes one text of a window, but data.packing = "best-fit" fills windows with documents '
            'that have nothing to do with each other: remove it, or set data.packing to "stream".',
        )


def _vocabulary(run: Run) -> Iterator[Finding]:
    try:
        tokens = vocabulary(run.data.tokenizer)
    except RunError as error:
        # The file in a run directory can be read where its tokenizer has moved away; who needs the tokenizer will say so.
        yield from (Finding(("data.tokenizer",), sentence, lapses=True) for sentence in error.problems)
        return
    if run.model.vocab is not None and run.model.vocab < tokens:
        yield Finding(
            ("model.vocab", "data.tokenizer"),
            f"model.vocab = {run.model.vocab} has no row for some of the {tokens} tokens of data.tokenizer = "
            f"{toml(run.data.tokenizer)}: set it to at least {tokens}, or leave it out.",
        )


def _mixture(run: Run) -> Iterator[Finding]:
    """Where there is a mixture, each source is described in its own table, and all have weights or none."""
    mix = run.data.mix
    for field in fields(Source):
        value = getattr(run.data, field.name)
        if value != field.default:
            yield Finding(
                (f"data.{field.name}", "data.mix"),
                f"data.{field.name} = {shown(value)} describes one source, but [data.mix.{mix[0].name}] makes a mixture: "
                f"set it in the tables of the mixture, such as data.mix.{mix[0].name}.{field.name}, or remove it.",
            )
    weighted = [source.name for source in mix if source.weight is not None]
    bare = [source.name for source in mix if source.weight is None]
    if weighted and bare:
        yield Finding(
            tuple(f"data.mix.{name}.weight" for name in bare),
            f"data.mix.{bare[0]} has no weight, but data.mix.{weighted[0]} has one: give data.mix.{bare[0]}.weight, "
            "or remove all weights to mix by the number of tokens.",
        )


def _source(source: Source, table: str) -> Iterator[Finding]:
    """A source's kind against the keys that are set: nothing that is written may go unread."""
    found = kinds(source)
    if len(found) > 1:
        yield Finding(
            (f"{table}.paths", f"{table}.source"),
            f"{table}.paths names files of {len(found)} kinds ({', '.join(found)}): say which is meant, such as "
            f"{table}.source = {toml(found[0])}, or make a mixture of them in [data.mix.NAME] tables.",
        )
    if len(found) != 1:
        return
    (kind,) = found
    for name, owners in _OWNERS.items():
        value = getattr(source, name)
        if kind not in owners and value != Source.__dataclass_fields__[name].default:
            which = either(toml(owner) for owner in owners)
            told = "" if source.source is not None else f", as {'its paths tell' if source.paths else 'it has no paths'}"
            yield Finding(
                (f"{table}.{name}", f"{table}.source"),
                f"{table}.{name} is set but {table}.source = {toml(kind)}{told}, which reads none: "
                f"remove it, or set {table}.source to {which}.",
            )
    if kind in _OWNERS["paths"] and not source.paths:
        wanted = "folder of it" if kind == "hf" else "file, folder or glob"
        yield Finding(
            (f"{table}.paths", f"{table}.source"),
            f"{table}.source = {toml(kind)} but {table}.paths names nothing: give it at least one {wanted}.",
        )
    if kind == "memory" and not any(source.documents):
        empty = f"holds {len(source.documents)} empty texts" if source.documents else "is empty"
        yield Finding(
            (f"{table}.documents", f"{table}.source"),
            f'{table}.source = "memory" but {table}.documents {empty}: give it at least one text.',
        )
