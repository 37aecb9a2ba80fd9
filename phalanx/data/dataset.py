"""Opens the [data] table of a run as samples. The launcher calls it to report problems early, each rank to train."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from phalanx.data.corpus import ChainedCorpus, Corpus, MemoryCorpus, TextFileCorpus
from phalanx.data.files import find_files, is_compressed, is_url, paths_key, stdlib_files, table_key
from phalanx.data.pack import BestFitPacking, Intervals, Packing, StreamPacking
from phalanx.data.preferences import TOO_LONG, PairPacking, pair_blocks
from phalanx.data.samples import Mixture, Samples, sample_limit, split
from phalanx.data.token_files import META, TokenFiles
from phalanx.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from phalanx.spec.errors import RUN_FILE, RunError, refuse
from phalanx.spec.run import Data, MixedSource, Source
from phalanx.spec.sources import kind

if TYPE_CHECKING:
    from phalanx.data.ingest import ProgressCallback

_HELD_OUT_SEED = 0  # independent of train.seed, so that runs with different seeds are evaluated on the same text


class Dataset:
    """A run's text, ready to be sampled."""

    def __init__(self, sources: Sequence[OpenedSource], tokenizer: Tokenizer):
        weights = [
            opened.source.weight for opened in sources if isinstance(opened.source, MixedSource) and opened.source.weight
        ]
        assert len(weights) in (0, len(sources)), "checked when the run file is loaded"
        epochs = [opened.source.epochs for opened in sources]
        self.train = Mixture([opened.train for opened in sources], weights or None, epochs)
        self.eval: dict[str, Samples] = {opened.train.name: opened.eval for opened in sources if opened.eval is not None}
        """Held-out samples by source, shuffled, so that the first few represent all; empty if data.eval_fraction = 0."""
        self.tokenizer = tokenizer
        packings = [samples.packing for samples in self.train.sources]
        self.tokens = sum(packing.tokens for packing in packings)
        """Training tokens in one epoch of all sources, end tokens included."""
        self.documents = sum(opened.corpus.documents for opened in sources)
        """Documents of all sources, held-out ones included."""
        self.padding_ratio = sum(packing.padding_ratio * packing.count for packing in packings) / self.train.count
        """Fraction of all window positions that is padding."""
        self.skipped = {opened.train.name: opened.skipped for opened in sources if opened.skipped}
        """Number of bad records, by source and reason."""
        self._corpora = {opened.train.name: opened.corpus for opened in sources}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes when the text changes; a resumed run compares it. Reads text for which no index stores a hash."""
        if len(self._corpora) == 1:
            return next(iter(self._corpora.values())).fingerprint
        lines = [f"{name}\n{corpus.fingerprint}\n" for name, corpus in self._corpora.items()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


class OpenedSource(NamedTuple):
    """One source of a run."""

    source: Source
    corpus: Corpus
    train: Samples
    eval: Samples | None
    skipped: dict[str, int]


def open_dataset(data: Data, sequence_length: int, seed: int, progress: ProgressCallback | None = None) -> Dataset:
    """Opens all sources. Reads file sizes only, whatever the length of the text; samples are read on demand. Text that has to be
    tokenized is tokenized here, unless data.cache has the result."""
    tokenizer = open_tokenizer(data.tokenizer, data.end_token)
    sources: list[OpenedSource] = []
    problems: list[str] = []
    for source in data.mix or (data,):
        try:
            sources.append(_open_source(source, data, tokenizer, sequence_length, seed, progress))
        except RunError as error:
            problems += error.problems
    refuse(problems)
    return Dataset(sources, tokenizer)


def _open_source(
    source: Source, data: Data, tokenizer: Tokenizer, length: int, seed: int, progress: ProgressCallback | None
) -> OpenedSource:
    corpus, skipped = open_corpus(source, data, tokenizer, progress)
    name = source_name(source)
    of_table = f" of {table_key(source)}" if data.mix else ""
    # A small source holds out one window even if the fraction is less.
    pairs = kind(source) == "preferences"
    blocks = pair_blocks(corpus) if pairs else corpus.blocks
    train_part, eval_part = split(blocks, data.eval_fraction, _HELD_OUT_SEED, least=length + 1)
    train, evaluation = pack(corpus, train_part, length, tokenizer, data, pairs=pairs), None
    problems = _too_short(train, f"training text{of_table}", "more text")
    if data.eval_fraction > 0:
        held_out = pack(corpus, eval_part, length, tokenizer, data, pairs=pairs)
        problems += _too_short(held_out, f"held-out text{of_table}", "a larger data.eval_fraction (0 holds out none)")
        evaluation = Samples(held_out, _HELD_OUT_SEED, shuffle=True, name=name)
    refuse(problems)
    if isinstance(train, PairPacking) and train.too_long:
        skipped = skipped | {TOO_LONG: train.too_long}
    samples = Samples(train, seed if source.seed is None else source.seed, data.shuffle, name)
    if sample_limit(samples.count, source.epochs) == 0:
        raise RunError(
            f"{table_key(source)}.epochs = {source.epochs} of {samples.count} windows of train.sequence_length = "
            f"{length} is less than one; give it at least {1 / samples.count:.2g} or remove the source."
        )
    return OpenedSource(source, corpus, samples, evaluation, skipped)


def source_name(source: Source) -> str:
    return source.name if isinstance(source, MixedSource) else kind(source)


def pack(
    corpus: Corpus, intervals: Intervals, length: int, tokenizer: Tokenizer, data: Data, *, pairs: bool = False
) -> Packing:
    """The windows of a corpus, by data.packing; those of preferences hold whole pairs."""
    if pairs:
        return PairPacking(corpus, intervals, length, end=tokenizer.end)
    if data.packing == "stream":
        return StreamPacking(corpus, intervals, length, document_mask=data.document_mask)
    cache = Path(data.cache).expanduser()
    return BestFitPacking(corpus, intervals, length, end=tokenizer.end, document_mask=data.document_mask, cache=cache)


def _too_short(packing: Packing, what: str, remedy: str) -> list[str]:
    if packing.count:
        return []
    if isinstance(packing, PairPacking):
        longer = f", and {packing.too_long} longer ones" if packing.too_long else ""
        return [
            f"The {what} has no pair of at most {packing.length} tokens (train.sequence_length){longer}; use a longer "
            f"train.sequence_length or {remedy}."
        ]
    needed = 2 if isinstance(packing, BestFitPacking) else packing.length + 1
    return [
        f"The {what} has {packing.tokens} tokens, fewer than the {needed} that one window of "
        f"train.sequence_length = {packing.length} needs; use a shorter train.sequence_length or {remedy}. "
        f"`phalanx data inspect {RUN_FILE}` counts documents and tokens."
    ]


def open_corpus(
    source: Source, data: Data, tokenizer: Tokenizer, progress: ProgressCallback | None
) -> tuple[Corpus, dict[str, int]]:
    """The text of a source, and the number of its bad records by reason."""
    source_kind, table = kind(source), table_key(source)
    if source_kind == "memory" and not any(source.documents):
        raise RunError(f'{table}.source = "memory" but {table}.documents holds no text; give it at least one.')
    if source_kind == "tokens":
        return _open_tokens(source.paths, tokenizer, paths_key(source))
    corpus = _raw_corpus(source, source_kind) if isinstance(tokenizer, ByteTokenizer) else None
    if corpus is not None:
        return corpus, {}
    from phalanx.data.ingest import cached_token_files  # readers of formats that most runs never use

    files = TokenFiles(cached_token_files(source, data, tokenizer, progress))
    return files, files.meta.skipped


def _raw_corpus(source: Source, source_kind: str) -> Corpus | None:
    """A corpus of unprepared bytes; None if the text has to be extracted or decompressed first."""
    if source_kind == "stdlib":
        return TextFileCorpus({file.path: file.size or 0 for file in stdlib_files(table_key(source))})
    if source_kind == "memory" or source.documents:
        return MemoryCorpus(source.documents)
    if source_kind != "text" or any(map(is_url, source.paths)):
        return None
    sizes = {file.path: file.size or 0 for file in find_files(source, "text")}
    return None if any(map(is_compressed, sizes)) else TextFileCorpus(sizes)


def _open_tokens(paths: Sequence[str], tokenizer: Tokenizer, key: str) -> tuple[Corpus, dict[str, int]]:
    """The token files of several folders as one corpus."""
    opened: list[TokenFiles] = []
    problems = [] if paths else [f"{key} names nothing; give it at least one folder that `phalanx tokenize` wrote."]
    for path in paths:
        absolute = os.path.abspath(os.path.expanduser(path))
        folders = [absolute] if os.path.lexists(absolute) else sorted(glob.glob(absolute, recursive=True))
        if not folders:
            problems.append(f'{key}: "{path}" matches no folder (tried {absolute}); correct it, or tokenize the text first.')
        for folder in folders:
            try:
                files = TokenFiles(Path(folder).parent if os.path.basename(folder) == META else Path(folder))
            except RunError as error:
                problems += [f"{key}: {problem}" for problem in error.problems]
                continue
            opened.append(files)
            if files.meta.tokenizer_sha256 != tokenizer.sha256:
                problems.append(
                    f'{key}: {files.folder} was tokenized with "{files.meta.tokenizer}", and the run has data.tokenizer = '
                    f'"{tokenizer.name}", which differs; set data.tokenizer = "{files.meta.tokenizer}", or tokenize the text '
                    "again."
                )
            elif not files.tokens:
                problems.append(f"{key}: {files.folder} holds no document; tokenize text that has some.")
    refuse(problems)
    skipped: Counter[str] = Counter()
    for files in opened:
        skipped.update(files.meta.skipped)
    return opened[0] if len(opened) == 1 else ChainedCorpus(opened), dict(skipped)
