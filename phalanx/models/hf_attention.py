"""Attention of the models of transformers, by way of its interfaces for attention and masks: each attention module has an attribute `attend`,
local by default, as those of the built-in decoder have. `models/hf_module` registers it; nothing in transformers is replaced."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.kernels.document_attention import DocumentSpans
from phalanx.models.attention import Scope, attend_locally

NAME = "phalanx"
"""Under which the functions of this file and of `models/hf_experts` are registered."""
_documents: ContextVar[tuple[Tensor | None, DocumentSpans | None]] = ContextVar("_documents", default=(None, None))


class MaskedScope(Scope):
    """A scope of which only the mask is known: a sliding window, chunks, or whatever a model makes of its own."""

    def __init__(self, documents_BS: Tensor | None, mask: Tensor):
        super().__init__(documents_BS)
        self._mask = mask

    def mask(self, length: int, device: torch.device) -> Tensor | None:
        return self._mask


@contextmanager
def documents(documents_BS: Tensor | None, spans: DocumentSpans | None) -> Iterator[None]:
    """Sets the documents of one forward. transformers creates masks at its beginning and hands them to its layers: a recomputed layer
    gets the scope of its own forward, whatever is set here by then."""
    token = _documents.set((documents_BS, spans))
    try:
        yield
    finally:
        _documents.reset(token)


def register() -> None:
    """Adds the functions of this file to those that transformers chooses from."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _scope)


def prepare(model: nn.Module) -> list[str]:
    """Gives every module that computes attention by the interface its `attend`. Returns their names; none if one of them computes with its mask,
    which is no tensor here."""
    kinds: dict[str, Any] = {name: module.__class__ for name, module in model.named_modules()}
    names = [name for name, kind in kinds.items() if _asks_interface(kind)]
    if any(_computes_with_mask(kind) for kind in {kinds[name] for name in names}):
        return []
    for name in names:
        model.get_submodule(name).attend = attend_locally  # type: ignore[assignment]  # torch's types allow tensors and modules only
    return names


@lru_cache
def _asks_interface(kind: type[nn.Module]) -> bool:
    """Whether a class computes attention by the interface. Its source says so: a trial would need values where a model looks at them."""
    if kind.__module__.partition(".")[0] != "transformers":
        return False
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def _computes_with_mask(kind: type[nn.Module]) -> bool:
    """Whether a class looks into its mask, to choose among keys or to change their scores, rather than only hand it on."""
    return re.search(r"\battention_mask(\[|\.\w)", inspect.getsource(kind)) is not None


def _scope(*, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **rest: Any) -> Scope:
    """What transformers hands to its layers as their mask."""
    from transformers.masking_utils import sdpa_mask

    documents_BS, spans = _documents.get()
    window: int | None = rest.get("local_size")
    kinds = _mask_kinds(mask_function) if q_length == kv_length and not rest.get("use_vmap") else {"other"}
    if kinds <= {"causal", "window"}:
        return Scope(documents_BS, spans, window if "window" in kinds else None)
    if kinds <= {"causal", "chunks"} and window is not None and window >= q_length and documents_BS is None:
        return Scope(None)
    options = {name: rest[name] for name in ("q_offset", "kv_offset", "use_vmap", "device") if name in rest}
    mask: Any = sdpa_mask(batch_size, q_length, kv_length, mask_function=mask_function, allow_is_causal_skip=False, **options)
    if documents_BS is not None:
        mask = mask & (documents_BS[:, :, None] == documents_BS[:, None, :])[:, None]
    return MaskedScope(documents_BS, mask)


def _mask_kinds(function: Callable[..., Any]) -> set[str]:
    """What a mask function consists of. transformers also finds documents, in positions that begin again; here they are an input. A function that
    is not recognized has an explicit mask, which is slower but as right."""
    name = getattr(function, "__qualname__", "").partition(".")[0]
    if name == "and_masks":
        return set().union(*(_mask_kinds(part) for part in inspect.getclosurevars(function).nonlocals["mask_functions"]))
    return {_MASKS.get(name, "other")}


_MASKS = {
    "causal_mask_function": "causal",
    "packed_sequence_mask_function": "causal",
    "sliding_window_overlay": "window",
    "chunked_overlay": "chunks",
}


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Scope, **options: Any
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it. The window is in the mask already."""
    scale: float | None = options.get("scaling")
    if options.get("position_bias") is None:
        attend: Any = getattr(module, "attend", attend_locally)
        cap, sinks_H = options.get("softcap"), options.get("s_aux")
        more = (cap, sinks_H) if sinks_H is not None else () if cap is None else (cap,)
        out_BHSE = attend(query, key, value, attention_mask, scale, *more)
    else:
        out_BHSE = _attend_by_scores(query, key, value, attention_mask, scale, options)
    return out_BHSE.transpose(1, 2).contiguous(), None


def _attend_by_scores(
    q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: Scope, scale: float | None, options: Mapping[str, Any]
) -> Tensor:
    """Attention with a bias of its scores, which the fused kernels do not have, and whatever else a model gives to it."""
    softcap, sinks_H, bias = (options.get(name) for name in ("softcap", "s_aux", "position_bias"))
    groups = q_BHSE.shape[1] // k_BKTE.shape[1]
    k_BHTE, v_BHTE = (x.repeat_interleave(groups, 1) for x in (k_BKTE, v_BKTE))
    scores_BHST = q_BHSE @ k_BHTE.mT * (q_BHSE.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores_BHST = softcap * torch.tanh(scores_BHST / softcap)
    if bias is not None:
        scores_BHST = scores_BHST + bias
    length = q_BHSE.shape[2]
    mask = scope.mask(length, q_BHSE.device)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q_BHSE.device).tril()
    scores_BHST = scores_BHST.float().masked_fill(~mask, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, -1, 1, 1).expand(*scores_BHST.shape[:3], 1)
        scores_BHST = torch.cat((scores_BHST, sinks), dim=-1)
    weights_BHST = scores_BHST.softmax(-1)[..., : k_BHTE.shape[2]]
    return weights_BHST.to(v_BHTE.dtype) @ v_BHTE
