"""The search for a learning rate, on losses that are known and on a real trainer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import ALONE, tiny_run, tiny_trainer

from phalanx.training.rate_search import conclude, growing_rates, search_rate, smoothed


def test_rates_grow_by_the_same_factor() -> None:
    rates = growing_rates(1e-6, 1.0, 7)
    assert rates == pytest.approx([10.0**power for power in range(-6, 1)])


def test_the_mean_of_a_constant_is_the_constant() -> None:
    assert smoothed([3.0] * 5) == pytest.approx([3.0] * 5)


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    """A loss that falls in a sigmoid around 1e-3, and rises from 1e-1 on."""
    rates = growing_rates(1e-6, 1.0, 200)
    losses = [4 - 2 / (1 + math.exp(-3 * math.log10(rate / 1e-3))) + max(0.0, 8 * math.log10(rate / 1e-1)) for rate in rates]
    found = conclude(rates, losses)
    assert found.suggestion is not None and found.lowest is not None
    assert found.suggestion == pytest.approx(1e-3, rel=0.1)
    assert 3e-2 < found.lowest < 3e-1 and found.diverged
    assert f"{found.suggestion:.1e}" in found.sentence


def test_a_loss_that_recovers_from_a_spike_is_no_descent() -> None:
    rates = growing_rates(1e-6, 1.0, 100)
    losses = [4 - 2 / (1 + math.exp(-3 * math.log10(rate / 1e-3))) for rate in rates]
    spiked = [12.0 if 1e-2 < rate < 1.5e-2 else loss for rate, loss in zip(rates, losses, strict=True)]
    plain, found = conclude(rates, losses), conclude(rates, spiked)
    assert plain.suggestion == found.suggestion and found.lowest is not None and found.lowest < 1e-2
    assert (plain.diverged, found.diverged) == (False, True) and plain.lowest == pytest.approx(1.0)


def test_without_a_falling_loss_nothing_is_suggested() -> None:
    rates = growing_rates(1e-6, 1.0, 20)
    for losses in ([float(number) for number in range(20)], [2.0] * 20, [math.nan] * 20):
        found = conclude(rates, losses)
        assert (found.suggestion, found.lowest) == (None, None) and "no suggestion" in found.sentence


def test_a_trainer_takes_each_rate_once_and_ends_when_it_diverges(tmp_path: Path) -> None:
    run = tiny_run()
    trainer = tiny_trainer(ALONE, replace(run, train=replace(run.train, clip=math.inf)), tmp_path / "checkpoints")
    trainer.load_initial_weights()
    rates = growing_rates(1e-5, 100.0, 40)
    taken: list[float] = []
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1
        if trainer.last_record is not None:
            taken.append(getattr(trainer.last_record, "learning_rate", math.nan))

    found = search_rate(trainer, rates, count)
    trainer.close()
    assert found.diverged and steps == len(found.rates) == len(found.losses) < 40, "a rate of 100 does not diverge"
    assert [rate for rate in taken if math.isfinite(rate)] == found.rates[
        : len([rate for rate in taken if math.isfinite(rate)])
    ]
    assert found.suggestion is not None and 1e-5 < found.suggestion < 1.0
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").iterdir())
