"""Pipelines whose stages are sharded with FSDP2, gradients summed once at the end: every schedule against one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from phalanx.models.decoder import Decoder
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.executor import Pipeline
from phalanx.schedules.makers import NAMES, make
from phalanx.schedules.stage_split import cut
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

SPEC = ModelSpec(dim=24, layers=5, heads=6, kv_heads=2, ffn=48, vocab=257)
LENGTH, COUNT = 8, 5


def decoder() -> Decoder:
    torch.manual_seed(3)
    whole = Decoder(SPEC)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    return whole


def batches(replica: int) -> list[Tensor]:
    dice = torch.Generator().manual_seed(replica)
    return [torch.randint(257, (2, LENGTH + 1), generator=dice) for _ in range(COUNT)]


def total(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / 100


def sharded(part: Decoder, mesh: DeviceMesh) -> None:
    for module in (*part.blocks.values(), part):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def reduce(part: nn.Module) -> None:
    """What torch's own pipeline stages do when all micro-batches are done."""
    assert isinstance(part, FSDPModule)
    part.set_is_last_backward(True)
    part.set_reshard_after_backward(True)
    part.set_requires_gradient_sync(True)
    root: Any = fully_shard.state(part)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is not None:
                group.post_backward()
    root._root_post_backward_final_callback()


def steps(mesh: Mesh, name: str, device_mesh: DeviceMesh) -> dict[str, Tensor]:
    """Gradients of this rank's stages after a second step, behind an evaluation and an update that changed the weights."""
    schedule = make(name, 2, COUNT)
    ranges = cut((1.0,) * SPEC.layers, 0.1, 1.0, schedule.stages)
    whole = decoder()
    parts = [whole.part(*ranges[stage]) for stage in schedule.stages_of(mesh.coordinate("pipeline"))]
    for part in parts:
        sharded(part, device_mesh)
    data, positions = batches(mesh.coordinate("shard")), torch.arange(LENGTH).expand(2, -1)
    pipeline = Pipeline(parts, schedule, mesh)

    def forward(part: int, given: Tensor | None, m: int) -> Any:
        return parts[part](data[m][:, :-1] if given is None else given, positions)

    def boundary(m: int) -> tuple[tuple[int, ...], torch.dtype]:
        return (2, LENGTH, SPEC.dim), torch.float32

    for step in range(2):
        pipeline.evaluate(forward, lambda logits: None, boundary)
        with torch.no_grad():
            for parameter in {p for part in parts for p in part.parameters()}:
                parameter.mul_(1.0 + 0.5 * step)
                parameter.grad = None
        pipeline.run(COUNT, forward, lambda logits, m: total(logits, data[m]), boundary, lambda part: None)
        for part in parts:
            reduce(part)
    return {n: p.grad.full_tensor() for part in parts for n, p in part.named_parameters()}  # type: ignore[union-attr]


def all_schedules(mesh: Mesh) -> dict[str, dict[str, Tensor]]:
    handle = mesh.group("shard", use="shard").handle
    assert handle is not None
    device_mesh = DeviceMesh.from_group(handle, "cpu")
    return {name: steps(mesh, name, device_mesh) for name in NAMES}


def test_sharded_stages_have_the_gradients_of_one_process() -> None:
    whole = decoder()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(1.5)
    for tokens in batches(0) + batches(1):
        total(whole(tokens[:, :-1], torch.arange(LENGTH).expand(2, -1)), tokens).backward()
    results = run_ranks(all_schedules, 4, layout=Layout(pipeline=2, shard=2))
    for name in NAMES:
        found = {key: value for result in results for key, value in result[name].items()}
        assert len(found) == len(list(whole.parameters()))
        for key, parameter in whole.named_parameters():
            assert parameter.grad is not None
            far = (found[key] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert far < 1e-5, (name, key, float(far))
