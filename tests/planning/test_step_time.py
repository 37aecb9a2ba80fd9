"""Step times: closed forms against simulations, counts and arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phalanx.planning.cost.job_table import SCHEDULES, JobTable, model_columns
from phalanx.planning.cost.step_time import PARTS, block_time, bubble, head_time, step_times
from phalanx.planning.machines.rates import Rates
from phalanx.schedules.makers import make
from phalanx.schedules.pairs import overlapped_pairs
from phalanx.schedules.timing import Durations, simulate
from phalanx.spec.model import PRESETS

H100 = {
    "peak": 989e12,
    "peak16": 989e12,
    "bandwidth": 3.35e12,
    "memory": 80e9,
    "island": 8,
    "island_bandwidth": 450e9,
    "network": 50e9,
}
IDEAL = Rates(
    gemm=1.0, knee=0.0, attention=1.0, attention_backward=1.0, traffic=0.0, launch=0.0, gather_host=0.0, spread=0.0, optimizer_bytes=0.0
)  # fmt: skip
"""A device that reaches its peak and computes for nothing else."""


def work(model: str = "llama3-8b", **layout: Any) -> JobTable:
    columns: dict[str, Any] = {"sequence": 8192, "batch": 64, "micro_batch": 1, "ranks": 8, "data": 8}
    spec = replace(PRESETS[model], vocab=PRESETS[model].vocab or 32000)
    return JobTable(**(model_columns(spec) | H100 | columns | layout))


@pytest.mark.parametrize("model", ["llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3"])
def test_an_ideal_device_takes_the_flops_of_the_model(model: str) -> None:
    spec = replace(PRESETS[model], vocab=PRESETS[model].vocab or 32000)
    jobs = work(model, batch=8, compute_bytes=0, island_bandwidth=np.inf, network=np.inf, bandwidth=np.inf)
    ours = step_times(jobs, IDEAL).parts["compute"] * 989e12 / 8192
    # Scores are counted in full there, but causal kernels skip half of them, and take 2.5 forward passes to go back, not two.
    widths = jobs.score_width + jobs.value_width
    matrices = spec.flops_per_token(8192) - 6 * (spec.layers + spec.mtp_depth) * widths * 8192
    scores = (1 + 2.5) * (spec.layers + spec.mtp_depth) * widths * 8192
    projections = 6.0 * spec.mtp_depth * 2 * spec.dim**2  # of what predicts ahead: too little to be in the equations
    assert ours == pytest.approx(matrices - projections + scores, rel=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.5, 0.7), (0.7, 1.0, 1.0), (1.0, 2.2, 0.8)])
def test_bubble_equals_simulated_schedule(name: str, times: tuple[float, float, float]) -> None:
    forward, back, weight = times
    for ranks, stages in ((2, None), (4, None), (8, None), (4, 4)):
        per_rank = stages if stages and name.startswith(("interleaved", "looped")) else {"gpipe": 1, "1f1b": 1}.get(name, 2)
        count = 4 * ranks
        durations = Durations(forward=forward / per_rank, input=back / per_rank, weight=weight / per_rank)
        simulated = simulate(make(name, ranks, count, per_rank), durations).stop - count * sum(times)
        job = work(pipeline=ranks, ranks=ranks, data=1, schedule=SCHEDULES.index(name), stages=per_rank)
        assert float(bubble(job, count, forward, back, weight)[0]) == pytest.approx(simulated, rel=1e-6)


def test_parts_sum_up_to_the_step_for_every_kind_of_layout() -> None:
    rng, count = np.random.default_rng(0), 2000
    tensor, pipeline, shard, context = (2.0 ** rng.integers(0, 3, count) for _ in range(4))
    jobs = work(
        "mixtral-8x7b",
        ranks=1024,
        batch=4096,
        pipeline=pipeline,
        shard=shard,
        context=context,
        tensor=tensor,
        data=1024 / (tensor * pipeline * shard * context),
        micro_batch=2.0 ** rng.integers(0, 2, count),
        zero=rng.integers(1, 4, count),
        schedule=rng.integers(0, len(SCHEDULES), count),
        stages=2,
        expert=8,
        recompute=rng.integers(0, 3, count),
        method=rng.integers(0, 3, count),
        offload=rng.integers(0, 3, count),
        activations_on_host=rng.integers(0, 2, count),
        sequence_parallel=rng.integers(0, 2, count),
    )
    times = step_times(jobs, Rates())
    assert sum(times.parts[part] for part in PARTS) == pytest.approx(times.step)
    assert all(np.all(np.asarray(times.parts[part]) >= 0) for part in PARTS)


def test_table_of_jobs_is_timed_like_single_jobs() -> None:
    """Long tables are cut into pieces on the way; scalars must come out alike."""
    size = 70_000
    micro = np.where(np.arange(size) % 3 == 0, 1.0, 2.0)
    many = step_times(work(micro_batch=micro), Rates())
    for place in (0, 1, 40_000, size - 1):
        one = step_times(work(micro_batch=micro[place]), Rates())
        columns = {"step": (many.step, one.step), "low": (many.low, one.low), "high": (many.high, one.high)}
        columns |= {name: (many.parts[name], value) for name, value in one.parts.items()}
        columns |= {name: (many.pieces[name], value) for name, value in one.pieces.items()}
        for column, value in columns.values():
            assert float(np.broadcast_to(column, size)[place]) == pytest.approx(float(value))


def test_recomputing_repeats_the_forward_pass() -> None:
    rates = replace(IDEAL, overhead=0.0)
    plain, again = (step_times(work(recompute=code), rates) for code in (0, 2))
    part = block_time(work(), rates)
    assert float(again.parts["compute"] - plain.parts["compute"]) == pytest.approx(8 * 32 * part.forward)
    half = step_times(work(recompute=2, recompute_every=2), rates)
    assert float(half.parts["compute"] - plain.parts["compute"]) == pytest.approx(4 * 32 * part.forward)


def test_the_head_is_hidden_where_the_last_stage_has_fewer_layers() -> None:
    """126 layers on 16 ranks: two ranks' worth of slack, more than a head of Llama-3 405B takes."""
    deep = {"ranks": 128, "tensor": 8, "data": 1, "sequence_parallel": 1}
    even = step_times(work("llama3-405b", pipeline=16, **deep), Rates())
    assert float(even.pieces["head"]) == 0.0
    alone = step_times(work("llama3-405b", pipeline=1, ranks=8, tensor=8, data=1, sequence_parallel=1), Rates())
    assert float(alone.pieces["head"]) == pytest.approx(float(head_time(work("llama3-405b", tensor=8, data=1), Rates()).whole))


