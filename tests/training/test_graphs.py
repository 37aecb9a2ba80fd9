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
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Place, Plan
from phalanx.training.build import build
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


@pytest.mark.parametrize(("accumulation", "graphed"), [(1, True), (2, False)])
def test_only_steps_of_one_micro_batch_are_recorded(accumulation: int, graphed: bool) -> None:
    """A second replay would write its gradients over those that the first one left to be added to."""
    text = "[model]\ndim = 32\nlayers = 2\nheads = 2\n[train]\nbatch = 8\nsequence_length = 32\nsteps = 4\n[memory]\n"
    layout = Layout(data=1)
    plan = Plan(
        layout=layout,
        device="cuda",
        threads=1,
        micro_batch=8 // accumulation,
        accumulation=accumulation,
        compute="bf16",
        parameters=0,
        flops_per_token=0.0,
        peak_flops=None,
    )
    mesh = Mesh(Place(), torch.device("meta"), layout)
    by_default = build(loads(text + "compile = true"), plan, mesh).sharded
    assert by_default.graphed is graphed and ("cuda_graphs" in by_default.applied) is graphed
    if not graphed:
        with pytest.raises(RunError, match="one micro-batch per rank, but the plan has 2 of 4"):
            build(loads(text + "cuda_graphs = true"), plan, mesh)
