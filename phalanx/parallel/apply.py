"""Places a model on the ranks: every technique of the layout, in the one order in which they compose. Called by training.

The order, outermost last: tensor, context, expert, pipeline, shard, replicate. Only the last is built; the run file's
loader refuses the others by name, so nothing here ever falls back silently.
"""

from __future__ import annotations

import torch
from torch import nn

from phalanx.parallel.mesh import Mesh
from phalanx.parallel.replicate import Gradients
from phalanx.spec.run import Run


def apply(model: nn.Module, run: Run, mesh: Mesh) -> Gradients:
    """Make `model` one rank's part of the job; returns the gradients that its backward fills and the ranks share."""
    wire = torch.bfloat16 if run.precision.reduce == "bf16" else torch.float32
    return Gradients(model.parameters(), mesh, wire=wire)
