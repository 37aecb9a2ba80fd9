"""A model of another kind: no attention, but a gated linear recurrence, trained by `phalanx train examples/own_model.toml`.

docs/own-model.md says what Phalanx asks of a model. It is a plain one-device module: Phalanx brings the ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Shapes: B batch, S sequence, D width, V vocabulary.

AXES = {
    "embed.weight": ("vocab", "model"),
    "blocks.*.into.weight": ("inner", "model"),
    "blocks.*.out.weight": ("model", "inner"),
    "*norm.weight": ("model",),
}
"""Parameter-name pattern to the names of its dimensions; the first that matches counts, and every parameter must match one."""

INITIAL = {
    "*norm.weight": "ones",
    "blocks.*.out.weight": "residual",
    "*": "normal",
}
"""Parameter-name pattern to its initial values: "ones", "zeros", "normal", or "residual", which is normal and smaller with depth."""


class Block(nn.Module):
    """x + recurrence(norm(x)): each channel keeps a running mean of what it is given, and decides how much it forgets."""

    def __init__(self, dim: int, memory: float):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.into = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.memory = memory

    def forward(self, x_BSD: Tensor, begins_BS: Tensor) -> Tensor:
        value, keep, gate = self.into(self.norm(x_BSD)).float().chunk(3, dim=-1)
        keep = torch.sigmoid(keep + self.memory)
        # Where a document begins, nothing of what was before it is kept.
        state_BSD = scan(keep.masked_fill(begins_BS[..., None], 0.0), (1 - keep) * value)
        return x_BSD + self.out(state_BSD * F.silu(gate))


class Recurrent(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, spec):  # a phalanx ModelSpec: the [model] table of the run file
        super().__init__()
        memory = spec.option("memory", 2.0)  # [model.options]: whatever this model alone wants to know
        self.embed = nn.Embedding(spec.rows, spec.dim)
        self.blocks = nn.ModuleList(Block(spec.dim, memory) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.dim)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """Logits [B, S, V]. Positions count from 0 in every document, so they say where to forget."""
        x_BSD = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, positions_BS == 0)
        return F.linear(self.norm(x_BSD), self.embed.weight)


def scan(keep_BSD: Tensor, given_BSD: Tensor) -> Tensor:
    """state[s] = keep[s] * state[s - 1] + given[s] at all places at once, in log2(S) rounds that each reach twice as far."""
    reach = 1
    while reach < keep_BSD.shape[1]:
        before = F.pad(given_BSD, (0, 0, reach, 0))[:, :-reach]
        given_BSD = given_BSD + keep_BSD * before
        keep_BSD = keep_BSD * F.pad(keep_BSD, (0, 0, reach, 0))[:, :-reach]
        reach *= 2
    return given_BSD
