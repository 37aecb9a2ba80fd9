"""The interval of a ratio, against all patterns of signs, a published table and simulation."""

from __future__ import annotations

import math
import random
from itertools import combinations_with_replacement, product

import pytest

from phalanx.tuning.paired_ratio import ALIVE, FRESH, TAIL, ratio_of


@pytest.mark.parametrize("count", [8, 12])
def test_the_interval_misses_a_ratio_of_one_as_rarely_as_it_says(count: int) -> None:
    """Of ratios that are symmetric around 1, every pattern of signs is equally likely."""
    sizes = [1.01 ** (number + 1) for number in range(count)]
    missed = total = 0
    for signs in product((-1, 1), repeat=count):
        missed += ratio_of([(1.0, size**sign) for size, sign in zip(sizes, signs, strict=True)]).high < 1
        total += 1
    assert TAIL / 3 < missed / total <= TAIL


def test_the_ends_are_those_of_the_signed_rank_test() -> None:
    """The table of critical values: with 12 pairs and a tail of 0.0125, sums of ranks up to 10 are rejected."""
    ratios = [1 + 0.01 * 1.5**number for number in range(12)]
    means = sorted((math.log(a) + math.log(b)) / 2 for a, b in combinations_with_replacement(ratios, 2))
    ratio = ratio_of([(1.0, value) for value in ratios])
    assert ratio.low == pytest.approx(math.exp(means[10])) and ratio.high == pytest.approx(math.exp(means[-11]))


def test_few_pairs_have_no_interval() -> None:
    ratio = ratio_of([(1.0, 0.5)] * 6)
    assert (ratio.low, ratio.median) == (0.0, 0.5) and not ratio.faster
    assert ratio_of([(1.0, 0.5)] * 7).faster


def test_the_words_have_signs_that_are_read_as_time() -> None:
    assert ratio_of([(1.0, 0.958)] * 12).words == "−4.2% (−4.2 … −4.2)"
    assert ratio_of([(1.0, 1.01)] * 3).words == "+1.0%"


@pytest.mark.parametrize("looks", [ALIVE, FRESH])
def test_a_duel_without_a_difference_is_won_by_accident_at_the_promised_rate(looks: object) -> None:
    """Two looks are two chances; both together stay below the two tails."""
    assert looks in (ALIVE, FRESH)
    chosen = ALIVE if looks == ALIVE else FRESH
    dice, won, duels = random.Random(1), 0, 4000
    for _ in range(duels):
        pairs: list[tuple[float, float]] = []
        while True:
            pairs.append((dice.lognormvariate(0, 0.3), dice.lognormvariate(0, 0.3)))
            verdict = chosen.verdict(pairs)
            if verdict != "go on":
                won += verdict == "faster"
                break
    assert won / duels <= 2 * TAIL


def test_one_burst_of_load_does_not_decide() -> None:
    quiet = [(1.0, 0.95 + 0.001 * number) for number in range(12)]
    assert ratio_of([*quiet[:-2], (1.0, 5.0), (9.0, 0.95)]).median == pytest.approx(0.955, abs=0.003)


def test_what_is_far_slower_is_given_up_soon_and_what_may_be_noise_is_not() -> None:
    far = [(1.0, 8.0)] * 3
    assert [ALIVE.verdict(far[:count]) for count in (1, 2, 3)] == ["go on", "go on", "not faster"]
    assert ALIVE.verdict([(1.0, 8.0), (1.0, 0.7), (1.0, 8.0)]) == "go on"