def test_more_work_takes_longer() -> None:
    base = float(step_times(work(), Rates()).step)
    assert float(step_times(replace(work(), bandwidth=1e12), Rates()).step) > base
    sharded = work(shard=8, data=1, zero=3)
    assert float(step_times(sharded, Rates()).parts["data"]) > float(step_times(work(), Rates()).parts["data"])
    slow = replace(work("mixtral-8x7b", expert=8), island_bandwidth=50e9)
    assert float(step_times(slow, Rates()).parts["expert"]) > float(
        step_times(work("mixtral-8x7b", expert=8), Rates()).parts["expert"]
    )
    small = work("tiny-dense", sequence=128)
    assert float(step_times(small, Rates()).parts["launch"]) > 0.3 * float(step_times(small, Rates()).step)


def test_empty_job_table_is_timed() -> None:
    none = np.zeros(0)
    assert np.size(step_times(work("mixtral-8x7b", micro_batch=none, tensor=none + 1, context=none + 1), Rates()).step) == 0
    assert np.size(step_times(work(micro_batch=none, tensor=none + 1, pipeline=none + 1), Rates()).high) == 0


def test_intervals_widen_with_uncertain_parts() -> None:
    def width(job: JobTable, rates: Rates) -> float:
        times = step_times(job, rates)
        return float(np.log(times.high / times.low))

    plain = width(work(), IDEAL)
    slow = replace(work(shard=8, data=1, zero=3), island_bandwidth=5e9)
    assert width(slow, Rates()) > 1.5 * plain
    assert width(work(), replace(IDEAL, doubt=1.5)) == pytest.approx(1.5 * plain)
    assert width(replace(slow, on_cpu=1), Rates()) == pytest.approx(float(np.log(Rates().high / Rates().low)))


def test_a_schedule_that_pairs_micro_batches_hides_what_experts_send() -> None:
    deep = {"pipeline": 8, "ranks": 64, "data": 8, "expert": 8, "stages": 2, "batch": 8 * 32}
    shown = [
        float(step_times(work("mixtral-8x7b", schedule=SCHEDULES.index(name), **deep), Rates()).parts["expert"])
        for name in ("zbv", "dualpipev")
    ]
    together = sum(map(len, overlapped_pairs(make("dualpipev", 8, 32)))) / (8 * 2 * 32)
    assert shown[1] == pytest.approx((1 - Rates().paired * together) * shown[0])


def test_stages_cut_by_cost_share_the_head() -> None:
    job = work(pipeline=4, ranks=32, data=8)
    whole, shared = (float(step_times(job, Rates(balanced=part)).pieces["head"]) for part in (0.0, 1.0))
    assert shared == pytest.approx(whole / 4)


def test_gathering_in_fp8_sends_a_byte_less_for_each_value_of_a_linear_layer() -> None:
    rates, spec = replace(IDEAL, data_hidden=0.0, gathering=0.0, latency=0.0), PRESETS["llama3-8b"]
    plain, less = (step_times(work(data=1, shard=8, zero=3, fp8_gather=bytes_), rates).parts["data"] for bytes_ in (0, 1))
    linear = spec.layers * (spec.attention_matrices() + 3 * spec.dim * spec.hidden)
    # A value is gathered twice in bf16, and its gradient is sent once in fp32.
    assert less / plain == pytest.approx(1 - 2 * linear / (8 * spec.parameters()), rel=1e-4)
    assert step_times(work(data=1, shard=8, zero=1, fp8_gather=1), rates).step == pytest.approx(
        step_times(work(data=1, shard=8, zero=1), rates).step
    )


def test_two_of_three_products_of_experts_are_faster_in_fp8() -> None:
    rates, moe = replace(IDEAL, eight=0.0, rounding=0.0), PRESETS["mixtral-8x7b"].moe
    assert moe is not None
    plain, fast = (block_time(work("mixtral-8x7b", peak=2 * 989e12, fp8_experts=share), rates) for share in (0, 1))
    flops = 8192 * moe.active * 6 * PRESETS["mixtral-8x7b"].dim * moe.ffn
    assert plain.matrices - fast.matrices == pytest.approx(flops / 3 / 989e12, rel=1e-6)
    # Whose inputs, gradients and weights are read and written once more.
    rounding = block_time(work("mixtral-8x7b", fp8_experts=1), replace(rates, rounding=15.0))
    assert rounding.moved > fast.moved
