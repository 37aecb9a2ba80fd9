"""The run file that a search writes, and what plans learn from it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tuning.synthetic import MACHINE, SyntheticBench, job, options, search

from phalanx.planning.feedback import Measured, learned
from phalanx.planning.machine_fit import need_and_promise
from phalanx.spec.edit_file import with_commented
from phalanx.spec.layout import Layout
from phalanx.tuning.trial_run import Changes, Planner, Side
from phalanx.tuning.tunable_keys import Dimension, Situation
from phalanx.tuning.tune import TuneSettings, _learn
from phalanx.tuning.tune_files import sentence, tuned_text
from phalanx.tuning.tuner import TuneResult

FILE = """\
# My run.
[train]
batch = 2        # sequences
micro_batch = 1  # mine

[layout]
tensor = 2
"""


def test_values_get_comments_and_everything_else_stays() -> None:
    text = with_commented(
        FILE,
        {"train": {"micro_batch": 2}, "memory": {"compile": True}, "layout": {"data": 2}},
        {"train.micro_batch": "tune: 5.0% less", "layout": "tune: 7.0% less"},
    )
    assert tomllib.loads(text) == {
        "train": {"batch": 2, "micro_batch": 2},
        "memory": {"compile": True},
        "layout": {"data": 2},
    }, "a layout is replaced as a whole"
    assert "# My run." in text and "batch = 2        # sequences" in text
    assert "micro_batch = 2 # tune: 5.0% less" in text


def found(result_of: Dimension) -> TuneResult:
    bench = SyntheticBench(factor=lambda side: 0.8 if side.changes else 1.0, noise=0.01)
    return search(bench, result_of)


def test_what_a_new_plan_would_choose_differently_is_written_too() -> None:
    result = found(options("elsewhere"))
    same = tuned_text(FILE, result, lambda text: result.best)
    assert tomllib.loads(same)["data"] == {"cache": "elsewhere"} and "micro_batch = 1  # mine" in same

    def replan(text: str) -> Side:
        return replace(result.best, plan=replace(result.best.plan, micro_batch=2, layout=Layout(data=1)))

    other = tomllib.loads(tuned_text(FILE, result, replan))
    assert (other["train"]["micro_batch"], other["layout"]) == (1, {"data": 2}), "as in the trials"
    assert result.best.plan.layout == Layout(data=2) and result.best.plan.micro_batch == 1


def test_a_key_that_won_several_times_has_brought_their_product() -> None:
    def values(now: Situation) -> Iterator[Changes]:
        yield {"data.prefetch": 2 * now.base.run.data.prefetch}

    bench = SyntheticBench(factor=lambda side: {2: 1.0, 4: 0.8, 8: 0.6}.get(side.run.data.prefetch, 2.0), noise=0.005)
    result = search(bench, Dimension(key="data.prefetch", values=values))
    assert [trial.outcome for trial in result.trials[:3]] == ["kept", "kept", "not faster"]
    comment = re.search(r"prefetch = 8 # tune: (\d+\.\d)% less time a step", tuned_text(FILE, result, None))
    assert comment is not None and float(comment[1]) == pytest.approx(40, abs=0.5)


def test_the_sentence_says_what_was_found() -> None:
    words = re.search(r"take (\d+\.\d)% less time a step than the defaults", sentence(found(options("a"))))
    assert words is not None and float(words[1]) == pytest.approx(20, abs=0.5)
    null = search(SyntheticBench(noise=0.01), options("a", "b"))
    assert sentence(null) == "The defaults are best: of 2 candidates, none was faster beyond noise."
    assert not null.changed and null.keys == {}


def test_plans_learn_from_the_measured_steps() -> None:
    """Steps that are three times as long as promised are promised so afterwards, and other layouts move along."""
    base = job().defaults
    planner = Planner(MACHINE)
    two = planner.changed(base, {"train.micro_batch": 1})
    steps = [
        Measured(run=side.run, plan=side.plan, seconds=3 * side.plan.promise.seconds)
        for side in (base, two)
        if side.plan.promise is not None
    ]
    assert len(steps) == 2
    constants = learned(steps, MACHINE)
    taught = replace(MACHINE, measured=tuple(constants.items()))
    for step in steps:
        _, again = need_and_promise(step.run, taught, step.plan)
        assert again is not None and again.seconds == pytest.approx(step.seconds, rel=0.1)
    assert learned([], MACHINE) == {}


def test_a_busy_machine_teaches_nothing_unless_asked() -> None:
    result = found(options("a"))
    busy = _learn(result, MACHINE, TuneSettings(), 3.0)
    assert busy.reason is not None and "a load of 3.0 per core" in busy.reason and busy.file is None
    asked = _learn(result, MACHINE, TuneSettings(learn=True), 3.0)
    assert asked.reason is None and asked.file is not None
    assert asked.before is not None and asked.after is not None and asked.measured is not None
    assert abs(asked.after - asked.measured) < abs(asked.before - asked.measured)
    assert _learn(result, MACHINE, TuneSettings(learn=False), 0.0).reason == "--no-learn"
