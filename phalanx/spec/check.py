"""Problems that only show when two keys are seen together. Called by `spec/load`, and on runs made in Python by whoever
starts them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from phalanx.spec.dump import toml
from phalanx.spec.keys import KEYS
from phalanx.spec.run import TOKENIZER_VOCAB, Run
from phalanx.spec.typed import Wrong, read, refusal
from phalanx.spec.words import either


class Finding(NamedTuple):
    """One problem between keys."""

    keys: tuple[str, ...]
    """The keys it rests on, the likeliest mistake first: it is told at that key's line, and not at all if one is unclear."""
    sentence: str


def check(run: Run) -> list[str]:
    """Everything wrong with a run, one sentence each; empty when it can be planned."""
    problems = []
    legible = True
    for key in KEYS.values():
        value = key.of(run)
        if value is None and (key.optional or key.table == "model.rope_scaling"):
            continue
        try:
            read(key, value)
        except Wrong as wrong:
            problems.append(str(wrong))
            legible = False
        else:
            problems += filter(None, [refusal(key, value)])
    # Beside a negative size or a word for a number, what the keys mean together cannot be computed.
    return problems + [finding.sentence for finding in findings(run)] if legible else problems


def findings(run: Run) -> Iterator[Finding]:
    """Problems between keys, of a run whose keys are each right in themselves."""
    yield from _batch(run)
    yield from _duration(run)
    yield from _replicas(run)
    yield from _attention(run)
    yield from _positions(run)
    yield from _vocabulary(run)
    yield from _layout(run)
    yield from _schedule(run)
    yield from _evaluation(run)


def _batch(run: Run) -> Iterator[Finding]:
    train, keys = run.train, ("train.batch", "train.batch_tokens")
    if train.batch is None and train.batch_tokens is None:
        yield Finding(keys, "neither train.batch nor train.batch_tokens is given: set one of them, such as train.batch = 8.")
    elif train.batch is not None and train.batch_tokens is not None:
        yield Finding(
            keys,
            f"train.batch = {train.batch} and train.batch_tokens = {train.batch_tokens} are both given: remove one of them.",
        )
    elif train.batch_tokens is not None and train.batch_tokens % train.sequence_length:
        yield Finding(
            ("train.batch_tokens", "train.sequence_length"),
            f"train.batch_tokens = {train.batch_tokens} is not a multiple of train.sequence_length = {train.sequence_length}: "
            f"take {either(_multiples(train.batch_tokens, train.sequence_length))}.",
        )


def _duration(run: Run) -> Iterator[Finding]:
    train, keys = run.train, ("train.steps", "train.tokens")
    if train.steps is None and train.tokens is None:
        yield Finding(keys, "neither train.steps nor train.tokens is given: set one of them, such as train.steps = 1000.")
    elif train.steps is not None and train.tokens is not None:
        yield Finding(
            keys, f"train.steps = {train.steps} and train.tokens = {train.tokens} are both given: remove one of them."
        )


