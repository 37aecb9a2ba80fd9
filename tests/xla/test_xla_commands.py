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


TORCH = ("cluster.cpu_ranks=2", "layout.shard=2")
XLA = ("engine.name=xla", "cluster.cpu_ranks=4", "layout.shard=2", "layout.tensor=2")
OTHER_XLA = ("engine.name=xla", "cluster.cpu_ranks=2", "layout.context=2")
ORDERS = {
    "torch, xla, torch": [TORCH, XLA, ()],
    "xla, torch, xla": [XLA, TORCH, OTHER_XLA],
    "xla, xla, torch": [XLA, OTHER_XLA, TORCH],
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_killed_run_goes_on_with_the_other_engine(workshop: Workshop, order: str) -> None:
    """Each of the first two parts is killed after it has saved, by a signal that nothing can handle, and the next has another layout."""
    longer = ("train", "tiny.toml", "train.steps=12", "checkpoint.keep_last=9")
    plain = workshop.run(*longer, "--run-dir", "plain")
    assert plain.code == 0, plain
    *killed, last = ORDERS[order]
    for part, settings in enumerate(killed):
        started = workshop.start(*longer, *settings, "--run-dir", "broken")
        started.until(workshop.reached("broken", 4 * part + 5), f"step {4 * part + 5}")
        started.process.kill()
        started.process.wait()
    ended = workshop.run(*longer, *last, "--run-dir", "broken")
    assert ended.code == 0, ended
    whole, broken = workshop.events("plain"), workshop.events("broken")
    engines = ["xla" if "engine.name=xla" in settings else "torch" for settings in ORDERS[order]]
    assert len([event for event in broken if isinstance(event, StepCompiled)]) == engines.count("xla")
    # Steps after a checkpoint were taken twice.
    found: dict[int, set[tuple[float, str]]] = {}
    for step, loss, digest in losses(broken):
        found.setdefault(step, set()).add((loss, digest))
    for step, loss, digest in losses(whole):
        assert all(other == (pytest.approx(loss, rel=1e-5), digest) for other in found[step]), step
    evaluated = [[event.loss for event in events if isinstance(event, Evaluated)][-1] for events in (whole, broken)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    for step in (4, 8, 12):
        assert workshop.run("checkpoint", "verify", f"broken/checkpoints/step-{step:08d}").code == 0


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
