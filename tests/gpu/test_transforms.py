"""One-device techniques on a GPU: number formats, fp8's kernel against its emulation, recomputation, activations moved beside the
computation, compilation."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU: there is no nvidia-smi here"),
]

START = """
import torch
import torch.nn.functional as F
from dataclasses import replace
from phalanx.models.init import build, materialize
from phalanx.spec.model import PRESETS
from phalanx.transforms import activations, compile, fp8, fp8_numbers, recompute
from phalanx.transforms.precision import computing

GPU = torch.device("cuda")
torch.use_deterministic_algorithms(True, warn_only=True)

def learned(kind, compute, *changes, scale=1.0):
    model = build(replace(PRESETS[kind], vocab=257, dim=256, layers=4, heads=8, ffn=512))
    for change in changes:
        print(change([model]))
    model = materialize(model, 0, GPU)
    tokens = torch.randint(0, 257, (4, 512), generator=torch.Generator().manual_seed(0)).to(GPU)
    positions = torch.arange(512, device=GPU).expand(4, 512)
    for _ in range(2):
        model.zero_grad()
        with computing(compute, GPU):
            logits = model(tokens, positions)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        (loss * scale).backward()
    return {"loss": loss.detach()} | {name: p.grad / scale for name, p in model.named_parameters()}

def distance(one, other):
    whole = torch.stack([other[name].float().norm() for name in other]).norm()
    return (torch.stack([(one[name].float() - other[name].float()).norm() for name in other]).norm() / whole).item()
"""

FORMATS = """
exact = learned("tiny-dense", "fp32")
for compute, scale, limit in (("bf16", 1.0, 0.03), ("fp16", 1024.0, 0.01)):
    assert distance(learned("tiny-dense", compute, scale=scale), exact) < limit
if fp8.available(GPU) is None:
    for scaling in ("tensor", "row"):
        low = learned("tiny-dense", "fp8", lambda parts: fp8.apply(parts, scaling, GPU))
        assert distance(low, exact) < 0.15, distance(low, exact)
        for m, k, n in ((64, 128, 96), (33, 40, 24)):
            a = fp8_numbers.rounded(torch.randn(m, k, device=GPU), fp8_numbers.E4M3, scaling)
            b = fp8_numbers.rounded(torch.randn(n, k, device=GPU), fp8_numbers.E4M3, scaling)
            mine, kernel = fp8._by_emulation(a, b, False).float(), fp8._by_kernel(a, b, False).float()
            assert (mine - kernel).norm() < 5e-3 * mine.norm()
print("agree")
"""

MEMORY = """
for kind in ("tiny-dense", "tiny-moe"):
    plain = learned(kind, "bf16")
    for change in (
        lambda parts: recompute.apply(parts, "full", 1),
        lambda parts: recompute.apply(parts, "selective", 1),
        lambda parts: activations.apply(parts, GPU, 0),
        lambda parts: (recompute.apply(parts, "full", 2), activations.apply(parts, GPU, 0)),
    ):
        assert distance(learned(kind, "bf16", change), plain) < 1e-6
print("agree")
"""

COMPILED = """
said = []
plain = learned("tiny-dense", "bf16")
for changes in (
    [lambda parts: compile.apply(parts, notice=said.append)],
    [lambda parts: compile.apply(parts, notice=said.append), lambda parts: recompute.apply(parts, "full", 1)],
):
    assert distance(learned("tiny-dense", "bf16", *changes), plain) < 0.02
assert said == [], said
print("agree")
"""

GATHERED = """
from phalanx.transforms.fp8_weight import Weight8

found = []
for stored_in_8 in (False, True):  # as a sharded weight that was gathered in fp8 is
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False))
        model = torch.nn.Module()
        model.blocks = torch.nn.ModuleList([layer])
        fp8.apply([model], "tensor", GPU)
        weight = layer[0].weight.detach().to(GPU, torch.bfloat16)
        part = fp8_numbers.rounded(weight, fp8_numbers.E4M3, "tensor")
        parameter = torch.nn.Parameter(Weight8(part.values, part.scale, torch.bfloat16) if stored_in_8 else weight)
        layer[0]._parameters["weight"] = parameter
        x = torch.randn(64, 256, device=GPU).requires_grad_()
        y = (torch.compile(layer) if compiled else layer)(x)
        y.float().square().sum().backward()
        assert parameter.grad.dtype == torch.bfloat16
        found.append((y, x.grad, parameter.grad))
for other in found[2:]:
    for ours, theirs in zip(other, found[0], strict=True):
        assert (ours.float() - theirs.float()).norm() < 5e-3 * theirs.float().norm()
assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[2], found[0], strict=True))
print("agree")
"""


@pytest.mark.parametrize(
    "code", [FORMATS, MEMORY, COMPILED, GATHERED], ids=["formats", "memory", "compiled", "gathered in fp8"]
)
def test_on_a_gpu(code: str, gpu_environment: dict[str, str]) -> None:
    if code == GATHERED and "8.9" in (reason := _without_fp8(gpu_environment)):
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True, timeout=500, env=gpu_environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("agree\n")


def _without_fp8(environment: dict[str, str]) -> str:
    """Why the GPU cannot compute in fp8; empty: it can."""
    code = "import torch; from phalanx.transforms import fp8; print(fp8.available(torch.device('cuda')) or '')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True).stdout
