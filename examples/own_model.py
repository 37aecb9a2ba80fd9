"""A custom model: a gated linear recurrence without attention. `phalanx train examples/own_model.toml` trains it.

It is a plain one-device module; Phalanx parallelizes it. docs/own-model.md describes the interface.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Shapes: B batch, S sequence, D width, V vocabulary.

INITIAL = {
    "*norm.weight": "ones",
    "blocks.*.out.weight": "residual",
    "*": "normal",
}
"""Parameter-name pattern to its initial values: "ones", "zeros", "normal", or "residual" (normal, scaled down with depth)."""


class Block(nn.Module):
    """x + recurrence(norm(x)): each channel keeps a running mean of its inputs, with a learned gate that forgets."""

    def __init__(self, dim: int, memory: float):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.into = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.memory = memory

    def forward(self, x_BSD: Tensor, begins_BS: Tensor) -> Tensor:
        value, keep, gate = self.into(self.norm(x_BSD)).float().chunk(3, dim=-1)
        keep = torch.sigmoid(keep + self.memory)
        # The state is reset where a document begins.
        state_BSD = scan(keep.masked_fill(begins_BS[..., None], 0.0), (1 - keep) * value)
        return x_BSD + self.out(state_BSD * F.silu(gate))


class Recurrent(nn.Module):
    """Token ids to logits."""

    def __init__(self, spec):  # spec: a phalanx ModelSpec, the [model] table of the run file
        super().__init__()
        memory = spec.option("memory", 2.0)  # a setting of this model, from [model.options]
        self.embed = nn.Embedding(spec.rows, spec.dim)
        self.blocks = nn.ModuleList(Block(spec.dim, memory) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.dim)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """Returns logits [B, S, V]. A position of 0 begins a document and resets the state."""
        x_BSD = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, positions_BS == 0)
        return F.linear(self.norm(x_BSD), self.embed.weight)


def scan(keep_BSD: Tensor, given_BSD: Tensor) -> Tensor:
    """Parallel scan: state[s] = keep[s] * state[s - 1] + given[s] for all positions, in log2(S) rounds of doubling reach."""
    reach = 1
    while reach < keep_BSD.shape[1]:
        before = F.pad(given_BSD, (0, 0, reach, 0))[:, :-reach]
        given_BSD = given_BSD + keep_BSD * before
        keep_BSD = keep_BSD * F.pad(keep_BSD, (0, 0, reach, 0))[:, :-reach]
        reach *= 2
    return given_BSD
