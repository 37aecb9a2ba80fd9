"""Caches the results of torch's operations on fake tensors by the shapes of their arguments: a program of many equal blocks and
micro-batches repeats the same operations, and torch's own fake tensors take most of the time of a rehearsal. `rehearsal/op_tracker`
calls it.

A result is cached only if it can be reproduced exactly: new tensors that share no memory, views of an argument, or an argument itself.
All other operations run in torch every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_UNSURE = (torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_HOST = torch.device("cpu")

Answer = Callable[[tuple[Any, ...]], Any]
"""From the arguments of an operation to its result; None: these arguments need torch."""
Geometry = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""


class FakeCache:
    """The cached results of one rehearsal."""

    def __init__(self) -> None:
        self._answers: dict[Any, Answer | None] = {}
        """None: the operation always runs in torch."""
        self._off = False

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = None if self._off else _signature(func, args, kwargs)
        if signature is None:
            return func(*args, **kwargs)
        key = signature[0]
        answer = self._answers.get(key)
        if answer is not None and (result := answer(args)) is not None:
            return result
        result = func(*args, **kwargs)
        if key not in self._answers:
            # The key does not describe operations that change shapes or memory of their arguments.
            sure = func.namespace == "aten" and not any(tag in func.tags for tag in _UNSURE)
            sure = sure and _signature(func, args, kwargs) == signature
            self._answers[key] = self._answer(args, result) if sure else None
        return result

    def _answer(self, args: tuple[Any, ...], result: Any) -> Answer | None:
        given, made = list(_tensors(args)), list(_tensors((result,)))
        if any(tensor.is_complex() or tensor.is_neg() for tensor in (*given, *made)):
            # The key does not contain pending conjugations and negations, which views inherit.
            self._off = True
            return None
        if not made or any(type(tensor) is not FakeTensor for tensor in made):
            return None
        if type(result) is FakeTensor:
            return _tensor_answer(args, result)
        if type(result) not in (tuple, list):
            return None
        known = {_memory(tensor) for tensor in given}
        fresh = [memory for memory in map(_memory, made) if memory not in known]
        if len(set(fresh)) < len(fresh):
            return None  # new tensors that share memory
        each = [
            _nothing if item is None else _tensor_answer(args, item) if type(item) is FakeTensor else None for item in result
        ]
        answers = [answer for answer in each if answer is not None]
        return _several(type(result), answers) if len(answers) == len(each) else None


def _tensor_answer(args: tuple[Any, ...], result: FakeTensor) -> Answer | None:
    if result.fake_device != _HOST or result.constant is not None:
        return None
    memory = _memory(result)
    holders = [tensor for tensor in _tensors(args) if _memory(tensor) == memory]
    geometry = tuple(result.shape), result.stride(), result.dtype
    if holders:
        index = next((index for index, arg in enumerate(args) if arg is holders[0]), None)
        if len(holders) > 1 or index is None:
            return None  # it is unclear which argument it is a view of
        return _given(index) if holders[0] is result else _view(index, result, geometry)
    if result.storage_offset() or result.untyped_storage().nbytes() != _reach(0, geometry):
        return None
    return _new(result, geometry)


def _new(like: FakeTensor, geometry: Geometry) -> Answer:
    """A new tensor."""
    mode, (shape, stride, dtype) = like.fake_mode, geometry

    def answer(given: tuple[Any, ...]) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), _HOST)

    return answer


def _view(index: int, like: FakeTensor, geometry: Geometry) -> Answer:
    """A view of an argument."""
    mode, offset, (shape, stride, dtype) = like.fake_mode, int(like.storage_offset()), geometry
    reach = _reach(offset, geometry)

    def answer(given: tuple[Any, ...]) -> FakeTensor | None:
        storage = given[index].untyped_storage()
        if storage.nbytes() < reach:
            return None  # the storage is freed for now, and a view made here would resize it
        with torch._C._DisableTorchDispatch():
            bare = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, stride)
            return FakeTensor(mode, bare, _HOST)

    return answer


def _nothing(given: tuple[Any, ...]) -> None:
    return None


def _given(index: int) -> Answer:
    return lambda given: given[index]


def _several(kind: type, answers: list[Answer]) -> Answer:
    def answer(given: tuple[Any, ...]) -> Any:
        results = [each(given) for each in answers]
        missing = any(result is None and each is not _nothing for result, each in zip(results, answers, strict=True))
        return None if missing else kind(results)

    return answer


def _signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[int]] | None:
    """Everything that determines the result of an operation except values, and the storages of its arguments; None: it cannot be cached."""
    key: list[Any] = [func, torch.get_default_dtype()]
    places: list[int] = []
    if not _add(args, key, places):
        return None
    for name, value in kwargs.items():
        if type(value) not in _PLAIN:
            return None  # for example an output tensor
        key += (name, type(value), value)
    if len(places) > 1 and len(set(places)) < len(places):
        key.append(tuple(map(places.index, places)))  # which arguments share memory
    return tuple(key), places


def _add(values: Iterable[Any], key: list[Any], places: list[int]) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.fake_device != _HOST:
                return False
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype)
            places.append(value.untyped_storage()._cdata)
        elif kind in _PLAIN:
            key += (kind, value)  # 1, 1.0 and True are equal but give different results
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _add(value, key, places):
                return False
        else:
            return False
    return True


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _reach(offset: int, geometry: Geometry) -> int:
    """Bytes from the beginning of the storage to the last element."""
    shape, stride, dtype = geometry
    if 0 in shape:
        return 0
    return (offset + 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))) * dtype.itemsize
