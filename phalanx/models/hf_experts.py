"""Routed experts of the models of transformers, by way of its interface for experts: a grouped matrix product where the device has one, one expert
after the other where it does not. `models/hf_module` registers it.

As in the built-in decoder, the module above a layer of experts has an attribute `dispatch`, local by default, which expert parallelism replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from phalanx.models.hf_attention import NAME
from phalanx.models.moe import ZeroUnusedGradients, compute_dtype


def register() -> None:
    """Adds the function of this file to those that transformers chooses from."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def prepare(model: nn.Module) -> list[str]:
    """Gives the module above each layer of experts its `dispatch`, and experts with biases a `bias_share`: the part of the last bias that is added
    here, where others add the rest. Returns the names of the layers."""
    names = [name for name, module in model.named_modules() if hasattr(module, "has_gate") and hasattr(module, "is_transposed")]
    for name in names:
        above: Any = model.get_submodule(name.rpartition(".")[0])
        above.dispatch = dispatch
        experts: Any = model.get_submodule(name)
        experts.__dict__["above"] = above  # not as a submodule: it would hold itself
        if experts.has_bias and not experts.has_post_expert_norm:
            experts.bias_share = 1.0
    return names


def _experts(experts: Any, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Called as transformers calls such functions."""
    if torch.compiler.is_exporting():  # a graph has no numbers of tokens in it
        from transformers.integrations.moe import batched_mm_experts_forward

        result: Tensor = batched_mm_experts_forward(experts, x_TD, chosen_TK, weights_TK)
        return result
    send: Any = experts.above.dispatch
    sent: Tensor = send(x_TD, chosen_TK, weights_TK, LocalExperts(experts))
    return sent


def dispatch(x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: Callable[..., Tensor], /) -> Tensor:
    """Sends tokens to their experts and adds up the results."""
    active, count = chosen_TK.shape[1], experts.count  # type: ignore[attr-defined]
    chosen_R = chosen_TK.flatten()
    order_R = chosen_R.argsort(stable=True)
    counts_E = torch.zeros(count, dtype=torch.int64, device=x_TD.device)
    counts_E = counts_E.scatter_add_(0, chosen_R, torch.ones_like(chosen_R))
    y_R = experts(x_TD[order_R // active], counts_E)
    back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    y_TKD = y_R[back_R].unflatten(0, (-1, active)) * weights_TK[:, :, None]
    return y_TKD.sum(1).to(y_R.dtype)  # not that of x: norms with fp32 weights return fp32, and so would the residual stream be


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """The experts of a layer that are on this device, called with rows sorted by expert and the number of rows of each."""

    module: Any

    @property
    def count(self) -> int:
        return len(self.module.down_proj)

    def __call__(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        experts = self.module
        first = experts.gate_up_proj if experts.has_gate else experts.up_proj
        grouped = all(_is_groupable(matrix, x_RD) for matrix in (first, experts.down_proj))
        rows = _Rows(counts_E, grouped, experts.is_transposed)
        biases: list[Tensor | None] = [None, None]
        if experts.has_bias:
            biases = [experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias, experts.down_proj_bias]
        y_R = rows.times(x_RD, first, biases[0])
        y_R = experts._apply_gate(y_R) if experts.has_gate else experts.act_fn(y_R)
        if biases[1] is not None and (share := getattr(experts, "bias_share", 1.0)) != 1.0:
            biases[1] = biases[1] * share
        y_R = rows.times(y_R, experts.down_proj, biases[1])
        result: Tensor = experts.post_expert_norm(y_R) if experts.has_post_expert_norm else y_R
        return result


def _is_groupable(matrix: Tensor, x_TD: Tensor) -> bool:
    """Whether the grouped matrix product supports it: rows of a multiple of 16 bytes; bf16 on GPUs, all but fp64 on CPUs."""
    dtype = compute_dtype(x_TD)
    supported = (torch.bfloat16,) if x_TD.device.type == "cuda" else (torch.bfloat16, torch.float16, torch.float32)
    aligned = all(size * dtype.itemsize % 16 == 0 for size in matrix.shape[1:])
    return dtype in supported and aligned and len(x_TD) > 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are sorted by the expert they go to."""

    counts_E: Tensor
    grouped: bool
    is_transposed: bool
    """Whether matrices are [experts, in, out]."""

    def times(self, x_RI: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Each row times the matrix of its expert."""
        x_RI = x_RI.to(compute_dtype(x_RI))
        matrix = matrix.to(x_RI.dtype)
        matrix_EIO = matrix if self.is_transposed else matrix.transpose(1, 2)
        if is_fake(x_RI):  # how many rows an expert gets is unknown there; the products are as many
            y_RO = x_RI @ matrix_EIO[0]
        elif self.grouped:
            if x_RI.device.type == "cuda":
                matrix_EIO = ZeroUnusedGradients.apply(matrix_EIO, self.counts_E)
            y_RO = F.grouped_mm(x_RI, matrix_EIO, offs=self.counts_E.cumsum(0, dtype=torch.int32))
        else:
            parts = zip(x_RI.split(self.counts_E.tolist()), matrix_EIO, strict=True)
            y_RO = torch.cat([part @ one for part, one in parts])
        if bias is None:
            return y_RO
        return y_RO + bias.to(y_RO.dtype).repeat_interleave(self.counts_E, 0, output_size=len(y_RO))
