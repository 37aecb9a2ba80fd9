"""From the [data] table of a run to samples. The launcher calls it to find problems early, each rank to train."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.data.bestfit import BestFitPacking
from phalanx.data.corpus import ChainedCorpus, Corpus, MemoryCorpus, TextFileCorpus
from phalanx.data.files import named_files, stdlib_files
from phalanx.data.mix import MixedSamples, Mixture
from phalanx.data.pack import Packing, Samples, StreamPacking
from phalanx.data.shuffle import Intervals, split
from phalanx.data.token_files import META, TokenFiles
from phalanx.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data, MixedSource, Source
from phalanx.spec.sources import kind

if TYPE_CHECKING:
    from phalanx.data.ingest import ProgressCallback

_HELD_OUT = 0  # the seed of what is held out: runs that differ in train.seed are still compared on the same text
_COMPRESSED = (".gz", ".zst", ".zstd")


class Dataset:
    """A run's text, ready to be sampled."""

    def __init__(self, sources: Sequence[OpenedSource], words: Tokenizer):
        self.train = Mixture([source.train for source in sources])
        self.eval: dict[str, Samples] = {source.name: source.eval for source in sources if source.eval is not None}
        """Held-out samples by source, in an order of their own, so that a few stand for all; empty where
        data.eval_fraction = 0."""
        self.tokenizer = words
        packings = [samples.packing for samples in self.train.sources]
        self.tokens = sum(packing.tokens for packing in packings)
        """Tokens to train on in one epoch of all sources, end tokens included."""
        self.waste = sum(packing.waste * packing.count for packing in packings) / self.train.count
        """Part of all windows that is padding."""
        self.skipped = {source.name: source.skipped for source in sources if source.skipped}
        """Bad records that were left out, by source and reason."""
        self._corpora = {source.name: source.corpus for source in sources}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes when the text does; a resumed run compares it. Looks at the text itself where no index holds its hash."""
        if len(self._corpora) == 1:
            return next(iter(self._corpora.values())).fingerprint
        lines = [f"{name}\n{corpus.fingerprint}\n" for name, corpus in self._corpora.items()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class OpenedSource:
    """One source of a run."""

    name: str
    corpus: Corpus
    train: MixedSamples
    eval: Samples | None
    skipped: dict[str, int]


def open_dataset(data: Data, sequence_length: int, seed: int, progress: ProgressCallback | None = None) -> Dataset:
    """Costs a look at the sizes of files, whatever the text's length; the text is read when samples are.

    Text that has to be tokenised first is, unless that was done before.
    """
    words = open_tokenizer(data.tokenizer, data.end_token)
    sources: list[OpenedSource] = []
    problems: list[str] = []
    for source in data.mix or (data,):
        table = f"data.mix.{source.name}" if isinstance(source, MixedSource) else "data"
        try:
            corpus, skipped = open_corpus(source, data, words, table, progress)
            opening = _Opening(data, words, sequence_length, table)
            sources.append(opening.source(source, corpus, seed, skipped))
        except RunError as error:
            problems += error.problems
    if problems:
        raise RunError(problems)
    return Dataset(sources, words)


@dataclass(frozen=True, slots=True)
class _Opening:
    """What all parts of a source are opened with."""

    data: Data
    words: Tokenizer
    length: int
    table: str

    def source(self, source: Source, corpus: Corpus, seed: int, skipped: dict[str, int]) -> OpenedSource:
        name = source.name if isinstance(source, MixedSource) else kind(source)
        # A small source holds out a window even where the fraction is less.
        train_part, eval_part = split(corpus.blocks(), self.data.eval_fraction, _HELD_OUT, least=self.length + 1)
        train, evaluation = self._pack(corpus, train_part), None
        problems = _too_short(train, f"training text{self._of()}", "more text")
        if self.data.eval_fraction > 0:
            held_out = self._pack(corpus, eval_part)
            remedy = "a larger data.eval_fraction (0 holds out none)"
            problems += _too_short(held_out, f"held-out text{self._of()}", remedy)
            evaluation = Samples(held_out, _HELD_OUT, shuffle=True, name=name)
        if problems:
            raise RunError(problems)
        samples = Samples(train, seed if source.seed is None else source.seed, self.data.shuffle, name)
        weight = source.weight if isinstance(source, MixedSource) else None
        mixed = MixedSamples(samples, weight, source.epochs)
        if mixed.cap == 0:
            raise RunError(
                [
                    f"{self.table}.epochs = {source.epochs} of {samples.count} windows of train.sequence_length = {self.length} "
                    f"is not even one; give it at least {1 / samples.count:.2g} or leave the source out."
                ]
            )
        return OpenedSource(name, corpus, mixed, evaluation, skipped)

    def _of(self) -> str:
        return f" of {self.table}" if self.data.mix else ""

    def _pack(self, corpus: Corpus, intervals: Intervals) -> Packing:
        mask = self.data.document_mask
        if self.data.packing == "stream":
            return StreamPacking(corpus, intervals, self.length, document_mask=mask)
        cache = Path(self.data.cache).expanduser()
        return BestFitPacking(corpus, intervals, self.length, end=self.words.end, document_mask=mask, cache=cache)


def _too_short(packing: Packing, what: str, remedy: str) -> list[str]:
    if packing.count:
        return []
    needed = 2 if isinstance(packing, BestFitPacking) else packing.length + 1
    return [
        f"The {what} has {packing.tokens} tokens, fewer than the {needed} that one window of "
        f"train.sequence_length = {packing.length} needs; use a shorter train.sequence_length or {remedy}."
    ]


def open_corpus(
    source: Source, data: Data, words: Tokenizer, table: str, progress: ProgressCallback | None
) -> tuple[Corpus, dict[str, int]]:
    """A source's text, and the bad records that are not in it, counted by reason."""
    which = kind(source)
    if which == "tokens":
        return _open_tokens(source.paths, words, f"{table}.paths")
    direct = _direct(source, which, table) if isinstance(words, ByteTokenizer) else None
    if direct is not None:
        return direct, {}
    from phalanx.data.ingest import cached_token_files  # readers of formats that most runs never see

    files = TokenFiles(cached_token_files(source, data, words, progress))
    return files, files.meta.skipped


