"""Plans for several machines, and everything the planner refuses, raised once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.planning.machine_fit import need_and_promise
from phalanx.planning.planner import choose, plan_run
from phalanx.planning.search.search import SAFE
from phalanx.schedules.actions import dump
from phalanx.schedules.makers import make
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec, Moe
from phalanx.spec.plan import Gpu, Machine, Size
from phalanx.spec.run import Cluster, Memory, Precision, Run, Train

GIB = 2**30
UNTRADED = Memory(recompute="none", offload="none")
SMALL = ModelSpec(vocab=257)
LLAMA_8B = ModelSpec(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)
LLAMA_1B = ModelSpec(dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=128256, tied=True)


def laptop(cores: int = 8, memory: int = 16 * GIB, core_flops: float | None = 1e11) -> Machine:
    return Machine(host="laptop", cpu="some", cores=cores, memory=memory, core_flops=core_flops)


def server(gpus: int = 8, name: str = "NVIDIA H100 80GB HBM3", memory: int = 80 * GIB) -> Machine:
    return Machine(
        host="server", cpu="some", cores=96, memory=1024 * GIB, core_flops=1e11, gpus=(Gpu(name=name, memory=memory),) * gpus
    )


def small(batch: int = 32, sequence: int = 1024, micro: int | None = None, **tables: Any) -> Run:
    train = Train(batch=batch, sequence_length=sequence, steps=10, micro_batch=micro)
    return Run(**({"model": SMALL, "train": train} | tables))


def problems(run: Run, machine: Machine, ranks: int | None = None) -> tuple[str, ...]:
    with pytest.raises(RunError) as caught:
        choose(run, machine, ranks)
    for sentence in caught.value.problems:
        assert re.fullmatch(r"[^\n]+; [^\n]+\.", sentence), f"no remedy in: {sentence}"
        assert re.search(r"\d", sentence) or "cuda" in sentence, f"no value in: {sentence}"
    return caught.value.problems


# --- what is chosen -----------------------------------------------------------------------------------------------


def test_laptop_uses_its_cores() -> None:
    plan = choose(small(), laptop(8))
    assert (plan.device, plan.compute, plan.ranks, plan.threads) == ("cpu", "fp32", 8, 1)
    assert (plan.micro_batch, plan.accumulation) == (4, 1)  # 4096 tokens are 4 sequences
    assert plan.parameters == SMALL.parameters()
    assert plan.flops_per_token == SMALL.flops_per_token(1024)
    assert plan.peak_flops == pytest.approx(8e11)


def test_ranks_divide_the_batch_and_threads_take_the_rest() -> None:
    plan = choose(small(batch=10), laptop(8))
    assert (plan.ranks, plan.threads) == (5, 1)
    plan = choose(small(batch=3), laptop(8))
    assert (plan.ranks, plan.threads) == (3, 2)
    assert plan.peak_flops == pytest.approx(6e11)  # 3 ranks × 2 threads of 8 cores


def test_prime_batch_on_few_cores_is_one_rank() -> None:
    plan = choose(small(batch=7), laptop(4))
    assert (plan.ranks, plan.threads, plan.micro_batch, plan.accumulation) == (1, 4, 1, 7)


def test_given_cpu_ranks_and_threads_are_used() -> None:
    plan = choose(small(cluster=Cluster(cpu_ranks=16, threads=3)), laptop(8))
    assert (plan.ranks, plan.threads) == (16, 3)
    assert plan.peak_flops == pytest.approx(8e11)  # never more than the machine


def test_layout_beats_cpu_ranks() -> None:
    assert choose(small(layout=Layout(data=2), cluster=Cluster(cpu_ranks=4)), laptop(8)).ranks == 2


def test_cpu_ranks_shrink_to_what_memory_holds() -> None:
    run = small(model=LLAMA_1B, memory=UNTRADED)
    four = choose(replace(run, layout=Layout(data=4)), laptop(32, memory=1024 * GIB))
    assert four.promise is not None and four.promise.memory["fixed"] > 285 * 2**20, "an interpreter each"
    one, _ = need_and_promise(run, laptop(32), replace(four, micro_batch=1))
    plan = choose(run, laptop(32, memory=int(5 * one / 0.9)))
    assert (plan.ranks, plan.threads) == (4, 8)  # five would fit, four divide the batch
    assert choose(run, laptop(32, memory=int(3.9 * one / 0.9))).ranks < 4


def test_a_micro_batch_on_cores_shrinks_until_it_fits() -> None:
    run = small(batch=16, sequence=256, model=LLAMA_1B, layout=Layout(data=1))
    free, tight = (choose(run, laptop(8, memory=memory * GIB)) for memory in (64, 30))
    assert free.micro_batch == 16 > tight.micro_batch >= 1
    assert tight.promise is not None and tight.promise.total_memory <= 0.9 * 30 * GIB


def test_long_sequences_still_make_one_per_micro_batch() -> None:
    assert choose(small(sequence=16384), laptop(8)).micro_batch == 1


def test_unknown_processor_has_no_peak() -> None:
    assert choose(small(), laptop(core_flops=None)).peak_flops is None


def test_bf16_on_cpu_keeps_the_peak_of_fp32() -> None:
    plan = choose(small(precision=Precision(compute="bf16")), laptop(8))
    assert (plan.compute, plan.peak_flops) == ("bf16", pytest.approx(8e11))


def test_server_uses_its_gpus() -> None:
    plan = choose(small(batch=64), server(8))
    assert (plan.device, plan.compute, plan.ranks, plan.threads) == ("cuda", "bf16", 8, 12)
    assert (plan.micro_batch, plan.accumulation) == (8, 1)
    assert plan.peak_flops == pytest.approx(8 * 989.4e12)


def test_fewer_gpus_than_there_are_where_the_batch_asks_for_it() -> None:
    plan = choose(small(batch=6), server(8))
    assert plan.ranks == 6
    assert plan.peak_flops == pytest.approx(6 * 989.4e12)


def test_fp32_on_gpus_is_not_measured_against_tf32() -> None:
    plan = choose(small(precision=Precision(compute="fp32")), server(1))
    assert plan.peak_flops == pytest.approx(66.9e12)


def test_unknown_gpu_has_no_peak() -> None:
    assert choose(small(), server(2, name="NVIDIA Z999")).peak_flops is None


def test_cpu_device_on_a_gpu_server() -> None:
    plan = choose(small(cluster=Cluster(device="cpu")), server(8))
    assert (plan.device, plan.ranks, plan.compute) == ("cpu", 32, "fp32")


def test_given_layout_gets_the_planned_micro_batch() -> None:
    run = Run(model=LLAMA_1B, train=Train(batch=64, sequence_length=8192, steps=10), layout=Layout(data=1))
    plan = choose(run, server(1))
    assert plan.promise is not None and plan.promise.total_memory <= SAFE * 80 * GIB
    assert plan.micro_batch * plan.accumulation == 64
    resolved, times = plan_run(run, server(1)).run, {}
    for size in (1, 2, 4, 8, 16):
        other = replace(plan, micro_batch=size, accumulation=64 // size)
        _, promise = need_and_promise(resolved, server(1), other)
        if promise is not None and promise.total_memory <= SAFE * 80 * GIB:
            times[size] = promise.seconds
    # The smallest that is as fast as the fastest: a larger one would only take memory.
    assert plan.micro_batch == min(size for size, seconds in times.items() if seconds <= 1.01 * min(times.values()))
    assert times[plan.micro_batch] < times[1], "one sequence at a time is slower"


def test_gpu_that_fits_only_to_the_brim_gets_one_sequence() -> None:
    # Left open, the plan would find something roomier.
    given = small(model=LLAMA_1B, layout=Layout(data=1), memory=UNTRADED)
    need, _ = need_and_promise(given, server(1), replace(choose(given, server(1)), micro_batch=1))
    assert choose(given, server(1, memory=int(need) + 1)).micro_batch == 1
    (found,) = problems(given, server(1, memory=int(0.9 * need)))
    assert f"{need / GIB:.1f} GiB" in found


def test_a_given_layout_recomputes_only_where_it_must() -> None:
    given = small(batch=8, model=LLAMA_8B, layout=Layout(data=1, shard=8), sequence=4096)
    given = replace(given, memory=Memory(compile=False, loss_chunk=0))
    roomy, tight = plan_run(given, server(8, memory=141 * GIB)), plan_run(given, server(8, memory=40 * GIB))
    assert (roomy.run.memory.recompute, roomy.run.memory.offload) == ("none", "none")
    assert tight.run.memory.recomputes and not tight.run.memory.offloads
    assert tight.plan.promise is not None and tight.plan.promise.total_memory <= SAFE * 40 * GIB
    assert plan_run(given, server(8, memory=24 * GIB)).run.memory.offloads, (
        "where that does not do either, states leave the device"
    )


def test_pipelines_get_enough_micro_batches() -> None:
    plan = choose(small(batch=64, model=LLAMA_1B, layout=Layout(pipeline=4, data=1)), server(4))
    assert plan.accumulation >= 8 and plan.accumulation * plan.micro_batch == 64


def test_a_module_of_one_s_own_gets_a_micro_batch_by_its_parameters() -> None:
    own = small(batch=64, model=replace(SMALL, module="mine:Model"))
    sizes = [Size(parameters=n, active=n, flops_per_token=6.0 * n) for n in (10**7, 3 * 10**9, 10**10)]
    assert [choose(own, server(1), size=size).micro_batch for size in sizes[:2]] == [16, 2]
    with pytest.raises(RunError, match=r"needs about 158\.5 GiB with a micro-batch of 1 sequence but the NVIDIA H100"):
        choose(own, server(1), size=sizes[2])


def test_given_micro_batch_is_used() -> None:
    plan = choose(small(batch=64, micro=2), server(4))
    assert (plan.micro_batch, plan.accumulation) == (2, 8)


def test_ranks_started_elsewhere_become_the_layout() -> None:
    plan = choose(small(cluster=Cluster(cpu_ranks=8)), laptop(8), ranks=2)
    assert (plan.ranks, plan.threads, plan.layout.data) == (2, 4, 2)
    assert choose(small(), server(8), ranks=4).ranks == 4


def test_plan_with_batch_in_tokens() -> None:
    run = small(train=Train(batch_tokens=8192, sequence_length=1024, steps=1))
    plan = choose(run, laptop(4))
    assert plan.ranks * plan.micro_batch * plan.accumulation == 8


# --- what is refused ----------------------------------------------------------------------------------------------


def test_cuda_without_gpus_is_refused() -> None:
    (found,) = problems(small(cluster=Cluster(device="cuda")), laptop())
    assert 'cluster.device = "cpu"' in found and "phalanx doctor" in found


def test_more_ranks_than_gpus_is_refused() -> None:
    (found,) = problems(small(layout=Layout(data=8)), server(6))
    assert "8 ranks" in found and "6 GPUs" in found
    assert "layout.data = 4" in found and 'cluster.device = "cpu"' in found


def test_torchrun_started_more_than_there_are_gpus() -> None:
    (found,) = problems(small(), server(2), ranks=4)
    assert "4 ranks" in found and "2 GPUs" in found and "--nproc-per-node=2" in found


def test_too_many_cpu_ranks_are_refused() -> None:
    (found,) = problems(small(batch=512, layout=Layout(data=512)), laptop(128, memory=1024 * GIB))
    assert "512 CPU ranks" in found and "layout.data = 256" in found


def test_too_many_ranks_per_core_are_refused() -> None:
    (found,) = problems(small(batch=64, cluster=Cluster(cpu_ranks=64)), laptop(2))
    assert "64 CPU ranks" in found and "2 cores" in found and "cluster.cpu_ranks = 32" in found


def test_cpu_ranks_that_do_not_divide_the_batch() -> None:
    (found,) = problems(small(batch=8, cluster=Cluster(cpu_ranks=3)), laptop())
    assert "8 sequences" in found and "3 replicas" in found
    assert "cluster.cpu_ranks = 2" in found and "train.batch = 9" in found


def test_torchrun_ranks_that_do_not_divide_a_batch_in_tokens() -> None:
    run = small(train=Train(batch_tokens=8192, sequence_length=1024, steps=1))
    (found,) = problems(run, laptop(), ranks=3)
    assert "--nproc-per-node=2" in found and "train.batch_tokens = 9216" in found


def test_torchrun_and_the_layout_disagree() -> None:
    (found,) = problems(small(layout=Layout(data=4)), laptop(), ranks=3)
    assert "torchrun started 3 ranks but the layout has 4" in found


def test_micro_batch_that_does_not_divide_the_share() -> None:
    (found,) = problems(small(batch=32, micro=3), laptop(4))
    assert "train.micro_batch = 3" in found and "8 sequences" in found and "train.micro_batch = 2" in found


def test_model_too_large_for_the_gpu() -> None:
    (found,) = problems(small(model=LLAMA_8B, layout=Layout(data=8), memory=UNTRADED), server(8))
    assert "80.0 GiB" in found and "NVIDIA H100 80GB HBM3" in found and "smaller model" in found
    assert "remove [layout]" in found, "shared, it would fit"
    alone = small(model=LLAMA_8B, layout=Layout(data=1))
    (found,) = problems(alone, server(1, memory=16 * GIB))
    assert 'memory.recompute = "full"' in found and 'memory.offload = "cpu"' in found, "not even so"
    assert "[layout]" not in found


def test_model_too_large_for_main_memory() -> None:
    (found,) = problems(small(model=LLAMA_8B), laptop(8, memory=16 * GIB))
    assert "14.4 GiB of 16.0 GiB" in found and "cpu_ranks" not in found  # fewer ranks would not help


def test_too_many_ranks_for_main_memory() -> None:
    (found,) = problems(small(model=LLAMA_1B, layout=Layout(data=8), memory=UNTRADED), laptop(8, memory=64 * GIB))
    assert "layout.data = 2" in found and "shorter train.sequence_length" in found


def test_all_planning_problems_are_raised_at_once() -> None:
    run = small(batch=10, cluster=Cluster(device="cuda"), layout=Layout(data=4))
    assert len(problems(run, laptop(), ranks=2)) == 3  # no GPU, torchrun disagrees, the batch does not divide


# --- what only shows when ranks, device and micro-batches are known --------------------------------------------------


def test_the_ranks_left_for_data_must_hold_the_experts() -> None:
    moe = replace(SMALL, moe=Moe(experts=8, active=2, ffn=64))
    run = small(batch=30, model=moe, layout=Layout(data=None, expert=4))
    with pytest.raises(RunError, match=r"= 4 does not divide the 6 ranks of a pipeline stage .*: set layout\.expert to 2\."):
        choose(run, laptop(6), 6)


def test_fp8_needs_a_gpu_that_multiplies_in_it() -> None:
    run = small(precision=Precision(compute="fp8"))
    assert choose(run, server()).compute == "fp8"
    with pytest.raises(
        RunError, match=r'needs GPUs that multiply in it, but this machine has .*: set precision\.compute = "bf16"'
    ):
        choose(run, server(name="NVIDIA A100-SXM4-80GB"))


def test_a_schedule_of_ones_own_is_for_as_many_ranks_as_it_names(tmp_path: Path) -> None:
    file = tmp_path / "order.txt"
    file.write_text(dump(make("1f1b", 2, 4)))
    run = small(layout=Layout(pipeline=4, data=1, schedule_file=str(file)), micro=8)
    with pytest.raises(RunError, match="2 ranks"):
        choose(run, laptop(4))
