"""When a micro-batch is recorded and when a record is replayed, with a device whose records are calls of the module. `tests/gpu/test_graphs` records on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ALONE, copied, differing, tiny_run, tiny_trainer
from torch import Tensor, nn

from phalanx.accelerator import Accelerator
from phalanx.events.records import Evaluated, Step
from phalanx.kernels.document_attention import DocumentSpans
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Place, Plan
from phalanx.training.build import build
from phalanx.training.graphs import Graphs
from phalanx.training.hooks import StepContext, StepHook
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step_totals import Outcome
from phalanx.training.trainer import Trainer


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


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., tuple[Trainer, Recorder, list[int]]]:
    """Makes trainers whose micro-batches are replayed by a `Recorder`. The list gets the step in whose course each replay was."""

    def make(name: str, *overrides: str) -> tuple[Trainer, Recorder, list[int]]:
        trainer = tiny_trainer(
            ALONE, tiny_run("train.micro_batch=8", "train.steps=12", "data.document_mask=false", *overrides), tmp_path / name
        )
        stepper, device, replayed_in = trainer.stepper, Recorder(), []
        loss_of = stepper._loss_of

        def counted(batch: MicroBatch) -> Tensor:
            replayed_in.append(stepper.number)
            return loss_of(batch)

        stepper._graphs = Graphs(trainer.model, device, counted)
        return trainer, device, replayed_in

    return make


def test_the_next_forward_is_launched_before_the_step_ends_and_nothing_else_changes(
    recorded: Callable[..., tuple[Trainer, Recorder, list[int]]],
) -> None:
    """Evaluations and checkpoints between two steps do not see it."""
    settings = ("train.eval_every=4", "checkpoint.every=5")
    plain, _, one_by_one = recorded("plain", *settings)
    told = [event for event in plain.train(ahead=False) if isinstance(event, Step | Evaluated)]
    trainer, _, replayed_in = recorded("ahead", *settings)
    found = [event for event in trainer.train() if isinstance(event, Step | Evaluated)]
    assert [(event.kind, event.step, event.loss) for event in found] == [(event.kind, event.step, event.loss) for event in told]
    assert differing(trainer.tensors(), copied(plain.tensors())) == []
    assert one_by_one == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert replayed_in == [3, 4, 5, 6, 6, 7, 8, 9, 10, 11], (
        "from the end of the sixth step on, one step ahead; none after the last"
    )


def test_a_step_that_is_taken_again_launches_what_follows_it_again(
    recorded: Callable[..., tuple[Trainer, Recorder, list[int]]],
) -> None:
    plain, _, _ = recorded("plain")
    told = [event.loss for event in plain.train(ahead=False) if isinstance(event, Step)]
    trainer, _, replayed_in = recorded("ahead")

    class Retry(StepHook):
        """As the hook that takes a step with a non-finite loss again, for step 8."""

        def on_outcome(self, outcome: Outcome, batches: Sequence[MicroBatch], retry: Callable[[], Outcome]) -> Outcome:
            if trainer.stepper.number != 8:
                return outcome
            for name, tensor in saved.items():
                trainer.tensors()[name].tensor.copy_(tensor)
            return retry()

        def before_update(self, context: StepContext) -> None:
            saved.update({name: piece.tensor.clone() for name, piece in trainer.tensors().items()})

    saved: dict[str, Tensor] = {}
    trainer.hooks.add(Retry())
    found = [event.loss for event in trainer.train() if isinstance(event, Step)]
    assert replayed_in.count(8) == 3, "the forward of step 9, that of step 8 again, and that of step 9 again"
    assert found == told


@pytest.mark.parametrize("way", ["events", "callback", "hook"])
def test_nothing_is_launched_ahead_of_a_program_that_may_change_the_model(
    way: str, recorded: Callable[..., tuple[Trainer, Recorder, list[int]]]
) -> None:
    trainer, _, replayed_in = recorded(way)
    if way == "callback":
        trainer.on_event = lambda event: None
    if way == "hook":

        class Changes(StepHook):
            allows_ahead = False

        trainer.hooks.add(Changes())
    for _ in trainer.events() if way == "events" else trainer.train():
        pass
    assert replayed_in == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
