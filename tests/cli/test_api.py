"""`import phalanx as px`: the verbs for programs, in programs of their own."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from commands import FinishedRuns, StepLosses, Workshop

import phalanx as px
from phalanx.events.records import Finished, Saved, Step
from phalanx.launch.prepare import Request, prepare
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Run, Train


@pytest.fixture
def run(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(workshop.path)
    monkeypatch.setenv("PHALANX_TEST_MARK", workshop.mark)
    return px.load("tiny.toml", ["train.steps=3", "layout.data=2"])


def test_import_of_the_package_loads_nothing_heavy(workshop: Workshop) -> None:
    code = "import phalanx, sys; print(sorted({'torch', 'numpy', 'rich', 'phalanx.api'} & sys.modules.keys()))"
    assert workshop.run("-c", code, program=[sys.executable]).shown == "[]\n"


def test_package_exports_its_functions() -> None:
    for name in px.__all__:
        assert getattr(px, name) is not None
    with pytest.raises(AttributeError, match="trian"):
        _ = px.trian


def test_api_load(run: Run) -> None:
    assert isinstance(run, Run)
    assert (run.steps, run.layout.data, run.model.dim, run.model.vocab) == (3, 2, 32, 257)
    with pytest.raises(RunError) as caught:
        px.load("tiny.toml", ["train.stps=3", "train.batch=0"])
    assert len(caught.value.problems) == 2


def test_api_plan(run: Run) -> None:
    plan = px.plan(run)
    assert (plan.ranks, plan.micro_batch, plan.accumulation, plan.device) == (2, 2, 2, "cpu")
    assert "2 CPU ranks" in plan.explain() and "2 × micro-batch of 2" in plan.explain() and "fp32" in plan.explain()


def test_api_checks_runs_made_in_python() -> None:
    bad = Run(train=Train(batch=8, steps=-1, sequence_length=32))
    half = Run(model=ModelSpec(dim=32, heads=5), train=Train(batch=8, steps=5, sequence_length=32))
    for verb in (px.plan, px.train, px.trainer):
        with pytest.raises(RunError, match=r"train\.steps = -1"):
            verb(bad)
        with pytest.raises(RunError, match=r"model\.heads = 5"):
            verb(half)
    # What the loader would fill in is filled in.
    whole = Run(model=ModelSpec(dim=32, heads=2), train=Train(batch=8, steps=5, sequence_length=32))
    assert px.plan(whole).parameters == replace(whole.model, vocab=257).parameters()


def can_go_on(run: Run) -> bool:
    """Whether a launch could go on in the directory "job"; one that is held, by this process or another, is refused."""
    prepared = prepare(run, "any", Request(directory=Path("job")))
    prepared.rundir.release()
    return prepared.resumes


def test_api_train(run: Run, finished: FinishedRuns, losses: StepLosses) -> None:
    job = px.train(run, run_dir="job")
    events = list(job.events())
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2, 3]
    assert isinstance(events[-1], Finished)
    assert (job.exit_code, job.failure) == (0, None)
    settled = replace(run, memory=replace(run.memory, recompute="none", offload="none"))  # left out, and not needed
    assert px.load("job/run.toml") == settled
    assert losses(events) == losses(finished(2).workshop.events(finished(2).path))[:3]
    assert can_go_on(run), "the directory is still held"


def test_api_job_stops_and_reports_failure(run: Run, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job: told to stop it saves; sabotaged, its failure is raised."""
    long = replace(run, train=replace(run.train, steps=5000))
    job = px.train(long, name="long")
    seen = []
    for event in job.events():
        seen.append(event)
        if isinstance(event, Step) and event.step == 5:
            job.stop()
    assert job.exit_code == 75
    assert [event for event in seen if isinstance(event, Saved)][-1].step == max(e.step for e in seen if isinstance(e, Step))
    monkeypatch.setenv(
        "PYTHONPATH",
        workshop.sabotage("from phalanx.training import run_loop\ndel run_loop.RunLoop.step")["PYTHONPATH"],
    )
    job = px.train(long, name="long")
    with pytest.raises(RunFailed, match="AttributeError: 'Trainer' object has no attribute 'step'"):
        for _ in job.events():
            pass
    assert job.exit_code == 1
    assert job.failure is not None and "Traceback" in job.failure.traceback


def test_api_abandoned_job_ends(run: Run, workshop: Workshop) -> None:
    """A program that stops listening takes its workers with it, and the directory is free."""
    job = px.train(replace(run, train=replace(run.train, steps=5000)), run_dir="job")
    with pytest.raises(RunError, match="in use"):
        can_go_on(run)
    events = job.events()
    next(events)
    events.close()
    assert workshop.gone()
    assert not can_go_on(run), "nothing was saved"


def test_api_trainer_steps_in_this_process(workshop: Workshop, finished: FinishedRuns) -> None:
    code = """
        import json, phalanx as px
        trainer = px.trainer(px.load("tiny.toml"), checkpoints="ckpt")
        records = [trainer.step() for _ in range(4)]
        saved = trainer.save()
        again = px.trainer(px.load("tiny.toml"), checkpoints="ckpt")
        again.restore()
        records += [again.step() for _ in range(4)]
        evaluated = again.evaluate()
        trainer.close(); again.close()
        print(json.dumps({"losses": [r.loss for r in records], "eval": evaluated.loss, "saved": saved.path}))
    """
    ended = workshop.run("-c", textwrap.dedent(code), program=[sys.executable, "-W", "error"])
    assert ended.code == 0, ended
    result = json.loads(ended.shown)
    straight = [event.loss for event in finished(1).workshop.events(finished(1).path) if isinstance(event, Step)]
    assert result["losses"] == straight, "stepping by hand, with a restored trainer half-way, is not the same training"
    assert result["eval"] == finished(1).ended.json["eval_loss"]
    assert result["saved"] == "ckpt/step-00000004"
