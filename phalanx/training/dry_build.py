"""Builds any rank of any layout on one machine, on tensors without memory and with a fake process group. Resharding and memory
forecasts use it to find out what a rank would save and hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Memory, Run
from phalanx.spec.tensor_slice import chunk
from phalanx.training.build import TrainState, build

_generations = count(1)  # torch caches meshes by name, so every dry build in a process needs a new one


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
        yield build(run, _plan(run), mesh)


def absent_place(rank: int, ranks: int) -> Place:
    """The place of a rank in a job that does not exist."""
    return Place(rank=rank, ranks=ranks, generation=-next(_generations))


def _plan(run: Run) -> Plan:
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


@contextmanager
def lazy_fsdp_chunks() -> Iterator[None]:
    """Makes FSDP2 compute chunks of parameters on demand. It needs only the first chunk and its own, but computes those of all ranks,
    which takes more than ten seconds with thousands of ranks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    original = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = _LazyChunks  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = original


@dataclass(frozen=True, slots=True)
class _LazyChunks:
    """The chunks of a tensor as torch.chunk computes them; the last ones may be empty."""

    tensor: Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, index: int) -> Tensor:
        return self.tensor.narrow(self.dim, *chunk(self.tensor.shape[self.dim], index, self.num_chunks))
