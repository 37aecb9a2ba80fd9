"""The search, on a machine that exists only as numbers."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from tuning.synthetic import SyntheticBench, options, search

from phalanx.tuning.paired_ratio import TAIL
from phalanx.tuning.trial_run import Side
from phalanx.tuning.tunable_keys import Dimension
from phalanx.tuning.tuner import Trial, TuneResult

WINNER = 'data.cache = "winner"'
SECOND = Dimension(key="data.max_bad_records", values=lambda now: iter([{"data.max_bad_records": 7}]))


def planted(word: str, factor: float, noise: float = 0.05, luck: float = 0.0, seed: int = 0) -> SyntheticBench:
    """A machine on which sides with this word in their name take this part of the time."""
    return SyntheticBench(factor=lambda side: factor if word in side.name else 1.0, noise=noise, luck=luck, seed=seed)


def outcomes(result: TuneResult) -> dict[str, str]:
    return {str(trial.changes.get("data.cache", trial.key)): trial.outcome for trial in result.trials}


@pytest.mark.parametrize("seed", range(8))
def test_a_winner_of_five_percent_is_found_in_noise(seed: int) -> None:
    result = search(planted("winner", 0.95, noise=0.08, luck=0.002, seed=seed), options("same", "winner", "other"))
    assert outcomes(result)["winner"] == "kept" and result.best.changes == {"data.cache": "winner"}
    assert result.confirmation is not None and result.confirmation.faster
    assert result.confirmation.ratio.median == pytest.approx(0.95, abs=0.025)
    (kept,) = result.kept
    assert kept.ratio is not None and kept.ratio.low <= 0.96 and kept.ratio.high >= 0.94


def test_settings_that_change_nothing_are_hardly_ever_kept() -> None:
    names = [f"null-{number}" for number in range(40)]
    accidents = 0
    for seed in range(3):
        bench = SyntheticBench(noise=0.1, luck=0.005, bursts=0.2, seed=seed)
        result = search(bench, options(*names), minutes=1000)
        assert len(result.trials) == 40 and not result.changed, "what wins by accident does not win twice"
        accidents += sum(trial.outcome == "not repeated" for trial in result.trials)
    assert accidents <= _quantile(120, 2 * TAIL), "the promised rate of one duel"


def _quantile(count: int, probability: float) -> int:
    """The number of accidents that so many tries exceed once in a thousand times."""
    total, number = 0.0, -1
    while total < 0.999:
        number += 1
        total += math.comb(count, number) * probability**number * (1 - probability) ** (count - number)
    return number


def test_two_winners_add_up_and_each_says_what_it_brought() -> None:
    def factor(side: Side) -> float:
        return (0.9 if side.run.data.cache == "a" else 1.0) * (0.8 if side.run.data.max_bad_records == 7 else 1.0)

    result = search(SyntheticBench(factor=factor, noise=0.02), options("b", "a"), SECOND)
    assert result.best.changes == {"data.cache": "a", "data.max_bad_records": 7}
    brought = {trial.key: trial.ratio.median for trial in result.kept if trial.ratio is not None}
    assert brought == {"data.cache": pytest.approx(0.9, abs=0.01), "data.max_bad_records": pytest.approx(0.8, abs=0.01)}
    assert result.confirmation is not None and result.confirmation.ratio.median == pytest.approx(0.72, abs=0.01)
    last = [row for row in result.measurements if row.stage == "confirmation"]
    assert {row.setting for row in last if row.role == "base"} == {"defaults"}


def test_a_gain_below_one_percent_is_no_reason_for_a_key() -> None:
    assert outcomes(search(planted("hair", 0.995, noise=0.0005), options("hair"))) == {"hair": "not faster"}


def test_a_lucky_process_does_not_win_twice() -> None:
    """Whatever makes a process faster than another of the same settings stays with the process."""
    results = [search(SyntheticBench(noise=0.02, luck=0.01, seed=seed), options("null")) for seed in range(40)]
    assert sum(trial.outcome == "not repeated" for result in results for trial in result.trials) > 2, "it does win once"
    assert sum(result.changed for result in results) <= 2


def test_turns_alternate_so_that_a_drift_decides_nothing() -> None:
    bench = SyntheticBench(noise=0.01)
    bench.factor = lambda side: 1 + (bench.now - 1000) / 200  # slower and slower
    result = search(bench, options("null"))
    assert not result.changed
    orders = [[row.role for row in result.measurements if row.pair == pair] for pair in (1, 2)]
    assert orders == [["base", "candidate"], ["candidate", "base"]]


@pytest.mark.parametrize("when", ["start", "step"])
def test_a_candidate_that_crashes_is_dropped_with_its_reason_and_the_search_goes_on(when: str) -> None:
    bench = planted("winner", 0.8)
    bench.failures = {"broken": (when, "RuntimeError: no compiler")}
    result = search(bench, options("broken", "winner"))
    assert outcomes(result) == {"broken": "failed", "winner": "kept"}
    assert result.trials[0].reason == "RuntimeError: no compiler"


@pytest.mark.parametrize("when", ["start", "step"])
def test_a_candidate_that_hangs_is_dropped_within_the_budget(when: str) -> None:
    bench = planted("winner", 0.8)
    bench.hangs = when
    begun = bench.now
    result = search(bench, options("hang", "winner"), minutes=10)
    assert outcomes(result) == {"hang": "failed", "winner": "kept"}
    assert result.trials[0].reason.startswith("no answer within")
    assert bench.now - begun <= 600


def test_a_candidate_that_does_not_fit_next_to_the_base_meets_it_in_turns_of_new_processes() -> None:
    bench = planted("winner", 0.8)
    bench.room = 1
    result = search(bench, options("null", "winner"))
    assert outcomes(result) == {"null": "not faster", "winner": "kept"}
    assert result.confirmation is not None and result.confirmation.faster


def test_out_of_memory_alone_is_a_reason() -> None:
    bench = SyntheticBench(failures={"large": ("start", "out of memory")}, out_of_memory=True)
    result = search(bench, options("large"))
    assert bench.started == 2 * ["defaults", 'data.cache = "large"'], "the second time alone"
    assert outcomes(result) == {"large": "failed"} and result.trials[0].reason == "out of memory"


def test_other_losses_reject_a_candidate_and_are_named() -> None:
    bench = planted("wrong", 0.5)
    bench.other_losses = {"wrong": 3e-5, "rounded": 3e-6}
    result = search(bench, options("wrong", "rounded"))
    assert outcomes(result) == {"wrong": "losses differ", "rounded": "not faster"}
    assert "step 1 differs by 3.0e-05" in result.trials[0].reason


@pytest.mark.parametrize("minutes", [0.3, 1.0, 2.0, 5.0])
def test_the_budget_is_kept_and_what_is_not_tried_is_named(minutes: float) -> None:
    bench = planted("winner", 0.9)
    begun = bench.now
    result = search(bench, options("a", "b", "c", "winner", *map(str, range(20))), minutes=minutes)
    assert bench.now - begun <= 60 * minutes
    assert Counter(outcomes(result).values())["out of time"] > 0
    late = next(trial for trial in result.trials if trial.outcome == "out of time")
    assert "raise --minutes" in late.reason
    if result.changed:
        assert result.confirmation is not None, "its time was reserved"


def test_an_interrupt_ends_with_the_best_so_far() -> None:
    bench = planted("winner", 0.8)

    def interrupt(trial: Trial) -> None:
        if "second" in trial.name:
            raise KeyboardInterrupt

    result = search(bench, options("winner", "second", "third"), on_trial=interrupt)
    assert result.interrupted and result.best.changes == {"data.cache": "winner"}
    assert result.confirmation is None and "third" not in str(bench.started)


def test_what_is_not_confirmed_is_given_up() -> None:
    bench = SyntheticBench(noise=0.02)

    def factor(side: Side) -> float:
        """Faster only until the second repeat is over: something else on the machine helped."""
        return 0.8 ** len(side.changes) if len(bench.started) < 8 else 1.0

    bench.factor = factor
    result = search(bench, options("helped"), SECOND)
    assert [trial.outcome for trial in result.trials] == ["kept", "kept"]
    assert not result.changed and result.unconfirmed is not None and "not faster beyond noise" in result.unconfirmed


def test_without_time_for_a_confirmation_the_first_winner_stays() -> None:
    """It has met the defaults with new processes; the others have only met it."""
    bench = SyntheticBench(factor=lambda side: 0.8 ** len(side.changes), noise=0.02)

    def slower_starts(trial: Trial) -> None:
        bench.start_seconds = 40.0 if trial.key == "data.max_bad_records" else 4.0

    begun = bench.now
    result = search(bench, options("first"), SECOND, minutes=1.7, on_trial=slower_starts)
    assert [trial.outcome for trial in result.trials] == ["kept", "kept"]
    assert result.best.changes == {"data.cache": "first"}
    assert result.confirmation is not None and result.confirmation.ratio.median == pytest.approx(0.8, abs=0.02)
    assert result.unconfirmed is not None and "raise --minutes" in result.unconfirmed
    assert bench.now - begun <= 60 * 1.7


def test_one_winner_has_met_the_defaults_with_new_processes_already() -> None:
    bench = planted("winner", 0.8)
    result = search(bench, options("winner"))
    assert bench.started == ["defaults", WINNER, "defaults", WINNER], "a trial and a repeat"
    assert result.confirmation is not None and result.confirmation.ratio == result.trials[0].ratio


def test_keys_of_the_run_file_keep_their_values() -> None:
    bench = planted("winner", 0.5)
    result = search(bench, options("winner"), fixed=frozenset({"data.cache"}))
    assert outcomes(result) == {"data.cache": "not tried"} and result.trials[0].reason == "the run file sets data.cache"
    assert bench.started == ["defaults"]
