"""The program of one rank, run without memory and without the other ranks: the same layout, stages, losses, pipeline, gradient sums
and optimizer as in a job. `rehearsal/rehearse` builds it, runs a step, and reads what it did.

What the real program reads from its data, its files and other ranks, a rehearsal assumes; each assumption is passed to the program
where it would read the values of a tensor on the host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves

from phalanx.kernels.document_attention import DocumentSpans, available
from phalanx.models.moe import Experts
from phalanx.observe.comm_timer import COMM_TIMER, replaced
from phalanx.optim.optimizer import Resources, learning_rate
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Environment, Mesh
from phalanx.parallel.pipeline.executor import PipelineObserver, RankAction
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.rehearsal import fake_gpu
from phalanx.rehearsal.fake_gpu import RehearsalDevice
from phalanx.rehearsal.op_tracker import OpTracker
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.spec.tensor_slice import TensorSlice, chunk
from phalanx.training.build import TrainState, absent_place, build, fake_process_group, lazy_fsdp_chunks
from phalanx.training.dpo import Pairs
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step import StepObserver, StepPart, make_stepper
from phalanx.transforms.activations import MOVED

ASSUMED = (
    "every expert gets equally many tokens",
    "every window holds several documents, where data.document_mask is on",
    "losses and gradients are finite, and no rank is asked to stop",
)


class RehearsedEnvironment(Environment):
    """What a rehearsed rank assumes where a real one asks other ranks or reads tensors."""

    def broadcast_object(self, value: Any, ranks: int) -> Any:
        return value

    def gather_objects(self, value: Any, ranks: int) -> list[Any]:
        return [value] * ranks

    def expert_rows(self, counts: Tensor, across: Group, within: Group, rows: int) -> list[int]:
        """Every rank with experts gets the same number of rows from every other rank."""
        sent = _even(rows, across.size)
        received = [sent[across.index]] * across.size
        return [*sent, *received, *[sum(received)] * within.size]

    def document_ids(self, documents: Tensor) -> None:
        """Unknown, so that all attention needs a mask."""


def optimizer_resources(mesh: Mesh) -> Resources:
    """Memory, files and peers of an optimizer in a rehearsal: tensors without memory, and slices computed from those of this rank."""

    def slices(group: Group, params: Sequence[OwnedParam]) -> list[list[TensorSlice]]:
        tensor = mesh.size("tensor")
        return [tiles(group, param.shard, tensor if "tensor" in param.shard.split else 1) for param in params]

    return Resources(folder=Path("offload"), host_buffer=FakeHostBuffer, scratch_file=FakeScratchFile, group_slices=slices)


def tiles(group: Group, spot: ParamShard, tensor: int) -> list[TensorSlice]:
    """The slices of all ranks of a group: tensor ranks, which are neighbours, split a matrix along one dimension, and the ranks that share
    state split those parts."""
    shards = group.size // tensor
    if (
        len(spot.slice.boxes) > 1
    ):  # of a fused matrix, whose segments are known to its own table: parts of one size stand for all
        return [spot.slice] * group.size
    for first, second in product(range(2), repeat=2):
        slices: list[TensorSlice] = []
        for index in range(group.size):
            whole = TensorSlice.full(spot.slice.whole)
            slices.append(whole.cut(first, index % tensor, tensor).cut(second, index // tensor, shards))
        if slices[group.index].boxes[0] == spot.slice.boxes[0]:
            return slices
    raise AssertionError(f"{spot} is split in a way that rehearsals do not support")


def _even(rows: int, parts: int) -> list[int]:
    return [rows // parts + (index < rows % parts) for index in range(parts)]


class FakeHostBuffer:
    """In place of page-locked host memory: a tensor without memory."""

    def __init__(self, size: int, pin: bool):
        self.bytes = torch.empty(size, dtype=torch.uint8)
        self.view = _View()

    def elements(self, dtype: torch.dtype, first: int, count: int) -> Tensor:
        return self.bytes.narrow(0, first, count * dtype.itemsize).view(dtype)


class _View:
    """In place of a memoryview: empty, however it is sliced."""

    def __getitem__(self, _: Any) -> _View:
        return self

    def __len__(self) -> int:
        return 0


class FakeScratchFile:
    """In place of a file of optimizer states and of its path."""

    direct = True

    def __init__(self, path: Any, size: int):
        self.name, self.path, self.size = str(path), self, size

    def __str__(self) -> str:
        return self.name

    def stat(self) -> Any:
        return os.stat_result((0, 0, 0, 0, 0, 0, self.size, 0, 0, 0))

    def read(self, *_: Any) -> None:
        pass

    write = read

    def close(self) -> None:
        pass


def _address(tensor: Tensor) -> int:
    """Stands for the address of a tensor without memory: different for different parts of a storage."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


def to_empty(module: nn.Module, *, device: torch.device, recurse: bool = True) -> nn.Module:
    """In place of `nn.Module.to_empty`: leaves a module that two stages of a rank share as the first stage made it, because torch cannot
    exchange tensors without memory a second time."""
    for child in module.children() if recurse else ():
        to_empty(child, device=device)
    if any(tensor.is_meta for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None):
        module._apply(lambda tensor: torch.empty_like(tensor, device=device), recurse=False)
    return module


