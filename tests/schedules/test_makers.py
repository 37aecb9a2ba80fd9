"""Pipeline schedules against torch's own lists, against formulas from the papers, and against what can be wrong with one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from phalanx.schedules.actions import Action, Schedule, dump, load, loads
from phalanx.schedules.makers import (
    NAMES,
    forward_only,
    make,
    problems_for,
    resized,
)
from phalanx.schedules.timing import Durations, Timeline, bubble, simulate
from phalanx.spec.errors import RunError
from phalanx.spec.layout import FIXED_STAGES, default_stages

CLASSES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def torch_order(name: str, ranks: int, micro_batches: int, per_rank: int) -> list[list[str]]:
    """The lists of torch's schedule class, made without stages or processes."""
    kind = torchs.get_schedule_class(CLASSES[name])
    made: Any = object.__new__(kind)
    made._n_microbatches, made.pp_group_size, made.n_local_stages = micro_batches, ranks, per_rank
    made._num_stages = made.num_stages = ranks * per_rank
    made._stages = [None] * per_rank
    made.microbatches_per_round = micro_batches // max(1, micro_batches // ranks)
    if FIXED_STAGES.get(name) == 1:
        found = [list(_plain(made._get_pipeline_order()[rank])) for rank in range(ranks)]
        if name == "1f1b":  # torch's list, which it does not execute, begins the last rank's forwards with 1
            last = ranks - 1
            found[last] = [f"{last}F{int(cell.split('F')[1]) - 1}" if "F" in cell else cell for cell in found[last]]
        return found
    return [list(_plain(made._calculate_single_rank_operations(rank))) for rank in range(ranks)]


def _plain(row: list[Any]) -> Iterator[str]:
    for action in row:
        if action is not None and action.sub_actions:
            yield from _plain(action.sub_actions)
        elif action is not None and action.computation_type.value in "FBIW":
            yield str(action)


