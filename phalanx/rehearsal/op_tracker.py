"""Tracks every operation of a rehearsed program: memory by storage, messages, which are recorded instead of sent, floating-point
operations, and values that fake tensors do not have. `rehearsal/rehearsed_rank` enters it inside torch's own fake mode.

Modules tell the tracker when they are entered and left. Hooks on their outputs do the same in the backward. So every allocation has a
place in the program.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.observe.counters import flops_of, traffic
from phalanx.rehearsal import fake_gpu
from phalanx.rehearsal.fake_cache import FakeCache
from phalanx.rehearsal.fake_gpu import RehearsalDevice, workspace_bytes
from phalanx.rehearsal.ledger import Ledger, ProgramLocation
from phalanx.rehearsal.result import Message

_aten = torch.ops.aten
_GROUPED = _aten._grouped_mm.default
_DEVICE = torch.ops.prim.device.default
_PLAIN = (Tensor, FakeTensor, nn.Parameter, nn.Buffer)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_COMPUTING = ("forward", "loss", "backward", "recompute")
_SHARING = ("backward", "reduce", "update", "step", "optimizer")
_NOTHING_NEW = frozenset(
    {"_fused_adamw_", "_foreach_copy_", "_foreach_add_", "_foreach_sub_", "_foreach_mul_", "_foreach_div_"}
)
"""Operations on lists of tensors that change them in place and allocate nothing."""


class _Ref(weakref.ref):
    """A weak reference to a storage, with its allocation."""

    __slots__ = ("key", "ledger", "number")
    key: int
    number: int
    ledger: Ledger


class OpTracker(TorchDispatchMode):
    """Tracks every operation inside its context."""

    def __init__(self, device: RehearsalDevice):
        super().__init__()
        self._device, self._card = device, device.card
        self.messages: list[Message] = []
        self._groups: dict[dist.ProcessGroup, tuple[int, str]] = {}
        """Number of ranks, and the links between them."""
        self.device = Ledger()
        self.host = Ledger() if self._card else self.device  # a CPU is its own host
        self.flops: Counter[ProgramLocation] = Counter()
        self.repeated: Counter[str] = Counter()
        """Floating-point operations of recomputed forwards, by action."""
        self._again = 0
        self._threads: set[bool] = set()
        self.where = ProgramLocation("build", "", "")
        self.logits = -1
        """Width of this rank's logits."""
        self.weights: set[int] = set()
        """Storages of parameters."""
        self._refs: dict[int, _Ref] = {}
        self._cache = FakeCache()
        done = torch.futures.Future()  # type: ignore[var-annotated]
        done.set_result([])
        distributed: Any = torch._C._distributed_c10d
        self._work = distributed._create_work_from_future(done).boxed()
        self._resize: Callable[[Any, int], Any] = torch.UntypedStorage.resize_

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return fake_gpu.HOST  # torch's C++ code asks very often
        for kind in types:
            if kind not in _PLAIN:
                return NotImplemented
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            return self._collective(func, args)
        if func is _aten._local_scalar_dense.default:
            return _zero(args[0])
        name = func.overloadpacket.__name__
        if name in _NOTHING_NEW:
            return None
        if FakeTensor not in types and _unplaced(args, kwargs):
            with unset_fake_temporarily():  # tensors without memory in the real program too stay as they are
                return func(*args, **kwargs)
        on_gpu, kwargs = self._place(args, kwargs)
        inside, fake_gpu.STATE.inside = fake_gpu.STATE.inside, True
        try:
            result = _grouped(*args, **kwargs) if func is _GROUPED else self._cache(func, args, kwargs)
        finally:
            fake_gpu.STATE.inside = inside
        for tensor in (result,) if type(result) is FakeTensor else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._record(tensor, on_gpu, name, args)
        if on_gpu and self._card and (size := workspace_bytes(func, args, self._card.processors)):
            self.device.drop(self.device.add(size, self.where, f"inside {name}"), self.where)
        if flops := flops_of(func, args, kwargs, result):
            self.flops[self.where] += flops
            self.repeated[self.where.action] += flops if self.again else 0
            # cuBLAS allocates a workspace at the first matrix product of each thread: the program's, and autograd's.
            thread = torch._C._current_graph_task_id() != -1
            if on_gpu and self._card and thread not in self._threads:
                self._threads.add(thread)
                number = self.device.add(self._card.workspace, self.where, "cuBLAS")
                self.device.components[number] = "workspaces"
        return result

    def _place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Whether the result is on the GPU, and the arguments for torch's C++ code."""
        if self._card is None:
            return False, kwargs
        device = kwargs.get("device")
        if kwargs.get("pin_memory"):
            return False, kwargs | {"pin_memory": False}
        if device is not None:
            if device.type == "cuda":
                return True, kwargs | {"device": fake_gpu.HOST}
            if device.type == "cpu":
                # Inside the model it comes from torch's C++ code, which sees GPU tensors as CPU tensors.
                return self.where.phase in _COMPUTING or torch._C._current_graph_task_id() != -1, kwargs
        for arg in args:
            for item in arg if isinstance(arg, (list, tuple)) else (arg,):
                if getattr(item, "_on_gpu", False):
                    return True, kwargs
        return False, kwargs

    def _record(self, tensor: Tensor, on_gpu: bool, name: str, args: tuple[Any, ...]) -> None:
        if on_gpu:
            tensor._on_gpu = True  # type: ignore[attr-defined]
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._refs:
            return
        ledger = self.device if on_gpu or self._card is None else self.host
        number = ledger.add(storage.nbytes(), self.where, name, fake_gpu.STATE.stream)
        ref = _Ref(storage, self._freed)
        ref.key, ref.number, ref.ledger = key, number, ledger
        self._refs[key] = ref
        if self.where.phase == "build":
            return
        if tensor.ndim and tensor.shape[-1] == self.logits and tensor.numel() > self.logits:
            ledger.components[number] = "logits and loss"
        elif name == "_to_copy" and args[0].untyped_storage()._cdata in self.weights:
            ledger.components[number] = "weights in compute format"

    def _freed(self, ref: Any) -> None:
        if self._refs.pop(ref.key, None) is not None and ref.number:
            ref.ledger.drop(ref.number, self.where)

    def _collective(self, func: Any, args: tuple[Any, ...]) -> Any:
        if func.namespace != "c10d":
            raise NotImplementedError(f"{func} is a collective that rehearsals do not support")
        if (counted := traffic(func.overloadpacket.__name__, args)) is not None:
            collective, use, group, size = counted
            if group not in self._groups:
                ranks = dist.get_process_group_ranks(group)
                self._groups[group] = len(ranks), self._device.tier(ranks)
            self.messages.append(Message(collective, use, *self._groups[group], size, self.where.phase, self.where.action))
        for ref in self._refs_of(tree_leaves(args)):
            if ref.ledger.origins[ref.number].phase in _SHARING:
                ref.ledger.components.setdefault(ref.number, "communication")
        return self._work if len(func._schema.returns) == 1 else (args[0], self._work)

    def _refs_of(self, values: Iterable[Any]) -> Iterator[_Ref]:
        for value in values:
            if isinstance(value, Tensor) and (ref := self._refs.get(value.untyped_storage()._cdata)) is not None:
                yield ref

    # What the program says about itself.

    def name(self, tensors: Iterable[Tensor | None], component: str) -> None:
        """Set the component of the tensors' allocations."""
        for ref in self._refs_of(tensors):
            ref.ledger.components[ref.number] = component

    @property
    def again(self) -> int:
        """Number of recomputed forwards in progress; blocks that recompute change it, see `transforms/recompute`."""
        return self._again

    @again.setter
    def again(self, count: int) -> None:
        self._again = count
        self.enter("recompute" if count else "backward", self.where.module)

    def enter(self, phase: str, module: str = "", action: str | None = None) -> ProgramLocation:
        """Set the current place in the program; returns the previous one."""
        before, self.where = self.where, ProgramLocation(phase, module, self.where.action if action is None else action)
        return before

    def resize(self, storage: Any, size: int) -> Any:
        """In place of `UntypedStorage.resize_`, with which FSDP2 allocates and frees gathered parameters."""
        result = self._resize(storage, size)
        if (ref := self._refs.get(storage._cdata)) is not None:
            if ref.number:
                ref.ledger.drop(ref.number, self.where)
            ref.number = 0
            if size:
                ref.number = ref.ledger.add(int(size), self.where, "gather", fake_gpu.STATE.stream)
                ref.ledger.components[ref.number] = "gathered parameters"
        return result

    def close(self) -> None:
        """Stop tracking."""
        self._refs.clear()


def _grouped(first: Tensor, second: Tensor, ends: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The result of a grouped matrix product by shape: torch's fake implementation accepts fewer dtypes and alignments than CPUs do."""
    if first.ndim == second.ndim:
        groups = first.shape[0] if first.ndim == 3 or ends is None else ends.shape[0]
        return torch.empty((groups, first.shape[-2], second.shape[-1]), dtype=first.dtype)
    return torch.empty((first.shape[-2], second.shape[-1]), dtype=first.dtype)


def _unplaced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation creates tensors on torch's meta device, where models are built."""
    device = kwargs.get("device")
    if device is not None:
        return bool(device.type == "meta")
    return any(isinstance(arg, Tensor) and arg.is_meta for arg in tree_leaves(args))


def _zero(tensor: Tensor) -> bool | int | float:
    """The assumed value of a scalar that the program reads: conditions are true, and numbers, such as stop requests, are zero."""
    if tensor.dtype == torch.bool:
        return True
    return 0.0 if tensor.is_floating_point() else 0
