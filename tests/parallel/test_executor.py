"""Every schedule against one process: losses, gradients, evaluation, with the shapes and techniques that pipelines meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import ALONE, run_ranks
from torch import Tensor, nn

from phalanx.models.decoder import Decoder
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.executor import Pipeline, PipelineObserver, RankAction, tied_group
from phalanx.schedules.actions import Action
from phalanx.schedules.makers import NAMES, make
from phalanx.schedules.stage_split import cut, flop_costs
from phalanx.spec.layout import FIXED_STAGES, Layout, default_stages
from phalanx.spec.model import ModelSpec, Moe

DIM, VOCAB, LENGTH = 24, 257, 10


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec(**{"dim": DIM, "layers": 5, "heads": 6, "kv_heads": 2, "ffn": 48, "vocab": VOCAB, **changes})


PLAIN = spec()


def decoder(model: ModelSpec) -> Decoder:
    torch.manual_seed(7)
    whole = Decoder(model)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    return whole


def batches(sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, targets and positions."""
    dice = torch.Generator().manual_seed(5)
    draw = lambda size: torch.randint(VOCAB, (size, LENGTH), generator=dice)  # noqa: E731
    return [(draw(size), draw(size), torch.arange(LENGTH).expand(size, -1)) for size in sizes]


def total(logits: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (8 * LENGTH)


@dataclass(frozen=True)
class Case:
    """One run of a pipeline."""

    name: str
    per_rank: int
    sizes: tuple[int, ...] = (2,) * 8
    model: ModelSpec = PLAIN
    recompute: str = ""


@cache
def alone(model: ModelSpec, sizes: tuple[int, ...]) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Losses, gradients and outputs of one process."""
    whole, losses, outputs = decoder(model), [], []
    for tokens, targets, positions in batches(sizes):
        outputs.append(whole(tokens, positions))
        loss = total(outputs[-1], targets)
        loss.backward()
        losses.append(loss.item())
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    return losses, gradients, [output.detach() for output in outputs]


def parts_of(case: Case, mesh: Mesh) -> tuple[Any, list[Decoder]]:
    schedule = make(case.name, mesh.size("pipeline"), len(case.sizes), case.per_rank)
    costs = flop_costs(case.model, LENGTH)
    ranges = cut(costs.blocks, costs.first, costs.last, schedule.stages)
    whole = decoder(case.model)
    if case.recompute:
        recomputing(whole, case.recompute)
    return schedule, [whole.part(*ranges[stage]) for stage in schedule.stages_of(mesh.coordinate("pipeline"))]


def recomputing(whole: Decoder, how: str) -> None:
    """Blocks that keep nothing but their input; or matrix products too ("selective")."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def wrap(block: nn.Module) -> None:
        plain: Callable[..., Tensor] = block.forward
        more = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if how == "selective" else {}
        block.forward = lambda *args: checkpoint(plain, *args, use_reentrant=False, **more)  # type: ignore[method-assign]

    for block in whole.blocks.values():
        wrap(block)


class Executed(PipelineObserver):
    """The actions that a pipeline has run, in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def action(self, action: RankAction, run: Callable[[], Tensor | None]) -> Tensor | None:
        self.actions.append(Action(action.kind, action.stage, action.micro_batch))
        return run()


def drive(mesh: Mesh, case: Case) -> tuple[Any, dict[int, Tensor], list[int]]:
    """Losses and gradients of this rank's stages; what evaluation gave; which parts had weight gradients."""
    schedule, parts = parts_of(case, mesh)
    data, losses, weighed = batches(case.sizes), {}, []
    pipeline = Pipeline(parts, schedule, mesh, halves=case.recompute != "selective")

    def forward(part: int, given: Tensor | None, m: int) -> Any:
        tokens, _, positions = data[m]
        return parts[part](tokens if given is None else given, positions)

    def loss(logits: Any, m: int) -> Tensor:
        value = total(logits, data[m][1])
        losses[m] = value.item()
        return value

    def boundary(m: int) -> tuple[tuple[int, ...], torch.dtype]:
        return (data[m][0].shape[0], LENGTH, DIM), torch.float32

    outputs: dict[int, Tensor] = {}

    def evaluate(m: int) -> None:
        pipeline.evaluate(
            lambda part, given, _: forward(part, given, m), partial(outputs.__setitem__, m), lambda _: boundary(m)
        )

    for m in range(len(data)):
        evaluate(m)
    pipeline.observer = executed = Executed()
    pipeline.run(len(data), forward, loss, boundary, weighed.append)
    assert executed.actions == list(schedule.actions[mesh.coordinate("pipeline")])
    gradients = {name: p.grad for part in parts for name, p in part.named_parameters() if p.grad is not None}
    tied = tied_group(mesh, schedule) if case.model.tied else None
    if tied is not None:
        tied.all_reduce(gradients["embed.weight"])
    assert not pipeline._saved and not pipeline._deferred
    return ([losses[m] for m in sorted(losses)], gradients), outputs, weighed


def drive_all(mesh: Mesh, cases: list[Case]) -> list[Any]:
    return [drive(mesh, case) for case in cases]


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))


