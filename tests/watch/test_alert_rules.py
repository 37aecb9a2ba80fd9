"""Which records become alerts: each rule at its limit and just before it, and how many messages people get."""

from __future__ import annotations

from dataclasses import replace

import pytest
from happened import a_step, failed, finished, recovered, run_started, saved, skipped

from phalanx.events.records import Event, Rewound, SaveFailed, Stopped, Straggling, UploadFailed, WorkerFailed
from phalanx.spec.alerts import Alerts
from phalanx.watch.sinks.alert_rules import Alert, Disk, Rules

GIB = 2**30
ALWAYS = Alerts(every=0.0)


def heard(rules: Rules, *events: Event) -> list[Alert]:
    return [alert for event in events for alert in rules.on_event(event)]


def kinds(alerts: list[Alert]) -> list[str]:
    return [alert.kind for alert in alerts]


def steps(first: int, count: int, loss: float = 3.0, speed: float = 100.0) -> list[Event]:
    return [a_step(number, loss=loss, speed=speed) for number in range(first, first + count)]


def test_a_usual_run_is_quiet_until_it_ends() -> None:
    rules = Rules(ALWAYS)
    noisy = [a_step(number, loss=3.0 + 0.3 * (number % 3), speed=100.0 + 20 * (number % 4)) for number in range(1, 300)]
    assert heard(rules, run_started(steps=300), *noisy, saved(100)) == []
    assert rules.on_time(1299.0 + 59.0) == []
    (end,) = heard(rules, finished(300))
    assert end.kind == "finished" and "300 steps" in end.sentence and end.step == 300
    assert rules.on_time(10_000.0) == [] and rules.on_close(10_000.0) == [], "it has said how it ended"


@pytest.mark.parametrize(
    "event, kind, words",
    [
        (Stopped(time=1.0, step=7, reason="SIGTERM"), "stopped", "SIGTERM"),
        (WorkerFailed(time=1.0, rank=3, reason="CUDA error"), "failed", "Rank 3 failed: CUDA error"),
        (failed(1, 1.0, rank=5), "failure", "rank 5 was killed"),
        (recovered(1, 5.0), "recovered", "2.0 s (restart)"),
        (skipped(4, reason="spike"), "diverged", "Step 4 was skipped: spike"),
        (Rewound(time=1.0, step=9, to_step=4, skipped_samples=[1, 2], path="x"), "diverged", "from step 9 to step 4"),
        (Straggling(time=1.0, rank=6, node=1, step=3, factor=2.0, message="rank 6 is slow"), "waits", "rank 6 is slow"),
        (SaveFailed(time=1.0, step=8, path="x", reason="no space"), "save", "step 8 could not be saved: no space"),
        (UploadFailed(time=1.0, step=8, url="s3://b", reason="denied"), "save", "could not be uploaded: denied"),
        (a_step(5, loss=float("nan")), "diverged", "step 5 is nan"),
    ],
)
def test_a_record_becomes_an_alert_with_what_to_do(event: Event, kind: str, words: str) -> None:
    (alert,) = heard(Rules(ALWAYS), event)
    assert alert.kind == kind and words in alert.sentence and alert.remedy and alert.time == event.time
    assert heard(Rules(replace(ALWAYS, on=("finished",))), event) == [], "only what is asked for"


def test_bad_steps_in_a_row_are_one_alert() -> None:
    rules = Rules(ALWAYS)
    assert kinds(heard(rules, *(skipped(number, number) for number in range(1, 9)))) == ["diverged"]


def test_a_rising_loss_is_reported_once_until_it_has_fallen() -> None:
    rules = Rules(ALWAYS)
    assert heard(rules, run_started(), *steps(1, 50, loss=2.0), *steps(51, 30, loss=2.5)) == [], "below the factor of 1.3"
    (alert,) = heard(rules, *steps(81, 40, loss=2.8))
    assert alert.kind == "diverged" and alert.step == 85 and "2.6500 in the last 10 steps, after 2.0000" in alert.sentence
    assert heard(rules, *steps(121, 40, loss=2.0)) == []
    assert kinds(heard(rules, *steps(161, 40, loss=2.8))) == ["diverged"]


def test_a_noisy_loss_has_not_risen() -> None:
    rules = Rules(ALWAYS)
    noisy = [a_step(number, loss=0.1 + 0.4 * (number * 7 % 11) / 11) for number in range(1, 400)]
    assert heard(rules, run_started(), *noisy) == []


