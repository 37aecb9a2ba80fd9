"""A function of a test file in a process of its own, with virtual devices: JAX reads their number once, when it is imported. Imported by tests
as `xla_child`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not installed: the XLA engine is the extra phalanx[xla]"
)

_CHILD = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("child", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["child"] = module
spec.loader.exec_module(module)
print("\\nRESULT" + json.dumps(getattr(module, sys.argv[2])(*json.loads(sys.argv[3]))))
"""


def run_child(file: str, function: str, *arguments: Any, devices: int = 8, timeout: float = 600) -> Any:
    """What `function` of `file` returns in a process with that many virtual CPU devices. Arguments and result travel as JSON."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        # What LLVM makes of a program for one CPU is not looked at, and takes a third of the time.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    command = [sys.executable, "-c", _CHILD, file, function, json.dumps(arguments)]
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    marked = [line for line in child.stdout.splitlines() if line.startswith("RESULT")]
    assert child.returncode == 0 and marked, f"{function} of {file} failed:\n{child.stdout}\n{child.stderr}"
    return json.loads(marked[-1].removeprefix("RESULT"))
