from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.events.heartbeat import Beat
from phalanx.recovery.diagnose import (
    _OWN_PLUMBING,
    _TASKS,
    PROGRAM,
    Frame,
    Report,
    blocking_collective,
    collective_name,
    describe_location,
    diagnose,
    parse_faulthandler,
)

ALL = "all ranks"


def waits(operation: str = "all_gather", group: str = ALL, number: int = 8122, **more: Any) -> dict[str, Any]:
    """The answer of a rank that waits."""
    numbers = {group: number, **more.pop("numbers", {})}
    return {"operation": operation, "group": group, "numbers": numbers, "stack": "waits\n", **more}


def works(
    describe_location: str, *, at: str = "", layer: str | None = None, numbers: dict[str, int] | None = None
) -> dict[str, Any]:
    """The answer of a rank that does not wait for others."""
    return {
        "operation": None,
        "place": describe_location,
        "at": at,
        "layer": layer,
        "numbers": numbers or {},
        "stack": "works\n",
    }


def reports(*answers: dict[str, Any] | None, **more: Any) -> list[Report]:
    """Two ranks to a node; everything stands at the step after 430."""
    stages = more.pop("stages", {})
    states = more.pop("states", {})
    dumps = more.pop("dumps", {})
    return [
        Report(
            rank=rank, node=rank // 2, stage=stages.get(rank), beat=Beat(step=430, phase="computing"),
            location={**(answer or {}), "state": states.get(rank, "S"), "dump": dumps.get(rank)}, silent=63.2,
        )
        for rank, answer in enumerate(answers)
    ]  # fmt: skip


def test_a_rank_that_hangs_in_the_data_loader_is_named_in_full() -> None:
    late = works("in the data loader", at="data/tokenfile.py:88 read", layer="blocks.17", numbers={ALL: 8121})
    found = diagnose(reports(*[waits()] * 5, late, *[waits()] * 2, stages={5: 1}))
    assert found.message == (
        "rank 5 (node 2, layer blocks.17, pipeline stage 1) has not reached all_gather #8122 of step 431; "
        "7 ranks have waited for 63 s; it is in the data loader: data/tokenfile.py:88 read"
    )
    assert (found.culprits, found.stack, found.certain) == ((5,), "works\n", True)


def test_what_a_rank_has_not_reached_is_the_first_it_has_not_begun() -> None:
    """Those that wait have begun three in the background."""
    found = diagnose(reports(waits("all_reduce", number=24), works("in the optimizer", numbers={ALL: 21})))
    assert (
        "rank 1 (node 0) has not reached all_reduce #22 of step 431; 1 rank has waited for 63 s; it is in the optimizer"
        in found.message
    )


def test_the_stack_of_the_loaders_threads_is_shown_too() -> None:
    late = works("in the data loader", numbers={ALL: 1}) | {"threads": {"loader 7": "reads\n"}}
    assert diagnose(reports(waits(number=2), late)).stack == "works\nThread loader 7:\nreads\n"


def test_a_stopped_process_is_guilty_whatever_it_said() -> None:
    found = diagnose(reports(waits(), waits(), None, waits(), states={2: "T"}))
    assert found.culprits == (2,) and found.certain
    assert found.message == (
        "rank 2 (node 1) has not reached all_gather #8122 of step 431; 3 ranks have waited for 63 s; its process is stopped by a signal; "
        "its last heartbeat says that it is computing"
    )


def test_a_rank_without_an_answer_is_guilty() -> None:
    found = diagnose(reports(waits(), None, waits(), waits(), states={1: "D"}))
    assert found.culprits == (1,)
    assert "it does not answer: its process waits for a disk or a device" in found.message


def test_two_culprits_are_both_named_with_their_stacks() -> None:
    found = diagnose(
        reports(
            waits(number=9),
            works("in the optimizer", at="adamw.py:80 fused", numbers={ALL: 8}),
            None,
            works("in the data loader", numbers={ALL: 8}),
        )
    )
    assert found.culprits == (1, 2, 3)
    assert (
        "rank 1 (node 0) has not reached all_gather #9 of step 431, it is in the optimizer: adamw.py:80 fused" in found.message
    )
    assert "rank 3 (node 1) has not reached all_gather #9 of step 431, it is in the data loader" in found.message
    assert found.message.endswith("; 1 rank has waited for 63 s")
    assert found.stack == "Rank 1:\nworks\nRank 3:\nworks\n"


