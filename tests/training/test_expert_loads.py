"""Records of the load of every expert: against choices counted here, on one process and on several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import ALONE, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx import accelerator
from phalanx.events.records import ExpertLoads, Step, decode, encode
from phalanx.models.moe import routers
from phalanx.parallel.expert import Loads
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.training.expert_loads import RecentLoads, steps_between
from phalanx.training.step_totals import Outcome

MOE = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=32", "model.moe.bias_rate=0.01", "train.steps=45")


def train(mesh: Mesh, directory: Path, *overrides: str) -> list[ExpertLoads]:
    trainer = tiny_trainer(mesh, tiny_run(*MOE, *overrides), directory / str(mesh.ranks))
    return [event for event in trainer.events() if isinstance(event, ExpertLoads)]


def test_every_token_is_counted_once_in_a_record_of_its_layer(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(*MOE), tmp_path)
    names = ["blocks.0", "blocks.1"]
    chosen: dict[str, list[Tensor]] = {name: [] for name in names}
    for name, router in zip(names, routers(trainer.model).values(), strict=True):
        router.register_forward_hook(
            lambda module, inputs, out, name=name: chosen[name].append(out[0].flatten()) if module.training else None
        )
    expected: dict[int, dict[str, list[int]]] = {}
    records: list[ExpertLoads] = []
    for event in trainer.events():
        if isinstance(event, Step) and event.step in (20, 40, 45):
            begin = 0 if event.step == 20 else -20 * len(chosen["blocks.0"]) // event.step
            expected[event.step] = {
                name: torch.bincount(torch.cat(calls[begin:]), minlength=4).tolist() for name, calls in chosen.items()
            }
            worst = max(max(row) / (sum(row) / 4) for row in expected[event.step].values())
            assert event.expert_load == pytest.approx(worst)
        elif isinstance(event, ExpertLoads):
            records.append(event)
    assert [(record.step, record.steps) for record in records] == [(20, 20), (40, 20), (45, 20)]
    assert {record.step: record.tokens for record in records} == expected
    assert sum(records[0].tokens["blocks.0"]) == 20 * 2 * 8 * 24, "two experts of each token of 20 batches"


LAYOUTS = {
    "pipeline 2 × expert 2": Layout(pipeline=2, data=2, expert=2, schedule="1f1b"),
    "tensor 2": Layout(tensor=2),
    "context 2": Layout(context=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_all_ranks_of_a_layout_have_the_loads_of_one_process(layout: Layout, tmp_path: Path) -> None:
    # No balancing, and hardly any learning: a choice between two experts that are nearly equal must not depend on the order of a sum.
    settings = ("precision.compute=fp32", "model.moe.bias_rate=0", "train.steps=20", "optimizer.learning_rate=1e-5")
    (alone,) = train(ALONE, tmp_path, *settings)
    assert list(alone.tokens) == ["blocks.0", "blocks.1"] and alone.steps == 20
    for told in run_ranks(train, layout.ranks, tmp_path, *settings, layout=layout):
        assert told == [alone]


def test_large_models_are_recorded_less_often() -> None:
    assert [steps_between(experts) for experts in (8, 1024, 1025, 58 * 256)] == [20, 20, 40, 300]
    # DeepSeek-V3: 58 layers of 256 experts.
    sizes = {f"blocks.{layer}.mlp.router": 256 for layer in range(3, 61)}
    recent = RecentLoads(Loads(sizes, {}), 10_000, torch.device("cpu"))
    row = torch.full((256,), 2_000_000.0, dtype=torch.float64)
    written = []
    for step in range(1, 601):
        recent.add(dict.fromkeys(sizes, row))
        recent.fullest(step)
        recent.on_step_taken(step, Outcome(0.0, 1, "", 1.0, 0, 0, 0))
        written += recent.take_events()
    assert [(record.step, record.steps) for record in written if isinstance(record, ExpertLoads)] == [
        (20, 20),
        (300, 20),
        (600, 20),
    ]
    line = encode(written[1])
    assert len(line) / (300 * 2 / 3600) < 1e6, "less than 1 MB an hour with steps of 2 s"
    assert len(line) < 1 << 20, "a page reads lines of up to 1 MiB"
    assert decode(line) == written[1] and json.loads(line)["tokens"]["blocks.60"] == [40_000_000] * 256


def test_loads_are_copied_to_the_host_only_for_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(*MOE), tmp_path)
    sizes: list[int] = []
    device = type(accelerator.of(ALONE.device))
    copy = device.copy_to_host
    monkeypatch.setattr(device, "copy_to_host", lambda self, tensor: sizes.append(tensor.numel()) or copy(self, tensor))
    for _ in range(21):
        trainer.step()
    trainer.close()
    results = 9  # with the figure of the fullest expert
    assert sizes == [results] * 19 + [8, results] + [results], (
        "once: the loads, before the results that the host waits for anyway"
    )
