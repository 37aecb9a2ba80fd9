"""The command that `launch/model_check` starts: rehearses a run that is about to be trained, one rank of each kind. Not for people.

    python -m phalanx.rehearsal.fit_process < QUESTION.json

The question: the run as TOML, its plan, and what one device has for one rank. The last line it prints is a JSON object: of each kind of rank its
number, how many there are, and what it takes; or problems, each a sentence.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from phalanx.rehearsal.attention_kernels import card
from phalanx.rehearsal.job import kinds
from phalanx.rehearsal.rehearse import Stage, rehearse
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan


def main() -> None:
    torch.set_num_threads(1)
    try:
        answer = answered(json.loads(sys.stdin.read()))
    except RunError as error:
        answer = {"problems": list(error.problems)}
    print("\n" + json.dumps(answer), flush=True)


def answered(question: dict[str, Any]) -> dict[str, Any]:
    run, plan = loads(question["run"]), Plan.from_json(question["plan"])
    gpu = plan.device == "cuda"
    stage = Stage(card=card(question["gpu"]) if gpu else None, capacity=question["capacity"] if gpu else None)
    found = []
    for rank, count in kinds(run, plan).items():
        told = rehearse(run, plan, rank, stage)
        at = told.no_room or told.at
        found.append(
            {
                "rank": rank,
                "count": count,
                "fits": told.fits,
                "in_use": told.in_use,
                "at": "" if at is None else str(at),
                "error": told.error,
            }
        )
    return {"kinds": found}


if __name__ == "__main__":
    main()
