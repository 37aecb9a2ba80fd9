"""Phalanx in the comparison: the trainer of one rank, driven as `worker/rank` drives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx._version import __version__
from phalanx.comparison.peer_loop import PeerJob, next_loss, token_losses
from phalanx.models.decoder import IGNORED
from phalanx.parallel.mesh import connect
from phalanx.parallel.vocab_parallel import Projected
from phalanx.spec.plan import Place
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.trainer import Trainer


class PhalanxSteps:
    """Steps of `Trainer.train`, with everything that a step of a run does: reading text, hooks, records."""

    def __init__(self, job: PeerJob, folder: Path):
        run, plan = job.run, job.plan
        mesh = connect(Place(), plan.device, run.resilience.timeout, plan.layout)
        self._trainer = Trainer(run, plan, mesh, folder / "checkpoints")
        self._trainer.build()
        self._trainer.load_initial_weights()
        self._events = self._trainer.train()
        self.version, self.compute = __version__, str(plan.compute)
        memory, chunk = run.memory, getattr(self._trainer.sharded.loss, "chunk", None)
        formats = {param.dtype for param in self._trainer.model.parameters() if param.ndim > 1}
        words = [
            "fp32 weights" if formats == {torch.float32} else "16-bit weights, fp32 master weights",
            "blocks compiled" if memory.compile else "not compiled",
            "logits of all tokens" if not chunk else f"loss in chunks of {chunk:,}",
            "documents masked" if run.data.document_mask else "documents not masked",
        ]
        words += [f"{memory.recompute} recomputation"] if memory.recomputes else []
        words += [f"optimizer states in {memory.offload} memory"] if memory.offloads else []
        words += [f"moments in {run.precision.optimizer}"] if run.precision.optimizer != "fp32" else []
        self.settings = ", ".join(words)

    def step(self) -> float:
        """Takes one step; returns its loss."""
        return next_loss(self._events)

    def token_losses(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Losses of single tokens, without gradients and without masks between documents, which peers do not have."""
        stepper, found = self._trainer.stepper, []

        def take(output: Any) -> None:
            logits = F.linear(output.x_BSD, output.weight_VD) if isinstance(output, Projected) else output
            found.append(token_losses(logits, targets_BS))

        positions = tokens_BS.new_tensor(range(tokens_BS.shape[1])).expand(tokens_BS.shape)
        counted = int((targets_BS != IGNORED).sum())
        batch = MicroBatch(tokens_BS, targets_BS, positions, documents=None, counted=counted, digest=0)
        with stepper.evaluating(), stepper.uncompiled():
            stepper.forward(batch, take)
        return found[0]
