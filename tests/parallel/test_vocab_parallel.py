from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import ALONE, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.models.init import build, materialize
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import Loss, ParamShard, extract
from phalanx.parallel.vocab_parallel import applied, swap
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.training.micro_batch import summed_loss

ROWS, WIDTH = 257, 16
UNDIVIDED = ALONE.group("tensor", use="tensor")


class End(nn.Module):
    """The end of a model: all that a loss sees of it."""

    def __init__(self, rows: int, group: Group | None):
        super().__init__()
        self.spec = ModelSpec(vocab=rows, dim=WIDTH)
        self.project = linear
        whole = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        self.shard = (
            ParamShard.full(whole) if group is None else ParamShard.full(whole).cut(0, group.index, group.size, "tensor")
        )
        self.weight = nn.Parameter(extract(self.shard.slice, whole).clone())

    def forward(self, x_BSD: Tensor) -> Any:
        return self.project(x_BSD, self.weight)


def states(batch: int = 3, length: int = 8) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(2))


def targets(rows: int, batch: int = 3, length: int = 8) -> Tensor:
    found = torch.randint(rows, (batch, length), generator=torch.Generator().manual_seed(4))
    found[0, 2:4] = -100
    found[1] = -100  # a chunk without any target
    found[2, :2] = torch.tensor([0, rows - 1])
    return found


