"""Saves behind training on a GPU: what is written is the state of the moment, though the next step runs while it is copied."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU: there is no nvidia-smi here"),
]

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.parallel.mesh import connect
from phalanx.planning.planner import choose
from phalanx.host.probe import probe
from phalanx.spec.load import loads
from phalanx.spec.plan import Place
from phalanx.training.trainer import Trainer

folder, settings = Path(sys.argv[1]), sys.argv[2:]
run = loads('''
[model]
dim = 512
layers = 8
heads = 8
[data]
eval_fraction = 0.0
[train]
batch = 8
micro_batch = 4
sequence_length = 256
steps = 12
[checkpoint]
every = 2
keep_last = 20
''', overrides=settings)
plan = choose(run, probe())
trainer = Trainer(run, plan, connect(Place(), plan.device, 60), folder)
trainer.build()
at = {}
events = []
saving = trainer.checkpointer.save

def save(progress, tensors, *, wait):
    at[progress.step] = {name: one.tensor.detach().cpu().clone() for name, one in tensors.items()}
    return saving(progress, tensors, wait=wait)

trainer.checkpointer.save = save
for event in trainer.events():
    events.append(event)
wrong = []
for step, state in at.items():
    saved = CheckpointReader(folder / f"step-{step:08d}")
    wrong += [f"{step} {name}" for name, tensor in state.items() if not torch.equal(saved.read(name), tensor)]
stalls = [event.stall for event in events if event.kind == "saved"]
losses = {event.step: event.loss for event in events if event.kind == "step"}
again = Trainer(run, plan, connect(Place(), plan.device, 60), folder)
again.build()
again.restore(folder / "step-00000006")
resumed = {step.step: step.loss for step in (again.step() for _ in range(4))}
again.close()
print(json.dumps({"wrong": wrong, "saves": len(at), "stalls": stalls, "device": str(trainer.mesh.device), "losses": losses, "resumed": resumed}))
"""


@pytest.mark.parametrize(
    "settings", [(), ("memory.offload=cpu",), ("checkpoint.async_save=false",), ("precision.compute=fp32",)]
)
def test_each_save_holds_the_state_of_its_moment(
    settings: tuple[str, ...], tmp_path: Path, gpu_environment: dict[str, str]
) -> None:
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), *settings]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=gpu_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"].startswith("cuda")
    assert found["wrong"] == []
    assert found["saves"] == 6
    # The GPU adds in no fixed order in a backward, so not to the bit.
    for step, loss in found["resumed"].items():
        assert loss == pytest.approx(found["losses"][step], abs=2e-2)
