"""Reads a compiled program of XLA: the products that a device computes and the messages that it sends, in the text that the compiler prints of it.
Its own analysis counts the body of a loop once; here a loop counts as often as it runs. `rehearsal/compiled_process` prints the result."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\((?:[^()]|\([^()]*\))*\)|\S+) (?P<operator>[\w\-]+)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"(?P<format>[a-z]+\d*(?:e\d\w*)?)\[(?P<lengths>[\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONTRACTED = re.compile(r'(?:lhs_contracting_dims=\{|"lhs_contracting_dimensions":\[)([\d,"]*)[\]}]')
_OPERAND = re.compile(r"%([\w.\-]+)")
_CUBLAS = 'custom_call_target="__cublas$'
"""Of the products that XLA leaves to cuBLAS on NVIDIA's GPUs."""
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"(\d+),(\d+)")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_BITS = {"pred": 8, "bf16": 16, "token": 0}


@dataclass(frozen=True, slots=True)
class Collective:
    """A message of the program, or a loop of them."""

    kind: str
    """As XLA names it, such as "all-gather"."""
    group: tuple[int, ...]
    """The first of its groups of devices, by their places in the mesh. The others are alike."""
    bytes: int
    """Sent by a device in a ring."""
    times: int
    """How often a step sends it."""


@dataclass(slots=True)
class Program:
    """What a device computes and sends in one step."""

    flops: int = 0
    """Of matrix products, two for each multiplication."""
    operands: Counter[str] = field(default_factory=Counter)
    """Flops by the number formats of both operands, such as "f32 f32"."""
    collectives: list[Collective] = field(default_factory=list)
    endless: int = 0
    """Loops whose number of turns the text does not say: they count once."""


@dataclass(frozen=True, slots=True)
class _Instruction:
    operator: str
    shape: str
    rest: str


def read_program(text: str, devices: int) -> Program:
    """The products and messages of a compiled step, from the text of the program of one of so many devices."""
    computations, entry = _computations(text)
    program = Program()
    _count(program, computations, entry, 1, devices)
    return program


def _computations(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Instructions by name, of each computation by name; and the name of the first one."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, inside = "", None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            inside = computations.setdefault(found["name"], {})
            entry = found["name"] if found["entry"] else entry
        elif inside is not None and (found := _INSTRUCTION.match(line)):
            inside[found["name"]] = _Instruction(found["operator"], found["shape"], found["rest"])
    return computations, entry


def _count(
    program: Program, computations: Mapping[str, Mapping[str, _Instruction]], name: str, times: int, devices: int
) -> None:
    """Adds what one computation does, and all that it calls."""
    here = computations.get(name, {})
    for instruction in here.values():
        turns = times
        if instruction.operator == "dot" or (instruction.operator == "custom-call" and _CUBLAS in instruction.rest):
            flops, formats = _product(instruction, here)
            program.flops += flops * times
            program.operands[formats] += flops * times
        elif instruction.operator in _COLLECTIVES:
            program.collectives.append(_collective(instruction, times, devices))
        elif instruction.operator == "while":
            known = _TRIPS.search(instruction.rest)
            program.endless += known is None
            turns *= int(known[1]) if known else 1
        if instruction.operator in ("fusion", "call", "while", "conditional", "async-start"):
            for called in _called(instruction.rest):
                _count(program, computations, called, turns, devices)


def _called(rest: str) -> Iterator[str]:
    for found in _CALLED.finditer(rest):
        yield from (name.strip().lstrip("%") for name in found[1].strip("{}").split(","))


def _product(instruction: _Instruction, here: Mapping[str, _Instruction]) -> tuple[int, str]:
    """Operations of a product, and the formats of its operands."""
    names = _OPERAND.findall(instruction.rest)[:2]
    left, right = (next(_arrays(here[name].shape)) for name in names)
    contracted = _CONTRACTED.search(instruction.rest)
    inner = prod(left[1][dim] for dim in _numbers(contracted[1])) if contracted else 1
    (_, result) = next(_arrays(instruction.shape))
    return 2 * prod(result) * inner, f"{left[0]} {right[0]}"


def _collective(instruction: _Instruction, times: int, devices: int) -> Collective:
    size = sum(prod(lengths) * _bits(number) // 8 for number, lengths in _arrays(instruction.shape))
    group = _group(instruction, devices)
    many, kind = max(len(group), 1), instruction.operator
    if kind == "collective-permute":
        sent = size * (many > 1)
    elif kind == "reduce-scatter":
        sent = size * (many - 1)
    else:
        sent = size * (many - 1) // many * (2 if kind == "all-reduce" else 1)
    return Collective(kind, group, sent, times)


def _group(instruction: _Instruction, devices: int) -> tuple[int, ...]:
    """Of a message between pairs, one of them."""
    rest = instruction.rest
    if found := _PAIRS.search(rest):
        pairs = [(int(source), int(target)) for source, target in _PAIR.findall(found[1])]
        return next((pair for pair in pairs if pair[0] != pair[1]), (0,))
    if found := _LISTED.search(rest):
        return tuple(_numbers(found[1].strip("{}").split("}")[0]))
    if found := _IOTA.search(rest):
        order = _transposed(_numbers(found[2]), _numbers(found[3] or ""))
        return tuple(order[: _numbers(found[1])[-1]])
    if found := _MESH.search(rest):
        return _mesh_group(found)
    return tuple(range(devices))


def _mesh_group(found: re.Match[str]) -> tuple[int, ...]:
    """The devices along some axes of a mesh that the message describes."""
    sizes = {name: int(size) for name, size, *_ in _AXIS.findall(found[1])}
    order = _transposed(_numbers(found[2]), _numbers(found[3] or "")) if found[2] else range(prod(sizes.values()))
    strides, stride = {}, prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        strides[name] = stride
    places = [0]
    for name, _, before, size in _AXIS.findall(found[4]):
        count, step = sizes[name], strides[name]
        if size:  # a part of the axis
            step *= count // int(before) // int(size)
            count = int(size)
        places = [place + index * step for place in places for index in range(count)]
    return tuple(order[place] for place in places)


def _transposed(lengths: Sequence[int], order: Sequence[int]) -> list[int]:
    """The numbers from 0 on as a box of these lengths, read with its dimensions in another order."""
    strides = [prod(lengths[dim + 1 :]) for dim in range(len(lengths))]
    numbers = [0]
    for dim in order or range(len(lengths)):
        numbers = [number + index * strides[dim] for number in numbers for index in range(lengths[dim])]
    return numbers


def _arrays(shape: str) -> Iterator[tuple[str, list[int]]]:
    """Number format and lengths of each array of a shape."""
    for found in _ARRAY.finditer(shape):
        yield found["format"], _numbers(found["lengths"])


def _bits(number: str) -> int:
    return _BITS[number] if number in _BITS else int(re.findall(r"\d+", number)[0])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.replace('"', "").split(",") if number.strip()]
