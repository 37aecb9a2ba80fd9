"""A rank of torchrun that shares the GPU with another one, and records a timeline. `test_timeline_on_gpu` starts it.

torchrun --nproc-per-node=2 tests/gpu/timeline_ranks.py FOLDER DATA|TENSOR|… [CHAOS]
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from phalanx.events.fault_log import FaultClaims
from phalanx.faults.grammar import parse
from phalanx.host.env import torchrun_place
from phalanx.parallel.mesh import connect
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan
from phalanx.training.hooks.rank_faults import RankFaults
from phalanx.training.trainer import Trainer

RUN = """
[model]
dim = 512
layers = 4
heads = 8
[data]
eval_fraction = 0.0
source = "stdlib"
[train]
batch = 8
micro_batch = 2
sequence_length = 128
steps = 14
[watch]
timeline = true
"""


def main(folder: Path, technique: str, chaos: str = "") -> None:
    place = torchrun_place()
    assert place is not None
    layout = Layout(**{"data": 1, technique: 2})
    run = replace(loads(RUN), layout=layout)
    mesh = connect(place, "cuda", 120.0, layout, share=True)
    plan = Plan(
        layout=layout,
        device="cuda",
        threads=1,
        micro_batch=2,
        accumulation=8 // layout.replicas // 2,
        compute="bf16",
        parameters=run.model.parameters(),
        flops_per_token=run.model.flops_per_token(128),
        peak_flops=None,
    )
    with Trainer(run, plan, mesh, folder / "checkpoints") as trainer:
        if chaos:
            done = FaultClaims(folder)
            trainer.hooks.add(RankFaults(parse(chaos), rank=mesh.rank, done=done, report=lambda event: None))
        trainer.build()
        trainer.load_initial_weights()
        losses = []
        while not trainer.finished:
            record = trainer.step()
            assert record is not None
            losses.append(record.loss)
    if mesh.rank == 0:
        print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
