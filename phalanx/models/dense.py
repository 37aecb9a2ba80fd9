"""The dense decoder: GPT-2/3, Llama 2/3 and Qwen3 are settings of it. A one-device module; it knows of no other device.

What others need to know to place it stands in two tables beside it: AXES names the dimensions of every parameter,
INITIAL says what its values start as.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from phalanx.models.attention import Attention, KeyValues, Scope
from phalanx.models.layers import GELU, SwiGLU, norm, rotary
from phalanx.spec.model import ModelSpec

AXES: dict[str, tuple[str, ...]] = {
    "embed.weight": ("vocab", "model"),
    "places.weight": ("place", "model"),
    "blocks.*.attention.query.weight": ("heads", "model"),
    "blocks.*.attention.query.bias": ("heads",),
    "blocks.*.attention.key.weight": ("kv_heads", "model"),
    "blocks.*.attention.key.bias": ("kv_heads",),
    "blocks.*.attention.value.weight": ("kv_heads", "model"),
    "blocks.*.attention.value.bias": ("kv_heads",),
    "blocks.*.attention.output.weight": ("model", "heads"),
    "blocks.*.attention.output.bias": ("model",),
    "blocks.*.attention.*_norm.weight": ("head",),
    "blocks.*.mlp.gate.weight": ("ffn", "model"),
    "blocks.*.mlp.gate.bias": ("ffn",),
    "blocks.*.mlp.up.weight": ("ffn", "model"),
    "blocks.*.mlp.up.bias": ("ffn",),
    "blocks.*.mlp.down.weight": ("model", "ffn"),
    "blocks.*.mlp.down.bias": ("model",),
    "blocks.*_norm.weight": ("model",),
    "blocks.*_norm.bias": ("model",),
    "norm.weight": ("model",),
    "norm.bias": ("model",),
    "head.weight": ("vocab", "model"),
}
"""Parameter-name pattern to the names of its dimensions; the first pattern that matches counts."""

INITIAL: dict[str, str] = {
    "*norm.weight": "ones",
    "*.bias": "zeros",
    "blocks.*.attention.output.weight": "residual",
    "blocks.*.mlp.down.weight": "residual",
    "*": "normal",
}
"""Parameter-name pattern to its initial values; the first that matches counts. "residual" is normal, smaller with depth."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.attention_norm = norm(spec, spec.dim)
        self.attention = Attention(spec)
        self.mlp_norm = norm(spec, spec.dim)
        self.mlp = SwiGLU(spec) if spec.activation == "swiglu" else GELU(spec)

    def forward(
        self, x_BSD: Tensor, scope: Scope, rotation: tuple[Tensor, Tensor] | None, memory: KeyValues | None = None
    ) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), scope, rotation, memory)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Decoder(nn.Module):
    """Tokens in, logits out. Positions and document boundaries are inputs, never guessed."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.rows, spec.dim)
        self.places = nn.Embedding(spec.context, spec.dim) if spec.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = norm(spec, spec.dim)
        self.head = None if spec.tied else nn.Linear(spec.dim, spec.rows, bias=False)

    def forward(
        self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None, memory: list[KeyValues] | None = None
    ) -> Tensor:
        """Logits [B, S, V]. `documents_BS` keeps attention inside each document; None: one document per sequence."""
        x_BSD = self.embed(tokens_BS)
        rotation = None
        if self.places is not None:
            x_BSD = x_BSD + self.places(positions_BS)
        else:
            rotation = rotary(self.spec, positions_BS)
        scope = Scope(documents_BS)
        for index, block in enumerate(self.blocks):
            x_BSD = block(x_BSD, scope, rotation, None if memory is None else memory[index])
        x_BSD = self.norm(x_BSD)
        return linear(x_BSD, self.embed.weight) if self.head is None else self.head(x_BSD)
