"""Places a model on the ranks: every technique of the layout, in the one order in which they compose. Called by training.

The model has no memory yet. Techniques that cut parameters come first, those that wrap modules next, and only then each rank
allocates its own part. Nothing falls back: unsupported layouts are refused when the run file is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from phalanx import accelerator
from phalanx.parallel import data_parallel, expert, inferred_tensor, tensor, vocab_parallel
from phalanx.parallel.context import context_parallel
from phalanx.parallel.data_parallel import Sharding
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.executor import tied_group
from phalanx.parallel.sharded_model import Engine, Fill, ParamShard, Recipe, ShardedModel
from phalanx.schedules.actions import Schedule
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.transforms import activations, compile, fp8, lora, quantize, recompute
from phalanx.transforms.blocks import block_list
from phalanx.transforms.quantize import QuantizedTensor

_ENOUGH_FLOPS = 4e12
"""Of one micro-batch in blocks that are compiled as one function, with their backward: some milliseconds, in which the host launches the next."""
_MOST_TOGETHER = 4
"""Such blocks. Compilation takes as many times as long."""


def apply(parts: list[nn.Module], run: Run, plan: Plan, mesh: Mesh, recipe: Recipe, *, frozen: bool = False) -> ShardedModel:
    """Apply the layout to `parts`, this rank's stages of the model. `frozen`: it is never trained."""
    layout = plan.layout
    applied: dict[str, str | None] = {}
    adapters = None
    if run.lora.rank is not None:
        adapters = lora.apply(parts, run.lora, recipe.axes)
        recipe = replace(recipe, axes=adapters.axes)
        applied["lora"] = adapters.applied(parts)
    for part in parts if frozen else ():
        part.requires_grad_(False)
    shards = {
        name: ParamShard.full(parameter, frozen=frozen or (adapters is not None and name not in adapters.names))
        for part in parts
        for name, parameter in part.named_parameters()
    }
    if layout.tensor > 1:
        shards = _cut_for_tensor_ranks(parts, shards, mesh, recipe)
        applied["tensor"] = tensor.applied(parts, shards) + inferred_tensor.stays_whole(recipe.cuts)
    shards = expert.split(parts, shards, recipe.axes, mesh)
    applied["expert"] = expert.applied(parts, shards, recipe.axes)
    if adapters is not None and adapters.dropout is not None:
        adapters.dropout.slices = mesh.coordinate("tensor"), layout.tensor
        adapters.place_dropout(parts, {name: shard.slice for name, shard in shards.items()}, mesh.device)
    if layout.context > 1:
        applied["context"] = context_parallel.swap(parts, mesh, layout.context_method)
    quantized: dict[str, QuantizedTensor] = {}
    if run.lora.base is not None:
        quantized, shards = _quantize(parts, shards, run.lora.base, plan, mesh, recipe)
        recipe = replace(recipe, fill=_filler(recipe, quantized))
        applied["base"] = quantize.applied(parts, quantized, run.lora.base)
    columns = mesh.group("tensor", use="tensor")
    chunk = _loss_chunk(parts, run, mesh)
    loss = vocab_parallel.swap(parts, columns, chunk=chunk, sequence=layout.sequence, loss=recipe.loss)
    applied["loss"] = vocab_parallel.applied(parts, loss)
    applied |= transform(parts, run, plan, mesh)
    if recipe.tied in shards and not any(getattr(part, "is_first_stage", True) for part in parts):
        shards[recipe.tied] = replace(shards[recipe.tied], counted=False)  # the last stage's copy of a tied embedding
    for part in parts:
        part.state_dtype = residual_dtype(run, plan, mesh)  # type: ignore[assignment]  # in which a stage returns its state
    engine = _engine(parts, shards, run, plan, mesh, recipe)
    applied["data"] = engine.applied()
    placed = ShardedModel(
        parts,
        mesh,
        engine,
        loss,
        residual=residual_dtype(run, plan, mesh),
        is_local_sgd=run.optimizer.sync_every > 1,
        graphed=_graphed(run, plan, mesh),
    )
    placed.adapters, placed.quantized = adapters, quantized
    if recipe.schedule is not None:
        applied["pipeline"] = _pipelined(parts, recipe.schedule, run, mesh)
        if recipe.tied is not None and (ends := tied_group(mesh, recipe.schedule)) is not None:
            placed.tied[recipe.tied] = ends
    if placed.graphed:
        applied["cuda_graphs"] = "forward and backward of a micro-batch are replayed"
    placed.applied = {technique: words for technique, words in applied.items() if words is not None}
    return placed


