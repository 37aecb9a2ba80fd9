"""Replicas that meet every few steps: against a plain simulation of all of them in one process, with torch's own outer SGD."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import saved
from optim.holding import ADAMW, NO, everything, give_gradients, holding, values
from ranks import copied, differing, run_ranks
from torch import Tensor, nn

from phalanx.checkpointing.restore import load
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.optim.diloco import OuterOptimizer
from phalanx.optim.optimizer import Optimizer, Resources
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, extract
from phalanx.spec.layout import Layout
from phalanx.spec.run import Memory
from phalanx.spec.run import Optimizer as OptimizerSpec

LOCAL = replace(ADAMW, sync_every=3, outer_learning_rate=0.7, outer_momentum=0.9)
NVME = Memory(offload="nvme", offload_buffer=1)


def boxes(mesh: Mesh) -> list[OwnedParam]:
    """Each shard's rows of everything."""
    found = []
    for one in holding():
        spot = one.shard.cut(0, mesh.coordinate("shard"), mesh.size("shard"), "shard") if mesh.size("shard") > 1 else one.shard
        found.append(OwnedParam(one.name, nn.Parameter(extract(spot.slice, one.value.detach()).clone()), spot))
    return found


class Replica:
    """One rank's inner and outer optimizer, and how training drives them."""

    def __init__(self, mesh: Mesh, spec: OptimizerSpec, folder: Path | None = None):
        self.mesh, self.done = mesh, 0
        self.owned = boxes(mesh)
        memory = NVME if folder else Memory()
        self.inner = Optimizer(self.owned, spec, memory=memory, mesh=mesh, resources=Resources(folder))
        self.outer = OuterOptimizer(self.owned, spec, mesh)

    def steps(self, count: int) -> None:
        for _ in range(count):
            give_gradients(self.owned, gradient_of(self.done, self.mesh.coordinate("data")))
            self.inner.step(0.01, torch.tensor(1.0), NO)
            self.done += 1
            if self.outer.due(self.done):
                self.outer.step()
                self.inner.adopt()

    def pieces(self) -> dict[str, StateTensor]:
        spots = {one.name: one.shard for one in self.owned}
        inner = self.inner.state().items()
        return self.outer.tensors() | {
            f"optimizer/{name}": self.outer.replica_state(state, spots[name.rpartition("/")[0]]) for name, state in inner
        }


def gradient_of(step: int, replica: int) -> int:
    return step * 10 + replica


def run_replica(mesh: Mesh, spec: OptimizerSpec, steps: int) -> dict[str, Tensor]:
    replica = Replica(mesh, spec)
    replica.steps(steps)
    return everything(replica.owned, replica.inner.state())


def simulated(spec: OptimizerSpec, replicas: int, steps: int) -> list[dict[str, Tensor]]:
    """All replicas in one process, one after the other."""
    all_held = [holding() for _ in range(replicas)]
    inner = [Optimizer(held, spec) for held in all_held]
    anchors = [one.value for one in holding()]
    outer = torch.optim.SGD(
        anchors, lr=spec.outer_learning_rate, momentum=spec.outer_momentum, nesterov=spec.outer_momentum > 0
    )
    for step in range(steps):
        for number, (held, optimizer) in enumerate(zip(all_held, inner, strict=True)):
            give_gradients(held, gradient_of(step, number))
            optimizer.step(0.01, torch.tensor(1.0), NO)
        if (step + 1) % spec.sync_every == 0:
            for index, anchor in enumerate(anchors):
                mean = torch.stack([held[index].value.detach() for held in all_held]).mean(0)
                anchor.grad = anchor.detach() - mean
            outer.step()
            with torch.no_grad():
                for held in all_held:
                    for one, anchor in zip(held, anchors, strict=True):
                        one.value.copy_(anchor)
    return [everything(held, optimizer.state()) for held, optimizer in zip(all_held, inner, strict=True)]


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=3), Layout(data=2, shard=2)], ids=["2", "3", "2x2"])
def test_diloco_equals_a_simulation_of_its_replicas(layout: Layout) -> None:
    spec = LOCAL
    expected = simulated(spec, layout.data or 1, 7)  # two meetings, and a step after
    assert differing(expected[0], expected[1])  # between meetings each is somewhere else
    spots = {(shard, one.name): one.shard for shard in range(layout.shard) for one in _boxes_of(layout, shard)}
    for rank, found in enumerate(run_ranks(run_replica, layout.ranks, spec, 7, layout=layout)):
        replica, shard = divmod(rank, layout.shard)
        for name, tensor in found.items():
            whole = expected[replica][name]
            theirs = extract(spots[shard, name.partition("/")[0]].slice, whole) if whole.ndim else whole
            torch.testing.assert_close(tensor, theirs, atol=2e-6, rtol=1e-5)


