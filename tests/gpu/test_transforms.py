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
from phalanx.transforms import activations, compile, fp8, recompute
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
            a = fp8.rounded(torch.randn(m, k, device=GPU), fp8.E4M3, scaling)
            b = fp8.rounded(torch.randn(n, k, device=GPU), fp8.E4M3, scaling)
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


@pytest.mark.parametrize("code", [FORMATS, MEMORY, COMPILED], ids=["formats", "memory", "compiled"])
def test_on_a_gpu(code: str, gpu_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True, timeout=500, env=gpu_environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("agree\n")