_CHUNK = 4096
"""Tokens whose logits exist at a time on a GPU, for a model whose memory no plan has counted part by part."""


def _loss_chunk(parts: list[nn.Module], run: Run, mesh: Mesh) -> int | None:
    """The planner chooses it for the built-in decoder."""
    if run.train.objective == "dpo":
        return None
    if run.memory.loss_chunk is None and not run.model.is_builtin and accelerator.of(mesh.device).asynchronous:
        return _CHUNK if all(hasattr(part, "project") for part in parts) else None
    return run.memory.loss_chunk or None


def _cut_for_tensor_ranks(
    parts: list[nn.Module], shards: dict[str, ParamShard], mesh: Mesh, recipe: Recipe
) -> dict[str, ParamShard]:
    """By the inferred plan of a model that was not written for it, or by names of dimensions."""
    if recipe.cuts is not None:
        return inferred_tensor.split(parts, shards, recipe.cuts, mesh, recipe.rewritten)
    return tensor.split(parts, shards, recipe.axes, mesh, sequence=mesh.layout.sequence)


def _pipelined(parts: list[nn.Module], schedule: Schedule, run: Run, mesh: Mesh) -> str:
    """What this rank has of a pipeline."""
    whole = schedule.splits_backward and run.memory.recompute == "selective"
    note = "; backwards are not split, because of selective recomputation" if whole else ""
    numbers = schedule.stages_of(mesh.coordinate("pipeline"))
    blocks = ["+".join(block_list(part)[1]) for part in parts]
    stages = ", ".join(f"stage {number}: blocks {held}" for number, held in zip(numbers, blocks, strict=True))
    return f"{schedule.name}, {schedule.stages} stages on {schedule.ranks} ranks; {stages}{note}"


def _quantize(
    parts: list[nn.Module], shards: dict[str, ParamShard], base: quantize.Format, plan: Plan, mesh: Mesh, recipe: Recipe
) -> tuple[dict[str, QuantizedTensor], dict[str, ParamShard]]:
    """Quantize the frozen matrices. The shards of their parameters become those of what is stored, whose rows are divided further."""
    slices = {name: shard.slice for name, shard in shards.items()}
    bits = torch.float16 if plan.compute == "fp16" else torch.bfloat16
    quantized = quantize.apply(parts, slices, base, recipe.axes, bits, mesh.device)
    stored = {name: parameter for part in parts for name, parameter in part.named_parameters() if name in quantized}
    return quantized, shards | {
        name: replace(shards[name], slice=TensorSlice.full(parameter.shape)) for name, parameter in stored.items()
    }


def _filler(recipe: Recipe, quantized: Mapping[str, QuantizedTensor]) -> Fill:
    """Writes initial values: those of a quantized matrix into what is stored of it."""

    def fill(name: str, tensor: Tensor, shard: ParamShard) -> None:
        if (matrix := quantized.get(name)) is None:
            recipe.fill(name, tensor, shard)
        else:
            matrix.bind(tensor, shard.slice)
            matrix.fill(lambda values, part: recipe.fill(name, values, replace(shard, slice=part)))

    return fill


def transform(parts: list[nn.Module], run: Run, plan: Plan, mesh: Mesh) -> dict[str, str | None]:
    """Apply what makes one device's part cheaper; later transforms wrap earlier ones."""
    memory = run.memory
    applied: dict[str, str | None] = {}
    if plan.compute == "fp8":
        if reason := fp8.available(mesh.device):
            raise RunError([f'precision.compute = "fp8" is not available: {reason}; set precision.compute = "bf16".'])
        applied["fp8"] = fp8.apply(
            parts, run.precision.fp8_scaling, mesh.device, run.fp8_blocks, experts=run.precision.fp8_experts
        )
    if memory.compile:
        applied["compile"] = compile.apply(
            parts, selective=memory.recompute == "selective", together=_compiled_together(run, plan, mesh)
        )
    if memory.recompute != "none" and memory.recompute != "auto":
        applied["recompute"] = recompute.apply(parts, memory.recompute, memory.recompute_every, compiled=bool(memory.compile))
    if memory.activations == "cpu":
        applied["activations"] = activations.apply(parts, mesh.device)
    return applied


