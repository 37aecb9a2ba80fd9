"""Rows of the embedding of a preset that reads another tokenizer than its own. `spec/load` decides them; launches ask about those that
nobody has decided."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.errors import RunError, toml
from phalanx.spec.model import PRESETS
from phalanx.spec.run import Run
from phalanx.spec.sources import vocabulary_size

_MULTIPLE = 64  # products with such a number of rows are fastest
_LARGEST_PADDING = 2  # rows per token: published models have up to 1 % more rows than tokens


def fit_vocabulary(run: Run, *, tokenizer_given: bool) -> Run:
    """A run whose preset decides the rows, because neither `model.vocab` nor `model.from` is given.

    A tokenizer that the person names and that is not the preset's decides instead. Without one the rows stay the preset's, so that a
    published model can be planned without its tokenizer; but training must not start with rows that no token uses.
    """
    rows = run.model.vocab
    try:
        tokens = vocabulary_size(run.data.tokenizer)
    except RunError:
        return run  # `check` reports the tokenizer
    if rows is None or tokens <= rows <= _LARGEST_PADDING * tokens:
        return run
    if tokenizer_given:
        return replace(run, model=replace(run.model, vocab=_rounded(tokens)))
    return replace(run, model=replace(run.model, vocab_undecided=True))


def vocabulary_question(run: Run) -> list[str]:
    """What the person has to decide before the run trains; empty if nothing."""
    model, tokenizer = run.model, run.data.tokenizer
    preset = PRESETS.get(model.preset or "")
    if not model.vocab_undecided or preset is None or model.vocab != preset.vocab:  # a program may have decided
        return []
    tokens = vocabulary_size(tokenizer)
    return [
        f"model.preset = {toml(model.preset)} has {model.rows:,} rows of embedding, but data.tokenizer is not given and is then {toml(tokenizer)}, "
        f'which has {tokens} tokens: name the model\'s own tokenizer (data.tokenizer = "path/to/tokenizer.json"), train on bytes with '
        f"{_rounded(tokens)} rows (data.tokenizer = {toml(tokenizer)}), or keep all rows (model.vocab = {model.rows})."
    ]


def vocabulary_notices(run: Run) -> list[str]:
    """One sentence if the rows are not the preset's."""
    preset = PRESETS.get(run.model.preset or "")
    if preset is None or preset.vocab is None or run.model.vocab == preset.vocab:
        return []
    return [
        f"model.vocab = {run.model.rows} for the {vocabulary_size(run.data.tokenizer)} tokens of data.tokenizer = {toml(run.data.tokenizer)}; "
        f"the preset {run.model.preset} has {preset.vocab:,}."
    ]


def _rounded(tokens: int) -> int:
    return -(-tokens // _MULTIPLE) * _MULTIPLE
