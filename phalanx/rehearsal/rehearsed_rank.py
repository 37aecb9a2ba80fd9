"""One rank's program, taken through its steps without memory and without the other ranks: the same placing, stages, losses, pipeline,
sums of gradients and optimizer as in a job. `rehearsal/rehearse` makes it and reads off what it did.
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
from phalanx.rehearsal.attention_kernels import Card
from phalanx.rehearsal.environment import RehearsedEnvironment, assumed, even_counts, optimizer_resources
from phalanx.rehearsal.message_log import Messages
from phalanx.rehearsal.op_tracker import Watch
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.spec.tensor_slice import chunk
from phalanx.training.build import TrainState, build
from phalanx.training.dry_build import absent_place, fake_process_group, lazy_fsdp_chunks
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step import StepObserver, StepPart, Stepper

T = TypeVar("T")


class Program:
    """Built, and ready for steps."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, watch: Watch):
        self.run, self.plan, self.mesh, self.watch = run, plan, mesh, watch
        self.built: TrainState = build(run, plan, mesh, optimizer_resources(mesh))
        self.names = _names(self.built.sharded.parts)
        pipeline = self.built.pipeline(run)
        self.stepper = Stepper(run, plan, self.built.sharded, self.built.experts, pipeline)
        self.pipeline = pipeline
        self._micro_batch = 0
        self._waiting: list[MicroBatch] = []
        """Those that a shortened step leaves out, on the device."""
        self._observe()
        self._settle()

    def step(self, micro_batches: int, all_of_them: int | None = None) -> None:
        """One step of so many micro-batches, of which a pipeline has all on the device from the beginning."""
        watch = self.watch
        self._micro_batch = 0
        watch.enter("inputs", "", "")
        batches = [self._batch() for _ in range(micro_batches)]
        others = (all_of_them or micro_batches) - micro_batches if self.pipeline is not None else 0
        self._waiting[:] = [self._batch().to(self.mesh.device) for _ in range(others)]
        watch.enter("step", "", "")
        rate = learning_rate(self.run.optimizer, 0, self.run.steps)
        self.stepper.step(batches, self.built.optimizer, rate, lambda: 0)
        watch.enter("update", "", "")
        if self.built.outer is not None:
            self.built.outer.step()
            self.built.optimizer.adopt()
        self.built.sharded.engine.updated()
        self._settle()

    def _batch(self) -> MicroBatch:
        """As the loader's thread prepares it, in the host's memory."""
        length = self.run.train.sequence_length
        own = (self.plan.micro_batch, length // self.plan.layout.context)
        tokens, targets, positions = (torch.empty(own, dtype=torch.int64) for _ in range(3))
        documents = torch.empty((own[0], length), dtype=torch.int32) if self.run.data.document_mask else None
        return MicroBatch(tokens, targets, positions, documents, counted=own[0] * own[1], digest=0)

    def _observe(self) -> None:
        """Let the parts of a step tell the watch when they begin."""
        sharded, watch = self.built.sharded, self.watch
        self.stepper.observer = _StepObserver(watch, self._waiting)
        if self.pipeline is not None:
            self.pipeline.observer = _ActionObserver(watch)
        for part in sharded.parts:
            for module in part.modules():
                if isinstance(module, Experts):
                    module.read_counts = even_counts
                if hasattr(module, "work"):  # see `transforms/recompute`
                    module.work = watch  # type: ignore[assignment]
        spec = self.run.model
        tensor = self.mesh.size("tensor")
        watch.logits = chunk(spec.rows, self.mesh.coordinate("tensor"), tensor)[1] if tensor > 1 else spec.rows
        watch.weights = {_local(p).untyped_storage()._cdata for part in sharded.parts for p in part.parameters()}

    def _settle(self) -> None:
        """Say what lasts is for what."""
        placed, watch = self.built.sharded, self.watch
        parameters = [_local(p) for part in placed.parts for p in part.parameters()]
        watch.name([*parameters, *(one.value for one in placed.owned)], "parameters")
        gradients = [_local(p.grad) for part in placed.parts for p in part.parameters() if p.grad is not None]
        watch.name([*gradients, *(one.gradient for one in placed.owned)], "gradients")
        states = self.built.optimizer.state().values()
        watch.name((state for state in states if isinstance(state, Tensor)), "optimizer")
        if self.built.outer is not None:
            watch.name((p.tensor for p in self.built.outer.tensors().values() if isinstance(p.tensor, Tensor)), "optimizer")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While it is open, modules say when they are entered and left, forward and backward."""
        hooks = [
            modules.register_module_forward_pre_hook(self._comes),
            modules.register_module_forward_hook(self._goes, always_call=False),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _comes(self, module: nn.Module, given: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        watch = self.watch
        again = torch._C._current_graph_task_id() != -1  # in a backward
        if name == "" and self.pipeline is None and not again:
            self._micro_batch += 1
            watch.enter("step", "", f"micro-batch {self._micro_batch}")
        module._came_from = watch.enter("recompute" if watch.again or again else "forward", name)  # type: ignore[assignment]

    def _goes(self, module: nn.Module, given: Any, output: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        watch = self.watch
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._back, name or "the model's end"))
                break
        watch.where = module._came_from  # type: ignore[assignment]

    def _back(self, name: str, gradients: Any) -> None:
        self.watch.enter("backward", name)


def _local(tensor: Any) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


class _StepObserver(StepObserver):
    """Tells the watch which part of a step runs."""

    def __init__(self, watch: Watch, waiting: list[MicroBatch]):
        """`waiting`: micro-batches on the device, which a pipeline drops at the end of its backwards."""
        self._watch, self._waiting = watch, waiting

    def run(self, part: StepPart, function: Callable[..., T], *args: Any) -> T:
        if part in ("loss", "optimizer"):
            return self._watch.around(function, part)(*args)
        if part == "reduce":
            self._waiting.clear()
            self._watch.enter("reduce", "", "")  # it belongs to no single micro-batch
        else:
            self._watch.enter("step")
        return function(*args)


class _ActionObserver(PipelineObserver):
    """Tells the watch which action of a pipeline's schedule runs."""

    def __init__(self, watch: Watch):
        self._watch = watch

    def action(self, action: RankAction, run: Callable[[], Tensor | None]) -> Tensor | None:
        name = f"{action.stage}{action.kind}{action.micro_batch}"
        self._watch.enter("forward" if action.kind == "F" else "backward", "", name)
        result = run()
        self._watch.enter("step", "", name)  # sending the result belongs to this action too
        return result

    def end(self) -> None:
        self._watch.enter("step", "", "")


def _names(parts: Sequence[nn.Module]) -> dict[int, str]:
    found: dict[int, str] = {}
    for part in parts:
        for name, module in part.named_modules():
            found.setdefault(id(module), name)
    return found


@contextlib.contextmanager
def opened(run: Run, plan: Plan, rank: int, card: Card | None, messages: Messages) -> Iterator[tuple[Program, Watch]]:
    """The program of one rank, built. `card`: the GPU that is played; None: ranks are on CPUs."""
    layout = replace(plan.layout, data=plan.layout.data or 1)
    run, plan = replace(run, layout=layout), replace(plan, layout=layout)
    mesh = Mesh(absent_place(rank, layout.ranks), fake_gpu.GPU if card else fake_gpu.HOST, layout, RehearsedEnvironment())
    watch = Watch(messages, card)
    events, COMM_TIMER.events = COMM_TIMER.events, None
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, COMM_TIMER, "events", events)
        stack.enter_context(fake_process_group(mesh))
        stack.enter_context(lazy_fsdp_chunks())
        stack.enter_context(assumed())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if card:
            stack.enter_context(fake_gpu.gpu(card))
        stack.enter_context(watch)
        stack.callback(watch.close)
        program = Program(run, plan, mesh, watch)
        stack.enter_context(program.listening())
        yield program, watch
