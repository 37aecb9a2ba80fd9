"""Which keys are varied, on which machines, and what the plan rules out before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from comparison.step_jobs import MODELS, tiny_run

from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Gpu, Machine
from phalanx.spec.run import Checkpoint, Cluster, Memory, Optimizer, Run, Train, Watch
from phalanx.tuning.trial_run import Planner, Side, trial_run, with_keys, words_of
from phalanx.tuning.tunable_keys import DIMENSIONS, Situation, fixed_keys, obeyed

CORES = Machine(host="h", cpu="a CPU", cores=4, memory=64 << 30, core_flops=1e11)
H200 = Gpu(name="NVIDIA H200", memory=140 << 30)
ONE_GPU = Machine(host="h", cpu="c", cores=8, memory=1 << 37, gpus=(H200,))
FOUR_GPUS = replace(ONE_GPU, gpus=4 * (H200,))
LARGE = ModelSpec(dim=2048, layers=16, heads=32, kv_heads=8, vocab=128_256, context=4096)


def large_run(**changes: Any) -> Run:
    return tiny_run(LARGE, train=Train(batch=8, sequence_length=4096, steps=1), cluster=Cluster(), **changes)


def proposals(
    run: Run, machine: Machine, fixed: frozenset[str] = frozenset(), loading: float | None = 0.0
) -> dict[str, list[Mapping[str, Any]]]:
    one, machine = trial_run(run, machine)
    now = Situation(base=Planner(machine).defaults(one), machine=machine, fixed=fixed, loading=loading)
    return {dimension.key: list(dimension.values(now)) for dimension in DIMENSIONS}


def test_one_gpu_varies_graphs_chunks_and_compilation_but_nothing_of_several_ranks() -> None:
    found = proposals(large_run(), ONE_GPU)
    assert found["memory.cuda_graphs"] == [{"memory.cuda_graphs": True}, {"memory.cuda_graphs": False}]
    assert found["memory.compile"] == [{"memory.compile": False}], "by default, blocks are compiled"
    assert found["memory.loss_chunk"] and all(chunk["memory.loss_chunk"] >= 0 for chunk in found["memory.loss_chunk"])
    assert not found["memory.bucket_size"] and not found["layout"] and not found["cluster.threads"]
    assert found["train.micro_batch"] == [{"train.micro_batch": 4}], "of 8 sequences, all fit at once"


def test_several_gpus_vary_their_layout_and_buckets() -> None:
    found = proposals(large_run(layout=Layout(data=4)), FOUR_GPUS)
    assert 1 <= len(found["layout"]) <= 3
    assert all(changes["layout"].ranks == 4 and changes["layout"] != Layout(data=4) for changes in found["layout"])
    sizes = [changes["memory.bucket_size"] for changes in found["memory.bucket_size"]]
    assert set(sizes) == {1, 4, 16, 64, 256} and sizes[0] in (16, 64), "the nearest sizes first"
    assert not found["memory.cuda_graphs"]


def test_cores_vary_ranks_and_threads_unless_they_are_given() -> None:
    run = tiny_run(train=Train(batch=8, sequence_length=64, steps=1), cluster=Cluster(device="cpu"))
    assert {changes["layout"].ranks for changes in proposals(run, CORES)["layout"]} - {4}
    given = tiny_run(train=Train(batch=8, sequence_length=64, steps=1), cluster=Cluster(device="cpu", cpu_ranks=2, threads=1))
    found = proposals(given, CORES, frozenset({"cluster.cpu_ranks"}))
    full = replace(given, cluster=replace(given.cluster, cpu_ranks=4))
    assert not proposals(full, CORES)["cluster.threads"], "each core has a rank"
    assert {changes["layout"].ranks for changes in found["layout"]} == {2}
    assert found["cluster.threads"] == [{"cluster.threads": 2}]


def test_a_small_vocabulary_is_not_chunked_and_few_parameters_need_one_bucket() -> None:
    found = proposals(tiny_run(layout=Layout(data=2)), CORES)
    assert not found["memory.loss_chunk"] and not found["memory.bucket_size"]


def test_batches_are_prepared_further_ahead_only_where_steps_wait_for_them() -> None:
    assert not proposals(tiny_run(), CORES, loading=0.001)["data.prefetch"]
    assert proposals(tiny_run(), CORES, loading=0.2)["data.prefetch"] == [{"data.prefetch": 4}, {"data.prefetch": 8}]


def test_replicas_that_train_alone_keep_their_number() -> None:
    run = tiny_run(layout=Layout(data=2), optimizer=Optimizer(sync_every=4))
    assert not proposals(run, CORES)["layout"], "DiLoCo with other replicas is another computation"


def test_no_dimension_changes_what_a_run_computes() -> None:
    """Of everything that any machine proposes, no key is one that decides about the weights."""
    from phalanx.spec.dump import changed

    for run, machine in ((large_run(), ONE_GPU), (large_run(layout=Layout(data=4)), FOUR_GPUS), (tiny_run(), CORES)):
        for values in proposals(run, machine, loading=0.5).values():
            for changes in values:
                assert not changed(run, with_keys(run, changes)), changes


def test_what_does_not_fit_is_ruled_out() -> None:
    small = replace(ONE_GPU, gpus=(replace(H200, memory=36 << 30),))
    one, machine = trial_run(large_run(memory=Memory(recompute="full")), small)
    planner = Planner(machine)
    base = planner.defaults(one)
    assert base.need < 36 << 30
    with pytest.raises(RunError, match="needs about"):
        planner.changed(base, {"memory.recompute": "none", "train.micro_batch": 8})


def test_an_illegal_combination_is_ruled_out_with_its_reason() -> None:
    one, machine = trial_run(tiny_run(MODELS["qwen3-moe"], layout=Layout(data=1)), CORES)
    planner = Planner(machine)
    with pytest.raises(RunError, match="cuda_graphs"):
        planner.changed(planner.defaults(one), {"memory.cuda_graphs": True})


def test_keys_of_the_run_file_are_obeyed_unless_they_are_named() -> None:
    given = frozenset({"train.micro_batch", "layout.data", "memory.compile", "train.batch"})
    layout, micro = (next(one for one in DIMENSIONS if one.key == key) for key in ("layout", "train.micro_batch"))
    fixed = fixed_keys(given, frozenset())
    assert obeyed(layout, fixed) == ["layout.data"] and obeyed(micro, fixed) == ["train.micro_batch"]
    fixed = fixed_keys(given, frozenset({"layout", "train.micro_batch"}))
    assert not obeyed(layout, fixed) and not obeyed(micro, fixed) and "memory.compile" in fixed


def test_trials_do_nothing_between_steps_and_change_nothing_within_them() -> None:
    run = replace(
        tiny_run(), checkpoint=Checkpoint(every=5), watch=Watch(tensorboard=True, page=True), train=Train(batch=4, tokens=10**6)
    )
    one, _ = trial_run(run, CORES)
    assert (one.checkpoint.save, one.watch, one.train.eval_every) == (False, Watch(), None)
    assert one.batch == run.batch and one.optimizer == run.optimizer and one.train.seed == run.train.seed


def test_fewer_ranks_keep_the_share_of_each_replica() -> None:
    run = tiny_run(layout=Layout(data=64, tensor=2), train=Train(batch=256, sequence_length=64, steps=1))
    one, _ = trial_run(run, CORES, ranks=4)
    assert (one.layout.data, one.layout.tensor, one.batch) == (2, 2, 8)
    one, machine = trial_run(large_run(), FOUR_GPUS, ranks=2)
    assert len(machine.gpus) == 2 and one.batch == 8


def test_names_are_those_of_keys() -> None:
    assert words_of(("memory.compile", True)) == "memory.compile = true"
    assert words_of(("layout", Layout(data=2, shard=4, zero=1))) == "layout: data 2, shard 4, ZeRO-1"
    assert words_of(("layout", Layout(data=1))) == "layout: one rank"
    one, machine = trial_run(tiny_run(), CORES)
    base: Side = Planner(machine).defaults(one)
    assert base.name == "defaults"
