"""Mixtures of experts, latent attention and imported weights on a GPU: the grouped product, training in bf16, the CPU's numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.events.log import read_events
from phalanx.events.records import Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU: there is no nvidia-smi here"),
]

RUN = """\
[model]
preset = "{preset}"
[train]
batch = 32
sequence_length = 256
steps = 120
[optimizer]
learning_rate = 3e-3
warmup_steps = 10
"""

GROUPED = """
import torch
from phalanx.models.moe import Experts, loop_experts
from phalanx.spec.model import Moe

torch.manual_seed(0)
moe = Moe(experts=8, active=2, ffn=96)
experts = Experts(64, moe).cuda()
with torch.no_grad():
    for weight in experts.parameters():
        weight.normal_(std=0.1)
counts = torch.tensor([5, 0, 130, 1, 64, 0, 33, 7], device="cuda")
rows = torch.randn(int(counts.sum()), 64, device="cuda")
ways = {}
for name in ("grouped", "loop"):
    x = rows.clone().requires_grad_()
    experts.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        if name == "grouped":
            y = experts(x, counts)
        else:
            halves = [w.to(torch.bfloat16) for w in (experts.gate, experts.up, experts.down)]
            y = loop_experts(x.to(torch.bfloat16), counts.tolist(), *halves)
    y.float().square().sum().backward()
    ways[name] = [y.float(), x.grad, *(w.grad.clone() for w in experts.parameters())]
for ours, theirs in zip(ways["grouped"], ways["loop"], strict=True):
    assert torch.isfinite(ours).all()
    assert (ours - theirs).norm() <= 1e-2 * theirs.norm(), (ours - theirs).norm() / theirs.norm()
print("equal")
"""

GROUPED_IN_FP8 = """
import torch
from phalanx.transforms.fp8_experts import available, multiply_experts

if reason := available(torch.device("cuda")):
    print("lacking:", reason)
    raise SystemExit
torch.manual_seed(0)
for counts in ([16] * 8, [5, 0, 130, 1, 64, 0, 33, 7], [240, 0, 0, 0, 0, 0, 0, 0]):
    for inner, outer in ((64, 96), (2048, 768), (768, 2048)):
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        x = torch.randn(sum(counts), inner) * torch.randn(sum(counts), 1).exp()
        weight = 0.1 * torch.randn(8, outer, inner) * torch.randn(8, outer, 1).exp()
        upstream = torch.randn(sum(counts), outer).to(torch.bfloat16)
        found = []
        for device in ("cpu", "cuda"):  # emulated, and by the kernel
            given = [value.to(device).detach().requires_grad_() for value in (x, weight)]
            y = multiply_experts(*given, ends.to(device))
            y.backward(upstream.to(device))
            found.append([y, given[0].grad, given[1].grad[[bool(count) for count in counts]]])
        for emulated, ours in zip(*found, strict=True):
            ours = ours.float().cpu()
            distance = (ours - emulated.float()).norm() / emulated.float().norm()
            assert distance < 5e-3, (counts, inner, outer, distance)
print("equal")
"""


def run(environment: dict[str, str], *words: str, timeout: float = 300) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_grouped_product_equals_the_loop(gpu_environment: dict[str, str]) -> None:
    assert "equal" in run(gpu_environment, "-c", GROUPED)


def test_the_grouped_product_in_fp8_equals_its_emulation(gpu_environment: dict[str, str]) -> None:
    """With groups of any number of rows, none among them."""
    told = run(gpu_environment, "-c", GROUPED_IN_FP8)
    if told.startswith("lacking:"):
        pytest.skip(told.strip())
    assert "equal" in told


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_experts_train_in_fp8(recompute: str, tmp_path: Path, gpu_environment: dict[str, str]) -> None:
    lacking = "import torch; from phalanx.transforms.fp8_experts import available; print(available(torch.device('cuda')) or '')"
    if reason := run(gpu_environment, "-c", lacking).strip():
        pytest.skip(reason)
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(preset="tiny-moe"))
    words = ("precision.compute=fp8", "precision.fp8_experts=true", f"memory.recompute={recompute}")
    told = run(gpu_environment, "-m", "phalanx", "train", str(file), *words, "--run-dir", str(tmp_path / "run"), "--json")
    result = json.loads(told.splitlines()[-1])
    assert result["loss"] < 2.8 and result["first_loss"] > 5


@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-mla"])
def test_experts_train_in_bf16_and_generate(preset: str, tmp_path: Path, gpu_environment: dict[str, str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(preset=preset))
    where = tmp_path / "run"
    told = run(gpu_environment, "-m", "phalanx", "train", str(file), "--run-dir", str(where), "--json")
    result = json.loads(told.splitlines()[-1])
    assert result["loss"] < 2.8 and result["first_loss"] > 5
    told = run(gpu_environment, "-m", "phalanx", "generate", str(where), "def ", "--tokens", "20", "--json")
    assert json.loads(told.splitlines()[-1])["tokens"] > 0


@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-mla"])
def test_experts_agree_with_the_cpu_in_fp32(preset: str, tmp_path: Path, gpu_environment: dict[str, str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(preset=preset))
    losses = {}
    for device in ("cuda", "cpu"):
        where = tmp_path / device
        words = ("train.steps=5", "train.batch=8", "precision.compute=fp32", "layout.data=1", f"cluster.device={device}")
        run(gpu_environment, "-m", "phalanx", "train", str(file), *words, "--run-dir", str(where))
        losses[device] = [(e.loss, e.batch_digest) for e in read_events(where / "events.jsonl") if isinstance(e, Step)]
    assert len(losses["cuda"]) == 5
    for (ours, seen), (theirs, expected) in zip(losses["cuda"], losses["cpu"], strict=True):
        assert seen == expected
        assert ours == pytest.approx(theirs, rel=1e-4)