def check(cases: list[Case], ranks: int) -> None:
    results = run_ranks(drive_all, ranks, cases, layout=Layout(pipeline=ranks)) if ranks > 1 else [drive_all(ALONE, cases)]
    for index, case in enumerate(cases):
        losses, gradients, outputs = alone(case.model, case.sizes)
        by_rank = [result[index] for result in results]
        found, logits = next(((one, logits) for (one, _), logits, _ in by_rank if one))
        assert found == pytest.approx(losses, rel=1e-6), case
        assert max(far(logits[m], output) for m, output in enumerate(outputs)) < 1e-5, case
        seen = set()
        for (_, found), _, weighed in by_rank:
            differences = {name: far(gradient, gradients[name]) for name, gradient in found.items()}
            assert max(differences.values()) < 1e-5, (case, differences)
            seen |= found.keys()
            assert sorted(weighed) == sorted(part for part in range(case.per_rank) for _ in case.sizes)
        assert seen == gradients.keys(), case


def legal(ranks: int, layers: int) -> list[tuple[str, int]]:
    """Schedules and stages per rank that so many layers allow."""
    found = []
    for name in NAMES:
        counts = (FIXED_STAGES[name],) if name in FIXED_STAGES else (1, 2, 3)
        found += [(name, per_rank) for per_rank in counts if per_rank * ranks <= layers]
    return found


@pytest.mark.parametrize(
    ("ranks", "layers"), [(1, 5), *(pytest.param(2, layers, marks=pytest.mark.slow) for layers in (5, 7)), (4, 9)]
)
def test_every_schedule_is_one_process(ranks: int, layers: int) -> None:
    gpt = spec(layers=layers, tied=True, bias=True, norm="layer", positions="learned", activation="gelu", context=LENGTH)
    cases = [
        Case(name, per_rank, (2,) * micro_batches, model)
        for name, per_rank in legal(ranks, layers)
        for micro_batches, model in ((8, spec(layers=layers)), (5, gpt))
    ]
    check(cases, ranks)


def test_a_short_last_batch_and_very_few_of_them() -> None:
    check([Case(name, default_stages(name), sizes) for name in NAMES for sizes in ((2, 2, 2, 2, 2, 1), (3,), (1, 2))], 2)


def test_recomputing_blocks_and_experts() -> None:
    moe = spec(moe=Moe(experts=4, active=2, ffn=16, shared=1, dense_layers=1, balance_loss=0.1), norm="layer")
    kinds = [(name, default_stages(name)) for name in NAMES]
    cases = [Case(*kind, (2,) * 5, recompute=how) for kind in kinds for how in ("full", "selective")]
    check(cases + [Case(*kind, (2,) * 5, model=moe, recompute="full") for kind in kinds], 2)
