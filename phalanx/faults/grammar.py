"""The faults of `--chaos` as values: parsed from text, formatted, checked against a run, and drawn at random. docs/chaos.md has the
grammar. `training/hooks/rank_faults` injects faults inside a rank, and `control/node_faults` those that no rank can.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from phalanx.spec.errors import RunError, did_you_mean, either, shorten

Kind = Literal[
    "kill", "hang", "slow", "delay", "corrupt", "nan", "raise", "freeze", "fill-disk", "drop-link", "miscompute", "random"
]
Point = Literal["data", "compute", "collective", "update", "save", "evaluate"]
POINTS: tuple[str, ...] = get_args(Point)
TARGETS = ("weights", "gradients", "optimizer")
DEFAULT_KINDS = ("kill", "hang", "slow", "corrupt", "nan", "raise", "fill-disk", "drop-link", "kill-node")
"""Kinds that `random` draws unless it is given others."""
RANDOM_KINDS = (*DEFAULT_KINDS, "freeze", "freeze-node")
"""Kinds that `random` can draw."""

_DEFAULT_SECONDS = 10.0  # default seconds of a full disk or broken link, short enough to survive


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault. Fields that its kind does not use keep their defaults."""

    kind: Kind
    rank: int | None = None
    """The rank it hits, numbered as at the time of the injection."""
    node: int | None = None
    """The node it hits."""
    link: tuple[int, int] | None = None
    """The two nodes whose link it breaks."""
    step: int = 1
    """The step during which it happens; the first step of a lasting fault."""
    to: int | None = None
    """Last step of a lasting fault; None: it lasts to the end."""
    seconds: float | None = None
    """Duration; None: until something ends it."""
    point: str = "compute"
    """Point of the step at which it happens."""
    factor: float | None = None
    """How many times longer a slow rank takes."""
    what: str = "weights"
    """What is corrupted."""
    layer: str | None = None
    """Module whose output gets a NaN; None: the first block of the rank."""
    rate: float | None = None
    """random: probability of a fault in each step."""
    seed: int = 0
    kinds: tuple[str, ...] = ()
    """random: kinds to draw; empty: all that are possible."""

    def __str__(self) -> str:
        """The fault as written on the command line."""
        return " ".join([self.kind, *(text for word in _KINDS[self.kind].words if (text := _format_word(self, word)))])


@dataclass(frozen=True, slots=True)
class _Word:
    """How one word of a fault is parsed."""

    field: str
    allowed: str
    """Description of valid values."""
    read: Callable[[str], Any]
    """Raises ValueError for an invalid value."""
    choices: tuple[str, ...] = ()
    """The valid values, where they are few."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one kind of fault is written."""

    example: str
    words: tuple[str, ...]
    needs: tuple[tuple[str, ...], ...] = ()
    """One word of each of these groups must be given."""


