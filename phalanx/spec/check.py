"""Problems that show only when several keys are seen together. `spec/load` calls it, and so does every entry that takes a Run made
in Python. `spec/check_model` and `spec/check_layout` check those two tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from phalanx.spec import hf_config_write
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.check_model import model_findings
from phalanx.spec.errors import Finding, RunError, around, divisors, either, multiples, quote, toml
from phalanx.spec.keys import BARE, Wrong, keys_in, tables_in
from phalanx.spec.run import Run, Source
from phalanx.spec.sources import kinds, vocabulary_size

_OWNERS = {
    "documents": ("memory",),
    "split": ("hf",),
    "config": ("hf",),
    "streaming": ("hf",),
    "prompt_field": ("chat",),
    "answer_field": ("chat",),
    "template": ("chat",),
    "field": ("jsonl", "parquet", "hf", "chat"),
    "paths": ("text", "jsonl", "parquet", "hf", "chat", "tokens"),
}
"""The kinds of source that read each key; every kind reads the other keys."""


def check(run: Run) -> list[str]:
    """Everything wrong with a run, one sentence each; empty when it can be planned."""
    problems = _names(run)
    if problems:
        return problems
    readable = True
    for key in (key for table in tables_in(run) for key in keys_in(run, table)):
        value = key.of(run)
        if value is None and key.optional:
            continue
        try:
            key.read(value)
        except Wrong as wrong:
            problems.append(str(wrong))
            readable = False
        else:
            problems += filter(None, [key.refusal(value)])
    # With a negative size or text in place of a number, problems between keys cannot be computed.
    return problems + [finding.sentence for finding in findings(run)] if readable else problems


def findings(run: Run) -> Iterator[Finding]:
    """Problems between keys, of a run in which every key accepts its value."""
    yield from _batch(run)
    yield from _duration(run)
    yield from _replicas(run)
    yield from model_findings(run)
    yield from data_findings(run)
    yield from layout_findings(run)
    yield from _schedule(run)
    yield from _evaluation(run)
    yield from _export(run)
    yield from _storage(run)
    yield from _copies(run)
    yield from _rewinding(run)
    yield from _spares(run)
    yield from _planned_cluster(run)


def _names(run: Run) -> list[str]:
    """Invalid names, which only a run made in Python can have: a run file cannot express them."""
    problems = []
    for table, names in (
        ("data.mix", [source.name for source in run.data.mix]),
        ("model.options", [name for name, _ in run.model.options]),
    ):
        for name in dict.fromkeys(names):
            if not isinstance(name, str) or not BARE.fullmatch(name):
                problems.append(f"{name!r} is no name for an entry of {table}: use letters, digits, _ and - only.")
            elif names.count(name) > 1:
                problems.append(f"{table} has {names.count(name)} entries of the name {toml(name)}: rename all but one.")
    return problems


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
            f"take {either(multiples(train.batch_tokens, train.sequence_length))}.",
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
    """The batch must divide evenly among the replicas, and each replica's share among its micro-batches."""
    given = _batch_given(run)
    if given is None:
        return
    key, batch = given
    replicas, micro = run.layout.replicas, run.train.micro_batch
    if batch % replicas:
        unit = 1 if key == "train.batch" else run.train.sequence_length
        batches = either(unit * size for size in multiples(batch, replicas))
        shard = run.layout.shard
        degrees = either(around(run.layout.data or 1, [degree // shard for degree in divisors(batch) if degree % shard == 0]))
        yield Finding(
            ("layout.data", key, "layout.shard", "train.sequence_length"),
            f"{key} = {batch * unit}{'' if unit == 1 else f' ({batch} sequences)'} does not divide among the {replicas} replicas "
            f"of layout.data × layout.shard: set {key} to {batches}{f', or layout.data to {degrees}' if degrees else ''}.",
        )
    elif micro is not None and (batch // replicas) % micro:
        share = batch // replicas
        sizes = divisors(share)
        listed = either(sizes if len(sizes) <= 16 else around(micro, sizes))
        per = "the global batch has" if replicas == 1 else "each replica gets of the global batch"
        yield Finding(
            ("train.micro_batch", key, "layout.data", "layout.shard", "train.sequence_length"),
            f"train.micro_batch = {micro} does not divide the {share} sequences that {per}: set it to {listed}, or remove it.",
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
    # A run shorter than its warm-up is legal: trying a run file for a few steps is common.
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


def _copies(run: Run) -> Iterator[Finding]:
    every = run.checkpoint.memory_every
    if every is not None and run.memory.offload == "nvme":
        yield Finding(
            ("checkpoint.memory_every", "memory.offload"),
            f'checkpoint.memory_every = {every} keeps the whole state in host memory, which memory.offload = "nvme" is meant to '
            "avoid: remove one of them.",
        )


def _rewinding(run: Run) -> Iterator[Finding]:
    after, most = run.resilience.rollback_after, run.resilience.max_skipped
    if after is None:
        return
    if run.checkpoint.every is None:
        yield Finding(
            ("resilience.rollback_after", "checkpoint.every"),
            f"resilience.rollback_after = {after} has no checkpoint to return to, as checkpoint.every is not given: set it, such as "
            "checkpoint.every = 100, or remove resilience.rollback_after.",
        )
    if after > most:
        yield Finding(
            ("resilience.rollback_after", "resilience.max_skipped"),
            f"resilience.rollback_after = {after} is never reached, as the run ends after {most + 1} bad steps in a row: set it to at "
            f"most resilience.max_skipped = {most}, or raise that.",
        )


def _spares(run: Run) -> Iterator[Finding]:
    spares, nodes = run.resilience.spares, run.cluster.nodes
    if spares >= nodes:
        fewer = f"set it to at most {nodes - 1}" if nodes > 1 else "remove it"
        yield Finding(
            ("resilience.spares", "cluster.nodes"),
            f"resilience.spares = {spares} of cluster.nodes = {nodes} leaves no node to train on: {fewer}, or raise cluster.nodes to at "
            f"least {spares + 1}.",
        )


def _planned_cluster(run: Run) -> Iterator[Finding]:
    """Parts of a cluster mean nothing without the GPU, which `cluster.gpu` or `cluster.name` gives; planning looks the names up."""
    cluster = run.cluster
    if cluster.name is not None or cluster.gpu is not None:
        return
    for key in ("gpus", "node", "network"):
        if (value := getattr(cluster, key)) is not None:
            yield Finding(
                (f"cluster.{key}", "cluster.gpu", "cluster.name"),
                f"cluster.{key} = {toml(value)} is part of a cluster to plan for, but nothing says which GPU it has: set cluster.gpu, such "
                f'as cluster.gpu = "h100-sxm", or cluster.name, or remove cluster.{key}; `phalanx clusters` lists the names.',
            )


def _export(run: Run) -> Iterator[Finding]:
    """An export that can never work is refused before the first step, not at the first save."""
    if not run.checkpoint.export_hf:
        return
    off = "remove checkpoint.export_hf"
    if run.model.module is None and any(model_findings(run)):
        return  # the model's own problems come first
    try:
        hf_config_write.config(replace(run.model, vocab=run.model.vocab or 1))
    except RunError as error:
        for sentence in error.problems:
            yield Finding(
                ("checkpoint.export_hf", "model.module"), f"checkpoint.export_hf = true: {sentence.removesuffix('.')}: {off}."
            )
    if run.optimizer.sync_every > 1:
        yield Finding(
            ("checkpoint.export_hf", "optimizer.sync_every"),
            f"checkpoint.export_hf = true needs a single model, but with optimizer.sync_every = {run.optimizer.sync_every} "
            f"each replica has its own model between synchronizations: {off}, or set optimizer.sync_every to 1.",
        )


def _storage(run: Run) -> Iterator[Finding]:
    if run.checkpoint.local_first and run.checkpoint.url is None:
        yield Finding(
            ("checkpoint.local_first", "checkpoint.url"),
            "checkpoint.local_first = true uploads to checkpoint.url, which is not given: set it, such as "
            'checkpoint.url = "s3://bucket/folder", or remove checkpoint.local_first.',
        )


def _batch_given(run: Run) -> tuple[str, int] | None:
    """The key that gives the batch, and the sequences in it; None if that is a problem of its own."""
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


def data_findings(run: Run) -> Iterator[Finding]:
    """Problems between the keys of [data], and with model.vocab."""
    yield from _vocabulary(run)
    if run.data.mix:
        yield from _mixture(run)
        for source in run.data.mix:
            yield from _source(source, f"data.mix.{source.name}")
    else:
        yield from _source(run.data, "data")
    if run.data.packing == "best-fit" and not run.data.document_mask:
        yield Finding(
            ("data.document_mask", "data.packing"),
            'data.document_mask = false makes one text of a window, but data.packing = "best-fit" fills windows with unrelated '
            'documents: remove it, or set data.packing to "stream".',
        )


def _vocabulary(run: Run) -> Iterator[Finding]:
    try:
        tokens = vocabulary_size(run.data.tokenizer)
    except RunError as error:
        # The run file in a run directory loads even if its tokenizer has moved away; code that needs the tokenizer reports it.
        yield from (Finding(("data.tokenizer",), sentence, not_if_resolved=True) for sentence in error.problems)
        return
    if run.model.vocab is not None and run.model.vocab < tokens:
        yield Finding(
            ("model.vocab", "data.tokenizer"),
            f"model.vocab = {run.model.vocab} has no row for some of the {tokens} tokens of data.tokenizer = "
            f"{toml(run.data.tokenizer)}: set it to at least {tokens}, or remove it.",
        )


def _mixture(run: Run) -> Iterator[Finding]:
    """In a mixture, each source is described in its own table, and all have weights or none."""
    mix = run.data.mix
    for field in fields(Source):
        value = getattr(run.data, field.name)
        if value != field.default:
            yield Finding(
                (f"data.{field.name}", "data.mix"),
                f"data.{field.name} = {quote(value)} describes one source, but [data.mix.{mix[0].name}] makes a mixture: "
                f"set it in the tables of the mixture, such as data.mix.{mix[0].name}.{field.name}, or remove it.",
            )
    weighted = [source.name for source in mix if source.weight is not None]
    bare = [source.name for source in mix if source.weight is None]
    if weighted and bare:
        yield Finding(
            tuple(f"data.mix.{name}.weight" for name in bare),
            f"data.mix.{bare[0]} has no weight, but data.mix.{weighted[0]} has one: give data.mix.{bare[0]}.weight, "
            "or remove all weights to mix by the number of tokens.",
        )


def _source(source: Source, table: str) -> Iterator[Finding]:
    """A source's kind must read every key that is set: no setting may be ignored."""
    indicated = kinds(source)
    if len(indicated) > 1:
        yield Finding(
            (f"{table}.paths", f"{table}.source"),
            f"{table}.paths names files of {len(indicated)} kinds ({', '.join(indicated)}): choose one, such as "
            f"{table}.source = {toml(indicated[0])}, or make a mixture of them in [data.mix.NAME] tables.",
        )
    if len(indicated) != 1:
        return
    (kind,) = indicated
    for name, owners in _OWNERS.items():
        value = getattr(source, name)
        if kind not in owners and value != Source.__dataclass_fields__[name].default:
            which = either(toml(owner) for owner in owners)
            reason = (
                "" if source.source is not None else f" ({'inferred from its paths' if source.paths else 'it has no paths'})"
            )
            yield Finding(
                (f"{table}.{name}", f"{table}.source"),
                f"{table}.{name} is set, but {table}.source = {toml(kind)}{reason} does not read it: "
                f"remove it, or set {table}.source to {which}.",
            )
    if kind in _OWNERS["paths"] and not source.paths:
        wanted = "folder of it" if kind == "hf" else "file, folder or glob"
        yield Finding(
            (f"{table}.paths", f"{table}.source"),
            f"{table}.source = {toml(kind)} but {table}.paths names nothing: give it at least one {wanted}.",
        )
    if kind == "memory" and not any(source.documents):
        empty = f"holds {len(source.documents)} empty texts" if source.documents else "is empty"
        yield Finding(
            (f"{table}.documents", f"{table}.source"),
            f'{table}.source = "memory" but {table}.documents {empty}: give it at least one text.',
        )
