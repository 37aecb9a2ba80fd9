"""The decoder: GPT-2/3, Llama 2/3, Mistral, Qwen2/3, Gemma 2/3, Phi-3/4, Mixtral and DeepSeek-V3 are settings of it. A module for one device, without parallel code;
two tables describe its parameters to the other rooms: AXES names the dimensions of each, INITIAL gives its initial values."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import linear

from phalanx.kernels.document_attention import DocumentSpans
from phalanx.models.attention import Attention, KVCache, LatentAttention, Scope, prepare
from phalanx.models.layers import GELU, GeGLU, RMSNorm, Rotation, SwiGLU, norm, rotary, soft_cap
from phalanx.models.moe import MoE
from phalanx.spec.model import ModelSpec

IGNORED = -100
"""The target without a loss."""

AXES: dict[str, tuple[str, ...]] = {
    "embed.weight": ("vocab", "model"),
    "position_embed.weight": ("position", "model"),
    "*.attention.query.weight": ("heads", "model"),
    "*.attention.query.bias": ("heads",),
    "*.attention.key.weight": ("kv_heads", "model"),
    "*.attention.key.bias": ("kv_heads",),
    "*.attention.value.weight": ("kv_heads", "model"),
    "*.attention.value.bias": ("kv_heads",),
    "*.attention.output.weight": ("model", "heads"),
    "*.attention.output.bias": ("model",),
    "*.attention.query_down.weight": ("query_rank", "model"),
    "*.attention.query_rank_norm.weight": ("query_rank",),
    "*.attention.query_up.weight": ("heads", "query_rank"),
    "*.attention.kv_down.weight": ("kv_rank", "model"),
    "*.attention.kv_rank_norm.weight": ("kv_rank",),
    "*.attention.kv_up.weight": ("heads", "kv_rank"),
    "*.attention.*_norm.weight": ("head",),
    "*.mlp.router.weight": ("route", "model"),
    "*.mlp.experts.gate": ("expert", "ffn", "model"),
    "*.mlp.experts.up": ("expert", "ffn", "model"),
    "*.mlp.experts.down": ("expert", "model", "ffn"),
    "*.mlp.*gate.weight": ("ffn", "model"),
    "*.mlp.*gate.bias": ("ffn",),
    "*.mlp.*up.weight": ("ffn", "model"),
    "*.mlp.*up.bias": ("ffn",),
    "*.mlp.*down.weight": ("model", "ffn"),
    "*.mlp.*down.bias": ("model",),
    "mtp.*.join.weight": ("model", "joined"),
    "*norm.weight": ("model",),
    "*norm.bias": ("model",),
    "head.weight": ("vocab", "model"),
}
"""Parameter-name pattern to the names of the parameter's dimensions; the first match counts. A block is `blocks.N` or
`mtp.N.block`, so that patterns for its parts begin with a star."""

INITIAL: dict[str, str] = {
    "*norm.weight": "ones",
    "*.bias": "zeros",
    "*.attention.output.weight": "residual",
    "*.mlp.*down.weight": "residual",
    "*.mlp.experts.down": "residual",
    "*": "normal",
}
"""Parameter-name pattern to initial values; the first match counts. "residual" is normal, scaled down with the number of layers."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), in the dtype of x, whatever is added; some models normalize what is added, too.
    The index decides whether it has experts.

    Both halves are attributes like `forward`: a technique may replace one of them.
    """

    def __init__(self, spec: ModelSpec, index: int):
        super().__init__()
        self.attention_norm = norm(spec, spec.dim)
        self.attention = Attention(spec) if spec.mla is None else LatentAttention(spec, spec.mla)
        self.mlp_norm = norm(spec, spec.dim)
        self.mlp = _feed_forward(spec, index)
        self.attention_out_norm = norm(spec, spec.dim) if spec.norm_place == "both" else nn.Identity()
        self.mlp_out_norm = norm(spec, spec.dim) if spec.norm_place == "both" else nn.Identity()
        if isinstance(self.mlp, MoE) and isinstance(self.mlp_norm, RMSNorm):
            self.mlp_norm.in_one_pass = True  # the half that routes tokens is not compiled

    def forward(self, x_BSD: Tensor, scope: Scope, rotation: Rotation | None, kv_cache: KVCache | None = None) -> Tensor:
        return self.feed_forward_half(self.attention_half(x_BSD, scope, rotation, kv_cache))

    def attention_half(self, x_BSD: Tensor, scope: Scope, rotation: Rotation | None, kv_cache: KVCache | None) -> Tensor:
        y_BSD = self.attention(self.attention_norm(x_BSD), scope, rotation, kv_cache)
        return (x_BSD + self.attention_out_norm(y_BSD)).to(x_BSD.dtype)

    def feed_forward_half(self, x_BSD: Tensor) -> Tensor:
        return (x_BSD + self.mlp_out_norm(self.mlp(self.mlp_norm(x_BSD)))).to(x_BSD.dtype)


def _feed_forward(spec: ModelSpec, index: int) -> nn.Module:
    if spec.moe is not None and index >= spec.moe.dense_layers:
        return MoE(spec.dim, spec.moe)
    kinds = {"swiglu": SwiGLU, "geglu": GeGLU, "gelu": GELU}
    return kinds[spec.activation](spec.dim, spec.hidden, spec.bias)


def _embedding(rows: int, dim: int) -> nn.Embedding:
    """Equals `nn.Embedding(rows, dim)`, whose random numbers import `torch._dynamo` on the meta device: seconds in every rank."""
    weight = torch.empty(rows, dim)
    return nn.Embedding.from_pretrained(weight if weight.is_meta else weight.normal_(), freeze=False)


class Decoder(nn.Module):
    """Tokens in, logits out. Positions and document boundaries are inputs.

    `project` is a plain attribute like `attend`: it turns the final states and the weight of the head into logits, or into whatever the
    loss reads instead of them. A matrix product by default, replaced where logits are divided or chunked.
    """

    project: Callable[[Tensor, Tensor], Any]
    takes_spans = True
    """Whether `forward` has the argument `spans`."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.is_first_stage = self.is_last_stage = True
        self.embed = _embedding(spec.rows, spec.dim)
        self.position_embed = _embedding(spec.context, spec.dim) if spec.positions == "learned" else None
        self.blocks = nn.ModuleDict({str(index): Block(spec, index) for index in range(spec.layers)})
        self.norm = norm(spec, spec.dim)
        self.head = None if spec.tied else nn.Linear(spec.dim, spec.rows, bias=False)
        self.mtp = nn.ModuleList(MTPModule(spec, Block(spec, spec.layers - 1)) for _ in range(spec.mtp_depth))
        self.project = linear if spec.logit_cap is None else partial(_capped, spec.logit_cap)

    def part(self, first: int, stop: int) -> Decoder:
        """A pipeline stage: blocks first … stop - 1 as a model of the same modules under the same names.

        The first stage has the embedding, the last stage norm and head. Each stage takes the previous stage's output as tokens.
        """
        part = copy(self)
        part._modules = dict(self._modules)
        part.is_first_stage, part.is_last_stage = first == 0, stop == len(self.blocks)
        part.blocks = nn.ModuleDict({str(index): self.blocks[str(index)] for index in range(first, stop)})
        if not part.is_first_stage:
            part.position_embed = None
            if self.head is not None or not part.is_last_stage:  # if tied, the embedding is also the head
                del part.embed
        if not part.is_last_stage:
            del part.norm, part.head, part.mtp
        return part

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor,
        documents_BS: Tensor | None = None,
        kv_cache: list[KVCache] | None = None,
        spans: DocumentSpans | None = None,
    ) -> Any:
        """Logits [B, S, V]. `documents_BS` keeps attention within each document; None: one document per sequence. `spans`: the same, for
        kernels that need no mask.

        With multi-token prediction, in training and with gradients: a tuple with the logits of each depth after them.
        """
        x_BSD = self._embedded(tokens_BS) if self.is_first_stage else tokens_BS
        if self.position_embed is not None:
            x_BSD = x_BSD + self.position_embed(positions_BS)
        views = self._views(x_BSD, positions_BS, documents_BS, spans)
        for index, block in enumerate(self.blocks.values()):
            x_BSD = block(x_BSD, *views[index], None if kv_cache is None else kv_cache[index])
        return self._finish(x_BSD, tokens_BS, *views[-1]) if self.is_last_stage else x_BSD

    def _views(
        self, x_BSD: Tensor, positions_BS: Tensor, documents_BS: Tensor | None, spans: DocumentSpans | None
    ) -> list[tuple[Scope, Rotation | None]]:
        """For each block: which keys its queries see, and the rotation of their positions. Blocks with the same window share them."""
        windows = [self.spec.window_of(int(layer)) for layer in self.blocks]
        rotation = local = None if self.spec.positions == "learned" else rotary(self.spec, positions_BS)
        if self.spec.rope_local_theta is not None:
            local = rotary(replace(self.spec, rope_theta=self.spec.rope_local_theta, rope_scaling=None), positions_BS)
        views = {
            window: (Scope(documents_BS, spans, window), rotation if window is None else local)
            for window in dict.fromkeys(windows)
        }
        for block in list(self.blocks.values())[:1]:
            for scope, _ in views.values():
                prepare(scope, block.get_submodule("attention"), x_BSD, positions_BS.shape[1])
        return [views[window] for window in windows]

    def _embedded(self, tokens_BS: Tensor) -> Tensor:
        x_BSD: Tensor = self.embed(tokens_BS)
        return x_BSD * math.sqrt(self.spec.dim) if self.spec.scale_embedding else x_BSD

    def _finish(self, x_BSD: Tensor, tokens_BS: Tensor, scope: Scope, rotation: Rotation | None) -> Any:
        logits_BSV = self._logits(self.norm(x_BSD))
        if not (len(self.mtp) and self.training and torch.is_grad_enabled()):
            return logits_BSV
        deeper = []
        for depth, module in enumerate(self.mtp, start=1):
            x_BSD, normed_BSD = module(x_BSD, self._embedded(mtp_tokens(tokens_BS, depth)), scope, rotation)
            deeper.append(self._logits(normed_BSD))
        return (logits_BSV, *deeper)

    def _logits(self, x_BSD: Tensor) -> Any:
        return self.project(x_BSD, self.embed.weight if self.head is None else self.head.weight)


