"""Values outside of tensors that would make ranks compute different things."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from phalanx.tracing.refusals import differing_values, values_read

FACTOR = 2.0
UNREAD = 3.0


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


class Block(nn.Module):
    def __init__(self, factor: float, own: float, note: str):
        super().__init__()
        self.act, self.own, self.note = times(factor), own, note

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.act(x)) * self.own


def model(factor: float = 1.0, own: float = 1.0, note: str = "") -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), Block(factor, own, note))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"factor": 5.0}, "the variable factor around times.<locals>.<lambda> is 1.0 on rank 0, but 5.0 on rank 1"),
        ({"own": 7.0}, "own of 1 is 1.0 on rank 0, but 7.0 on rank 1"),
    ],
)
def test_a_value_that_differs_between_ranks_is_named(change: dict[str, float], said: str) -> None:
    (sentence,) = differing_values([values_read(model()), values_read(model(**change))])
    assert said in sentence and "set it to the same everywhere" in sentence


def test_a_global_that_differs_between_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first = values_read(model())
    monkeypatch.setitem(globals(), "UNREAD", 4.0)
    assert differing_values([first, values_read(model())]) == []
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    (sentence,) = differing_values([first, first, values_read(model())])
    assert sentence.startswith(f"the global FACTOR of {__name__} is 2.0 on rank 0, but 1.0 on rank 2")


def test_what_no_forward_reads_may_differ() -> None:
    assert differing_values([values_read(model(note="a")), values_read(model(note="b"))]) == []
    with torch.device("meta"):
        assert values_read(nn.Linear(2, 2)) == {}
