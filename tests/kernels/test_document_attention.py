"""Where documents begin, as the host tells it to the kernels. `tests/gpu/test_kernels` runs them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.document_attention import DocumentSpans, Run, document_attention, runs_of
from phalanx.models import attention


def test_bounds_and_runs_of_rows() -> None:
    documents = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 2], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=np.int32)
    spans = DocumentSpans.of(documents)
    assert spans.bounds[:9].tolist() == [0, 4, 6, 8, 9, 10, 12, 16, 20]
    assert list(runs_of(spans.runs)) == [
        Run(row=0, rows=1, whole=1, document=0, documents=1, longest=4),
        Run(row=1, rows=2, whole=0, document=1, documents=5, longest=2),
        Run(row=3, rows=2, whole=1, document=6, documents=2, longest=4),
    ]


def test_padded_spans_say_nothing_of_the_batch_to_the_host() -> None:
    spans = DocumentSpans.of(np.array([[0, 0, 1, 1], [0, 0, 0, 0]], dtype=np.int32))
    padded = spans.padded(5, length=4)
    assert spans.documents == 3
    assert list(runs_of(padded.runs)) == [Run(row=0, rows=2, whole=0, document=0, documents=5, longest=4)]
    assert padded.bounds[:6].tolist() == [0, 2, 4, 8, 8, 8], "the fourth and fifth document are empty"


@pytest.mark.parametrize("seed", range(20))
def test_runs_cover_every_row_once_and_bounds_every_token(seed: int) -> None:
    dice = np.random.default_rng(seed)
    rows, length = int(dice.integers(1, 7)), int(dice.integers(1, 30))
    documents = np.cumsum(dice.random((rows, length)) < dice.random((rows, 1)) * 0.3, axis=1).astype(np.int32)
    spans = DocumentSpans.of(documents)
    runs = list(runs_of(spans.runs))
    assert [row for run in runs for row in range(run.row, run.row + run.rows)] == list(range(rows))
    for run in runs:
        bounds = spans.bounds[run.document : run.document + run.documents + 1].tolist()
        assert bounds[0] == run.row * length and bounds[-1] == (run.row + run.rows) * length
        lengths = np.diff(bounds)
        assert lengths.max() == run.longest and bool(run.whole) == (len(lengths) == run.rows)
        for first, last in pairwise(bounds):
            assert len(set(documents.ravel()[first:last])) == 1 and first // length == (last - 1) // length
    assert spans.bounds.shape == (rows * length + 1,) and spans.runs.shape == (rows, 6), "sizes do not depend on the documents"


@pytest.mark.parametrize(("width", "narrow"), [(8, 8), (12, 6), (10, 10), (24, 16)])
def test_kernels_get_one_width_that_is_a_multiple_of_8(width: int, narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]], dtype=np.int32)
    seen: list[int] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, None]:
        """In place of the GPU's, with the mask that it does without."""
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        seen.append(q.shape[-1])
        mask = attention.Scope(torch.from_numpy(documents)).mask(documents.shape[1], torch.device("cpu"))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=how[2], enable_gqa=True).transpose(1, 2), None

    monkeypatch.setattr(attention, "document_attention", kernel)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, size, dtype=torch.bfloat16) for heads, size in ((4, width), (2, width), (2, narrow)))
    plain = attention.attend_locally(q, k, v, attention.Scope(torch.from_numpy(documents)))
    found = attention.attend_locally(q, k, v, attention.Scope(torch.from_numpy(documents), DocumentSpans.of(documents)))
    assert seen[0] % 8 == 0 and seen[0] - width < 8
    assert found.shape == (2, 4, 5, narrow)
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)


def test_compilers_see_shapes_only() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 16, 4, 8, dtype=torch.bfloat16, requires_grad=True)
        kv = torch.empty(2, 16, 2, 8, dtype=torch.bfloat16, requires_grad=True)
        bounds, runs = torch.empty(33, dtype=torch.int32), torch.empty(2, 6, dtype=torch.int64)
        out, sums = document_attention(q, kv, kv, bounds, runs, 0.5)
        assert (out.shape, out.dtype) == (q.shape, q.dtype) and (sums.shape, sums.dtype) == ((2, 4, 16), torch.float32)
        found = torch.autograd.grad(out.sum(), (q, kv))
        assert [gradient.shape for gradient in found] == [q.shape, kv.shape]
