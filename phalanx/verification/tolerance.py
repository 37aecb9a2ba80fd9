"""Differences between two computations of the same values, and their tolerances. Every difference is relative: the largest
difference of two elements divided by the largest element of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = 1e-2
"""Minimum scale of a tensor, relative to the largest element of all tensors: some gradients are zero except for rounding, such as
that of the key bias, which softmax cancels. A wrong gradient is still detected down to 1e-6 of the largest one."""

NOT_JUDGED = math.inf
"""The tolerance of differences that are reported but not judged, because no limit would be meaningful."""

KINDS = ("placement", "batches", "loss", "gradients", "gradient norm", "parameters")
"""The checks in the order of a step: the first failure explains the later ones."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Maximum relative differences that rounding explains."""

    loss: float
    gradients: float
    parameters: float
    reason: str

    def of(self, kind: str) -> float:
        if kind in ("placement", "batches"):
            return 0.0
        return {"loss": self.loss, "parameters": self.parameters}.get(kind, self.gradients)


TOLERANCES = {
    # Eight steps on up to eight ranks differ by 3e-7 in the loss and 3e-6 in gradients if only the order of sums differs;
    # the rest is a margin for other sizes and machines.
    "fp32": Tolerance(1e-5, 1e-4, 1e-4, "the same sums in another order; measured over 8 steps: loss 3e-7, gradients 3e-6"),
    # bf16 has 8 bits: one rounding is 4e-3. Sums over ranks round at other places, and steps accumulate the differences.
    "bf16": Tolerance(
        1e-3, 7e-2, 2e-2, "8 bits of mantissa; measured over 8 steps: loss 4e-4, gradients 4e-2, parameters 7e-3"
    ),
    # fp16 has 11 bits, one rounding is 5e-4.
    "fp16": Tolerance(
        2e-4, 1e-2, 3e-3, "11 bits of mantissa; measured over 8 steps: loss 4e-5, gradients 4e-3, parameters 1e-3"
    ),
    # e4m3 has 4 bits, one rounding is 6e-2: a slightly different sum may round to the neighboring number.
    "fp8": Tolerance(
        1e-2, 7e-1, 1e-1, "4 bits of mantissa in e4m3; measured over 8 steps: loss 2e-3, gradients 4e-1, parameters 5e-2"
    ),
    # A token between two experts may go to the other one if its scores round differently, and is then missing in a gradient by more
    # than what remains (measured: 1.06, and 0.8 on one device with other micro-batches): no limit separates that from an error.
    "experts": Tolerance(
        1e-2,
        NOT_JUDGED,
        1e-1,
        "coarse numbers may send a token to another expert, whose gradient then differs by all of it: gradients are reported, not judged. "
        'Verify the layout itself with precision.compute = "fp32"',
    ),
}

ROUNDING = {"fp32": 5e-7, "bf16": 1e-2, "fp16": 1e-3, "fp8": 1e-1}
"""What rounding does to gradients, by number format: the root mean square of the difference, relative to that of the gradient. Measured
in the first step, where both sides have the same parameters, on five layouts of two models: the median tensor differs by up to 2.6e-7,
9.6e-3, 7.9e-4 and 9.7e-2."""

MARGIN = 4.0
"""Noise is one sample of what rounding does: accepted is this many times the noise. Of 10 layouts with Muon in bf16 and 10 in fp16, the
differences beyond the tolerances were 0.7 times the noise in the median, and 2.6 times at most."""

Noise = Mapping[tuple[str, int, str], float]
"""What rounding does to the results of one process, by kind of comparison, step and tensor."""


