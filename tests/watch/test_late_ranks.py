"""Timelines as `phalanx trace` reads them: files that ranks write, clocks of several hosts, who is late and why, Perfetto's format."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.events.log import EventLog
from phalanx.events.records import ClockAligned
from phalanx.events.timeline_files import Author, Call, CallGroup, RankStep, Span, TimelineWriter, read_timeline, recorded_ranks
from phalanx.watch.late_ranks import Diagnosis, diagnose
from phalanx.watch.perfetto_file import write_perfetto
from phalanx.watch.step_timeline import load_timeline

ALL = CallGroup("all ranks", (0, 1, 2, 3))


def author(rank: int, ranks: int = 4, **changes: Any) -> Author:
    plain = Author(
        rank=rank,
        ranks=ranks,
        node=0,
        host="host",
        boot="b",
        generation=0,
        launch="l",
        wall=1000.0 + rank / 1e6,
        monotonic=50.0,
    )
    return replace(plain, **changes)


def write(
    folder: Path, by: Author, steps: list[RankStep], groups: dict[str, CallGroup] | None = None, keep: int = 1000
) -> None:
    folder.mkdir(exist_ok=True)
    writer = TimelineWriter(folder, by, keep)
    for name, group in (groups or {"g": ALL}).items():
        writer.add_group(name, group)
    for step in steps:
        writer.add(step)
    writer.close()


class Job:
    """Ranks that load, compute and then meet in collectives, one after the other."""

    def __init__(self, ranks: int = 4):
        self.ranks, self.clock = ranks, 100.0
        self.steps: dict[int, list[RankStep]] = defaultdict(list)

    def step(
        self, number: int, loading: dict[int, float], compute: dict[int, float], groups: list[tuple[str, tuple[int, ...]]]
    ) -> None:
        """`groups`: collectives in their order, as (name, ranks). Seconds of a rank that is not named are 2 ms and 50 ms."""
        now = {rank: loading.get(rank, 0.002) for rank in range(self.ranks)}
        spans = {rank: [Span(0.0, now[rank], "phase", "loading")] for rank in now}
        for rank in now:
            now[rank] += compute.get(rank, 0.05)
            spans[rank] += [
                Span(spans[rank][0].end, now[rank], "phase", "compute"),
                Span(spans[rank][0].end, now[rank], "work", "forward 0"),
            ]
        begin = dict(now)
        calls: dict[int, list[Call]] = defaultdict(list)
        for place, (name, members) in enumerate(groups):
            end = max(now[rank] for rank in members) + 0.001
            for rank in members:
                calls[rank].append(Call(name, place, "all_reduce", f"bucket {place}", now[rank], now[rank], end))
                now[rank] = end
        end = max(now.values())
        for rank in now:
            spans[rank].append(Span(begin[rank], end, "phase", "reduce"))
            self.steps[rank].append(RankStep(step=number, begin=self.clock, seconds=end, spans=spans[rank], calls=calls[rank]))
        self.clock += end

    def diagnose(self, folder: Path, groups: dict[str, CallGroup] | None = None) -> Diagnosis:
        for rank, steps in self.steps.items():
            write(folder, author(rank, self.ranks), steps, groups)
        return diagnose(load_timeline(folder))


def test_a_slow_loader_of_one_rank_is_named_with_the_collective_that_waits(tmp_path: Path) -> None:
    job = Job()
    for number in range(1, 26):
        job.step(number, {3: 0.043} if number > 2 else {}, {}, [("g", (0, 1, 2, 3)), ("g", (0, 1, 2, 3))])
    found = job.diagnose(tmp_path)
    (late,) = found.late
    assert (late.rank, late.meeting, late.phase, late.share_of_steps) == (3, "all_reduce of bucket 0", "loading", 23 / 25)
    assert late.seconds == pytest.approx(0.041, abs=1e-4)
    assert found.sentences()[0] == (
        "all_reduce of bucket 0 waits 41.0 ms for rank 3 in 92% of steps; rank 3 is slow in the data loader (43.0 ms a step, the others 2.00 ms)."
    )
    parts = {part.name: part for part in found.parts}
    assert parts["loading"].slowest == 3 and parts["compute"].seconds == pytest.approx(0.05, abs=1e-5)


def test_who_waits_itself_is_not_blamed(tmp_path: Path) -> None:
    """Rank 2 is slow. Rank 3 waits for it in their pair and is then the last in its pair with rank 1: because of rank 2."""
    job = Job()
    for number in range(1, 21):
        job.step(number, {}, {2: 0.15}, [("a", (0, 1)), ("b", (2, 3)), ("c", (1, 3)), ("d", (0, 2)), ("g", (0, 1, 2, 3))])
    pairs = {name: CallGroup("data", ranks) for name, ranks in zip("abcd", ((0, 1), (2, 3), (1, 3), (0, 2)), strict=True)}
    found = job.diagnose(tmp_path, {**pairs, "g": ALL})
    assert [(late.rank, late.phase) for late in found.late] == [(2, "compute")]
    # Ranks 0, 1 and 3 wait 100 ms each in every step.
    assert found.waiting_share == pytest.approx(0.3 / 4 / found.step_seconds, rel=0.02)


def test_a_loader_that_is_slow_everywhere_and_a_run_without_complaints(tmp_path: Path) -> None:
    job = Job()
    for number in range(1, 11):
        job.step(number, dict.fromkeys(range(4), 0.03), {}, [("g", (0, 1, 2, 3))])
    found = job.diagnose(tmp_path / "slow")
    assert not found.late
    assert (
        "Every rank waits 30.0 ms of a step (37.0%) for the data loader, which is slower than the computation."
        in found.sentences()[0]
    )
    job = Job()
    for number in range(1, 11):
        job.step(number, {}, {}, [("g", (0, 1, 2, 3))])
    assert job.diagnose(tmp_path / "well").sentences() == [
        "No rank is late: the average rank waits in collectives for the last one for 0.00% of a step."
    ]


def test_noise_is_not_a_slow_rank(tmp_path: Path) -> None:
    job = Job()
    for number in range(1, 41):
        job.step(number, {}, {number % 4: 0.09}, [("g", (0, 1, 2, 3))])
    found = job.diagnose(tmp_path)
    assert {late.rank for late in found.late} == {0, 1, 2, 3} and not any(late.phase for late in found.late)
    (sentence,) = found.sentences()
    assert "rank 0 (40.0 ms in 25% of steps)" in sentence and "varies from step to step" in sentence


def plain_step(number: int, begin: float = 100.0) -> RankStep:
    return RankStep(step=number, begin=begin + number, seconds=0.5, spans=[], calls=[])


def test_files_are_bounded_and_the_newest_launch_counts(tmp_path: Path) -> None:
    write(tmp_path, author(0, 1), [plain_step(number) for number in range(1, 101)], keep=20)
    kept = [found.record.step for found in read_timeline(tmp_path)]
    assert kept == list(range(kept[0], 101)) and 20 <= len(kept) <= 30
    # A resumed run takes steps 90 to 95 again, on two ranks, and records them once more.
    later = {"launch": "m", "wall": 5000.0}
    for rank in (0, 1):
        write(tmp_path, author(rank, 2, **later), [plain_step(number) for number in range(90, 96)])
    found = read_timeline(tmp_path, 88, 97)
    assert [(one.record.step, one.author.rank, one.author.launch) for one in found] == [
        (88, 0, "l"), (89, 0, "l"), *((number, rank, "m") for number in range(90, 96) for rank in (0, 1)), (96, 0, "l"), (97, 0, "l"),
    ]  # fmt: skip
    assert recorded_ranks(tmp_path) == [0, 1]


def test_damaged_files_cost_their_lines_alone(tmp_path: Path) -> None:
    write(tmp_path, author(0, 1), [plain_step(number) for number in (1, 2, 3)])
    (path,) = (tmp_path / "timeline").iterdir()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1], '{"step": 2, "spans": "no"}', "[1]", "\x00{", lines[3], lines[3][:9]]))
    (tmp_path / "timeline" / "rank-x.0000.jsonl").write_text("{}")
    (tmp_path / "timeline" / "rank-1.0000.jsonl").write_text(lines[1])  # nobody has written it
    assert [found.record.step for found in read_timeline(tmp_path)] == [1, 3]


def test_clocks_of_other_hosts_are_shifted(tmp_path: Path) -> None:
    """Rank 1's host began 30 s later, and its time of day is wrong by a second; the control plane knows better."""
    at = {0: 100.0, 1: 70.0 + 0.02}
    for rank in (0, 1):
        step = RankStep(step=1, begin=at[rank], seconds=0.1, spans=[], calls=[Call("g", 0, "all_reduce", "", 0.01, 0.01, 0.05)])
        by = author(rank, 2, node=rank, boot=f"boot {rank}", wall=1000.0 + rank, monotonic=[0.0, -30.0][rank])
        write(tmp_path, by, [step], {"g": CallGroup("all ranks", (0, 1))})
    blind = load_timeline(tmp_path)
    assert blind.clock_error is None and blind.meetings[0].last_arrival - blind.meetings[0].first_arrival == pytest.approx(1.02)
    with_clocks = EventLog(tmp_path / "events.jsonl")
    with_clocks.emit(ClockAligned(node=1, reference=0, offset=30.0, error=0.0004))
    with_clocks.close()
    known = load_timeline(tmp_path)
    (meeting,) = known.meetings
    assert known.clock_error == 0.0004 and meeting.last == 1
    assert meeting.last_arrival - meeting.first_arrival == pytest.approx(0.02, abs=1e-6)
    assert meeting.blocked(0) == pytest.approx(0.02, abs=1e-6)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_file_for_perfetto(tmp_path: Path, name: str) -> None:
    job = Job()
    for number in (1, 2):
        job.step(number, {2: 0.03}, {}, [("g", (0, 1, 2, 3))])
    job.diagnose(tmp_path)
    slices = write_perfetto(load_timeline(tmp_path), tmp_path / name)
    content = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(content) if name.endswith("gz") else content)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "last to arrive", **{rank + 2: f"rank {rank} (node 0, host)" for rank in range(4)}}
    late = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert [(event["name"], event["dur"]) for event in late] == [("rank 2: all_reduce of bucket 0", 28000)] * 2
    waits = [event for event in events if event["ph"] == "X" and event["cat"] == "wait" and event["pid"] == 2]
    assert [event["args"]["last_to_arrive"] for event in waits] == ["rank 2"] * 2 and waits[0]["args"]["waited_ms"] == 28.0
    assert slices == sum(event["ph"] in "Xb" for event in events)
    rows: dict[tuple[int, int], float] = defaultdict(float)
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        row = event["pid"], event["tid"]
        assert event["ts"] >= rows[row], "slices of a row do not cross: Perfetto would drop them"
        rows[row] = event["ts"] + event["dur"]
