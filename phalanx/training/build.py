"""Builds what a rank trains: its part of the model, the optimizer, and the names of their tensors in a checkpoint.
The trainer builds on a device; `dry_build` builds any rank of any layout on one machine, on tensors without memory, to find out what it would
save and hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.events.records import ModelPlaced
from phalanx.models import hf_module, init, sdpa_seam, stages
from phalanx.models.custom import axes_of, cuts_of, rewritten_of
from phalanx.models.moe import router_sizes
from phalanx.observe.comm_timer import replaced
from phalanx.optim.diloco import OuterOptimizer
from phalanx.optim.optimizer import REAL, Optimizer, Resources, replica_group, state_tensor
from phalanx.parallel.apply import apply
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.executor import Pipeline, measure_costs
from phalanx.parallel.sharded_model import ParamShard, Recipe, ShardedModel
from phalanx.schedules.actions import Schedule
from phalanx.schedules.makers import schedule_for
from phalanx.schedules.stage_split import Costs, cut, flop_costs
from phalanx.spec.cut_plan import CutPlan
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Memory, Run
from phalanx.spec.tensor_slice import chunk
from phalanx.tracing.refusals import differing_values, values_read
from phalanx.training.micro_batch import summed_loss
from phalanx.transforms.precision import computing

_generations = count(1)  # torch caches meshes by name, so every dry build in a process needs a new one


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything of one rank that training changes, and what describes it."""

    sharded: ShardedModel
    optimizer: Optimizer
    outer: OuterOptimizer | None
    """The outer optimizer of local SGD, which runs between replicas."""
    schedule: Schedule | None
    """None without a pipeline."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the whole model's tensors, by name."""
    experts: dict[str, int]
    """Number of experts of each router of the whole model, by the router's name."""
    reference: ShardedModel | None = None
    """DPO without adapters: the model that training starts from, which stays as it is."""

    def tensors(self) -> dict[str, StateTensor]:
        """This rank's part of the live state: parameters and persistent buffers as model/NAME, states as optimizer/NAME/STATE. With LoRA,
        without what is frozen."""
        params, mesh, outer = {param.name: param for param in self.sharded.trained}, self.sharded.mesh, self.outer
        tensors = {f"model/{name}": state_tensor(param.value.detach(), param.shard, mesh) for name, param in params.items()}
        if self.sharded.adapters is None:
            tensors |= self._buffers(self.sharded)
        for name, state in self.optimizer.state().items():
            shard = params[name.rpartition("/")[0]].shard
            tensors[f"optimizer/{name}"] = (
                state_tensor(state, shard, mesh) if outer is None else outer.replica_state(state, shard)
            )
        return tensors | (outer.tensors() if outer is not None else {})

    def frozen(self) -> dict[str, StateTensor]:
        """This rank's part of what is never trained, which `model.from` or the seed gives: the model below LoRA adapters, or the reference
        of DPO. Parameters and buffers as model/NAME; empty without either."""
        model = self.sharded if self.sharded.adapters is not None else self.reference
        if model is None:
            return {}
        params, mesh = [param for param in model.owned if param.shard.frozen], model.mesh
        states: dict[str, StateTensor] = {}
        for param in params:
            stored = model.quantized.get(param.name)
            states[f"model/{param.name}"] = (
                state_tensor(param.value.detach(), param.shard, mesh)
                if stored is None
                else StateTensor(stored, stored.slice, replica_group(mesh, param.shard.split, counted=param.shard.counted))
            )
        return states | self._buffers(model)

    def _buffers(self, model: ShardedModel) -> dict[str, StateTensor]:
        replicas = replica_group(model.mesh)
        return {
            f"model/{name}": replace(StateTensor.full(buffer, replicas), is_buffer=True)
            for part in model.parts
            for persistent in [part.state_dict().keys()]
            for name, buffer in part.named_buffers()
            if name in persistent
        }

    def placement(self) -> ModelPlaced:
        """What this rank holds, read from its tensors."""
        applied = self.sharded.applied | {"optimizer": self.optimizer.applied}
        sizes, states = self.sharded.engine.bytes(), self.optimizer.bytes()
        if self.outer is not None:
            applied["local steps"] = self.outer.applied
            states = states + self.outer.bytes()
        return ModelPlaced(
            rank=self.sharded.mesh.rank,
            applied=applied,
            parameters=sizes["parameters"],
            gradients=sizes["gradients"],
            optimizer=states.device + states.host,
            files=states.files,
        )

    def pipeline(self, run: Run, model: ShardedModel | None = None) -> Pipeline | None:
        """This rank's executor of the schedule; all ranks make theirs at the same time. `model`: other than the trained one."""
        if self.schedule is None:
            return None
        mesh, adapters = self.sharded.mesh, self.sharded.adapters
        # Of a forward and a recomputed one that take turns, each would find the masks of the other.
        draws_masks = adapters is not None and adapters.dropout is not None
        return Pipeline(
            (model or self.sharded).parts,
            self.schedule,
            mesh,
            halves=run.memory.recompute != "selective",
            overlaps=mesh.size("expert") * mesh.size("expert_tensor") > 1 and not draws_masks,
        )


