"""States off the GPU: masters and moments in locked memory and in a file follow those on the GPU."""

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
from torch import nn
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.spec.plan import Place
from phalanx.spec.run import Memory, Optimizer as Spec, Precision
from phalanx.optim.optimizer import Optimizer
from phalanx.optim.optimizer import Resources

mesh = Mesh(Place(), torch.device("cuda", 0))

def held():
    dice = torch.Generator().manual_seed(1)
    found = []
    for name, shape in {"a": (37,), "b": (3001, 503), "c": (3,), "d": (50021, 7)}.items():
        value = nn.Parameter(torch.randn(shape, generator=dice).cuda())
        found.append(OwnedParam(name, value, ParamShard.full(value)))
    return found

def run(offload, moments, gradients):
    some, memory = held(), Memory(offload=offload, offload_buffer=8)
    optimizer = Optimizer(some, Spec(eps=1e-4), precision=Precision(optimizer=moments), memory=memory, mesh=mesh, resources=Resources(Path(sys.argv[1])))
    dice = torch.Generator("cuda").manual_seed(2)
    for step in range(6):
        for one in some:
            one.gradient = torch.randn(one.value.shape, generator=dice, device="cuda").to(gradients)
        bad = torch.tensor(float(step == 3), device="cuda")
        optimizer.step(0.01, torch.tensor(1.7, device="cuda"), bad)
    states = {name: (state if isinstance(state, torch.Tensor) else state.read()).float().cpu() for name, state in optimizer.state().items()}
    found = states | {one.name: one.value.detach().cpu() for one in some}
    applied, size = optimizer.applied, optimizer.bytes()
    optimizer.close()
    return found, applied, (size.device, size.host, size.files)

results = []
for moments in ("fp32", "bf16"):
    for gradients in (torch.float32, torch.bfloat16):
        here, _, _ = run("none", moments, gradients)
        for offload in ("cpu", "nvme"):
            away, applied, size = run(offload, moments, gradients)
            worst = max(((away[name] - here[name]).norm() / here[name].norm().clamp(min=1e-9)).item() for name in here)
            results.append([offload, moments, str(gradients), worst, applied, size])
print(json.dumps(results))
"""


def test_masters_and_moments_off_the_gpu_follow_those_on_it(tmp_path: Path, gpu_environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=gpu_environment)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 8
    for offload, moments, _, worst, applied, (device, host, files) in results:
        # The GPU's kernel and the CPU's round differently; a moment in bf16 may be rounded to its other neighbour.
        assert worst < (1e-5 if moments == "fp32" else 5e-3), (offload, moments, worst)
        assert device == 0
        assert (host > 0) == (offload == "cpu")
        assert (files > 0) == (offload == "nvme")
        assert ("locked memory" if offload == "cpu" else str(tmp_path)) in applied
