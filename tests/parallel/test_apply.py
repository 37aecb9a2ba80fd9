"""What a rank imports for a layout. What `apply` does is tested with every technique and in tests/training."""

from __future__ import annotations

import subprocess
import sys

UNUSED = """
import sys
import phalanx.worker.rank
print([name for name in ("torch.distributed.fsdp", "torch.distributed.tensor") if name in sys.modules])
"""


def test_ranks_import_fsdp_only_where_parameters_are_sharded() -> None:
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
