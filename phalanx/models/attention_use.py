"""Whether context parallelism can take over the attention of a model that was not written for it: every attention must come by its seam, an
attribute `attend`, once per layer, with no more than a causal mask, documents and a window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from phalanx.models import sdpa_seam
from phalanx.models.attention import Scope
from phalanx.models.fake_forward import fake_forward


def context_problem(model: Any) -> str | None:
    """Why the ranks of a context group cannot share the attention of a model; None: they can."""
    return sdpa_seam.context_problem(model) if model.spec.config is None else _behind_interface(model)


def _behind_interface(model: Any) -> str | None:
    """The same, of a model of transformers."""
    layers = model.config.get_text_config().num_hidden_layers
    if len(model.attentions) < layers:
        return f"{len(model.attentions)} of its {layers} layers compute attention by the attention interface of transformers"
    calls: Counter[str] = Counter()
    masked: list[str] = []

    def seen(name: str, q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: Scope, *rest: Any) -> Tensor:
        calls[name] += 1
        if type(scope) is not Scope:
            masked.append(name)
        return q_BHSE.new_empty((*q_BHSE.shape[:-1], v_BKTE.shape[-1]))

    with ExitStack() as stack:
        for name in model.attentions:
            stack.enter_context(_attending(model.get_submodule(name), lambda *args, name=name: seen(name, *args)))
        try:
            fake_forward(model, lambda parameters: nullcontext())
        except Exception as error:  # the model may raise anything
            return f"its forward does not run on tensors without values ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if masked:
        return f"{masked[0]} has a mask of its own, which knows the positions of one rank only"
    if missing := [name for name in model.attentions if calls[name] != 1]:
        how = f"is called {calls[missing[0]]} times in one forward" if calls[missing[0]] else "adds a bias to its scores"
        return f"{missing[0]} {how}"
    return None


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """While entered, every attention that comes by its seam is a plain causal one, of which a graph shows that it is attention, whatever a model
    does with its scores."""
    with ExitStack() as stack:
        for name in getattr(model, "attentions", ()):
            stack.enter_context(_attending(model.get_submodule(name), _plain))
        yield


def _plain(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: Scope, scale: float | None = None, *more: Any) -> Tensor:
    grouped = q_BHSE.shape[1] != k_BKTE.shape[1]
    return F.scaled_dot_product_attention(q_BHSE, k_BKTE, v_BKTE, is_causal=True, scale=scale, enable_gqa=grouped)


@contextmanager
def _attending(module: Any, attend: Any) -> Iterator[None]:
    """Replaces a module's `attend` for a while."""
    before, module.attend = module.attend, attend
    try:
        yield
    finally:
        module.attend = before