_NUMBER = r"[0-9]*\.?[0-9]+(?:e-?[0-9]+)?"
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def _match(pattern: str, text: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError
    return match


def _number(pattern: str, low: float, high: float) -> Callable[[str], float]:
    """Reads a number of this pattern, low < number ≤ high, in the unit that follows it, if there is one."""

    def read(text: str) -> float:
        number, *unit = _match(pattern, text).groups()
        value = float(number) * _UNITS[unit[0]] if unit else float(number)
        if not low < value <= high:
            raise ValueError
        return value

    return read


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    return lambda text: _match("|".join(names), text)[0]


def _integer(least: int) -> Callable[[str], int]:
    number = _number("([0-9]{1,12})", least - 1, 1e12)
    return lambda text: int(number(text))


def _link(text: str) -> tuple[int, int]:
    first, second = map(int, _match(r"([0-9]{1,9})-([0-9]{1,9})", text).groups())
    if first == second:
        raise ValueError
    return first, second


_X, _A_B = "x", "A-B"  # the two words that are not written as NAME=
_WORDS = {
    "rank": _Word("rank", "a rank, counted from 0", _integer(0)),
    "node": _Word("node", "a node, counted from 0", _integer(0)),
    "step": _Word("step", "a step, counted from 1", _integer(1)),
    "from": _Word("step", "a step, counted from 1", _integer(1)),
    "to": _Word("to", "a step, counted from 1", _integer(1)),
    "for": _Word("seconds", "a duration such as 20s, 1.5s or 2m", _number(f"({_NUMBER})(ms|s|m|h)", 0, 1e6)),
    "in": _Word("point", either(POINTS), _one_of(POINTS), POINTS),
    "during": _Word("point", either(POINTS), _one_of(POINTS), POINTS),
    "what": _Word("what", either(TARGETS), _one_of(TARGETS), TARGETS),
    "layer": _Word("layer", "the name of a module, such as blocks.3.attention", lambda text: _match(r"[\w.]+", text)[0]),
    "rate": _Word("rate", "a probability above 0 and at most 1", _number(f"({_NUMBER})", 0, 1)),
    "seed": _Word("seed", "a whole number", _integer(0)),
    "kinds": _Word(
        "kinds",
        f"names separated by commas, out of {', '.join(RANDOM_KINDS)}",
        lambda text: tuple(map(_one_of(RANDOM_KINDS), text.split(","))),
        RANDOM_KINDS,
    ),
    _X: _Word("factor", "a factor above 1 such as x3", _number(f"({_NUMBER})", 1, 1e6)),
    _A_B: _Word("link", "two different nodes such as 0-1", _link),
}
_RANK, _STEP = ("rank",), ("step",)
_KINDS = {
    "kill": _Kind("kill rank=3 step=10", ("rank", "node", "step", "during", "for"), (("rank", "node"), _STEP)),
    "hang": _Kind("hang rank=1 step=25 for=20s", ("rank", "step", "in", "for"), (_RANK, _STEP)),
    "slow": _Kind("slow rank=2 x3 from=30", ("rank", _X, "from", "to"), (_RANK, (_X,))),
    "delay": _Kind("delay rank=2 in=data for=40ms from=30", ("rank", "in", "for", "from", "to"), (_RANK, ("for",))),
    "corrupt": _Kind("corrupt rank=1 step=40", ("rank", "step", "what"), (_RANK, _STEP)),
    "nan": _Kind("nan rank=0 step=45", ("rank", "step", "layer"), (_RANK, _STEP)),
    "raise": _Kind("raise rank=1 step=20", ("rank", "step", "in"), (_RANK, _STEP)),
    "freeze": _Kind("freeze rank=1 step=20 for=5s", ("rank", "node", "step", "for"), (("rank", "node"), _STEP)),
    "fill-disk": _Kind("fill-disk from=20 for=5s", ("from", "step", "for")),
    "drop-link": _Kind("drop-link 0-1 step=20 for=5s", (_A_B, "step", "for"), ((_A_B,),)),
    "miscompute": _Kind("miscompute node=1", ("node",), (("node",),)),
    "random": _Kind("random rate=0.02 seed=7 kinds=kill,hang", ("rate", "seed", "kinds"), (("rate",),)),
}


def parse(text: str) -> tuple[Fault, ...]:
    """Parse a text such as "kill rank=3 step=10; fill-disk". All problems are raised together, as RunError."""
    faults, problems = [], []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        try:
            faults.append(_fault(part))
        except ValueError as error:
            problems.append(f'--chaos: "{shorten(part)}": {error}')
    if problems:
        raise RunError(problems)
    return tuple(faults)


def format_faults(faults: Iterable[Fault]) -> str:
    """Text from which `parse` gets the same faults."""
    return "; ".join(map(str, faults))


def is_node_fault(fault: Fault) -> bool:
    """Whether an agent injects it: faults of nodes, links and disks, and those that stop a process and wake it again."""
    return fault.node is not None or fault.kind in ("freeze", "fill-disk", "drop-link")


def check(faults: Iterable[Fault], ranks: int, nodes: int, steps: int) -> list[str]:
    """Sentences about ranks, nodes and steps that the run does not have."""
    problems = []
    for fault in faults:
        for name, number, count in (
            ("rank", fault.rank, ranks),
            *(("node", n, nodes) for n in (fault.node, *(fault.link or ()))),
        ):
            if number is not None and number >= count:
                remedy = "" if name == "rank" else "; cluster.nodes sets their number"
                problems.append(
                    f'--chaos: "{fault}": there is no {name} {number}, the run has {name}s 0 to {count - 1}{remedy}.'
                )
        if fault.step > steps:
            problems.append(f'--chaos: "{fault}": there is no step {fault.step}, the run has steps 1 to {steps}.')
        impossible = [kind for kind in fault.kinds or (fault.kind,) if needs_nodes(kind)]
        if impossible and nodes == 1:
            problems.append(f'--chaos: "{fault}": {either(impossible)} needs several nodes, but cluster.nodes = 1.')
    return problems


def program_problems(faults: Iterable[Fault]) -> list[str]:
    """Sentences about faults that would change numbers inside of a step that is one compiled program, as one of the XLA engine is."""
    problems = []
    for fault in faults:
        inside = [
            kind
            for kind in (fault.kinds or DEFAULT_KINDS if fault.kind == "random" else (fault.kind,))
            if kind in ("nan", "corrupt")
        ]
        if inside:
            remedy = "name other kinds with kinds=" if fault.kind == "random" else 'remove it, or set engine.name = "torch"'
            problems.append(
                f'--chaos: "{fault}": {either(inside)} cannot reach into a compiled step (engine.name = "xla"): {remedy}.'
            )
    return problems


def needs_nodes(kind: str) -> bool:
    """Whether faults of this kind need several nodes."""
    return kind in ("drop-link", "miscompute") or kind.endswith("-node")


def _fault(part: str) -> Fault:
    """Parse one fault. Raises ValueError with a sentence."""
    name, *words = part.split()
    kind = _KINDS.get(name)
    if kind is None:
        guess = did_you_mean(_KINDS, name) or "."
        raise ValueError(f"there is no fault {shorten(name)}{guess} The faults are {', '.join(_KINDS)}.")
    given: dict[str, Any] = {}
    for written in words:
        word, value = _split(written)
        if word not in kind.words:
            guess = did_you_mean(kind.words, word) or "."
            raise ValueError(f"{name} does not take {shorten(written)}{guess} {_usage(name)}")
        if word in given:
            raise ValueError(f"{word} is given twice. {_usage(name)}")
        try:
            given[word] = _WORDS[word].read(value)
        except ValueError:
            allowed, choices = _WORDS[word].allowed, _WORDS[word].choices
            guesses = (did_you_mean(choices, item) for item in value.split(",") if item not in choices)
            guess = next(filter(None, guesses), ".")
            raise ValueError(f"{shorten(written)} is not {allowed}{guess} {_usage(name)}") from None
    for choices in kind.needs:
        if not any(word in given for word in choices):
            raise ValueError(f"{either(_shape(word) for word in choices)} is missing. {_usage(name)}")
    if wrong := _contradiction(name, given):
        raise ValueError(f"{wrong} {_usage(name)}")
    values = {_WORDS[word].field: value for word, value in given.items()}
    if name in ("fill-disk", "drop-link"):
        values.setdefault("seconds", _DEFAULT_SECONDS)
    return Fault(kind=name, **values)  # type: ignore[arg-type]  # a key of _KINDS


def _contradiction(name: str, given: dict[str, Any]) -> str | None:
    """A sentence about valid words that contradict each other."""
    for first, second in (("rank", "node"), ("from", "step")):
        if first in given and second in given:
            return f"{first} and {second} do not go together."
    if name == "kill" and "rank" in given and "for" in given:
        return "for= is for nodes: a rank is started again as soon as its death is noticed."
    if name == "kill" and "node" in given and "during" in given:
        return "during= is for ranks: those of a node are at different points."
    if given.get("to", 1 << 62) < given.get("from", 1):
        return f"to={given['to']} is before from={given['from']}."
    return None


def _split(written: str) -> tuple[str, str]:
    """Split "step=10", "x3" or "0-1" into word and value."""
    word, equals, value = written.partition("=")
    if equals:
        return word, value
    if re.match(r"x[0-9]", written):
        return _X, written[1:]
    return (_A_B, written) if re.match(r"[0-9]+-", written) else (written, "")


def _usage(name: str) -> str:
    kind = _KINDS[name]
    return f"{name} takes {', '.join(map(_shape, kind.words))}; for example: {kind.example}."


def _shape(word: str) -> str:
    return {_X: "xFACTOR", _A_B: _A_B}.get(word, f"{word}=")


def _format_word(fault: Fault, word: str) -> str:
    """Format one word of a fault; empty if it has its default value."""
    field = _WORDS[word].field
    value = getattr(fault, field)
    needed = (word,) in _KINDS[fault.kind].needs
    if value is None or (value == _DEFAULTS[field] and not needed):
        return ""
    if word == "step" and "from" in _KINDS[fault.kind].words:
        return ""  # `from` is the same
    if word == _A_B:
        return f"{value[0]}-{value[1]}"
    if isinstance(value, tuple):
        value = ",".join(value)
    elif isinstance(value, float):
        value = repr(value).removesuffix(".0")  # all digits, so that it parses to the same number
    if word == _X:
        return f"x{value}"
    return f"{word}={value}{'s' if field == 'seconds' else ''}"


_DEFAULTS = {field.name: field.default for field in fields(Fault)}


# --- drawing ----------------------------------------------------------------------------------------------------------

_IN_STEP = tuple(point for point in POINTS if point not in ("save", "evaluate"))  # points that every step passes


class _Dice:
    """Draws faults of a run of this size."""

    def __init__(self, seed: int, steps: int, ranks: int, nodes: int):
        self.random = random.Random(seed)
        self._steps, self._ranks, self._nodes = steps, ranks, nodes
        self._victim = self.random.randrange(nodes)
        """The only node that node faults hit: with two nodes lost at once, no state might be left."""

    def kinds(self, requested: Sequence[str]) -> tuple[str, ...]:
        """The requested kinds that are possible with this number of nodes."""
        return tuple(kind for kind in requested or DEFAULT_KINDS if self._nodes > 1 or not needs_nodes(kind))

    def draw(self, kind: str, step: int) -> Fault:
        """Draw one fault of this kind in this step. Durations are short, because random faults are frequent."""
        dice, choice = self.random, self.random.choice
        rank = dice.randrange(self._ranks)
        fields: dict[str, Callable[[], dict[str, Any]]] = {
            "kill": lambda: {"rank": rank, "point": choice(_IN_STEP)},
            "raise": lambda: {"rank": rank, "point": choice(_IN_STEP)},
            # Some hangs end before they are noticed, some do not.
            "hang": lambda: {"rank": rank, "point": choice(_IN_STEP), "seconds": choice((1.0, 30.0))},
            "slow": lambda: {
                "rank": rank,
                "to": min(self._steps, step + dice.randrange(3, 9)),
                "factor": choice((2.0, 3.0, 5.0)),
            },
            "corrupt": lambda: {"rank": rank, "what": choice(TARGETS)},
            # Rank 0 exists on every layout, so the same step is skipped whatever else has happened.
            "nan": lambda: {"rank": 0},
            "freeze": lambda: {"rank": rank, "seconds": choice((1.0, 10.0))},
            "fill-disk": lambda: {"seconds": 2.0},
            "drop-link": lambda: {"link": tuple(sorted(dice.sample(range(self._nodes), 2))), "seconds": choice((0.5, 5.0))},
            "kill-node": lambda: {"node": self._victim, "seconds": choice((1.0, 5.0))},
            "freeze-node": lambda: {"node": self._victim, "seconds": choice((1.0, 5.0))},
        }
        return Fault(kind=kind.removesuffix("-node"), step=step, **fields[kind]())  # type: ignore[arg-type]


def expand_random(faults: Iterable[Fault], *, steps: int, ranks: int, nodes: int) -> tuple[Fault, ...]:
    """Replace every `random` fault by drawn ones: each step has one with the given probability. The index of a fault in the result is its
    number, equal in every process."""
    expanded: list[Fault] = []
    for fault in faults:
        if fault.kind != "random":
            expanded.append(fault)
            continue
        dice = _Dice(fault.seed, steps, ranks, nodes)
        kinds = dice.kinds(fault.kinds)
        steps_hit = [step for step in range(1, steps + 1) if dice.random.random() < (fault.rate or 0.0)]
        expanded += [dice.draw(dice.random.choice(kinds), step) for step in steps_hit if kinds]
    return tuple(expanded)


def draw_faults(
    count: int, *, steps: int, ranks: int, nodes: int, seed: int = 0, kinds: Sequence[str] = ()
) -> tuple[Fault, ...]:
    """Draw exactly `count` faults, spread over the steps, at most one in a step, with equally many of each kind. `kinds`: as in `random`."""
    assert count <= steps - 1, "not more than one in a step, and none in the first"
    dice = _Dice(seed, steps, ranks, nodes)
    able = dice.kinds(kinds)
    drawn = [able[number % len(able)] for number in range(count)]
    dice.random.shuffle(drawn)
    _fill_disk_early(drawn)
    width = (steps - 1) / count  # from the second step on: before the first there is no state to recover
    places = [2 + int(number * width + dice.random.random() * (width - 1)) for number in range(count)]
    return tuple(map(dice.draw, drawn, places))


def _fill_disk_early(kinds: list[str]) -> None:
    """Move disk faults to the first half: a disk that is full at the very end rightly ends the run."""
    late = [place for place in range(len(kinds) // 2, len(kinds)) if kinds[place] == "fill-disk"]
    early = [place for place in range(len(kinds) // 2) if kinds[place] != "fill-disk"]
    for last, first in zip(late, early, strict=False):
        kinds[last], kinds[first] = kinds[first], kinds[last]
