"""Timelines of ranks on a GPU: times are the device's, and a planted delay is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.watch.late_ranks import diagnose
from phalanx.watch.step_timeline import StepTimeline, load_timeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU: there is no nvidia-smi here"),
]


def timeline_of(folder: Path, environment: dict[str, str], *words: str) -> StepTimeline:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = Path(__file__).with_name("timeline_ranks.py")
    command = [*torchrun, str(program), str(folder), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads(done.stdout.splitlines()[-1])["losses"]
    assert losses[-1] < losses[0]
    return load_timeline(folder, 3)


@pytest.mark.parametrize("technique", ["data", "tensor", "pipeline"])
def test_steps_of_two_ranks_on_one_gpu(technique: str, tmp_path: Path, gpu_environment: dict[str, str]) -> None:
    timeline = timeline_of(tmp_path, gpu_environment, technique)
    assert len(timeline.steps) >= 11
    for ranks in timeline.steps.values():
        for step in ranks.values():
            phases = {span.name: span for span in step.spans if span.kind == "phase"}
            assert {"loading", "compute", "reduce", "optimizer"} <= phases.keys()
            # The device begins when the host has launched, and ends before the host has read the result.
            assert phases["compute"].begin >= step.begin - 1e-3 and phases["compute"].end <= step.end + 1e-3
            assert phases["compute"].begin <= phases["reduce"].begin <= phases["optimizer"].begin
            assert all(call.arrived <= call.begin + 1e-5 and call.begin <= call.end for call in step.calls)
    assert timeline.meetings and {len(meeting.calls) for meeting in timeline.meetings} == {2}


def test_a_planted_delay_is_named(tmp_path: Path, gpu_environment: dict[str, str]) -> None:
    timeline = timeline_of(tmp_path, gpu_environment, "data", "delay rank=1 in=data for=100ms from=2")
    late = diagnose(timeline).late[0]
    assert (late.rank, late.phase) == (1, "loading") and late.seconds > 0.05 and late.share_of_steps > 0.8