def _direct(source: Source, which: str, table: str) -> Corpus | None:
    """A corpus whose bytes can be read as they lie; None: its text has to be taken out first."""
    if which == "stdlib":
        return TextFileCorpus(*stdlib_files(table))
    if which == "memory":
        if not any(source.documents):
            raise RunError([f'{table}.source = "memory" but {table}.documents holds no text; give it at least one.'])
        return MemoryCorpus(source.documents)
    if which != "text" or any("://" in path for path in source.paths):
        return None
    if not source.paths:
        raise RunError([f'{table}.source = "text" but {table}.paths names nothing; give it at least one file, folder or glob.'])
    root, sizes = named_files(source.paths, f"{table}.paths")
    return None if any(path.endswith(_COMPRESSED) for path in sizes) else TextFileCorpus(root, sizes)


def _open_tokens(paths: Sequence[str], words: Tokenizer, key: str) -> tuple[Corpus, dict[str, int]]:
    """The token files of several folders as one corpus."""
    opened: list[TokenFiles] = []
    problems = [] if paths else [f"{key} names nothing; give it at least one folder that `phalanx tokenize` wrote."]
    for path in paths:
        tried = os.path.abspath(os.path.expanduser(path))
        folders = [tried] if os.path.lexists(tried) else sorted(glob.glob(tried, recursive=True))
        if not folders:
            problems.append(f'{key}: "{path}" matches no folder (tried {tried}); correct it, or tokenise the text first.')
        for folder in folders:
            try:
                files = TokenFiles(Path(folder).parent if os.path.basename(folder) == META else Path(folder))
            except RunError as error:
                problems += [f"{key}: {problem}" for problem in error.problems]
                continue
            opened.append(files)
            if files.meta.tokenizer_sha256 != words.sha256:
                problems.append(
                    f'{key}: {files.folder} was tokenised with "{files.meta.tokenizer}", and the run has data.tokenizer = '
                    f'"{words.name}", which is not the same; set data.tokenizer = "{files.meta.tokenizer}", or tokenise the '
                    "text again."
                )
            elif not files.tokens:
                problems.append(f"{key}: {files.folder} holds no document; tokenise text that has some.")
    if problems:
        raise RunError(problems)
    skipped: dict[str, int] = {}
    for files in opened:
        for reason, count in files.meta.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    return opened[0] if len(opened) == 1 else ChainedCorpus(opened), skipped
