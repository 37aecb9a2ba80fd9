"""Who holds the others up: from where every rank says it is, the guilty ranks and a sentence about them. The supervisor calls it when
a run makes no progress; it knows no clock and no process, so everything it says can be tried in a test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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


class Beat(Protocol):
    """What a rank's pulse has to say (`events/heartbeat`)."""

    @property
    def step(self) -> int: ...
    @property
    def phase(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What is known of one rank."""

    rank: int
    node: int
    host: str | None = None
    """Name of the node, if it has one."""
    stage: int | None = None
    """Its place in the pipeline, where there is one."""
    beat: Beat | None = None
    where: Mapping[str, Any] | None = None
    """Its own answer (`worker/hang_report`); None: it gave none."""
    state: str | None = None
    """The letter of its process in /proc."""
    fallback_stack: str | None = None
    """What `faulthandler` wrote, where the rank did not answer."""
    silent: float = 0.0
    """Seconds since it made any progress."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    culprits: tuple[int, ...]
    """Empty: no rank is guilty, as far as can be told."""
    message: str
    stack: str
    """Of the culprits."""
    certain: bool
    """The culprits are those that do not wait or do not answer, and somebody waits for them; else they are the likely ones."""
    cut_off: bool = False
    """All wait and nobody is missing: the connections between ranks are suspect."""


def diagnose(reports: Sequence[Report]) -> Diagnosis:
    """In the order of ranks. Ranks that only wait for others are never guilty, unless they wait for something else than all others."""
    ranks = {report.rank: _Rank.of(report) for report in sorted(reports, key=lambda report: report.rank)}
    waits = {rank.number: _blockers(rank, ranks) for rank in ranks.values() if rank.waiting}
    broken = [number for number, rank in ranks.items() if rank.broken]
    if broken or any(not rank.waiting for rank in ranks.values()):
        ends = _ends(waits)
        late = [number for number, rank in ranks.items() if not rank.waiting and number in ends]
        culprits = sorted({*broken, *late})
        if culprits:
            return _named(culprits, ranks, waits, certain=True)
        working = [number for number in ranks if number not in waits]
        return _named(working, ranks, waits, certain=False) if len(working) < len(waits) else _nobody_waits(ranks)
    odd = _odd(ranks, waits)
    return _named(odd, ranks, waits, certain=False) if odd else _nobody(ranks, waits)


@dataclass(slots=True)
class _Rank:
    """A report, read."""

    report: Report
    operation: str | None
    """What it waits in."""
    broken: bool
    """Stopped, dead, or without an answer: nothing else is needed to find it guilty."""
    doing: str
    """What is wrong with it, or what it does, as the end of a sentence."""
    stack: str
    where: Mapping[str, Any] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.report.rank

    @property
    def waiting(self) -> bool:
        return self.operation is not None and not self.broken

    @property
    def group(self) -> str | None:
        return self.where.get("group")

    @property
    def use(self) -> str | None:
        return self.where.get("use")

    def begun(self, group: str | None) -> int | None:
        """How many collectives it has begun in a group; None: it is not in it, or has not said."""
        found: int | None = self.where.get("numbers", {}).get(group)
        return found

    @staticmethod
    def of(report: Report) -> _Rank:
        if report.where is not None and report.state not in _STATES:
            where = report.where
            threads = "".join(f"Thread {name}:\n{stack}" for name, stack in where.get("threads", {}).items())
            stack = where.get("stack", "") + threads
            doing = _found(_known(where.get("place"), report.beat), where.get("at"))
            return _Rank(report, where.get("operation"), False, doing, stack, where)
        frames = parse_faulthandler(report.fallback_stack or "")
        found = blocking_collective(frames)
        if report.state in _STATES:
            doing = f"its process is {_STATES[report.state]}"
        elif found is not None:
            # Somebody who waits for others holds nobody up, even if he cannot be spoken to.
            return _Rank(report, found[0], False, f"it waits in {found[0]} and does not answer", format_stack(frames))
        elif report.state == "D":
            doing = "it does not answer: its process waits for a disk or a device"
        else:
            doing = "it does not answer, although its process is there"
        if frames:
            doing += f"; {_found(describe_location(frames), str(frames[-1]))}"
        elif report.beat is not None:
            doing += f"; its last word was that it is {report.beat.phase}"
        last = report.where or {}
        return _Rank(report, None, True, doing, format_stack(frames) or last.get("stack", ""), last)


def _known(describe_location: str | None, beat: Beat | None) -> str:
    """Where the stack says nothing that a person knows, the rank's last word on what it does is better."""
    said = _PHASES.get(beat.phase) if beat is not None else None
    if said is not None and (not describe_location or describe_location.startswith("at ")):
        return said
    return describe_location or "nowhere to be found"


def _found(location: str, at: str | None) -> str:
    return f"it is {location}: {at}" if at and at not in location else f"it is {location}"


def _blockers(rank: _Rank, ranks: Mapping[int, _Rank]) -> set[int]:
    """Those that a waiting rank waits for, as far as can be told."""
    peer = rank.where.get("peer")
    if rank.operation in _MESSAGES and peer is not None:
        return {peer} & ranks.keys()
    begun = rank.begun(rank.group)
    if begun is None:  # it waits for all, or does not say for whom
        return {other.number for other in ranks.values() if not other.waiting}
    members = rank.where.get("members")
    found = set()
    for other in ranks.values() if members is None else (ranks[member] for member in members if member in ranks):
        there = other.begun(rank.group)
        if other.number != rank.number and (other.broken if there is None else there < begun):
            found.add(other.number)
    return found


def _ends(waits: Mapping[int, set[int]]) -> set[int]:
    """Where the chains of those who wait for each other lead, and everybody on the way."""
    return set().union(*waits.values()) if waits else set()


def _odd(ranks: Mapping[int, _Rank], waits: Mapping[int, set[int]]) -> list[int]:
    """All wait. Guilty are those that others wait for while they wait for nobody themselves, or for the others: they have taken
    another way, and are the fewer."""
    wanted = _ends(waits)
    last = [number for number in ranks if number in wanted and not waits[number] and _behind(number, ranks, waits)]
    if last:
        return last
    # Who waits for whom goes in a circle. Messages say nothing about who should have sent; of collectives, most are in the right one.
    places = {n: (rank.use, rank.operation) for n, rank in ranks.items() if n in wanted and rank.operation not in _MESSAGES}
    counted = Counter((rank.use, rank.operation) for rank in ranks.values()).most_common()
    if len(counted) < 2 or counted[0][1] == counted[1][1]:
        return []
    return [number for number, where in places.items() if where != counted[0][0]]


def _behind(number: int, ranks: Mapping[int, _Rank], waits: Mapping[int, set[int]]) -> bool:
    """Whether it waits in the same group as those that wait for it, at an earlier number: a wait for nobody there is."""
    mine = ranks[number].group
    return any(number in blockers and ranks[other].group == mine for other, blockers in waits.items())


def _named(culprits: Sequence[int], ranks: Mapping[int, _Rank], waits: Mapping[int, set[int]], *, certain: bool) -> Diagnosis:
    waiting = [rank for number, rank in ranks.items() if number in waits and number not in culprits]
    patience = _patience(waiting)
    clauses = [(f"{_who(ranks[number])} {_missing(ranks[number], ranks, waits)}", ranks[number].doing) for number in culprits]
    if len(clauses) == 1:
        parts = [clauses[0][0], patience, clauses[0][1]]
    else:
        parts = [*(f"{what}, {doing}" for what, doing in clauses), patience]
    stacks = [(number, ranks[number].stack) for number in culprits if ranks[number].stack]
    stack = stacks[0][1] if len(culprits) == 1 and stacks else "".join(f"Rank {number}:\n{text}" for number, text in stacks)
    return Diagnosis(tuple(culprits), "; ".join(part for part in parts if part), stack, certain)


def _missing(culprit: _Rank, ranks: Mapping[int, _Rank], waits: Mapping[int, set[int]]) -> str:
    """What the others wait for: the first collective of theirs that this rank has not begun."""
    step = "" if culprit.report.beat is None else f" of step {culprit.report.beat.step + 1}"
    waiting = [
        ranks[other] for other, blockers in waits.items() if culprit.number in blockers and ranks[other].group is not None
    ]
    talking = [rank for rank in waiting if rank.operation in _MESSAGES]
    meeting = [rank for rank in waiting if rank not in talking]
    if meeting:
        first = min(meeting, key=lambda rank: rank.begun(rank.group) or 0)
        begun = culprit.begun(first.group)
        number = begun + 1 if begun is not None else first.begun(first.group)
        return f"has not reached {first.operation} #{number}{step}"
    if talking:
        verb = "taken what it is sent by" if talking[0].operation == "send" else "sent what is awaited by"
        return f"has not {verb} {_list(rank.number for rank in talking)}{step and ' in' + step.removeprefix(' of')}"
    return f"does not go on{step and ' in' + step.removeprefix(' of')}"


def _nobody_waits(ranks: Mapping[int, _Rank]) -> Diagnosis:
    busy = [rank for rank in ranks.values() if not rank.waiting]
    places = Counter(rank.doing.removeprefix("it is ") for rank in busy).most_common(1)[0]
    return Diagnosis(
        (),
        f"{_list(rank.number for rank in busy)} {'works' if len(busy) == 1 else 'work'} on, and no rank is found waiting for "
        f"{'it' if len(busy) == 1 else 'them'}: {places[1]} of {len(ranks)} {'is' if places[1] == 1 else 'are'} {places[0]}",
        busy[0].stack,
        False,
    )


def _nobody(ranks: Mapping[int, _Rank], waits: Mapping[int, set[int]]) -> Diagnosis:
    """All wait, and none of them is behind."""
    # Those that wait for nobody that is known wait for the network; the others may wait for them.
    stuck = [ranks[number] for number, blockers in waits.items() if not blockers] or list(ranks.values())
    first = stuck[0]
    begun = first.begun(first.group)
    number = "" if begun is None or first.operation in _MESSAGES else f" #{begun}"
    step = "" if first.report.beat is None else f" of step {first.report.beat.step + 1}"
    same = len({(rank.group, rank.operation) for rank in stuck}) == 1
    if len(stuck) == 1:
        what = f"waits in {first.operation}{number}{step}, and"
    elif same:
        what = f"wait in {first.operation}{number}{step}, and"
    else:
        what = f"wait for each other in {_list_words(stuck)}{step}, and"
    whole = f"all {len(stuck)} ranks" if len(stuck) == len(ranks) and len(stuck) > 1 else _list(rank.number for rank in stuck)
    message = (
        f"{whole} {what} nobody is missing there; {_patience(list(ranks.values()))}; the connections between ranks are suspect"
    )
    return Diagnosis((), message, first.stack, False, cut_off=True)


def _list_words(ranks: Iterable[_Rank]) -> str:
    return ", ".join(dict.fromkeys(str(rank.operation) for rank in ranks))


def _patience(waiting: Sequence[_Rank]) -> str:
    if not waiting:
        return ""
    seconds = max(rank.report.silent for rank in waiting)
    return f"{len(waiting)} rank{'s wait' if len(waiting) > 1 else ' waits'} since {seconds:.0f} s"


def _who(rank: _Rank) -> str:
    report, layer = rank.report, rank.where.get("layer")
    words = [f"node {report.host if report.host is not None else report.node}"]
    words += [f"layer {layer}"] if layer else []
    words += [f"pipeline stage {report.stage}"] if report.stage is not None else []
    return f"rank {report.rank} ({', '.join(words)})"


def _list(numbers: Iterable[int]) -> str:
    words = [str(number) for number in numbers]
    if len(words) == 1:
        return f"rank {words[0]}"
    shown = words if len(words) <= 8 else [*words[:8], f"{len(words) - 8} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


_HOME = str(Path(__file__).resolve().parent.parent) + "/"

STORE = "store"
"""Waiting for a word that another rank leaves in the ranks' store."""


class Frame(NamedTuple):
    """One call. Stacks have the innermost last."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{package_path(self.file) or _short(self.file)}:{self.line} {self.function}"


# torch's function: the collective as a person calls it.
_NAMES = {
    "isend": "send",
    "irecv": "recv",
    "batch_isend_irecv": "send and recv",
    "monitored_barrier": "barrier",
}
_ENDINGS = re.compile(r"(_(into_tensor|tensor|single|object_list|object|coalesced))+$")

_PLUMBING = ("/torch/distributed/c10d_logger.py", "/contextlib.py", "/socket.py", "/ssl.py", "/torch/utils/_contextlib.py")
_OWN_PLUMBING = ("parallel/store.py", "events/frames.py", "observe/comm_timer.py")

# Files of this program by what they are for; the first that fits.
_ROOMS = (
    (("data/",), "the data loader"),
    (("training/evaluate.py", "evaluation/"), "evaluation"),
    (("checkpointing/restore.py", "checkpointing/tools/offline_writer.py", "training/initial_weights.py"), "restoring"),
    (("checkpointing/", "training/saving.py", "training/exports.py"), "saving"),
    (("optim/",), "the optimizer"),
    (("training/build.py", "parallel/apply.py"), "building the model"),
)


def package_path(file: str) -> str | None:
    """The path inside this program; None for a file of somebody else's."""
    return file.removeprefix(_HOME) if file.startswith(_HOME) else None


def collective_name(name: str) -> str:
    """A collective as a person calls it, by torch's name of the function."""
    plain = _ENDINGS.sub("", name.lower().removeprefix("_"))
    return _NAMES.get(plain, plain)


def blocking_collective(frames: Sequence[Frame]) -> tuple[str, int] | None:
    """The collective that waits, and which of the frames is its; None where the innermost calls are none of waiting for others."""
    found: tuple[str, int] | None = None
    for index in range(len(frames) - 1, -1, -1):
        frame = frames[index]
        if frame.file.endswith("/torch/distributed/distributed_c10d.py"):
            found = collective_name(frame.function), index
        elif package_path(frame.file) == "parallel/store.py":
            found = STORE, index
        elif package_path(frame.file) == "observe/comm_timer.py" and frame.function in ("wait", "timed_collective"):
            return found or ("collective", index)
        elif not frame.file.endswith(_PLUMBING) and package_path(frame.file) not in _OWN_PLUMBING:
            break
    return found


def task_of(frames: Sequence[Frame]) -> str | None:
    """What the innermost file of this program that has a task is for."""
    for frame in reversed(frames):
        path = package_path(frame.file)
        for files, words in _ROOMS:
            if path is not None and path.startswith(files):
                return words
    return None


def describe_location(frames: Sequence[Frame], layer: str | None = None) -> str:
    """What somebody does who does not wait: "in the data loader", "in the forward of layer blocks.3", …; else the innermost call."""
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
    """The main thread's stack in what `faulthandler` has written: it comes last, and each thread's innermost call first."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE)
    lines = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', threads[-1], flags=re.MULTILINE)
    return [Frame(file, int(line), function) for file, line, function in reversed(lines)]


def format_stack(frames: Sequence[Frame]) -> str:
    """Like a traceback."""
    return "".join(f'  File "{frame.file}", line {frame.line}, in {frame.function}\n' for frame in frames)


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:]).lstrip("/")
