"""The one entry of planning."""

from __future__ import annotations

import time
from dataclasses import replace

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.remedies import remedies
from phalanx.planning.search.alternatives import other_formats, why_not
from phalanx.planning.search.candidate import SearchResult
from phalanx.planning.search.search import NONE, Aim, Limits, beyond, cheaper, find, rates_of, within
from phalanx.planning.search.space import space
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run


def search(run: Run, hardware: Hardware, *, aim: Aim = "time", limits: Limits = NONE, most: int = 10) -> SearchResult:
    """The best layout and what it was chosen from. RunError where nothing fits, with the nearest changes that would make it fit,
    or where no layout stays within the limits."""
    began = time.process_time()
    found = find(run, hardware, limits.fits_in, most)
    if found is None:
        raise RunError(remedies(run, hardware, limits.fits_in).sentences)
    if aim == "price" or not within(found.best, replace(limits, deadline=None)):
        found = cheaper(run, hardware, found, aim, limits, most)
    if problems := beyond(found.best, limits):
        raise RunError(problems)
    here = space(run, hardware, found.best.layout.ranks)
    reasons = *other_formats(run, hardware, found.best), *why_not(here, rates_of(run, hardware), found.best)
    return replace(found, alternatives=reasons, seconds=time.process_time() - began)
