"""Two passes side by side: they take turns at exchanges between ranks, and compute what they compute one after the other."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import copied, run_ranks, tiny_run, tiny_trainer

from phalanx.events.records import Step
from phalanx.parallel import overlap
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline import executor
from phalanx.schedules.makers import make
from phalanx.schedules.pairs import overlapped_pairs
from phalanx.spec.layout import Layout

CPU = torch.device("cpu")
LAYOUT = Layout(data=1, shard=2, zero=1, pipeline=2, expert=2, schedule="dualpipev")
MOE = (
    "model.layers=4",
    "model.moe.experts=4",
    "model.moe.active=2",
    "model.moe.ffn=32",
    "train.batch=16",
    "train.micro_batch=1",
)


class FakeWork:
    """A message that arrives when somebody waits for it."""

    def __init__(self, log: list[str], name: str):
        self._log, self._name = log, name

    def wait(self, *timeout: Any) -> bool:
        self._log.append(f"{self._name} arrived")
        return True


def passes(log: list[str], fail: str = "") -> tuple[Any, Any]:
    def collective(name: str, group: Any, async_op: bool = False) -> FakeWork:
        log.append(f"{name} sent")
        return FakeWork(log, name)

    def one(side: str, count: int) -> str:
        for number in range(count):
            log.append(f"{side}{number} computes")
            if f"{side}{number}" == fail:
                raise RuntimeError(fail)
            overlap.exchange(collective, f"{side}{number}", group=None, handle=None)  # type: ignore[arg-type]
        log.append(f"{side} ends")
        return side

    return lambda: one("F", 2), lambda: one("B", 3)


@pytest.fixture(autouse=True)
def plain_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "wait", lambda work, group: work.wait())


def test_one_computes_while_the_others_message_travels() -> None:
    log: list[str] = []
    assert overlap.run_side_by_side(CPU, *passes(log)) == ("F", "B")
    assert log == [
        "F0 computes", "F0 sent", "B0 computes", "B0 sent", "F0 arrived", "F1 computes", "F1 sent", "B0 arrived", "B1 computes",
        "B1 sent", "F1 arrived", "F ends", "B1 arrived", "B2 computes", "B2 sent", "B2 arrived", "B ends",
    ]  # fmt: skip


@pytest.mark.parametrize("fail", ["F0", "F1", "B0", "B2"])
def test_the_error_of_either_pass_is_raised_and_the_next_pair_runs(fail: str) -> None:
    log: list[str] = []
    with pytest.raises(RuntimeError, match=fail):
        overlap.run_side_by_side(CPU, *passes(log, fail))
    for thread in threading.enumerate():
        if thread.name == "backward":
            thread.join(60)
    assert overlap.run_side_by_side(CPU, *passes([])) == ("F", "B")


def trained(mesh: Mesh, folder: Path, recompute: str, side_by_side: bool) -> tuple[list[Any], dict[str, Any], list[str]]:
    """Losses, final state, and the order in which passes began and awaited exchanges in the last step."""
    log: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        wait = overlap.wait
        if not side_by_side:
            patch.setattr(executor, "overlapped_pairs", lambda schedule: (frozenset(),) * schedule.ranks)

        def side() -> str:
            return "B" if threading.current_thread().name == "backward" else "F"

        def logged(work: dist.Work, group: Any) -> None:
            log.append(f"{side()} waits")
            wait(work, group)

        patch.setattr(overlap, "wait", logged)
        pass_on = overlap._Turns.pass_on
        patch.setattr(overlap._Turns, "pass_on", lambda turns: log.append(f"{side()} sent") or pass_on(turns))
        run = tiny_run(*MOE, f"memory.recompute={recompute}")
        trainer = tiny_trainer(mesh, run, folder / f"{recompute}-{side_by_side}")
        told = []
        for event in trainer.events():
            if isinstance(event, Step):
                told.append((event.step, event.loss, event.grad_norm, event.expert_load))
                last, log[:] = list(log), []
        return told, copied(trainer.tensors()), last


def hidden(log: list[str]) -> int:
    """Messages of forwards that are on their way when a backward has computed up to its next message."""
    count, sent = 0, False
    for entry in log:
        count += sent and entry == "B sent"
        sent = entry == "F sent" or (sent and entry == "B waits")
    return count


@pytest.mark.parametrize("recompute", ["none", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("selective", "full"))])
def test_forwards_next_to_backwards_give_the_same_bits(recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    apart = run_ranks(trained, 4, tmp_path, recompute, False, layout=LAYOUT)
    together = run_ranks(trained, 4, tmp_path, recompute, True, layout=LAYOUT)
    for rank, ((told, state, log), (other, other_state, other_log)) in enumerate(zip(apart, together, strict=True)):
        assert told == other
        assert all(torch.equal(state[name], other_state[name]) for name in state)
        assert log == []
        # Of the three exchanges of a block's forward, a backward with two begins one while each of the first two is on its way.
        pairs = len(overlapped_pairs(make("dualpipev", 2, 8))[rank // 2])
        assert hidden(other_log) >= 2 * pairs >= 20
    orders = [log for _, _, log in together]
    assert orders[0] == orders[1] and orders[2] == orders[3], "the ranks of a stage do the same in the same order"
