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
from phalanx.kernels.sink_attention import sink_gradient, with_sinks
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
    q_BSHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    bounds: Tensor,
    runs: Tensor,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The result, [B, S, H, E], and the logarithms of the sums of exponentials, in the layout of each run's kernel. `window`: the most keys that
    a query attends to, its own and those just before it. `sinks_H`: scores that no key has (`kernels/sink_attention`)."""
    rows, length, heads, _ = q_BSHE.shape
    outs, sums, hopper, windowed = list[Tensor](), list[Tensor](), _is_hopper(q_BSHE), _windowed(window, length)
    for run in runs_of(runs):
        q, k, v = (x[run.row : run.row + run.rows] for x in (q_BSHE, k_BSKE, v_BSKE))
        if run.whole and hopper and not windowed:
            result = _aten._scaled_dot_product_cudnn_attention(*_by_head(q, k, v), None, True, 0.0, True, False, scale=scale)
            out, by_head = result[0].transpose(1, 2), False
        else:
            edges, longest = _edges(bounds, run, length), run.longest
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            result = _aten._flash_attention_forward(
                q, k, v, edges, edges, longest, longest, 0.0, True, False, scale=scale, **windowed
            )
            out, by_head = result[0].unflatten(0, (run.rows, length)), True
        own = result[1].reshape(-1)
        if sinks_H is not None:
            own_BHS, factor_BHS = with_sinks(_by_row(own, run, heads, by_head), sinks_H)
            out = (out * factor_BHS.transpose(1, 2)[..., None]).to(out.dtype)
            own = (own_BHS.transpose(0, 1) if by_head else own_BHS).reshape(-1)
        outs.append(out)
        sums.append(own)
    return _joined(outs), _joined(sums).view(rows, heads, length)


@document_attention.register_fake
def _(q_BSHE, k_BSKE, v_BSKE, bounds, runs, scale, window=None, sinks_H=None):  # type: ignore[no-untyped-def]
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
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values and sinks; the last without elements if there are none."""
    length, heads = q_BSHE.shape[1:3]
    seed = torch.zeros((), dtype=torch.int64, device=q_BSHE.device)  # of dropout, which there is none of
    found, hopper, windowed = list[list[Tensor]](), _is_hopper(q_BSHE), _windowed(window, length)
    dsinks = torch.zeros(heads if sinks_H is not None else 0, dtype=torch.float32, device=q_BSHE.device)
    for run in runs_of(runs):
        tensors = (gradient_BSHE, q_BSHE, k_BSKE, v_BSKE, out_BSHE, sums)
        *inputs, own = (x[run.row : run.row + run.rows] for x in tensors)
        by_head = not (run.whole and hopper and not windowed)
        if sinks_H is not None:
            own_BHS = _by_row(own.reshape(-1), run, heads, by_head)
            of_out, out = _by_head(inputs[0], inputs[4])
            dsinks += sink_gradient(of_out, out, own_BHS, sinks_H.float())
        if not by_head:
            results = _aten._scaled_dot_product_cudnn_attention_backward(
                *_by_head(*inputs), own[..., None], seed, seed, None, None, None, length, length, 0.0, True, scale=scale
            )
            found.append([result.transpose(1, 2) for result in results])
        else:
            edges, longest = _edges(bounds, run, length), run.longest
            flat = [x.flatten(0, 1).contiguous() for x in inputs]
            results = _aten._flash_attention_backward(
                *flat, own.reshape(heads, -1), edges, edges, longest, longest, 0.0, True, seed, seed, scale=scale, **windowed
            )
            found.append([result.unflatten(0, (run.rows, length)) for result in results])
    q, k, v = (_joined(list(pieces)) for pieces in zip(*found, strict=True))
    return q, k, v, dsinks if sinks_H is None else dsinks.to(sinks_H.dtype)


@document_attention_backward.register_fake
def _(gradient_BSHE, q_BSHE, k_BSKE, v_BSKE, out_BSHE, sums, bounds, runs, scale, window=None, sinks_H=None):  # type: ignore[no-untyped-def]
    gradients = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSHE, k_BSKE, v_BSKE))
    return *gradients, q_BSHE.new_empty(0, dtype=torch.float32) if sinks_H is None else torch.empty_like(sinks_H)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, sinks_H = inputs
    ctx.save_for_backward(*tensors, *output, sinks_H)


def _backward(ctx: Any, gradient_BSHE: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bounds, runs, out, sums, sinks = ctx.saved_tensors
    how = ctx.scale, ctx.window, sinks
    dq, dk, dv, dsinks = document_attention_backward(gradient_BSHE, q, k, v, out, sums, bounds, runs, *how)
    return dq, dk, dv, None, None, None, None, None if sinks is None else dsinks


document_attention.register_autograd(_backward, setup_context=_save)

FORWARD, BACKWARD = torch.ops.phalanx.document_attention, torch.ops.phalanx.document_attention_backward
"""As torch's dispatcher knows them."""


def _windowed(window: int | None, length: int) -> dict[str, int]:
    """The flash kernel's arguments for a window: keys before a query's own position, and none after it. cuDNN's kernel takes none through torch."""
    return {} if window is None or window >= length else {"window_size_left": window - 1, "window_size_right": 0}


def _is_hopper(tensor: Tensor) -> bool:
    return accelerator.of(tensor.device).capability(tensor.device) >= (9, 0)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def _by_head(*tensors: Tensor) -> list[Tensor]:
    """[B, H, S, E], the same memory."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def _by_row(sums: Tensor, run: Run, heads: int, by_head: bool) -> Tensor:
    """[B, H, S] of a run: the kernel for documents has heads outermost."""
    return sums.view(heads, run.rows, -1).transpose(0, 1) if by_head else sums.view(run.rows, heads, -1)


def _edges(bounds: Tensor, run: Run, length: int) -> Tensor:
    """The bounds of a run's documents, counted from its first row."""
    edges = bounds[run.document : run.document + run.documents + 1]
    return edges - run.row * length if run.row else edges
