"""Infers how tensor ranks divide a run's model. Started by `launch/model_check`, because only torch can trace a model.

    python -m phalanx.worker.cuts_process < RUN.toml

It prints a JSON object on the last line: the plan, as a table of names of dimensions and as text; or problems, a list of sentences.
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import asdict
from typing import Any

from phalanx.models.init import build
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Run
from phalanx.tracing.axes_text import axes_text
from phalanx.tracing.infer_cuts import infer


def main() -> None:
    try:
        shown = inferred(loads(sys.stdin.read()))
    except RunError as error:
        shown = {"problems": list(error.problems)}
    print("\n" + json.dumps(shown), flush=True)


def inferred(run: Run) -> dict[str, Any]:
    """For the tensor ranks of the run's layout, or for two. A table AXES of the module is not looked at."""
    model = build(run.model)
    plan = infer(model, max(2, run.layout.tensor))
    text = axes_text(plan, model)
    table = ast.literal_eval(text.partition("AXES = ")[2])
    return asdict(plan) | {"partial": sorted(plan.partial), "axes": table, "text": text}


if __name__ == "__main__":
    main()
