"""Hand-written training loops on torch's own parts: FSDP2, parallelize_module with loss_parallel, pipelining.

The reference for `benchmarks/parallel.py`, which alternates their steps with ours. To measure start-up it also starts this file under
torchrun: then it prints the time at the end of each step and nothing else.
"""

from __future__ import annotations

import sys
import time
from itertools import count
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from phalanx.models.decoder import Decoder
from phalanx.schedules.stage_split import cut, flop_costs
from phalanx.spec.load import load
from phalanx.spec.run import Run


class Micro(NamedTuple):
    """The inputs of one forward pass, each [B, S]."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor


class Loop(Protocol):
    """A training loop of one rank."""

    def step(self, batches: list[Micro], targets: int) -> float | None:
        """Takes a step; returns the loss, or None on a rank that does not know it. `targets`: counted targets of the batch on all ranks."""


def _adamw(groups: list[list[Tensor]], run: Run) -> torch.optim.AdamW:
    spec = run.optimizer
    return torch.optim.AdamW(
        [{"params": group} for group in groups if group],
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=True,
    )


class Fsdp:
    """ZeRO-3: fully_shard on every block and on the model. Gradients are means over the ranks."""

    def __init__(self, model: Decoder, run: Run):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model, self.clip, self.ranks = model, run.train.clip, mesh.size()
        self.optimizer = _adamw([list(model.parameters())], run)

    def step(self, batches: list[Micro], targets: int) -> float:
        (batch,) = batches
        self.optimizer.zero_grad()
        logits = self.model(batch.tokens, batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum") * self.ranks / targets
        loss.backward()
        clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()


class Tensors:
    """Tensor parallelism: column- and row-wise attention and feed-forward; vocabulary-parallel embedding, head and loss.

    The inputs of attention and feed-forward become DTensors once, so that their projections share one all-reduce in the backward pass.
    """

    def __init__(self, model: Decoder, run: Run):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model.project = lambda x_BSD, weight_VD: model.head(x_BSD)  # a module, so that its parallel style applies
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        replicated = Replicate()
        for index in model.blocks:
            block = f"blocks.{index}"
            plan |= {
                f"{block}.attention": PrepareModuleInput(
                    input_layouts=(replicated, None, None, None), desired_input_layouts=(replicated, None, None, None)
                ),
                f"{block}.attention.query": ColwiseParallel(),
                f"{block}.attention.key": ColwiseParallel(),
                f"{block}.attention.value": ColwiseParallel(),
                f"{block}.attention.output": RowwiseParallel(),
                f"{block}.mlp": PrepareModuleInput(input_layouts=(replicated,), desired_input_layouts=(replicated,)),
                f"{block}.mlp.gate": ColwiseParallel(),
                f"{block}.mlp.up": ColwiseParallel(),
                f"{block}.mlp.down": RowwiseParallel(),
            }
        self.model, self.clip = parallelize_module(model, mesh, plan), run.train.clip
        # Norms stay plain tensors; neither clipping nor the fused kernel accepts them together with DTensors.
        self.groups = [[p for p in model.parameters() if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
        self.optimizer = _adamw(self.groups, run)

    def step(self, batches: list[Micro], targets: int) -> float:
        (batch,) = batches
        self.optimizer.zero_grad()
        with loss_parallel():
            logits = self.model(batch.tokens, batch.positions)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
            loss.backward()
        self._clip()
        self.optimizer.step()
        return loss.item()

    def _clip(self) -> None:
        for p in self.groups[0]:
            if p.grad.placements != p.placements:  # torch returns the gradient of the whole embedding on every rank
                p.grad = p.grad.redistribute(placements=p.placements)
        local = [p.grad.to_local() for p in self.groups[0]]
        plain = [p.grad for p in self.groups[1]]
        square = get_total_norm(local).square()
        dist.all_reduce(square)
        norm = (square + get_total_norm(plain).square()).sqrt()
        scale = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local + plain, scale)


class Pipelined:
    """1F1B over the same stages as Phalanx."""

    def __init__(self, model: Decoder, run: Run):
        self.rank, self.ranks, self.clip = dist.get_rank(), dist.get_world_size(), run.train.clip
        costs = flop_costs(run.model, run.train.sequence_length)
        self.part = model.part(*cut(costs.blocks, costs.first, costs.last, self.ranks)[self.rank])
        self.targets = 1

        def loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
            return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="sum") / self.targets

        stage = PipelineStage(self.part, self.rank, self.ranks, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, run.batch // (run.train.micro_batch or 1), loss_fn=loss, scale_grads=False)
        self.parameters = list(self.part.parameters())
        self.optimizer = _adamw([self.parameters], run)

    def step(self, batches: list[Micro], targets: int) -> float | None:
        self.targets = targets
        tokens, labels, positions = (torch.cat(column) for column in zip(*batches, strict=True))
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        last = self.rank == self.ranks - 1
        inputs = (tokens,) if self.rank == 0 else ()
        self.schedule.step(*inputs, positions_BS=positions, target=labels if last else None, losses=losses if last else None)
        square = get_total_norm([p.grad for p in self.parameters if p.grad is not None]).square()
        dist.all_reduce(square)
        clip_grads_with_norm_(self.parameters, self.clip, square.sqrt())
        self.optimizer.step()
        return torch.stack(losses).sum().item() if last else None


LOOPS: dict[str, type[Fsdp] | type[Tensors] | type[Pipelined]] = {"zero3": Fsdp, "tensor": Tensors, "1f1b": Pipelined}


def main(technique: str, run_file: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = load(run_file)
    loop = LOOPS[technique](Decoder(run.model), run)
    micro, length = run.train.micro_batch or 1, run.train.sequence_length
    data = torch.randint(run.model.rows, (64, micro, length + 1))
    positions = torch.arange(length).expand(micro, length)
    micro_batches = run.batch // (run.layout.replicas * micro)
    for step in count():
        rows = [data[(step * micro_batches + index) % len(data)] for index in range(micro_batches)]
        loop.step([Micro(tokens[:, :-1], tokens[:, 1:], positions) for tokens in rows], run.batch_tokens)
        if dist.get_rank() == 0:
            print(f"{time.time():.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
