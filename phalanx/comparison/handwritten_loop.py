"""The hand-written loop of the comparison: what a good engineer writes for one Llama on one GPU, in plain PyTorch. It shares no code of a
step with Phalanx, so it is also an independent statement of what a step computes.

bf16 weights next to fp32 master weights (fp32 alone on CPUs), query, key and value in one product, gate and up in one, each block compiled,
the loss and its gradient in chunks of tokens, so that the logits of a batch never exist as a whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.comparison.peer_loop import PeerJob, token_losses
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec

_CHUNK = 8192
"""Tokens whose logits exist at the same time."""
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class Block(nn.Module):
    """A block of Llama 2 and 3, and of Qwen3 with its norms of queries and keys."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.sizes = [spec.heads * spec.head, spec.kv * spec.head, spec.kv * spec.head]
        self.head = spec.head
        self.attention_norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.qkv = nn.Linear(spec.dim, sum(self.sizes), bias=False)
        self.query_norm = nn.RMSNorm(spec.head, spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(spec.head, spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.output = nn.Linear(spec.heads * spec.head, spec.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.gate_up = nn.Linear(spec.dim, 2 * spec.hidden, bias=False)
        self.down = nn.Linear(spec.hidden, spec.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).split(self.sizes, -1)
        )
        q, k = rotate(self.query_norm(q), cos, sin), rotate(self.key_norm(k), cos, sin)
        x = x + self.output(attend(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    with sdpa_kernel(_BACKENDS, set_priority=True):  # here, where the block is traced: a context around it has no effect
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Llama(nn.Module):
    """Tokens in, normalized states out. The loss multiplies them by the head."""

    def __init__(self, spec: ModelSpec, length: int):
        super().__init__()
        self.embed = nn.Embedding(spec.rows, spec.dim)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.dim, spec.norm_eps)
        self.head = self.embed if spec.tied else nn.Linear(spec.dim, spec.rows, bias=False)
        angles = torch.outer(torch.arange(length).float(), frequencies(spec))
        self.cos, self.sin = angles.cos(), angles.sin()  # plain attributes, so that they stay fp32

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.embed(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.norm(x)


def frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position, with the scaling of Llama 3.1 where the model has it."""
    plain = spec.rope_theta ** -(torch.arange(0, spec.head, 2).float() / spec.head)
    if (scaling := spec.rope_scaling) is None:
        return plain
    waves = scaling.original_context / (2 * math.pi / plain)  # in the original context
    kept = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(plain / scaling.factor, plain, kept.clamp(0, 1))


class HandwrittenLoop:
    """One training step after another."""

    def __init__(self, job: PeerJob):
        if not supported(job.run.model):
            raise RunError("no hand-written loop for this architecture")
        self.job, self.taken = job, 0
        with torch.device(job.device):
            self.model = Llama(job.run.model, job.run.train.sequence_length)
        fill(self.model, job)
        self.params: list[Tensor] = list(self.model.parameters())
        self.masters = self.params
        if job.dtype != torch.float32:
            self.masters = [param.detach().clone() for param in self.params]
            self.model.to(job.dtype)
        self.optimizer = job.adamw(self.masters)
        self.chunk_loss: Any = chunk_loss
        if job.compile:
            self.chunk_loss = torch.compile(chunk_loss, dynamic=False)
            for block in self.model.blocks:
                block.compile(dynamic=False)
        self.version, self.compute = str(torch.__version__), job.compute
        weights = "fp32 weights" if job.compute == "fp32" else "bf16 weights, fp32 master weights"
        compiled = "blocks compiled" if job.compile else "not compiled"
        self.settings = f"plain PyTorch, {weights}, {compiled}, loss in chunks of {_CHUNK:,}"

    def step(self) -> Tensor:
        tokens, targets = self.job.batches[self.taken]
        states = self.model(tokens)
        # The backward of the head runs chunk by chunk; that of the blocks starts from the gradients of all chunks.
        chunks = [chunk.detach().requires_grad_() for chunk in states.flatten(0, 1).split(_CHUNK)]
        total, counted = torch.zeros((), device=tokens.device), (targets >= 0).sum()
        for chunk, target in zip(chunks, targets.flatten().split(_CHUNK), strict=True):
            loss = self.chunk_loss(chunk, self.model.head.weight, target) / counted
            loss.backward()
            total += loss.detach()
        states.backward(torch.cat([chunk.grad for chunk in chunks if chunk.grad is not None]).view_as(states))
        nn.utils.clip_grad_norm_(self.params, self.job.run.train.clip, foreach=True)
        self.update()
        self.taken += 1
        return total

    @torch.no_grad()
    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.rate(self.taken)
        if self.masters is not self.params:
            for param, master in zip(self.params, self.masters, strict=True):
                master.grad, param.grad = param.grad.float(), None  # type: ignore[union-attr]
        self.optimizer.step()
        if self.masters is not self.params:
            torch._foreach_copy_(self.params, self.masters)
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return token_losses(F.linear(self.model(tokens), self.model.head.weight), targets)


def chunk_loss(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(states, head).float(), targets, reduction="sum")


def supported(spec: ModelSpec) -> bool:
    """Whether the model is a Llama, or Qwen3's dense variant."""
    plain = spec.is_builtin and spec.mla is None and spec.moe is None and not spec.mtp_depth and not spec.bias
    plain = plain and not spec.variations
    scaled = spec.rope_scaling is None or spec.rope_scaling.kind == "llama3"
    return plain and scaled and (spec.norm, spec.activation, spec.positions) == ("rms", "swiglu", "rope")


@torch.no_grad()
def fill(model: Llama, job: PeerJob) -> None:
    """Phalanx's initial values, with the matrices of one product on top of each other."""
    places = {"embed.weight": model.embed.weight, "norm.weight": model.norm.weight, "head.weight": model.head.weight}
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        query, key, value = block.qkv.weight.split(block.sizes)
        gate, up = block.gate_up.weight.chunk(2)
        parts = {
            "attention_norm": block.attention_norm.weight,
            "attention.query": query,
            "attention.key": key,
            "attention.value": value,
            "attention.output": block.output.weight,
            "mlp_norm": block.mlp_norm.weight,
            "mlp.gate": gate,
            "mlp.up": up,
            "mlp.down": block.down.weight,
        }
        if isinstance(block.query_norm, nn.RMSNorm) and isinstance(block.key_norm, nn.RMSNorm):
            parts |= {"attention.query_norm": block.query_norm.weight, "attention.key_norm": block.key_norm.weight}
        places |= {f"blocks.{index}.{name}.weight": tensor for name, tensor in parts.items()}
    for name, value in job.weights():
        places[name].copy_(value)
