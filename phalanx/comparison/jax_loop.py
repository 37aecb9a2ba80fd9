"""The loop in plain JAX of the comparison: what a good engineer writes for one Llama on one GPU, without torchax and without a library on top of JAX. It
shares no code of a step with Phalanx's XLA engine, so it says what XLA itself makes of this computation.

fp32 master weights that are cast to bf16 once a step (fp32 alone on CPUs), query, key and value in one product, gate and up in one, blocks in a scan that
stores products and attention and computes the rest again, cuDNN's attention on GPUs, the loss and its gradient in chunks of tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from phalanx.comparison.handwritten_loop import frequencies, supported
from phalanx.comparison.peer_loop import PeerJob
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec

# Shapes: B sequences, S positions, D width, H heads of queries, K of keys, E width of a head, N tokens, V vocabulary, L blocks.

_CHUNK = 8192
"""Tokens whose logits exist at the same time."""
Arrays = dict[str, jax.Array]


class Llama(NamedTuple):
    """The parameters of a Llama, or of Qwen3's dense variant, or anything that there is for each of them."""

    embed: Any
    norm: Any
    head: Any
    """None: the embedding."""
    blocks: Any
    """By name; the first dimension of each array is the block."""


class State(NamedTuple):
    weights: Llama
    means: Llama
    squares: Llama
    taken: jax.Array


class Recipe(NamedTuple):
    """What does not change from step to step."""

    spec: ModelSpec
    dtype: Any
    """Of products and of what flows between blocks."""
    attention: str
    """The implementation of `jax.nn.dot_product_attention`."""
    clip: float
    betas: tuple[float, float]
    eps: float
    decay: float


def rms(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps) * weight).astype(x.dtype)


def rotate(x_BSHE: jax.Array, cos_SE: jax.Array, sin_SE: jax.Array) -> jax.Array:
    first, second = jnp.split(x_BSHE.astype(jnp.float32), 2, -1)
    cos, sin = cos_SE[:, None], sin_SE[:, None]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1).astype(x_BSHE.dtype)


def product(x: jax.Array, weight_OI: jax.Array) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, weight_OI)


def block(recipe: Recipe, turns: tuple[jax.Array, jax.Array], x_BSD: jax.Array, weights: Arrays) -> tuple[jax.Array, None]:
    spec = recipe.spec
    sizes = np.cumsum([spec.heads * spec.head, spec.kv * spec.head])
    qkv = jnp.split(product(rms(x_BSD, weights["attention_norm"], spec.norm_eps), weights["qkv"]), sizes, -1)
    q, k, v = (part.reshape(*part.shape[:2], -1, spec.head) for part in qkv)
    if spec.qk_norm:
        q, k = rms(q, weights["query_norm"], spec.norm_eps), rms(k, weights["key_norm"], spec.norm_eps)
    q, k = rotate(q, *turns), rotate(k, *turns)
    attend: Any = jax.nn.dot_product_attention
    attended = attend(q, k, v, is_causal=True, implementation=recipe.attention)
    x_BSD += product(attended.reshape(*x_BSD.shape[:2], -1), weights["output"])
    gate, up = jnp.split(product(rms(x_BSD, weights["mlp_norm"], spec.norm_eps), weights["gate_up"]), 2, -1)
    return x_BSD + product(jax.nn.silu(gate) * up, weights["down"]), None


def stored(primitive: Any, *inputs: Any, **parameters: Any) -> bool:
    """Products and cuDNN's attention: what is between them costs less to compute than to store."""
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *inputs, **parameters)
    return bool(is_product) or primitive.name.startswith("dot_product_attention_fwd")


def states(recipe: Recipe, weights: Llama, tokens_BS: jax.Array) -> jax.Array:
    """What the head multiplies."""
    spec = recipe.spec
    angles = jnp.arange(tokens_BS.shape[1])[:, None] * jnp.asarray(frequencies(spec).numpy())
    x_BSD = weights.embed[tokens_BS].astype(recipe.dtype)
    repeated = jax.checkpoint(partial(block, recipe, (jnp.cos(angles), jnp.sin(angles))), policy=stored, prevent_cse=False)
    x_BSD, _ = jax.lax.scan(repeated, x_BSD, weights.blocks)
    return rms(x_BSD, weights.norm, spec.norm_eps)


