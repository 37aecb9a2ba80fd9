"""The command that `launch/model_check` starts: rehearses a run that is about to be trained, one rank of each kind.

    python -m phalanx.rehearsal.fit_process < QUESTION.json

The question: the run as TOML, its plan, and the memory of one device for one rank. The last line of output is a JSON object: for each
kind of rank its number, how many there are, and the memory it needs; or a list of problems.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from phalanx.rehearsal.gpu_kernels import card
from phalanx.rehearsal.job import distinct_ranks
from phalanx.rehearsal.rehearse import RehearsalDevice, rehearse
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan


def main() -> None:
    torch.set_num_threads(1)
    try:
        answer = answer_question(json.loads(sys.stdin.read()))
    except RunError as error:
        answer = {"problems": list(error.problems)}
    print("\n" + json.dumps(answer), flush=True)


def answer_question(question: dict[str, Any]) -> dict[str, Any]:
    run, plan = loads(question["run"]), Plan.from_json(question["plan"])
    gpu = plan.device == "cuda"
    device = RehearsalDevice(card=card(question["gpu"]) if gpu else None, capacity=question["capacity"] if gpu else None)
    ranks = []
    for rank, count in distinct_ranks(run, plan).items():
        rehearsal = rehearse(run, plan, rank, device)
        at = rehearsal.no_room or rehearsal.at
        ranks.append(
            {
                "rank": rank,
                "count": count,
                "fits": rehearsal.fits,
                "in_use": rehearsal.in_use,
                "at": "" if at is None else str(at),
                "error": rehearsal.error,
            }
        )
    return {"kinds": ranks}


if __name__ == "__main__":
    main()
