"""Names the culprits of a hang from the locations that all ranks report, and reads Python stacks for that. Pure: no clock, no process."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict

from phalanx.events.heartbeat import Beat

_MESSAGES = ("send", "recv", "send and recv")
_PHASES = {
    "data": "in the data loader",
    "computing": "computing the step",
    "updating": "in the optimizer",
    "evaluating": "in evaluation",
    "saving": "in saving",
    "building": "building the model",
    "restoring": "restoring the state",
}
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "dead", "X": "dead"}


class HangReport(TypedDict, total=False):
    """What a rank is doing, as plain values for JSON: its own answer, which `worker/hang_report` makes, and if it does not answer in time
    the last two keys, which its agent adds from outside."""

    stack: str
    """Stack of the main thread, innermost call last."""
    threads: dict[str, str]
    """Stacks of the data loader's threads by name, if the main thread waits for them."""
    at: str
    """Innermost relevant call: file:line function."""
    place: str
    """What this rank does, such as "in the data loader"."""
    layer: str | None
    """Innermost module of the model on the stack."""
    operation: str | None
    """Collective that this rank is blocked in; None: it does not wait."""
    use: str | None
    """Technique that uses the collective."""
    group: str | None
    """Its group, a key of `numbers`."""
    members: list[int] | None
    """Ranks of the group; None: all."""
    peer: int | None
    """The other rank of a point-to-point message."""
    numbers: dict[str, int]
    """Collectives that this rank has started, by group. A group has the same name on all its ranks."""
    problem: str | None
    """Error of the report itself."""
    state: str | None
    """State letter of the process in /proc."""
    dump: str | None
    """What `faulthandler` wrote."""


PROGRAM = "the compiled step"
"""What a process waits in whose step is one program on its devices, and those of all others."""


