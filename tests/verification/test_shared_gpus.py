"""Ranks that share GPUs, without a GPU: an accelerator that says it is one and computes on the CPU. Ranks are placed on it, use gloo alone and
send messages to each other through host memory, as they do on a real one (`tests/gpu/test_ranks_on_one_gpu.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import tiny_run
from rich.console import Console
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Backend, BackendConfig

from phalanx import accelerator
from phalanx.accelerator import Accelerator
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Gpu, Machine
from phalanx.verification.cases import MODELS, generate_layouts, gpus_of, make_case
from phalanx.verification.parity import prove
from phalanx.verification.rank_pool import RankPool
from phalanx.verification.verify_report import show_report

H200 = Gpu(name="NVIDIA H200", memory=141 << 30)
GPUS = 3


class FakeGpus(Accelerator):
    """Three GPUs that are the CPU. It remembers which one a rank has asked for."""

    type = "cuda"
    backend = "gloo"
    shared_backend = "cpu:gloo"
    asynchronous = True

    def __init__(self) -> None:
        self.index: int | None = None

    def count(self) -> int:
        return GPUS

    def device(self, index: int = 0) -> torch.device:
        self.index = index
        return super().device(index)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    """A pool of four ranks on the fake GPUs."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")  # the pool sets it; afterwards it is as before
    real = accelerator.of("cuda")
    accelerator.register(FakeGpus())
    try:
        with RankPool(4, device="cuda") as pool:
            yield pool
    finally:
        accelerator.register(real)


def placed(mesh: Mesh) -> tuple[Any, ...]:
    kind = accelerator.of("cuda")
    assert isinstance(kind, FakeGpus)
    world = distributed_c10d._get_default_group()
    group = mesh.group("data", use="pipeline")
    return kind.index, str(distributed_c10d._world.pg_backend_config[world]), mesh.via_host, group.via_host


def test_ranks_take_gpus_in_turn_and_gloo_only_where_they_share_them(fake: RankPool) -> None:
    assert fake.run(placed, Layout(data=4)) == [(index, "cpu:gloo", True, True) for index in (0, 1, 2, 0)]
    (first, backend, *via_host), second = fake.run(placed, Layout(data=2))
    assert (first, second[0]) == (0, 1)
    assert backend == str(BackendConfig(Backend("gloo")))  # the fake GPUs' own one
    assert via_host == [False, False]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", Layout(data=1, pipeline=2, context=2)),
        ("moe", Layout(data=1, pipeline=2, expert=2, schedule="dualpipev", shard=2, zero=2)),
        pytest.param("gpt", Layout(data=1, pipeline=4, schedule="1f1b"), marks=pytest.mark.slow),
        pytest.param("mla-dense", Layout(data=1, context=4), marks=pytest.mark.slow),
    ],
    ids=["ring and pipeline", "overlapping passes", "pipeline", "ring"],
)
def test_messages_through_host_memory_give_what_one_device_computes(model: str, layout: Layout, fake: RankPool) -> None:
    run = replace(tiny_run("train.sequence_length=48"), model=MODELS[model], layout=layout)
    report = prove(make_case(run, ranks=4, steps=2), pool=fake)
    assert report.passed, report.failure or report.first


def test_a_message_never_leaves_or_enters_the_memory_of_the_device() -> None:
    """The meta device is the GPU here: whatever is given to the socket must be host memory."""
    group = Group(ranks=(0, 1), index=0, use="pipeline", handle=None, via_host=True)
    gpu = torch.device("meta")
    incoming = group.incoming([3, 2], torch.bfloat16, gpu)
    assert (incoming.device.type, incoming.shape, incoming.dtype) == ("cpu", (3, 2), torch.bfloat16)
    assert group.received(incoming, gpu).device.type == "meta"
    turned = torch.arange(6.0).view(2, 3).T
    sent = group.outgoing(turned)
    assert sent.is_contiguous() and sent.equal(turned) and not shares_memory(sent, turned)


def test_with_a_gpu_for_each_rank_messages_are_not_copied() -> None:
    group = Group(ranks=(0, 1), index=0, use="pipeline", handle=None)
    gpu, tensor = torch.device("meta"), torch.ones(2)
    incoming = group.incoming([2], torch.float32, gpu)
    assert incoming.device.type == "meta" and group.received(incoming, gpu) is incoming
    assert shares_memory(group.outgoing(tensor), tensor)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_a_case_on_gpus_is_what_would_train_there() -> None:
    run = tiny_run("layout.data=4")
    case = make_case(run, steps=2, gpus=(H200,))
    assert (case.plan.device, case.plan.compute, case.plan.ranks, case.gpus) == ("cuda", "bf16", 4, 1)
    assert case.reference_plan.device == "cuda" and case.reference_plan.ranks == 1
    assert case.run.memory.compile and not case.reference.memory.compile
    assert case.run.optimizer.eps == 1e-2  # as for bf16 that is asked for
    shared, compiled = case.notes[-2:]
    assert shared.startswith("4 ranks share one GPU: gloo") and compiled.startswith("Blocks of the ranks are compiled")
    own = make_case(run, steps=2, gpus=(H200,) * 8)
    assert own.gpus == 4 and not any("share" in note for note in own.notes)
    assert make_case(run, steps=2).run.memory == run.memory and make_case(run, steps=2).gpus == 0


def test_keys_that_are_set_are_obeyed_on_gpus() -> None:
    run = tiny_run("layout.data=2", "precision.compute=fp32", "memory.compile=false", "memory.recompute=full")
    case = make_case(run, gpus=(H200,))
    assert case.plan.compute == "fp32" and case.run.optimizer.eps == 1e-4
    assert case.run.memory.compile is False and case.run.memory.recompute == "full"


def test_generated_layouts_are_those_of_cpus_and_compile_only_if_asked() -> None:
    on_cpu, on_gpu = (generate_layouts(tiny_run(), 4, count=10, gpus=gpus) for gpus in ((), (H200,)))
    assert [run.layout for run in on_cpu] == [run.layout for run in on_gpu]
    cases = [make_case(run, ranks=4, gpus=(H200,)) for run in on_gpu]
    assert not any(case.run.memory.compile for case in cases)
    assert {case.plan.device for case in cases} == {"cuda"}
    asked = generate_layouts(tiny_run("memory.compile=true"), 4, count=10, gpus=(H200,))
    assert all(make_case(run, ranks=4, gpus=(H200,)).run.memory.compile for run in asked)


def test_the_report_says_how_many_gpus(fake: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    case = make_case(tiny_run("layout.data=4"), ranks=4, steps=1)
    report = prove(replace(case, gpus=1), pool=fake)
    assert report.to_json()["gpus"] == 1 and report.to_json()["device"] == "cpu"
    show_report(Console(width=200), report)
    assert "DP4: 4 ranks on 1 GPU against one process" in capsys.readouterr().out


def test_a_device_that_is_not_there_is_refused() -> None:
    bare = Machine(host="here", cpu="any", cores=2, memory=1 << 30)
    assert gpus_of(bare, "cpu") == () and gpus_of(replace(bare, gpus=(H200,)), "cpu") == ()
    assert gpus_of(replace(bare, gpus=(H200,)), "cuda") == (H200,)
    with pytest.raises(RunError, match=r"--device cuda needs a GPU.*phalanx doctor"):
        gpus_of(bare, "cuda")
    with pytest.raises(RunError, match='--device tpu is not known: use "cpu" or "cuda"'):
        gpus_of(bare, "tpu")
