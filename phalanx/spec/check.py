"""Problems that show only when several keys are seen together. `spec/load` calls it, and so does every entry that takes a Run made
in Python. `spec/check_layout` checks the degrees of parallelism, `spec/check_decoder` the sizes of the built-in model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace

from phalanx.spec import hf_config_write
from phalanx.spec.adapted_layers import adapted_layers, is_target, linear_layers
from phalanx.spec.check_config import config_problems, custom
from phalanx.spec.check_decoder import decoder_rules
from phalanx.spec.check_engine import engine_problems
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.check_watch import watch_problems
from phalanx.spec.errors import RunError, around, divisors, either, multiples, nearest_multiples, quote, toml
from phalanx.spec.keys import BARE, KEYS, OPTIONAL, Finding, Wrong, apply_rules, keys_in, tables_in
from phalanx.spec.model import ModelSpec
from phalanx.spec.origin import origin, overridable
from phalanx.spec.run import PARTS, PORTS_PER_NODE, Cluster, Dpo, Run, Source
from phalanx.spec.sources import kinds, vocabulary_size


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
    # With a negative size or text in place of a number, problems between keys cannot be computed.
    return problems + [finding.sentence for finding in findings(run)] if readable else problems


def findings(run: Run) -> Iterator[Finding]:
    """Problems between keys, of a run in which every key accepts its value."""
    if run.command.program is not None:
        yield from apply_rules(run, _command, _spares, _ports, watch_problems)
        return
    yield from apply_rules(run, _batch)
    yield from model_findings(run)
    yield from layout_findings(run)
    yield from apply_rules(run, engine_problems)
    yield from apply_rules(run, _data, _objective, _duration, _samples, _checkpoints)
    yield from apply_rules(run, _resilience, _spares, _ports, _planned_cluster, watch_problems)


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


def _batch(run: Run) -> Iterator[str]:
    """The batch must divide evenly among the replicas, and each replica's share among its micro-batches."""
    yield from _exactly_one(run, "train.batch", "train.batch_tokens", 8)
    train, replicas, shard = run.train, run.layout.replicas, run.layout.shard
    if train.batch_tokens is not None and train.batch is None and train.batch_tokens % train.sequence_length:
        near = nearest_multiples(train.batch_tokens, train.sequence_length)
        yield f"$train.batch_tokens is not a multiple of $train.sequence_length: take {near}."
    if not _knows_batch(run):
        return
    key, unit = ("train.batch", 1) if train.batch is not None else ("train.batch_tokens", train.sequence_length)
    batch, share = run.batch, run.batch // replicas
    involved = f"$({key})$(layout.data)$(layout.shard)$(train.sequence_length)"
    if batch % replicas:
        batches = either(unit * size for size in multiples(batch, replicas))
        degrees = either(around(run.layout.data or 1, [degree // shard for degree in divisors(batch) if degree % shard == 0]))
        yield (
            f"$(layout.data){involved}${key}{'' if unit == 1 else f' ({batch} sequences)'} does not divide among the {replicas} "
            f"replicas of layout.data × layout.shard: set {key} to {batches}{degrees and f', or layout.data to {degrees}'}."
        )
    elif train.micro_batch is not None and share % train.micro_batch:
        sizes = divisors(share)
        nearest = either(sizes if len(sizes) <= 16 else around(train.micro_batch, sizes))
        whose = "the global batch has" if replicas == 1 else "each replica gets of the global batch"
        uneven = f"$train.micro_batch{involved} does not divide the {share} sequences that {whose}"
        yield f"{uneven}: set it to {nearest}, or remove it."


def _exactly_one(run: Run, first: str, second: str, example: int) -> Iterator[str]:
    given = [KEYS[path].of(run) is not None for path in (first, second)]
    if all(given):
        yield f"${first} and ${second} are both given: remove one of them."
    elif not any(given):
        yield f"neither $({first}){first} nor $({second}){second} is given: set one of them, such as {first} = {example}."


def _knows_batch(run: Run) -> bool:
    """Whether the batch is given, and without a problem of its own."""
    batch, tokens = run.train.batch, run.train.batch_tokens
    return (batch is None) != (tokens is None) and (tokens or 0) % run.train.sequence_length == 0


def _duration(run: Run) -> Iterator[str]:
    yield from _exactly_one(run, "train.steps", "train.tokens", 1000)
    steps, tokens, decay = run.train.steps, run.train.tokens, run.optimizer.decay_steps
    known = (steps is None) != (tokens is None) and (steps is not None or _knows_batch(run))
    warmup, schedule = run.optimizer.warmup_steps, run.optimizer.schedule
    if decay is not None and schedule != "wsd":
        yield (
            f'$optimizer.decay_steps belongs to optimizer.schedule = "wsd", but the schedule is {toml(schedule)}: '
            'remove it, or set optimizer.schedule to "wsd".$(optimizer.schedule)'
        )
    # A run shorter than its warm-up is legal: trying a run file for a few steps is common.
    elif decay is not None and known and warmup < run.steps < warmup + decay:
        yield (
            "$(optimizer.decay_steps)$(optimizer.warmup_steps)$(optimizer.schedule)$(train.steps)$(train.tokens)$(train.batch)"
            f"optimizer.warmup_steps + optimizer.decay_steps = {warmup + decay} exceeds the run of {run.steps} steps: "
            f"set optimizer.decay_steps to at most {run.steps - warmup}.$(train.batch_tokens)$(train.sequence_length)"
        )
    if run.train.eval_every is not None and run.data.eval_fraction == 0:
        yield (
            "$train.eval_every has nothing to evaluate on, as $(data.eval_fraction)data.eval_fraction = 0: "
            "remove train.eval_every, or hold out a part such as data.eval_fraction = 0.01."
        )


def _samples(run: Run) -> Iterator[str]:
    train, sources = run.train, run.data.mix or (run.data,)
    if train.sample_every is None and train.sample_prompts:
        yield "$train.sample_prompts are never used: set train.sample_every, such as 100, or remove them.$(train.sample_every)"
    if train.sample_every is not None and not train.sample_prompts and any(source.source == "chat" for source in sources):
        yield (
            "$train.sample_every has no message to answer, and this run reads conversations: set "
            'train.sample_prompts = ["…"], or remove train.sample_every.$(train.sample_prompts)$(data.source)'
        )


def _checkpoints(run: Run) -> Iterator[str | Finding]:
    if run.checkpoint.export_hf and not run.checkpoint.save:
        yield "$checkpoint.export_hf exports checkpoints, but $checkpoint.save saves none: remove one of them."
        return
    yield from _export(run)
    if run.checkpoint.local_first and run.checkpoint.url is None:
        yield (
            "$checkpoint.local_first uploads to checkpoint.url, which is not given: set it, such as "
            'checkpoint.url = "s3://bucket/folder", or remove checkpoint.local_first.$(checkpoint.url)'
        )
    if run.checkpoint.memory_every is not None and run.memory.offload == "nvme":
        avoided = "keeps the whole state in host memory, which $memory.offload is meant to avoid"
        yield f"$checkpoint.memory_every {avoided}: remove one of them."


def _export(run: Run) -> Iterator[str | Finding]:
    """An export that can never work is refused before the first step, not at the first save."""
    if not run.checkpoint.export_hf or (run.model.module is None and any(model_findings(run))):
        return  # the model's own problems come first
    off = "remove checkpoint.export_hf"
    try:
        hf_config_write.config(replace(run.model, vocab=run.model.vocab or 1))
    except RunError as error:
        for sentence in error.problems:
            text = f"checkpoint.export_hf = true: {sentence.removesuffix('.')}: {off}."
            yield Finding(("checkpoint.export_hf", "model.module"), text)
    if run.optimizer.sync_every > 1:
        yield (
            "$checkpoint.export_hf needs a single model, but with $optimizer.sync_every each replica has its own model "
            f"between synchronizations: {off}, or set optimizer.sync_every to 1."
        )


def _resilience(run: Run) -> Iterator[str]:
    after, most = run.resilience.rollback_after, run.resilience.max_skipped
    if after is not None and not run.checkpoint.save:
        yield "$resilience.rollback_after returns to a checkpoint, but $checkpoint.save saves none: remove one of them."
    elif after is not None and run.checkpoint.every is None:
        yield (
            "$resilience.rollback_after has no checkpoint to return to, as $(checkpoint.every)checkpoint.every is not given: "
            "set it, such as checkpoint.every = 100, or remove resilience.rollback_after."
        )
    if after is not None and after > most:
        yield (
            f"$resilience.rollback_after is never reached, as the run ends after {most + 1} bad steps in a row: "
            "set it to at most $resilience.max_skipped, or raise that."
        )


def _nodes_are_counted(run: Run) -> bool:
    """Whether the launcher knows how many nodes there are, and the run file does not say: it is checked again then."""
    return run.cluster.launcher in ("ssh", "ray") and run.cluster.nodes == Cluster().nodes


def _spares(run: Run) -> Iterator[str]:
    spares, nodes = run.resilience.spares, run.cluster.nodes
    if spares >= nodes and not _nodes_are_counted(run):
        fewer = f"set it to at most {nodes - 1}" if nodes > 1 else "remove it"
        remedy = f"{fewer}, or raise cluster.nodes to at least {spares + 1}"
        yield f"$resilience.spares of $cluster.nodes leaves no node to train on: {remedy}."


def _command(run: Run) -> Iterator[str]:
    """A program of the user's own, which `phalanx launch` starts."""
    if not run.command.program:
        yield '$command.program is empty: give a program and its arguments, such as ["python", "train.py"].'
    training, fewest = run.cluster.nodes - run.resilience.spares, run.command.min_nodes
    if fewest is not None and fewest > training > 0 and not _nodes_are_counted(run):
        yield (
            f"$command.min_nodes is more than the {training} nodes that run the program$(cluster.nodes)$(resilience.spares): set it to at "
            f"most {training}, or raise cluster.nodes."
        )
    for entry in run.command.environment or ():
        if not entry.partition("=")[0].isidentifier() or "=" not in entry:
            yield f'$(command.environment)command.environment: "{entry}" is no variable: write it as NAME=VALUE.'


def _ports(run: Run) -> Iterator[str]:
    try:
        ports = run.cluster.port_range
    except ValueError:
        yield '$cluster.ports is not a range of ports: write the first and the last, as in "40000-40100".'
        return
    if ports is None:
        return
    if not ports or ports[0] < 1024 or ports[-1] > 65535:
        yield '$cluster.ports must rise from 1024 or more to at most 65535, as in "40000-40100".'
        return
    local = run.cluster.launcher == "local"
    need = PORTS_PER_NODE * (run.cluster.nodes if local else 1)
    if len(ports) < need:
        each = " for $cluster.nodes on this machine" if local and run.cluster.nodes > 1 else ""
        yield (
            f"$cluster.ports has {len(ports)} ports, but a host needs {need}{each}, {PORTS_PER_NODE} for each node: "
            f'widen it, as in "{ports[0]}-{ports[0] + need - 1}".'
        )


def _planned_cluster(run: Run) -> Iterator[str]:
    """Parts of a cluster mean nothing without the GPU, which `cluster.gpu` or `cluster.name` gives; planning looks the names up."""
    cluster = run.cluster
    product = cluster.nodes * (cluster.gpus_per_node or 0)
    if cluster.nodes > 1 and product and cluster.gpus not in (None, product):
        remedy = f"remove cluster.gpus, or set it to {product}"
        yield f"$cluster.gpus is not $cluster.nodes times $cluster.gpus_per_node, which is {product}: {remedy}."
    if cluster.name is not None or cluster.gpu is not None:
        return
    for key in PARTS:
        if getattr(run.cluster, key) is not None:
            yield (
                f"$cluster.{key} is part of a cluster to plan for, but nothing says which GPU it has$(cluster.gpu)$(cluster.name): "
                f'set cluster.gpu, such as cluster.gpu = "h100-sxm", or cluster.name, or remove cluster.{key}; '
                "`phalanx clusters` lists the names."
            )


def _data(run: Run) -> Iterator[str | Finding]:
    """Problems between the keys of [data], and with model.vocab."""
    yield from _vocabulary(run)
    if run.data.mix:
        yield from _mixture(run)
        for source in run.data.mix:
            yield from _source(source, f"data.mix.{source.name}")
    else:
        yield from _source(run.data, "data")
    if run.data.packing == "best-fit" and not run.data.document_mask:
        yield (
            "$data.document_mask makes one text of a window, but $data.packing fills windows with unrelated documents: "
            'remove it, or set data.packing to "stream".'
        )


def _objective(run: Run) -> Iterator[str]:
    """DPO reads pairs of answers, and the other objective texts."""
    sources: dict[str, Source] = {f"data.mix.{source.name}": source for source in run.data.mix} or {"data": run.data}
    pairs = [table for table, source in sources.items() if kinds(source) == ["preferences"]]
    if run.train.objective != "dpo":
        for table in pairs:
            yield (
                f'$({table}.source){table}.source = "preferences" holds pairs of answers, but $train.objective trains on texts: set '
                'train.objective = "dpo", or data.source = "chat" for conversations.'
            )
        if run.dpo != Dpo():
            yield '$(dpo.beta)$(dpo.label_smoothing)[dpo] has no effect with $train.objective: set it to "dpo", or remove [dpo].'
        return
    for table in sources:
        if table not in pairs:
            yield (
                f"$train.objective needs pairs of answers, but $({table}.source){table} is of another kind: set {table}.source = "
                '"preferences".'
            )
    if any(source.documents for source in sources.values()) and run.data.tokenizer != "byte":
        yield '$(data.documents)data.documents of preferences need $data.tokenizer = "byte": name a file in data.paths instead.'
    if not run.data.document_mask:
        yield "$train.objective keeps two answers in a window apart, but $data.document_mask lets them see each other: remove it."
    if run.memory.loss_chunk:
        yield "$memory.loss_chunk adds up the losses of tokens, but $train.objective needs those of each answer: remove it."
    if run.model.mtp_depth:
        yield "$model.mtp_depth predicts tokens further ahead, which $train.objective does not use: set model.mtp_depth = 0."


def _vocabulary(run: Run) -> Iterator[str | Finding]:
    try:
        tokens = vocabulary_size(run.data.tokenizer)
    except RunError as error:
        # The run file in a run directory loads even if its tokenizer has moved away; code that needs the tokenizer reports it.
        for sentence in error.problems:
            yield Finding(("data.tokenizer",), sentence, not_if_resolved=True, absent=True)
        return
    if run.model.vocab is not None and run.model.vocab < tokens:
        remedy = f"set it to at least {tokens}, or remove it"
        yield f"$model.vocab has no row for some of the {tokens} tokens of $data.tokenizer: {remedy}."


def _mixture(run: Run) -> Iterator[str | Finding]:
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


def _source(source: Source, table: str) -> Iterator[str]:
    """A source's kind must read every key that is set: no setting may be ignored."""
    indicated = kinds(source)
    if len(indicated) > 1:
        yield (
            f"$({table}.paths)$({table}.source){table}.paths names files of {len(indicated)} kinds ({', '.join(indicated)}): "
            f"choose one, such as {table}.source = {toml(indicated[0])}, or make a mixture of them in [data.mix.NAME] tables."
        )
    if len(indicated) != 1:
        return
    (kind,) = indicated
    for field in fields(Source):
        readers = field.metadata.get("read_by", (kind,))
        if kind not in readers and getattr(source, field.name) != field.default:
            inferred = f" ({'inferred from its paths' if source.paths else 'it has no paths'})" if source.source is None else ""
            key = f"{table}.{field.name}"
            yield (
                f"$({key})$({table}.source){key} is set, but {table}.source = {toml(kind)}{inferred} does not read it: "
                f"remove it, or set {table}.source to {either(map(toml, readers))}."
            )
    if kind == "preferences" and source.documents:
        if source.paths or len(source.documents) % 2:
            yield (
                f"$({table}.documents){table}.documents are chosen and rejected texts in turn, in place of {table}.paths: give an even "
                "number of them, and no paths."
            )
    elif kind not in ("memory", "stdlib") and not source.paths:
        wanted = "name or folder of it" if kind == "hf" else "file, folder or glob"
        involved = f"$({table}.paths)$({table}.source)"
        yield f"{involved}{table}.source = {toml(kind)} but {table}.paths names nothing: give it at least one {wanted}."
    if kind == "memory" and not any(source.documents):
        empty = f"holds {len(source.documents)} empty texts" if source.documents else "is empty"
        involved = f"$({table}.documents)$({table}.source)"
        yield f'{involved}{table}.source = "memory" but {table}.documents {empty}: give it at least one text.'


# --- the model --------------------------------------------------------------------------------------------------------

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def model_findings(run: Run) -> Iterator[Finding]:
    """Problems between the keys of [model], and with train.sequence_length. A custom module gives the sizes a meaning of its own."""
    sizes = decoder_rules if run.model.is_builtin else ()
    return apply_rules(run, _start, config_problems, _module, *sizes, _bf16_blocks, _fp8_experts, _fp8_gather, _lora)


def _start(run: Run) -> Iterator[str | Finding]:
    """Only one of preset, folder, module and config may define the model; a config may have the weights of a folder."""
    model = run.model
    for key, value in (("from", model.from_), ("module", model.module)):
        if model.preset is not None and value is not None:
            yield f"$model.{key} and $model.preset both define the model: remove one of them."
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
        # With a config, weights are compared by their names and shapes.
        for finding in apply_rules(run, lambda run: _differences(run, start.model) if model.config is None else ()):
            yield finding._replace(not_if_resolved=True)
    elif model.vocab is None:  # otherwise the sizes were read earlier, and the folder may be gone
        yield Finding(
            ("model.from",),
            f"model.from = {toml(model.from_)} does not exist: name a folder of Hugging Face weights, a run directory, a "
            "checkpoint or a model of the Hugging Face hub.",
            absent=True,
        )


def _differences(run: Run, theirs: ModelSpec) -> Iterator[str]:
    """Sizes in the run file that differ from those of the folder's weights."""
    absent = [table for table in OPTIONAL if getattr(theirs, table.removeprefix("model.")) is None]
    for table in absent:
        if getattr(run.model, table.removeprefix("model.")) is not None:
            first = next(path for path in KEYS if path.startswith(f"{table}."))
            yield f"$({first})$model.from has no {table}: remove [{table}]."
    for path, key in KEYS.items():
        if not path.startswith("model.") or key.table in absent or overridable(key, run.model):
            continue
        given = key.of(run), key.of(Run(model=theirs))
        our_value = run.model.computed_defaults.get(path, given[0])
        their_value = theirs.computed_defaults.get(path, given[1])
        if given != (None, None) and our_value != their_value:
            value = "none" if their_value is None else quote(their_value)
            yield f"${path} differs from the {value} of $model.from: remove it."
    if run.model.options != theirs.options:
        yield "model.options differ from those of $model.from: remove [model.options]."


def _module(run: Run) -> Iterator[str]:
    model = run.model
    if model.module is None:
        if model.options:
            involved = "".join(f"$(model.options.{name})" for name, _ in model.options)
            yield (
                f"{involved}model.options.{model.options[0][0]} is for a custom module, but $(model.module)model.module is not given: "
                "remove [model.options], or set model.module."
            )
        return
    if not _MODULE.fullmatch(model.module):
        example = '"package.module:Class", such as "mypackage.mymodel:MyModel"'
        yield f"$model.module does not name a class: write it as {example}."
    if model.mtp_depth:
        yield "$model.mtp_depth belongs to the built-in decoder, but $model.module: remove model.mtp_depth."


def _bf16_blocks(run: Run) -> Iterator[str]:
    precision = run.precision
    for key in ("bf16_first", "bf16_last"):
        if not getattr(precision, key):
            continue
        if precision.compute != "fp8":
            compute = "$precision.compute" if precision.compute else "$(precision.compute)precision.compute is not given"
            yield f'$precision.{key} excepts blocks from fp8, but {compute}: set precision.compute = "fp8", or remove precision.{key}.'
        elif not run.model.is_builtin:
            yield f"$precision.{key} counts the blocks of the built-in decoder, but {custom(run.model)} defines the model: remove precision.{key}."
        elif precision.bf16_first + precision.bf16_last >= run.model.layers:
            yield f'$precision.{key} leaves no block to fp8: the model has {run.model.layers} of them, so set a smaller number or precision.compute = "bf16".'
            return


def _fp8_experts(run: Run) -> Iterator[str]:
    precision, model = run.precision, run.model
    if not precision.fp8_experts:
        return
    if precision.compute != "fp8":
        compute = "$precision.compute" if precision.compute else "$(precision.compute)precision.compute is not given"
        yield f'$precision.fp8_experts is for a run in fp8, but {compute}: set precision.compute = "fp8", or remove precision.fp8_experts.'
    elif not model.is_builtin:
        yield f"$precision.fp8_experts is for the experts of the built-in decoder, but {custom(model)} defines the model: remove precision.fp8_experts."
    elif model.moe is None:
        yield "$precision.fp8_experts is for routed experts, but this model has none: remove precision.fp8_experts."
    elif run.lora.rank is not None:
        yield "$precision.fp8_experts is for experts that are trained whole, but $lora.rank: remove precision.fp8_experts, or lora.rank."


def _fp8_gather(run: Run) -> Iterator[str]:
    precision = run.precision
    if not precision.fp8_gather:
        return
    if precision.compute != "fp8":
        compute = "$precision.compute" if precision.compute else "$(precision.compute)precision.compute is not given"
        yield f'$precision.fp8_gather is for weights that are multiplied in fp8, but {compute}: set precision.compute = "fp8", or remove precision.fp8_gather.'
    elif precision.fp8_scaling == "row":
        yield (
            "$precision.fp8_gather needs one scale per weight, but $precision.fp8_scaling: the forward and the backward round rows and columns with scales "
            'of their own; set precision.fp8_scaling = "tensor", or remove precision.fp8_gather.'
        )
    if run.layout.zero < 3:
        yield "$precision.fp8_gather is for weights that ranks gather when they compute, but $layout.zero: set layout.zero = 3, or remove precision.fp8_gather."


def _lora(run: Run) -> Iterator[str]:
    lora = run.lora
    if lora.rank is None:
        for key in ("alpha", "targets", "base", "dropout"):
            if getattr(lora, key):
                yield f"$lora.{key} describes adapters, but $(lora.rank)lora.rank is not given: set it, such as lora.rank = 16, or remove lora.{key}."
        return
    if lora.base is not None and run.precision.compute == "fp8":
        yield '$lora.base gives matrices that are dequantized to 16 bits, which $precision.compute would round once more: set precision.compute = "bf16", or remove lora.base.'
    yield from _dropout(run)
    if not run.model.is_builtin:  # its layers are known when it is built
        return
    layers = linear_layers(run.model)
    for target in lora.targets:
        if not any(is_target(name, (target,)) for name in layers):
            names = dict.fromkeys(name.rpartition(".")[2] for name in layers)
            yield f"$(lora.targets)lora.targets: {toml(target)} is no layer of this model: take {either(names)}, or a longer name such as {toml(next(iter(layers)))}."
    smallest = min((min(shape[-2:]) for shape in adapted_layers(run.model, lora).values()), default=None)
    if smallest is not None and lora.rank > smallest:
        yield f"$lora.rank exceeds {smallest}, the smaller side of one of its matrices: an adapter would be larger than the matrix. Set it to at most {smallest}."


def _dropout(run: Run) -> Iterator[str]:
    """What cannot have it: a mask is a function of the sample, the position and the layer."""
    if not run.lora.dropout:
        return
    if not run.model.is_builtin:
        yield f"$lora.dropout masks the inputs of the built-in decoder's layers, whose positions are known, but {custom(run.model)} defines the model: set lora.dropout = 0."
    if run.memory.cuda_graphs:
        yield "$lora.dropout draws another mask in every step, which $memory.cuda_graphs would replay: remove one of the two."
    adapted = adapted_layers(run.model, run.lora) if run.model.is_builtin else {}
    for name in [name for name, shape in adapted.items() if len(shape) == 3 or name.startswith("mtp.")][:1]:
        why = (
            "added to its matrices before the product"
            if "experts" in name
            else "of multi-token prediction, which reads shifted positions"
        )
        yield f"$lora.dropout masks the input of an adapter, but that of {name} is {why}: set lora.dropout = 0, or leave it out of $(lora.targets)lora.targets."