@dataclass(kw_only=True, slots=True)
class Report:
    """What is known about one rank, and what follows from it."""

    rank: int
    node: int
    stage: int | None = None
    """Pipeline stage, if there are several."""
    beat: Beat | None = None
    location: HangReport
    silent: float = 0.0
    """Seconds without progress."""
    operation: str | None = field(init=False)
    """The collective it waits in."""
    broken: bool = field(init=False)
    """Stopped, dead or without an answer: to blame without further evidence."""
    doing: str = field(init=False)
    """What is wrong with it, or what it does, as the end of a sentence."""
    stack: str = field(init=False)

    def __post_init__(self) -> None:
        self.operation, self.broken, self.doing, self.stack = _assess(self.location, self.beat)

    @property
    def waiting(self) -> bool:
        return self.operation is not None and not self.broken

    @property
    def group(self) -> str | None:
        return self.location.get("group")

    def in_step(self, word: str) -> str:
        """The step that it has not completed, as in " of step 7"; empty if unknown."""
        return "" if self.beat is None else f" {word} step {self.beat.step + 1}"

    def collectives(self, group: str | None) -> int | None:
        """How many collectives it has started in a group; None: not a member, or unknown."""
        return None if group is None else self.location.get("numbers", {}).get(group)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Who holds up the others."""

    culprits: tuple[int, ...]
    """Empty: no rank is to blame, as far as can be seen."""
    message: str
    stack: str
    """Stacks of the culprits."""
    certain: bool
    """The culprits do not wait or do not answer, and others wait for them. False: they are only likely."""
    cut_off: bool = False
    """All ranks wait and none is behind: the connections are to blame."""


def diagnose(reports: Iterable[Report]) -> Diagnosis:
    """Name the ranks that the others wait for. A rank that waits for others is never blamed, unless it waits for something else."""
    ranks = {report.rank: report for report in sorted(reports, key=lambda report: report.rank)}
    waits = {report.rank: _blockers(report, ranks) for report in ranks.values() if report.waiting}
    broken = [number for number, report in ranks.items() if report.broken]
    if broken or any(not report.waiting for report in ranks.values()):
        awaited = set[int]().union(*waits.values())
        late = [number for number, report in ranks.items() if not report.waiting and number in awaited]
        culprits = sorted({*broken, *late})
        if culprits:
            return _blame(culprits, ranks, waits, certain=True)
        working = [number for number in ranks if number not in waits]
        return _blame(working, ranks, waits, certain=False) if len(working) < len(waits) else _all_work(ranks)
    if all(report.operation == PROGRAM for report in ranks.values()):
        return _all_work(ranks)
    diverged = _diverged(ranks, waits)
    return _blame(diverged, ranks, waits, certain=False) if diverged else _all_wait(ranks, waits)


def _assess(location: HangReport, beat: Beat | None) -> tuple[str | None, bool, str, str]:
    """(operation, broken, doing, stack) of a Report."""
    state = location.get("state")
    if "stack" in location and state not in _STATES:
        threads = "".join(f"Thread {name}:\n{stack}" for name, stack in location.get("threads", {}).items())
        doing = _located(_activity(location.get("place"), beat), location.get("at"))
        return location.get("operation"), False, doing, location["stack"] + threads
    frames = parse_faulthandler(location.get("dump") or "")
    blocked = blocking_collective(frames)
    if state in _STATES:
        doing = f"its process is {_STATES[state]}"
    elif blocked is not None:
        # A rank that waits for others holds up nobody, even if it cannot answer.
        return blocked[0], False, f"it waits in {blocked[0]} and does not answer", format_stack(frames)
    elif state == "D":
        doing = "it does not answer: its process waits for a disk or a device"
    else:
        doing = "it does not answer, although its process is alive"
    if frames:
        doing += f"; {_located(describe_location(frames), str(frames[-1]))}"
    elif beat is not None:
        doing += f"; its last heartbeat says that it is {beat.phase}"
    return None, True, doing, format_stack(frames) or location.get("stack", "")


def _activity(place: str | None, beat: Beat | None) -> str:
    """Describe what a rank does; by its heartbeat, if the stack shows nothing that people know."""
    phase = _PHASES.get(beat.phase) if beat is not None else None
    if phase is not None and (not place or place.startswith("at ")):
        return phase
    return place or "nowhere to be found"


def _located(place: str, at: str | None) -> str:
    return f"it is {place}: {at}" if at and at not in place else f"it is {place}"


def _blockers(report: Report, ranks: Mapping[int, Report]) -> set[int]:
    """The ranks that a waiting rank waits for, as far as can be seen."""
    peer = report.location.get("peer")
    if report.operation in _MESSAGES and peer is not None:
        return {peer} & ranks.keys()
    started = report.collectives(report.group)
    if started is None:  # it waits for all ranks, or for unknown ones
        return {other.rank for other in ranks.values() if not other.waiting}
    members = report.location.get("members")
    blockers = set()
    for other in ranks.values() if members is None else (ranks[member] for member in members if member in ranks):
        theirs = other.collectives(report.group)
        if other.rank != report.rank and (other.broken if theirs is None else theirs < started):
            blockers.add(other.rank)
    return blockers


def _diverged(ranks: Mapping[int, Report], waits: Mapping[int, set[int]]) -> list[int]:
    """The culprits if all ranks wait: ranks that others wait for and that wait for no rank themselves, or that wait in another collective
    than most. They have taken another path through the program."""
    awaited = set[int]().union(*waits.values())
    # Behind is who waits for nobody in the same group as a rank that waits for it: no other rank is in that earlier collective.
    behind = {n for other, blockers in waits.items() for n in blockers if ranks[other].group == ranks[n].group}
    last = [number for number in ranks if number in behind and not waits[number]]
    if last:
        return last
    # The ranks wait in a circle. Messages do not tell who should have sent; of collectives, most ranks are in the right one.
    places = {n: (report.location.get("use"), report.operation) for n, report in ranks.items()}
    counted = Counter(places.values()).most_common()
    if len(counted) < 2 or counted[0][1] == counted[1][1]:
        return []
    return [n for n in ranks if n in awaited and ranks[n].operation not in _MESSAGES and places[n] != counted[0][0]]


def _blame(culprits: Sequence[int], ranks: Mapping[int, Report], waits: Mapping[int, set[int]], *, certain: bool) -> Diagnosis:
    waiting = [report for number, report in ranks.items() if number in waits and number not in culprits]
    since = _waited(waiting)
    clauses = [(f"{_name(ranks[number])} {_missing(ranks[number], ranks, waits)}", ranks[number].doing) for number in culprits]
    if len(clauses) == 1:
        parts = [clauses[0][0], since, clauses[0][1]]
    else:
        parts = [*(f"{missing}, {doing}" for missing, doing in clauses), since]
    stacks = [(number, ranks[number].stack) for number in culprits if ranks[number].stack]
    stack = stacks[0][1] if len(culprits) == 1 and stacks else "".join(f"Rank {number}:\n{text}" for number, text in stacks)
    return Diagnosis(tuple(culprits), "; ".join(part for part in parts if part), stack, certain)


def _missing(culprit: Report, ranks: Mapping[int, Report], waits: Mapping[int, set[int]]) -> str:
    """What the others wait for: the first collective of theirs that this rank has not started."""
    waiting = [ranks[other] for other, blockers in waits.items() if culprit.rank in blockers and ranks[other].group is not None]
    in_messages = [report for report in waiting if report.operation in _MESSAGES]
    in_collectives = [report for report in waiting if report.operation not in _MESSAGES]
    if in_collectives:
        first = min(in_collectives, key=lambda report: report.collectives(report.group) or 0)
        started = culprit.collectives(first.group)
        number = started + 1 if started is not None else first.collectives(first.group)
        return f"has not reached {first.operation} #{number}{culprit.in_step('of')}"
    if in_messages:
        verb = "received the message of" if in_messages[0].operation == "send" else "sent its message to"
        return f"has not {verb} {_list(report.rank for report in in_messages)}{culprit.in_step('in')}"
    return f"makes no progress{culprit.in_step('in')}"


def _all_work(ranks: Mapping[int, Report]) -> Diagnosis:
    """Ranks compute and no rank waits for them."""
    busy = [report for report in ranks.values() if not report.waiting] or list(ranks.values())
    activity, count = Counter(report.doing.removeprefix("it is ") for report in busy).most_common(1)[0]
    verb, them = ("works", "it") if len(busy) == 1 else ("work", "them")
    message = (
        f"{_list(report.rank for report in busy)} {verb} on, and no rank is found waiting for {them}: "
        f"{count} of {len(ranks)} {'is' if count == 1 else 'are'} {activity}"
    )
    return Diagnosis((), message, busy[0].stack, False)


def _all_wait(ranks: Mapping[int, Report], waits: Mapping[int, set[int]]) -> Diagnosis:
    """All ranks wait, and none is behind."""
    # Ranks that wait for no known rank wait for the network; the others may wait for them.
    stuck = [ranks[number] for number, blockers in waits.items() if not blockers] or list(ranks.values())
    first = stuck[0]
    started = first.collectives(first.group)
    number = "" if started is None or first.operation in _MESSAGES else f" #{started}"
    step = first.in_step("of")
    if len(stuck) == 1:
        verb = f"waits in {first.operation}{number}{step}"
    elif len({(report.group, report.operation) for report in stuck}) == 1:
        verb = f"wait in {first.operation}{number}{step}"
    else:
        verb = f"wait for each other in {', '.join(dict.fromkeys(str(report.operation) for report in stuck))}{step}"
    who = f"all {len(stuck)} ranks" if len(stuck) == len(ranks) and len(stuck) > 1 else _list(report.rank for report in stuck)
    message = (
        f"{who} {verb}, and no rank is missing there; {_waited(list(ranks.values()))}; "
        "the connections between ranks are suspect"
    )
    return Diagnosis((), message, first.stack, False, cut_off=True)


def _waited(waiting: Sequence[Report]) -> str:
    if not waiting:
        return ""
    seconds = max(report.silent for report in waiting)
    return f"{len(waiting)} rank{'s have' if len(waiting) > 1 else ' has'} waited for {seconds:.0f} s"


def _name(report: Report) -> str:
    layer = report.location.get("layer")
    words = [f"node {report.node}"]
    words += [f"layer {layer}"] if layer else []
    words += [f"pipeline stage {report.stage}"] if report.stage is not None else []
    return f"rank {report.rank} ({', '.join(words)})"


def _list(numbers: Iterable[int]) -> str:
    words = [str(number) for number in numbers]
    if len(words) == 1:
        return f"rank {words[0]}"
    shown = words if len(words) <= 8 else [*words[:8], f"{len(words) - 8} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


# --- reading stacks -------------------------------------------------------------------------------------------------

_HOME = str(Path(__file__).resolve().parent.parent) + "/"


class Frame(NamedTuple):
    """One call. A stack has the innermost call last."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = package_path(self.file) or "/".join(Path(self.file).parts[-2:]).lstrip("/")
        return f"{path}:{self.line} {self.function}"


