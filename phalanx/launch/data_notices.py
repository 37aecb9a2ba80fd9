"""What a run's text gives reason to say before the first step: too little of it, records left out, windows half empty.

Called by `launch/prepare`.
"""

from __future__ import annotations

from phalanx.data.dataset import Dataset
from phalanx.spec.run import Run
from phalanx.spec.sources import kind

_WORTH_SAYING = 0.001  # share of padding under which packing is as good as full


def too_little_data(run: Run, data: Dataset) -> list[str]:
    """Where epochs are limited, the text may end before the run does."""
    limit, need = data.train.limit, run.steps * run.batch
    if limit is None or limit >= need:
        return []
    # In a mixture the first source to run out ends it; which one that is follows from the weights.
    limited = [(f"data.mix.{source.name}.epochs", source.epochs) for source in run.data.mix if source.epochs is not None]
    keys = limited if run.data.mix else [("data.epochs", run.data.epochs or 1.0)]
    named = " and ".join(f"{key} = {epochs:g}" for key, epochs in keys)
    return [
        f"{named} of {sources(run)} gives {limit:,} sequences, but {run.steps:,} steps of {run.batch} need {need:,}: "
        f"set train.steps to at most {limit // run.batch}, allow more epochs, or give more text."
    ]


def data_notices(data: Dataset) -> list[str]:
    """Records that were left out, by source, and how full the windows are."""
    said: list[str] = []
    for name, reasons in data.skipped.items():
        if total := sum(reasons.values()):
            each = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
            said.append(f"{total:,} record{'s' if total > 1 else ''} of {name} {_were(total)} left out: {each}.")
    if data.waste > _WORTH_SAYING:
        said.append(f"Packing fills {100 * (1 - data.waste):.1f} % of the windows; the rest is padding.")
    return said


def sources(run: Run) -> str:
    """The run's text in words, as its table names it."""
    if run.data.mix:
        return ", ".join(f"[data.mix.{source.name}]" for source in run.data.mix)
    return f'data.source = "{kind(run.data)}"'


def _were(count: int) -> str:
    return "were" if count > 1 else "was"
