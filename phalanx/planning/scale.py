"""A larger or smaller model of the same family. `planning/solve` looks for the largest that a cluster carries, `planning/remedies` for one
that fits."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.model import ModelSpec, Moe

_KEYS = ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn")


def scaled(model: ModelSpec, factor: float) -> ModelSpec:
    """A model of the same family with about so many times its parameters: deeper and wider alike, heads of the same width, as the
    published families have it. Sizes stay multiples of 128, and heads of whatever they were a multiple of."""
    side = factor ** (1 / 3)
    head = model.head
    per = model.heads // model.kv if model.mla is None else 8
    unit = max(per, 2)
    heads = max(unit, round(model.heads * side / unit) * unit)
    dim = (
        max(128, round(model.dim * side / 128) * 128) if model.dim >= 128 else max(head, round(model.dim * side / head) * head)
    )
    kv = model.kv_heads if model.kv_heads is None or model.kv_heads <= 8 else max(1, heads // per)
    if kv is not None and heads % kv:
        heads = max(kv, round(heads / kv) * kv)
    moe = model.moe
    if moe is not None:
        moe = replace(moe, ffn=max(64, round(moe.ffn * side / 64) * 64))
    matrices = replace(
        model, dim=dim, heads=heads, kv_heads=kv, head_dim=head, ffn=max(64, round(model.hidden * side / 64) * 64), moe=moe
    )
    # Depth makes up for what rounding the widths has changed.
    wanted = factor * model.parameters()
    block = replace(matrices, layers=2, preset=None, moe=_all_sparse(matrices)).parameters()
    one = replace(matrices, layers=1, preset=None, moe=_all_sparse(matrices)).parameters()
    least = 1 if moe is None else moe.dense_layers + 1
    layers = max(least, round((wanted - (2 * one - block)) / (block - one)))
    return replace(matrices, layers=layers, preset=None)


def _all_sparse(model: ModelSpec) -> Moe | None:
    return None if model.moe is None else replace(model.moe, dense_layers=0)


def changed_keys(model: ModelSpec, other: ModelSpec) -> str:
    """What a run file has to say for the other model where it has this one: "model.dim = 512, model.layers = 8"."""
    keys = [key for key in _KEYS if key != "head_dim" or other.mla is None]  # latent attention has widths of its own
    found = [f"model.{key} = {getattr(other, key)}" for key in keys if getattr(other, key) != getattr(model, key)]
    if other.moe is not None and model.moe is not None and other.moe.ffn != model.moe.ffn:
        found.append(f"model.moe.ffn = {other.moe.ffn}")
    return ", ".join(found)
