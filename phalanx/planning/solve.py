"""Inverse questions: the smallest cluster for a model, the largest model for a cluster, the batch that pays; and what more
devices or a slower network would change. `planning/planner` calls it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.remedies import changed_keys, fewest, scaled
from phalanx.planning.report import WhatIf
from phalanx.planning.search.candidate import SearchResult
from phalanx.planning.search.search import NO_LIMITS, Limits, find, possible, within
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

What = Literal["gpus", "model", "batch"]

_STEPS = 9
"""Bisections of the interval that holds the largest model: it is found to within about a percent."""
_PAYS = 0.97
"""A batch pays if it reaches this fraction of the highest tokens per second of any batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """An answer, with the search result that it rests on."""

    what: What
    value: int
    """Devices, parameters or sequences."""
    sentence: str
    run: Run
    """The run of the answer."""
    hardware: Hardware
    """The cluster of the answer."""
    result: SearchResult
    tried: tuple[tuple[int, float], ...] = ()
    """(value, tokens per second) of the other values that were tried."""


def solve(run: Run, hardware: Hardware, what: What = "gpus", limits: Limits = NO_LIMITS) -> Solved:
    """The answer to one question. RunError where there is none."""
    answers = {"gpus": _cluster, "model": _model, "batch": _batch}
    return answers[what](run, hardware, limits)


def what_if(run: Run, hardware: Hardware) -> list[WhatIf]:
    """What twice the devices, half the devices and half the network bandwidth would change."""
    before = _best_within(run, hardware, NO_LIMITS)
    if before is None:
        return []
    changed = [
        ("twice the devices", hardware.sized(2 * hardware.gpus)),
        ("half the network", replace(hardware, network=hardware.network / 2)),
    ]
    if hardware.gpus > 1:
        changed.insert(1, ("half the devices", hardware.sized(hardware.gpus // 2)))
    return [_compared(name, run, other, before) for name, other in changed]


def _compared(name: str, run: Run, other: Hardware, before: SearchResult) -> WhatIf:
    after = _best_within(run, other, NO_LIMITS)
    if after is None:
        return WhatIf(name=name, sentence=f"With {name} nothing fits.", faster=0.0)
    faster = after.best.tokens_per_second / before.best.tokens_per_second
    days = f"{after.best.expected_days:,.1f} instead of {before.best.expected_days:,.1f} days"
    price = ""
    if after.best.price is not None and before.best.price:
        price = f", {after.best.price / before.best.price - 1:+.0%} dollars"
    return WhatIf(
        name=name,
        sentence=f"With {name}: {faster:.2f} × the tokens a second, {days}{price}.",
        faster=faster,
    )


def _best_within(run: Run, hardware: Hardware, limits: Limits) -> SearchResult | None:
    """The best candidate within the limits."""
    result = find(run, hardware, limits.fits_in, 1)
    return result if result is not None and within(result.best, limits) else None


def _cluster(run: Run, hardware: Hardware, limits: Limits) -> Solved:
    def fits(other: Run, on: Hardware) -> bool:
        if not possible(other, on, limits.fits_in):
            return False
        return (limits.deadline is None and limits.budget is None) or _best_within(other, on, limits) is not None

    count = fewest(run, hardware, fits)
    on = None if count is None else hardware.sized(count)
    result = None if on is None else _best_within(run, on, limits)
    if count is None or on is None or result is None:
        raise RunError(
            [
                f"No number of {hardware.gpu.name or hardware.gpu.key} carries this run within the limits: "
                "take devices with more memory, a smaller model, a later deadline or a larger budget."
            ]
        )
    sentence = (
        f"The smallest cluster for this run is {count:,} × {hardware.gpu.name or hardware.gpu.key}: "
        f"{result.best.expected_days:,.1f} days, {result.best.bytes / 2**30:.1f} GiB a device."
    )
    return Solved(what="gpus", value=count, sentence=sentence, run=run, hardware=on, result=result)


def _model(run: Run, hardware: Hardware, limits: Limits) -> Solved:
    """Bisects the factor on the number of parameters."""
    best: tuple[Run, SearchResult] | None = None
    low, high = 0.0, None
    scale = 1.0
    for _ in range(_STEPS + 8):
        grown = replace(run, model=scaled(run.model, scale))
        result = _best_within(grown, hardware, limits)
        if result is not None:
            best, low = (grown, result), scale
        else:
            high = scale
        if low and high and high / low < 1.02:
            break
        scale = scale * 4 if high is None else scale / 4 if not low else (low * high) ** 0.5
    if best is None:
        raise RunError(["No model of this kind fits on this cluster within the limits: take more devices or a later deadline."])
    grown, result = best
    count = grown.model.parameters()
    sentence = (
        f"The largest model of this kind on {hardware.gpus:,} × {hardware.gpu.name or hardware.gpu.key} has {count / 1e9:,.2f} B parameters: "
        f"{changed_keys(run.model, grown.model) or 'the one of the run file'}."
    )
    return Solved(what="model", value=count, sentence=sentence, run=grown, hardware=hardware, result=result)


def _batch(run: Run, hardware: Hardware, limits: Limits) -> Solved:
    """The smallest batch that keeps the cluster about as busy as any."""
    tried: dict[int, tuple[Run, SearchResult]] = {}
    for power in range(-6, 7):
        batch = int(run.batch * 2.0**power)
        if batch < 1 or batch in tried:
            continue
        train = replace(run.train, batch=batch, batch_tokens=None, micro_batch=None)
        if run.train.steps is not None:  # the same text in other portions
            train = replace(train, steps=None, tokens=run.steps * run.batch_tokens)
        other = replace(run, train=train)
        result = _best_within(other, hardware, limits)
        if result is not None:
            tried[batch] = other, result
    if not tried:
        raise RunError(
            ["No batch size makes this run fit on this cluster within the limits: see what `phalanx plan` says is missing."]
        )
    most = max(result.best.tokens_per_second for _, result in tried.values())
    value = min(size for size, (_, result) in tried.items() if result.best.tokens_per_second >= _PAYS * most)
    chosen, result = tried[value]
    sentence = (
        f"The batch that pays is {value:,} sequences ({value * run.train.sequence_length:,} tokens): "
        f"{result.best.tokens_per_second:,.0f} tokens a second, {result.best.tokens_per_second / most:.0%} of what any batch brings."
    )
    speeds = tuple((size, other.best.tokens_per_second) for size, (_, other) in sorted(tried.items()))
    return Solved(what="batch", value=value, sentence=sentence, run=chosen, hardware=hardware, result=result, tried=speeds)
