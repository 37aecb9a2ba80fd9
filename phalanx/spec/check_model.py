"""Problems between the keys of [model]. Called by `spec/check`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from phalanx.spec.errors import Finding, RunError, around, divisors, either, multiples, quote, toml
from phalanx.spec.keys import KEYS, OPTIONAL
from phalanx.spec.model import ModelSpec
from phalanx.spec.origin import origin, overridable
from phalanx.spec.run import Run

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def model_findings(run: Run) -> Iterator[Finding]:
    """Problems between the keys of [model], and with train.sequence_length."""
    yield from _start(run)
    yield from _module(run)
    if run.model.module is not None:
        return  # the custom module decides what the sizes mean
    yield from _attention(run)
    yield from _latent(run)
    yield from _positions(run)
    yield from _scaling(run)
    yield from _experts(run)


def _start(run: Run) -> Iterator[Finding]:
    """Only one of preset, folder and module may define the model."""
    model = run.model
    for other in ("from", "module") if model.preset is not None else ():
        value = model.from_ if other == "from" else model.module
        if value is not None:
            yield Finding(
                (f"model.{other}", "model.preset"),
                f"model.{other} = {quote(value)} and model.preset = {toml(model.preset)} both define the model: "
                "remove one of them.",
            )
    if model.from_ is None:
        return
    try:
        start = origin(model.from_)
    except RunError as error:
        for sentence in error.problems:
            blamed = sentence if "model.from" in sentence else f"model.from = {toml(model.from_)} cannot be used: {sentence}"
            yield Finding(("model.from",), blamed, not_if_resolved=True)
        return
    if start is not None:
        yield from _differences(run, start.model)
    elif model.vocab is None:  # otherwise the sizes were read earlier, and the folder may be gone
        yield Finding(
            ("model.from",),
            f"model.from = {toml(model.from_)} does not exist: name a folder of Hugging Face weights, a run directory or a "
            "checkpoint.",
        )


def _differences(run: Run, theirs: ModelSpec) -> Iterator[Finding]:
    """Sizes in the run file that differ from those of the folder's weights."""
    absent = [table for table in OPTIONAL if getattr(theirs, table.removeprefix("model.")) is None]
    for table in absent:
        if getattr(run.model, table.removeprefix("model.")) is not None:
            first = next(path for path in KEYS if path.startswith(f"{table}."))
            yield Finding(
                (first, "model.from"),
                f"model.from = {toml(run.model.from_)} has no {table}: remove [{table}].",
                not_if_resolved=True,
            )
    our_defaults, their_defaults = _computed_defaults(run.model), _computed_defaults(theirs)
    for path, key in KEYS.items():
        if not path.startswith("model.") or key.table in absent or overridable(path, run.model):
            continue
        given = key.of(run), key.of(Run(model=theirs))
        our_value, their_value = our_defaults.get(path, given[0]), their_defaults.get(path, given[1])
        if given != (None, None) and our_value != their_value:
            has = "none" if their_value is None else quote(their_value)
            yield Finding(
                (path, "model.from"),
                f"{path} = {quote(our_value)} differs from the {has} of model.from = {toml(run.model.from_)}: remove it.",
                not_if_resolved=True,
            )
    if run.model.options != theirs.options:
        yield Finding(
            ("model.from",),
            f"model.options differ from those of model.from = {toml(run.model.from_)}: remove [model.options].",
            not_if_resolved=True,
        )


def _computed_defaults(model: ModelSpec) -> dict[str, Any]:
    """The values of keys whose default follows from other sizes."""
    return {"model.kv_heads": model.kv, "model.head_dim": model.head, "model.ffn": model.hidden}


def _module(run: Run) -> Iterator[Finding]:
    model = run.model
    if model.module is None:
        if model.options:
            yield Finding(
                (*(f"model.options.{name}" for name, _ in model.options), "model.module"),
                f"model.options.{model.options[0][0]} is for a custom module, but model.module is not given: "
                "remove [model.options], or set model.module.",
            )
        return
    if not _MODULE.fullmatch(model.module):
        yield Finding(
            ("model.module",),
            f"model.module = {quote(model.module)} does not name a class: write it as "
            '"package.module:Class", such as "mypackage.mymodel:MyModel".',
        )
    if model.mtp_depth:
        yield Finding(
            ("model.mtp_depth", "model.module"),
            f"model.mtp_depth = {model.mtp_depth} belongs to the built-in decoder, but model.module = {quote(model.module)}: "
            "remove model.mtp_depth.",
        )


def _attention(run: Run) -> Iterator[Finding]:
    model = run.model
    if model.mla is not None:
        return  # latent attention has its own head widths
    if model.heads % model.kv:
        yield Finding(
            ("model.kv_heads", "model.heads"),
            f"model.kv_heads = {model.kv} does not divide model.heads = {model.heads}: "
            f"set it to {either(around(model.kv, divisors(model.heads)))}.",
        )
    if model.head_dim is None and model.dim % model.heads:
        yield Finding(
            ("model.heads", "model.dim", "model.head_dim"),
            f"model.heads = {model.heads} does not divide model.dim = {model.dim}: set model.heads to "
            f"{either(around(model.heads, divisors(model.dim)))}, or give model.head_dim.",
        )
    elif model.positions == "rope" and model.head % 2:
        which = f"model.head_dim = {model.head}" if model.head_dim else f"model.dim / model.heads = {model.head}"
        yield Finding(
            ("model.head_dim", "model.heads", "model.dim", "model.positions"),
            f"{which} is odd, but rotary positions rotate pairs of values: take {either(multiples(model.head, 2))}.",
        )


