"""What a step sends and how much lives while it runs, counted against numbers known beforehand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from phalanx.observe.counters import MemoryCounter, Sent, TrafficCounter
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout

FOUR = Layout(data=2, tensor=2)


def collectives(mesh: Mesh) -> Sent:
    data, tensor = mesh.group("data", use="data"), mesh.group("tensor", use="tensor")
    values = torch.ones(12, 4)
    uneven = [3, 9] if tensor.index == 0 else [4, 8]
    with TrafficCounter() as account:
        data.all_reduce(values.clone())
        tensor.all_gather(values)
        tensor.reduce_scatter(values)
        tensor.all_to_all(values, uneven, [3, 4] if tensor.index == 0 else [9, 8])
        mesh.all_reduce(torch.zeros(3, dtype=torch.float64))
    assert values.sum() == 48  # and nothing is changed by being watched
    data.all_reduce(values)  # nor counted afterwards
    return account.sent


def test_each_collective_is_counted_for_its_use() -> None:
    whole = 12 * 4 * 4
    for rank, sent in enumerate(run_ranks(collectives, 4, layout=FOUR)):
        given = 9 if rank % 2 == 0 else 4  # rows that leave
        assert sent == {
            "data": {"all-reduce": whole},  # 2 · 1/2 of it
            "tensor": {"all-gather": whole, "reduce-scatter": whole // 2, "all-to-all": given * 16},
            "agreement": {"all-reduce": 2 * 3 * 3 * 8 // 4},
        }


def backward(mesh: Mesh) -> Sent:
    group = mesh.group("tensor", use="tensor")
    x = torch.ones(2, 6, requires_grad=True)
    with TrafficCounter() as account:
        group.gather_to_region(group.copy_to_region(x), 1).sum().backward()
    return account.sent


def test_what_the_backward_sends_is_counted_too() -> None:
    part = 2 * 6 * 4
    for sent in run_ranks(backward, 2, layout=Layout(tensor=2)):
        assert sent == {"tensor": {"all-gather": part, "reduce-scatter": part, "all-reduce": part}}


def sharded(mesh: Mesh) -> Sent:
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = nn.Linear(16, 16, bias=False)
    fully_shard(model, mesh=group)
    model(torch.ones(1, 16)).sum().backward()  # the first forward also prepares
    with TrafficCounter() as account:
        model(torch.ones(1, 16)).sum().backward()
    return account.sent


def test_torchs_own_sharding_is_seen() -> None:
    whole = 16 * 16 * 4
    for sent in run_ranks(sharded, 2):
        (names,) = sent.values()
        assert names["all-gather"] in (whole // 2, 2 * whole // 2)  # its root may keep what it has gathered
        assert names["reduce-scatter"] == whole // 2


def messages(mesh: Mesh) -> Sent:
    with TrafficCounter() as account:
        if mesh.rank == 0:
            dist.send(torch.ones(5), 1)
        else:
            dist.recv(torch.empty(5), 0)
    return account.sent


def test_a_message_counts_where_it_is_sent() -> None:
    assert run_ranks(messages, 2) == [{"data": {"send": 20}}, {}]


def test_what_lives_at_once_is_what_a_step_needs() -> None:
    known = torch.ones(1000)
    live = MemoryCounter([known], torch.device("cpu"))
    with live:
        a = known * 2
        b = a + 1
        del a
        c = b + 1
        known.add_(c)
        view = c[:10]
        del b, c
        assert view[0] == 4.0
    assert 8000 <= live.peak <= 8200  # two at a time, and never the third


@pytest.mark.parametrize("layers", [2, 8])
def test_activations_wait_for_the_backward(layers: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(layers)))
    live = MemoryCounter(model.parameters(), torch.device("cpu"))
    x = torch.ones(100, 32)
    with live:
        model(x).sum().backward()
    one = 100 * 32 * 4
    gradients = sum(p.numel() * 4 for p in model.parameters())
    assert layers * one <= live.peak <= (layers + 3) * one + gradients  # each Tanh keeps its result
