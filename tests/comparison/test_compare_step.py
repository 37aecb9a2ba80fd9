"""How trainers take turns, what happens if one fails or does not fit, and what is refused before anything starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from comparison.step_jobs import LLAMA, MACHINE, MODELS, tiny_run

from phalanx.comparison import compare_step
from phalanx.comparison.compare_step import TRAINERS, ComparisonSettings, bench_run, compare
from phalanx.comparison.step_messages import Built, Failed, TakeSteps, TrainerJob, Turn, decode, encode
from phalanx.comparison.trainer_process import failure
from phalanx.host.env import python_env
from phalanx.spec.engine import Engine
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Gpu, Machine, Plan
from phalanx.spec.run import Checkpoint, Cluster, Memory, Optimizer, Precision, Run, Train

GPU = Machine(host="h", cpu="c", cores=8, memory=1 << 37, gpus=(Gpu(name="NVIDIA H200", memory=140 << 30),))


class Scripted:
    """In place of a trainer's process: does what a test has written down."""

    diary: ClassVar[list[str]] = []
    failures: ClassVar[dict[tuple[str, str], Failed]] = {}
    """(trainer, "built" or "take") to the failure, if another trainer is alive; "alone take": in any case."""
    retries: ClassVar[dict[str, int]] = {}
    alive: ClassVar[set[str]] = set()
    environments: ClassVar[list[Mapping[str, str]]] = []

    def __init__(self, job: TrainerJob, env: Mapping[str, str], log: Path):
        self.job, self.name = job, job.trainer
        self.alive.add(self.name)
        self.environments.append(env)
        self.diary.append(f"start {self.name}")

    def _fail(self, when: str) -> None:
        keys = [f"alone {when}", *([when] if len(self.alive) > 1 else [])]
        for key in keys:
            if failed := self.failures.get((self.name, key)):
                raise compare_step._TrainerFailed(failed)

    def receive(self, expected: type[Built]) -> Built:
        self._fail("built")
        return Built(version="1", settings="scripted", compute="fp32", token_losses=(1.0, 2.0))

    def take(self, steps: int) -> Turn:
        self._fail("take")
        self.diary.append(f"{self.name} {steps}")
        times = tuple(0.5 for _ in range(steps))
        crowded = self.retries.get(self.name, 0) if len(self.alive) > 1 else 0
        return Turn(
            seconds=times, cpu_seconds=times, losses=tuple(3.0 for _ in times), memory=100, reserved=None, retries=crowded
        )

    def close(self) -> None:
        self.alive.discard(self.name)
        self.diary.append(f"end {self.name}")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    for name, value in (("diary", []), ("failures", {}), ("retries", {}), ("alive", set()), ("environments", [])):
        monkeypatch.setattr(Scripted, name, value)
    monkeypatch.setattr(compare_step, "_Process", Scripted)
    monkeypatch.setattr(compare_step, "_absent", lambda name: None)
    return Scripted


def settings(*trainers: str, **changes: Any) -> ComparisonSettings:
    values: dict[str, Any] = {"trainers": trainers or ("phalanx", "hand"), "steps": 7, "warmup": 2, "rounds": 3}
    return ComparisonSettings(**values | changes)


def test_trainers_stay_alive_and_take_turns(scripted: type[Scripted]) -> None:
    report = compare(tiny_run(), MACHINE, settings())
    starts = ["start phalanx", "phalanx 2", "start hand", "hand 2"]
    turns = ["phalanx 2", "hand 2", "hand 2", "phalanx 2", "phalanx 3", "hand 3"]
    assert scripted.diary == [*starts, *turns, "end hand", "end phalanx"]
    assert [len(result.seconds) for result in report.ran] == [7, 7] and not report.fresh
    assert report.results[0].losses == (3.0, 3.0, 3.0), "of the warm-up and the first turn"
    assert len(set(map(str, scripted.environments))) == 1, "all have the same environment"


def test_where_memory_is_short_every_turn_is_a_fresh_process(scripted: type[Scripted]) -> None:
    need = bench_run(tiny_run(), MACHINE, settings()).need
    report = compare(tiny_run(), replace(MACHINE, memory=int(1.5 * need)), settings(steps=2, rounds=2))
    one = ["start phalanx", "phalanx 2", "phalanx 1", "end phalanx"]
    other = ["start hand", "hand 2", "hand 1", "end hand"]
    assert scripted.diary == [*one, *other, *other, *one]
    assert report.fresh and [len(result.seconds) for result in report.ran] == [2, 2]


@pytest.mark.parametrize("when", ["built", "take"])
def test_what_runs_out_of_memory_next_to_others_runs_alone(scripted: type[Scripted], when: str) -> None:
    scripted.failures["hand", when] = Failed(reason="out of memory", out_of_memory=True)
    report = compare(tiny_run(), MACHINE, settings())
    assert report.fresh and [result.name for result in report.ran] == ["phalanx", "hand"]
    assert [len(result.seconds) for result in report.ran] == [7, 7], "nothing that was measured in a crowd is kept"
    assert not scripted.alive


