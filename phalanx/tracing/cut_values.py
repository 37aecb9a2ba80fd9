"""How the ranks hold a value of the graph, and what a rank does differently at an operation. Used by the rules and by what reads a finished walk."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.spec.tensor_slice import chunk
from phalanx.tracing.module_graph import Op

Key = tuple[str, int]
"""A dimension of a parameter."""
Segments = tuple[int, ...]


def own(segments: Segments, index: int, ranks: int) -> int:
    """Elements that one of the ranks has of a dimension."""
    return sum(chunk(size, index, ranks)[1] for size in segments)


def has_parts(segments: Segments, ranks: int) -> bool:
    """Whether every rank has a part of every segment. Parts are equal but for the last, which may be smaller."""
    return all(chunk(size, ranks - 1, ranks)[1] for size in segments)


def same_parts(segments: Segments, factor: int, others: Segments, other_factor: int, ranks: int) -> bool:
    """Whether a rank has the same of two dimensions whose elements are so many of another."""
    pairs = list(zip(segments, others, strict=True))
    return all(
        own((a,), index, ranks) * factor == own((b,), index, ranks) * other_factor for a, b in pairs for index in range(ranks)
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a parameter a cut dimension begins."""

    parameter: str
    dim: int
    offset: int
    scale: int | None
    """Elements of the parameter for each element of the value; None where a value has copies of them."""

    @property
    def key(self) -> Key:
        return self.parameter, self.dim


@dataclass(frozen=True, slots=True)
class Cut:
    """A value of which each rank has a part: of each segment of one dimension, as `own` says."""

    dim: int
    segments: tuple[int, ...]
    origins: frozenset[Key]
    """The parameters that the cut came from: where a rule allows no cut, one of these must stay whole."""
    place: Place | None = None
    """While it can be told."""


@dataclass(slots=True)
class Change:
    """What a rank does differently at one operation."""

    enter: dict[Op, None] = field(default_factory=dict)
    """Whole operands that each rank computes a part from."""
    slices: dict[Op, tuple[int, Segments]] = field(default_factory=dict)
    """Whole operands of which a rank takes its part: dimension and segments."""
    leave: bool = False
    """The result is summed over the ranks."""
    shared: bool = False
    """A whole value is added to a part of a sum: each rank adds its share."""
    bias: Op | None = None
    """Added once, after that sum."""
    mean: Segments = ()
    """The result is the mean over a dimension of these segments, of which each rank has its part."""
    shape: tuple[int, Segments] | None = None
    """Which dimension of the result is cut, where the operation is given a shape."""
    pieces: tuple[int, tuple[tuple[Segments, Segments], ...]] | None = None
    """Dimension, and for each piece the segments before it and its own."""
    lookup: bool = False
    """Rows of a table that other ranks hold give zeros."""
    select: tuple[Op, Op] | None = None
    """Keys and values of all heads, of which the rank's queries read some."""


class Conflict(Exception):
    """No rule allows a cut here."""

    def __init__(self, why: str, origins: frozenset[Key]):
        super().__init__(why)
        self.why, self.origins = why, origins


class Refine(Exception):
    """A dimension of a parameter has an edge inside: it is fused."""

    def __init__(self, key: Key, points: list[int]):
        super().__init__(key)
        self.key, self.points = key, points


class Restart(Exception):
    """A value must be summed where it is computed, or an operation can be cut by demand."""


def origins(*cuts: Cut | None) -> frozenset[Key]:
    return frozenset[Key]().union(*(cut.origins for cut in cuts if cut is not None))
