"""Causal attention within documents on GPUs, without masks. On Hopper, cuDNN's kernel for rows that are one document, which is the fastest; otherwise
torch's flash kernel for sequences of different lengths, which skips what a mask would only hide. Used by `models/attention`.

Which rows are whole, and where documents begin, is known to the host, which packed them (`DocumentSpans.of`): nothing waits for the device, and
compiled code, which takes only shapes that do not change, sees one operation with tensors of fixed sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.kernels.triton_support import operation

_aten = torch.ops.aten

# Shapes: B batch, S sequence, H heads, K key/value heads, E head width.


@dataclass(frozen=True, slots=True)
class DocumentSpans:
    """Where the documents of a batch are."""

    bounds: Tensor
    """[B · S + 1], int32, on the device: the first position of each document in the flattened batch, then its end, up to the last element."""
    runs: Tensor
    """[B, 6], on the host: consecutive rows that are all whole, or all not. See `Run`; the rest is zeros."""

    @staticmethod
    def of(documents_BS: npt.NDArray[np.int32]) -> DocumentSpans:
        """From the number of each position's document in its row. Both tensors are on the host."""
        rows, length = documents_BS.shape
        begins = np.ones((rows, length), dtype=bool)
        begins[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
        flat = np.flatnonzero(begins)
        bounds = np.full(rows * length + 1, rows * length, dtype=np.int32)
        bounds[: len(flat)] = flat
        counts = begins.sum(axis=1)
        lengths = np.diff(bounds[: len(flat) + 1])
        runs = np.zeros((rows, 6), dtype=np.int64)
        edges = [0, *(np.flatnonzero(np.diff(counts == 1)) + 1).tolist(), rows]
        for number, (first, last) in enumerate(pairwise(edges)):
            document, documents = int(counts[:first].sum()), int(counts[first:last].sum())
            longest = int(lengths[document : document + documents].max())
            runs[number] = (first, last - first, documents == last - first, document, documents, longest)
        return DocumentSpans(torch.from_numpy(bounds), torch.from_numpy(runs))

    @property
    def documents(self) -> int:
        return int(self.runs[:, 4].sum())

    def padded(self, documents: int, length: int) -> DocumentSpans:
        """The same documents, followed by empty ones up to this number: nothing that the host knows depends on the batch. A little slower."""
        rows = len(self.runs)
        runs = torch.zeros_like(self.runs)
        runs[0] = torch.tensor(Run(row=0, rows=rows, whole=0, document=0, documents=documents, longest=length))
        return replace(self, runs=runs)


class Run(NamedTuple):
    """Rows `row` … `row + rows - 1`, with documents `document` … `document + documents - 1` of the batch."""

    row: int
    rows: int
    whole: int
    """Every row is one document."""
    document: int
    documents: int
    longest: int


def available(device: torch.device) -> bool:
    """Whether the GPU has the kernels."""
    return accelerator.of(device).capability(device) >= (8, 0)


def runs_of(runs: Tensor) -> Iterator[Run]:
    for numbers in runs.tolist():
        if numbers[1]:
            yield Run(*numbers)


@operation("document_attention", mutates=())
def document_attention(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, bounds: Tensor, runs: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The result, [B, S, H, E], and the logarithms of the sums of exponentials, in the layout of each run's kernel."""
    rows, length, heads, _ = q_BSHE.shape
    outs, sums, hopper = [], [], _is_hopper(q_BSHE)
    for run in runs_of(runs):
        q, k, v = (x[run.row : run.row + run.rows] for x in (q_BSHE, k_BSKE, v_BSKE))
        if run.whole and hopper:
            result = _aten._scaled_dot_product_cudnn_attention(*_by_head(q, k, v), None, True, 0.0, True, False, scale=scale)
            outs.append(result[0].transpose(1, 2))
        else:
            edges, longest = _edges(bounds, run, length), run.longest
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            result = _aten._flash_attention_forward(q, k, v, edges, edges, longest, longest, 0.0, True, False, scale=scale)
            outs.append(result[0].unflatten(0, (run.rows, length)))
        sums.append(result[1].reshape(-1))
    return _joined(outs), _joined(sums).view(rows, heads, length)


@document_attention.register_fake
def _(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, bounds: Tensor, runs: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rows, length, heads, _ = q_BSHE.shape
    out = torch.empty_like(q_BSHE, memory_format=torch.contiguous_format)
    return out, q_BSHE.new_empty((rows, heads, length), dtype=torch.float32)


@operation("document_attention_backward", mutates=())
def document_attention_backward(
    gradient_BSHE: Tensor,
    q_BSHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    out_BSHE: Tensor,
    sums: Tensor,
    bounds: Tensor,
    runs: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    length, heads = q_BSHE.shape[1:3]
    seed = torch.zeros((), dtype=torch.int64, device=q_BSHE.device)  # of dropout, which there is none of
    found, hopper = list[list[Tensor]](), _is_hopper(q_BSHE)
    for run in runs_of(runs):
        tensors = (gradient_BSHE, q_BSHE, k_BSKE, v_BSKE, out_BSHE, sums)
        *inputs, own = (x[run.row : run.row + run.rows] for x in tensors)
        if run.whole and hopper:
            results = _aten._scaled_dot_product_cudnn_attention_backward(
                *_by_head(*inputs), own[..., None], seed, seed, None, None, None, length, length, 0.0, True, scale=scale
            )
            found.append([result.transpose(1, 2) for result in results])
        else:
            edges, longest = _edges(bounds, run, length), run.longest
            flat = [x.flatten(0, 1).contiguous() for x in inputs]
            results = _aten._flash_attention_backward(
                *flat, own.reshape(heads, -1), edges, edges, longest, longest, 0.0, True, seed, seed, scale=scale
            )
            found.append([result.unflatten(0, (run.rows, length)) for result in results])
    q, k, v = (_joined(list(pieces)) for pieces in zip(*found, strict=True))
    return q, k, v


@document_attention_backward.register_fake
def _(gradient_BSHE, q_BSHE, k_BSKE, v_BSKE, out_BSHE, sums, bounds, runs, scale):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSHE, k_BSKE, v_BSKE))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient_BSHE: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bounds, runs, out, sums = ctx.saved_tensors
    return *document_attention_backward(gradient_BSHE, q, k, v, out, sums, bounds, runs, ctx.scale), None, None, None


document_attention.register_autograd(_backward, setup_context=_save)

FORWARD, BACKWARD = torch.ops.phalanx.document_attention, torch.ops.phalanx.document_attention_backward
"""As torch's dispatcher knows them."""


def _is_hopper(tensor: Tensor) -> bool:
    return accelerator.of(tensor.device).capability(tensor.device) >= (9, 0)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def _by_head(*tensors: Tensor) -> list[Tensor]:
    """[B, H, S, E], the same memory."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def _edges(bounds: Tensor, run: Run, length: int) -> Tensor:
    """The bounds of a run's documents, counted from its first row."""
    edges = bounds[run.document : run.document + run.documents + 1]
    return edges - run.row * length if run.row else edges