def _capped(cap: float, x_BSD: Tensor, weight_VD: Tensor) -> Tensor:
    return soft_cap(linear(x_BSD, weight_VD), cap)


class MTPModule(nn.Module):
    """One depth of multi-token prediction (DeepSeek-V3), which is used in training only: joins the previous state with the embedding of a
    token further ahead and applies one block. Embedding and output head are shared with the model."""

    def __init__(self, spec: ModelSpec, block: nn.Module):
        super().__init__()
        self.token_norm = norm(spec, spec.dim)
        self.state_norm = norm(spec, spec.dim)
        self.join = nn.Linear(2 * spec.dim, spec.dim, bias=False)
        self.block = block
        self.norm = norm(spec, spec.dim)

    def forward(self, state_BSD: Tensor, token_BSD: Tensor, scope: Scope, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """The state for the next depth, and the same state normalized, for the head."""
        joined_BSD = self.join(torch.cat((self.token_norm(token_BSD), self.state_norm(state_BSD)), dim=-1))
        # From here on it is a residual stream, in the precision of the previous one.
        state_BSD = self.block(joined_BSD.to(state_BSD.dtype), scope, rotation)
        return state_BSD, self.norm(state_BSD)


def mtp_tokens(tokens_BS: Tensor, depth: int) -> Tensor:
    """The token `depth` positions ahead of each position. The last positions have none and no target, so that any token will do."""
    return F.pad(tokens_BS[:, depth:], (0, min(depth, tokens_BS.shape[1])))


def mtp_targets(targets_BS: Tensor, documents_BS: Tensor | None, depth: int) -> Tensor:
    """The targets of depth 1, 2, …: the target `depth` positions ahead, if it is in the window and in the same document.

    A position near the end of its document reads a token of the next document. Only later positions could attend to it, and none
    of them is in the same document, so that dropping the position's own target is enough.
    """
    shifted_BS = F.pad(targets_BS[:, depth:], (0, min(depth, targets_BS.shape[1])), value=IGNORED)
    if documents_BS is not None:
        later_BS = F.pad(documents_BS[:, depth:], (0, min(depth, documents_BS.shape[1])), value=-1)
        shifted_BS = shifted_BS.masked_fill(later_BS != documents_BS, IGNORED)
    return shifted_BS.masked_fill(shifted_BS < 0, IGNORED)
