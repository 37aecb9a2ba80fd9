"""A hand-written table of names of dimensions (AXES), checked against the graph of the module: what it names must be cut so. Used by `infer_cuts`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from phalanx.spec.errors import RunError, refuse
from phalanx.tracing.cut_search import Found, Search
from phalanx.tracing.cut_values import Key, has_parts

CUT = ("heads", "kv_heads", "ffn", "vocab")
"""Names of dimensions that the ranks divide."""
Table = Mapping[str, tuple[Any, ...]]


def named(name: str, table: Table) -> tuple[Any, ...]:
    """The names of a parameter's dimensions; the first pattern that matches counts."""
    return next((dims for pattern, dims in table.items() if fnmatchcase(name, pattern)), ())


def roles(dim: Any) -> tuple[tuple[str, int | None], ...]:
    """(role, size) of each segment of a dimension; one without a size for a plain name."""
    return ((dim, None),) if isinstance(dim, str) else tuple((str(role), int(size)) for role, size in dim)


def restrict(search: Search, table: Table) -> None:
    """Keeps whole what the table names otherwise, and refuses names that do not fit what the graph shows."""
    search.settle(())  # learns which dimensions are fused
    problems = []
    for name, op in search.graph.parameters.items():
        dims = named(name, table)
        if len(dims) != len(op.size):
            problems.append(f"AXES gives {name} {len(dims)} names, but it has {len(op.size)} dimensions: name each of them.")
            continue
        for dim, given in enumerate(dims):
            if not any(role in CUT for role, _ in roles(given)):
                search.refused[name, dim] = f"AXES names the dimension {given!r}"
            elif sentence := _fused(search, (name, dim), given):
                problems.append(sentence)
    refuse(problems)


def _fused(search: Search, key: Key, given: Any) -> str | None:
    name, dim = key
    size = search.graph.parameters[name].size[dim]
    shown = search.segments.get(key, (size,))
    wanted = tuple(size if own is None else own for _, own in roles(given))
    if wanted == shown:
        return None
    what = f"segments of {', '.join(map(str, shown))}" if len(shown) > 1 else f"one run of {size}"
    said = f"segments of {', '.join(map(str, wanted))}" if len(wanted) > 1 else f"one run of {wanted[0]}"
    pairs = ", ".join(f'("{roles(given)[0][0]}", {each})' for each in shown)
    return (
        f"AXES names dimension {dim} of {name} {_word(given)}, {said}, but its graph reads it as {what}: cut as named, ranks would compute "
        f"something else. Name it ({pairs}{',' if len(shown) == 1 else ''}), each segment with its own role, or give it another name to keep it whole."
    )


def agreed(search: Search, table: Table) -> Found:
    """What the table names, cut; heads of keys and values and the vocabulary stay whole where ranks cannot share them."""
    found = search.settle(())
    problems = []
    for name in search.graph.parameters:
        cut = found.walk.known.get(name)
        for dim, given in enumerate(named(name, table)):
            first = roles(given)[0][0]
            if first not in CUT or (cut is not None and cut.dim == dim):
                continue
            why = found.reasons.get((name, dim))
            size = search.graph.parameters[name].size[dim]
            if first in ("kv_heads", "vocab") or (name, dim) in search.refused:
                continue
            too_few = not has_parts((size,), search.ranks)
            why = why or (
                f"{size} would leave one of {search.ranks} ranks without any" if too_few else "nothing reads it divided"
            )
            problems.append(
                f"AXES names dimension {dim} of {name} {_word(given)}, which layout.tensor = {search.ranks} would cut, but the graph "
                f"does not allow it: {why}. Give it another name to keep it whole."
            )
    if problems:
        raise RunError(problems)
    return found


def _word(given: Any) -> str:
    return f'"{given}"' if isinstance(given, str) else str(given)
