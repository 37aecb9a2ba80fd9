"""How tensor parallelism divides a module that was not written for it: `tracing` infers it from the module's graph, `parallel/tensor` applies it.
Plain values. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

Dim = str | tuple[tuple[str, int], ...]
"""What a dimension of a parameter is: a name, or the (name, size) of each segment of a fused one: [q|k|v] is
(("heads", 48), ("kv_heads", 24), ("kv_heads", 24))."""
Axes = Mapping[str, tuple[Dim, ...]]
"""Parameter-name pattern to the names of its dimensions; the first that matches counts."""


UNEVEN = "cannot be divided evenly"
"""In the reason why something stays whole (`CutPlan.whole`), where another number of ranks could divide it."""


def dim_names(name: str, axes: Axes) -> tuple[Dim, ...]:
    return next((dims for pattern, dims in axes.items() if fnmatchcase(name, pattern)), ())


def roles(dim: Dim) -> tuple[str, ...]:
    """The names of a dimension's segments; one if it is not fused."""
    return (dim,) if isinstance(dim, str) else tuple(role for role, _ in dim)


def segments(dim: Dim) -> tuple[int, ...] | None:
    """The sizes of the segments of a fused dimension; None if it is not fused."""
    return None if isinstance(dim, str) else tuple(size for _, size in dim)


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of a parameter's dimension that the ranks divide among themselves: evenly, but for the last rank, whose part may be smaller."""

    role: str
    """What its elements are: "heads", "kv_heads", "ffn", "vocab", or "inner" for anything else."""
    size: int


@dataclass(frozen=True, slots=True)
class ParamCut:
    """How the ranks of a tensor group divide one parameter."""

    dim: int
    segments: tuple[Segment, ...]
    """They cover the dimension. Of a fused matrix there are several ([q|k|v], [gate|up]): a rank has a part of each."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(segment.size for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Enter:
    """Before a module: an argument that is the same on all ranks and from which each computes a part. Its gradient is summed over the ranks."""

    module: str
    argument: int | str
    """Its position among the arguments of the call, or its name."""


@dataclass(frozen=True, slots=True)
class Leave:
    """After a module: its result on each rank is a part of a sum over the ranks. A bias of the module is added once, after the sum."""

    module: str


@dataclass(frozen=True, slots=True)
class DividedAttribute:
    """An integer that the module's own Python reads, such as its number of heads, and what it is on a rank."""

    module: str
    attribute: str
    """Dotted, relative to the module: "num_heads", "config.num_attention_heads"."""
    value: int
    last: int | None = None
    """On the last rank, if its part is smaller."""

    def on(self, index: int, ranks: int) -> int:
        return self.value if self.last is None or index < ranks - 1 else self.last


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor that a module is called with: its position among the arguments of the call, or its name."""

    module: str
    argument: int | str


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a module returns: its place in the tuple; None: it is returned alone."""

    module: str
    index: int | None


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Sequence parallelism of a divided module: outside of regions each rank has its own part of the positions, in dimension 1 of activations.
    Inside of regions, and before the first layer, every rank has all positions."""

    shared: tuple[Argument, ...]
    """Arguments that every rank has whole, and of which it goes on with its own positions."""
    gathered: tuple[Argument, ...]
    """Arguments that are entered: their positions come from all ranks, and gradients are summed on the way back."""
    joined: tuple[Argument, ...]
    """Arguments whose positions come from all ranks, into modules that every rank computes whole."""
    scattered: tuple[str, ...]
    """Modules whose result is a part of a sum (`Leave`), of which each rank gets its own positions."""
    returned: tuple[Result, ...]
    """Results that every rank has whole, and of which it goes on with its own positions."""


@dataclass(frozen=True, slots=True)
class CutPlan:
    """Tensor parallelism of one module on `ranks` ranks. Names are those of parameters and submodules of the whole model."""

    ranks: int
    params: Mapping[str, ParamCut]
    """Parameters that are divided; every rank has the others whole."""
    partial: frozenset[str] = frozenset()
    """Whole parameters of whose gradient each rank computes a part."""
    enters: tuple[Enter, ...] = ()
    leaves: tuple[Leave, ...] = ()
    divided: tuple[DividedAttribute, ...] = ()
    selects: tuple[str, ...] = ()
    """Attention modules with fewer key/value heads than ranks: each rank computes all of these and attends to those that its queries read."""
    shares: tuple[str, ...] = ()
    """Modules that add a bias to a part of a sum: each rank adds its share of it."""
    rewritten: tuple[str, ...] = ()
    """Modules whose own Python does not compute the right thing on a part: their rewritten graph runs instead."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Why a parameter stays whole, in words, where a matrix of its size could have been divided."""
    sums: Mapping[str, int] = field(default_factory=dict)
    """Sums over the ranks in a forward, by layer ("" is outside of layers)."""
    uncompared: int = 0
    """Choices that the search did not compare, because there were too many: another plan may communicate less."""
    sequence: SequencePlan | None = None
    """With sequence parallelism. `partial` then has the parameters that are used outside of regions too."""