def test_a_chain_of_groups_is_followed_to_its_end() -> None:
    """Rank 1 computes; its tensor neighbour 0 waits for it, and their replicas 2 and 3 wait for them."""
    found = diagnose(
        reports(
            waits("all_reduce", "tensor of ranks 0, 1", 26, members=[0, 1], numbers={ALL: 3, "data of ranks 0, 2": 1}),
            works("in the forward of layer x", numbers={ALL: 3, "tensor of ranks 0, 1": 25, "data of ranks 1, 3": 1}),
            waits("all_reduce", "data of ranks 0, 2", 2, members=[0, 2], numbers={ALL: 5, "tensor of ranks 2, 3": 44}),
            waits("all_reduce", "data of ranks 1, 3", 2, members=[1, 3], numbers={ALL: 5, "tensor of ranks 2, 3": 44}),
        )
    )
    assert found.culprits == (1,) and found.certain
    assert "has not reached all_reduce #2 of step 431; 3 ranks have waited" in found.message


def message(peer: int, operation: str = "recv") -> dict[str, Any]:
    return waits(operation, "pipeline of ranks 0, 1, 2, 3", 5, members=[0, 1, 2, 3], peer=peer)


def test_a_pipeline_is_followed_to_the_rank_that_all_wait_for() -> None:
    busy = works(
        "in the forward of layer blocks.3.attention", layer="blocks.3.attention", numbers={"pipeline of ranks 0, 1, 2, 3": 4}
    )
    found = diagnose(reports(busy, message(0), message(1), message(2), stages={0: 0, 1: 1, 2: 2, 3: 3}))
    assert found.culprits == (0,)
    assert found.message == (
        "rank 0 (node 0, layer blocks.3.attention, pipeline stage 0) has not sent its message to rank 1 in step 431; "
        "3 ranks have waited for 63 s; it is in the forward of layer blocks.3.attention"
    )


def test_a_stopped_rank_in_the_middle_of_a_pipeline() -> None:
    found = diagnose(reports(message(1), message(2), None, message(2, "send"), states={2: "T"}))
    assert found.culprits == (2,)
    assert "has not sent its message to ranks 1 and 3 in step 431" in found.message


def test_a_rank_that_is_busy_while_nobody_waits_for_it_is_not_guilty() -> None:
    """Rank 3 has what it needs; rank 0 and 1 hang on 2."""
    groups = {"data of ranks 0, 1, 2": 4}
    found = diagnose(
        reports(
            waits("all_reduce", "data of ranks 0, 1, 2", 5, members=[0, 1, 2]),
            waits("all_reduce", "data of ranks 0, 1, 2", 5, members=[0, 1, 2]),
            works("in the optimizer", numbers=groups),
            works("in saving"),
        )
    )
    assert found.culprits == (2,)


def test_where_all_wait_in_the_same_collective_nobody_is_guilty() -> None:
    found = diagnose(reports(*[waits()] * 4))
    assert found.culprits == () and not found.certain and found.cut_off
    assert found.message == (
        "all 4 ranks wait in all_gather #8122 of step 431, and no rank is missing there; 4 ranks have waited for 63 s; "
        "the connections between ranks are suspect"
    )


def test_processes_in_the_compiled_step_wait_for_one_that_is_not_and_else_compute() -> None:
    inside = {"operation": PROGRAM, "group": None, "numbers": {ALL: 9}, "place": f"waiting in {PROGRAM}", "stack": "waits\n"}
    found = diagnose(reports(inside, works("in before_program"), inside))
    assert found.culprits == (1,) and found.certain
    together = diagnose(reports(inside, inside))
    assert together.culprits == () and not together.certain and not together.cut_off
    assert "2 of 2 are waiting in the compiled step" in together.message


def test_two_that_wait_for_each_other_s_message_are_not_guilty() -> None:
    found = diagnose(reports(message(1), message(0)))
    assert found.culprits == () and "wait in recv of step 431" in found.message


def test_two_that_meet_in_vain_while_others_wait_for_them() -> None:
    pair = waits("all_reduce", "tensor of ranks 0, 1", 7, members=[0, 1])
    found = diagnose(reports(pair, pair, message(0), message(1)))
    assert found.culprits == ()
    assert found.message.startswith("ranks 0 and 1 wait in all_reduce #7 of step 431, and no rank is missing there")


def test_the_one_that_has_taken_another_way_is_guilty() -> None:
    """It has left a collective out and waits in the next, where nobody comes."""
    here = waits("all_reduce", "data of ranks 0, 1, 2, 3", 5, use="data", numbers={ALL: 9})
    there = waits("broadcast", ALL, 10, use="step", numbers={"data of ranks 0, 1, 2, 3": 4})
    found = diagnose(reports(here, here, there, here))
    assert found.culprits == (2,) and not found.certain
    assert "rank 2 (node 1) has not reached all_reduce #5 of step 431; 3 ranks have waited" in found.message