def _replicas(run: Run) -> Iterator[Finding]:
    """The batch is dealt evenly to the replicas, and each replica's part evenly to its forwards."""
    given = _batch_given(run)
    if given is None:
        return
    key, batch = given
    replicas, micro = run.layout.replicas, run.train.micro_batch
    if batch % replicas:
        unit = 1 if key == "train.batch" else run.train.sequence_length
        batches = either(unit * size for size in _multiples(batch, replicas))
        shard = run.layout.shard
        degrees = either(_around(run.layout.data or 1, [degree // shard for degree in _divisors(batch) if degree % shard == 0]))
        yield Finding(
            ("layout.data", key, "layout.shard", "train.sequence_length"),
            f"{key} = {batch * unit}{'' if unit == 1 else f' ({batch} sequences)'} does not divide among the {replicas} replicas "
            f"of layout.data × layout.shard: set {key} to {batches}{f', or layout.data to {degrees}' if degrees else ''}.",
        )
    elif micro is not None and (batch // replicas) % micro:
        share = batch // replicas
        divisors = _divisors(share)
        listed = either(divisors if len(divisors) <= 16 else _around(micro, divisors))
        per = "the global batch has" if replicas == 1 else "each replica gets of the global batch"
        yield Finding(
            ("train.micro_batch", key, "layout.data", "layout.shard", "train.sequence_length"),
            f"train.micro_batch = {micro} does not divide the {share} sequences that {per}: set it to {listed}, or leave it out.",
        )


def _attention(run: Run) -> Iterator[Finding]:
    model = run.model
    if model.heads % model.kv:
        yield Finding(
            ("model.kv_heads", "model.heads"),
            f"model.kv_heads = {model.kv} does not divide model.heads = {model.heads}: "
            f"set it to {either(_around(model.kv, _divisors(model.heads)))}.",
        )
    if model.head_dim is None and model.dim % model.heads:
        yield Finding(
            ("model.heads", "model.dim", "model.head_dim"),
            f"model.heads = {model.heads} does not divide model.dim = {model.dim}: set model.heads to "
            f"{either(_around(model.heads, _divisors(model.dim)))}, or give model.head_dim.",
        )
    elif model.positions == "rope" and model.head % 2:
        which = f"model.head_dim = {model.head}" if model.head_dim else f"model.dim / model.heads = {model.head}"
        yield Finding(
            ("model.head_dim", "model.heads", "model.dim", "model.positions"),
            f"{which} is odd, but rotary positions turn pairs of values: take {either(_multiples(model.head, 2))}.",
        )


def _positions(run: Run) -> Iterator[Finding]:
    model, length = run.model, run.train.sequence_length
    if model.positions == "learned" and model.context < length:
        yield Finding(
            ("train.sequence_length", "model.context", "model.positions", "model.preset"),
            f"train.sequence_length = {length} exceeds the table of learned positions, model.context = {model.context}: "
            f"set train.sequence_length to at most {model.context}, or enlarge model.context.",
        )
    scaling = model.rope_scaling
    if scaling is None:
        return
    if model.positions != "rope":
        yield Finding(
            ("model.rope_scaling.factor", "model.positions"),
            f"model.rope_scaling stretches rotary positions, but model.positions = {toml(model.positions)}: "
            'remove model.rope_scaling, or set model.positions to "rope".',
        )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        yield Finding(
            ("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"),
            f"model.rope_scaling.low_freq_factor = {scaling.low_freq_factor} is not below "
            f"model.rope_scaling.high_freq_factor = {scaling.high_freq_factor}: lower the one or raise the other.",
        )


def _vocabulary(run: Run) -> Iterator[Finding]:
    tokens = TOKENIZER_VOCAB[run.data.tokenizer]
    if run.model.vocab is not None and run.model.vocab < tokens:
        yield Finding(
            ("model.vocab", "data.tokenizer"),
            f"model.vocab = {run.model.vocab} has no row for some of the {tokens} tokens of data.tokenizer = "
            f"{toml(run.data.tokenizer)}: set it to at least {tokens}, or leave it out.",
        )


def _layout(run: Run) -> Iterator[Finding]:
    model, layout, length = run.model, run.layout, run.train.sequence_length
    for name, heads in (("model.heads", model.heads), ("model.kv_heads", model.kv)):
        if heads % layout.tensor and (name == "model.heads" or model.kv != model.heads):
            yield Finding(
                ("layout.tensor", name),
                f"layout.tensor = {layout.tensor} does not divide {name} = {heads}: "
                f"set it to {either(_around(layout.tensor, _divisors(heads)))}.",
            )
    if layout.pipeline > model.layers:
        yield Finding(
            ("layout.pipeline", "model.layers"),
            f"layout.pipeline = {layout.pipeline} leaves stages without a layer, as model.layers = {model.layers}: "
            f"set it to at most {model.layers}.",
        )
    pieces = 2 * layout.context  # each rank takes one piece from either end, which evens out causal attention
    if layout.context > 1 and length % pieces:
        yield Finding(
            ("layout.context", "train.sequence_length"),
            f"train.sequence_length = {length} is not a multiple of 2 × layout.context = {pieces}: "
            f"set train.sequence_length to {either(_multiples(length, pieces))}.",
        )


def _schedule(run: Run) -> Iterator[Finding]:
    optimizer, steps = run.optimizer, _steps_given(run)
    warmup, decay, kind = optimizer.warmup_steps, optimizer.decay_steps, toml(optimizer.schedule)
    length = ("train.steps", "train.tokens", "train.batch", "train.batch_tokens", "train.sequence_length")
    if decay is not None and optimizer.schedule != "wsd":
        yield Finding(
            ("optimizer.decay_steps", "optimizer.schedule"),
            f'optimizer.decay_steps = {decay} belongs to optimizer.schedule = "wsd", but the schedule is {kind}: '
            'remove it, or set optimizer.schedule to "wsd".',
        )
    if steps is None:
        return
    # A run shorter than its warm-up is legal: trying a run file out for a few steps is the commonest thing to do.
    if optimizer.schedule == "wsd" and decay is not None and warmup < steps < warmup + decay:
        yield Finding(
            ("optimizer.decay_steps", "optimizer.warmup_steps", "optimizer.schedule", *length),
            f"optimizer.warmup_steps + optimizer.decay_steps = {warmup + decay} exceeds the run of {steps} steps: "
            f"set optimizer.decay_steps to at most {steps - warmup}.",
        )


def _evaluation(run: Run) -> Iterator[Finding]:
    if run.train.eval_every is not None and run.data.eval_fraction == 0:
        yield Finding(
            ("train.eval_every", "data.eval_fraction"),
            f"train.eval_every = {run.train.eval_every} has nothing to evaluate on, as data.eval_fraction = 0: "
            "remove train.eval_every, or hold out a part such as data.eval_fraction = 0.01.",
        )


def _batch_given(run: Run) -> tuple[str, int] | None:
    """The key that gives the batch and its sequences; None where that is itself a problem."""
    train = run.train
    if (train.batch is None) == (train.batch_tokens is None):
        return None
    if train.batch_tokens is not None and train.batch_tokens % train.sequence_length:
        return None
    return ("train.batch" if train.batch is not None else "train.batch_tokens"), run.batch


def _steps_given(run: Run) -> int | None:
    if (run.train.steps is None) == (run.train.tokens is None):
        return None
    return run.steps if run.train.steps is not None or _batch_given(run) else None


def _divisors(number: int) -> list[int]:
    # The bound keeps absurd numbers from hanging a message; it hides only pairs of divisors that both exceed it.
    small = [d for d in range(1, min(math.isqrt(number), 1 << 16) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _multiples(number: int, unit: int) -> list[int]:
    """The nearest positive multiples of the unit, below and above."""
    below = number // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def _around(number: int, legal: list[int]) -> list[int]:
    """The nearest legal values below and above."""
    return [value for value in legal if value <= number][-1:] + [value for value in legal if value > number][:1]
