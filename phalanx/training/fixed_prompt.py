"""Logits of a fixed prompt, by the model as it stands on the ranks: what an export of the checkpoint has to say too. Called by the
trainer at a save."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.checkpointing.hf_folder import ReferenceLogits
from phalanx.data.pack import Batch
from phalanx.parallel.context.context_parallel import places
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.parallel.vocab_parallel import Projected, VocabularyLoss
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step import Stepper

_TOKENS = 16
"""Of a prompt, or the fewest that the layout can share; and the most whose logits are kept."""


def prompt(run: Run, layout: Layout) -> np.ndarray:
    """Token ids that follow from seed and vocabulary; as many as ranks that share sequences can deal evenly."""
    units = [1]
    if layout.context > 1:
        units.append(layout.context * (1 if layout.context_method == "ulysses" else 2))
    if layout.sequence or run.model.moe is not None:
        units.append(layout.context * layout.tensor)
    unit = math.lcm(*units)  # it divides train.sequence_length, as each of them does
    length = min(run.train.sequence_length, -(-_TOKENS // unit) * unit)
    dice = np.random.default_rng([run.train.seed, run.model.rows])
    return dice.integers(run.model.rows, size=length)


@torch.no_grad()
def answer(stepper: Stepper, run: Run, plan: Plan) -> ReferenceLogits:
    """The prompt's logits, the same on every rank; all ranks call it together."""
    placed, mesh, layout = stepper.sharded, stepper.sharded.mesh, plan.layout
    tokens_S = prompt(run, layout)
    kept_K = np.unique(np.linspace(0, len(tokens_S) - 1, _TOKENS).round().astype(np.int64))
    own = _own_places(mesh, layout, len(tokens_S))
    logits_KV = torch.zeros(len(kept_K), run.model.rows, device=mesh.device)
    mine = mesh.replica == 0  # replicas say the same

    def take(output: Any) -> None:
        found_SV, first = _columns(output, placed)
        if mine and first is not None:
            for row, place in enumerate(kept_K.tolist()):
                if place in own:
                    logits_KV[row, first : first + found_SV.shape[1]] = found_SV[own[place]].float()

    batch = MicroBatch.prepare(
        _batch(tokens_S), mesh.device, run.data.document_mask, None if len(own) == len(tokens_S) else _at(own)
    )
    for part in placed.parts:
        part.eval()
    with _uncompiled(run.memory.compile):
        stepper.forward(batch, take)
    for part in placed.parts:
        part.train()
    # Every number comes from one rank, and zeros from all others: adding them up is exact.
    whole_KV = mesh.all_reduce(logits_KV)
    scaling = run.precision.fp8_scaling
    return ReferenceLogits(torch.from_numpy(tokens_S), torch.from_numpy(kept_K), whole_KV.cpu(), plan.compute, scaling)


def _batch(tokens_S: np.ndarray) -> Batch:
    """One sequence, one document."""
    zeros = np.zeros((1, len(tokens_S)), dtype=np.int32)
    positions = np.arange(len(tokens_S), dtype=np.int64)[None]
    return Batch(tokens_S[None].astype(np.int64), np.roll(tokens_S, -1)[None], positions, zeros, np.zeros(1, dtype=np.int64))


def _own_places(mesh: Mesh, layout: Layout, length: int) -> dict[int, int]:
    """The places of a sequence that are this rank's, and which of its rows each is."""
    if layout.context == 1:
        return {place: place for place in range(length)}
    ours = places(length, layout.context, mesh.coordinate("context"), layout.context_method)
    return {place: row for row, place in enumerate(ours.tolist())}


def _at(own: dict[int, int]) -> np.ndarray:
    return np.array(list(own), dtype=np.int64)


def _columns(output: Any, placed: ShardedModel) -> tuple[Tensor, int | None]:
    """This rank's columns of the logits and the first one's number; None: another rank has the same."""
    if isinstance(output, Projected):
        output = F.linear(output.x_BSD, output.weight_VD)
    logits_SV = output[0]
    loss = placed.loss
    if isinstance(loss, VocabularyLoss) and logits_SV.shape[-1] != loss.rows:
        return logits_SV, loss.share.first
    return logits_SV, 0 if placed.mesh.coordinate("tensor") == 0 else None


def _uncompiled(compiled: bool) -> AbstractContextManager[Any]:
    """A prompt has a length of its own: blocks would be compiled anew for it."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
