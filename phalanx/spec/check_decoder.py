"""Problems between the sizes and settings of the built-in decoder, for `spec/check`: heads and widths, windows, latent attention, positions,
experts."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.spec.errors import nearest_divisors, nearest_multiples
from phalanx.spec.run import Run


def _attention(run: Run) -> Iterator[str]:
    model = run.model
    if model.mla is not None:
        return  # latent attention has its own head widths
    if model.bias and model.qkv_bias:
        yield "$model.qkv_bias is part of $model.bias: remove one of the two."
    if model.heads % model.kv:
        yield f"$model.kv_heads does not divide $model.heads: set it to {nearest_divisors(model.kv, model.heads)}."
    if model.head_dim is None and model.dim % model.heads:
        near = nearest_divisors(model.heads, model.dim)
        yield f"$model.heads does not divide $model.dim: set model.heads to {near}, or give $(model.head_dim)model.head_dim."
    elif model.positions == "rope" and model.head % 2:
        width = "model.head_dim" if model.head_dim else "model.dim / model.heads"
        yield (
            f"$(model.head_dim)$(model.heads)$(model.dim)$(model.positions){width} = {model.head} is odd, but rotary positions "
            f"rotate pairs of values: take {nearest_multiples(model.head, 2)}."
        )


def _norms(run: Run) -> Iterator[str]:
    if run.model.norm_zero_centered and run.model.norm != "rms":
        yield '$model.norm_zero_centered belongs to RMS norms, but $model.norm: set model.norm = "rms", or remove the other.'


def _window(run: Run) -> Iterator[str]:
    model = run.model
    if model.window is None:
        if model.rope_local_theta is not None:
            yield "$model.rope_local_theta is for blocks with a window, but $(model.window)model.window is not given: set it, or remove model.rope_local_theta."
        for key in ("window_from", "global_every"):
            if getattr(model, key):
                yield f"$model.{key} says which blocks attend without a window, but $(model.window)model.window is not given: set it, or remove model.{key}."
    elif all(window is None for window in model.windows):
        yield f"$model.window has no effect: $model.window_from leaves it to none of the {model.layers} blocks. Lower model.window_from, or remove model.window."


def _latent(run: Run) -> Iterator[str]:
    model, latent = run.model, run.model.mla
    if latent is None:
        return
    if model.positions != "rope":
        yield (
            "$model.positions cannot be combined with $(model.mla.kv_rank)[model.mla], whose heads have a rotated part: "
            'set it to "rope", or remove [model.mla].'
        )
    if latent.rope_dim % 2:
        near = nearest_multiples(latent.rope_dim, 2)
        yield f"$model.mla.rope_dim is odd, but rotary positions rotate pairs of values: take {near}."
    for key in ("kv_heads", "head_dim", "qk_norm", "bias", "qkv_bias", "query_scalar", "attention_cap", "norm_zero_centered"):
        if getattr(model, key):
            yield f"$model.{key} has no meaning with $(model.mla.kv_rank)[model.mla]: remove one of the two."


def _positions(run: Run) -> Iterator[str]:
    model, scaling = run.model, run.model.rope_scaling
    if model.positions == "learned" and model.context < run.train.sequence_length:
        yield (
            "$train.sequence_length exceeds the table of learned positions, $model.context$(model.positions)$(model.preset): "
            f"set train.sequence_length to at most {model.context}, or enlarge model.context."
        )
    if model.rope_fraction != 1.0 and (model.positions != "rope" or model.mla is not None):
        yield "$model.rope_fraction is a part of heads that rotary positions rotate, which learned positions do not and [model.mla] has a width for$(model.positions)$(model.mla.kv_rank): remove it."
    elif model.rope_fraction != 1.0 and (model.rope_fraction > 1.0 or model.rotated % 2 or model.rotated == 0):
        yield f"$model.rope_fraction gives {model.rotated} of the {model.head} channels of a head, but pairs of them are rotated: take one that gives an even number up to {model.head}."
    if model.positions != "rope" and model.rope_local_theta is not None:
        yield '$model.rope_local_theta is a base of rotary positions, but $model.positions: remove it, or set model.positions to "rope".'
    if scaling is None:
        return
    if model.positions != "rope":
        yield (
            "$(model.rope_scaling.factor)model.rope_scaling scales rotary positions, but $model.positions: "
            'remove model.rope_scaling, or set model.positions to "rope".'
        )
    if scaling.kind == "yarn" and scaling.beta_fast <= scaling.beta_slow:
        remedy = "raise the one or lower the other"
        yield f"$model.rope_scaling.beta_fast is not above $model.rope_scaling.beta_slow: {remedy}."
    if scaling.kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        remedy = "lower the one or raise the other"
        yield f"$model.rope_scaling.low_freq_factor is not below $model.rope_scaling.high_freq_factor: {remedy}."


def _experts(run: Run) -> Iterator[str]:
    model, moe = run.model, run.model.moe
    if moe is None:
        return
    excluded = "cannot be combined with $(model.moe.experts)[model.moe], whose experts"
    if model.activation != "swiglu":
        yield f'$model.activation {excluded} are gated: set it to "swiglu", or remove [model.moe].'
    if model.bias:
        yield f"$model.bias {excluded} have no biases: remove one of the two."
    if moe.dense_layers > model.layers:
        yield f"$model.moe.dense_layers exceeds $model.layers: set it to at most {model.layers}."
    choice = moe.experts // moe.groups * moe.active_groups
    if moe.active > moe.experts:
        yield f"$model.moe.active exceeds $model.moe.experts: set it to at most {moe.experts}."
    elif moe.experts % moe.groups:
        yield f"$model.moe.groups does not divide $model.moe.experts: set it to {nearest_divisors(moe.groups, moe.experts)}."
    elif moe.active_groups > moe.groups:
        yield f"$model.moe.active_groups exceeds $model.moe.groups: set it to at most {moe.groups}."
    elif moe.active > choice:
        exceeds = (
            f"$model.moe.active exceeds the {choice} experts of $model.moe.active_groups$(model.moe.groups)$(model.moe.experts)"
        )
        yield f"{exceeds}: set it to at most {choice}, or raise model.moe.active_groups."


decoder_rules = (_attention, _norms, _window, _latent, _positions, _experts)
