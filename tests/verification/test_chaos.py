"""Campaigns of faults: what is planned, what is read off the events of two runs, and what a run leaves behind."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import TINY, tiny_run
from rich.console import Console
from typer.testing import CliRunner

from phalanx.cli.main import app
from phalanx.events.fault_log import FaultClaims
from phalanx.events.records import (
    Corrupted,
    Event,
    FailureNoticed,
    FaultInjected,
    Finished,
    NotFinite,
    Recovered,
    RunStarted,
    SaveFailed,
    Step,
    StepSkipped,
    Straggling,
    WorkerFailed,
)
from phalanx.faults.grammar import Fault, check, parse
from phalanx.host.process_tree import adopt_orphans
from phalanx.spec.check import check as check_run
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.verification import chaos_campaign
from phalanx.verification.fault_outcomes import (
    FaultOutcome,
    Verdict,
    fault_outcomes,
    outcome_verdicts,
    run_verdicts,
    same_layout,
)
from phalanx.verification.verify_report import show_campaign

LAYOUT = {"data": 4}


def step(number: int, at: float, loss: float | None = None, digest: str = "") -> Step:
    return Step(
        time=at,
        step=number,
        loss=4.0 - 0.1 * number if loss is None else loss,
        tokens=100,
        samples=8 * number,
        batch_digest=digest or f"{number:x}",
        learning_rate=1e-3,
        grad_norm=1.0,
        seconds=0.1,
        tokens_per_second=1.0,
        flops_per_second=1.0,
        mfu=None,
        memory=1,
    )


def started(layout: dict[str, Any] = LAYOUT) -> RunStarted:
    return RunStarted(
        version="0", ranks=4, device="cpu", steps=5, parameters=1, micro_batch=1, accumulation=1, layout=layout, compute="fp32"
    )


def recovered(number: int, at: float, layout: dict[str, Any] = LAYOUT, lost: int = 0) -> Recovered:
    return Recovered(
        time=at,
        failures=[number],
        action="restart",
        generation=2,
        ranks=4,
        layout=layout,
        source="live",
        step=1,
        steps_lost=lost,
        noticed=at - 0.5,
        decided=at - 0.4,
        restarted=at - 0.2,
        first_step=at,
        seconds=0.5,
    )


def injected(fault: Fault, at: float) -> FaultInjected:
    return FaultInjected(time=at, fault=str(fault), rank=fault.rank, node=fault.node, step=fault.step)


def whole(steps: int = 5) -> list[Event]:
    return [started(), *(step(number, float(number)) for number in range(1, steps + 1)), Finished(step=steps, time=9.0)]


def verdicts(ours: Sequence[Event], theirs: Sequence[Event] | None = None) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in run_verdicts(ours, theirs or whole(), 5, 1e-5)}


def test_a_step_that_was_taken_again_counts_as_it_was_taken_last() -> None:
    ours = whole()
    again = [*ours[:3], step(2, 2.5, loss=9.0), step(2, 2.7), *ours[3:]]
    assert all(verdict.passed for verdict in verdicts(again).values())
    wrong = [*ours[:3], step(2, 2.5, loss=9.0), *ours[3:]]
    assert [name for name, verdict in verdicts(wrong).items() if not verdict.passed] == ["loss"]
    assert "in step 2" in verdicts(wrong)["loss"].message


@pytest.mark.parametrize(
    ("change", "failing", "words"),
    [
        (lambda events: [event for event in events if getattr(event, "step", 0) != 3], "batches", "step 3 has no record in the disturbed"),
        (lambda events: [*events, step(4, 4.0, digest="other")], "batches", "step 4 read other tokens"),
        (lambda events: [*events, step(4, 4.0, loss=3.6 * (1 + 2e-5))], "loss", "2.0e-05 apart at most, in step 4; accepted 1e-05"),
        (lambda events: events[:-1], "disturbed run", "did not reach the last step"),
        (lambda events: [*events, WorkerFailed(rank=1, reason="out of luck")], "disturbed run", "out of luck"),
        (lambda events: [started(), Finished(step=5)], "loss", "no step to compare"),
    ],
)  # fmt: skip
def test_every_difference_is_told(change: Any, failing: str, words: str) -> None:
    assert all(verdict.passed for verdict in verdicts(whole()).values())
    found = verdicts(change(whole()))
    assert not found[failing].passed and words in found[failing].message


def test_a_step_left_out_by_one_run_alone_is_a_difference() -> None:
    skipped = StepSkipped(step=3, samples=24, loss=float("nan"), grad_norm=float("nan"), in_a_row=1)
    ours = [*whole(), skipped]
    assert "step 3 was skipped in the disturbed run only" in verdicts(ours)["batches"].message
    assert all(verdict.passed for verdict in verdicts(ours, [*whole(), skipped]).values())


def test_each_fault_finds_what_was_noticed_of_it() -> None:
    text = (
        "kill rank=3 step=2; hang rank=1 step=3; corrupt rank=2 step=4; nan rank=0 step=5; kill node=1 step=6; slow rank=2 x3 from=7; "
        "fill-disk from=8 for=2s; drop-link 0-1 step=9 for=1s; kill rank=9 step=10"
    )
    faults = parse(text)
    events: list[Event] = [
        injected(faults[0], 10.0),
        FailureNoticed(time=10.1, number=1, cause="died", message="rank 3 died", rank=3),
        recovered(1, 10.7, lost=1),
        injected(faults[1], 20.0),
        FailureNoticed(time=26.0, number=2, cause="hung", message="rank 1 is inside the data loader", rank=1),
        recovered(2, 26.5),
        injected(faults[2], 30.0),
        Corrupted(time=30.2, step=4, rank=2, what="weights", message="rank 2 disagrees"),
        FailureNoticed(time=30.3, number=3, cause="corrupt", message="rank 2 disagrees", rank=2),
        recovered(3, 31.0),
        injected(faults[3], 40.0),
        NotFinite(time=40.2, step=5, rank=0, layer="blocks.0", message="rank 0, blocks.0"),
        step(6, 40.9),
        injected(faults[4], 50.0),
        FailureNoticed(time=52.5, number=4, cause="node lost", message="node 1 is gone", node=1),
        recovered(4, 54.0, {"data": 2}),
        injected(faults[5], 60.0),
        Straggling(time=63.0, step=9, rank=2, node=1, factor=3.0, message="rank 2 is slow"),
        injected(faults[6], 70.0),
        SaveFailed(time=71.0, step=10, path="x", reason="No space left on device"),
        injected(faults[7], 80.0),
    ]  # fmt: skip
    found = fault_outcomes(faults, events)
    noticed = [None if strike.noticed is None else round(strike.noticed, 3) for strike in found]
    assert noticed == [0.1, 6.0, 0.2, 0.2, 2.5, 3.0, 1.0, None, None]
    after = [None if strike.recovered is None else round(strike.recovered, 3) for strike in found]
    assert after == [0.7, 6.5, 1.0, 0.9, 4.0, None, None, None, None]
    assert [strike.steps_lost for strike in found][:2] == [1, 0] and found[1].message == "rank 1 is inside the data loader"
    assert all(strike.passed for strike in found) and found[8].step is None
    told = {verdict.name: verdict for verdict in outcome_verdicts(found)}
    assert told["faults injected"].message == "8 of 9; their target was missing: kill rank=9 step=10" and told["noticed"].passed
    assert not same_layout([started(), *events]) and same_layout([started(), recovered(1, 1.0)])


@pytest.mark.parametrize(
    "noticed",
    [
        [],
        [FailureNoticed(time=11.0, number=1, cause="died", message="", rank=2)],
        [FailureNoticed(time=9.0, number=1, cause="died", message="", rank=3)],
    ],
)
def test_a_fault_that_nobody_noticed_or_that_was_blamed_on_another_does_not_pass(noticed: list[Event]) -> None:
    (fault,) = parse("kill rank=3 step=2")
    (strike,) = fault_outcomes([fault], [injected(fault, 10.0), *noticed])
    assert not strike.passed and strike.step == 2
    assert not next(verdict for verdict in outcome_verdicts([strike]) if verdict.name == "noticed").passed


def test_a_fault_whose_record_was_lost_is_known_by_the_file_that_it_leftovers(tmp_path: Path) -> None:
    faults = parse("raise rank=0 step=1; kill rank=3 step=2")
    struck, before = FaultClaims(tmp_path), time.time()
    assert struck.claim(1) and not struck.claim(1)
    died = FailureNoticed(time=time.time() + 0.5, number=1, cause="died", message="rank 3 died", rank=3)
    never, lost = fault_outcomes(faults, [died], struck.times())
    assert never.step is None and lost.step == 2 and lost.noticed is not None and 0.4 < lost.noticed < 0.6
    assert before <= struck.times()[1] <= died.time


def test_what_ends_by_itself_may_pass_unseen() -> None:
    faults = parse("hang rank=0 step=1 for=1s; slow rank=0 x2 from=2; drop-link 0-1; fill-disk; freeze rank=1 step=3 for=20s")
    found = fault_outcomes(faults, [injected(fault, float(number)) for number, fault in enumerate(faults)])
    assert [strike.passed for strike in found] == [True, True, True, True, False]


def test_a_strike_into_a_recovery_is_that_ones() -> None:
    (fault,) = parse("kill rank=3 step=2")
    (strike,) = fault_outcomes([fault], [injected(fault, 10.0), recovered(1, 10.3)])
    assert strike.passed and strike.recovered == pytest.approx(0.3) and "recovered from failure 1" in strike.message


def test_the_standard_campaign_has_every_kind_at_every_point() -> None:
    found = chaos_campaign.campaign(tiny_run())
    assert {fault.kind for fault in found.faults} == {
        "kill", "hang", "slow", "corrupt", "nan", "raise", "freeze", "fill-disk", "drop-link",
    }  # fmt: skip
    assert {fault.point for fault in found.faults if fault.kind in ("kill", "hang")} == {
        "data", "compute", "collective", "update", "save", "evaluate",
    }  # fmt: skip
    run = found.run
    assert (run.layout.ranks, run.cluster.nodes, run.steps) == (4, 2, 80) and not check(found.faults, 4, 2, 80)
    assert loads(dump(run)) == run and not check_run(run)
    assert sum(fault.step > 70 for fault in found.faults) >= 1  # the last ones are late


def test_random_campaigns_and_layouts_without_replicas() -> None:
    found = chaos_campaign.campaign(tiny_run(), faults=100, seed=4)
    assert len(found.faults) == 100 and found.run.steps == 500
    assert found.faults == chaos_campaign.campaign(tiny_run(), faults=100, seed=4).faults
    alone = chaos_campaign.campaign(tiny_run("layout.tensor=2", "layout.pipeline=2"), faults=30)
    assert alone.run.layout.ranks == 4 and "corrupt" not in {fault.kind for fault in alone.faults}
    assert any("corruption" in sentence for sentence in alone.notes)
    for options, words in (
        ({"steps": 20}, "needs 80"),
        ({"steps": 20, "faults": 20}, "does not fit"),
    ):
        with pytest.raises(RunError, match=words):
            chaos_campaign.campaign(tiny_run(), **options)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="3, which does not divide"):
        chaos_campaign.campaign(tiny_run("model.heads=6", "model.kv_heads=3", "model.dim=48", "layout.tensor=3"))


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs a program in place of the command."""

    def start(program: str, limit: float = 30.0) -> chaos_campaign.TrainedRun:
        popen = chaos_campaign.subprocess.Popen
        monkeypatch.setattr(
            chaos_campaign.subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", program], **options)
        )
        try:
            return chaos_campaign.train_command(tmp_path / "run.toml", tmp_path / "side", (), limit)
        finally:
            monkeypatch.setattr(chaos_campaign.subprocess, "Popen", popen)

    adopt_orphans()
    yield start
    ctypes.CDLL(None).prctl(36, 0)  # PR_SET_CHILD_SUBREAPER: other tests' orphans are none of this process's business