class Comparison(NamedTuple):
    """One comparison on one rank."""

    kind: str
    step: int
    tensor: str
    """Name of the tensor; empty for a single number."""
    rank: int
    difference: float

    @property
    def precedes_update(self) -> bool:
        """Whether it compares what no optimizer has touched: rounding is not amplified there."""
        return self.kind in ("placement", "batches") or self.step < (1 if self.kind == "parameters" else 2)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one kind of comparison: one line of the table."""

    name: str
    largest: float
    accepted: float
    tensor: str = ""
    """The first tensor beyond its limit, or the one nearest to it."""
    step: int | None = None
    rank: int | None = None
    noise: float | None = None
    """What rounding does there; None unless `accepted` follows from it."""

    @property
    def judged(self) -> bool:
        return self.accepted < NOT_JUDGED

    @property
    def passed(self) -> bool:
        return self.largest <= self.accepted  # false for NaN

    def to_json(self) -> dict[str, object]:
        accepted = self.accepted if self.judged else None
        return asdict(self) | {"accepted": accepted, "judged": self.judged, "passed": self.passed}


def difference(found: Tensor, expected: Tensor, scale: float) -> float:
    """The largest difference divided by `scale`, the largest element of the whole tensor."""
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    apart = (found.double() - expected.double()).abs().max().item()
    if math.isnan(apart):  # infinities at the same positions are equal
        return 0.0 if found.double().equal(expected.double()) else math.inf
    return apart / scale if scale else (math.inf if apart else 0.0)


def number_difference(found: float | None, expected: float | None) -> float:
    """The relative difference of two numbers."""
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    if not (math.isfinite(found) and math.isfinite(expected)):
        return 0.0 if math.isfinite(found) == math.isfinite(expected) else math.inf
    return abs(found - expected) / max(abs(expected), 1e-30) if found != expected else 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest accepted difference of each comparison: the tolerance, or a multiple of the measured noise where that is more."""

    accepted: Tolerance
    noise: Noise = field(default_factory=dict)

    def of(self, row: Comparison) -> float:
        return max(self.accepted.of(row.kind), MARGIN * self.noise_of(row))

    def noise_of(self, row: Comparison) -> float:
        return 0.0 if row.precedes_update else self.noise.get((row.kind, row.step, row.tensor), 0.0)

    def accept(self, row: Comparison) -> bool:
        return row.difference <= self.of(row)  # false for NaN

    def used(self, row: Comparison) -> float:
        """The part of its limit that an accepted difference reaches."""
        limit = self.of(row)
        return row.difference / limit if 0 < limit < NOT_JUDGED else 0.0


def judge(rows: Iterable[Comparison], limits: Limits, order: Sequence[str]) -> list[Check]:
    """A check for each kind of comparison. `order`: parameter names in the order of the model."""
    kinds: dict[str, list[Comparison]] = {kind: [] for kind in KINDS}
    for row in rows:
        kinds[row.kind].append(row)
    places = {name: place for place, name in enumerate(order)}
    bad_losses = {row.step for row in kinds["loss"] if not limits.accept(row)}
    checks = []
    for kind, of_kind in kinds.items():
        beyond = [row for row in of_kind if not limits.accept(row)]
        if beyond:
            first = min(row.step for row in beyond)
            shown = _culprit([row for row in beyond if row.step == first], first in bad_losses, places)
            largest = max(row.difference for row in beyond)
        else:
            nothing = Comparison(kind, -1, "", 0, 0.0)
            shown = max(of_kind, key=lambda row: (limits.used(row), row.difference), default=nothing)
            largest = shown.difference
        limit = limits.of(shown)
        checks.append(
            Check(
                kind,
                largest,
                limit,
                shown.tensor,
                shown.step if shown.step >= 0 else None,
                shown.rank if beyond else None,
                limits.noise_of(shown) if limit > limits.accepted.of(kind) else None,
            )
        )
    return checks


def first_failure(checks: Iterable[Check]) -> Check | None:
    """The failed check of the first bad step that comes first in the step."""
    failed = [check for check in checks if not check.passed]
    return min(failed, key=lambda check: (-1 if check.step is None else check.step, KINDS.index(check.name)), default=None)


def _culprit(rows: list[Comparison], forward_differs: bool, places: dict[str, int]) -> Comparison:
    """The tensor that most likely shows the cause, of those that differ in the first bad step. If the loss is right, the error is in
    the backward and spreads from the last layer to the first: the last tensor that differs is the nearest to it. Otherwise all
    tensors differ, and the one with the largest difference is shown."""
    if not forward_differs and rows[0].kind == "gradients":
        return max(rows, key=lambda row: (places.get(row.tensor, -1), row.difference))
    return max(rows, key=lambda row: row.difference)
