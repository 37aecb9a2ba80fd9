"""The scripts of docs/, which is no package, as modules."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def script(name: str) -> Any:
    if name not in sys.modules:
        spec = spec_from_file_location(name, DOCS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)  # where dataclasses look for the module of a class
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