def _graphed(run: Run, plan: Plan, mesh: Mesh) -> bool:
    """Whether a micro-batch is replayed as CUDA graphs: by default on one GPU where blocks are so small that the host is slower than the device. With
    several ranks, gradients would all be sent at the end. A replay writes gradients where the last one did, so that a second micro-batch of the step
    would be added to itself."""
    if not accelerator.of(mesh.device).asynchronous or run.memory.cuda_graphs is False:
        return False
    if run.memory.cuda_graphs and plan.accumulation > 1:
        raise RunError(
            [
                f"memory.cuda_graphs = true needs steps of one micro-batch per rank, but the plan has {plan.accumulation} of {plan.micro_batch} "
                "sequences: lower train.batch, raise train.micro_batch, or remove memory.cuda_graphs."
            ]
        )
    if run.memory.cuda_graphs:
        return True
    plain = plan.compute != "fp8" and run.lora.rank is None and run.train.objective == "next-token" and plan.accumulation == 1
    return bool(run.memory.compile) and mesh.ranks == 1 and plain and _compiled_together(run, plan, mesh) > 1


def _compiled_together(run: Run, plan: Plan, mesh: Mesh) -> int:
    """How many blocks are compiled as one function: on GPUs as many as the device computes on for some milliseconds, which is more than one
    where blocks are small, if nothing is done to single blocks (sharding, recomputation) and all are alike."""
    spec, memory, layout = run.model, run.memory, plan.layout
    alike = spec.is_builtin and spec.moe is None and spec.mtp_depth == 0 and len(set(spec.windows)) == 1
    single = memory.recomputes or memory.activations == "cpu" or layout.pipeline > 1 or (layout.zero == 3 and layout.shard > 1)
    if not alike or single or not accelerator.of(mesh.device).asynchronous:
        return 1
    tokens = plan.micro_batch * run.train.sequence_length // layout.context
    flops = spec.flops_per_token(run.train.sequence_length) / spec.layers * tokens / layout.tensor
    counts = [count for count in range(1, _MOST_TOGETHER + 1) if spec.layers % count == 0]
    return next((count for count in counts if count * flops >= _ENOUGH_FLOPS), counts[-1])


def residual_dtype(run: Run, plan: Plan, mesh: Mesh) -> torch.dtype:
    """On GPUs bf16 where the blocks compute in it: half the memory and traffic. fp16 has too small a range for sums over all blocks. A
    custom module may rely on fp32."""
    low = accelerator.of(mesh.device).asynchronous and plan.compute in ("bf16", "fp8") and run.model.module is None
    return torch.bfloat16 if low else torch.float32


def _has_masters(run: Run, plan: Plan, mesh: Mesh) -> bool:
    """Whether ZeRO-0 keeps weights in 16 bits next to fp32 masters: on GPUs, which would convert them in every forward. On CPUs additions
    keep one order for any number of ranks instead; with offloading, the masters are elsewhere; a custom module may rely on fp32."""
    on_gpu = accelerator.of(mesh.device).asynchronous
    return on_gpu and plan.compute != "fp32" and not run.memory.offloads and run.model.module is None


def _engine(parts: list[nn.Module], shards: dict[str, ParamShard], run: Run, plan: Plan, mesh: Mesh, recipe: Recipe) -> Engine:
    """Allocate the parameters and choose who sums gradients and owns what the optimizer updates."""
    sharding = Sharding(
        zero=plan.layout.zero if plan.layout.shard > 1 else 0,
        axes=("data", "shard", "context") if run.optimizer.sync_every == 1 else ("shard", "context"),
        compute=plan.compute,
        reduce_dtype=torch.bfloat16 if run.precision.reduce == "bf16" else torch.float32,
        masters=_has_masters(run, plan, mesh),
        residual=residual_dtype(run, plan, mesh),
        keep_gathered=recipe.schedule is not None and recipe.schedule.splits_backward,
        fp8_gather=run.precision.fp8_gather,
        bucket_bytes=None if run.memory.bucket_size is None else run.memory.bucket_size << 20,
    )
    if sharding.zero == 3:
        from phalanx.parallel import fsdp  # FSDP2 takes a second of processor time to import

        return fsdp.FullySharded(parts, shards, mesh, recipe, sharding)
    return data_parallel.build(parts, shards, mesh, recipe, sharding)
