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
from phalanx.checkpointing.location import Local
from phalanx.checkpointing.save import Saver
from phalanx.accelerator import resident_bytes
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.spec.plan import Place
from phalanx.spec.run import Memory, Optimizer as Spec
from phalanx.optim.optimizer import Optimizer
from phalanx.optim.optimizer import Resources

offload, tensors, buffer, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
torch.set_num_threads(1)
mesh = Mesh(Place(), torch.device("cpu"))

def most():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024

def forget():
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

def params(count, shape=(1024, 1024)):
    owned = []
    for number in range(count):
        value = nn.Parameter(torch.full(shape, 0.01))
        owned.append(OwnedParam(f"p{number}", value, ParamShard.full(value), torch.full(shape, 1e-3)))
    return owned

def live(where, count):
    some = params(count)
    made = resident_bytes()  # of the values and gradients themselves; a kernel may round them up to larger pages
    memory = Memory(offload=offload, offload_buffer=buffer)
    optimizer = Optimizer(some, Spec(), memory=memory, mesh=mesh, resources=Resources(where))
    for _ in range(3):
        optimizer.step(1e-3, torch.tensor(1.0), torch.tensor(0.0))
    stepped = most()
    pieces = {name: StateTensor(state, TensorSlice.full(state.shape)) for name, state in optimizer.state().items()}
    (ended,) = Saver(Local(where / "checkpoints"), mesh).save(3, pieces, wait=True)
    assert ended.kind == "saved", ended
    load(Path(ended.path), pieces)
    optimizer.adopt()
    reached = most()
    forget()
    optimizer.step(1e-3, torch.tensor(1.0), torch.tensor(0.0))
    files = optimizer.bytes().files
    optimizer.close()
    peaks = {"stepped": stepped, "saved and loaded": reached, "resumed": most()}
    added = {what: peak - made for what, peak in peaks.items()}
    return added | {"files": files, "sum": sum(param.value.double().sum().item() for param in some)}

live(folder / "first", 1)  # what every process needs once
forget()
print(json.dumps(live(folder / "second", tensors)))
"""

MODEL = 4 << 20  # bytes of one tensor of the model


def measured(offload: str, tensors: int, buffer: int, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, offload, str(tensors), str(buffer), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("tensors", [16, 36])
def test_offloaded_states_add_no_more_than_the_buffer_to_the_memory_of_a_process(tensors: int, tmp_path: Path) -> None:
    buffer, slack = 8 << 20, 2 << 20
    model = tensors * MODEL
    offloaded = measured("nvme", tensors, buffer >> 20, tmp_path / "nvme")
    assert offloaded["files"] >= 3 * model
    assert offloaded["stepped"] < buffer + slack
    # Saving and loading pass through a few blocks of a file, however large the states and however many.
    assert offloaded["saved and loaded"] < buffer + 6 * BLOCK
    assert offloaded["resumed"] < buffer + slack
    # The same measurement sees states that are in memory, and the same values come out.
    resident = measured("none", tensors, buffer >> 20, tmp_path / "none")
    assert resident["stepped"] > 2 * model - slack
    assert resident["sum"] == offloaded["sum"]
