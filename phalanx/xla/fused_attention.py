"""Causal attention in JAX with the kernel of the platform: cuDNN's on NVIDIA, splash on TPU, plain products elsewhere. `xla/model_seams` puts
`attend` where a model's attention modules have theirs.

It knows documents, sliding windows, soft caps, fewer heads of keys than of queries, and values narrower than keys. Kernels run inside shard_map:
sequences over the axes of the batch, heads over the tensor axis. Devices of the context axes hold some positions of every sequence each, in an
order that the layout knows; they gather keys and values, or send them around as `xla/ring_attention` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm, prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from phalanx.xla.device_mesh import zigzag
from phalanx.xla.plain_attention import plain_attention
from phalanx.xla.ring_attention import Ring, ring_attention

# Shapes: B sequences, H heads of queries, K of keys, S positions of queries, T of keys, E width of queries and keys.

_LANES = 128  # positions that splash takes at a time: the least that its blocks are multiples of
_BLOCKS = (512, 256, 128)  # of splash, the largest that divides first
_CUDNN_WIDEST = 256  # width of a head, on Hopper and later
_CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Scoring:
    """Which keys a query sees besides the causal mask, and what becomes of its scores."""

    window: int | None = None
    """The most keys that a query attends to: its own and those just before it; None: no limit."""
    scale: float | None = None
    """None: 1 / sqrt(width)."""
    cap: float | None = None
    """Soft cap of the scores; None: none."""


@dataclass(frozen=True)
class Devices:
    """The platform, and the axes of the mesh over which attention is divided."""

    platform: Literal["cpu", "cuda", "tpu"] = "cpu"
    mesh: Mesh | None = None
    """None: one device."""
    batch: tuple[str, ...] = ("data", "shard")
    """Axes that divide sequences."""
    heads: tuple[str, ...] = ("tensor",)
    sequence: tuple[str, ...] = ("context",)
    """Axes that divide the positions of every sequence."""
    context: Literal["gather", "ring"] = "gather"
    """How queries meet the keys of other devices."""
    order: Literal["straight", "zigzag"] = "straight"
    """Which positions the devices of the sequence axes hold: one piece each, or an early and a late one."""
    interpret: bool = False
    """Run a TPU's kernel on any platform, slowly: for tests."""

    def size(self, *axes: str) -> int:
        """Devices along these axes."""
        return 1 if self.mesh is None else prod(self.mesh.shape.get(axis, 1) for axis in axes)

    def positions(self, length: int) -> npt.NDArray[np.int32]:
        """The position in the sequence of each row of an array that is divided over the sequence axes."""
        count, whole = self.size(*self.sequence), np.arange(length, dtype=np.int32)
        if count == 1 or self.order == "straight":
            return whole
        return zigzag(length, count)


class Kernel(NamedTuple):
    """What computes attention, and why not a faster one."""

    name: Literal["plain", "ring", "cudnn", "splash"]
    reason: str = ""


def choose_kernel(q_BHSE: Array, documents_BS: Array | None, scoring: Scoring, devices: Devices) -> Kernel:
    """Decided by shapes, dtypes and the platform alone."""
    divided = devices.size(*devices.sequence) > 1
    if divided and devices.context == "ring":
        return Kernel("ring")
    if devices.platform == "tpu":
        return Kernel("splash")
    if devices.platform != "cuda":
        return Kernel("plain", "no kernel of this platform")
    if q_BHSE.dtype not in _CUDNN_DTYPES:
        return Kernel("plain", f"cuDNN computes in 16 bits, not in {q_BHSE.dtype}")
    if scoring.cap is not None:
        return Kernel("plain", "cuDNN has no soft cap")
    if q_BHSE.shape[-1] > _CUDNN_WIDEST or q_BHSE.shape[-1] % 8:
        return Kernel("plain", f"cuDNN takes heads of a multiple of 8 up to {_CUDNN_WIDEST} wide, not {q_BHSE.shape[-1]}")
    if (divided or documents_BS is not None) and q_BHSE.shape[2] % 2:
        return Kernel("plain", f"cuDNN takes a mask of an even number of positions, not of {q_BHSE.shape[2]}")
    return Kernel("cudnn")


def attend(
    q_BHSE: Array,
    k_BKTE: Array,
    v_BKTE: Array,
    documents_BS: Array | None = None,
    scoring: Scoring | None = None,
    devices: Devices | None = None,
) -> Array:
    """Causal attention within documents, [B, H, S, width of values]. All arrays of a sequence are in the order of `devices.positions`."""
    scoring, devices = scoring or Scoring(), devices or Devices()
    length = q_BHSE.shape[2]
    if scoring.window is not None and scoring.window >= length:
        scoring = Scoring(None, scoring.scale, scoring.cap)
    kernel = choose_kernel(q_BHSE, documents_BS, scoring, devices).name
    positions_S = devices.positions(length)
    if kernel == "plain":
        visible_B1ST = _visible(positions_S, positions_S, documents_BS, scoring.window)
        return plain_attention(q_BHSE, k_BKTE, v_BKTE, visible_B1ST, _scale(q_BHSE, scoring), scoring.cap)
    _check(q_BHSE, k_BKTE, devices)
    k_BKTE, v_BKTE = (_enough_heads(x, devices.size(*devices.heads)) for x in (k_BKTE, v_BKTE))
    local = {"ring": _ring, "cudnn": _cudnn, "splash": _splash}[kernel]
    return local(q_BHSE, k_BKTE, v_BKTE, documents_BS, scoring, devices)