def build(run: Run, plan: Plan, mesh: Mesh, resources: Resources = REAL, sampled: frozenset[int] | None = None) -> TrainState:
    """Builds a rank at step 0; all ranks call it together. `resources`: what the optimizer takes besides parameters. `sampled`: for a rehearsal,
    the only layers of a model that was not written for it; the others pass on what they are given."""
    model = init.build(run.model)
    if run.model.module is not None and mesh.device.type != "meta":
        refuse([f"{run.model.custom_key}: {problem}" for problem in differing_values(mesh.gather_objects(values_read(model)))])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    experts = router_sizes(model)
    order = schedule_for(plan.layout, plan.accumulation)
    how = recipe(model, run.train.seed, order)
    if plan.layout.tensor > 1 and not run.model.is_builtin:
        cuts = _shared_cuts(model, plan.layout, mesh)  # of the whole model
        how = replace(how, cuts=cuts, rewritten={} if cuts is None else rewritten_of(model, cuts))
    _open_seams(model, run, plan)
    parts = split_stages(model, run, plan, mesh, order, sampled)
    sharded = apply(parts, run, plan, mesh, how)
    optimizer = Optimizer(
        sharded.trained, run.optimizer, precision=run.precision, memory=run.memory, mesh=mesh, resources=resources
    )
    outer = OuterOptimizer(sharded.trained, run.optimizer, mesh) if run.optimizer.sync_every > 1 else None
    reference = None
    if run.train.objective == "dpo" and sharded.adapters is None:
        plain = replace(run, memory=replace(run.memory, compile=False, recompute="none", activations="device"))
        _open_seams(frozen := init.build(run.model), run, plan)
        parts = split_stages(frozen, run, plan, mesh, order)
        reference = apply(parts, plain, plan, mesh, how, frozen=True)
    return TrainState(sharded, optimizer, outer, order, shapes, experts, reference)


def _open_seams(model: nn.Module, run: Run, plan: Plan) -> None:
    """Give a model that was not written for it the attributes at which the built-in decoder's attention and head are replaced."""
    if plan.layout.context > 1 and run.model.module is not None:
        sdpa_seam.install(model)
    if run.model.config is not None and plan.layout.tensor == 1:
        hf_module.open_head(model)


def _shared_cuts(model: nn.Module, layout: Layout, mesh: Mesh) -> CutPlan | None:
    """How the tensor ranks divide a model that was not written for it. One rank finds it out for all, which takes seconds."""
    find, alone = partial(cuts_of, model, layout.tensor, layout.sequence), mesh.device.type == "meta"
    if mesh.rank == 0:
        return find() if alone else mesh.broadcast_object(find())
    plan: CutPlan | None = None if alone else mesh.broadcast_object(None)
    return plan or find()  # a dry build or a rehearsal has no other ranks