def measured(end: End, loss: Loss, x_BSD: Tensor, bf16: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and the gradients of states and weight, all of them scaled as training does."""
    x_BSD = x_BSD.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        projected = end(x_BSD)
    total = loss(projected, targets(end.spec.rows))
    assert total.dtype == torch.float32 and total.shape == ()
    (total / 7).backward()
    assert x_BSD.grad is not None and end.weight.grad is not None
    return total.detach(), x_BSD.grad, end.weight.grad


def alone(rows: int, chunk: int | None, bf16: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    end = End(rows, None)
    return measured(end, swap([end], UNDIVIDED, chunk=chunk, sequence=False, loss=summed_loss), states(), bf16)


def on_rank(
    mesh: Mesh, rows: int, chunk: int | None, sequence: bool
) -> tuple[Tensor, Tensor, Tensor, ParamShard, float, str | None]:
    group = mesh.group("tensor", use="tensor")
    end = End(rows, group)
    loss = swap([end], group, chunk=chunk, sequence=sequence, loss=summed_loss)
    x_BSD = group.own_chunk(states(), 1) if sequence else states()
    total, dx_BSD, dweight_VD = measured(end, loss, x_BSD)
    with torch.no_grad():
        evaluated = loss(end(x_BSD), targets(rows)).item()
    if sequence:
        dx_BSD = group.all_gather(dx_BSD, 1)
    return total, dx_BSD, dweight_VD, end.shard, evaluated, applied([end], loss)


def test_without_need_nothing_changes() -> None:
    end = End(ROWS, None)
    for sequence in (False, True):
        assert swap([end], UNDIVIDED, chunk=None, sequence=sequence, loss=summed_loss) is summed_loss
    assert end.project is linear
    assert applied([end], summed_loss) is None


@pytest.mark.parametrize("chunk", [1, 7, 8, 24, 1000])
def test_chunks_add_up_to_the_whole(chunk: int) -> None:
    for got, want in zip(alone(ROWS, chunk), alone(ROWS, None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_chunks_in_bf16_are_as_exact_as_the_whole() -> None:
    exact, whole, chunked = alone(ROWS, None), alone(ROWS, None, bf16=True), alone(ROWS, 7, bf16=True)
    assert not torch.equal(whole[0], exact[0]), "nothing was computed in bf16"
    assert chunked[0].item() == pytest.approx(whole[0].item(), rel=1e-6)  # the same logits
    for precise, plain, got in zip(exact[1:], whole[1:], chunked[1:], strict=True):
        assert got.dtype == torch.float32
        assert (got - precise).norm() <= 1.2 * (plain - precise).norm()


@pytest.mark.parametrize(("ranks", "rows"), [(2, 257), (3, 257), (4, 10)])
def test_ranks_with_some_columns_each(ranks: int, rows: int) -> None:
    want = alone(rows, None)
    for chunk, sequence in ((None, False), (7, False), *([(None, True), (7, True)] if ranks != 3 else [])):
        for total, dx, dweight, spot, evaluated, told in run_ranks(
            on_rank, ranks, rows, chunk, sequence, layout=Layout(tensor=ranks)
        ):
            assert total.item() == pytest.approx(want[0].item(), rel=1e-6)
            assert evaluated == pytest.approx(want[0].item(), rel=1e-6)
            torch.testing.assert_close(dx, want[1], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(dweight, extract(spot.slice, want[2]), rtol=1e-5, atol=1e-6)
            assert told is not None and f"begin at column {spot.slice.offset[0]} of {rows}" in told
            assert ("logits of 7 tokens at a time" in told) == (chunk is not None)


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that got memory of its own under it."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        new = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and _memory(leaf) not in given]
        self.elements = max(self.elements, *new, 0)
        return made


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def largest(chunk: int | None, grad: bool) -> int:
    """Elements of the largest tensor in forward and backward of 24 tokens."""
    end = End(ROWS, None)
    loss = swap([end], UNDIVIDED, chunk=chunk, sequence=False, loss=summed_loss)
    with Largest() as seen, torch.set_grad_enabled(grad):
        total = loss(end(states().requires_grad_(grad)), targets(ROWS))
        if grad:
            total.backward()
    return seen.elements


def test_logits_of_all_tokens_never_exist() -> None:
    for grad in (True, False):
        assert largest(None, grad) == 24 * ROWS
        assert largest(4, grad) == (ROWS * WIDTH if grad else 4 * ROWS)  # the weight's gradient, which nobody can do without


def test_backward_in_two_halves() -> None:
    """As pipelines take it: the states' gradient first, the weight's later, from the same graph."""
    want = alone(ROWS, None)
    end = End(ROWS, None)
    loss = swap([end], UNDIVIDED, chunk=5, sequence=False, loss=summed_loss)
    x_BSD = states().requires_grad_()
    total = loss(end(x_BSD), targets(ROWS)) / 7
    [dx_BSD] = torch.autograd.grad(total, [x_BSD], retain_graph=True)
    [dweight_VD] = torch.autograd.grad(total, [end.weight])
    torch.testing.assert_close(dx_BSD, want[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dweight_VD, want[2], rtol=1e-5, atol=1e-6)


SPEC = ModelSpec(vocab=41, dim=16, layers=2, heads=2, ffn=32, init_std=0.1, tied=True, mtp_depth=1)


def sharded(mesh: Mesh, chunk: int | None, shard: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of three steps on the same samples, the last gradients, and hooks that stay on the head's weight."""
    model = materialize(build(SPEC), 1, torch.device("cpu"))
    loss = swap([model], UNDIVIDED, chunk=chunk, sequence=False, loss=summed_loss)
    if shard:
        devices = init_device_mesh("cpu", (mesh.ranks,))
        for part in (*model.blocks.values(), model):
            fully_shard(part, mesh=devices)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    tokens = torch.randint(41, (2, 12), generator=torch.Generator().manual_seed(3))
    found = []
    for _ in range(3):
        model.zero_grad()
        total = torch.stack([loss(one, tokens.roll(-1, 1)) for one in model(tokens, torch.arange(12).expand(2, 12))]).sum()
        total.backward()
        found.append(total.item())
    gradients = {name: p.grad.full_tensor() if shard else p.grad for name, p in model.named_parameters()}
    return found, gradients, len(model.embed.weight._backward_hooks or {})


def test_chunks_with_sharded_weights() -> None:
    """FSDP2 keeps the root's weights gathered until the backward, and learns from the states' gradient that it began."""
    losses, gradients, _ = sharded(ALONE, None, False)
    for got_losses, got, hooks in run_ranks(sharded, 2, 5, True):
        assert got_losses == pytest.approx(losses, rel=1e-6)
        assert hooks == 0
        for name, want in gradients.items():
            torch.testing.assert_close(got[name], 2 * want, rtol=1e-5, atol=1e-5 * want.abs().max().item(), msg=name)


def test_a_model_without_the_seam_has_no_chunks() -> None:
    end = End(ROWS, None)
    del end.project
    with pytest.raises(RunError, match="a loss in chunks of 4 tokens needs a model that gives its logits through"):
        swap([end], UNDIVIDED, chunk=4, sequence=False, loss=summed_loss)