def test_what_outlives_a_run_is_found_named_and_ended(pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_campaign, "_EXIT_GRACE", 0.3)
    (tmp_path / "side" / "checkpoints").mkdir(parents=True)
    (tmp_path / "side" / "checkpoints" / "step-1.partial").touch()
    orphan = "import subprocess; subprocess.Popen(['sh', '-c', 'sleep 61 & sleep 62'], start_new_session=True)"
    side = pretend(orphan)
    assert side.code == 0 and len(side.leftovers) == 2
    assert "sleep 62" in side.leftovers[0] and side.leftovers[1] == "checkpoints/step-1.partial, incomplete"
    assert not chaos_campaign._children() & {int(side.leftovers[0].split()[1])}
    verdict = chaos_campaign._leftovers(side)
    assert not verdict.passed and "incomplete" in verdict.message


def test_a_run_that_does_not_end_is_ended(pretend: Any) -> None:
    side = pretend("print('begun', flush=True); import time; time.sleep(60)", limit=0.5)
    assert side.code is None and not side.leftovers


def test_processes_that_are_just_ending_are_waited_for(pretend: Any) -> None:
    side = pretend("import subprocess; subprocess.Popen(['sleep', '0.4'], start_new_session=True)")
    assert side.code == 0 and not side.leftovers and os.getpid() not in chaos_campaign._children()


