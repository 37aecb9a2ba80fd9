"""The launcher is tested through the command: the same folders and processes serve both rooms' tests."""

from __future__ import annotations

import runpy
from pathlib import Path

# Tests are no package, so what two folders share is read from the one file that has it.
_shared = runpy.run_path(str(Path(__file__).parents[1] / "cli" / "conftest.py"))
workshop = _shared["workshop"]
