"""A long run on three hosts through random faults, by `make test-soak`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts import available
from soak import soak

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not available(), reason="needs root and network namespaces"),
    pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="needs the Debian package openssh-server"),
]


def test_run_comes_to_its_end_by_itself(tmp_path: Path) -> None:
    result = soak(tmp_path, steps=2000, every=20.0, seed=0)
    print("\n".join(f"{name}: {value}" for name, value in result.items()))
    assert sum(result["faults"].values()) >= 10 and result["recoveries"]
    assert not result["steps without a record"] and not result["other batches"]
    assert result["largest difference of a loss"] <= 1e-4, (
        "of another order of sums, where the run was on fewer ranks for a while"
    )