def recipe(model: nn.Module, seed: int, schedule: Schedule | None = None) -> Recipe:
    """What `parallel/apply`, which knows no model, needs of one: names of dimensions, initial values, the loss."""
    spec, initial = model.spec, init.ADAPTERS | dict(init.table(model))
    assert isinstance(spec, ModelSpec), "models.init.build sets the spec"

    @torch.no_grad()
    def fill(name: str, tensor: Tensor, shard: ParamShard) -> None:
        if not (tensor.is_meta or is_fake(tensor)):  # dry builds and rehearsals have no memory to fill
            init.fill(tensor, seed, name, spec, shard.slice, initial)

    return Recipe(
        axes=axes_of(model),
        fill=fill,
        reset_buffers=init.reset_buffers,
        loss=summed_loss,
        schedule=schedule,
        tied=_tied(model, spec) if schedule is not None else None,
    )


def _tied(model: nn.Module, spec: ModelSpec) -> str | None:
    """The parameter that the first and the last stage of a pipeline both read."""
    if not spec.is_builtin:
        return stages.use_of(model).tied
    return "embed.weight" if spec.tied else None


def split_stages(
    model: Any, run: Run, plan: Plan, mesh: Mesh, order: Schedule | None, sampled: frozenset[int] | None = None
) -> list[nn.Module]:
    """This rank's pipeline stages of a whole model; without a pipeline the model itself, or what a rehearsal samples of it."""
    if order is None:
        return [model if sampled is None else stages.part(model, 0, stages.use_of(model).count, sampled)]
    spec, length = run.model, run.train.sequence_length
    if not spec.is_builtin:
        blocks, last = stages.costs(model)
        costs = Costs(first=float(spec.dim), blocks=tuple(map(float, blocks)), last=float(last))
    else:
        costs = flop_costs(spec, length) if plan.layout.stage_split == "counted" else measured_costs(spec, length, plan, mesh)
    ranges = cut(costs.blocks, costs.first, costs.last, order.stages)
    part = model.part if spec.is_builtin else partial(stages.part, model, sampled=sampled)
    return [part(*ranges[stage]) for stage in order.stages_of(mesh.coordinate("pipeline"))]


def measured_costs(spec: ModelSpec, length: int, plan: Plan, mesh: Mesh) -> Costs:
    """Costs of blocks: rank 0 times a first, a middle and a last block of each kind at the run's sizes, for all ranks."""
    moe = spec.moe
    kinds = {"dense": replace(spec, layers=3, moe=None, mtp_depth=0)} if moe is None or spec.dense_layers else {}
    if moe is not None and spec.layers > spec.dense_layers:
        kinds["sparse"] = replace(spec, layers=3, moe=replace(moe, dense_layers=0), mtp_depth=0)
    forwards: dict[str, Callable[[], Tensor]] = {}
    if mesh.rank == 0:
        for kind, three_layers in kinds.items():
            small = init.materialize(init.build(three_layers), 0, mesh.device)
            forwards |= {f"{kind} {number}": _block_forward(small, number, length, plan, mesh) for number in range(3)}
    seconds = measure_costs(forwards, mesh)
    first_kind = "dense" if spec.dense_layers or moe is None else "sparse"
    last_kind = "dense" if spec.dense_layers == spec.layers or moe is None else "sparse"
    dense, sparse = seconds.get("dense 1", 0.0), seconds.get("sparse 1", 0.0)
    return Costs(
        first=max(0.0, seconds[f"{first_kind} 0"] - seconds[f"{first_kind} 1"]),
        blocks=(dense,) * spec.dense_layers + (sparse,) * (spec.layers - spec.dense_layers),
        last=max(0.0, seconds[f"{last_kind} 2"] - seconds[f"{last_kind} 1"]),
    )