def test_a_crowded_allocator_counts_as_short_of_memory(scripted: type[Scripted]) -> None:
    scripted.retries["hand"] = 3
    assert compare(tiny_run(), MACHINE, settings()).fresh


def test_a_failure_is_a_reason_and_the_others_go_on(scripted: type[Scripted]) -> None:
    scripted.failures["hand", "alone take"] = Failed(reason="ValueError: no")
    scripted.failures["transformers", "alone built"] = Failed(reason="ImportError: broken")
    report = compare(tiny_run(), MACHINE, settings("phalanx", "transformers", "hand"))
    assert {result.name: result.reason for result in report.results} == {
        "phalanx": None,
        "transformers": "ImportError: broken",
        "hand": "ValueError: no",
    }
    assert len(report.ran[0].seconds) == 7 and report.ratio is None and not scripted.alive


def test_out_of_memory_alone_is_a_reason(scripted: type[Scripted]) -> None:
    scripted.failures["hand", "alone take"] = Failed(reason="out of memory", out_of_memory=True)
    report = compare(tiny_run(), MACHINE, settings())
    assert report.fresh and report.results[1].reason == "out of memory" and len(report.ran) == 1


def test_processes_end_if_the_comparison_is_interrupted(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Scripted, steps: int) -> Turn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scripted, "take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compare(tiny_run(), MACHINE, settings())
    assert scripted.diary == ["start phalanx", "end phalanx"] and not scripted.alive


def test_a_peer_that_is_not_installed_says_how_to_install_it(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(
        compare_step, "find_spec", lambda package: None if package in ("transformers", "torchtitan") else object()
    )
    assert compare_step._absent("transformers") == 'not installed: pip install "phalanx[hf]"'
    assert compare_step._absent("torchtitan") == "not installed: pip install torchtitan"
    assert compare_step._absent("phalanx") is None and compare_step._absent("hand") is None
    monkeypatch.setattr(compare_step, "find_spec", lambda package: None if package == "torchax" else object())
    assert compare_step._absent("phalanx-xla") == 'not installed: pip install "phalanx[xla]"'
    assert compare_step._absent("jax") is None


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "perhaps because the machine ran out of memory"), (signal.SIGABRT, "ended by SIGABRT")],
)
def test_a_process_that_dies_without_a_word_has_a_reason(tmp_path: Path, number: signal.Signals, reason: str) -> None:
    job = TrainerJob(trainer="hand", run="", plan="", compile=False, folder=str(tmp_path), parent=os.getpid())
    process = compare_step._Process(job, python_env(), tmp_path / "hand.log")
    os.kill(process._process.pid, number)  # while it still imports torch
    with pytest.raises(compare_step._TrainerFailed, match=reason):
        process.receive(Built)
    process.close()


def test_an_error_of_a_peer_is_a_short_reason() -> None:
    long = failure(ValueError("first line\nsecond line " + "x" * 500))
    assert long.reason.startswith("ValueError: first line second line") and len(long.reason) <= 160
    assert failure(RunError(["the sentence.", "another."])).reason == "the sentence."
    assert failure(torch.OutOfMemoryError("CUDA out of memory. Tried …")) == Failed(reason="out of memory", out_of_memory=True)
    assert failure(RuntimeError("CUDA error: out of memory")).out_of_memory


def test_the_run_is_one_rank_and_one_micro_batch() -> None:
    run = tiny_run(
        train=Train(batch_tokens=64 * 48, sequence_length=64, tokens=10**9, eval_every=5),
        layout=Layout(data=2, tensor=2),
        checkpoint=Checkpoint(every=3, export_hf=True),
        cluster=Cluster(device="cpu", threads=1, nodes=4, name="h100-8"),
    )
    planned = bench_run(run, MACHINE, settings(micro_batch=3))
    one, plan = planned.run, planned.plan
    assert (plan.ranks, plan.micro_batch, plan.accumulation, one.batch) == (1, 3, 1, 3)
    assert one.steps > 9 and one.train.eval_every is None and one.checkpoint == Checkpoint()
    chosen = bench_run(run, MACHINE, settings()).plan
    assert chosen.accumulation == 1 and 48 % chosen.micro_batch == 0, "the plan's choice, of the run's own batch"
    assert bench_run(replace(run, train=replace(run.train, micro_batch=6)), MACHINE, settings()).plan.micro_batch == 6


