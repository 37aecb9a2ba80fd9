"""Places a model on the ranks: every technique of the layout, in the one order in which they compose. Called by training.

A model comes here without memory. What cuts parameters comes first, what wraps modules next, and only then does each rank get
the memory of its own part. Nothing falls back: what a layout cannot have is refused when the run file is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from phalanx.parallel import expert, fsdp, tensor, vocab_parallel, zero
from phalanx.parallel.context import context_parallel
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import OwnedParam, ParamShard
from phalanx.parallel.pipeline.executor import tied_group
from phalanx.parallel.replicate import Replicated
from phalanx.parallel.sharded_model import Engine, Loss, ShardedModel
from phalanx.parallel.sharding import Sharding
from phalanx.schedules.actions import Schedule
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.transforms import activations, compile, fp8, recompute


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the model's own room knows about it."""

    axes: Mapping[str, tuple[str, ...]]
    """Parameter-name pattern to the names of its dimensions."""
    fill: Callable[[str, Tensor, ParamShard], None]
    """Writes the initial values of a parameter's box into a tensor."""
    reset_buffers: Callable[[nn.Module], None]
    loss: Loss
    """Sum of the losses from whole logits."""
    schedule: Schedule | None = None
    """Of a pipeline."""
    tied: str | None = None
    """The parameter that first and last stage both hold, where the embedding is the head too."""


def apply(parts: list[nn.Module], run: Run, plan: Plan, mesh: Mesh, recipe: Recipe) -> ShardedModel:
    """Make `parts`, this rank's stages of the model, one rank's share of the job."""
    layout = plan.layout
    applied: dict[str, str | None] = {}
    spots = {name: ParamShard.full(parameter) for part in parts for name, parameter in part.named_parameters()}
    if layout.tensor > 1:
        spots = tensor.split(parts, spots, recipe.axes, mesh, sequence=layout.sequence)
        applied["tensor"] = tensor.applied(parts, spots)
    spots = expert.split(parts, spots, recipe.axes, mesh)
    applied["expert"] = expert.applied(parts, spots, recipe.axes)
    if layout.context > 1:
        applied["context"] = context_parallel.swap(parts, mesh, layout.context_method)
    columns = mesh.group("tensor", use="tensor") if layout.tensor > 1 else None
    loss = vocab_parallel.swap(parts, columns, chunk=run.memory.loss_chunk, sequence=layout.sequence, loss=recipe.loss)
    applied["loss"] = vocab_parallel.applied(parts, loss)
    applied |= transform(parts, run, plan, mesh)
    engine = _engine(parts, _mirrored(parts, spots, recipe.tied), run, plan, mesh, recipe)
    applied["data"] = engine.applied()
    placed = ShardedModel(parts, mesh, engine, loss, is_local_sgd=run.optimizer.sync_every > 1)
    if recipe.schedule is not None:
        whole = recipe.schedule.splits_backward and run.memory.recompute == "selective"
        said = "; backwards are whole, as selective recomputation keeps its results for one" if whole else ""
        applied["pipeline"] = _stages(parts, mesh, recipe.schedule) + said
        if recipe.tied is not None and (ends := tied_group(mesh, recipe.schedule)) is not None:
            placed.tied[recipe.tied] = ends
    placed.applied = {technique: words for technique, words in applied.items() if words is not None}
    return placed


def transform(parts: list[nn.Module], run: Run, plan: Plan, mesh: Mesh) -> dict[str, str | None]:
    """What makes one device's part cheaper; the last wraps the others."""
    memory = run.memory
    applied: dict[str, str | None] = {}
    if plan.compute == "fp8":
        if reason := fp8.available(mesh.device):
            raise RunError([f'precision.compute = "fp8" cannot be had: {reason}; set precision.compute = "bf16".'])
        applied["fp8"] = fp8.apply(parts, run.precision.fp8_scaling, mesh.device)
    if memory.compile:
        applied["compile"] = compile.apply(parts)
    if memory.recompute != "none" and memory.recompute != "auto":
        applied["recompute"] = recompute.apply(parts, memory.recompute, memory.recompute_every)
    if memory.activations == "cpu":
        applied["activations"] = activations.apply(parts, mesh.device)
    return applied


def _engine(parts: list[nn.Module], spots: dict[str, ParamShard], run: Run, plan: Plan, mesh: Mesh, recipe: Recipe) -> Engine:
    """Who sums gradients and owns what the optimizer changes; parameters get their memory here."""
    axes, wire = sample_axes(run), torch.bfloat16 if run.precision.reduce == "bf16" else torch.float32
    if plan.layout.shard == 1:
        return Replicated(materialize(parts, spots, recipe, mesh.device), mesh, axes, wire=wire)
    splits = recipe.schedule is not None and recipe.schedule.splits_backward
    how = Sharding(zero=plan.layout.zero, axes=axes, compute=plan.compute, wire=wire, keep=splits)
    if plan.layout.zero == 3:
        return fsdp.FullySharded(parts, spots, mesh, recipe, how)
    return zero.shard(parts, spots, mesh, recipe, how)


def materialize(parts: list[nn.Module], spots: dict[str, ParamShard], recipe: Recipe, device: torch.device) -> list[OwnedParam]:
    """Give cut parameters their memory and their initial values; the optimizer is to work on them as they are."""
    held = {}
    for part in parts:
        part.to_empty(device=device)
        recipe.reset_buffers(part)
    for part in parts:  # only now: stages may share a module
        for name, parameter in part.named_parameters():
            if name not in held:
                recipe.fill(name, parameter.data, spots[name])
                held[name] = OwnedParam(name, parameter, spots[name])
    return list(held.values())


def sample_axes(run: Run) -> tuple[str, ...]:
    """Mesh axes whose ranks see other samples, or other parts of them, and sum their gradients in every step."""
    return ("data", "shard", "context") if run.optimizer.sync_every == 1 else ("shard", "context")


def _mirrored(parts: list[nn.Module], spots: dict[str, ParamShard], tied: str | None) -> dict[str, ParamShard]:
    """The last stage's copy of a tied embedding mirrors the first's, and is not counted again."""
    if tied not in spots or any(getattr(part, "begins", True) for part in parts):
        return spots
    return spots | {tied: replace(spots[tied], counted=False)}


def _stages(parts: list[nn.Module], mesh: Mesh, schedule: Schedule) -> str:
    """Which blocks this rank has, by the parts themselves."""
    held = ["+".join(part.get_submodule("blocks")._modules) for part in parts]
    numbers = schedule.stages_of(mesh.coordinate("pipeline"))
    stages = ", ".join(f"stage {number}: blocks {blocks}" for number, blocks in zip(numbers, held, strict=True))
    return f"{schedule.name}, {schedule.stages} stages on {schedule.ranks} ranks; {stages}"