def _boxes_of(layout: Layout, shard: int) -> list[OwnedParam]:
    return [replace(one, shard=one.shard.cut(0, shard, layout.shard, "shard")) for one in holding()]


def test_diloco_with_rate_one_and_no_momentum_averages_replicas() -> None:
    spec = replace(LOCAL, outer_learning_rate=1.0, outer_momentum=0.0)
    apart = run_ranks(run_replica, 2, replace(spec, sync_every=100), 3, layout=Layout(data=2))
    met = run_ranks(run_replica, 2, spec, 3, layout=Layout(data=2))
    for name in values(holding()):
        torch.testing.assert_close(met[0][name], (apart[0][name] + apart[1][name]) / 2, atol=1e-6, rtol=1e-6)
        assert torch.equal(met[0][name], met[1][name])
        assert not torch.equal(apart[0][name], apart[1][name])
        # What an optimizer remembers stays with its replica.
        assert torch.equal(met[1][f"{name}/exp_avg"], apart[1][f"{name}/exp_avg"])


def interrupted(mesh: Mesh, folder: Path, offloaded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Saved in the middle of a round and gone on with by another; and never stopped."""
    place = folder / "offload" if offloaded else None
    first = Replica(mesh, LOCAL, place)
    first.steps(4)
    path = saved(folder, 4, first.pieces(), {}, mesh)
    first.inner.close()
    second = Replica(mesh, LOCAL, place)
    load(path, second.pieces())
    second.inner.adopt()
    second.done = 4
    second.steps(4)
    resumed = copied(second.pieces())
    second.inner.close()
    never_stopped = Replica(mesh, LOCAL)
    never_stopped.steps(8)
    return resumed, copied(never_stopped.pieces())


@pytest.mark.parametrize("offloaded", [False, True], ids=["here", "nvme"])
def test_diloco_resumes_every_replica_exactly_between_synchronizations(tmp_path: Path, offloaded: bool) -> None:
    results = run_ranks(interrupted, 2, tmp_path, offloaded, layout=Layout(data=2))
    for resumed, never_stopped in results:
        assert differing(resumed, never_stopped) == []
    assert differing(results[0][0], results[1][0])  # replicas have states of their own


def start_elsewhere(mesh: Mesh) -> bool:
    replica = Replica(mesh, LOCAL)
    for name, piece in replica.outer.tensors().items():
        if name.startswith("model/"):
            assert isinstance(piece.tensor, Tensor)
            piece.tensor.fill_(0.5)
    replica.outer.adopt()
    return all((one.value == 0.5).all().item() for one in replica.owned)


def test_diloco_replicas_start_from_loaded_anchors() -> None:
    assert run_ranks(start_elsewhere, 2, layout=Layout(data=2)) == [True, True]


def test_diloco_synchronizes_every_n_steps() -> None:
    (due,) = run_ranks(_due, 1, layout=Layout(data=1))
    assert due == [3, 6, 9]


def _due(mesh: Mesh) -> list[int]:
    outer = OuterOptimizer(boxes(mesh), LOCAL, mesh)
    assert "1 replicas synchronize every 3 steps" in outer.applied
    return [step for step in range(1, 11) if outer.due(step)]
