"""What counts as a difference, and whom a failed check names."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.verification.tolerance import (
    MARGIN,
    TOLERANCES,
    Check,
    Comparison,
    Limits,
    Noise,
    difference,
    judge,
    number_difference,
)

ORDER = ["embed", "a", "b", "c", "head"]
FP32 = TOLERANCES["fp32"]


def checks(*rows: Comparison, noise: Noise | None = None) -> dict[str, Check]:
    return {check.name: check for check in judge(rows, Limits(FP32, noise or {}), ORDER)}


def test_a_difference_is_over_the_largest_of_the_whole() -> None:
    assert difference(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), 4.0) == pytest.approx(0.125)
    assert difference(torch.zeros(2), torch.zeros(2), 0.0) == 0.0
    assert difference(torch.tensor([1e-9]), torch.zeros(1), 0.0) == math.inf
    assert difference(torch.zeros(2), torch.zeros(3), 1.0) == math.inf
    assert difference(torch.zeros(0), torch.zeros(0), 0.0) == 0.0


def test_what_is_not_a_number_is_never_close() -> None:
    bad = torch.tensor([math.nan])
    assert difference(bad, torch.zeros(1), 1.0) == math.inf
    assert difference(bad, bad, 1.0) == math.inf
    assert difference(torch.tensor([math.inf]), torch.tensor([math.inf]), 1.0) == 0.0
    assert number_difference(math.nan, 1.0) == math.inf
    assert number_difference(math.nan, math.inf) == 0.0  # both sides refuse such a step
    assert number_difference(None, 1.0) == math.inf
    assert number_difference(2.0, 2.0 + 2e-6) == pytest.approx(1e-6, rel=1e-3)


def test_what_passes_is_told_by_its_largest() -> None:
    found = checks(
        Comparison("gradients", 1, "a", 0, 1e-6), Comparison("gradients", 2, "b", 1, 3e-5), Comparison("loss", 1, "", 0, 1e-6)
    )
    assert found["gradients"] == Check("gradients", 3e-5, 1e-4, "b", 2, None)
    assert all(check.passed for check in found.values())
    assert found["parameters"].step is None  # nothing was compared


def test_the_first_bad_step_counts() -> None:
    found = checks(
        Comparison("parameters", 0, "a", 0, 0.0),
        Comparison("parameters", 3, "c", 1, 0.5),
        Comparison("parameters", 2, "b", 1, 2e-4),
        Comparison("parameters", 2, "a", 0, 5e-5),
    )["parameters"]
    assert not found.passed
    assert (found.tensor, found.step, found.rank, found.largest) == ("b", 2, 1, 0.5)


def test_noise_raises_the_limit_of_its_tensor_only() -> None:
    rows = [Comparison("parameters", 2, "a", 0, 3e-3), Comparison("parameters", 2, "b", 1, 5e-5)]
    noise = {("parameters", 2, "a"): 1e-3, ("parameters", 2, "b"): 1e-6}
    assert checks(*rows, noise=noise)["parameters"] == Check("parameters", 3e-3, MARGIN * 1e-3, "a", 2, None, 1e-3)
    wrong = [*rows, Comparison("parameters", 2, "c", 1, 2e-3)]
    found = checks(*wrong, noise=noise)["parameters"]
    assert found == Check("parameters", 2e-3, 1e-4, "c", 2, 1)
    assert not checks(Comparison("parameters", 2, "a", 0, 5e-3), noise=noise)["parameters"].passed


def test_of_several_limits_the_one_that_is_used_most_is_shown() -> None:
    rows = [Comparison("parameters", 2, "a", 0, 1e-3), Comparison("parameters", 2, "b", 1, 9e-5)]
    found = checks(*rows, noise={("parameters", 2, "a"): 1e-3})["parameters"]
    assert (found.tensor, found.largest, found.accepted, found.noise) == ("b", 9e-5, 1e-4, None)


@pytest.mark.parametrize(
    "row",
    [
        Comparison("gradients", 1, "a", 0, 1e-3),
        Comparison("loss", 1, "", 0, 1e-3),
        Comparison("parameters", 0, "a", 0, 1e-3),
        Comparison("batches", 2, "", 0, 1.0),
        Comparison("placement", 0, "a", 0, 1.0),
    ],
    ids=lambda row: row.kind,
)
def test_no_noise_excuses_what_comes_before_the_first_update(row: Comparison) -> None:
    found = checks(row, noise={(row.kind, row.step, row.tensor): 1.0})[row.kind]
    assert not found.passed and found.noise is None


def test_of_a_wrong_backward_the_last_layer_that_differs_is_named() -> None:
    rows = [
        Comparison("gradients", 1, name, 0, size)
        for name, size in (("embed", 0.9), ("a", 0.7), ("b", 0.01), ("c", 1e-7), ("head", 0.0))
    ]
    assert checks(*rows, Comparison("loss", 1, "", 0, 1e-7))["gradients"].tensor == "b"
    # Where the loss differs too everything behind the mistake does, and what differs most is nearest to it.
    assert checks(*rows, Comparison("loss", 1, "", 0, 1e-3))["gradients"].tensor == "embed"


def test_the_loss_is_named_as_such() -> None:
    found = checks(Comparison("loss", 1, "", 0, 1e-7), Comparison("loss", 2, "", 0, math.inf))["loss"]
    assert (found.passed, found.step, found.tensor) == (False, 2, "")


def test_coarser_numbers_may_differ_more_and_say_why() -> None:
    ranges = [TOLERANCES[name] for name in ("fp32", "fp16", "bf16", "fp8")]
    for kind in ("loss", "gradients", "parameters"):
        assert [one.of(kind) for one in ranges] == sorted(one.of(kind) for one in ranges)
    assert all(one.reason for one in TOLERANCES.values())
    assert FP32.of("loss") == 1e-5 and FP32.of("gradients") == 1e-4
