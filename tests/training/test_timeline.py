"""The recorded timeline of real ranks: complete in every layout, without influence on the mathematics, with planted delays in the right place."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks, tiny_run, tiny_trainer

from phalanx.events.fault_log import FaultClaims
from phalanx.events.timeline_files import read_timeline
from phalanx.faults.grammar import parse
from phalanx.observe.comm_timer import COMM_TIMER
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.training.hooks.rank_faults import RankFaults
from phalanx.watch.late_ranks import diagnose
from phalanx.watch.step_timeline import load_timeline

LAYOUTS = {
    "data": Layout(data=2),
    "zero2": Layout(data=1, shard=2, zero=2),
    "zero3": Layout(data=1, shard=2, zero=3),
    "sequence": Layout(data=1, tensor=2, sequence=True),
    "context": Layout(data=1, context=2),
    "pipeline": Layout(data=1, pipeline=2),
}


def trained(mesh: Mesh, folder: Path, timeline: bool, chaos: str = "", steps: int = 4) -> list[float]:
    run = tiny_run(f"watch.timeline={str(timeline).lower()}", f"train.steps={steps}")
    trainer = tiny_trainer(mesh, run, folder / "checkpoints")
    if chaos:
        done = FaultClaims(folder)
        trainer.hooks.add(RankFaults(parse(chaos), rank=mesh.rank, done=done, report=lambda event: None))
    with trainer:
        trainer.restore()
        losses = []
        while not trainer.finished:
            record = trainer.step()
            assert record is not None
            losses.append(record.loss)
    assert COMM_TIMER.timeline is None
    return losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_collective_of_a_step_is_recorded_by_all_its_ranks(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    with_timeline = run_ranks(trained, 2, tmp_path, True, layout=layout)
    if name in ("data", "pipeline"):
        assert with_timeline == run_ranks(trained, 2, tmp_path / "plain", False, layout=layout)
        assert not (tmp_path / "plain" / "timeline").exists()
    recorded = read_timeline(tmp_path)
    assert [(found.record.step, found.author.rank) for found in recorded] == [
        (step, rank) for step in (1, 2, 3, 4) for rank in (0, 1)
    ]
    timeline = load_timeline(tmp_path, 2)
    for ranks in timeline.steps.values():
        first, second = (
            {
                (c.group, c.number): ("message" if c.operation in ("send", "receive") else c.operation, c.label)
                for c in ranks[rank].calls
            }
            for rank in (0, 1)
        )
        assert first == second, "both ranks name the same collectives in the same order"
        for step in ranks.values():
            phases = [span for span in step.spans if span.kind == "phase"]
            assert {"loading", "compute", "reduce", "optimizer"} <= {span.name for span in phases}
            inside = sum(min(span.end, step.end) - max(span.begin, step.begin) for span in phases if span.end > step.begin)
            assert inside == pytest.approx(step.end - step.begin, abs=1e-3), "phases cover a step without gaps"
            for call in step.calls:
                assert call.arrived <= call.begin <= call.end
            work = [span.name for span in step.spans if span.kind == "work"]
            if name == "pipeline":
                stage = step.rank
                assert {f"{stage}F{batch}" for batch in range(4)} <= set(work)
            else:
                count = 2 if name in ("data", "zero2", "zero3") else 4
                assert [w for w in work if w.startswith("backward")] == [f"backward {batch}" for batch in range(count)]
    uses = {meeting.group.use for meeting in timeline.meetings}
    assert {"sequence": "tensor", "context": "context", "pipeline": "pipeline"}.get(name, "all ranks") in uses


@pytest.mark.parametrize(
    ("chaos", "phase"),
    [("delay rank=1 in=data for=250ms from=2", "loading"), ("delay rank=1 in=collective for=250ms", "compute")],
)
def test_a_planted_delay_is_named(chaos: str, phase: str, tmp_path: Path) -> None:
    run_ranks(trained, 2, tmp_path, True, chaos, 9, layout=Layout(data=2))
    late = diagnose(load_timeline(tmp_path, 3)).late[0]
    assert (late.rank, late.phase) == (1, phase) and late.own > late.others
    assert late.share_of_steps > 0.5