def test_slow_steps_count_only_in_a_row_and_against_the_median() -> None:
    rules = Rules(replace(ALWAYS, slow_steps=5))
    usual = steps(1, 40)
    for at in (41, 46, 51):
        usual += [*steps(at, 4, speed=10.0), *steps(at + 4, 1)]
    assert heard(rules, run_started(), *usual) == []
    (alert,) = heard(rules, *steps(56, 50, speed=40.0))
    assert alert.kind == "slow" and alert.step == 60 and "40% of the median of this launch (100 tokens/s)" in alert.sentence
    assert heard(rules, *steps(106, 5, speed=51.0)) == []
    assert kinds(heard(rules, *steps(111, 5, speed=40.0))) == ["slow"], "it was usual in between"


def test_a_run_that_was_never_as_fast_as_promised_is_slow() -> None:
    rules = Rules(replace(ALWAYS, slow_steps=5))
    (alert,) = heard(rules, run_started(promised=1000.0), *steps(1, 50))
    assert alert.kind == "slow" and "10% of the plan's promise (1,000 tokens/s)" in alert.sentence


def test_no_step_for_long_is_reported_once() -> None:
    rules = Rules(replace(ALWAYS, stalled_after=10.0))
    slow = [a_step(number, 1000.0 + 30.0 * number, seconds=30.0) for number in range(1, 6)]
    heard(rules, run_started(), *slow)
    assert rules.on_time(1150.0 + 299.0) == []
    (alert,) = rules.on_time(1150.0 + 301.0)
    assert alert.kind == "waits" and "no step for 301 s" in alert.sentence and "step 5" in alert.sentence
    assert rules.on_time(1150.0 + 400.0) == []
    assert heard(rules, a_step(6, 1600.0)) == [] and kinds(rules.on_time(2000.0)) == ["waits"]


def test_a_failure_without_recovery_is_named() -> None:
    rules = Rules(ALWAYS)
    heard(rules, run_started(), *steps(1, 5), failed(1, 1006.0))
    (alert,) = rules.on_time(1100.0)
    assert alert.kind == "waits" and "after a failure (died)" in alert.sentence


def test_a_launch_before_its_first_steps_may_take_its_time() -> None:
    rules = Rules(ALWAYS)
    heard(rules, run_started())
    assert rules.on_time(100_000.0) == []


def test_the_disk_is_projected_over_the_next_checkpoints() -> None:
    free = 100 * GIB
    rules = Rules(replace(ALWAYS, disk_checkpoints=3, disk_gib=1.0), (Disk("the run directory a", lambda: free),))
    now = 2000.0
    heard(rules, run_started())
    assert rules.on_time(now) == []
    for number in range(1, 8):
        free -= 10 * GIB
        heard(rules, saved(number, 10 * GIB))
        assert rules.on_time(now + number) == [], f"{free / GIB} GiB are left"
    free -= 6 * GIB
    heard(rules, saved(8, 10 * GIB))
    (alert,) = rules.on_time(now + 8)
    assert alert.kind == "disk" and "the run directory a" in alert.sentence and "24.0 GiB are free" in alert.sentence
    assert "8.7 GiB more: there is space for 2" in alert.sentence
    assert rules.on_time(now + 100) == [], "it was said"


def test_a_disk_whose_old_checkpoints_are_removed_is_not_filling() -> None:
    rules = Rules(ALWAYS, (Disk("a", lambda: 25 * GIB),))
    for number in range(1, 9):
        assert heard(rules, saved(number, 10 * GIB)) == [] and rules.on_time(2000.0 + 60 * number) == []


def test_a_disk_without_space_for_the_next_checkpoint() -> None:
    rules = Rules(ALWAYS, (Disk("a", lambda: 10 * GIB),))
    heard(rules, saved(1, 10 * GIB))
    (alert,) = rules.on_time(2000.0)
    assert "a checkpoint takes 10.0 GiB" in alert.sentence


def test_messages_of_one_kind_keep_a_distance_and_say_how_many_there_were() -> None:
    rules = Rules(Alerts(every=900.0))
    sent = heard(rules, *(failed(number, 1000.0 + 100.0 * number) for number in range(1, 21)))
    assert [(alert.time, alert.more) for alert in sent] == [(1100.0, 0), (2000.0, 8), (2900.0, 8)]
    assert kinds(heard(rules, recovered(20, 3001.0), finished(3))) == ["recovered", "finished"], "other kinds are not delayed"
    assert kinds(heard(rules, run_started(), finished(3))) == ["finished"], "the end of a launch is always reported"


def test_a_launch_that_ends_without_a_word_has_failed() -> None:
    rules = Rules(ALWAYS)
    heard(rules, run_started(), *steps(1, 3))
    (alert,) = rules.on_close(2000.0)
    assert alert.kind == "failed" and "after step 3" in alert.sentence
