"""What the XLA engine puts at the seams of a model that was not written for it, a module of the user's or one of transformers, before it is traced. The
compiler may divide any program without changing its result: the seams only say where the residual stream lies, and keep what a trace would lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax.sharding import Mesh
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from phalanx.models import sdpa_seam
from phalanx.models.custom import axes_of
from phalanx.models.hf_attention import MaskedScope
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Memory
from phalanx.xla.block_loop import POLICIES
from phalanx.xla.bridge import call_jax, call_traced
from phalanx.xla.device_mesh import POSITIONS, SAMPLES, mesh_size, sharding
from phalanx.xla.fused_attention import Devices
from phalanx.xla.model_seams import Constrain, attend_in_jax, attention_devices

_CAP = 2
"""Of what attention is called with besides queries, keys, values and their scope: scale and soft cap."""
_TORCH = 'or set engine.name = "torch"'


def refuse_unknown(module: nn.Module, memory: Memory) -> None:
    """Raises RunError for what the engine does not compute of a model, by name."""
    key = _spec(module).custom_key
    problems = [f"{key}: {problem}, {_TORCH}." for problem in _problems(module, memory)]
    if problems:
        raise RunError(problems)


def _problems(module: Any, memory: Memory) -> Iterator[str]:
    experts = [name for name, dims in axes_of(module).items() if "expert" in dims]
    if experts:
        yield f'{experts[0]} is of experts, which engine.name = "xla" computes of the built-in decoder only: use model.moe'
    for name, part in module.named_modules():
        rate = getattr(part, "p", 0.0) if isinstance(part, nn.modules.dropout._DropoutNd) else 0.0
        if rate and part.training:
            yield f'{name} is a dropout of {rate:g}, but a program of engine.name = "xla" draws no random numbers: set it to 0'
    if memory.loss_chunk:
        yield f"memory.loss_chunk = {memory.loss_chunk} needs the head of the built-in decoder: remove it"
    if memory.recomputes and module.layers_path is None:
        yield f'memory.recompute = "{memory.recompute}" needs a list of layers, which it has not: remove memory.recompute'


def install_own(module: Any, mesh: Mesh, memory: Memory, layout: Layout, platform: str) -> None:
    """Fills the seams of a model on the meta device. `platform`: whose kernels compute."""
    stream = sharding(mesh, SAMPLES, POSITIONS if layout.sequence else "context", None)
    keep: Constrain = lambda x_BSD: jax.lax.with_sharding_constraint(x_BSD, stream)  # noqa: E731
    # Positions in their order: nothing says that such a model computes the same in another one.
    devices = attention_devices(mesh, layout, platform, zigzag=False)
    for name in getattr(module, "attentions", ()):
        module.get_submodule(name).attend = partial(_attend, devices, name)
    if _spec(module).module is not None and sdpa_seam.context_problem(module) is None:
        sdpa_seam.install(module, partial(attend_in_jax, devices))
    path = module.layers_path
    for index, layer in enumerate(() if path is None else module.get_submodule(path).children()):
        if memory.recomputes and index % memory.recompute_every == 0:
            layer.forward = partial(_recomputed, layer.forward, POLICIES[memory.recompute])
        layer.register_forward_hook(partial(_keep_stream, keep))
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.forward = partial(_with_look_ups, part.forward, part.padding_idx, mesh, keep)  # type: ignore[method-assign]
    module.forward = partial(_without_chance, _spec(module).custom_key, module.forward)


def _spec(module: nn.Module) -> ModelSpec:
    assert isinstance(module.spec, ModelSpec), "`models/init` sets the spec"
    return module.spec


def _attend(devices: Devices, name: str, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    """`models.attention.Attend` of one module. `given`: the scope, scale, cap and sinks."""
    scope, *more = given
    if len(more) > _CAP or isinstance(scope, MaskedScope):
        what = "sinks" if len(more) > _CAP else "a mask of its own"
        raise RunError(f'{name} attends with {what}, which engine.name = "xla" does not compute: use another model, {_TORCH}.')
    return attend_in_jax(devices, q, k, v, scope, *more)


def _keep_stream(keep: Constrain, layer: nn.Module, given: Any, result: Any) -> Any:
    """The states that a layer returns, alone or in front of others, at their place."""
    if isinstance(result, tuple):
        return (_keep_stream(keep, layer, given, result[0]), *result[1:])
    return call_jax(keep, result) if isinstance(result, Tensor) and result.ndim == 3 else result


def _recomputed(forward: Callable[..., Any], policy: Callable[..., bool], x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """A layer whose backward computes it again, except for what the policy stores."""

    def run(states: jax.Array) -> jax.Array:
        return call_traced(partial(forward, **named), states, *rest)

    out: Tensor = call_jax(jax.checkpoint(run, policy=policy), x)
    return out


def _with_look_ups(
    forward: Callable[..., Tensor], padding: int | None, mesh: Mesh, keep: Constrain, *args: Any, **named: Any
) -> Tensor:
    with _LookUps(padding, mesh, keep):
        return forward(*args, **named)


class _LookUps(TorchFunctionMode):
    """Looks up rows of a divided table as `model_seams._look_up` does. The row of padding has no gradient."""

    def __init__(self, padding: int | None, mesh: Mesh, keep: Constrain):
        super().__init__()
        self._padding, self._mesh, self._keep = padding, mesh, keep

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        tokens, table, padding = args[0], args[1], self._padding
        rows = "tensor" if table.shape[0] % mesh_size(self._mesh, "tensor") == 0 else None
        gathered = sharding(self._mesh, rows, None)

        def run(table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
            found = jnp.take(jax.lax.with_sharding_constraint(table_VD, gathered), tokens_BS, axis=0)
            if padding is not None:
                found = jnp.where((tokens_BS == padding)[..., None], jax.lax.stop_gradient(found), found)
            return self._keep(found) if found.ndim == 3 else found

        return call_jax(run, table, tokens)


def _without_chance(key: str, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    with _NoChance(key):
        return forward(*args, **named)


_DROPS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
_DRAWS = (
    torch.rand,
    torch.randn,
    torch.rand_like,
    torch.randn_like,
    torch.randint,
    torch.randperm,
    torch.bernoulli,
    torch.multinomial,
)


class _NoChance(TorchFunctionMode):
    """Refuses what draws random numbers: in a compiled program they would be the same in every step."""

    def __init__(self, key: str):
        super().__init__()
        self._key = key

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        rate = named.get("dropout_p", 0.0) if func is F.scaled_dot_product_attention else 0.0
        if func in _DROPS:
            on = named.get("training", args[2] if len(args) > 2 else True)
            rate = (named.get("p", args[1] if len(args) > 1 else 0.5)) if on else 0.0
        if func in _DRAWS or rate:
            name = getattr(func, "__name__", str(func))
            raise RunFailed(
                f'{self._key} calls {name} in its forward, but a program of engine.name = "xla" draws no random numbers: remove it, {_TORCH}.'
            )
        return func(*args, **named)


def buffer_values(module: nn.Module) -> Mapping[str, np.ndarray]:
    """What the buffers of a model hold before the first step, by name: those that checkpoints do not hold are constants of the program."""
    values = {}
    for prefix, part in module.named_modules():
        own = dict(part.named_buffers(recurse=False))
        if not own:
            continue
        for name, buffer in own.items():
            part._buffers[name] = torch.zeros_like(buffer, device="cpu")
        part.reset_buffers()
        for name, buffer in own.items():
            held = part._buffers[name]
            assert held is not None
            values[f"{prefix}.{name}" if prefix else name] = held.detach().numpy()
            part._buffers[name] = buffer
    return values
