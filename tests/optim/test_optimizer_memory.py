"""How much memory a process with its states in files really takes: measured from outside, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.checkpointing.format import BLOCK

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from phalanx.checkpointing.restore import load
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.checkpointing.storage import at
from phalanx.checkpointing.save import Saver
from phalanx.accelerator import resident_bytes
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.spec.plan import Place
from phalanx.spec.run import Memory, Optimizer as Spec
from phalanx.optim.optimizer import Optimizer
from phalanx.optim.param_optimizer import Resources

offload, tensors, buffer, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
torch.set_num_threads(1)
mesh = Mesh(Place(), torch.device("cpu"))

def most():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024

def forget():
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

def held(count, shape=(1024, 1024)):
    found = []
    for number in range(count):
        value = nn.Parameter(torch.full(shape, 0.01))
        found.append(OwnedParam(f"p{number}", value, ParamShard.full(value), torch.full(shape, 1e-3)))
    return found

def live(where, count):
    some = held(count)
    memory = Memory(offload=offload, offload_buffer=buffer)
    optimizer = Optimizer(some, Spec(), memory=memory, mesh=mesh, resources=Resources(where))
    for _ in range(3):
        optimizer.step(1e-3, torch.tensor(1.0), torch.tensor(0.0))
    stepped = most()
    pieces = {name: StateTensor(state, TensorSlice.full(state.shape)) for name, state in optimizer.state().items()}
    (ended,) = Saver(at(where / "checkpoints"), mesh).save(3, pieces, wait=True)
    assert ended.failure is None, ended.failure
    load(Path(ended.path), pieces)
    optimizer.adopt()
    reached = most()
    forget()
    optimizer.step(1e-3, torch.tensor(1.0), torch.tensor(0.0))
    files = optimizer.bytes().files
    optimizer.close()
    peaks = {"stepped": stepped, "saved and loaded": reached, "resumed": most()}
    return peaks, {"files": files, "sum": sum(one.value.double().sum().item() for one in some)}

live(folder / "first", 1)  # what every process needs once
forget()
before = resident_bytes()
peaks, found = live(folder / "second", tensors)
print(json.dumps(found | {what: peak - before for what, peak in peaks.items()}))
"""

MODEL = 4 << 20  # bytes of one tensor of the model


def measured(offload: str, tensors: int, buffer: int, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, offload, str(tensors), str(buffer), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("tensors", [16, 36])
def test_memory_of_a_process_with_offloaded_states_is_model_gradients_and_buffer(tensors: int, tmp_path: Path) -> None:
    buffer, slack = 8, 2 << 20
    away = measured("nvme", tensors, buffer, tmp_path / "nvme")
    model = tensors * MODEL
    assert away["files"] >= 3 * model
    held = 2 * model + (buffer << 20)  # values and gradients
    assert away["stepped"] < held + slack
    # Saving and loading pass through a few blocks of a file, however large the states and however many.
    assert away["saved and loaded"] < held + 6 * BLOCK
    assert away["resumed"] < held + slack
    # The same measurement sees states that are in memory, and the same numbers come out.
    here = measured("none", tensors, buffer, tmp_path / "none")
    assert here["stepped"] > 4 * model - slack
    assert here["sum"] == away["sum"]