@contextlib.contextmanager
def assumptions(tracker: OpTracker) -> Iterator[None]:
    """While this context is open, nothing waits for other ranks, and torch treats tensors without memory like real ones."""
    with contextlib.ExitStack() as stack:
        stack.callback(MOVED.discard, FakeTensor)
        MOVED.add(FakeTensor)
        for owner, name, value in (
            (COMM_TIMER, "complete", lambda work: None),
            (COMM_TIMER, "events", None),
            # C++ code that sees a GPU starts threads for it, and a process with such threads cannot be forked.
            (torch._C, "_ensureCUDADeviceGuardSet", lambda: None),
            (nn.Module, "to_empty", to_empty),
            (torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
            (torch.UntypedStorage, "resize_", lambda storage, size: tracker.resize(storage, size)),
            (FakeTensor, "data_ptr", _address),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


T = TypeVar("T")


class Program:
    """The program of one rank, built and ready for steps."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, tracker: OpTracker, sampled: frozenset[int] | None):
        self.run, self.plan, self.mesh, self.tracker = run, plan, mesh, tracker
        self.built: TrainState = build(run, plan, mesh, optimizer_resources(mesh), sampled)
        # A module that two stages share has its name in the first.
        parts = reversed(self.built.sharded.parts)
        self.names = {id(module): name for part in parts for name, module in part.named_modules()}
        self.pipeline = self.built.pipeline(run)
        self.stepper = make_stepper(run, plan, self.built, self.pipeline)
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
        self.built.sharded.engine.updated(stepped=self.built.outer is None)
        self._name_state()

    def _batch(self) -> MicroBatch:
        """A micro-batch in host memory, as the loader prepares it."""
        length = self.run.train.sequence_length
        own = (self.plan.micro_batch, length // self.plan.layout.context)
        tokens, targets, positions = (torch.empty(own, dtype=torch.int64) for _ in range(3))
        documents = spans = None
        if self.run.data.document_mask:
            documents = torch.empty((own[0], length), dtype=torch.int32)
            if own[1] == length and available(self.mesh.device):
                spans = DocumentSpans(
                    torch.empty(own[0] * length + 1, dtype=torch.int32), torch.zeros(own[0], 6, dtype=torch.int64)
                )
        pairs = None
        if self.run.train.objective == "dpo":  # a pair in each window
            pairs = Pairs(torch.empty(own, dtype=torch.int64), torch.empty(own[0], 1), own[0] / self.plan.layout.context)
        keys = torch.empty(own, dtype=torch.int32) if self.run.lora.dropout else None
        return MicroBatch(
            tokens, targets, positions, documents, counted=own[0] * own[1], digest=0, spans=spans, pairs=pairs, mask_keys=keys
        )

    def _observe(self) -> None:
        """Let the parts of a step tell the tracker when they begin."""
        sharded, tracker = self.built.sharded, self.tracker
        self.stepper.observer = _StepObserver(tracker, self._waiting)
        if self.pipeline is not None:
            self.pipeline.observer = _ActionObserver(tracker)
        reference = self.built.reference
        for part in [*sharded.parts, *(reference.parts if reference is not None else ())]:
            for module in part.modules():
                if isinstance(module, Experts):
                    module.read_counts = lambda counts_E, rows: _even(rows, len(counts_E))
                if hasattr(module, "work"):  # see `transforms/recompute`
                    module.work = tracker
        spec = self.run.model
        tensor = self.mesh.size("tensor")
        tracker.logits = chunk(spec.rows, self.mesh.coordinate("tensor"), tensor)[1] if tensor > 1 else spec.rows
        tracker.weights = {_local(p).untyped_storage()._cdata for part in sharded.parts for p in part.parameters()}

    def _name_state(self) -> None:
        """Tell the tracker what the allocations that outlive a step are for."""
        sharded, tracker = self.built.sharded, self.tracker
        parameters = [_local(p) for part in sharded.parts for p in part.parameters()]
        frozen = [state.tensor for state in self.built.frozen().values() if isinstance(state.tensor, Tensor)]
        tracker.name([*parameters, *(param.value for param in sharded.owned), *frozen], "parameters")
        gradients = [_local(p.grad) for part in sharded.parts for p in part.parameters() if p.grad is not None]
        tracker.name([*gradients, *(param.gradient for param in sharded.owned)], "gradients")
        states = self.built.optimizer.state().values()
        tracker.name((state for state in states if isinstance(state, Tensor)), "optimizer")
        if self.built.outer is not None:
            tracker.name((p.tensor for p in self.built.outer.tensors().values() if isinstance(p.tensor, Tensor)), "optimizer")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While this context is open, the tracker knows which module runs, in the forward and in the backward."""
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
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._enter_backward, name or "the model's end"))
                break
        self.tracker.where = module._entered_from  # type: ignore[assignment]

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

    def run(self, part: StepPart, function: Callable[..., T], *args: Any, micro_batch: int | None = None) -> T:
        if part in ("forward", "backward"):
            return function(*args)  # the modules tell the tracker themselves
        if part in ("loss", "optimizer"):
            before = self._tracker.enter(part)
            try:
                return function(*args)
            finally:
                self._tracker.where = before
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


@contextlib.contextmanager
def rehearsed_program(
    run: Run, plan: Plan, rank: int, device: RehearsalDevice, sampled: frozenset[int] | None = None
) -> Iterator[tuple[Program, OpTracker]]:
    """Builds the program of one rank. `sampled`: the only layers that it has."""
    layout = replace(plan.layout, data=plan.layout.data or 1)
    run, plan = replace(run, layout=layout), replace(plan, layout=layout)
    gpu = fake_gpu.GPU if device.card else fake_gpu.HOST
    mesh = Mesh(absent_place(rank, layout.ranks), gpu, layout, RehearsedEnvironment())
    tracker = OpTracker(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_process_group(mesh))
        stack.enter_context(lazy_fsdp_chunks())
        stack.enter_context(assumptions(tracker))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if device.card:
            stack.enter_context(fake_gpu.gpu(device.card))
        stack.enter_context(tracker)
        stack.callback(tracker.close)
        program = Program(run, plan, mesh, tracker, sampled)
        stack.enter_context(program.listening())
        yield program, tracker
