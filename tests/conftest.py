"""For all tests: GPUs are hidden, since tests fork ranks and a process that has touched a GPU cannot be forked.

Tests marked `gpu` start processes of their own, with what was hidden here.
"""

from __future__ import annotations

import os

import pytest

_HIDDEN = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def gpu_environment() -> dict[str, str]:
    """The environment in which the machine's GPUs are seen."""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return environment if _HIDDEN is None else environment | {"CUDA_VISIBLE_DEVICES": _HIDDEN}