def test_the_one_that_is_behind_in_the_same_group_is_guilty() -> None:
    found = diagnose(reports(waits(), waits(), waits(number=8121), waits()))
    assert found.culprits == (2,) and not found.certain
    assert "rank 2 (node 1) has not reached all_gather #8122 of step 431" in found.message


def test_no_culprit_if_no_rank_waits() -> None:
    found = diagnose(reports(*[works("in the backward")] * 4))
    assert found.culprits == () and not found.certain and not found.cut_off
    assert "no rank is found waiting for them: 4 of 4 are in the backward" in found.message


def test_torch_functions_map_to_collective_names() -> None:
    names = [
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "all_to_all_single",
        "broadcast_object_list",
        "isend",
        "all_reduce",
    ]
    assert [collective_name(name) for name in names] == [
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "send",
        "all_reduce",
    ]


HOME = str(Path(__file__).resolve().parents[2] / "phalanx")
C10D = "/x/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["training/trainer.py", "data/loader.py"], "in the data loader"),
        (["training/trainer.py", "optim/optimizer.py", "optim/adamw.py"], "in the optimizer"),
        (["training/trainer.py", "training/evaluate.py", "training/step.py"], "in evaluation"),
        (["training/trainer.py", "training/saving.py", "checkpointing/save.py"], "in saving"),
        (["training/trainer.py"], "at training/trainer.py:1 f"),
    ],
)
def test_places_are_read_off_the_programs_own_files(files: list[str], words: str) -> None:
    assert describe_location([Frame(f"{HOME}/{file}", 1, "f") for file in files]) == words


def test_the_files_and_folders_that_stand_for_tasks_exist() -> None:
    for path in (*_OWN_PLUMBING, *(path for paths, _ in _TASKS for path in paths)):
        assert Path(HOME, path).exists(), path


def test_a_layer_computes_forward_or_backward() -> None:
    forward = [Frame("/x/torch/nn/modules/module.py", 1, "_call_impl")]
    assert describe_location(forward, "blocks.3") == "in the forward of layer blocks.3"
    assert describe_location([Frame("/x/torch/autograd/graph.py", 1, "_engine_run_backward")]) == "in the backward"
    assert (
        describe_location([Frame(f"{HOME}/training/evaluate.py", 1, "f"), *forward], "b")
        == "in evaluation, in the forward of layer b"
    )


def test_only_a_wait_at_the_innermost_end_counts() -> None:
    meeting = [
        Frame(C10D, 1, "broadcast_object_list"),
        Frame("/x/torch/distributed/c10d_logger.py", 1, "wrapper"),
        Frame(C10D, 2, "broadcast"),
    ]
    assert blocking_collective(meeting) == ("broadcast", 0)
    assert blocking_collective([*meeting, Frame("/x/pickle.py", 1, "loads")]) is None
    through_the_store = [
        Frame(C10D, 1, "new_group"),
        Frame(f"{HOME}/parallel/store.py", 5, "_ask"),
        Frame("/x/socket.py", 7, "recv"),
    ]
    assert blocking_collective(through_the_store) == ("new_group", 0)
    assert blocking_collective(through_the_store[1:]) == ("store", 0)


STUCK = """
import ctypes, faulthandler, signal, sys, threading, time
faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], "ab", buffering=0), all_threads=True, chain=False)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def read():
    print("there", flush=True)
    ctypes.PyDLL(None).sleep(60)  # and keeps the interpreter to itself
read()
"""


def test_a_rank_that_keeps_the_interpreter_is_found_by_what_the_signal_writes(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    with subprocess.Popen([sys.executable, "-c", STUCK, dump], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGUSR2)
        deadline = time.monotonic() + 60
        while "<module>" not in dump.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert [frame.function for frame in parse_faulthandler(dump.read_text())] == ["<module>", "read"]
    found = diagnose(reports(waits(), None, waits(), dumps={1: dump.read_text()}))
    assert found.culprits == (1,)
    assert "it does not answer, although its process is alive; it is at <string>:7 read" in found.message
    assert "line 7, in read" in found.stack


def test_a_rank_that_cannot_answer_but_waits_for_others_holds_nobody_up() -> None:
    dump = f'Thread 0x1 (most recent call first):\n  File "{C10D}", line 9 in all_reduce\n  File "a.py", line 1 in <module>\n'
    late = works("in the optimizer", numbers={ALL: 8121})
    found = diagnose(reports(waits(), None, late, dumps={1: dump}))
    assert found.culprits == (2,)
    assert "2 ranks have waited" in found.message
