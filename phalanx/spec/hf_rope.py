"""Rotary settings of a Hugging Face config.json, both ways. Used by `spec/hf_config`.

transformers 5 writes them as `rope_parameters`; older ones as `rope_theta` and `rope_scaling`, which 5 still reads, so
that is what is written here.
"""

from __future__ import annotations

import math
from typing import Any

from phalanx.spec.model import ModelSpec, RopeScaling

KINDS = ("default", "llama3", "yarn")
_KNOWN = {
    "default": set[str](),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "attention_factor", "truncate",
    },
}  # fmt: skip


class Unsupported(ValueError):
    """A setting that would change what the model computes: its key and why not."""

    def __init__(self, key: str, value: Any, remedy: str):
        self.key, self.value, self.remedy = key, value, remedy
        super().__init__(f"{key} = {value!r}: {remedy}")


def number(key: str, value: Any, zero: bool = False) -> float:
    """A value as it stands, if it is a number above 0; `zero`: or 0."""
    right = isinstance(value, int | float) and not isinstance(value, bool) and (0 < value < math.inf or (zero and value == 0))
    if not right:
        raise Unsupported(key, value, f"a number {'of 0 or more' if zero else 'above 0'} is needed here.")
    return value  # type: ignore[no-any-return]


def read(config: dict[str, Any], theta: float) -> tuple[float, RopeScaling | None]:
    """(base, stretching). `theta`: the base that the family takes when none is given."""
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    settings = config.get(where) or {}
    if not isinstance(settings, dict):
        raise Unsupported(where, settings, "it is a table of rotary settings.")
    nested = [name for name, value in settings.items() if isinstance(value, dict)]
    if nested:
        raise Unsupported(f"{where}.{nested[0]}", settings[nested[0]], "every layer has the same rotary positions here.")
    base = float(number("rope_theta", settings.get("rope_theta") or config.get("rope_theta") or theta))
    turned = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if turned not in (None, 1, 1.0):
        raise Unsupported("partial_rotary_factor", turned, "heads are rotated whole; only 1.0 is supported.")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in KINDS:
        raise Unsupported(f"{where}.rope_type", kind, f"supported are {', '.join(KINDS)}.")
    unknown = set(settings) - _KNOWN[kind] - {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
    if kind != "default" and unknown:
        name = min(unknown)
        raise Unsupported(f"{where}.{name}", settings[name], f"it has no meaning that is known for rope_type {kind!r}.")
    if kind == "default":
        return base, None
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings") or longest
    original = int(number(f"{where}.original_max_position_embeddings", original))
    factor = settings.get("factor")
    if factor is None:
        factor = number("max_position_embeddings", longest) / original
    factor = float(number(f"{where}.factor", factor))
    if kind == "yarn":
        return base, _yarn(settings, where, factor, original)
    low, high = (_given(settings, where, key, plain) for key, plain in (("low_freq_factor", 1.0), ("high_freq_factor", 4.0)))
    return base, RopeScaling(factor=factor, original_context=original, low_freq_factor=low, high_freq_factor=high)


def write(spec: ModelSpec) -> dict[str, Any]:
    """The keys of config.json that carry a model's rotary settings."""
    scaling = spec.rope_scaling
    if scaling is None:
        return {"rope_theta": spec.rope_theta, "rope_scaling": None}
    table: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    table["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        table |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    else:
        table |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.mscale_all_dim:
            table |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return {"rope_theta": spec.rope_theta, "rope_scaling": table}


def _inferred(strength: float, everywhere: float, factor: float) -> float:
    """What transformers multiplies cosines and sines with when the config does not say."""

    def warmth(strength: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0

    return warmth(strength) / warmth(everywhere) if strength and everywhere else warmth(1.0)


def _given(settings: dict[str, Any], where: str, key: str, plain: float) -> float:
    """A setting that may be left out, or null."""
    value = settings.get(key)
    return plain if value is None else float(number(f"{where}.{key}", value, zero=True))


def _yarn(settings: dict[str, Any], where: str, factor: float, original: int) -> RopeScaling:
    if settings.get("truncate", True) is not True:
        raise Unsupported(f"{where}.truncate", settings["truncate"], "YaRN's range is rounded to whole channels; only true.")
    everywhere = _given(settings, where, "mscale_all_dim", 0.0)
    strength = _given(settings, where, "mscale", 0.0)
    inferred = _inferred(strength, everywhere, factor)
    given = _given(settings, where, "attention_factor", inferred)
    if not math.isclose(given, inferred, rel_tol=1e-6):
        raise Unsupported(f"{where}.attention_factor", given, f"only what follows from the factor is supported, {inferred:g}.")
    return RopeScaling(
        kind="yarn", factor=factor, original_context=original, mscale_all_dim=everywhere,
        mscale=strength or (0.0 if everywhere else 1.0),
        beta_fast=_given(settings, where, "beta_fast", 0.0) or 32.0, beta_slow=_given(settings, where, "beta_slow", 0.0) or 1.0,
    )  # fmt: skip
