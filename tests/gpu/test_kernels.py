"""Every kernel against plain PyTorch in higher precision, on random inputs."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU: there is no nvidia-smi here"),
]

CROSS_ENTROPY = """
import torch
import torch.nn.functional as F
from phalanx.kernels.cross_entropy import IGNORED, cross_entropy_, log_sum_exp, softmax_gradient_

for rows, columns in ((64, 128256), (33, 50257), (77, 1001), (5, 3)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = (3 * torch.randn(rows, columns, device="cuda")).to(dtype)
        targets = torch.randint(columns, (rows,), device="cuda")
        targets[::4] = IGNORED
        exact = logits.double().requires_grad_()
        losses = F.cross_entropy(exact, targets, reduction="none", ignore_index=IGNORED)
        losses.sum().backward()
        found = logits.clone()
        whole, target = cross_entropy_(found, targets)
        torch.testing.assert_close((whole - target).masked_fill(targets == IGNORED, 0.0).double(), losses.detach(), rtol=1e-5, atol=1e-5)
        distance = (found.double() - exact.grad).norm() / exact.grad.norm()
        assert distance < (1e-6 if dtype == torch.float32 else 2e-3), (rows, columns, dtype, distance)
        again = logits.clone()
        given, _ = log_sum_exp(again, targets)
        assert torch.equal(again, logits) and torch.equal(given, whole)
        softmax_gradient_(again, targets, given)
        assert torch.equal(again, found)
print("ok")
"""

HEAD = """
import torch
import torch.nn.functional as F
from phalanx.kernels.scaled import scaled
from phalanx.models.decoder import IGNORED
from phalanx.parallel.group import Group
from phalanx.parallel.vocab_parallel import Projected, Share, VocabularyLoss

for rows in (50257, 8192, 1003):  # some are no multiple of what products like
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(2, 100, 256, device="cuda").to(dtype).requires_grad_()
        weight = (0.1 * torch.randn(rows, 256, device="cuda")).to(dtype).requires_grad_()
        targets = torch.randint(rows, (2, 100), device="cuda")
        targets[:, ::7] = IGNORED
        loss = VocabularyLoss(Share(0, Group((0,), 0, "tensor", None)), rows, 64, whole=None)(Projected(x, weight), targets)
        found = torch.autograd.grad(loss * 0.3, (x, weight))
        exact = [value.detach().double().requires_grad_() for value in (x, weight)]
        wanted = F.cross_entropy(F.linear(*exact).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        torch.testing.assert_close(loss.double(), wanted, rtol=2e-3, atol=0)
        for one, other in zip(found, torch.autograd.grad(wanted * 0.3, exact)):
            assert one.shape == other.shape and (one - other).norm() / other.norm() < 1e-2, (rows, dtype)
        for size in (1, 4095, 4096, 100_003):
            values, factor = torch.randn(size, device="cuda").to(dtype), torch.rand((), device="cuda")
            assert torch.equal(scaled(values, factor), (values.float() * factor).to(dtype))
print("ok")
"""

ADAMW = """
import torch
from phalanx.kernels.fused_adamw import AdamWRow, AdamWSettings, adamw_

SHAPES = ((1024, 333), (7,), (64, 64, 3), (4096,), (8193,))
for gradients, moments, weights in (
    (torch.float32, torch.float32, None), (torch.bfloat16, torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32, torch.float16),
):
    for shift in (0, 1):  # one element further, so that nothing is aligned
        def made(shape, dtype=torch.float32, fill=torch.randn):
            size = torch.Size(shape).numel()
            return fill(size + shift, device="cuda").to(dtype)[shift:].view(shape)
        values = [made(shape) for shape in SHAPES]
        exact = [value.double().requires_grad_() for value in values]
        copies = [None if weights is None else value.to(weights) for value in values]
        means, squares = ([made(shape, moments, torch.zeros) for shape in SHAPES] for _ in range(2))
        steps = [torch.zeros((), device="cuda") for _ in SHAPES]
        reference = torch.optim.AdamW(exact, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        divisor, no, yes = (torch.tensor(number, device="cuda") for number in (3.0, 0.0, 1.0))
        for number in range(12):
            new = [made(shape, gradients) for shape in SHAPES]
            rows = [AdamWRow(*row) for row in zip(values, new, means, squares, steps, copies)]
            if number == 5:
                before = [value.clone() for value in values]
                adamw_(rows, AdamWSettings(1e-3, 0.9, 0.999, 1e-8, 0.1), divisor, yes)
                assert all(torch.equal(a, b) for a, b in zip(before, values)), "skipped"
            for value, gradient in zip(exact, new):
                value.grad = gradient.double() / 3
            reference.step()
            for step in steps:
                step += 1
            adamw_(rows, AdamWSettings(1e-3, 0.9, 0.999, 1e-8, 0.1), divisor, no)
        worst = max(((value - wanted).norm() / wanted.norm()).item() for value, wanted in zip(values, exact))
        assert worst < (1e-6 if moments == torch.float32 else 1e-4), (gradients, moments, worst)
        assert weights is None or all(torch.equal(copy, value.to(weights)) for copy, value in zip(copies, values))
print("ok")
"""

DOCUMENTS = """
import numpy as np
import torch
from phalanx.kernels.document_attention import DocumentSpans
from phalanx.models.attention import Scope, attend_locally

dice = np.random.default_rng(0)
for rows, heads, keys, length, width, values, whole, window in (
    (3, 4, 2, 512, 64, 64, (1,), None), (2, 4, 4, 300, 128, 128, (), None), (4, 8, 2, 256, 64, 64, (0, 3), None),
    (2, 4, 4, 256, 192, 128, (), None), (1, 2, 1, 17, 32, 32, (), None),
    (3, 4, 2, 512, 64, 64, (1,), 100), (4, 8, 2, 256, 64, 64, (0, 3), 2), (2, 4, 4, 300, 128, 128, (), 33), (2, 4, 4, 64, 64, 64, (0,), 64),
):
    documents = np.cumsum(dice.random((rows, length)) < 1 / 90, axis=1).astype(np.int32)
    documents[list(whole)] = 0
    spans = DocumentSpans.of(documents)
    scope = Scope(torch.from_numpy(documents).cuda(), DocumentSpans(spans.bounds.cuda(), spans.runs), window)
    inputs = [torch.randn(rows, h, length, w, device="cuda", dtype=torch.bfloat16).requires_grad_() for h, w in ((heads, width), (keys, width), (keys, values))]
    out = attend_locally(*inputs, scope)
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, gradient)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    wanted = attend_locally(*exact, Scope(scope.documents, window=window))
    for one, other in zip((out, *found), (wanted, *torch.autograd.grad(wanted, exact, gradient.float()))):
        assert (one - other).norm() / other.norm() < 5e-3
    if width == values:  # sinks, with documents that the host knows, that a mask knows, and without any
        for scopes in ((scope, Scope(scope.documents, window=window)), (Scope(None, window=window),) * 2):
            given = [*inputs, torch.randn(heads, device="cuda").requires_grad_()]
            exact = [x.detach().double().requires_grad_() for x in given]
            out = attend_locally(*given[:3], scopes[0], None, None, given[3])
            found = torch.autograd.grad(out, given, gradient)
            scores = exact[0] @ exact[1].repeat_interleave(heads // keys, 1).mT * width**-0.5
            mask = scopes[1].mask(length, scores.device)
            mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril() if mask is None else mask
            scores = torch.cat((scores.masked_fill(~mask, -torch.inf), exact[3].view(-1, 1, 1).expand(rows, -1, length, 1)), -1)
            wanted = scores.softmax(-1)[..., :-1] @ exact[2].repeat_interleave(heads // keys, 1)
            for one, other in zip((out, *found), (wanted, *torch.autograd.grad(wanted, exact, gradient.double()))):
                assert one.isfinite().all() and (one - other).norm() / other.norm() < 8e-3, (rows, window, (one - other).norm() / other.norm())
            run = torch.compile(lambda *x: attend_locally(*x[:3], scopes[0], None, None, x[3]), fullgraph=True)
            if rows == 3:
                compiled = torch.autograd.grad(run(*given), given, gradient)
                assert all((one - other).norm() <= 1e-3 * other.norm() for one, other in zip(compiled, found))
print("ok")
"""

SWIGLU = """
import torch
import torch.nn.functional as F
from phalanx.kernels.scaled_swiglu import scaled_swiglu

for rows, width in ((4096, 768), (37, 24), (129, 300), (1, 64), (1000, 1000), (9, 7), (0, 64)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scaled in (True, False):
            gate, up = (2 * torch.randn(rows, width, device="cuda") for _ in range(2))
            given = [gate.to(dtype), up.to(dtype), *([torch.rand(rows, device="cuda")] if scaled else [])]
            exact = [x.double().requires_grad_() for x in given]
            given = [x.requires_grad_() for x in given]
            gradient = torch.randn(rows, width, device="cuda").to(dtype)
            found = scaled_swiglu(*given)
            wanted = F.silu(exact[0]) * exact[1] * (exact[2][:, None] if scaled else 1)
            ours = torch.autograd.grad(found, given, gradient)
            theirs = torch.autograd.grad(wanted, exact, gradient.double())
            for one, other in zip((found, *ours), (wanted, *theirs)):
                distance = (one - other).norm()
                assert distance <= (1e-6 if dtype == torch.float32 else 3e-3) * other.norm(), (rows, width, dtype, distance)
            again = torch.autograd.grad(scaled_swiglu(*given), given, gradient)
            assert all(torch.equal(one, other) for one, other in zip(ours, again)), "the same bits"
print("ok")
"""

ROUTED_ROWS = """
import torch
from phalanx.kernels.routed_rows import gather_sum, zero_unused_

for tokens, copies, width in ((512, 8, 2048), (77, 1, 64), (33, 3, 1000), (100, 2, 7168), (5, 6, 7), (0, 2, 64)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (1, 2):
            parts = [torch.randn(tokens * copies, width, device="cuda").to(dtype) for _ in range(count)]
            places = torch.randperm(tokens * copies, device="cuda")
            found = gather_sum(parts, places, copies)
            wanted = sum(part.double() for part in parts)[places].view(tokens, copies, width).sum(1)
            assert found.dtype == dtype and found.shape == wanted.shape
            assert (found - wanted).norm() <= (1e-6 if dtype == torch.float32 else 3e-3) * wanted.norm(), (tokens, copies, width, dtype)
for shape in ((5, 30, 7), (5, 300, 768), (5, 8, 8)):
    for dtype in (torch.float32, torch.bfloat16):
        counts = torch.tensor([0, 3, 0, 1, 2], device="cuda")
        gradient = torch.randn(shape, device="cuda").to(dtype)
        wanted = gradient.clone()
        wanted[[0, 2]] = 0
        gradient[[0, 2]] = float("nan")
        assert zero_unused_(gradient, counts) is gradient and torch.equal(gradient, wanted)
        turned = torch.full(shape, float("nan"), device="cuda", dtype=dtype).transpose(1, 2)
        assert not zero_unused_(turned, torch.zeros_like(counts)).any()
print("ok")
"""

ROUTER_PRODUCT = """
import torch
from phalanx.kernels.router_product import router_product

for tokens, width, experts in ((4096, 2048, 128), (77, 96, 8), (1, 64, 6)):
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(tokens, width, device="cuda").to(torch.bfloat16).requires_grad_()
        weight = torch.randn(experts, width, device="cuda").to(dtype).requires_grad_()
        gradient = torch.randn(tokens, experts, device="cuda")
        logits = router_product(x, weight)
        assert logits.dtype == torch.float32
        exact = x.double() @ weight.double().T
        # Tensor cores add up with a little less care than fp32 units. A product in tf32 would be 100 times as far away, in bf16 1,000 times.
        assert (logits - exact).norm() <= 3e-6 * exact.norm(), (tokens, dtype, (logits - exact).norm() / exact.norm())
        of_x, of_weight = torch.autograd.grad(logits, (x, weight), gradient)
        wanted = gradient.double() @ weight.double()
        assert of_x.dtype == torch.bfloat16 and (of_x - wanted).norm() <= 5e-3 * wanted.norm()
        wanted = gradient.double().T @ x.double()
        assert of_weight.dtype == dtype and (of_weight - wanted).norm() <= (3e-5 if dtype == torch.float32 else 3e-3) * wanted.norm()
print("ok")
"""

RMS_NORM = """
import torch
import torch.nn.functional as F
from phalanx.models.layers import RMSNorm

for shape in ((2, 600, 2048), (3, 5, 96), (1, 7, 100), (4, 300, 7168), (1, 1, 5)):
    for dtype in (torch.bfloat16, torch.float16):
        norm = RMSNorm(shape[-1], eps=1e-5).cuda()
        torch.nn.init.normal_(norm.weight)
        norm.in_one_pass = True
        x, gradient = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
        x.requires_grad_()
        with torch.autocast("cuda", dtype):
            y = norm(x)
        assert y.dtype == dtype, "the kernel"
        found = torch.autograd.grad(y, (x, norm.weight), gradient)
        exact = [x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()]
        wanted = F.rms_norm(exact[0], shape[-1:], exact[1], 1e-5)
        for one, other in zip((y, *found), (wanted, *torch.autograd.grad(wanted, exact, gradient.double()))):
            assert (one - other).norm() <= 3e-3 * other.norm(), (shape, dtype)
        assert found[1].dtype == torch.float32
print("ok")
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(CROSS_ENTROPY, id="cross-entropy"),
        pytest.param(HEAD, id="head"),
        pytest.param(ADAMW, id="adamw"),
        pytest.param(DOCUMENTS, id="documents"),
        pytest.param(SWIGLU, id="swiglu"),
        pytest.param(ROUTED_ROWS, id="routed-rows"),
        pytest.param(ROUTER_PRODUCT, id="router-product"),
        pytest.param(RMS_NORM, id="rms-norm"),
    ],
)
def test_kernel(program: str, gpu_environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, env=gpu_environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("ok")