def remembered_jobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, TrainerJob]:
    """What every trainer that is started from now on is asked for."""
    jobs: dict[str, TrainerJob] = {}
    begin = Scripted.__init__

    def remember(self: Scripted, job: TrainerJob, env: Mapping[str, str], log: Path) -> None:
        jobs[job.trainer] = job
        begin(self, job, env, log)

    monkeypatch.setattr(Scripted, "__init__", remember)
    return jobs


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("machine", [MACHINE, GPU], ids=["cpu", "gpu"])
def test_what_is_compiled(
    scripted: type[Scripted], given: bool | None, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = remembered_jobs(monkeypatch)
    run = tiny_run(replace(LLAMA, vocab=512), cluster=Cluster())
    compare(run, machine, settings(compile=given))
    expected = given if given is not None else bool(machine.gpus)
    assert jobs["hand"].compile is expected and jobs["phalanx"].compile is expected
    assert bool(loads(jobs["phalanx"].run).memory.compile) is expected
    assert jobs["hand"].folder != jobs["phalanx"].folder
    assert jobs["hand"].run == jobs["phalanx"].run and jobs["hand"].plan == jobs["phalanx"].plan


def test_the_xla_engine_has_a_plan_of_its_own(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = remembered_jobs(monkeypatch)
    run = tiny_run(replace(LLAMA, vocab=128256), cluster=Cluster(), memory=Memory(compile=True))
    report = compare(run, GPU, settings("phalanx", "phalanx-xla", "jax"))
    assert [result.reason for result in report.results] == [None, None, None]
    ours, theirs = (loads(jobs[name].run) for name in ("phalanx", "phalanx-xla"))
    assert (ours.engine.name, theirs.engine.name) == ("torch", "xla") and jobs["jax"].run == jobs["phalanx"].run
    assert ours.memory.compile is True and theirs.memory.compile is None, "a key of the torch engine"
    assert theirs.memory.recompute == "selective", "storing what lies between products costs more on GPUs"
    assert theirs.memory.loss_chunk == ours.memory.loss_chunk == 8192
    plans = [Plan.from_json(jobs[name].plan) for name in ("phalanx", "phalanx-xla")]
    assert plans[0].micro_batch == plans[1].micro_batch and plans[0].compute == plans[1].compute == "bf16"


def test_what_the_xla_engine_does_not_compute_is_its_reason(scripted: type[Scripted]) -> None:
    run = tiny_run(cluster=Cluster(), precision=Precision(compute="fp8"))
    report = compare(run, GPU, settings("phalanx", "phalanx-xla"))
    assert report.results[0].reason is None and "has no loss scale and no scaled products" in str(report.results[1].reason)
    assert "start phalanx-xla" not in scripted.diary


def test_a_run_of_the_xla_engine_is_compared_too(scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = remembered_jobs(monkeypatch)
    compare(tiny_run(engine=Engine(name="xla")), MACHINE, settings("phalanx", "phalanx-xla"))
    assert [loads(jobs[name].run).engine.name for name in ("phalanx", "phalanx-xla")] == ["torch", "xla"]


def test_peaks_are_those_of_the_device(scripted: type[Scripted]) -> None:
    run = tiny_run(replace(LLAMA, vocab=512), cluster=Cluster())
    report = compare(run, GPU, settings())
    assert report.peaks["bf16"] == pytest.approx(989e12, rel=0.01) and report.peaks["fp8"] == pytest.approx(1979e12, rel=0.01)
    assert report.device == "NVIDIA H200"
    on_cpu = compare(tiny_run(), MACHINE, settings())
    assert on_cpu.peaks["fp32"] == 1e11 and on_cpu.device == "1 thread of a CPU"


@pytest.mark.parametrize(
    ("run", "chosen", "sentence"),
    [
        (
            tiny_run(optimizer=Optimizer(name="muon")),
            settings(),
            'optimizer.name = "muon": all trainers are compared with AdamW',
        ),
        (tiny_run(precision=Precision(compute="fp16")), settings(), 'precision.compute = "fp16": peers do not scale'),
        (tiny_run(), settings("phalanx", "megatron"), f"--peers megatron is not known: choose from {', '.join(TRAINERS)}"),
        (tiny_run(), settings(trainers=()), "--peers names no trainer"),
        (tiny_run(), settings(rounds=8), "--rounds 8 is more than --steps 7"),
        (tiny_run(), settings(warmup=0), "--warmup 0 must be at least 1"),
        (tiny_run(MODELS["gpt2"], train=Train(batch=1, sequence_length=512, steps=1)), settings(), "sequence_length = 512"),
        (tiny_run(cluster=Cluster(device="cuda")), settings(), "no GPU"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    scripted: type[Scripted], run: Run, chosen: ComparisonSettings, sentence: str
) -> None:
    with pytest.raises(RunError) as refused:
        compare(run, MACHINE, chosen)
    assert sentence in str(refused.value) and not scripted.diary


def test_missing_text_is_refused_before_anything_starts(scripted: type[Scripted], tmp_path: Path) -> None:
    run = tiny_run()
    run = replace(run, data=replace(run.data, source="text", documents=(), paths=(str(tmp_path / "none.txt"),)))
    with pytest.raises(RunError, match=r"none\.txt"):
        compare(run, MACHINE, settings())
    assert not scripted.diary


def test_messages_survive_the_pipe() -> None:
    messages = (
        TrainerJob(trainer="hand", run="[train]\n", plan="{}", compile=True, folder="/f", parent=1),
        TakeSteps(steps=3),
        Built(version="1", settings="é", compute="fp32", token_losses=(0.1, 2.0)),
        Turn(seconds=(0.1,), cpu_seconds=(0.2,), losses=(float("inf"),), memory=1, reserved=None, retries=0),
        Failed(reason="two\nlines", out_of_memory=True),
    )
    for message in messages:
        line = encode(message)
        assert line.count("\n") == 1 and decode(line) == message