@jax.custom_vjp
def chunked_loss(states_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array) -> jax.Array:
    """Sum of the losses. Its gradients are computed with it, so that no logits are computed twice."""
    return _loss_and_gradients(states_ND, head_VD, targets_N)[0]


def _loss_and_gradients(states_ND: jax.Array, head_VD: jax.Array, targets_N: jax.Array) -> tuple[jax.Array, Any]:
    count = len(states_ND)
    size = next(size for size in range(min(_CHUNK, count), 0, -1) if count % size == 0)

    def add(sums: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        (states, targets), (loss, gradient) = chunk, sums
        logits = product(states, head_VD)
        wide = logits.astype(jnp.float32)
        whole = jax.nn.logsumexp(wide, -1)
        counted, here = targets >= 0, jnp.arange(wide.shape[-1]) == targets[:, None]
        loss += jnp.where(counted, whole - jnp.where(here, wide, 0).sum(-1), 0).sum()
        slope = jnp.where(counted[:, None], jnp.exp(wide - whole[:, None]) - here, 0).astype(states.dtype)
        gradient += jnp.einsum("nv,nd->vd", slope, states, preferred_element_type=jnp.float32)
        return (loss, gradient), jnp.einsum("nv,vd->nd", slope, head_VD)

    chunks = states_ND.reshape(-1, size, states_ND.shape[-1]), targets_N.reshape(-1, size)
    nothing = jnp.zeros((), jnp.float32), jnp.zeros(head_VD.shape, jnp.float32)
    (loss, gradient), of_states = jax.lax.scan(add, nothing, chunks)
    return loss, (of_states.reshape(states_ND.shape), gradient.astype(head_VD.dtype))


def _scaled(gradients: tuple[jax.Array, jax.Array], factor: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    of_states, of_head = gradients
    return (factor * of_states).astype(of_states.dtype), (factor * of_head).astype(of_head.dtype), None


chunked_loss.defvjp(_loss_and_gradients, _scaled)


def step(recipe: Recipe, state: State, batch: tuple[jax.Array, jax.Array], rate: jax.Array) -> tuple[State, jax.Array]:
    """AdamW on the master weights."""
    tokens, targets = batch

    def loss_of(weights: Llama) -> jax.Array:
        x = states(recipe, weights, tokens).reshape(targets.size, -1)
        return chunked_loss(x, head_of(recipe, weights), targets.reshape(-1)) / (targets >= 0).sum()

    loss, gradients = jax.value_and_grad(loss_of)(cast(recipe, state.weights))
    squared = sum(jnp.square(gradient.astype(jnp.float32)).sum() for gradient in jax.tree.leaves(gradients))
    scale = jnp.minimum(1, recipe.clip / (jnp.sqrt(squared) + 1e-6))
    taken = state.taken + 1
    first, second = (1 - beta**taken for beta in recipe.betas)

    def update(path: Any, value: jax.Array, mean: jax.Array, square: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        gradient = scale * gradient.astype(jnp.float32)
        mean = recipe.betas[0] * mean + (1 - recipe.betas[0]) * gradient
        square = recipe.betas[1] * square + (1 - recipe.betas[1]) * jnp.square(gradient)
        value = value * (1 - rate * (0 if is_norm(path) else recipe.decay))
        return value - rate / first * mean / (jnp.sqrt(square / second) + recipe.eps), mean, square

    updated = jax.tree_util.tree_map_with_path(update, state.weights, state.means, state.squares, gradients)
    weights, means, squares = jax.tree.transpose(jax.tree.structure(state.weights), jax.tree.structure((0, 0, 0)), updated)
    return State(weights, means, squares, taken), loss


def cast(recipe: Recipe, weights: Llama) -> Llama:
    """Matrices of blocks and the head in the format of products. The embedding is looked up as it is: sums of its gradients need fp32."""
    blocks = {name: value if name.endswith("norm") else value.astype(recipe.dtype) for name, value in weights.blocks.items()}
    head = None if weights.head is None else weights.head.astype(recipe.dtype)
    return weights._replace(head=head, blocks=blocks)


def head_of(recipe: Recipe, weights: Llama) -> jax.Array:
    head: jax.Array = weights.embed.astype(recipe.dtype) if weights.head is None else weights.head
    return head


def is_norm(path: Any) -> bool:
    return jax.tree_util.keystr(path).rstrip("']").endswith("norm")


class JaxLoop:
    """One training step after another."""

    def __init__(self, job: PeerJob):
        spec, chosen = job.run.model, job.run.optimizer
        if not supported(spec):
            raise RunError("no loop in plain JAX for this architecture")
        self._job = job
        low = job.dtype != torch.float32
        self._recipe = Recipe(
            spec=spec,
            dtype=jnp.bfloat16 if low else jnp.float32,
            attention="cudnn" if low and job.plan.device == "cuda" else "xla",
            clip=job.run.train.clip,
            betas=(chosen.beta1, chosen.beta2),
            eps=chosen.eps,
            decay=chosen.weight_decay,
        )
        weights = jax.tree.map(jnp.asarray, initial(spec, job))
        nothing = partial(jax.tree.map, jnp.zeros_like)
        self._state = State(weights, nothing(weights), nothing(weights), jnp.zeros((), jnp.int32))
        self._step: Any = jax.jit(partial(step, self._recipe), donate_argnums=0)
        self._batches = [tuple(jnp.asarray(part.numpy(), jnp.int32) for part in batch) for batch in job.batches]
        self._taken = 0
        self.version, self.compute = jax.__version__, job.compute
        formats = "fp32 master weights cast to bf16 once a step" if low else "fp32 weights"
        self.settings = (
            f"plain JAX, {formats}, {self._recipe.attention} attention, products stored, loss in chunks of {_CHUNK:,}"
        )

    def step(self) -> float:
        """Takes one step; returns its loss, after the device has computed it."""
        self._state, loss = self._step(self._state, self._batches[self._taken], jnp.float32(self._job.rate(self._taken)))
        self._taken += 1
        return float(jax.block_until_ready((loss, self._state))[0])

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        rows = jnp.asarray(tokens.numpy(), jnp.int32), jnp.asarray(targets.numpy().reshape(-1), jnp.int32)
        compute: Any = jax.jit(partial(_losses_of_tokens, self._recipe))
        return torch.from_numpy(np.array(compute(self._state.weights, *rows)))


def _losses_of_tokens(recipe: Recipe, weights: Llama, tokens_BS: jax.Array, targets_N: jax.Array) -> jax.Array:
    low = cast(recipe, weights)
    x = states(recipe, low, tokens_BS).reshape(targets_N.size, -1)
    logits = product(x, head_of(recipe, low)).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, jnp.maximum(targets_N, 0)[:, None], -1)[:, 0]
    return jnp.where(targets_N >= 0, jax.nn.logsumexp(logits, -1) - picked, 0)


def initial(spec: ModelSpec, job: PeerJob) -> Llama:
    """Phalanx's initial values, on the host: those of all blocks in one array, with the matrices of one product on top of each other."""
    queries, keys = spec.heads * spec.head, spec.kv * spec.head
    shapes = {
        "attention_norm": (spec.dim,),
        "qkv": (queries + 2 * keys, spec.dim),
        "output": (spec.dim, queries),
        "mlp_norm": (spec.dim,),
        "gate_up": (2 * spec.hidden, spec.dim),
        "down": (spec.dim, spec.hidden),
    } | ({"query_norm": (spec.head,), "key_norm": (spec.head,)} if spec.qk_norm else {})
    blocks = {name: np.empty((spec.layers, *shape), np.float32) for name, shape in shapes.items()}
    whole, rows = slice(None), np.cumsum([queries, keys, keys])
    places = {
        "attention.query": ("qkv", slice(0, rows[0])),
        "attention.key": ("qkv", slice(rows[0], rows[1])),
        "attention.value": ("qkv", slice(rows[1], rows[2])),
        "mlp.gate": ("gate_up", slice(0, spec.hidden)),
        "mlp.up": ("gate_up", slice(spec.hidden, None)),
    }
    outside: dict[str, np.ndarray] = {}
    for name, value in job.weights():
        part = name.removesuffix(".weight")
        if part.startswith("blocks."):
            _, index, inner = part.split(".", 2)
            place, where = places.get(inner, (inner.rpartition(".")[2], whole))
            blocks[place][int(index), where] = value.numpy()
        else:
            outside[part] = value.numpy()
    return Llama(outside["embed"], outside["norm"], outside.get("head"), blocks)
