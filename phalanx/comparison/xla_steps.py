"""Phalanx's XLA engine in the comparison: its trainer, driven as a process of a run drives it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from phalanx._version import __version__
from phalanx.comparison.peer_loop import PeerJob, next_loss, token_losses
from phalanx.xla.forward import Tokens, logits
from phalanx.xla.xla_trainer import XlaTrainer


class XlaSteps:
    """Steps of `XlaTrainer.train`, with everything that a step of a run does."""

    def __init__(self, job: PeerJob, folder: Path):
        run, plan = job.run, job.plan
        self._trainer = XlaTrainer(run, plan, folder / "checkpoints")
        self._trainer.build()
        self._trainer.load_initial_weights()
        self._events = self._trainer.train()
        self.version, self.compute = f"{__version__}, jax {jax.__version__}", str(plan.compute)
        memory = run.memory
        words = [
            "fp32 weights",
            "logits of all tokens" if not memory.loss_chunk else f"loss in chunks of {memory.loss_chunk:,}",
            "documents masked" if run.data.document_mask else "documents not masked",
        ]
        words += [f"{memory.recompute} recomputation"] if memory.recomputes else []
        words += [f"moments in {run.precision.optimizer}"] if run.precision.optimizer != "fp32" else []
        self.settings = ", ".join(words)

    def step(self) -> float:
        """Takes one step; returns its loss, after the device has computed it."""
        return next_loss(self._events)

    def token_losses(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Losses of single tokens, without masks between documents, which peers do not have."""
        model, state = self._trainer.model, self._trainer.state
        tokens = jnp.asarray(tokens_BS.numpy(), jnp.int32)
        batch = Tokens(tokens, tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), documents=None)
        with jax.set_mesh(model.mesh), torch.no_grad():
            compute: Any = jax.jit(partial(logits, model))
            found = jax.device_get(compute(state.params, state.buffers, batch)).astype("float32")
        return token_losses(torch.from_numpy(found), targets_BS)
