"""What any rank of any layout would save, found out on one machine: the rank's own program is run, on tensors without memory and
among ranks that are not there. Resharding, and forecasts of what a layout would hold, ask it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Memory, Run
from phalanx.spec.tensor_slice import chunk
from phalanx.training.build import TrainState, build

_generations = count(1)  # torch remembers meshes by their names: no two of this process may have the same


def held(run: Run, layout: Layout, rank: int) -> dict[str, StateTensor]:
    """The pieces that this rank would save, on torch's meta device: name, dtype, box and who else holds it, but no values.

    Takes no memory worth mentioning and no other process; not for a process that is itself a rank of a job. Raises RunError where
    the model cannot be laid out so.
    """
    with foreseen(run, layout, rank) as built:
        return built.tensors()


@contextmanager
def foreseen(run: Run, layout: Layout, rank: int) -> Iterator[TrainState]:
    """What the rank trains with, without memory, while its groups of ranks that are not there last."""
    layout = replace(layout, data=layout.data or 1)
    if layout.stage_split == "measured" and layout.pipeline > 1:
        raise RunError(
            [
                'layout.stage_split = "measured" cuts stages by what they take on the devices of a job, so it cannot be foreseen: take "counted".'
            ]
        )
    assert 0 <= rank < layout.ranks, f"rank {rank} of {layout.ranks}"
    # Where states lie, and how activations are saved, changes no box of any tensor.
    run = replace(run, layout=layout, memory=Memory())
    mesh = Mesh(generation(rank, layout.ranks), torch.device("meta"), layout)
    with absent_ranks(mesh), lazy_cuts():
        yield build(run, _plan(run), mesh)


def generation(rank: int, ranks: int) -> Place:
    """A rank of a job that is not there."""
    return Place(rank=rank, ranks=ranks, generation=-next(_generations))


def _plan(run: Run) -> Plan:
    """As far as it decides what a rank holds. Stages lie on the ranks the same way however many micro-batches pass them."""
    compute = run.precision.compute or "fp32"
    return Plan(
        layout=run.layout,
        device="cpu",
        threads=1,
        micro_batch=1,
        accumulation=1,
        compute="bf16" if compute == "fp8" else compute,  # its weights are kept in bf16
        parameters=0,
        flops_per_token=0.0,
        peak_flops=None,
    )


@contextmanager
def absent_ranks(mesh: Mesh) -> Iterator[None]:
    """Groups can be made, and what is sent to them goes nowhere."""
    if mesh.ranks == 1:
        yield
        return
    assert not dist.is_initialized(), "this process is a rank of a job already, and can be no other"
    dist.init_process_group("fake", store=FakeStore(), rank=mesh.rank, world_size=mesh.ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def lazy_cuts() -> Iterator[None]:
    """FSDP2 cuts each parameter for all ranks, in order to look at the first part and its own: with thousands of ranks that takes
    ten seconds and more, so parts are cut when they are looked at."""
    cut = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = _Cuts  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = cut


@dataclass(frozen=True, slots=True)
class _Cuts:
    """A tensor in parts, as torch.chunk cuts it; the last ones may be empty."""

    tensor: Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, index: int) -> Tensor:
        return self.tensor.narrow(self.dim, *chunk(self.tensor.shape[self.dim], index, self.num_chunks))
