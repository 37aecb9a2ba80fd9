"""The command that `launch/measure` starts: builds one's own model without memory and says what it comes to. Not for people.

    python -m phalanx.cli.measure < RUN.toml

The last line it prints is a JSON object: parameters, active, flops_per_token; or problems, each a sentence.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx.models.init import build
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Run


def main() -> None:
    try:
        answer = measured(loads(sys.stdin.read()))
    except RunError as error:
        answer = {"problems": [problem.rstrip(".") + _place(error.__cause__) for problem in error.problems]}
    print("\n" + json.dumps(answer), flush=True)


def measured(run: Run) -> dict[str, Any]:
    """Counts of the module that the run names."""
    model = build(run.model)
    parameters = sum(p.numel() for p in model.parameters())
    looked_up = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in looked_up)
    if not any(isinstance(m, nn.Linear) and m.out_features == run.model.rows for m in model.modules()):
        # No layer of its own gives the logits: the embedding of the tokens does, and that is a product too.
        multiplied += sum(w.numel() for w in looked_up.values() if w.shape[0] == run.model.rows)
    return {"parameters": parameters, "active": parameters, "flops_per_token": 6.0 * multiplied}


def _place(error: BaseException | None) -> str:
    """The file and line of the user's own code that an error came out of: what a traceback is read for."""
    passed = tuple(str(Path(file).parent) for module in (phalanx, torch, importlib) if (file := module.__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__ if error else None)
        if not frame.filename.startswith(("<", *passed))
    ]
    return f"; it came from {frames[-1].filename}, line {frames[-1].lineno}." if frames else "."


if __name__ == "__main__":
    main()
