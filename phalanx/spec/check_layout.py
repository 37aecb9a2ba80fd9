"""Problems between the degrees of [layout] and the sizes they divide, and techniques that exclude each other; for `spec/check`.
Every refusal names the keys, the reason and the nearest legal values. Nothing falls back silently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phalanx.spec.check_config import custom
from phalanx.spec.errors import around, divisors, either, nearest_divisors, nearest_multiples, toml
from phalanx.spec.keys import Finding, apply_rules
from phalanx.spec.layout import FIXED_STAGES, Layout
from phalanx.spec.run import Run


def layout_findings(run: Run) -> Iterator[Finding]:
    rules = (_data, _tensor, _sequence, _context, _pipeline, _schedule, _expert, _custom_module, _memory)
    return apply_rules(run, *rules)


def _data(run: Run) -> Iterator[str]:
    layout = run.layout
    if layout.shard == 1 and layout.zero != 3:
        replicas = layout.data or 1
        remedy = (
            f"set layout.shard = {replicas} and layout.data = 1" if replicas > 1 else "set layout.shard to a number of ranks"
        )
        yield f"$layout.zero has nothing to shard, as $layout.shard: {remedy}, or remove layout.zero.$(layout.data)"
    if run.optimizer.sync_every == 1:
        return
    alone = "$optimizer.sync_every lets replicas train independently, but"
    if layout.data == 1:
        yield f"{alone} $layout.data: set layout.data to 2 or more, or remove optimizer.sync_every."
    if layout.expert * layout.expert_tensor > 1:
        expert_tensor = f"$(layout.expert_tensor)expert_tensor = {layout.expert_tensor}"
        yield f"{alone} $layout.expert (× {expert_tensor}) divides the experts among them: set one of them to 1."


def _tensor(run: Run) -> Iterator[str]:
    model, tensor = run.model, run.layout.tensor
    if tensor == 1 or not model.is_builtin:
        return
    if model.heads % tensor:
        # Fewer key/value heads than ranks are legal: each rank computes those that its own queries read.
        yield f"$layout.tensor does not divide $model.heads: set it to {nearest_divisors(tensor, model.heads)}."
    shared = model.moe.shared * model.moe.ffn if model.moe is not None and model.moe.shared else None
    for key, size in (("model.ffn", model.hidden), ("model.vocab", model.vocab), ("model.moe.ffn", shared)):
        if size is not None:
            yield from _empty_parts("layout.tensor", tensor, key, size)


def _sequence(run: Run) -> Iterator[str]:
    layout, length = run.layout, run.train.sequence_length
    if layout.sequence and layout.tensor == 1:
        yield (
            "$layout.sequence divides norms and residuals over the tensor group, but $layout.tensor: set layout.tensor to 2 "
            "or more, or remove layout.sequence."
        )
    experts = run.model.moe is not None and run.model.is_builtin
    unit = layout.tensor * layout.context
    if layout.tensor > 1 and (layout.sequence or experts) and length % unit and not length % layout.context:
        product = "layout.tensor" if layout.context == 1 else "layout.context × layout.tensor"
        reason = "layout.sequence = true" if layout.sequence else "a mixture of experts"
        yield (
            f"$(layout.tensor)$train.sequence_length is not a multiple of {product} = {unit}, as {reason} requires: "
            f"set train.sequence_length to {nearest_multiples(length, unit)}.$(layout.sequence)$(layout.context)"
        )


def _context(run: Run) -> Iterator[str]:
    model, layout, length = run.model, run.layout, run.train.sequence_length
    if layout.context == 1:
        return
    zigzag = layout.context_method != "ulysses"
    # Each rank takes one chunk from either end of the sequence, which balances causal attention.
    chunks, product = (2 * layout.context, "2 × layout.context") if zigzag else (layout.context, "layout.context")
    if length % chunks:
        yield (
            f"$(layout.context)$train.sequence_length is not a multiple of {product} = {chunks}: "
            f"set train.sequence_length to {nearest_multiples(length, chunks)}."
        )
    heads = model.heads // layout.tensor
    if not zigzag and model.heads % layout.tensor == 0 and heads % layout.context:
        yield (
            f"$(layout.context)$layout.context_method divides the {heads} heads of a rank (model.heads / layout.tensor) among "
            f"$layout.context ranks, which is not a divisor: set layout.context to {nearest_divisors(layout.context, heads)}, "
            'or layout.context_method to "ring".$(model.heads)$(layout.tensor)'
        )
    if model.whole_sequences is not None:
        key, reason = model.whole_sequences
        yield f"$layout.context divides sequences, but $model.{key} {reason}: set layout.context = 1, or remove model.{key}."


def _pipeline(run: Run) -> Iterator[str]:
    model, layout = run.model, run.layout
    if layout.pipeline == 1:
        for key in _given(layout, "schedule", "schedule_file", "stages"):
            remedy = f"set layout.pipeline to 2 or more, or remove layout.{key}"
            yield f"$layout.{key} belongs to a pipeline, but $layout.pipeline: {remedy}."
        return
    # The number of stages of a schedule file is known only when it is read.
    stages = layout.pipeline * (layout.stages_per_rank if layout.schedule_file is None else 1)
    if stages > model.layers and model.is_builtin:  # the layers of a custom module are counted when it is built
        most = model.layers // layout.stages_per_rank
        remedy = f"set layout.pipeline to at most {most}" if most > 1 else "take fewer stages or more layers"
        each = "" if layout.stages_per_rank == 1 else f" with {layout.stages_per_rank} stages each"
        without = f"$layout.pipeline{each} leaves stages without a layer, as $model.layers"
        yield f"{without}: {remedy}.$(layout.schedule)$(layout.stages)"
    if model.mtp_depth:
        yield (
            "$layout.pipeline puts embedding and head on different ranks, but $model.mtp_depth needs both at the end: "
            "set layout.pipeline = 1 or model.mtp_depth = 0."
        )


def _schedule(run: Run) -> Iterator[str]:
    """The contents of a schedule file are checked once the number of micro-batches is known."""
    layout = run.layout
    if layout.pipeline == 1:
        return
    if layout.schedule_file is None:
        fixed = FIXED_STAGES.get(layout.schedule, layout.stages)
        if layout.stages is not None and layout.stages != fixed:
            remedy = f'remove layout.stages, or use "interleaved-{"1f1b" if fixed == 1 else "zero-bubble"}"'
            yield f"$layout.stages does not fit $layout.schedule, which has {fixed} per rank: {remedy}."
        return
    for key in _given(layout, "schedule", "stages"):
        yield f"$layout.{key} and $layout.schedule_file both set the pipeline schedule: remove one of them."
    if not Path(layout.schedule_file).is_file():
        yield (
            "$layout.schedule_file is not a file: write one with `phalanx schedule NAME --csv FILE`, or remove it and name a "
            "layout.schedule."
        )


def _given(layout: Layout, *keys: str) -> list[str]:
    return [key for key in keys if getattr(layout, key) != getattr(Layout(), key)]


def _expert(run: Run) -> Iterator[str]:
    moe, layout = run.model.moe, run.layout
    product = layout.expert * layout.expert_tensor
    if product == 1 or not run.model.is_builtin:
        return
    divides = f"${'layout.expert' if layout.expert > 1 else 'layout.expert_tensor'} divides the experts, but"
    if moe is None:
        yield f"{divides} the model has none: remove it, or add [model.moe].$(model.moe.experts)"
        return
    if run.model.dense_layers == run.model.layers:
        remedy = f"remove it, or set model.moe.dense_layers to at most {run.model.layers - 1}"
        yield f"{divides} no block has any, as $model.moe.dense_layers and $model.layers: {remedy}."
    if moe.experts % layout.expert:
        yield f"$layout.expert does not divide $model.moe.experts: set it to {nearest_divisors(layout.expert, moe.experts)}."
    yield from _empty_parts("layout.expert_tensor", layout.expert_tensor, "model.moe.ffn", moe.ffn)
    ranks = layout.replicas * layout.context * layout.tensor
    if layout.data is not None and ranks % product:
        sizes = [size for size in divisors(ranks) if size % layout.expert_tensor == 0]
        legal = around(product, [size for size in sizes if moe.experts % (size // layout.expert_tensor) == 0])
        remedy = f"set layout.expert to {either(size // layout.expert_tensor for size in legal)}" if legal else "set both to 1"
        yield (
            "$(layout.expert)$(layout.expert_tensor)$(layout.data)$(layout.shard)$(layout.context)$(layout.tensor)"
            f"layout.expert × layout.expert_tensor = {product} does not divide the {ranks} ranks of a pipeline stage "
            f"(data × shard × context × tensor): {remedy}."
        )


def _custom_module(run: Run) -> Iterator[str]:
    if run.model.is_builtin:
        return
    what_model = (
        "a custom model.module$(model.module)"
        if run.model.module is not None
        else "a model of transformers$(model.config) (model.config)"
    )
    refused = f"cannot be combined with {what_model}"
    unknown = {"expert_tensor": "which slices of its experts fit together"}
    if run.model.module is not None:
        unknown |= {"expert": "where its experts are"}
    for key, what in unknown.items():
        if getattr(run.layout, key) > 1:
            yield f"$layout.{key} {refused}, as {what} is unknown: set layout.{key} = 1."
    if run.layout.expert > 1 and run.layout.tensor > 1:
        yield f"$layout.expert {refused} while $layout.tensor, which divides each expert: set one of them to 1."
    if run.layout.stage_split == "measured" and run.layout.pipeline > 1:
        yield f'$layout.stage_split {refused}, whose stages have equal numbers of parameters: set layout.stage_split = "counted".'
    if run.memory.loss_chunk is not None and run.model.module is not None:
        yield f"$memory.loss_chunk {refused}, which computes its own logits: remove it."


def _memory(run: Run) -> Iterator[str]:
    memory = run.memory
    if memory.recompute == "selective" and memory.activations == "cpu":
        yield (
            "$memory.recompute cannot be combined with $memory.activations: the results that it stores would stay on the device. Set "
            'memory.recompute = "full" or "none", or remove memory.activations.'
        )
    if not memory.recomputes and memory.recompute_every > 1:
        yield '$memory.recompute_every has no effect, as $memory.recompute: set memory.recompute = "full", or remove it.'
    if memory.offloads and (no_offload := run.optimizer.traits.no_offload) is not None:
        remedy = 'set optimizer.name = "adamw", or memory.offload = "none"'
        yield f"$memory.offload cannot be combined with $optimizer.name, {no_offload}: {remedy}."
    if memory.cuda_graphs:
        yield from _cuda_graphs(run)
    if memory.offload_path is not None and memory.offload != "nvme":
        yield (
            f'$memory.offload_path belongs to memory.offload = "nvme", but that is {toml(memory.offload)}: '
            "remove it, or set memory.offload.$(memory.offload)"
        )


def _cuda_graphs(run: Run) -> Iterator[str]:
    """What a recorded forward and backward cannot contain: decisions of the host, and messages to other ranks."""
    remedy = "remove memory.cuda_graphs"
    model, layout = run.model, run.layout
    for key in ("tensor", "context", "pipeline", "expert"):
        if getattr(layout, key) > 1:
            yield f"$memory.cuda_graphs cannot be combined with $layout.{key}, whose messages are not recorded: {remedy}."
    if layout.zero == 3 and layout.shard > 1:
        yield f"$memory.cuda_graphs cannot be combined with $layout.shard and $layout.zero, whose messages are not recorded: {remedy}."
    if not model.is_builtin:
        yield f"$memory.cuda_graphs cannot be combined with {custom(model)}, which may decide on the host: {remedy}."
    if model.moe is not None:
        yield f"$memory.cuda_graphs cannot be combined with experts$(model.moe.experts), whose sizes change: {remedy}."
    if run.train.objective != "next-token":
        yield f"$memory.cuda_graphs cannot be combined with $train.objective, which computes a reference first: {remedy}."
    if model.mtp_depth:
        yield f"$memory.cuda_graphs cannot be combined with $model.mtp_depth: {remedy}."
    if run.memory.recomputes:
        yield f"$memory.cuda_graphs cannot be combined with $memory.recompute: {remedy}."
    if run.memory.activations == "cpu":
        yield f"$memory.cuda_graphs cannot be combined with $memory.activations, copied at other times: {remedy}."


def leaves_empty_part(size: int, parts: int) -> bool:
    """Whether cutting into equal parts, the last ones shorter, leaves a part empty."""
    return parts > 1 and -(-size // parts) * (parts - 1) >= size


def _empty_parts(key: str, parts: int, divided: str, size: int) -> Iterator[str]:
    if leaves_empty_part(size, parts):
        most = next(count for count in range(min(parts, size), 0, -1) if not leaves_empty_part(size, count))
        yield f"${key} leaves a rank without any of $({divided}){divided} = {size}: set it to at most {most}."
