"""A run that is killed in the middle of its saves, over and over, ends as if nobody had touched it."""

from __future__ import annotations

import killing
import pytest


@pytest.mark.slow
def test_kills_in_the_middle_of_saves_lose_nothing_and_change_nothing() -> None:
    """`python tests/killing.py --kills 200` is the same, at length."""
    killed = killing.run(kills=20, jobs=2, seed=7)
    assert killed.total() >= 20
    assert len(killed) >= 4, "hardly anything else was killed than one kind of process"
