"""The loads of experts of a run, layer by layer, as `expert_loads` records tell them, and the pictures of them. `run_digest` fills it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.spec.json_value import Json, JsonObject
from phalanx.watch.columns import Array, Columns, between, bucket_starts
from phalanx.watch.record_values import Record, shortened, table, whole

MAX_LAYERS, MAX_EXPERTS = 1000, 100_000
"""Of one record; it is not read beyond them."""
_MEMORY = 32 << 20
"""Bytes of loads that are kept. Where there are more, two neighbors become one, over the whole run."""
_COLUMNS = 240
"""Of a picture."""


class ExpertDigest:
    """Tokens of every expert, one row for each record, in increasing order of steps."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.sizes: list[int] = []
        """Experts of each layer."""
        self._columns = Columns({})
        self._starts = np.zeros(0, np.int64)
        self._row_bytes = 0

    def __len__(self) -> int:
        return len(self._columns) if self.layers else 0

    @property
    def memory(self) -> int:
        return self._columns.memory

    def add(self, record: Record) -> bool:
        """Add a record; False if it is none."""
        step, rows = whole(record, "step"), _rows(table(record, "tokens"))
        if step is None or not rows:
            return False
        if [*rows] != self.layers or [len(row) for row in rows.values()] != self.sizes:
            self._begin(rows)  # another model
        self.cut(step)
        loads = np.concatenate(list(rows.values()))
        self._columns.append((step, whole(record, "steps") or 1, self._fullest(loads[None])[0], loads))
        if len(self._columns) * self._row_bytes > _MEMORY:
            self._merge()
        return True

    def cut(self, step: int) -> None:
        """Forget the loads from this step on."""
        if self.layers:
            self._columns.cut(int(np.searchsorted(self._columns["step"], step, "left")))

    def _begin(self, rows: dict[str, Array]) -> None:
        self.layers, self.sizes = [*rows], [len(row) for row in rows.values()]
        self._starts = np.cumsum([0, *self.sizes[:-1]])
        total, layers = sum(self.sizes), len(self.layers)
        self._columns = Columns({"step": "i8", "steps": "i8", "fullest": f"({layers},)f4", "tokens": f"({total},)f4"}, first=4)
        self._row_bytes = 16 + 4 * (total + layers)

    def _fullest(self, loads: Array) -> Array:
        """Load of the fullest expert of each layer over the mean, of rows of loads."""
        sizes = np.asarray(self.sizes)
        mean = np.add.reduceat(loads, self._starts, axis=1, dtype=np.float64) / sizes
        with np.errstate(invalid="ignore", divide="ignore"):
            fullest: Array = np.maximum.reduceat(loads, self._starts, axis=1) / mean
        return fullest

    def _merge(self) -> None:
        """Make one row of every two, which takes the greater load of the fullest expert."""
        old = self._columns.rows(0).copy()
        pairs = len(old) // 2
        first, second = old[: 2 * pairs : 2], old[1 : 2 * pairs : 2]
        second["steps"] += first["steps"]
        second["tokens"] += first["tokens"]
        second["fullest"] = np.fmax(first["fullest"], second["fullest"])
        self._columns.cut(0)
        for row in (*second, *old[2 * pairs :]):
            self._columns.append(tuple(row))

    def _buckets(self, low: float | None, high: float | None) -> tuple[slice, Array, list[Json]]:
        """Rows of a window, where each column of a picture begins in them, and the steps at the edges of the columns."""
        chosen = between(self._columns["step"], low, high)
        steps, counted = self._columns["step"][chosen], self._columns["steps"][chosen]
        starts = bucket_starts(len(steps), _COLUMNS)
        ends = np.append(starts[1:], len(steps)) - 1
        edges: list[Json] = [max(0, int(steps[0] - counted[0])), *(int(step) for step in steps[ends])]
        return chosen, starts, edges

    def heat(self, low: float | None, high: float | None) -> JsonObject:
        """Of every layer: the load of its fullest expert over time, the greatest of each column, and its last record."""
        if not len(self):
            return {"names": [], "edges": [], "load": [], "last": [], "step": None}
        chosen, starts, edges = self._buckets(low, high)
        load = np.fmax.reduceat(self._columns["fullest"][chosen], starts, axis=0)
        newest = self._columns.rows(len(self._columns) - 1)[0]
        names: list[Json] = list(self.layers)
        return {
            "names": names,
            "edges": edges,
            "load": [_rounded(row) for row in load.T],
            "last": [self._last(newest["tokens"], layer) for layer in range(len(self.layers))],
            "step": int(newest["step"]),
            "steps": int(newest["steps"]),
        }

    def _last(self, tokens: Array, layer: int) -> JsonObject:
        loads = tokens[self._of(layer)]
        mean = float(loads.mean(dtype=np.float64)) or 1.0
        return {
            "fullest": int(loads.argmax()), "most": round(float(loads.max()) / mean, 3), "emptiest": int(loads.argmin()),
            "least": round(float(loads.min()) / mean, 3), "unused": int((loads == 0).sum()), "experts": len(loads),
        }  # fmt: skip

    def layer(self, layer: int, low: float | None, high: float | None) -> JsonObject:
        """Of every expert of a layer: its load over the mean, over time."""
        if not len(self) or layer >= len(self.layers):
            return {"name": "", "edges": [], "load": []}
        chosen, starts, edges = self._buckets(low, high)
        loads = np.add.reduceat(self._columns["tokens"][chosen, self._of(layer)], starts, axis=0, dtype=np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            load = loads / loads.mean(axis=1, keepdims=True)
        return {"name": self.layers[layer], "edges": edges, "load": [_rounded(row) for row in load.T]}

    def _of(self, layer: int) -> slice:
        begin = int(self._starts[layer])
        return slice(begin, begin + self.sizes[layer])


def _rows(tokens: Record) -> dict[str, Array]:
    """Loads of each layer; empty if they are not what a run writes."""
    rows: dict[str, Array] = {}
    total = 0
    for name, row in list(tokens.items())[:MAX_LAYERS]:
        total += len(row) if isinstance(row, list) else 0
        if not isinstance(row, list) or not row or total > MAX_EXPERTS or not _are_counts(row):
            return {}
        rows[shortened(name, 80)] = np.asarray(row, np.float32)
    return rows


def _are_counts(row: Sequence[Json]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 53 for value in row)


def _rounded(values: Array) -> list[Json]:
    return [None if value != value else value for value in np.round(values.astype(np.float64), 3).tolist()]
