"""Real hangs in real ranks, asked about from a thread of each."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, tiny_run, tiny_trainer

from phalanx.events.heartbeat import Beat, Heartbeat, read
from phalanx.observe import comm_timer
from phalanx.optim import adamw
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.recovery.diagnose import Diagnosis, Report, diagnose
from phalanx.spec.layout import Layout
from phalanx.training.trainer import Trainer
from phalanx.worker.hang_report import STACK_DUMP_SIGNAL, hang_report, register_stack_dump

GUILTY = 1
SETTLED = 0.6
"""Seconds after which every other rank waits."""
DELAY = 0.4
"""Seconds that a slow rank takes longer; much more than four ranks can take from each other on two cores."""


class Hang:
    """A place where the guilty rank stands until all have been asked."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        if not self.over.is_set():
            self.reached.set()
            self.over.wait(20)


def before(function: Callable[..., Any], first: Callable[..., None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return both


def in_loader(trainer: Trainer, hang: Hang) -> None:
    trainer.feed.close()
    data: Any = trainer.data.train
    object.__setattr__(data, "batch", before(data.batch, hang))


def in_forward(trainer: Trainer, hang: Hang) -> None:
    modules = [module for part in trainer.sharded.parts for name, module in part.named_modules() if name.endswith(".attention")]
    modules[-1].register_forward_pre_hook(hang)


def in_optimizer(trainer: Trainer, hang: Hang) -> None:
    adamw.fused_adamw = before(adamw.fused_adamw, hang)


def before_collective(trainer: Trainer, hang: Hang) -> None:
    Group.start_all_reduce = before(Group.start_all_reduce, hang)


def settled(ask: Callable[[], Any]) -> Any:
    """The answer of a rank that has come to a standstill."""
    deadline, last = time.monotonic() + 60, ask()
    while time.monotonic() < deadline:
        time.sleep(SETTLED / 2)
        answer = ask()
        if answer == last:
            return answer
        last = answer
    raise TimeoutError(f"it does not stand still: {last}")


def asked(mesh: Mesh, path: Path, plant: Callable[[Trainer, Hang], None], overrides: tuple[str, ...]) -> dict[str, Any]:
    """What this rank's thread says while the guilty one hangs in the step after the first."""
    trainer = tiny_trainer(mesh, tiny_run(*overrides), path)
    modules = {id(module): name for part in trainer.sharded.parts for name, module in part.named_modules() if name}
    trainer.step()
    hang, main, answers = Hang(), threading.get_ident(), []
    if mesh.rank == GUILTY:
        plant(trainer, hang)

    def ask() -> None:
        if mesh.rank == GUILTY:
            hang.reached.wait(20)
            mesh.store_set("hangs", "now")
        mesh.store_get("hangs")
        answers.append(settled(lambda: hang_report(main, modules, mesh)))
        mesh.store_add("answers", 1)
        while mesh.store_add("answers", 0) < mesh.ranks:
            time.sleep(0.02)
        hang.over.set()

    thread = threading.Thread(target=ask)
    mesh.barrier()
    thread.start()
    trainer.step()
    trainer.step()  # who hangs after the last collective of a step is missed in the next
    thread.join()
    trainer.close()
    return dict(answers[0])


def judged(answers: list[dict[str, Any]]) -> Diagnosis:
    for answer in answers:
        assert answer["problem"] is None
        assert json.loads(json.dumps(answer)) == answer
    return diagnose([Report(rank=r, node=0, beat=Beat(step=1), location=a, silent=7.0) for r, a in enumerate(answers)])


DATA = Layout(data=4)


@pytest.mark.parametrize(
    ("plant", "layout", "overrides", "operation", "place"),
    [
        (in_loader, DATA, (), "all_reduce", "it is in the data loader: "),
        (in_optimizer, DATA, (), "all_reduce", "it is in the optimizer: "),
        (before_collective, DATA, (), "all_reduce", "it is in the backward: "),
        (in_forward, Layout(tensor=2, data=2), (), "all_reduce", "it is in the forward of layer blocks.1.attention: "),
        (in_forward, Layout(shard=4, zero=3), ("layout.shard=4", "layout.zero=3"), "all_gather", "forward of layer blocks.1.attention: "),
        (in_forward, Layout(shard=4, zero=1), ("layout.shard=4", "layout.zero=1"), "reduce_scatter", "forward of layer blocks.1.attention: "),
    ],
)  # fmt: skip
def test_a_planted_hang_is_found(
    tmp_path: Path, plant: Any, layout: Layout, overrides: tuple[str, ...], operation: str, place: str
) -> None:
    answers = run_ranks(asked, 4, tmp_path, plant, overrides, layout=layout)
    found = judged(answers)
    assert found.culprits == (GUILTY,) and found.certain
    assert f"has not reached {operation} #" in found.message and " of step 2; 3 ranks have waited for 7 s; " in found.message
    assert place in found.message
    assert "in hang" in found.stack or "in __call__" in found.stack
    for rank in {0, 2, 3}:
        assert answers[rank]["operation"] is not None and answers[rank]["use"] is not None


@pytest.mark.slow
def test_a_hang_in_a_pipeline_is_found_through_the_messages(tmp_path: Path) -> None:
    answers = run_ranks(asked, 4, tmp_path, in_forward, ("model.layers=4",), layout=Layout(pipeline=4))
    assert [(answer["operation"], answer["peer"]) for answer in answers] == [
        ("recv", 1),
        (None, None),
        ("recv", 1),
        ("recv", 2),
    ]
    found = judged(answers)
    assert found.culprits == (GUILTY,)
    assert "rank 1 (node 0, layer blocks.1.attention) has not sent its message to ranks 0 and 2 in step 2" in found.message


def out_of_step(mesh: Mesh) -> dict[str, Any]:
    """The guilty rank leaves a collective out; later its peers' messages would never fit, so that it goes back in the end."""
    group, main, answers = mesh.group("data", use="tensor"), threading.get_ident(), []
    group.all_reduce(torch.zeros(1))
    done = threading.Event()

    def ask() -> None:
        time.sleep(SETTLED / 2)
        answers.append(settled(lambda: hang_report(main, {}, mesh)))
        mesh.store_add("answers", 1)
        while mesh.store_add("answers", 0) < mesh.ranks:
            time.sleep(0.02)
        done.set()

    threading.Thread(target=ask).start()
    late = None
    if mesh.rank == GUILTY:
        late = dist.barrier(async_op=True)
        assert late is not None
        waiting = threading.Thread(target=lambda: (done.wait(20), group.all_reduce(torch.zeros(1))))
        waiting.start()
        comm_timer.wait(late)
        waiting.join()
    else:
        group.all_reduce(torch.zeros(1))
        dist.barrier()
    done.wait(20)
    return dict(answers[0])


def test_a_rank_that_leaves_a_collective_out_is_found() -> None:
    answers = run_ranks(out_of_step, 4)
    assert [answer["operation"] for answer in answers] == ["all_reduce", "barrier", "all_reduce", "all_reduce"]
    assert [answer["use"] for answer in answers] == ["tensor", "step", "tensor", "tensor"]
    found = judged(answers)
    assert found.culprits == (GUILTY,)
    assert "has not reached all_reduce #2 of step 2" in found.message


def unable(mesh: Mesh, path: Path) -> tuple[dict[str, Any] | None, dict[int, str], str]:
    """Rank 1 keeps the interpreter to itself, rank 2 is stopped; rank 0 looks at both from outside, as a supervisor would."""
    register_stack_dump(path / str(mesh.rank))
    pids, main = mesh.gather_objects(os.getpid()), threading.get_ident()
    answers: list[Any] = []
    states: dict[int, str] = {}

    def ask() -> None:
        time.sleep(SETTLED)
        answers.append(hang_report(main, {}, mesh))
        if mesh.rank == 0:
            os.kill(pids[1], STACK_DUMP_SIGNAL)
            time.sleep(0.2)
            states.update(
                {rank: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for rank, pid in enumerate(pids)}
            )
            os.kill(pids[2], signal.SIGCONT)

    mesh.barrier()
    thread = threading.Thread(target=ask)
    if mesh.rank in (0, 3):
        thread.start()
    if mesh.rank == 1:
        ctypes.PyDLL(None).sleep(2)
    elif mesh.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    mesh.barrier()
    if thread.ident is not None:
        thread.join()
    return answers[0] if answers else None, states, (path / "1").read_text()


def test_ranks_that_cannot_answer_are_found(tmp_path: Path) -> None:
    answers = run_ranks(unable, 4, tmp_path)
    states, dump = answers[0][1:]
    assert states[2] == "T"
    from_outside = [{"state": states[rank], "dump": dump if rank == 1 else None} for rank in range(4)]
    reports = [{**(answer[0] or {}), **outside} for answer, outside in zip(answers, from_outside, strict=True)]
    found = diagnose([Report(rank=rank, node=rank, location=report) for rank, report in enumerate(reports)])  # type: ignore[arg-type]
    assert found.culprits == (1, 2) and found.certain
    assert "rank 1 (node 1) has not reached all_reduce #" in found.message
    assert "it does not answer, although its process is alive; it is at worker/test_hang_report.py:" in found.message
    assert "rank 2 (node 2) has not reached all_reduce #" in found.message and "stopped by a signal" in found.message
    assert "2 ranks have waited" in found.message


def test_hang_report_of_an_unknown_thread_is_empty() -> None:
    answer = hang_report(-1, {}, None)
    assert answer["stack"] == "" and answer["operation"] is None and answer["problem"] is None


def waited(mesh: Mesh) -> tuple[float, float]:
    comm_timer.COMM_TIMER.take()
    if mesh.rank == 0:
        time.sleep(0.6)
    mesh.all_reduce(torch.zeros(1))
    blocking = comm_timer.COMM_TIMER.take()
    work = mesh.start_all_reduce(torch.zeros(1)) if mesh.rank else None
    if mesh.rank == 0:
        time.sleep(0.6)
        work = mesh.start_all_reduce(torch.zeros(1))
    assert work is not None
    comm_timer.wait(work)
    return blocking, comm_timer.COMM_TIMER.take()


def test_waiting_for_others_is_counted_and_working_is_not() -> None:
    (late, late_again), *others = run_ranks(waited, 3)
    assert late < 0.3 and late_again < 0.3
    for blocking, begun in others:
        assert blocking > 0.4 and begun > 0.4
    assert comm_timer.COMM_TIMER.take() >= 0.0 and comm_timer.COMM_TIMER.take() == 0.0


def slow(mesh: Mesh, path: Path, overrides: tuple[str, ...]) -> float:
    """Least seconds of work in a step, while the guilty rank takes longer in its forward."""
    path.mkdir(parents=True, exist_ok=True)
    page = path / f"pulse-{mesh.rank}"
    trainer = tiny_trainer(mesh, tiny_run(*overrides), path, Heartbeat(page))
    if mesh.rank == GUILTY:
        trainer.sharded.parts[0].register_forward_pre_hook(lambda *_: time.sleep(DELAY))
    worked = []
    for _ in range(3):
        trainer.step()
        beat = read(page)
        assert beat is not None
        worked.append(beat.busy_seconds)
    trainer.close()
    return min(worked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        (Layout(data=4), ()),
        (Layout(tensor=2, data=2), ()),
        (Layout(pipeline=2, data=2), ()),
        (Layout(shard=4, zero=3), ("layout.shard=4", "layout.zero=3")),
    ],
)
def test_a_slow_rank_is_seen_in_what_ranks_have_worked(tmp_path: Path, layout: Layout, overrides: tuple[str, ...]) -> None:
    worked = run_ranks(slow, 4, tmp_path, overrides, layout=layout)
    others = [seconds for rank, seconds in enumerate(worked) if rank != GUILTY]
    assert worked[GUILTY] > max(others) + DELAY / 2, worked
