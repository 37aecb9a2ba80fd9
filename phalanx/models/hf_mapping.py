"""How our tensors map to Hugging Face's, for every family, and the conversion of a few rows at a time in both directions. Import,
export and `model.from` apply one table block by block. A new family needs a few lines here and its config in `spec/hf_config`.

A Hugging Face tensor is treated as a matrix: all dimensions but the last are rows, and each value of a vector is a row. So every read
is one contiguous range of bytes, whatever the two layouts are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.models import hf_module
from phalanx.spec import hf_config
from phalanx.spec.errors import RunError
from phalanx.spec.hf_config_write import family
from phalanx.spec.model import Mla, ModelSpec, Moe
from phalanx.spec.tensor_slice import Box, TensorSlice

_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_IGNORED = (
    r".*\.rotary_emb\.inv_freq",
    r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",  # GPT-2's causal mask, which some files store
)
_AGAIN = "Save or download the folder again."
BLOCK = 64 << 20
"""Bytes to read at a time."""
Rows = Callable[[str, int, int], Tensor]
"""(tensor, first row, last row) to those rows, [rows, width]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFPart:
    """The part of a Hugging Face tensor that fills one of ours, or one expert of it."""

    hf_name: str
    shape: tuple[int, ...]
    """Shape of the whole Hugging Face tensor."""
    rows: tuple[int, int]
    """Range of its rows."""
    columns: tuple[int, int] | None = None
    """Range of its columns; None: all."""
    expert: int | None = None
    """Index in the first dimension of our tensor, if that stacks experts that Hugging Face stores apart."""
    transposed: bool = False
    """The Hugging Face tensor is [in, out], as GPT-2's."""
    pairs: tuple[int, int] | None = None
    """(height, last): of every `height` rows, the `last` ones are interleaved pairs; our tensor stores them as two halves."""

    @property
    def width(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One of our tensors and the Hugging Face tensors that hold its values."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[HFPart, ...]
    exact: bool = False
    """Keep the number format when weights are exported in another one: the bias of a router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A box of one of our tensors that is read in one piece."""

    part: HFPart
    rows: tuple[int, int]
    box: Box


def blocks(entry: Entry, itemsize: int, most: int = BLOCK) -> Iterator[Block]:
    """The boxes of our tensor, each of at most `most` bytes, or of the fewest rows that belong together."""
    for part in entry.parts:
        step = max(1, most // (part.width * itemsize))
        if part.pairs is not None:
            step = max(1, step // part.pairs[0]) * part.pairs[0]
        first, last = part.rows
        for start in range(first, last, step):
            stop = min(start + step, last)
            yield Block(part=part, rows=(start, stop), box=_box(part, start - first, stop - start))


def _box(part: HFPart, start: int, count: int) -> Box:
    low, high = part.columns or (0, part.width)
    if not part.shape:
        return Box((), ())
    if part.transposed:
        return Box((0, start), (high - low, count))
    if len(part.shape) == 1:
        return Box((start,), (count,))
    if part.expert is not None:
        return Box((part.expert, start, 0), (1, count, high - low))
    return Box((start, 0), (count, high - low))


def read(block: Block, rows: Rows) -> Tensor:
    """A box of our tensor, from Hugging Face rows."""
    part = block.part
    values = rows(part.hf_name, *block.rows)
    if part.columns is not None:
        values = values[:, slice(*part.columns)]
    if part.pairs is not None:
        values = values[_order(part.pairs, len(values))]
    if part.transposed:
        values = values.T
    return values.contiguous().view(block.box.shape)


def to_hf(part: HFPart, ours: Tensor) -> Tensor:
    """Hugging Face rows, [rows, columns], from our tensor, some rows of it, or one of its experts."""
    values = ours.T if part.transposed else ours.reshape(len(ours), -1)
    if part.pairs is not None:
        values = values[torch.argsort(_order(part.pairs, len(values)))]
    return values.contiguous()


@torch.no_grad()
def fill(
    tensors: dict[str, Tensor], table: tuple[Entry, ...], rows: Rows, slices: Mapping[str, TensorSlice] | None = None
) -> None:
    """Write Hugging Face values into our tensors in place, box by box, on any device and in any format.

    `slices`: the slice of the whole parameter that a tensor holds; values outside it are not read.
    """
    for entry in table:
        target = tensors[entry.name]
        own = (slices or {}).get(entry.name) or TensorSlice.full(target.shape)
        for block in blocks(entry, 4):
            for ours, theirs in own.overlaps(TensorSlice(entry.shape, (block.box,))):
                target[ours.index] = read(block, rows)[theirs.index].to(target.dtype)


def _order(pairs: tuple[int, int], count: int) -> Tensor:
    """For each of our rows, the Hugging Face row: the first of every pair, then the second of every pair."""
    height, last = pairs
    plain = torch.arange(height - last)
    rotated = torch.cat((torch.arange(height - last, height, 2), torch.arange(height - last + 1, height, 2)))
    unit = torch.cat((plain, rotated))
    return (torch.arange(0, count, height)[:, None] + unit).flatten()


class Files(Protocol):
    """The tensors of a folder; `checkpointing/hf_folder` implements it."""

    @property
    def path(self) -> Path: ...
    @property
    def names(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...] | None: ...
    def check(self, wanted: dict[str, tuple[int, ...]], ignored: Collection[str], together: list[list[str]]) -> None: ...


def match(files: Files, spec: ModelSpec) -> tuple[Entry, ...]:
    """The table for a folder, after comparing every tensor with it; RunError names those that do not fit."""
    _plausible(files, spec)
    entries = table(spec, files.names, spec.is_builtin and hf_config.interleaved(hf_config.read_config(files.path)))
    expected = {part.hf_name: part.shape for entry in entries for part in entry.parts}
    stacks = [[part.hf_name for part in entry.parts] for entry in entries if len(entry.parts) > 1]
    files.check(expected, [name for name in files.names if _ignorable(name, spec)], stacks)
    return entries


def _plausible(files: Files, spec: ModelSpec) -> None:
    """Refuse more layers or experts than the folder can have, before a table of them is made."""
    config, most = files.path / "config.json", len(files.names)
    if spec.layers + spec.mtp_depth > most:
        raise RunError(
            f"{config} asks for {spec.layers + spec.mtp_depth} layers, but the folder has only {most} tensors. {_AGAIN}"
        )
    if spec.moe is None:
        return
    routers = (f"model.layers.{spec.moe.dense_layers}.{block}.gate.weight" for block in ("mlp", "block_sparse_moe"))
    routed = next((shape[0] for name in routers if (shape := files.shape(name))), None)
    if spec.moe.experts > most and spec.moe.experts != routed:
        has = f"the folder has only {most} tensors" if routed is None else f"the router of the folder has {routed}"
        raise RunError(f"{config} asks for {spec.moe.experts} experts, but {has}. {_AGAIN}")


def table(spec: ModelSpec, names: Collection[str] = (), interleaved: bool = True) -> tuple[Entry, ...]:
    """Every parameter and saved buffer. `names`: the tensors of a folder, for families with several formats.

    `interleaved`: DeepSeek's rotated channels are interleaved pairs, as published.
    """
    if spec.config is not None:
        return _state(spec).entries
    kind = family(spec)
    if kind == "gpt2":
        return tuple(_gpt2(spec, "" if "wte.weight" in names else "transformer."))
    return tuple(_decoder(spec, kind, set(names), interleaved))


def copies(spec: ModelSpec) -> dict[str, str]:
    """Tensors that a DeepSeek folder repeats for every module of multi-token prediction, to the tensor they copy."""
    if spec.mla is None:
        return {}
    head = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    return {
        f"model.layers.{spec.layers + depth}.{copy}": original
        for depth in range(spec.mtp_depth)
        for copy, original in (("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", head))
    }


class _State(NamedTuple):
    """What a folder of a model of transformers has."""

    entries: tuple[Entry, ...]
    ignored: tuple[str, ...]
    """Patterns of tensors that transformers does not read, or reads from another one."""


@lru_cache(maxsize=2)
def _state(spec: ModelSpec) -> _State:
    model = hf_module.build(spec)
    buffers = {name for name, _ in model.named_buffers()}
    entries = tuple(_same(name, tuple(tensor.shape), exact=name in buffers) for name, tensor in model.state_dict().items())
    return _State(entries, tuple(hf_module.unread(model)))


def _same(name: str, shape: tuple[int, ...], exact: bool) -> Entry:
    """A tensor that is the same on both sides; of three dimensions in parts, one for each index of the first."""
    if len(shape) > 3:
        raise RunError(
            f"model.config: {name} has {len(shape)} dimensions, {list(shape)}: tensors of at most three are read and written."
        )
    if len(shape) < 3:
        parts: tuple[HFPart, ...] = (HFPart(hf_name=name, shape=shape, rows=(0, shape[0] if shape else 1)),)
    else:
        count, height, _ = shape
        parts = tuple(
            HFPart(hf_name=name, shape=shape, rows=(index * height, (index + 1) * height), expert=index)
            for index in range(count)
        )
    return Entry(name=name, shape=shape, parts=parts, exact=exact)


def _ignorable(name: str, spec: ModelSpec) -> bool:
    if spec.config is not None:
        return any(re.search(pattern, name) for pattern in (*_IGNORED, *_state(spec).ignored))
    tied = spec.tied and name == "lm_head.weight"  # declared to be the embedding, so that its values are not used
    return tied or name in copies(spec) or any(re.fullmatch(pattern, name) for pattern in _IGNORED)


def _plain(ours: str, theirs: str, *shape: int) -> Entry:
    return Entry(name=ours, shape=shape, parts=(HFPart(hf_name=theirs, shape=shape, rows=(0, shape[0])),))


def _decoder(spec: ModelSpec, kind: str, names: set[str], interleaved: bool) -> Iterator[Entry]:
    yield _plain("embed.weight", "model.embed_tokens.weight", spec.rows, spec.dim)
    for layer in range(spec.layers):
        yield from _block(spec, f"blocks.{layer}", layer, kind, names, interleaved)
    yield _plain("norm.weight", "model.norm.weight", spec.dim)
    if not spec.tied:
        yield _plain("head.weight", "lm_head.weight", spec.rows, spec.dim)
    for depth in range(spec.mtp_depth if kind == "deepseek_v3" else 0):
        layer = spec.layers + depth
        ours, theirs = f"mtp.{depth}", f"model.layers.{layer}"
        yield _plain(f"{ours}.token_norm.weight", f"{theirs}.enorm.weight", spec.dim)
        yield _plain(f"{ours}.state_norm.weight", f"{theirs}.hnorm.weight", spec.dim)
        yield _plain(f"{ours}.join.weight", f"{theirs}.eh_proj.weight", spec.dim, 2 * spec.dim)
        yield from _block(spec, f"{ours}.block", layer, kind, names, interleaved)
        yield _plain(f"{ours}.norm.weight", f"{theirs}.shared_head.norm.weight", spec.dim)


def _block(spec: ModelSpec, ours: str, layer: int, kind: str, names: set[str], interleaved: bool) -> Iterator[Entry]:
    theirs = f"model.layers.{layer}"
    yield _plain(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", spec.dim)
    if spec.mla is None:
        attention = _fused_attention if kind == "phi3" else _attention
        yield from attention(spec, f"{ours}.attention", f"{theirs}.self_attn")
    else:
        yield from _latent(spec, spec.mla, f"{ours}.attention", f"{theirs}.self_attn", interleaved)
    if spec.norm_place == "both":
        yield _plain(f"{ours}.attention_out_norm.weight", f"{theirs}.post_attention_layernorm.weight", spec.dim)
        yield _plain(f"{ours}.mlp_norm.weight", f"{theirs}.pre_feedforward_layernorm.weight", spec.dim)
        yield _plain(f"{ours}.mlp_out_norm.weight", f"{theirs}.post_feedforward_layernorm.weight", spec.dim)
    else:
        yield _plain(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", spec.dim)
    if spec.moe is None or layer < spec.moe.dense_layers:
        feed_forward = _fused_mlp if kind == "phi3" else _mlp
        yield from feed_forward(f"{ours}.mlp", f"{theirs}.mlp", spec.dim, spec.hidden)
    else:
        yield from _experts(spec.moe, spec.dim, f"{ours}.mlp", theirs, kind, names)


def _attention(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Entry]:
    for name, heads in (("query", spec.heads), ("key", spec.kv), ("value", spec.kv)):
        yield _plain(f"{ours}.{name}.weight", f"{theirs}.{name[0]}_proj.weight", heads * spec.head, spec.dim)
        if spec.qkv_bias:
            yield _plain(f"{ours}.{name}.bias", f"{theirs}.{name[0]}_proj.bias", heads * spec.head)
    yield _plain(f"{ours}.output.weight", f"{theirs}.o_proj.weight", spec.dim, spec.heads * spec.head)
    if spec.qk_norm:
        yield _plain(f"{ours}.query_norm.weight", f"{theirs}.q_norm.weight", spec.head)
        yield _plain(f"{ours}.key_norm.weight", f"{theirs}.k_norm.weight", spec.head)


def _fused_attention(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Entry]:
    """Phi-3's query, key and value are rows of one matrix."""
    heads = {"query": spec.heads, "key": spec.kv, "value": spec.kv}
    yield from _stacked(ours, f"{theirs}.qkv_proj.weight", {name: n * spec.head for name, n in heads.items()}, spec.dim)
    yield _plain(f"{ours}.output.weight", f"{theirs}.o_proj.weight", spec.dim, spec.heads * spec.head)


def _fused_mlp(ours: str, theirs: str, dim: int, width: int) -> Iterator[Entry]:
    """Phi-3's gate is above up in one matrix."""
    yield from _stacked(ours, f"{theirs}.gate_up_proj.weight", {"gate": width, "up": width}, dim)
    yield _plain(f"{ours}.down.weight", f"{theirs}.down_proj.weight", dim, width)


def _stacked(ours: str, theirs: str, heights: Mapping[str, int], width: int) -> Iterator[Entry]:
    """Matrices that are rows of one of theirs, in this order."""
    whole, first = (sum(heights.values()), width), 0
    for name, height in heights.items():
        part = HFPart(hf_name=theirs, shape=whole, rows=(first, first + height))
        yield Entry(name=f"{ours}.{name}.weight", shape=(height, width), parts=(part,))
        first += height


def _latent(spec: ModelSpec, mla: Mla, ours: str, theirs: str, interleaved: bool) -> Iterator[Entry]:
    def rotated(name: str, other: str, height: int, *shape: int) -> Entry:
        entry = _plain(f"{ours}.{name}.weight", f"{theirs}.{other}.weight", *shape)
        pairs = (height, mla.rope_dim) if interleaved else None
        return replace(entry, parts=(replace(entry.parts[0], pairs=pairs),))

    head = mla.nope_dim + mla.rope_dim
    if mla.q_rank is None:
        yield rotated("query", "q_proj", head, spec.heads * head, spec.dim)
    else:
        yield _plain(f"{ours}.query_down.weight", f"{theirs}.q_a_proj.weight", mla.q_rank, spec.dim)
        yield _plain(f"{ours}.query_rank_norm.weight", f"{theirs}.q_a_layernorm.weight", mla.q_rank)
        yield rotated("query_up", "q_b_proj", head, spec.heads * head, mla.q_rank)
    latent = mla.kv_rank + mla.rope_dim
    yield rotated("kv_down", "kv_a_proj_with_mqa", latent, latent, spec.dim)
    yield _plain(f"{ours}.kv_rank_norm.weight", f"{theirs}.kv_a_layernorm.weight", mla.kv_rank)
    expanded = spec.heads * (mla.nope_dim + mla.value_dim)
    yield _plain(f"{ours}.kv_up.weight", f"{theirs}.kv_b_proj.weight", expanded, mla.kv_rank)
    yield _plain(f"{ours}.output.weight", f"{theirs}.o_proj.weight", spec.dim, spec.heads * mla.value_dim)


def _mlp(ours: str, theirs: str, dim: int, width: int) -> Iterator[Entry]:
    for name, shape in (("gate", (width, dim)), ("up", (width, dim)), ("down", (dim, width))):
        yield _plain(f"{ours}.{name}.weight", f"{theirs}.{name}_proj.weight", *shape)


def _experts(moe: Moe, dim: int, ours: str, layer: str, kind: str, names: set[str]) -> Iterator[Entry]:
    fused = f"{layer}.mlp.experts.gate_up_proj" in names  # the in-memory format of transformers 5, which may save it
    old = kind == "mixtral" and not fused and f"{layer}.mlp.gate.weight" not in names
    theirs = f"{layer}.block_sparse_moe" if old else f"{layer}.mlp"
    yield _plain(f"{ours}.router.weight", f"{theirs}.gate.weight", moe.experts, dim)
    if moe.router == "sigmoid":
        bias = _plain(f"{ours}.router.bias", f"{theirs}.gate.e_score_correction_bias", moe.experts)
        yield replace(bias, exact=True)
    for name in ("gate", "up", "down"):
        shape = (dim, moe.ffn) if name == "down" else (moe.ffn, dim)
        if fused:
            parts = tuple(_fused(moe, dim, f"{theirs}.experts", name, expert) for expert in range(moe.experts))
        else:
            word = _MIXTRAL[name] if kind == "mixtral" else f"{name}_proj"
            parts = tuple(
                HFPart(hf_name=f"{theirs}.experts.{expert}.{word}.weight", shape=shape, rows=(0, shape[0]), expert=expert)
                for expert in range(moe.experts)
            )
        yield Entry(name=f"{ours}.experts.{name}", shape=(moe.experts, *shape), parts=parts)
    if moe.shared:
        yield from _mlp(f"{ours}.shared", f"{theirs}.shared_experts", dim, moe.shared * moe.ffn)


def _fused(moe: Moe, dim: int, theirs: str, name: str, expert: int) -> HFPart:
    """One expert of fused tensors: gate above up, [E, 2F, D], and down, [E, D, F]."""
    if name == "down":
        shape, first, height = (moe.experts, dim, moe.ffn), expert * dim, dim
    else:
        shape, height = (moe.experts, 2 * moe.ffn, dim), moe.ffn
        first = (2 * expert + (name == "up")) * moe.ffn
    word = "down_proj" if name == "down" else "gate_up_proj"
    return HFPart(hf_name=f"{theirs}.{word}", shape=shape, rows=(first, first + height), expert=expert)


def _gpt2(spec: ModelSpec, prefix: str) -> Iterator[Entry]:
    """GPT-2's matrices are [in, out], and query, key and value are columns of one matrix."""
    dim, hidden = spec.dim, spec.hidden

    def norm(ours: str, theirs: str) -> Iterator[Entry]:
        for kind in ("weight", "bias"):
            yield _plain(f"{ours}.{kind}", f"{prefix}{theirs}.{kind}", dim)

    def linear(ours: str, theirs: str, inner: int, outer: int) -> Iterator[Entry]:
        part = HFPart(hf_name=f"{prefix}{theirs}.weight", shape=(inner, outer), rows=(0, inner), transposed=True)
        yield Entry(name=f"{ours}.weight", shape=(outer, inner), parts=(part,))
        yield _plain(f"{ours}.bias", f"{prefix}{theirs}.bias", outer)

    yield _plain("embed.weight", f"{prefix}wte.weight", spec.rows, dim)
    yield _plain("position_embed.weight", f"{prefix}wpe.weight", spec.context, dim)
    for layer in range(spec.layers):
        ours, theirs = f"blocks.{layer}", f"h.{layer}"
        yield from norm(f"{ours}.attention_norm", f"{theirs}.ln_1")
        for index, name in enumerate(("query", "key", "value")):
            where, part = f"{prefix}{theirs}.attn.c_attn", (index * dim, (index + 1) * dim)
            weight = HFPart(hf_name=f"{where}.weight", shape=(dim, 3 * dim), rows=(0, dim), columns=part, transposed=True)
            yield Entry(name=f"{ours}.attention.{name}.weight", shape=(dim, dim), parts=(weight,))
            bias = HFPart(hf_name=f"{where}.bias", shape=(3 * dim,), rows=part)
            yield Entry(name=f"{ours}.attention.{name}.bias", shape=(dim,), parts=(bias,))
        yield from linear(f"{ours}.attention.output", f"{theirs}.attn.c_proj", dim, dim)
        yield from norm(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", dim, hidden)
        yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", hidden, dim)
    yield from norm("norm", "ln_f")
    if not spec.tied:
        yield _plain("head.weight", "lm_head.weight", spec.rows, dim)
