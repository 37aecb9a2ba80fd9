"""The best layout of a run on a cluster: by time, by price, within limits. The CLI, `planning/resolve` and `planning/solve` call it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.planning.candidate import Candidate, SearchResult
from phalanx.planning.candidates import space
from phalanx.planning.find_layout import find, judge, rates_of
from phalanx.planning.formats import other_formats
from phalanx.planning.hardware import Hardware
from phalanx.planning.remedies import remedies
from phalanx.planning.why import why_not
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

__all__ = ["NONE", "Aim", "Limits", "beyond", "judge", "search", "within"]

Aim = Literal["time", "price"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What an answer has to stay within; None: no limit."""

    fits_in: float | None = None
    """Bytes of a device that may be used."""
    deadline: float | None = None
    """Days for the whole run, failures included."""
    budget: float | None = None
    """US dollars for the whole run."""


NONE = Limits()


def search(run: Run, hardware: Hardware, *, aim: Aim = "time", limits: Limits = NONE, most: int = 10) -> SearchResult:
    """The best layout and what it was chosen from. RunError where nothing fits, with the nearest changes that would make it fit,
    or where no layout stays within the limits."""
    began = time.process_time()
    found = find(run, hardware, limits.fits_in, most)
    if found is None:
        raise RunError(remedies(run, hardware, limits.fits_in).sentences)
    if aim == "price" or not within(found.best, replace(limits, deadline=None)):
        found = _cheaper(run, hardware, found, aim, limits, most)
    if problems := beyond(found.best, limits):
        raise RunError(problems)
    here = space(run, hardware, found.best.layout.ranks)
    reasons = *other_formats(run, hardware, found.best), *why_not(here, rates_of(run, hardware), found.best)
    return replace(found, alternatives=reasons, seconds=time.process_time() - began)


def _cheaper(run: Run, hardware: Hardware, found: SearchResult, aim: Aim, limits: Limits, most: int) -> SearchResult:
    """Halves of the cluster, if fewer devices are cheaper or the only way to stay within a budget."""
    tried, gpus = [found], found.best.layout.ranks
    while gpus % 2 == 0 and gpus > 1:
        gpus //= 2
        smaller = find(run, hardware, limits.fits_in, most, gpus=gpus)
        if smaller is None:
            break
        tried.append(smaller)
    allowed = [one for one in tried if within(one.best, limits)]
    if not allowed:
        return found
    if aim == "time":
        return min(allowed, key=lambda one: one.best.expected_days)
    return min(allowed, key=lambda one: one.best.expected_days * one.best.layout.ranks)


def within(best: Candidate, limits: Limits) -> bool:
    """Whether an option stays within the limits."""
    return not beyond(best, limits)


def beyond(best: Candidate, limits: Limits) -> list[str]:
    """Limits that the best layout is over, in sentences."""
    said = []
    if limits.deadline is not None and best.expected_days > limits.deadline:
        said.append(
            f"The quickest layout takes {best.expected_days:,.1f} days, more than the deadline of {limits.deadline:,.1f} days: "
            "take more devices, fewer tokens or a smaller model."
        )
    if limits.budget is not None and best.price is not None and best.price > limits.budget:
        said.append(
            f"The run costs ${best.price:,.0f}, more than the budget of ${limits.budget:,.0f}: "
            "take cheaper devices, fewer tokens or a smaller model."
        )
    return said