def test_the_report_shows_every_fault_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    planned = replace(chaos_campaign.campaign(tiny_run()), faults=parse("kill rank=3 step=2; kill rank=1 step=3"))
    report = chaos_campaign.CampaignReport(
        campaign=planned,
        verdicts=(Verdict(name="batches", passed=True, message="the same tokens"),),
        outcomes=(
            FaultOutcome(fault="kill rank=3 step=2", kind="kill", step=2, noticed=0.1, recovered=0.7, message="rank 3 died"),
            FaultOutcome(fault="kill rank=1 step=3", kind="kill"),
        ),
        recoveries=1,
        steps_lost=1,
        seconds=(5.0, 12.0),
    )
    assert report.passed
    show_campaign(Console(width=160), report)
    shown = capsys.readouterr().out
    for words in ("DP4: 4 CPU ranks as 2 nodes, 80 steps, 2 faults", "kill rank=3 step=2", "0.70 s", "rank 3 died", "not injected",
                  "kill: detected after 0.10 s (median of 1)", "the same tokens", "1 recoveries, 1 steps repeated", "passed"):  # fmt: skip
        assert words in shown
    assert not replace(report, verdicts=(Verdict(name="loss", passed=False, message="apart"),)).passed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--faults", "3"], "add --chaos"),
        (["--chaos", "--layouts", "all"], "do not apply"),
        (["--chaos", "--steps", "9"], "80"),
    ],
)
def test_options_that_do_not_go_together_are_told(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TINY)
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "run.toml"), *arguments])
    assert isinstance(done.exception, RunError) and words in str(done.exception)
