"""The figures of a comparison, and when trainers may be compared at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison.step_jobs import LLAMA, MODELS, tiny_job, tiny_run
from rich.console import Console

from phalanx.comparison.comparison_report import StepComparison, TrainerResult
from phalanx.comparison.handwritten_loop import HandwrittenLoop
from phalanx.spec.model import PRESETS, ModelSpec

TOKENS = (2.0, 3.0, 4.0, 5.0)


def result(name: str, *seconds: float, **changes: Any) -> TrainerResult:
    values: dict[str, Any] = {
        "name": name,
        "version": "1.0",
        "settings": "plain",
        "compute": "bf16",
        "seconds": seconds,
        "cpu_seconds": tuple(second / 5 for second in seconds),
        "token_losses": TOKENS,
        "losses": (5.0, 4.5, 4.0),
        "memory": 3 << 30,
        "reserved": 4 << 30,
    }
    return TrainerResult(**values | changes)


def report(*results: TrainerResult, **changes: Any) -> StepComparison:
    values: dict[str, Any] = {
        "model": "2048 × 16 layers",
        "parameters": 1_500_000_000,
        "active": 1_500_000_000,
        "has_experts": False,
        "micro_batch": 8,
        "sequence": 4096,
        "device": "a GPU",
        "text": "stdlib, tokenizer byte",
        "masked": False,
        "fresh": True,
        "rounds": 2,
        "warmup": 5,
        "flops": 9e9,
        "causal_flops": 8e9,
        "peaks": {"bf16": 1e15},
        "load": 1.0,
        "results": results,
    }
    return StepComparison(**values | changes)


def text(comparison: StepComparison, width: int = 80) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    comparison.render(console)
    return console.export_text()


def test_medians_quartiles_speed_and_mfu() -> None:
    ours = result("phalanx", 0.5, 0.4, 9.0, 0.6, 0.5)
    comparison = report(ours, result("hand", 0.6))
    assert ours.median == 0.5 and ours.quartiles == (0.5, 0.6), "one disturbed step changes neither"
    assert comparison.tokens_per_second(ours) == 8 * 4096 / 0.5
    assert comparison.mfu(ours) == pytest.approx(8 * 4096 / 0.5 * 9e9 / 1e15)
    assert comparison.mfu(ours, causal=True) == pytest.approx(8 * 4096 / 0.5 * 8e9 / 1e15)
    assert comparison.mfu(replace(ours, compute="fp8")) is None, "of a format whose peak is not known"
    assert comparison.ratio == pytest.approx(1.2) and comparison.best_peer is not None and comparison.best_peer.name == "hand"


@pytest.mark.parametrize("name", ["llama3-8b", "llama2-7b", "qwen3-30b-a3b", "gpt2-124m"])
def test_the_convention_is_the_one_that_the_table_states(name: str) -> None:
    spec, length = PRESETS[name], 1000
    embedding = spec.rows * spec.dim + (spec.context * spec.dim if spec.positions == "learned" else 0)
    matrices = spec.active_parameters() - embedding + (spec.rows * spec.dim if spec.tied else 0)
    attention = 12 * spec.layers * spec.heads * spec.head * length
    # Norms and biases are parameters, but not weights of a matrix: less than a thousandth.
    assert spec.flops_per_token(length) == pytest.approx(6 * matrices + attention, rel=1e-3)
    halved = spec.flops_per_token(length) - spec.flops_per_token(length, causal=True)
    assert halved == attention / 2


def test_json_has_every_figure_and_only_finite_numbers() -> None:
    table = report(
        result("phalanx", 0.5, 0.5), result("hand", 0.6, 0.6), TrainerResult(name="torchtitan", reason="not installed")
    )
    found = json.loads(json.dumps(table.to_json(), allow_nan=False))
    assert found["best_peer"] == "hand" and found["ratio"] == pytest.approx(1.2)
    assert found["trainers"]["torchtitan"] == {"ran": False, "reason": "not installed"}
    ours = found["trainers"]["phalanx"]
    assert ours["step_seconds"] == {"median": 0.5, "q1": 0.5, "q3": 0.5, "all": [0.5, 0.5]}
    assert (
        ours["cpu_seconds"] == 0.1
        and ours["peak_bytes"] == 3 << 30
        and ours["reserved_bytes"] == 4 << 30
        and ours["same_loss"] is None
    )
    assert found["trainers"]["hand"]["same_loss"] is True and "12·layers·width·sequence" in found["convention"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_cuts_no_figure(width: int) -> None:
    shown = text(
        report(result("phalanx", 0.5), result("transformers", 0.61), TrainerResult(name="torchtitan", reason="out of memory")),
        width,
    )
    for figure in (
        "500 ms",
        "610 ms",
        "65,536",
        "590 TFLOP/s",
        "59.0%",
        "52.4%",
        "3.0 GiB",
        "1.220",
        "same loss",
        "out of memory",
    ):
        assert figure in shown, figure
    assert "…" not in shown and "1.220 × the speed of the best peer (transformers)" in shown
    assert "a fresh process for each turn" in shown and "causal" in shown


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"token_losses": (2.0, 3.0, 4.0, 5.3)}, "OTHER LOSS: tokens differ by 0.13 of their spread, allowed 0.06"),
        ({"token_losses": (2.0, 3.0, 4.0, float("nan"))}, "OTHER LOSS: tokens differ by inf"),
        ({"losses": (5.0, 4.5, 4.1)}, "OTHER LOSS: the first steps differ by 2.50%, allowed 0.50%"),
        ({"losses": (5.0, 4.5, float("nan"))}, "OTHER LOSS: the first steps differ by inf"),
    ],
)
def test_a_trainer_that_computes_something_else_is_not_compared(changes: dict[str, Any], sentence: str) -> None:
    other = result("hand", 0.1, **changes)
    comparison = report(result("phalanx", 0.5), other, result("transformers", 0.6))
    agreement = comparison.agreement(other)
    assert agreement is not None and not agreement.same and sentence in agreement.sentence
    assert comparison.best_peer is not None and comparison.best_peer.name == "transformers", "not the fastest, which cheats"
    assert comparison.comparable == (comparison.results[0], comparison.results[2])
    shown = text(comparison, 200)
    assert sentence in shown and "warning: hand computes something else than phalanx" in shown


def test_rounding_of_the_coarser_format_is_allowed() -> None:
    apart = tuple(loss + 0.03 for loss in TOKENS)
    assert _same(result("hand", 0.6, token_losses=apart), result("phalanx", 0.5))
    exact = {"compute": "fp32"}
    assert not _same(result("hand", 0.6, token_losses=apart, **exact), result("phalanx", 0.5, **exact))


def test_a_token_may_go_to_another_expert() -> None:
    routed = result("transformers", 0.6, token_losses=(2.0, 3.0, 4.0, 7.0))
    assert _same(routed, result("phalanx", 0.5), has_experts=True)
    assert not _same(routed, result("phalanx", 0.5), has_experts=False)


def test_steps_with_masks_are_not_held_against_peers_without() -> None:
    unmasked = result("transformers", 0.6, losses=(5.1, 4.7, 4.3))
    assert _same(unmasked, result("phalanx", 0.5), masked=True)
    assert "Phalanx masks documents and peers do not" in text(report(result("phalanx", 0.5), unmasked, masked=True), 300)


def _same(peer: TrainerResult, ours: TrainerResult, **changes: Any) -> bool:
    agreement = report(ours, peer, **changes).agreement(peer)
    assert agreement is not None
    return agreement.same


def test_the_engines_of_phalanx_are_compared_with_each_other() -> None:
    torch_engine, xla, hand = result("phalanx", 0.5), result("phalanx-xla", 0.4), result("hand", 0.6)
    comparison = report(torch_engine, xla, hand)
    assert comparison.xla_ratio == pytest.approx(1.25) and comparison.best_peer is hand, "the other engine is no peer"
    assert "phalanx-xla: 1.250 × the speed of the torch engine" in text(comparison, 200)
    assert comparison.to_json()["xla_ratio"] == pytest.approx(1.25)
    wrong = replace(xla, losses=(5.0, 4.5, 4.1))
    assert report(torch_engine, wrong, hand).xla_ratio is None and report(torch_engine, hand).xla_ratio is None
    assert "First step of each" in text(comparison, 400) and "phalanx-xla 31" in text(
        report(torch_engine, replace(xla, first_step=31.0)), 400
    )


def test_on_cpus_the_time_that_was_computed_is_shown_next_to_the_clock() -> None:
    comparison = report(result("phalanx", 0.5, reserved=None), result("hand", 0.6, reserved=None), load=7.25)
    shown = text(comparison, 400)
    assert "(load 7.2): phalanx 100 ms, hand 120 ms." in shown and "peak resident memory of the process" in shown
    assert "CPU time" not in text(report(result("phalanx", 0.5)), 400), "on a GPU, the host's time says little"


def test_without_phalanx_peers_are_compared_with_nothing() -> None:
    comparison = report(TrainerResult(name="phalanx", reason="out of memory"), result("hand", 0.5))
    assert comparison.ratio is None and comparison.agreement(comparison.results[1]) is None
    assert "out of memory" in text(comparison, 200)


def _losses(spec: ModelSpec, seed: int) -> torch.Tensor:
    run = tiny_run(spec)
    job = tiny_job(replace(run, train=replace(run.train, seed=seed)))
    other = tiny_job(run)  # the same tokens
    return HandwrittenLoop(job).token_losses(*other.probe)


def test_other_weights_are_told_apart_where_the_mean_loss_is_not(tmp_path: Path) -> None:
    wide = replace(LLAMA, dim=256, vocab=2000)
    ours, other = _losses(wide, 0), _losses(wide, 1)
    assert ours.mean() == pytest.approx(float(other.mean()), rel=0.02), (
        "a fresh model's mean loss says little about its weights"
    )
    assert not _same(
        result("hand", 0.6, token_losses=tuple(other.tolist())), result("phalanx", 0.5, token_losses=tuple(ours.tolist()))
    )


def test_a_wrong_rotation_is_told_apart() -> None:
    ours, wrong = _losses(MODELS["llama"], 0), _losses(replace(MODELS["llama"], rope_theta=500.0), 0)
    exact = {"compute": "fp32"}
    assert not _same(
        result("hand", 0.6, token_losses=tuple(wrong.tolist()), **exact),
        result("phalanx", 0.5, token_losses=tuple(ours.tolist()), **exact),
    )
