"""The bridge to torchax loses nothing in silence, and nobody else imports JAX."""

from __future__ import annotations

import subprocess
import sys

from xla_engine import bridge, devices, needs_xla


@needs_xla
def test_custom_backwards_and_number_formats() -> None:
    with devices() as pool:
        found = pool.alone(bridge)
    assert "phalanx.models.moe.ZeroUnusedGradients has a backward of its own" in found.refusal
    assert found.gradients == [1.0, 3.0]  # of the attached loss y² at 3, times 0.5
    assert found.products == ["bfloat16", "float32"]


def test_the_torch_engine_imports_no_jax() -> None:
    modules = "phalanx, phalanx.training.trainer, phalanx.worker.rank, phalanx.worker.fork_server, phalanx.verification.parity, phalanx.cli.main"
    program = f"import sys, {modules}; sys.exit(bool({{'jax', 'torchax'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