def _check(q_BHSE: Array, k_BKTE: Array, devices: Devices) -> None:
    sequences, heads, length, _ = q_BHSE.shape
    for size, axes, what in (
        (sequences, devices.batch, "sequences"),
        (heads, devices.heads, "heads"),
        (length, devices.sequence, "positions"),
    ):
        if size % devices.size(*axes):
            raise ValueError(f"{devices.size(*axes)} devices of the axes {list(axes)} cannot share {size} {what} evenly.")
    if heads % lcm(k_BKTE.shape[1], devices.size(*devices.heads)):
        raise ValueError(
            f"{devices.size(*devices.heads)} devices cannot share {heads} heads of queries and {k_BKTE.shape[1]} of keys: a device "
            "would need parts of a head of keys."
        )


def _enough_heads(x_BKTE: Array, devices: int) -> Array:
    """Heads of keys or values that every device can have as many of: repeated if there are too few."""
    heads = x_BKTE.shape[1]
    return jnp.repeat(x_BKTE, lcm(heads, devices) // heads, axis=1)


def _visible(
    queries_S: npt.NDArray[np.int32] | Array, keys_T: npt.NDArray[np.int32], documents: Any, window: int | None
) -> Array:
    """[B or 1, 1, S, T], true where a query (row) sees a key (column). `documents`: of each position, or of queries and of keys."""
    distance_ST = jnp.asarray(queries_S)[:, None] - jnp.asarray(keys_T)
    visible_ST = distance_ST >= 0
    if window is not None:
        visible_ST &= distance_ST < window
    if documents is None:
        return visible_ST[None, None]
    of_queries, of_keys = documents if isinstance(documents, tuple) else (documents, documents)
    return (visible_ST & (of_queries[:, :, None] == of_keys[:, None]))[:, None]


def _scale(q_BHSE: Array, scoring: Scoring) -> float:
    return float(q_BHSE.shape[-1] ** -0.5) if scoring.scale is None else scoring.scale


def _mapped(
    local: Callable[..., Array], arrays: tuple[Any, ...], devices: Devices, more: tuple[tuple[Any, Any], ...] = ()
) -> Array:
    """`local` on every device with its heads and positions of queries, keys and values, its documents, and what `more` gives with its specs."""
    values = (*arrays, *(value for value, _ in more))
    if devices.mesh is None or devices.mesh.size == 1:
        return local(*values)

    def known(*axes: str) -> Any:
        found = tuple(axis for axis in axes if axis in devices.mesh.shape)  # type: ignore[union-attr]
        return found or None

    stream = P(known(*devices.batch), known(*devices.heads), known(*devices.sequence), None)
    documents = None if arrays[3] is None else P(known(*devices.batch), known(*devices.sequence))
    specs = (stream, stream, stream, documents, *(spec for _, spec in more))
    return jax.shard_map(local, mesh=devices.mesh, in_specs=specs, out_specs=stream, check_vma=False)(*values)


def _ring(q: Array, k: Array, v: Array, documents_BS: Array | None, scoring: Scoring, devices: Devices) -> Array:
    ring = Ring(devices.sequence, devices.size(*devices.sequence), _scale(q, scoring), scoring.cap, scoring.window)

    def local(q: Array, k: Array, v: Array, documents: Array | None, positions_S: Array) -> Array:
        return ring_attention((q, k, v), positions_S, documents, ring)

    positions_S = jnp.asarray(devices.positions(q.shape[2]))
    return _mapped(local, (q, k, v, documents_BS), devices, ((positions_S, P(devices.sequence)),))


def _gathered(devices: Devices, positions_S: npt.NDArray[np.int32], *values: tuple[Array | None, int]) -> list[Any]:
    """Inside shard_map: all positions of each array along its dimension, in rising order."""
    if devices.size(*devices.sequence) == 1:
        return [value for value, _ in values]
    whole = [None if value is None else lax.all_gather(value, devices.sequence, axis=dim, tiled=True) for value, dim in values]
    if devices.order == "straight":
        return whole
    rising = np.argsort(positions_S)
    return [None if value is None else jnp.take(value, rising, axis=dim) for value, (_, dim) in zip(whole, values, strict=True)]


def _cudnn(q: Array, k: Array, v: Array, documents_BS: Array | None, scoring: Scoring, devices: Devices) -> Array:
    """Documents, and queries that have only some positions, are a mask of all pairs, which takes memory; the kernel knows windows itself. Its
    packed sequences would need none, but a bound on the number of documents that a traced program does not know."""
    length, narrow = q.shape[2], v.shape[-1]
    positions_S = devices.positions(length)
    masked = documents_BS is not None or devices.size(*devices.sequence) > 1
    v = jnp.pad(v, ((0, 0),) * 3 + ((0, q.shape[-1] - narrow),))  # jax.nn wants one width

    def local(q: Array, k: Array, v: Array, documents: Array | None, own_S: Array) -> Array:
        k, v, all_documents = _gathered(devices, positions_S, (k, 2), (v, 2), (documents, 1))
        mask, window = None, None
        if masked:
            both = None if documents is None else (documents, all_documents)
            mask = _visible(own_S, np.arange(length, dtype=np.int32), both, scoring.window)
        elif scoring.window is not None:
            window = (scoring.window - 1, 0)
        q_BSHE, k_BTKE, v_BTKE = (x.swapaxes(1, 2) for x in (q, k, v))
        out_BSHE = jax.nn.dot_product_attention(
            q_BSHE,
            k_BTKE,
            v_BTKE,
            mask=mask,
            scale=_scale(q, scoring),
            is_causal=not masked,
            local_window_size=window,
            implementation="cudnn",
        )
        return out_BSHE.swapaxes(1, 2)

    own = (jnp.asarray(positions_S), P(devices.sequence if devices.size(*devices.sequence) > 1 else None))
    return _mapped(local, (q, k, v, documents_BS), devices, (own,))[..., :narrow]


def _splash(q: Array, k: Array, v: Array, documents_BS: Array | None, scoring: Scoring, devices: Devices) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    length, parts = q.shape[2], devices.size(*devices.sequence)
    positions_S = devices.positions(length)
    queries, keys = length // parts + -(length // parts) % _LANES, length + -length % _LANES
    # A query that only fills a block takes the first position.
    filled_S = np.pad(positions_S.reshape(parts, -1), ((0, 0), (0, queries - length // parts))).reshape(-1)
    kernel = _splash_kernel(filled_S, keys, q.shape[1] // k.shape[1], scoring, devices)
    scale = _scale(q, scoring)

    def local(q: Array, k: Array, v: Array, documents: Array | None, kernel: Callable[..., Array]) -> Array:
        k, v, all_documents = _gathered(devices, positions_S, (k, 2), (v, 2), (documents, 1))
        own = q.shape[2]
        grouped_BKGSE = (q * scale).astype(q.dtype).reshape(len(q), k.shape[1], -1, *q.shape[2:])
        grouped_BKGSE = _fill(grouped_BKGSE, 3, queries)
        k, v = _fill(k, 2, keys), _fill(v, 2, keys)
        if documents is None:
            out = jax.vmap(jax.vmap(kernel))(grouped_BKGSE, k, v)
        else:
            # Such a query is of the first document too, so that it sees one key: an empty sum would be no number.
            filled = jnp.concatenate((documents, jnp.repeat(all_documents[:, :1], queries - own, axis=1)), axis=1)
            segments = splash.SegmentIds(filled.astype(jnp.int32), _fill(all_documents, 1, keys).astype(jnp.int32))
            out = jax.vmap(jax.vmap(kernel, in_axes=(0, 0, 0, None)))(grouped_BKGSE, k, v, segments)
        return out[:, :, :, :own].reshape(*q.shape[:3], v.shape[-1])

    axis = devices.sequence if parts > 1 else None
    spec = None if devices.mesh is None else kernel.manual_sharding_spec(NamedSharding(devices.mesh, P(None, axis)))
    return _mapped(local, (q, k, v, documents_BS), devices, ((kernel, spec),))


def _splash_kernel(positions_S: npt.NDArray[np.int32], keys: int, group: int, scoring: Scoring, devices: Devices) -> Any:
    """For the heads that share one head of keys, and the queries of all devices of the sequence axes. It skips blocks that the mask empties."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    whole, parts = (len(positions_S), keys), devices.size(*devices.sequence)
    mask = masks.CausalMask(whole) if scoring.window is None else masks.LocalMask(whole, (scoring.window - 1, 0), 0)
    mask.q_sequence = positions_S
    block_q, block_k = (next(size for size in _BLOCKS if length % size == 0) for length in (len(positions_S) // parts, keys))
    blocks = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_q_dq=block_q,
        block_kv_dq=block_k,
    )
    return splash.make_splash_mqa(
        masks.MultiHeadMask([mask] * group),
        block_sizes=blocks,
        attn_logits_soft_cap=scoring.cap,
        head_shards=1,
        q_seq_shards=parts,
        interpret=devices.interpret,
    )


def _fill(x: Array, dim: int, length: int) -> Array:
    """With zeros up to this length along a dimension."""
    return jnp.pad(x, [(0, length - size if at == dim else 0) for at, size in enumerate(x.shape)])
