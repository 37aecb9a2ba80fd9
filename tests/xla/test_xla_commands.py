"""`phalanx train` with the XLA engine: a killed run goes on with the other engine and another layout, and ends as an unbroken one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Workshop, losses
from xla_engine import needs_xla

from phalanx.events.records import Evaluated, StepCompiled

pytestmark = [needs_xla, pytest.mark.slow]


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    made = Workshop(tmp_path / "shop")
    yield made
    made.close()


def test_a_killed_run_goes_on_with_the_other_engine(workshop: Workshop) -> None:
    plain = workshop.run("train", "tiny.toml", "--run-dir", "plain")
    assert plain.code == 0, plain
    on_four = ("cluster.cpu_ranks=4", "layout.shard=2", "layout.tensor=2")
    started = workshop.start("train", "tiny.toml", "engine.name=xla", *on_four, "--run-dir", "broken")
    started.until(workshop.reached("broken", 5), "step 5")
    started.process.kill()
    started.process.wait()
    ended = workshop.run("train", "tiny.toml", "--run-dir", "broken")
    assert ended.code == 0, ended
    whole, broken = workshop.events("plain"), workshop.events("broken")
    assert len([event for event in broken if isinstance(event, StepCompiled)]) == 1
    # Steps after the checkpoint of step 4 were taken twice.
    found = {step: (loss, digest) for step, loss, digest in losses(broken)}
    for step, loss, digest in losses(whole):
        assert found[step] == (pytest.approx(loss, rel=1e-5), digest)
    evaluated = [[event.loss for event in events if isinstance(event, Evaluated)][-1] for events in (whole, broken)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    assert workshop.run("checkpoint", "verify", "broken/checkpoints/step-00000008").code == 0


def test_an_xla_run_resumes_generates_and_stops_on_request(workshop: Workshop) -> None:
    arguments = ("train", "tiny.toml", "engine.name=xla", "cluster.cpu_ranks=2", "data.cache=cache", "--run-dir", "run")
    started = workshop.start(*arguments, "train.steps=2000")
    started.until(workshop.reached("run", 6), "step 6")
    started.process.terminate()
    stopped = started.wait()
    assert "Stopped and saved" in stopped.out, stopped
    taken = max(step for step, *_ in losses(workshop.events("run")))
    ended = workshop.run(*arguments, f"train.steps={taken + 2}")
    assert ended.code == 0, ended
    assert max(step for step, *_ in losses(workshop.events("run"))) == taken + 2
    other = workshop.run(*arguments[:-1], "other", f"train.steps={taken + 2}")
    assert other.code == 0, other
    compiled = [event for name in ("run", "other") for event in workshop.events(name) if isinstance(event, StepCompiled)]
    assert [event.was_cached for event in compiled] == [False, True, True]  # resumed, and a run of the same shapes
    assert "read from the cache" in ended.shown, ended
    generated = workshop.run("generate", "run", "the", "--tokens", "4")
    assert generated.code == 0, generated