def legal(name: str, ranks: int, micro_batches: int, per_rank: int) -> bool:
    """Where torch has a schedule too."""
    if FIXED_STAGES.get(name) == 1:
        return per_rank == 1 and micro_batches >= ranks
    if FIXED_STAGES.get(name) == 2:
        return per_rank == 2 and (name == "zbv" or micro_batches >= 2 * ranks)
    return micro_batches % max(1, micro_batches // ranks) == 0


@pytest.mark.parametrize("name", NAMES)
def test_named_schedules_equal_those_of_torch(name: str) -> None:
    compared = 0
    for ranks, micro_batches, per_rank in product((1, 2, 3, 4, 8), (1, 2, 4, 5, 8, 10, 16, 17), (1, 2, 3)):
        if legal(name, ranks, micro_batches, per_rank):
            ours = [[str(action) for action in row] for row in make(name, ranks, micro_batches, per_rank).actions]
            assert ours == torch_order(name, ranks, micro_batches, per_rank), (ranks, micro_batches, per_rank)
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize("name", NAMES)
def test_named_schedules_accept_any_number_of_micro_batches(name: str) -> None:
    for ranks, micro_batches, per_rank in product(range(1, 6), (1, 2, 3, 5, 7, 9, 11, 13), (1, 2, 3, 4)):
        if not problems_for(name, ranks, micro_batches, per_rank):
            found = make(name, ranks, micro_batches, per_rank)
            assert found.problems() == [], (ranks, micro_batches, per_rank)
            assert (found.stages, found.micro_batches) == (ranks * per_rank, micro_batches)


def test_stages_are_on_the_right_ranks() -> None:
    looping = make("interleaved-1f1b", 3, 6, 2)
    assert [looping.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    v_shaped = make("zbv", 3, 6)
    assert [v_shaped.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [v_shaped.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [default_stages(name) for name in NAMES] == [len(make(name, 2, 4).stages_of(0)) for name in NAMES]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 4), (4, 8), (8, 32)])
def test_bubbles_equal_the_published_formulas(ranks: int, micro_batches: int) -> None:
    def idle(name: str, per_rank: int | None = None, durations: Durations | None = None) -> float:
        return bubble(simulate(make(name, ranks, micro_batches, per_rank), durations))

    waiting = (ranks - 1) / (micro_batches + ranks - 1)
    uneven = Durations(forward=1.0, input=0.7, weight=1.1)
    for durations in (None, uneven):
        assert idle("gpipe", None, durations) == pytest.approx(waiting)
        assert idle("1f1b", None, durations) == pytest.approx(waiting)
    for per_rank in (2, 3):  # as a part of the time that is not idle it is (p - 1) / (v m)
        part = (ranks - 1) / (per_rank * micro_batches)
        assert idle("interleaved-1f1b", per_rank) == pytest.approx(part / (1 + part))
    assert idle("zbv") < idle("1f1b") and idle("dualpipev") < idle("1f1b")
    assert idle("interleaved-zero-bubble") < idle("interleaved-1f1b")
    # With every action equally long ZB-V waits only while the pipeline fills: rank r begins r late.
    length = 6 * micro_batches
    assert idle("zbv") == pytest.approx((ranks - 1) / (length + ranks - 1)) or micro_batches < 2 * ranks - 1


def test_simulation_counts_messages_and_uneven_stages() -> None:
    found = simulate(make("gpipe", 2, 1), Durations(forward=1, input=2, weight=3, stages=(1, 10)), comm=0.5)
    assert [[(t.kind, t.start, t.stop) for t in row] for row in found.ranks] == [
        [("F", 0, 1), ("B", 62, 67)],
        [("F", 1.5, 11.5), ("B", 11.5, 61.5)],
    ]
    assert (found.start, found.stop) == (0, 67)
    assert bubble(found) == pytest.approx(1 - 66 / (2 * 67))


def test_bubble_of_a_trace() -> None:
    rows = simulate(make("1f1b", 4, 8)).ranks
    later = tuple(tuple(timed._replace(start=timed.start + 5, stop=timed.stop + 5) for timed in row) for row in rows)
    assert bubble(Timeline(later)) == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", NAMES)
def test_forward_only_schedule_keeps_stages_on_their_ranks(name: str) -> None:
    like = make(name, 4, 8)
    found = forward_only(like)
    assert [found.rank_of(stage) for stage in range(like.stages)] == [like.rank_of(stage) for stage in range(like.stages)]
    assert sorted(a for row in found.actions for a in row) == [Action("F", s, 0) for s in range(like.stages)]
    assert simulate(found).stop == like.stages


@pytest.mark.parametrize("name", NAMES)
def test_schedule_survives_csv_round_trip(name: str, tmp_path: Path) -> None:
    made = make(name, 3, 7)
    (tmp_path / "mine.csv").write_text(dump(made))
    again = load(tmp_path / "mine.csv")
    assert replace(again, name=name) == made and again.name == "mine.csv"
    # torch reads it as the same actions, and ours reads what torch writes
    order = [[torchs._Action.from_str(cell) for cell in row.split(",")] for row in dump(made).splitlines()]
    assert [[str(a) for a in row] for row in order] == [[str(a) for a in row] for row in made.actions]


def test_csv_of_torch_with_overlapped_and_empty_cells_loads() -> None:
    found = loads("0F0,,(0F1;0B0)OVERLAP_F_B, 0I1 ,0W1\n,1F0,1B0,1F1,1B1\n", "torch.csv")
    assert [str(action) for action in found.actions[0]] == ["0F0", "0F1", "0B0", "0I1", "0W1"]
    assert found.ranks == 2 and found.splits_backward


def test_schedule_is_resized_to_other_micro_batch_counts() -> None:
    assert resized(make("zbv", 2, 8), 5) == make("zbv", 2, 5)
    file = loads(dump(make("1f1b", 2, 8)), "mine.csv")
    assert resized(file, 8) is file
    assert resized(file, 3).problems() == [] and resized(file, 3).micro_batches == 3
    with pytest.raises(RunError, match=r"mine\.csv is for 8 micro-batches, not 9"):
        resized(file, 9)


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "this file has none"),
        ("0F0,0SEND_F0,0B0\n", '"0SEND_F0" is not an action'),
        ("0F0,-1B0\n", '"-1B0" is not an action'),
        (GOOD.replace("1B1", ""), "it has 7 actions, but 2 stages and 2 micro-batches need at least 8"),
        (GOOD.replace("1B1", "1B0"), "stage 1 has 1 F, 2 B, 0 I and 0 W of micro-batch 0"),
        (GOOD.replace("1B1", "1I1,1B0"), "stage 1 has 1 F, 0 B, 1 I and 0 W of micro-batch 1"),
        (GOOD.replace("0B1\n", "1B1\n").replace(",1B1\n", ",0B1\n"), "stage 0 is on ranks 0 and 1"),
        ("1B0,1F0,0F0,0B0\n", "1B0, its action 1, needs 1F0, which never comes before it"),
        (GOOD.replace("0F0,0F1,0B0", "0F0,0B0,0F1").replace("1F0,1B0,1F1", "1F0,1F1,1B0"), "rank 0 waits forever: 0B0"),
        ("0F0,0B0\n\n1F0,1B0\n", "rank 1 has nothing to do"),
        ("999999999F999999999,0F0\n", "it has 2 actions, but 1000000000 stages"),
    ],
)
def test_invalid_schedule_file_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(RunError) as error:
        loads(text, "bad.csv")
    assert all(problem.startswith("bad.csv: ") for problem in error.value.problems)
    assert any(sentence in problem for problem in error.value.problems), error.value.problems
    assert len(error.value.problems) <= 10


