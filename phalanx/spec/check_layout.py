"""Problems between the degrees of [layout] and the sizes they divide, and techniques that exclude each other. Called by `spec/check`.

Every refusal names the keys, the reason and the nearest legal values. Nothing falls back silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phalanx.spec.errors import Finding, around, divisors, either, multiples, toml
from phalanx.spec.layout import FIXED_STAGES
from phalanx.spec.run import Run


def layout_findings(run: Run) -> Iterator[Finding]:
    yield from _data(run)
    yield from _tensor(run)
    yield from _sequence(run)
    yield from _context(run)
    yield from _pipeline(run)
    yield from _stages(run)
    yield from _schedule_file(run)
    yield from _expert(run)
    yield from _custom_module(run)
    yield from _memory(run)
    yield from _local_sgd(run)


def _data(run: Run) -> Iterator[Finding]:
    layout = run.layout
    if layout.shard == 1 and layout.zero != 3:
        replicas = layout.data or 1
        remedy = (
            f"set layout.shard = {replicas} and layout.data = 1" if replicas > 1 else "set layout.shard to a number of ranks"
        )
        yield Finding(
            ("layout.zero", "layout.shard", "layout.data"),
            f"layout.zero = {layout.zero} has nothing to shard, as layout.shard = 1: {remedy}, or remove layout.zero.",
        )


def _tensor(run: Run) -> Iterator[Finding]:
    model, tensor = run.model, run.layout.tensor
    if tensor == 1 or model.module is not None:
        return
    if model.heads % tensor:
        # Fewer key/value heads than ranks are legal: each rank computes those that its own queries read.
        yield Finding(
            ("layout.tensor", "model.heads"),
            f"layout.tensor = {tensor} does not divide model.heads = {model.heads}: "
            f"set it to {either(around(tensor, divisors(model.heads)))}.",
        )
    shared = model.moe.shared * model.moe.ffn if model.moe is not None and model.moe.shared else None
    for name, size in (("model.ffn", model.hidden), ("model.vocab", model.vocab), ("model.moe.ffn", shared)):
        if size is not None and _leaves_none(size, tensor):
            yield Finding(
                ("layout.tensor", name),
                f"layout.tensor = {tensor} leaves a rank without any of {name} = {size}: "
                f"set it to at most {_most_parts(size, tensor)}.",
            )


def _sequence(run: Run) -> Iterator[Finding]:
    layout, length = run.layout, run.train.sequence_length
    if layout.sequence and layout.tensor == 1:
        yield Finding(
            ("layout.sequence", "layout.tensor"),
            "layout.sequence = true divides norms and residuals over the tensor group, but layout.tensor = 1: set layout.tensor to 2 "
            "or more, or remove layout.sequence.",
        )
    experts = run.model.moe is not None and run.model.module is None
    unit = layout.tensor * layout.context
    if layout.tensor > 1 and (layout.sequence or experts) and length % unit and not length % layout.context:
        why = "layout.sequence = true" if layout.sequence else "a mixture of experts"
        each = "layout.tensor" if layout.context == 1 else "layout.context × layout.tensor"
        yield Finding(
            ("layout.tensor", "train.sequence_length", "layout.sequence", "layout.context"),
            f"train.sequence_length = {length} is not a multiple of {each} = {unit}, as {why} requires: "
            f"set train.sequence_length to {either(multiples(length, unit))}.",
        )


def _context(run: Run) -> Iterator[Finding]:
    model, layout, length = run.model, run.layout, run.train.sequence_length
    if layout.context == 1:
        return
    zigzag = layout.context_method != "ulysses"
    # Each rank takes one chunk from either end of the sequence, which balances causal attention.
    chunks, product = (2 * layout.context, "2 × layout.context") if zigzag else (layout.context, "layout.context")
    if length % chunks:
        yield Finding(
            ("layout.context", "train.sequence_length"),
            f"train.sequence_length = {length} is not a multiple of {product} = {chunks}: "
            f"set train.sequence_length to {either(multiples(length, chunks))}.",
        )
    heads = model.heads // layout.tensor
    if not zigzag and model.heads % layout.tensor == 0 and heads % layout.context:
        yield Finding(
            ("layout.context", "layout.context_method", "model.heads", "layout.tensor"),
            f'layout.context_method = "ulysses" divides the {heads} heads of a rank (model.heads / layout.tensor) among layout.context = '
            f"{layout.context} ranks, which is not a divisor: set layout.context to {either(around(layout.context, divisors(heads)))}, "
            'or layout.context_method to "ring".',
        )
    if model.mtp_depth:
        yield Finding(
            ("layout.context", "model.mtp_depth"),
            f"layout.context = {layout.context} divides sequences, but model.mtp_depth = {model.mtp_depth} predicts tokens across the boundaries: "
            "set layout.context = 1 or model.mtp_depth = 0.",
        )


def _pipeline(run: Run) -> Iterator[Finding]:
    model, layout = run.model, run.layout
    if layout.pipeline == 1:
        for key, value, default in (
            ("schedule", layout.schedule, "1f1b"),
            ("schedule_file", layout.schedule_file, None),
            ("stages", layout.stages, None),
        ):
            if value != default:
                yield Finding(
                    (f"layout.{key}", "layout.pipeline"),
                    f"layout.{key} = {toml(value)} belongs to a pipeline, but layout.pipeline = 1: set layout.pipeline to 2 or more, "
                    f"or remove layout.{key}.",
                )
        return
    # The number of stages of a schedule file is known only when it is read.
    stages = layout.pipeline * (layout.stages_per_rank if layout.schedule_file is None else 1)
    if stages > model.layers:
        most = model.layers // layout.stages_per_rank
        wide = f"set layout.pipeline to at most {most}" if most > 1 else "take fewer stages or more layers"
        each = "" if layout.stages_per_rank == 1 else f" with {layout.stages_per_rank} stages each"
        yield Finding(
            ("layout.pipeline", "model.layers", "layout.schedule", "layout.stages"),
            f"layout.pipeline = {layout.pipeline}{each} leaves stages without a layer, as model.layers = {model.layers}: {wide}.",
        )
    if model.mtp_depth:
        yield Finding(
            ("layout.pipeline", "model.mtp_depth"),
            f"layout.pipeline = {layout.pipeline} puts embedding and head on different ranks, but model.mtp_depth = {model.mtp_depth} needs both "
            "at the end: set layout.pipeline = 1 or model.mtp_depth = 0.",
        )


def _stages(run: Run) -> Iterator[Finding]:
    layout = run.layout
    if layout.pipeline == 1 or layout.stages is None or layout.schedule_file is not None:
        return
    wanted = FIXED_STAGES.get(layout.schedule)
    if wanted is not None and layout.stages != wanted:
        others = 'use "interleaved-1f1b"' if wanted == 1 else 'use "interleaved-zero-bubble"'
        yield Finding(
            ("layout.stages", "layout.schedule"),
            f"layout.stages = {layout.stages} does not fit layout.schedule = {toml(layout.schedule)}, which has {wanted} per rank: "
            f"remove layout.stages, or {others}.",
        )


def _schedule_file(run: Run) -> Iterator[Finding]:
    """Its contents are checked once the number of micro-batches is known."""
    layout = run.layout
    if layout.pipeline == 1 or layout.schedule_file is None:
        return
    for key, value, default in (("schedule", layout.schedule, "1f1b"), ("stages", layout.stages, None)):
        if value != default:
            yield Finding(
                (f"layout.{key}", "layout.schedule_file"),
                f"layout.{key} = {toml(value)} and layout.schedule_file = {toml(layout.schedule_file)} both set the pipeline "
                "schedule: remove one of them.",
            )
    if not Path(layout.schedule_file).is_file():
        yield Finding(
            ("layout.schedule_file",),
            f"layout.schedule_file = {toml(layout.schedule_file)} is not a file: write one with `phalanx schedule NAME --csv FILE`, or "
            "remove it and name a layout.schedule.",
        )


def _expert(run: Run) -> Iterator[Finding]:
    moe, layout = run.model.moe, run.layout
    degrees = {"layout.expert": layout.expert, "layout.expert_tensor": layout.expert_tensor}
    given = {key: degree for key, degree in degrees.items() if degree > 1}
    if not given:
        return
    key, degree = next(iter(given.items()))
    if run.model.module is not None:
        return  # `_custom_module` reports it
    if moe is None:
        yield Finding(
            (key, "model.moe.experts"),
            f"{key} = {degree} divides the experts, but the model has none: remove it, or add [model.moe].",
        )
        return
    if run.model.dense_layers == run.model.layers:
        yield Finding(
            (key, "model.moe.dense_layers", "model.layers"),
            f"{key} = {degree} divides the experts, but no block has any, as model.moe.dense_layers = {moe.dense_layers} and model.layers = "
            f"{run.model.layers}: remove it, or set model.moe.dense_layers to at most {run.model.layers - 1}.",
        )
    if moe.experts % layout.expert:
        yield Finding(
            ("layout.expert", "model.moe.experts"),
            f"layout.expert = {layout.expert} does not divide model.moe.experts = {moe.experts}: "
            f"set it to {either(around(layout.expert, divisors(moe.experts)))}.",
        )
    if _leaves_none(moe.ffn, layout.expert_tensor):
        yield Finding(
            ("layout.expert_tensor", "model.moe.ffn"),
            f"layout.expert_tensor = {layout.expert_tensor} leaves a rank without any of model.moe.ffn = {moe.ffn}: "
            f"set it to at most {_most_parts(moe.ffn, layout.expert_tensor)}.",
        )
    product = layout.expert * layout.expert_tensor
    ranks = layout.replicas * layout.context * layout.tensor
    if layout.data is not None and ranks % product:
        sizes = [size for size in divisors(ranks) if size % layout.expert_tensor == 0]
        legal = [size for size in sizes if moe.experts % (size // layout.expert_tensor) == 0]
        sizes = around(product, legal)
        remedy = f"set layout.expert to {either(size // layout.expert_tensor for size in sizes)}" if sizes else "set both to 1"
        yield Finding(
            ("layout.expert", "layout.expert_tensor", "layout.data", "layout.shard", "layout.context", "layout.tensor"),
            f"layout.expert × layout.expert_tensor = {product} does not divide the {ranks} ranks of a pipeline stage "
            f"(data × shard × context × tensor): {remedy}.",
        )


def _custom_module(run: Run) -> Iterator[Finding]:
    if run.model.module is None:
        return
    for key, degree, why in (
        ("layout.pipeline", run.layout.pipeline, "how to split it into stages is unknown"),
        ("layout.context", run.layout.context, "how it computes attention is unknown"),
        ("layout.expert", run.layout.expert, "where its experts are is unknown"),
        ("layout.expert_tensor", run.layout.expert_tensor, "where its experts are is unknown"),
    ):
        if degree > 1:
            yield Finding(
                (key, "model.module"),
                f"{key} = {degree} cannot be combined with a custom model.module, as {why}: set {key} = 1.",
            )
    if run.layout.sequence:
        yield Finding(
            ("layout.sequence", "model.module"),
            "layout.sequence = true cannot be combined with a custom model.module, which may mix positions anywhere: "
            "remove it.",
        )
    if run.memory.loss_chunk is not None:
        yield Finding(
            ("memory.loss_chunk", "model.module"),
            f"memory.loss_chunk = {run.memory.loss_chunk} cannot be combined with a custom model.module, which computes its own logits: "
            "remove it.",
        )


def _memory(run: Run) -> Iterator[Finding]:
    memory = run.memory
    for other, on, why in (
        ("memory.compile", memory.compile, "compiled blocks choose themselves which results they store"),
        ("memory.activations", memory.activations == "cpu", "the results that it stores would stay on the device"),
    ):
        if memory.recompute == "selective" and on:
            value = toml(getattr(memory, other.partition(".")[2]))
            yield Finding(
                ("memory.recompute", other),
                f'memory.recompute = "selective" cannot be combined with {other} = {value}: {why}. Set memory.recompute = "full" or "none", '
                f"or remove {other}.",
            )
    if not memory.recomputes and memory.recompute_every > 1:
        yield Finding(
            ("memory.recompute_every", "memory.recompute"),
            f"memory.recompute_every = {memory.recompute_every} has no effect, as memory.recompute = {toml(memory.recompute)}: "
            'set memory.recompute = "full", or remove it.',
        )
    if memory.offloads and run.optimizer.name == "muon":
        yield Finding(
            ("memory.offload", "optimizer.name"),
            f'memory.offload = {toml(memory.offload)} cannot be combined with optimizer.name = "muon", whose iterations run on the device: '
            'set optimizer.name = "adamw", or memory.offload = "none".',
        )
    if memory.offload_path is not None and memory.offload != "nvme":
        yield Finding(
            ("memory.offload_path", "memory.offload"),
            f'memory.offload_path = {toml(memory.offload_path)} belongs to memory.offload = "nvme", but that is '
            f"{toml(memory.offload)}: remove it, or set memory.offload.",
        )


def _local_sgd(run: Run) -> Iterator[Finding]:
    interval, layout = run.optimizer.sync_every, run.layout
    if interval == 1:
        return
    if layout.data == 1:
        yield Finding(
            ("optimizer.sync_every", "layout.data"),
            f"optimizer.sync_every = {interval} lets replicas train independently, but layout.data = 1: set layout.data to 2 or more, or "
            "remove optimizer.sync_every.",
        )
    if layout.expert * layout.expert_tensor > 1:
        yield Finding(
            ("optimizer.sync_every", "layout.expert", "layout.expert_tensor"),
            f"optimizer.sync_every = {interval} lets replicas train independently, but layout.expert = {layout.expert} (× expert_tensor = "
            f"{layout.expert_tensor}) divides the experts among them: set one of them to 1.",
        )


def _leaves_none(size: int, parts: int) -> bool:
    """Whether cutting into equal parts, the last ones shorter, leaves a part empty."""
    return parts > 1 and -(-size // parts) * (parts - 1) >= size


def _most_parts(size: int, parts: int) -> int:
    return next(count for count in range(min(parts, size), 0, -1) if not _leaves_none(size, count))