def _block_forward(model: Any, number: int, length: int, plan: Plan, mesh: Mesh) -> Callable[[], Tensor]:
    """The forward of one block, with the embedding in front of the first and the head behind the last."""
    part, spec = model.part(number, number + 1), model.spec
    shape = (plan.micro_batch, length)
    tokens = torch.zeros(shape, dtype=torch.int64, device=mesh.device)
    positions = torch.arange(length, device=mesh.device).expand(shape)
    states = torch.randn(*shape, spec.dim, device=mesh.device, requires_grad=True)

    def forward() -> Tensor:
        with computing(plan.compute, mesh.device):
            output = part(states if number else tokens, positions, None)
        return summed_loss(output, tokens) if number == 2 else output

    return forward


def dry_build_tensors(run: Run, layout: Layout, rank: int) -> dict[str, StateTensor]:
    """What this rank would save, on torch's meta device: names, dtypes, slices and replicas, but no values.

    Needs almost no memory and no other process. Cannot run in a process that is itself a rank of a job. Raises RunError if the model
    does not fit the layout.
    """
    with dry_build(run, layout, rank) as state:
        return state.tensors()


@contextmanager
def dry_build(run: Run, layout: Layout, rank: int) -> Iterator[TrainState]:
    """The state of a rank, without memory, while its fake process group exists."""
    layout = replace(layout, data=layout.data or 1)
    if layout.stage_split == "measured" and layout.pipeline > 1:
        raise RunError(
            'layout.stage_split = "measured" splits stages by times measured on the devices of a job, so they cannot be computed '
            'without one: take "counted".'
        )
    assert 0 <= rank < layout.ranks, f"rank {rank} of {layout.ranks}"
    # Offloading and recomputation change no slice of any tensor.
    run = replace(run, layout=layout, memory=Memory())
    mesh = Mesh(absent_place(rank, layout.ranks), torch.device("meta"), layout)
    with fake_process_group(mesh), lazy_fsdp_chunks():
        yield build(run, _dry_plan(run), mesh)


def absent_place(rank: int, ranks: int) -> Place:
    """The place of a rank in a job that does not exist."""
    return Place(rank=rank, ranks=ranks, generation=-next(_generations))


def _dry_plan(run: Run) -> Plan:
    """A plan that is complete enough to decide what a rank holds. The number of micro-batches does not change the stages of a rank."""
    compute = run.precision.compute or "fp32"
    return Plan(
        layout=run.layout,
        device="cpu",
        threads=1,
        micro_batch=1,
        accumulation=1,
        compute="bf16" if compute == "fp8" else compute,  # fp8 runs keep their weights in bf16
        parameters=0,
        flops_per_token=0.0,
        peak_flops=None,
    )


@contextmanager
def fake_process_group(mesh: Mesh) -> Iterator[None]:
    """Groups can be created; messages to them go nowhere."""
    if mesh.ranks == 1:
        yield
        return
    assert not dist.is_initialized(), "this process is already a rank of a job"
    from torch.testing._internal.distributed.fake_pg import FakeStore  # seconds of imports, like FSDP2 below

    dist.init_process_group("fake", store=FakeStore(), rank=mesh.rank, world_size=mesh.ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def lazy_fsdp_chunks() -> AbstractContextManager[None]:
    """Makes FSDP2 compute chunks of parameters on demand. It needs only the first chunk and its own, but computes those of all ranks,
    which takes more than ten seconds with thousands of ranks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return replaced(_fsdp_param, "_chunk_with_empty", _LazyChunks)


@dataclass(frozen=True, slots=True)
class _LazyChunks:
    """The chunks of a tensor as torch.chunk computes them; the last ones may be empty."""

    tensor: Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, index: int) -> Tensor:
        return self.tensor.narrow(self.dim, *chunk(self.tensor.shape[self.dim], index, self.num_chunks))
