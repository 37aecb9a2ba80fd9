"""CUDA graphs on a GPU: a run with them takes the steps of a run without, whether documents are masked or not, and goes back to plain launches."""

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
from phalanx.host.probe import this_machine
from phalanx.parallel.mesh import connect
from phalanx.planning.planner import plan_run
from phalanx.launch.model_check import measure
from phalanx.spec.load import loads
from phalanx.spec.plan import Place
from phalanx.training.trainer import Trainer

text = '''
[model]
dim = 256
layers = 4
heads = 4
[train]
batch = 8
micro_batch = 8
sequence_length = 256
steps = 12
[optimizer]
learning_rate = 1e-3
[checkpoint]
save = false
[data]
document_mask = %s
[memory]
cuda_graphs = %s
'''
run = loads(text % tuple(sys.argv[2:]))
planned = plan_run(run, this_machine(), 1, measure(run))
trainer = Trainer(planned.run, planned.plan, connect(Place(), planned.plan.device, 60), Path(sys.argv[1]))
trainer.build()
trainer.load_initial_weights()
losses = [event.loss for event in trainer.train() if event.kind == "step"]
records = [] if trainer.stepper._graphs is None else list(trainer.stepper._graphs._records)
print(json.dumps({"losses": losses, "records": records, "applied": list(trainer.sharded.applied)}))
"""


@pytest.mark.parametrize("mask", ["true", "false"])
def test_a_run_with_graphs_takes_the_same_steps(mask: str, tmp_path: Path, gpu_environment: dict[str, str]) -> None:
    found = {}
    for graphs in ("true", "false"):
        words = [sys.executable, "-c", PROGRAM, str(tmp_path / graphs), mask, graphs]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=gpu_environment)
        assert done.returncode == 0, done.stdout + done.stderr
        found[graphs] = json.loads(done.stdout.splitlines()[-1])
        assert "stream does not match" not in done.stderr
    with_graphs, without = found["true"], found["false"]
    assert with_graphs["records"] and not without["records"]
    assert "cuda_graphs" in with_graphs["applied"] and "cuda_graphs" not in without["applied"]
    # The GPU adds in no fixed order in a backward, so not to the bit.
    assert with_graphs["losses"] == pytest.approx(without["losses"], abs=2e-2)
    assert with_graphs["losses"][-1] < with_graphs["losses"][0] - 0.5