def _latent(run: Run) -> Iterator[Finding]:
    model, latent = run.model, run.model.mla
    if latent is None:
        return
    if model.positions != "rope":
        yield Finding(
            ("model.positions", "model.mla.kv_rank"),
            f"model.positions = {toml(model.positions)} cannot be combined with [model.mla], whose heads have a rotated part: "
            'set it to "rope", or remove [model.mla].',
        )
    if latent.rope_dim % 2:
        yield Finding(
            ("model.mla.rope_dim",),
            f"model.mla.rope_dim = {latent.rope_dim} is odd, but rotary positions rotate pairs of values: "
            f"take {either(multiples(latent.rope_dim, 2))}.",
        )
    for name in ("kv_heads", "head_dim", "qk_norm", "bias"):
        if getattr(model, name):
            yield Finding(
                (f"model.{name}", "model.mla.kv_rank"),
                f"model.{name} = {toml(getattr(model, name))} has no meaning with [model.mla]: remove one of the two.",
            )


def _positions(run: Run) -> Iterator[Finding]:
    model, length = run.model, run.train.sequence_length
    if model.positions == "learned" and model.context < length:
        yield Finding(
            ("train.sequence_length", "model.context", "model.positions", "model.preset"),
            f"train.sequence_length = {length} exceeds the table of learned positions, model.context = {model.context}: "
            f"set train.sequence_length to at most {model.context}, or enlarge model.context.",
        )


def _scaling(run: Run) -> Iterator[Finding]:
    model = run.model
    scaling = model.rope_scaling
    if scaling is None:
        return
    if model.positions != "rope":
        yield Finding(
            ("model.rope_scaling.factor", "model.positions"),
            f"model.rope_scaling scales rotary positions, but model.positions = {toml(model.positions)}: "
            'remove model.rope_scaling, or set model.positions to "rope".',
        )
    if scaling.kind == "yarn" and scaling.beta_fast <= scaling.beta_slow:
        yield Finding(
            ("model.rope_scaling.beta_fast", "model.rope_scaling.beta_slow"),
            f"model.rope_scaling.beta_fast = {scaling.beta_fast} is not above "
            f"model.rope_scaling.beta_slow = {scaling.beta_slow}: raise the one or lower the other.",
        )
    if scaling.kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield Finding(
            ("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"),
            f"model.rope_scaling.low_freq_factor = {scaling.low_freq_factor} is not below "
            f"model.rope_scaling.high_freq_factor = {scaling.high_freq_factor}: lower the one or raise the other.",
        )


def _experts(run: Run) -> Iterator[Finding]:
    model, moe = run.model, run.model.moe
    if moe is None:
        return
    if model.activation != "swiglu":
        yield Finding(
            ("model.activation", "model.moe.experts"),
            f"model.activation = {toml(model.activation)} cannot be combined with [model.moe], whose experts are gated: "
            'set it to "swiglu", or remove [model.moe].',
        )
    if model.bias:
        yield Finding(
            ("model.bias", "model.moe.experts"),
            "model.bias = true cannot be combined with [model.moe], whose experts have no biases: remove one of the two.",
        )
    if moe.dense_layers > model.layers:
        yield Finding(
            ("model.moe.dense_layers", "model.layers"),
            f"model.moe.dense_layers = {moe.dense_layers} exceeds model.layers = {model.layers}: "
            f"set it to at most {model.layers}.",
        )
    if moe.active > moe.experts:
        yield Finding(
            ("model.moe.active", "model.moe.experts"),
            f"model.moe.active = {moe.active} exceeds model.moe.experts = {moe.experts}: set it to at most {moe.experts}.",
        )
    else:
        yield from _groups(run)


def _groups(run: Run) -> Iterator[Finding]:
    moe = run.model.moe
    assert moe is not None
    if moe.experts % moe.groups:
        yield Finding(
            ("model.moe.groups", "model.moe.experts"),
            f"model.moe.groups = {moe.groups} does not divide model.moe.experts = {moe.experts}: "
            f"set it to {either(around(moe.groups, divisors(moe.experts)))}.",
        )
    elif moe.active_groups > moe.groups:
        yield Finding(
            ("model.moe.active_groups", "model.moe.groups"),
            f"model.moe.active_groups = {moe.active_groups} exceeds model.moe.groups = {moe.groups}: "
            f"set it to at most {moe.groups}.",
        )
    elif moe.active > (choice := moe.experts // moe.groups * moe.active_groups):
        yield Finding(
            ("model.moe.active", "model.moe.active_groups", "model.moe.groups", "model.moe.experts"),
            f"model.moe.active = {moe.active} exceeds the {choice} experts of model.moe.active_groups = {moe.active_groups}: "
            f"set it to at most {choice}, or raise model.moe.active_groups.",
        )
