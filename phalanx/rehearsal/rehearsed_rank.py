"""The program of one rank, run without memory and without the other ranks: the same layout, stages, losses, pipeline, gradient sums
and optimizer as in a job. `rehearsal/rehearse` builds it, runs a step, and reads what it did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves

from phalanx.models.moe import Experts
from phalanx.observe.comm_timer import COMM_TIMER
from phalanx.optim.optimizer import learning_rate
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.executor import PipelineObserver
from phalanx.parallel.pipeline.rank_actions import RankAction
from phalanx.rehearsal import fake_gpu
from phalanx.rehearsal.environment import RehearsedEnvironment, assumptions, even_counts, optimizer_resources
from phalanx.rehearsal.gpu_kernels import Card
from phalanx.rehearsal.op_tracker import OpTracker
from phalanx.rehearsal.result import Messages
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.spec.tensor_slice import chunk
from phalanx.training.build import TrainState, build
from phalanx.training.dry_build import absent_place, fake_process_group, lazy_fsdp_chunks
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step import StepObserver, StepPart, Stepper

T = TypeVar("T")


class Program:
    """The program of one rank, built and ready for steps."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, tracker: OpTracker):
        self.run, self.plan, self.mesh, self.tracker = run, plan, mesh, tracker
        self.built: TrainState = build(run, plan, mesh, optimizer_resources(mesh))
        self.names = _names(self.built.sharded.parts)
        pipeline = self.built.pipeline(run)
        self.stepper = Stepper(run, plan, self.built.sharded, self.built.experts, pipeline)
        self.pipeline = pipeline
        self._micro_batch = 0
        self._waiting: list[MicroBatch] = []
        """Micro-batches on the device that a shortened step leaves out."""
        self._observe()
        self._name_state()

    def step(self, micro_batches: int, all_of_them: int | None = None) -> None:
        """Runs one step. A pipeline has `all_of_them` on the device from the beginning, although it runs only `micro_batches`."""
        tracker = self.tracker
        self._micro_batch = 0
        tracker.enter("inputs", "", "")
        batches = [self._batch() for _ in range(micro_batches)]
        others = (all_of_them or micro_batches) - micro_batches if self.pipeline is not None else 0
        self._waiting[:] = [self._batch().to(self.mesh.device) for _ in range(others)]
        tracker.enter("step", "", "")
        rate = learning_rate(self.run.optimizer, 0, self.run.steps)
        self.stepper.step(batches, self.built.optimizer, rate, lambda: 0)
        tracker.enter("update", "", "")
        if self.built.outer is not None:
            self.built.outer.step()
            self.built.optimizer.adopt()
        self.built.sharded.engine.updated()
        self._name_state()

    def _batch(self) -> MicroBatch:
        """A micro-batch in host memory, as the loader prepares it."""
        length = self.run.train.sequence_length
        own = (self.plan.micro_batch, length // self.plan.layout.context)
        tokens, targets, positions = (torch.empty(own, dtype=torch.int64) for _ in range(3))
        documents = torch.empty((own[0], length), dtype=torch.int32) if self.run.data.document_mask else None
        return MicroBatch(tokens, targets, positions, documents, counted=own[0] * own[1], digest=0)

    def _observe(self) -> None:
        """Let the parts of a step tell the tracker when they begin."""
        sharded, tracker = self.built.sharded, self.tracker
        self.stepper.observer = _StepObserver(tracker, self._waiting)
        if self.pipeline is not None:
            self.pipeline.observer = _ActionObserver(tracker)
        for part in sharded.parts:
            for module in part.modules():
                if isinstance(module, Experts):
                    module.read_counts = even_counts
                if hasattr(module, "work"):  # see `transforms/recompute`
                    module.work = tracker  # type: ignore[assignment]
        spec = self.run.model
        tensor = self.mesh.size("tensor")
        tracker.logits = chunk(spec.rows, self.mesh.coordinate("tensor"), tensor)[1] if tensor > 1 else spec.rows
        tracker.weights = {_local(p).untyped_storage()._cdata for part in sharded.parts for p in part.parameters()}

    def _name_state(self) -> None:
        """Tell the tracker what the allocations that outlive a step are for."""
        sharded, tracker = self.built.sharded, self.tracker
        parameters = [_local(p) for part in sharded.parts for p in part.parameters()]
        tracker.name([*parameters, *(param.value for param in sharded.owned)], "parameters")
        gradients = [_local(p.grad) for part in sharded.parts for p in part.parameters() if p.grad is not None]
        tracker.name([*gradients, *(param.gradient for param in sharded.owned)], "gradients")
        states = self.built.optimizer.state().values()
        tracker.name((state for state in states if isinstance(state, Tensor)), "optimizer")
        if self.built.outer is not None:
            tracker.name((p.tensor for p in self.built.outer.tensors().values() if isinstance(p.tensor, Tensor)), "optimizer")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Meanwhile modules tell the tracker when they are entered and left, forward and backward."""
        hooks = [
            modules.register_module_forward_pre_hook(self._enter_module),
            modules.register_module_forward_hook(self._leave_module, always_call=False),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter_module(self, module: nn.Module, given: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        tracker = self.tracker
        again = torch._C._current_graph_task_id() != -1  # in a backward
        if name == "" and self.pipeline is None and not again:
            self._micro_batch += 1
            tracker.enter("step", "", f"micro-batch {self._micro_batch}")
        module._entered_from = tracker.enter("recompute" if tracker.again or again else "forward", name)  # type: ignore[assignment]

    def _leave_module(self, module: nn.Module, given: Any, output: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        tracker = self.tracker
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._enter_backward, name or "the model's end"))
                break
        tracker.where = module._entered_from  # type: ignore[assignment]

    def _enter_backward(self, name: str, gradients: Any) -> None:
        self.tracker.enter("backward", name)


def _local(tensor: Any) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


class _StepObserver(StepObserver):
    """Tells the tracker which part of a step runs."""

    def __init__(self, tracker: OpTracker, waiting: list[MicroBatch]):
        """`waiting`: micro-batches on the device, which a pipeline drops at the end of its backwards."""
        self._tracker, self._waiting = tracker, waiting

    def run(self, part: StepPart, function: Callable[..., T], *args: Any) -> T:
        if part in ("loss", "optimizer"):
            return self._tracker.around(function, part)(*args)
        if part == "reduce":
            self._waiting.clear()
            self._tracker.enter("reduce", "", "")  # it belongs to no single micro-batch
        else:
            self._tracker.enter("step")
        return function(*args)


class _ActionObserver(PipelineObserver):
    """Tells the tracker which action of a pipeline's schedule runs."""

    def __init__(self, tracker: OpTracker):
        self._tracker = tracker

    def action(self, action: RankAction, run: Callable[[], Tensor | None]) -> Tensor | None:
        name = f"{action.stage}{action.kind}{action.micro_batch}"
        self._tracker.enter("forward" if action.kind == "F" else "backward", "", name)
        result = run()
        self._tracker.enter("step", "", name)  # sending the result belongs to this action too
        return result

    def end(self) -> None:
        self._tracker.enter("step", "", "")


def _names(parts: Sequence[nn.Module]) -> dict[int, str]:
    names: dict[int, str] = {}
    for part in parts:
        for name, module in part.named_modules():
            names.setdefault(id(module), name)
    return names


@contextlib.contextmanager
def rehearsed_program(
    run: Run, plan: Plan, rank: int, card: Card | None, messages: Messages
) -> Iterator[tuple[Program, OpTracker]]:
    """Builds the program of one rank. `card`: the fake GPU; None: ranks are on CPUs."""
    layout = replace(plan.layout, data=plan.layout.data or 1)
    run, plan = replace(run, layout=layout), replace(plan, layout=layout)
    mesh = Mesh(absent_place(rank, layout.ranks), fake_gpu.GPU if card else fake_gpu.HOST, layout, RehearsedEnvironment())
    tracker = OpTracker(messages, card)
    events, COMM_TIMER.events = COMM_TIMER.events, None
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, COMM_TIMER, "events", events)
        stack.enter_context(fake_process_group(mesh))
        stack.enter_context(lazy_fsdp_chunks())
        stack.enter_context(assumptions())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if card:
            stack.enter_context(fake_gpu.gpu(card))
        stack.enter_context(tracker)
        stack.callback(tracker.close)
        program = Program(run, plan, mesh, tracker)
        stack.enter_context(program.listening())
        yield program, tracker
