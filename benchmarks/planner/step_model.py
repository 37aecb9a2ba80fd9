"""The models of published steps: printed sizes, and rules for missing ones. `steps` calls it."""

from __future__ import annotations

import re

Row = dict[str, str]

KV_RANK, Q_RANK, NOPE, ROPE = 512, 1536, 128, 64
"""Ranks and widths of DeepSeek's latent attention."""


# Sizes of models that rows only name, as their authors published them. Printed sizes take precedence.
_SIZES = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "experts", "top_k", "params_B")
NAMED = (
    (r"gpt.?oss.?120b", (36, 2880, 2880, 64, 8, 201088, 128, 4, 117)),
    (r"gpt.?oss.?20b", (24, 2880, 2880, 64, 8, 201088, 32, 4, 21)),
    (r"deepseek.?v3", (61, 7168, 18432, 128, "", 129280, 256, 8, 671)),
    (r"kimi.?k2", (61, 7168, 18432, 64, "", 163840, 384, 8, 1043)),
    (r"qwen3.?30b", (48, 2048, 768, 32, 4, 151936, 128, 8, 30.5)),
    (r"qwen3.?235b", (94, 4096, 1536, 64, 4, 151936, 128, 8, 235)),
    (r"mixtral.?8x7b", (32, 4096, 14336, 32, 8, 32000, 8, 2, 46.7)),
    (r"mixtral.?8x22b", (56, 6144, 16384, 48, 8, 32768, 8, 2, 140.6)),
    (r"olmoe.?1b.?7b", (16, 2048, 1024, 16, 16, 50304, 64, 8, 6.9)),
)
HEADS = ((r"qwen3", 128.0), (r"gpt.?oss", 64.0))
"""Head widths that differ from the model's width over its heads."""


def filled(row: Row, assumed: list[str]) -> Row:
    """The row with the known sizes of a named model."""
    name = row["model_name"].lower().replace("_", "-")
    known = next((sizes for match, sizes in NAMED if re.search(match, name)), None)
    if known is None or (row["layers"] and row["experts"]):
        return row
    assumed.append("sizes of a model known by its name")
    return row | {column: str(size) for column, size in zip(_SIZES, known, strict=True) if not row[column]}


def number(row: Row, name: str) -> float | None:
    return float(row[name]) if row[name] else None


def model(row: Row, assumed: list[str]) -> dict[str, float] | None:
    """The model's columns; None if its sizes are unknown."""
    row = filled(row, assumed)
    layers, dim, total = number(row, "layers"), number(row, "hidden"), number(row, "params_B")
    experts = number(row, "experts") or 0.0
    if layers is None or dim is None:
        if total is None or experts or row["active_params_B"]:
            return None
        layers, dim = shape_of(total * 1e9)
        assumed.append("layers and width from the parameters")
    ffn = number(row, "ffn_hidden")
    if ffn is None:
        ffn = 4 * dim
        assumed.append("feed-forward of four widths")
    heads = number(row, "heads")
    if heads is None:
        heads = max(1.0, round(dim / 128))
        assumed.append("heads of 128")
    kv_heads = number(row, "kv_heads")
    vocab = number(row, "vocab")
    if vocab is None:
        vocab = 51200.0
        assumed.append("a vocabulary of 51,200")
    latent = re.search(r"deepseek|kimi", row["model_name"].lower()) is not None and experts > 0
    if kv_heads is None and not latent:
        kv_heads = heads
        assumed.append("as many key heads as query heads")
    found = {"layers": layers, "dim": dim, "ffn": ffn, "heads": heads, "vocab": vocab, "kv_heads": kv_heads or heads}
    own = next((width for match, width in HEADS if re.search(match, row["model_name"].lower())), dim / heads)
    found |= _attention(dim, heads, found["kv_heads"], latent, own)
    weights = None if total is None else total * 1e9
    if not experts:
        return found | _dense(found, weights)
    return found | _sparse(row, found, weights, latent, assumed)


def shape_of(total: float) -> tuple[float, float]:
    """Layers and width of a typical decoder with `total` parameters: width ≈ 110 × layers, 12 × width² parameters per layer."""
    dim = max(128.0, round((total * 110 / 12) ** (1 / 3) / 128) * 128)
    return max(1.0, float(round(total / (12 * dim * dim)))), dim


def _attention(dim: float, heads: float, kv_heads: float, latent: bool, head: float) -> dict[str, float]:
    if latent:
        query, value = heads * (NOPE + ROPE), heads * NOPE
        weights = Q_RANK * (dim + query) + dim * (KV_RANK + ROPE) + KV_RANK * heads * 2 * NOPE + value * dim
        return {"attention_weights": weights, "score_width": query, "value_width": value, "kv_width": query + value}
    width, narrow = heads * head, kv_heads * head
    return {
        "attention_weights": dim * (2 * width + 2 * narrow),
        "score_width": width,
        "value_width": width,
        "kv_width": 2 * narrow,
    }


def _dense(found: dict[str, float], weights: float | None) -> dict[str, float]:
    """Chooses gated or not and tied or not, so that the number of parameters is closest to the published one."""
    if weights is None:
        gated = float(found["ffn"] < 3.6 * found["dim"])
        return {"gated": gated, "tied": 1 - gated}

    def miss(gated: int, tied: int) -> float:
        block = found["attention_weights"] + (2 + gated) * found["dim"] * found["ffn"]
        return abs(found["layers"] * block + (2 - tied) * found["vocab"] * found["dim"] - weights)

    gated, tied = min(((g, t) for g in (0, 1) for t in (1, 0)), key=lambda pair: miss(*pair))
    return {"gated": float(gated), "tied": float(tied)}


def _sparse(row: Row, found: dict[str, float], weights: float | None, latent: bool, assumed: list[str]) -> dict[str, float]:
    """The sizes of experts: the printed width, unless it contradicts the parameters; then it follows from them."""
    experts, active = number(row, "experts") or 1.0, number(row, "top_k") or 2.0
    layers, dim, ffn = found["layers"], found["dim"], found["ffn"]
    shared = (2.0 if "v2" in row["model_name"].lower() else 1.0) if latent else 0.0
    dense_layers = (1.0 if "v2" in row["model_name"].lower() else 3.0) if latent and layers > 8 else 0.0
    sparse = layers - dense_layers
    plain = layers * found["attention_weights"] + 2 * found["vocab"] * dim + dense_layers * 3 * dim * ffn
    width = ffn
    if weights is not None and abs(plain + sparse * 3 * dim * (experts + shared) * ffn - weights) > 0.3 * weights:
        width = max(64.0, round((weights - plain) / (sparse * 3 * dim * (experts + shared)) / 64) * 64)
        assumed.append("width of experts from the parameters")
    return {
        "gated": 1.0,
        "tied": 0.0,
        "sparse_layers": sparse,
        "experts": experts,
        "active": active,
        "expert_ffn": width,
        "shared_ffn": shared * width,
        "active_groups": 4.0 if latent else 0.0,
    }
