"""How far two computations of the same numbers are apart, and how far they may be. Used by `verification/parity`.

A difference is always relative, in one way: the largest difference of two elements over the largest element of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor

FLOOR = 1e-2
"""Part of the largest element of all tensors that no tensor is measured by less than: some gradients are zero but for rounding,
such as that of a key's bias, which no softmax sees. A wrong gradient shows down to 1e-6 of the largest one."""

UNJUDGED = math.inf
"""In place of a range where none would mean anything: the difference is told, and whatever it is proves nothing."""

KINDS = ("placement", "batches", "loss", "gradients", "gradient norm", "parameters")
"""The checks in the order in which things happen in a step: what fails first explains what follows."""


@dataclass(frozen=True, slots=True)
class Range:
    """Largest relative differences that rounding accounts for."""

    loss: float
    gradients: float
    parameters: float
    because: str

    def of(self, kind: str) -> float:
        if kind in ("placement", "batches"):
            return 0.0
        return {"loss": self.loss, "parameters": self.parameters}.get(kind, self.gradients)


RANGES = {
    # Eight steps on up to eight ranks differ by 3e-7 in the loss and 3e-6 in gradients where only the order of sums does;
    # the rest is room for other sizes and machines.
    "fp32": Range(1e-5, 1e-4, 1e-4, "the same sums in another order; measured over 8 steps: loss 3e-7, gradients 3e-6"),
    # bf16 keeps 8 bits: one rounding is 4e-3. Sums cut over ranks round at other places, and steps add such roundings up.
    "bf16": Range(1e-3, 7e-2, 2e-2, "8 bits of mantissa; measured over 8 steps: loss 4e-4, gradients 4e-2, parameters 7e-3"),
    # fp16 keeps 11 bits, one rounding is 5e-4.
    "fp16": Range(2e-4, 1e-2, 3e-3, "11 bits of mantissa; measured over 8 steps: loss 4e-5, gradients 4e-3, parameters 1e-3"),
    # e4m3 keeps 4 bits, one rounding is 6e-2: a sum that is a little different may be rounded to the next of few numbers.
    "fp8": Range(
        1e-2, 7e-1, 1e-1, "4 bits of mantissa in e4m3; measured over 8 steps: loss 2e-3, gradients 4e-1, parameters 5e-2"
    ),
    # Muon makes matrices orthogonal in bf16, whatever else is in fp32: the gradients of the first step are exact, later ones are not.
    "muon": Range(1e-4, 1e-2, 1e-2, "Newton–Schulz iterations in bf16; measured over 8 steps: gradients 1e-3, parameters 2e-3"),
    # A token between two experts goes to either when its scores are rounded otherwise, and then is missing in one's gradient, by
    # more than what is left (1.06 was measured, and 0.8 on one device with other micro-batches): no range would tell that from a mistake.
    "experts": Range(
        1e-2,
        UNJUDGED,
        1e-1,
        "coarse numbers may send a token to another expert, whose gradient then differs by all of it: gradients are told, not judged. "
        'Prove the layout itself with precision.compute = "fp32" and AdamW',
    ),
}


class Row(NamedTuple):
    """One comparison on one rank."""

    kind: str
    step: int
    tensor: str
    """Its name; empty for what is a single number."""
    rank: int
    difference: float


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    name: str
    largest: float
    accepted: float
    tensor: str = ""
    """Where: the first that differs beyond the accepted; or the one that differs most."""
    step: int | None = None
    rank: int | None = None

    @property
    def judged(self) -> bool:
        return self.accepted < UNJUDGED

    @property
    def passed(self) -> bool:
        return self.largest <= self.accepted  # false for what is not a number

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"accepted": self.accepted if self.judged else None, "judged": self.judged, "passed": self.passed}


def difference(found: Tensor, expected: Tensor, scale: float) -> float:
    """The largest difference over `scale`, the largest element of the whole that both are the same box of."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    apart = (found.double() - expected.double()).abs().max().item()
    if math.isnan(apart):  # infinities at the same places are equal, anything else is as wrong as can be
        return 0.0 if found.double().equal(expected.double()) else math.inf
    return apart / scale if scale else (math.inf if apart else 0.0)


def number_difference(found: float | None, expected: float | None) -> float:
    """The same for single numbers."""
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    if not (math.isfinite(found) and math.isfinite(expected)):
        return 0.0 if math.isfinite(found) == math.isfinite(expected) else math.inf
    return abs(found - expected) / max(abs(expected), 1e-30) if found != expected else 0.0


def judge(rows: Iterable[Row], accepted: Range, order: Sequence[str]) -> list[Check]:
    """A check for each kind. `order`: the parameters as the model has them, first layer first."""
    kinds: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for row in rows:
        kinds[row.kind].append(row)
    places = {name: place for place, name in enumerate(order)}
    bad_losses = {row.step for row in kinds["loss"] if not row.difference <= accepted.of("loss")}
    checks = []
    for kind, of_kind in kinds.items():
        limit = accepted.of(kind)
        beyond = [row for row in of_kind if not row.difference <= limit]
        if beyond:
            first = min(row.step for row in beyond)
            told = _guilty([row for row in beyond if row.step == first], first in bad_losses, places)
        else:
            told = max(of_kind, key=lambda row: row.difference, default=Row(kind, -1, "", 0, 0.0))
        largest = max((row.difference for row in of_kind), default=0.0)
        checks.append(
            Check(kind, largest, limit, told.tensor, told.step if told.step >= 0 else None, told.rank if beyond else None)
        )
    return checks


def earliest(checks: Iterable[Check]) -> Check | None:
    """The failed check to look at first: of the first bad step, and in it of what happens first."""
    failed = [check for check in checks if not check.passed]
    return min(failed, key=lambda check: (-1 if check.step is None else check.step, KINDS.index(check.name)), default=None)


def _guilty(rows: list[Row], forward_differs: bool, places: dict[str, int]) -> Row:
    """Of the tensors that differ in the first bad step, the one to look at.

    Where the loss was right the mistake is in the backward, and spreads from the last layer to the first: the last tensor that
    differs is nearest to it. Otherwise everything differs, and the one that does most is.
    """
    if not forward_differs and rows[0].kind == "gradients":
        return max(rows, key=lambda row: (places.get(row.tensor, -1), row.difference))
    return max(rows, key=lambda row: row.difference)
