"""One forward of all layers with a rank's part of the positions, on fake tensors: the trace has one layer of each kind, of which the first is given
all positions. Used by `infer_cuts`."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.spec.cut_plan import CutPlan
from phalanx.spec.errors import RunError
from phalanx.tracing.layer_sample import Sample
from phalanx.tracing.module_graph import BATCH
from phalanx.tracing.sequence_hooks import install_stand_ins
from phalanx.tracing.sequence_walk import PARTS


def check_forward(every: Sample, plan: CutPlan, length: int) -> None:
    """Raises RunError if values with some positions and with all of them meet, or results are not those of all positions."""
    assert plan.sequence is not None
    install_stand_ins(dict(every.model.named_modules()), plan.sequence, PARTS)
    with every.mode, torch.no_grad():
        tokens_BS, positions_BS = (torch.zeros(BATCH, length, dtype=torch.int64) for _ in range(2))
        try:
            result = every.model(tokens_BS, positions_BS)
            wrong = None if isinstance(result, Tensor) and result.shape[:2] == (BATCH, length) else "it gives other positions"
        except Exception as error:  # a model may raise anything
            wrong = (str(error) or type(error).__name__).partition("\n")[0]
    if wrong is not None:
        raise RunError(
            f"layout.sequence = true divides the residual stream of {type(every.model).__name__} by position, which its layers do not hand on as its "
            f"first one does ({wrong}). Remove layout.sequence."
        )
