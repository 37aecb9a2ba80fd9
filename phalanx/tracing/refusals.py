"""Why a module cannot be traced, or would be traced wrongly, in a sentence that names the cause. Used by `module_graph`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.spec.errors import RunError

_REMEDY = "Train it with layout.tensor = 1; a module of your own may have a table AXES instead (docs/own-model.md)."
_SURROUNDINGS = (
    ("environment variables", ({"environ", "getenv"},)),
    ("the process or the machine that it runs on", ({"getpid", "gethostname", "getnode"},)),
    ("its rank", ({"get_rank", "get_node_local_rank"}, {"dist", "distributed"})),
)
"""What a name in a module's code says that it reads; of each set one name."""
_PLAIN = (bool, int, float, complex, str, bytes, tuple)
_MOST = 4
"""Values that are named, if several differ."""
_RANDOM = {
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "randint",
    "randperm",
    "bernoulli",
    "multinomial",
    "native_dropout",
    "normal",
}


def surroundings(model: nn.Module) -> list[str]:
    """Modules that read, when they are called, what may differ from rank to rank, as far as their code tells."""
    found: dict[tuple[type[nn.Module], str], str] = {}
    for path, module in model.named_modules():
        kind = type(module)
        if not kind.__module__.startswith(("torch.", "transformers.")):
            names = names_read(kind, vars(module).values())
            for what in (what for what, words in _SURROUNDINGS if all(names & alternatives for alternatives in words)):
                found.setdefault((kind, what), path)
    return [
        f"{path or 'the model'} ({kind.__name__}) reads {what} when it is called, so that it may compute something else on another rank. Pass it in "
        "[model.options], or read what is the same everywhere once, when the model is built."
        for (kind, what), path in found.items()
    ]


def names_read(kind: type[nn.Module], values: Iterable[Any] = ()) -> set[str]:
    """Names that the forward of a class reads, with the methods and the functions beside it that it names. `values`: attributes of a module; functions
    among them count too."""
    return set().union(*(_code_names(function.__code__) for function in _functions(kind, values)))


def values_read(model: nn.Module) -> dict[str, str]:
    """Numbers, strings and the like that the forwards of a module's own classes read: attributes, globals, and variables around a function; each by a
    name that says where it is. What a rank has of them must be what all have."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith(("torch.", "transformers.")):
            continue
        functions = list(_functions(kind, vars(module).values()))
        names = set().union(*(_code_names(function.__code__) for function in functions))
        found |= {
            f"{name} of {path or 'the model'}": repr(value)
            for name, value in vars(module).items()
            if name in names and isinstance(value, _PLAIN)
        }
        for function in functions:
            read = {name: function.__globals__.get(name) for name in _code_names(function.__code__)}
            found |= {
                f"the global {name} of {function.__module__}": repr(value)
                for name, value in read.items()
                if isinstance(value, _PLAIN)
            }
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            held = {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
            found |= {
                f"the variable {name} around {function.__qualname__}": repr(value)
                for name, value in held.items()
                if isinstance(value, _PLAIN)
            }
    return found


def differing_values(ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """Sentences on the values of `values_read` in which ranks differ. `ranks`: those of each."""
    return [
        f"{name} is {first} on rank 0, but {other[name]} on rank {rank}, and the forward reads it: set it to the same everywhere, or pass it in "
        "[model.options]."
        for name, first in ranks[0].items()
        for rank, other in list(enumerate(ranks))
        if other.get(name, first) != first
    ][:_MOST]


def _is_set(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _functions(kind: type[nn.Module], values: Iterable[Any] = ()) -> Iterator[FunctionType]:
    """The forward of a class, and the methods and the functions beside it that are named there or in each other."""
    pending: list[Any] = [getattr(kind, "forward", None), *(value for value in values if isinstance(value, FunctionType))]
    seen: set[CodeType] = set()
    while pending:
        function = pending.pop()
        function = inspect.unwrap(function) if callable(function) else function
        function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        yield function
        for name in sorted(_code_names(function.__code__)):
            beside = function.__globals__.get(name)
            pending.append(inspect.getattr_static(kind, name, None))
            if isinstance(beside, FunctionType) and beside.__module__ == function.__module__:
                pending.append(beside)


def _code_names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*(_code_names(each) for each in inner))


def own_functions(result: Any) -> list[str]:
    """Autograd functions of the module's own behind a result: a trace does not show their backward."""
    found: set[str] = set()
    pending: list[Any] = [value.grad_fn for value in _tensors(result)]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        forward = getattr(type(node), "_forward_cls", None)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not _ours(forward):
            found.add(type(node).__name__.removesuffix("Backward"))
        pending += [each for each, _ in node.next_functions]
    return [
        f"the model calls {name}, a torch.autograd.Function of its own, whose backward a trace does not show. {_REMEDY}"
        for name in sorted(found)
    ]


def _ours(kind: Any) -> bool:
    """Functions whose backward is known to be the derivative of their forward."""
    is_operation = getattr(kind, "__name__", "").startswith("GeneratedBackwardFor_phalanx_")
    return is_operation or getattr(kind, "__module__", "").startswith(("phalanx.", "transformers."))


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def random_numbers(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], owner: str) -> str | None:
    """A sentence if an operation draws random numbers."""
    rate = 0.0
    if kind == "dropout" and args[2]:
        rate = args[1]
    elif kind == "scaled_dot_product_attention":
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    if not rate and kind not in _RANDOM:
        return None
    what = f"dropout {rate:g}" if rate else kind
    return (
        f"{owner or 'the model'} draws random numbers ({what}): ranks that divide a layer would draw different ones. "
        "Set the rate to 0, or train with layout.tensor = 1."
    )


def refusal(model: nn.Module, path: str, error: Exception) -> RunError:
    """What stopped the trace, and where."""
    module: Any = dict(model.named_modules()).get(path, model)
    where = f"{path or 'the model'} ({type(module).__name__})"
    text = str(error)
    if isinstance(error, RunError):
        return error
    if "data-dependent" in text.lower() or "DataDependent" in type(error).__name__ or "Could not guard" in text:
        return RunError(f"{where} decides by the values of tensors what it computes, so that it has no one graph. {_REMEDY}")
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    first = re.sub(r"\s+", " ", first)[:200]
    return RunError(f"{where} cannot be traced: {first.rstrip('.')}. {_REMEDY}")
