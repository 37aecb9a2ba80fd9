"""When a micro-batch is recorded and when a record is replayed, with a device whose records are calls of the module. `tests/gpu/test_graphs` records on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phalanx.accelerator import Accelerator
from phalanx.kernels.document_attention import DocumentSpans
from phalanx.training.graphs import Graphs
from phalanx.training.micro_batch import MicroBatch


class Recorder(Accelerator):
    """Replays by calling the module with the tensors that it was recorded with, into which values are copied."""

    def __init__(self, error: str | None = None) -> None:
        self.error, self.recorded, self.replayed = error, 0, 0

    def record(self, module: nn.Module, inputs: tuple[Tensor, ...], pool: Any = None) -> Callable[..., Any]:
        if self.error is not None:
            raise RuntimeError(self.error)
        self.recorded += 1

        def replay(*given: Tensor) -> Any:
            self.replayed += 1
            for own, tensor in zip(inputs, given, strict=True):
                own.copy_(tensor)
            return module(*inputs)

        return replay


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(10.0))


def graphs_of(device: Recorder) -> tuple[Graphs, Bag]:
    part = Bag()

    def loss_of(batch: MicroBatch) -> Tensor:
        documents = 0 if batch.spans is None else len(batch.spans.bounds[: int(batch.spans.runs[0, 4]) + 1].unique()) - 1
        return part.weight[batch.tokens].sum() + 1000 * documents

    return Graphs(part, device, loss_of), part


def micro_batch(tokens: list[list[int]], documents: list[list[int]] | None = None) -> MicroBatch:
    whole = torch.tensor(tokens)
    ids = None if documents is None else np.array(documents, dtype=np.int32)
    return MicroBatch(
        tokens=whole,
        targets=whole,
        positions=whole,
        documents=None if ids is None else torch.from_numpy(ids),
        spans=None if ids is None else DocumentSpans.of(ids),
        counted=whole.numel(),
        digest=0,
    )


def test_recorded_in_the_third_step_and_replayed_with_other_values() -> None:
    device = Recorder()
    graphs, part = graphs_of(device)
    for _ in range(2):
        graphs.begin_step()
        assert graphs.loss(micro_batch([[1, 2]])) is None
    graphs.begin_step()
    for tokens, loss in (([[1, 2]], 3.0), ([[4, 5]], 9.0)):
        found = graphs.loss(micro_batch(tokens))
        assert found is not None and found.item() == loss
    found.backward()
    assert part.weight.grad is not None and part.weight.grad.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert (device.recorded, device.replayed) == (1, 2)


def test_a_record_serves_any_documents_up_to_its_number() -> None:
    device = Recorder()
    graphs, _ = graphs_of(device)
    for _ in range(3):
        graphs.begin_step()
    tokens = [[0] * 8, [0] * 8]
    for row, documents in (([0] * 4 + [1] * 4, 4), ([0, 0, 1, 1, 2, 2, 3, 3], 8), (list(range(8)), 16), ([0] * 8, 2)):
        found = graphs.loss(micro_batch(tokens, [row, row]))
        assert found is not None and found.item() == 1000 * documents
    assert device.recorded == 2, "one for up to 8 documents, one for up to 16"
    plain = graphs.loss(micro_batch(tokens))
    assert plain is not None and plain.item() == 0 and device.recorded == 3


def test_not_replayed_while_paused_and_recorded_again_where_parameters_have_moved() -> None:
    device = Recorder()
    graphs, part = graphs_of(device)
    for _ in range(3):
        graphs.begin_step()
    assert graphs.loss(micro_batch([[1]])) is not None
    graphs.pause()
    assert graphs.loss(micro_batch([[1]])) is None
    graphs.resume()
    part.weight.data = part.weight.data + 1
    found = graphs.loss(micro_batch([[1]]))
    assert found is not None and found.item() == 2 and device.recorded == 2


def test_what_cannot_be_recorded_runs_without_graphs_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    graphs, _ = graphs_of(Recorder("operation not permitted when stream is capturing"))
    for _ in range(3):
        graphs.begin_step()
    assert graphs.loss(micro_batch([[1]])) is None and graphs.loss(micro_batch([[1]])) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "memory.cuda_graphs" in said and "not permitted" in said