# torch's function: the usual name of the collective.
_NAMES = {"isend": "send", "irecv": "recv", "batch_isend_irecv": "send and recv", "monitored_barrier": "barrier"}
_ENDINGS = re.compile(r"(_(into_tensor|tensor|single|object_list|object|coalesced))+$")

_PLUMBING = ("/torch/distributed/c10d_logger.py", "/contextlib.py", "/socket.py", "/ssl.py", "/torch/utils/_contextlib.py")
_OWN_PLUMBING = ("parallel/store.py", "events/frames.py", "observe/comm_timer.py")

# Files of this package and what they are for; the first match counts.
_TASKS = (
    (("data/",), "the data loader"),
    (("training/evaluate.py", "evaluation/"), "evaluation"),
    (("checkpointing/restore.py", "checkpointing/offline_writer.py", "training/initial_weights.py"), "restoring"),
    (("checkpointing/", "training/saving.py", "training/exports.py"), "saving"),
    (("optim/",), "the optimizer"),
    (("training/build.py", "parallel/apply.py"), "building the model"),
)


def package_path(file: str) -> str | None:
    """The path inside this package; None for other files."""
    return file.removeprefix(_HOME) if file.startswith(_HOME) else None


def collective_name(function: str) -> str:
    """The usual name of a collective, given torch's function."""
    plain = _ENDINGS.sub("", function.lower().removeprefix("_"))
    return _NAMES.get(plain, plain)


