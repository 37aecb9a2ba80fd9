"""Problems between the keys of [model]. Called by `spec/check`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.spec.errors import RunError, nearest_divisors, nearest_multiples, quote, toml
from phalanx.spec.keys import KEYS, OPTIONAL, Finding, finding
from phalanx.spec.model import ModelSpec
from phalanx.spec.origin import origin, overridable
from phalanx.spec.run import Run

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def model_findings(run: Run) -> Iterator[Finding]:
    """Problems between the keys of [model], and with train.sequence_length."""
    yield from _start(run)
    yield from _module(run)
    if run.model.module is None:  # otherwise the custom module decides what the sizes mean
        for rules in (_attention, _latent, _positions, _experts):
            yield from rules(run)


def _start(run: Run) -> Iterator[Finding]:
    """Only one of preset, folder and module may define the model."""
    model = run.model
    if model.preset is not None:
        for key, value in (("from", model.from_), ("module", model.module)):
            if value is not None:
                yield finding(run, f"{{model.{key}}} and {{model.preset}} both define the model: remove one of them.")
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
        for difference in _differences(run, start.model):
            yield difference._replace(not_if_resolved=True)
    elif model.vocab is None:  # otherwise the sizes were read earlier, and the folder may be gone
        text = "{model.from} does not exist: name a folder of Hugging Face weights, a run directory or a checkpoint."
        yield finding(run, text)


def _differences(run: Run, theirs: ModelSpec) -> Iterator[Finding]:
    """Sizes in the run file that differ from those of the folder's weights."""
    absent = [table for table in OPTIONAL if getattr(theirs, table.removeprefix("model.")) is None]
    for table in absent:
        if getattr(run.model, table.removeprefix("model.")) is not None:
            first = next(path for path in KEYS if path.startswith(f"{table}."))
            yield Finding((first, "model.from"), f"model.from = {toml(run.model.from_)} has no {table}: remove [{table}].")
    for path, key in KEYS.items():
        if not path.startswith("model.") or key.table in absent or overridable(key, run.model):
            continue
        given = key.of(run), key.of(Run(model=theirs))
        our_value = run.model.computed_defaults.get(path, given[0])
        their_value = theirs.computed_defaults.get(path, given[1])
        if given != (None, None) and our_value != their_value:
            value = "none" if their_value is None else quote(their_value)
            yield finding(run, f"{{{path}}} differs from the {{value}} of {{model.from}}: remove it.", value=value)
    if run.model.options != theirs.options:
        yield finding(run, "model.options differ from those of {model.from}: remove [model.options].")


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
        example = '"package.module:Class", such as "mypackage.mymodel:MyModel"'
        yield finding(run, "{model.module} does not name a class: write it as {example}.", example=example)
    if model.mtp_depth:
        yield finding(run, "{model.mtp_depth} belongs to the built-in decoder, but {model.module}: remove model.mtp_depth.")


def _attention(run: Run) -> Iterator[Finding]:
    model = run.model
    if model.mla is not None:
        return  # latent attention has its own head widths
    if model.heads % model.kv:
        near = nearest_divisors(model.kv, model.heads)
        yield finding(run, "{model.kv_heads} does not divide {model.heads}: set it to {near}.", near=near)
    if model.head_dim is None and model.dim % model.heads:
        text = "{model.heads} does not divide {model.dim}: set model.heads to {near}, or give model.head_dim."
        yield finding(run, text, "model.head_dim", near=nearest_divisors(model.heads, model.dim))
    elif model.positions == "rope" and model.head % 2:
        which = f"model.head_dim = {model.head}" if model.head_dim else f"model.dim / model.heads = {model.head}"
        yield Finding(
            ("model.head_dim", "model.heads", "model.dim", "model.positions"),
            f"{which} is odd, but rotary positions rotate pairs of values: take {nearest_multiples(model.head, 2)}.",
        )


def _latent(run: Run) -> Iterator[Finding]:
    model, latent = run.model, run.model.mla
    if latent is None:
        return
    if model.positions != "rope":
        yield finding(
            run,
            "{model.positions} cannot be combined with [model.mla], whose heads have a rotated part: "
            'set it to "rope", or remove [model.mla].',
            "model.mla.kv_rank",
        )
    if latent.rope_dim % 2:
        text = "{model.mla.rope_dim} is odd, but rotary positions rotate pairs of values: take {near}."
        yield finding(run, text, near=nearest_multiples(latent.rope_dim, 2))
    for key in ("kv_heads", "head_dim", "qk_norm", "bias"):
        if getattr(model, key):
            text = f"{{model.{key}}} has no meaning with [model.mla]: remove one of the two."
            yield finding(run, text, "model.mla.kv_rank")


def _positions(run: Run) -> Iterator[Finding]:
    model, scaling = run.model, run.model.rope_scaling
    if model.positions == "learned" and model.context < run.train.sequence_length:
        yield finding(
            run,
            "{train.sequence_length} exceeds the table of learned positions, {model.context}: "
            "set train.sequence_length to at most {most}, or enlarge model.context.",
            "model.positions",
            "model.preset",
            most=model.context,
        )
    if scaling is None:
        return
    if model.positions != "rope":
        yield Finding(
            ("model.rope_scaling.factor", "model.positions"),
            f"model.rope_scaling scales rotary positions, but model.positions = {toml(model.positions)}: "
            'remove model.rope_scaling, or set model.positions to "rope".',
        )
    if scaling.kind == "yarn" and scaling.beta_fast <= scaling.beta_slow:
        remedy = "raise the one or lower the other"
        yield finding(run, f"{{model.rope_scaling.beta_fast}} is not above {{model.rope_scaling.beta_slow}}: {remedy}.")
    if scaling.kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        text = "{model.rope_scaling.low_freq_factor} is not below {model.rope_scaling.high_freq_factor}: {remedy}."
        yield finding(run, text, remedy="lower the one or raise the other")


def _experts(run: Run) -> Iterator[Finding]:
    model, moe = run.model, run.model.moe
    if moe is None:
        return
    if model.activation != "swiglu":
        yield finding(
            run,
            "{model.activation} cannot be combined with [model.moe], whose experts are gated: "
            'set it to "swiglu", or remove [model.moe].',
            "model.moe.experts",
        )
    if model.bias:
        text = "{model.bias} cannot be combined with [model.moe], whose experts have no biases: remove one of the two."
        yield finding(run, text, "model.moe.experts")
    exceeds = "{%s} exceeds {%s}: set it to at most {most}."
    if moe.dense_layers > model.layers:
        yield finding(run, exceeds % ("model.moe.dense_layers", "model.layers"), most=model.layers)
    choice = moe.experts // moe.groups * moe.active_groups
    if moe.active > moe.experts:
        yield finding(run, exceeds % ("model.moe.active", "model.moe.experts"), most=moe.experts)
    elif moe.experts % moe.groups:
        near = nearest_divisors(moe.groups, moe.experts)
        yield finding(run, "{model.moe.groups} does not divide {model.moe.experts}: set it to {near}.", near=near)
    elif moe.active_groups > moe.groups:
        yield finding(run, exceeds % ("model.moe.active_groups", "model.moe.groups"), most=moe.groups)
    elif moe.active > choice:
        yield finding(
            run,
            "{model.moe.active} exceeds the {choice} experts of {model.moe.active_groups}: "
            "set it to at most {choice}, or raise model.moe.active_groups.",
            "model.moe.groups",
            "model.moe.experts",
            choice=choice,
        )
