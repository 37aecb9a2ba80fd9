"""How planning a save, committing it and planning a load grow with the number of ranks, next to DCP's central planning.

    python benchmarks/checkpoint_planning.py [--ranks 8 64 512 2048 4096 16384] [--central 2048] [--models dense experts] [--folder DIR]

No rank is started. `dry_build_tensors` predicts what each rank holds; then the headers and checksums of all ranks are really written,
into files of the real length without values, so that rank 0 can commit them and any rank can find its slices in them. A sample of ranks
is timed. For comparison, DCP's rank 0 plans for all ranks, on plans of the same tensors.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.format import BLOCK
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.state_tensor import StateTensor, WrittenBox, written_boxes
from phalanx.optim.optimizer import replica_group, state_tensor
from phalanx.parallel.buckets import own_shard
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ParamShard
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Place
from phalanx.spec.run import Run
from phalanx.training.build import dry_build, dry_build_tensors

Result = TypeVar("Result")

SAMPLE = 8
RUN = """
[model]
{model}
[data]
source = "memory"
documents = ["a"]
[train]
batch = 16384
micro_batch = 1
sequence_length = 8192
steps = 1
"""
MODELS = {
    # Llama 3.1 405B's shape, and one of DeepSeek-V3's kind.
    "dense": "dim = 16384\nlayers = 126\nheads = 128\nkv_heads = 8\nffn = 53248\nvocab = 128256\ntied = false",
    "experts": "dim = 7168\nlayers = 61\nheads = 128\nffn = 18432\nvocab = 129280\ntied = false\n[model.moe]\nexperts = 256\nactive = 8\n"
    "ffn = 2048\ndense_layers = 3\nshared = 1",
}
LAYOUTS = {
    "dense": {
        8: Layout(data=1, tensor=8),
        64: Layout(data=1, shard=8, tensor=8, zero=3),
        512: Layout(data=1, pipeline=8, shard=8, tensor=8, zero=1),
        2048: Layout(data=1, pipeline=16, shard=16, tensor=8, zero=1),
        4096: Layout(data=1, pipeline=16, shard=32, tensor=8, zero=1),
        16384: Layout(data=1, pipeline=16, shard=128, tensor=8, zero=1),
    },
    "experts": {
        8: Layout(data=1, shard=8, expert=8, zero=1),
        64: Layout(data=1, shard=64, expert=32, zero=1),
        512: Layout(data=1, pipeline=8, shard=64, expert=32, zero=1),
        2048: Layout(data=2, pipeline=16, shard=64, expert=32, zero=1),
        4096: Layout(data=4, pipeline=16, shard=64, expert=32, zero=1),
        16384: Layout(data=16, pipeline=16, shard=64, expert=32, zero=1),
    },
}


@dataclass(frozen=True)
class State:
    """The state of one stage before sharding: where its parameters are, and the formats of their states."""

    spots: dict[str, ParamShard]
    tensors: dict[str, tuple[torch.dtype, str | None]]
    """Format, and the parameter that a state belongs to; None for a single number."""


class Everyone:
    """The state tensors of all ranks. Ranks with the same coordinates in a stage differ only in their shard of the state."""

    def __init__(self, run: Run, layout: Layout):
        self.run, self.layout = run, layout
        self._states: dict[tuple[int, ...], State] = {}

    def pieces(self, rank: int) -> dict[str, StateTensor]:
        mesh = Mesh(Place(rank=rank, ranks=self.layout.ranks), torch.device("meta"), self.layout)
        state, found = self._state(mesh), {}
        own = {name: self._own(spot, mesh) for name, spot in state.spots.items()}
        for name, (dtype, beside) in state.tensors.items():
            if beside is None:
                found[name] = StateTensor.full(torch.empty((), dtype=dtype, device="meta"), replica_group(mesh))
            else:
                found[name] = state_tensor(torch.empty(own[beside].slice.shape, dtype=dtype, device="meta"), own[beside], mesh)
        return found

    def _own(self, spot: ParamShard, mesh: Mesh) -> ParamShard:
        axis = "expert_shard" if spot.expert else "shard"
        return own_shard(spot, mesh.coordinate(axis), mesh.size(axis))[0] if self.layout.shard > 1 else spot

    def _state(self, mesh: Mesh) -> State:
        axes = ("pipeline", "tensor", "expert", "expert_tensor")
        places = tuple(mesh.coordinate(axis) for axis in axes)
        if places not in self._states:
            unshared = self.layout.expert * self.layout.expert_tensor // self.layout.tensor or 1
            small = replace(self.layout, data=unshared, shard=1, context=1)
            each = small.ranks // small.pipeline
            alike = Mesh(Place(rank=0, ranks=small.ranks), torch.device("meta"), small)
            here = (replace(alike, place=Place(rank=places[0] * each + n, ranks=small.ranks)) for n in range(each))
            rank = next(one.rank for one in here if tuple(one.coordinate(axis) for axis in axes) == places)
            with dry_build(self.run, small, rank) as built:
                spots = {one.name: one.shard for one in built.sharded.owned}
                tensors = {
                    n: (p.tensor.dtype, _parameter(n, spots) if p.slice.shape else None) for n, p in built.tensors().items()
                }
            self._states[places] = State(spots, tensors)
        return self._states[places]


def _parameter(name: str, spots: dict[str, ParamShard]) -> str:
    bare = name.partition("/")[2]
    return bare if bare in spots else bare.rpartition("/")[0]


@dataclass(frozen=True)
class Planned:
    """All that a rank computes for its save before it writes values."""

    boxes: list[WrittenBox]
    header: bytes


def plan(state: dict[str, StateTensor]) -> Planned:
    """Plans a save, up to the first byte that is written."""
    boxes = written_boxes(state)
    return Planned(boxes, format.encode_header([box.saved for box in boxes]))


@dataclass(frozen=True)
class Took(Generic[Result]):
    """A result and its time. On a shared machine, use the CPU time."""

    result: Result
    seconds: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.seconds:.4g} s, {self.cpu:.4g} s of CPU"


def timed(function: Callable[..., Result], *args: Any) -> Took[Result]:
    started, used = time.perf_counter(), time.process_time()
    found = function(*args)
    return Took(found, time.perf_counter() - started, time.process_time() - used)


def most(took: list[Took[Any]]) -> Took[Any]:
    return max(took, key=lambda one: one.cpu)


def sample(ranks: int) -> list[int]:
    dice = random.Random(ranks)
    fixed = {0, ranks - 1, ranks // 2}
    return sorted(fixed | set(dice.sample(range(ranks), min(SAMPLE, ranks) - len(fixed) + 1)))


def write_all(everyone: Everyone, folder: Path) -> None:
    """Write every rank's file with its header and without values, and its sidecar."""
    zeros, ranks = bytes(BLOCK), everyone.layout.ranks

    def write(rank_file: format.RankFile, header: bytes, size: int) -> None:
        with (folder / rank_file.name).open("wb") as sink:
            sink.write(header)
            sink.truncate(size)
        sums = [1 << 31] * max(1, -(-size // BLOCK))  # only the first is real: the others are not read
        sums[0] = zlib.crc32(memoryview(zeros)[: min(BLOCK, size) - len(header)], zlib.crc32(header))
        (folder / format.sidecar_name(rank_file.name)).write_bytes(rank_file.sidecar(sums).to_json())

    each = ranks // everyone.layout.pipeline
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for rank in range(ranks):
            state = everyone.pieces(rank)
            names = {name: tensor.whole_bytes for name, tensor in state.items()} if rank % each == 0 else None
            planned = plan(state)
            rank_file = format.RankFile(rank, ranks, [box.saved for box in planned.boxes], rank // each, names)
            size = len(planned.header) + sum(box.bytes for box in planned.boxes)
            pool.submit(write, rank_file, planned.header, size)


def find(folder: Path, state: dict[str, StateTensor]) -> int:
    """Plans a load: finds which bytes of which files a rank needs. Returns the number of files."""
    reader = CheckpointReader(folder, state)
    files = {
        read.file for name, tensor in state.items() if not tensor.slice.empty for read in reader._reads(name, tensor.slice)
    }
    reader.close()
    return len(files)


def central(everyone: Everyone, ranks: int) -> tuple[Took[Any], int]:
    """Times DCP's coordinator planning for all ranks; also returns the bytes sent to it and back."""
    plans = []
    for rank in range(ranks):
        held_here = sorted(everyone.pieces(rank).items())
        items = [_write_item(name, tensor) for name, tensor in held_here if not tensor.slice.empty]
        plans.append(SavePlan(items, planner_data={}))
    size = sum(len(pickle.dumps(plans[rank])) for rank in sample(ranks)) * ranks // len(sample(ranks))
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({}, None, True)
    return timed(planner.create_global_plan, plans), 2 * size


def _write_item(name: str, state: StateTensor) -> WriteItem:
    offset = torch.Size(state.slice.offset)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(state.slice.shape)),
        properties=TensorProperties(dtype=state.tensor.dtype),
        size=torch.Size(state.slice.whole),
    )
    return WriteItem(index=MetadataIndex(name, offset), type=WriteItemType.SHARD, tensor_data=data)


def measure(model: str, ranks: int, most_central: int, folder: Path) -> Iterator[tuple[str, Any]]:
    run, layout = loads(RUN.format(model=MODELS[model])), LAYOUTS[model][ranks]
    everyone, chosen = Everyone(run, layout), sample(ranks)
    dry_build_tensors(run, Layout(), 0)  # the first call also imports modules
    foresight = [timed(dry_build_tensors, run, layout, rank) for rank in chosen]
    yield "predicting the state of a rank, most", most(foresight)
    for rank, took in zip(chosen, foresight, strict=True):
        assert _boxes(took.result) == _boxes(everyone.pieces(rank)), f"rank {rank} of {layout} is not what was derived"
    plan(foresight[0].result)
    plans = [timed(plan, took.result) for took in foresight]
    yield "boxes that a rank writes, most", max(len(took.result.boxes) for took in plans)
    yield "plan of a rank, most", most(plans)
    yield "plan of a rank, median of CPU", f"{median(took.cpu for took in plans):.4g} s"
    partial = folder / "step-00000001.partial"
    partial.mkdir()
    write_all(everyone, partial)
    yield "sidecars, MB", sum(file.stat().st_size for file in partial.glob("*.json")) / 1e6
    committed = timed(directory.commit, partial, 1, format.RunMetadata(run=RUN), ranks)
    yield "commit on rank 0", committed
    final = Path(str(committed.result))
    yield "marker, MB", (final / directory.MARKER).stat().st_size / 1e6
    yield "marker read", timed(directory.read_marker, final)
    same = [timed(find, final, took.result) for took in foresight[:3]]
    yield "load planned on the same layout, most", most(same)
    yield "files needed", max(took.result for took in same)
    other = timed(find, final, dry_build_tensors(run, Layout(data=1, shard=64, zero=3), 7))
    yield "load planned on 64 ranks with ZeRO-3", other
    yield "files needed there", other.result
    if ranks <= most_central:
        took, size = central(everyone, ranks)
        yield "DCP's central plan", took
        yield "sent for it, MB", size / 1e6


def _boxes(pieces: dict[str, StateTensor]) -> dict[str, Any]:
    return {name: (one.tensor.dtype, one.slice, one.replicas) for name, one in pieces.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 2048, 4096, 16384])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--central", type=int, default=2048, help="ranks up to which DCP's central planning is measured")
    parser.add_argument("--folder", type=Path, help="a folder on a file system with room for 32,768 small files")
    chosen = parser.parse_args()
    for model in chosen.models:
        for ranks in chosen.ranks:
            with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
                print(f"{model}, {ranks} ranks", flush=True)
                for what, value in measure(model, ranks, chosen.central, Path(folder)):
                    print(f"  {what}: {value:.4g}" if isinstance(value, float) else f"  {what}: {value}", flush=True)


if __name__ == "__main__":
    main()
