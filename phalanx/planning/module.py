"""What a rank of one's own module might take, of which nobody knows more than how many parameters it has: coarse, for a first
micro-batch and for refusing what is far too large. `planning/chosen` asks where the equations cannot tell.
"""

from __future__ import annotations

import math

from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

_KEPT = 100.0
"""Bytes that a token keeps for its backward in 16 bits, over the root of the parameters: 99 for a Llama of 8 B and 110 for one of 1 B, as
widths and depths grow together."""


def module_bytes(run: Run, plan: Plan) -> float:
    """Of one rank with the plan's micro-batch."""
    layout = plan.layout
    parameters = plan.parameters / (layout.tensor * layout.pipeline)
    away = run.memory.offloads and not (plan.device == "cpu" and run.memory.offload == "cpu")
    states = parameters * _parameter_bytes(layout, low=plan.compute != "fp32", away=away)
    kept = {"selective": 0.5, "full": 0.25}.get(run.memory.recompute, 1.0) / (layout.context * layout.tensor)
    token = _KEPT * math.sqrt(plan.parameters) * (2 if plan.compute == "fp32" else 1) * kept
    return states + token * plan.micro_batch * run.train.sequence_length


def _parameter_bytes(layout: Layout, *, low: bool, away: bool) -> float:
    """Of each parameter: value, gradient and Adam's states, by the formulas of ZeRO. `low`: computed in two bytes; `away`: the states are
    not on the device.

    In low precision ZeRO-1 and 2 keep a whole copy in two bytes, with two for the gradient, and share the fp32 master.
    """
    states, shares = 0 if away else 8, layout.shard
    if shares == 1:
        return 8 + states
    if layout.zero == 3:
        return (8 + states) / shares
    value = 2 if low else 4
    master = 4 if low else 0  # offloaded, it has a twin elsewhere; what ranks gather from still lies on the device
    return value + value / (shares if layout.zero == 2 else 1) + (master + states) / shares
