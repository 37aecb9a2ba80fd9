"""Lets tests import `benchmarks/planner`, which is no part of the installed package."""

import sys
from pathlib import Path

# At the end: names in tests/ win over those in benchmarks/.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