def blocking_collective(frames: Sequence[Frame]) -> tuple[str, int] | None:
    """The collective that the stack is blocked in and the index of its frame; None if the innermost calls wait for no other rank."""
    collective: tuple[str, int] | None = None
    for index in range(len(frames) - 1, -1, -1):
        frame = frames[index]
        if frame.file.endswith("/torch/distributed/distributed_c10d.py"):
            collective = collective_name(frame.function), index
        elif package_path(frame.file) == "parallel/store.py":
            collective = "store", index  # waits for a value that another rank puts into the key-value store
        elif package_path(frame.file) == "observe/comm_timer.py" and frame.function in ("wait", "timed_collective"):
            return collective or ("collective", index)
        elif not frame.file.endswith(_PLUMBING) and package_path(frame.file) not in _OWN_PLUMBING:
            break
    return collective


def task_of(frames: Sequence[Frame]) -> str | None:
    """The task of the innermost file of this package that has one."""
    for frame in reversed(frames):
        path = package_path(frame.file)
        for files, task in _TASKS:
            if path is not None and path.startswith(files):
                return task
    return None


def describe_location(frames: Sequence[Frame], layer: str | None = None) -> str:
    """What a rank does that does not wait: "in the data loader", "in the forward of layer blocks.3", …; else the innermost call."""
    if not frames:
        return "nowhere"
    task = task_of(frames)
    backward = any(frame.function == "_engine_run_backward" for frame in frames)
    words = [] if task is None else [f"in {task}"]
    if task in (None, "evaluation"):
        if layer is not None:
            words.append(f"in the {'backward' if backward else 'forward'} of layer {layer}")
        elif backward:
            words.append("in the backward")
    return ", ".join(words) or f"at {frames[-1]}"


def parse_faulthandler(dump: str) -> list[Frame]:
    """The stack of the main thread in the output of `faulthandler`, which writes it last, and innermost calls first."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE)
    lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', threads[-1], flags=re.MULTILINE)
    return [Frame(file, int(line), function) for file, line, function in reversed(lines)]


def format_stack(frames: Sequence[Frame]) -> str:
    """Format a stack like a traceback."""
    return "".join(f'  File "{frame.file}", line {frame.line}, in {frame.function}\n' for frame in frames)