def test_unreadable_schedule_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read: No such file"):
        load(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="cannot be read: it is not text"):
        load(tmp_path / "binary.csv")


def test_actions_out_of_range_are_reported() -> None:
    made = make("gpipe", 2, 2)
    assert (
        "rank 0 has the action 0F1, but there are only stages 0 to 1 and micro-batches 0 to 0"
        in replace(made, micro_batches=1).problems()[0]
    )
    assert replace(made, ranks=3).problems() == ["it has actions for 2 ranks, not for 3"]
    many = Schedule(name="x", ranks=1, stages=1, micro_batches=1, actions=((Action("F", 3, 0),) * 9,))
    assert many.problems()[-1] == "and 4 more of the kind"


def test_impossible_schedules_are_refused() -> None:
    assert problems_for("2f2b", 2, 4, 1)[0].startswith('there is no pipeline schedule "2f2b": use one of gpipe, 1f1b')
    assert problems_for("1f1b", 2, 4, 2) == ["1f1b has 1 stage per rank, not 2: use interleaved-1f1b for more"]
    assert problems_for("zbv", 2, 4, 3) == ["zbv has 2 stages per rank, not 3: leave the number out"]
    assert problems_for("gpipe", 0, 0, 1) == [
        "a pipeline needs at least 1 rank, not 0",
        "a pipeline needs at least 1 micro-batch, not 0",
    ]
    with pytest.raises(RunError, match="1 stage per rank"):
        make("gpipe", 2, 4, 2)


def test_traits_are_read_off_the_lists() -> None:
    traits = {name: make(name, 4, 16) for name in NAMES}
    assert {n for n, s in traits.items() if s.splits_backward} == {"interleaved-zero-bubble", "zbv", "dualpipev"}
    assert {n for n, s in traits.items() if s.is_v_shaped} == {"zbv", "dualpipev"}
    assert {n for n, s in traits.items() if s.all_forwards_first} == {"gpipe", "looped-bfs"}
    assert all(schedule.stages_per_rank == default_stages(name) for name, schedule in traits.items())


def test_activations_in_flight_are_counted_by_rank() -> None:
    assert make("gpipe", 4, 8, 1).forwards_in_flight == (8, 8, 8, 8)
    assert make("1f1b", 4, 8, 1).forwards_in_flight == (4, 3, 2, 1)
    assert make("looped-bfs", 2, 8, 3).forwards_in_flight == (24, 24)
    assert make("interleaved-1f1b", 4, 8, 2).forwards_in_flight == (11, 9, 7, 5)
    assert make("zbv", 4, 16, 2).forwards_in_flight == (
        8,
        8,
        8,
        8,
    )  # as much as 1F1B's first rank, as its stages are half as large
    assert make("1f1b", 4, 8, 1).deferred_weight_backwards == (0, 0, 0, 0)
    assert make("interleaved-zero-bubble", 4, 8, 2).deferred_weight_backwards == (1, 2, 3, 4)
