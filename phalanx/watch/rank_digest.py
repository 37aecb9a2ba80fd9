"""What the ranks of a run have reported of themselves, in columns: where each runs, and the time, memory and messages of its measured steps."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from phalanx.spec.json_value import JsonObject
from phalanx.watch.columns import Columns
from phalanx.watch.record_values import Record, count, number, parse, table, text, total, whole

PARTS = ("compute", "tensor", "context", "expert", "data", "bubble", "optimizer", "loading", "other")
"""Parts of a measured step, as `step_timed` names them."""
WAITS = ("tensor", "context", "expert", "data", "bubble")
"""Those of them in which a rank waits for others."""
MEMORY = ("parameters", "gradients", "optimizer", "activations")
_NO_PARTS = [0.0] * len(PARTS)
MAX_RANKS = 1 << 20
_MAX_NAMES = 100_000
_MAX_PLACED = 8192
_MAX_APPLIED = 20_000
_PLACED = b'{"event": "model_placed", '
_RANK = re.compile(rb'"rank": (\d{1,7}),')


class RankDigest:
    """Records of single ranks, in the order of the file."""

    def __init__(self) -> None:
        self.generation = 0
        """Counts launches and failures: the records between two of them belong together."""
        self.started = Columns({"rank": "i4", "time": "f8", "host": "i4", "device": "i4", "pid": "i8", "generation": "i4"})
        self.timed = Columns(
            {"rank": "i4", "time": "f8", "step": "i8", "seconds": "f4", "generation": "i4"} | dict.fromkeys(PARTS, "f4")
        )
        self.accounted = Columns(
            {"rank": "i4", "time": "f8", "step": "i8", "generation": "i4", "sent": "f8", "flops": "f8", "repeated": "f8"}
            | dict.fromkeys(MEMORY, "f8")
        )
        self._placed: dict[int, bytes] = {}
        """The newest `model_placed` of each rank, as it was read: only that of a rank that somebody looks at is parsed."""
        self.names: list[str] = []
        """Hosts and devices, which the columns hold by index."""
        self._index: dict[str, int] = {}
        self.kinds: dict[str, Callable[[int, Record], None]] = {
            "worker_started": self._started,
            "model_placed": self._add_placed,
            "step_timed": self._timed,
            "step_accounted": self._accounted,
        }
        self._prefixes = tuple(f'{{"event": "{kind}", '.encode() for kind in self.kinds)

    def begin_generation(self) -> None:
        self.generation += 1

    def is_own(self, line: bytes) -> bool:
        """Whether a line is a record of a rank, without parsing it."""
        return line.startswith(self._prefixes)

    def add_line(self, line: bytes) -> bool:
        """Add a record of a rank; False if the line is broken."""
        if line.startswith(_PLACED) and (match := _RANK.search(line)) is not None:
            self._keep_placed(int(match[1]), line)
            return True
        record = parse(line)
        return record is not None and self.add(record)

    def add(self, record: Record) -> bool:
        """Add a record; False if it is none of a rank."""
        add, rank = self.kinds.get(text(record, "event", 40)), whole(record, "rank")
        if add is None or rank is None or rank >= MAX_RANKS:
            return False
        add(rank, record)
        return True

    @property
    def count(self) -> int:
        """Ranks that have reported anything, counted from 0."""
        return max(
            (int(columns["rank"].max()) + 1 for columns in (self.started, self.timed, self.accounted) if len(columns)),
            default=0,
        )

    @property
    def memory(self) -> int:
        return 500 * len(self._placed) + self.started.memory + self.timed.memory + self.accounted.memory

    def _name(self, name: str) -> int:
        index = self._index.get(name)
        if index is None:
            if len(self.names) >= _MAX_NAMES:
                return 0
            index = self._index[name] = len(self.names)
            self.names.append(name)
        return index

    def _started(self, rank: int, record: Record) -> None:
        host, device = self._name(text(record, "host", 200)), self._name(text(record, "device", 80))
        self.started.append((rank, number(record, "time"), host, device, count(record, "pid"), self.generation))

    def _add_placed(self, rank: int, record: Record) -> None:
        self._keep_placed(rank, json.dumps(record).encode())

    def _keep_placed(self, rank: int, line: bytes) -> None:
        if len(line) <= _MAX_PLACED and (len(self._placed) < _MAX_APPLIED or rank in self._placed):
            self._placed[rank] = line

    def placed(self, rank: int) -> JsonObject | None:
        """Techniques that were applied to the rank's part of the model, and its bytes; None if it has not said so."""
        record = parse(self._placed.get(rank, b""))
        if record is None:
            return None
        applied = table(record, "applied")
        techniques: JsonObject = {name[:80]: text(applied, name, 300) for name in list(applied)[:20]}
        return {"applied": techniques} | {name: count(record, name) for name in (*MEMORY[:3], "files")}

    def _timed(self, rank: int, record: Record) -> None:
        parts = table(record, "parts")
        spent = [0.0 if math.isnan(value := number(parts, name)) else value for name in PARTS] if parts else _NO_PARTS
        row = (rank, number(record, "time"), count(record, "step"), number(record, "seconds"), self.generation)
        self.timed.append((*row, *spent))

    def _accounted(self, rank: int, record: Record) -> None:
        memory, flops = table(record, "memory"), table(record, "flops")
        row = (rank, number(record, "time"), count(record, "step"), self.generation, total(table(record, "sent")))
        work = (number(flops, "all"), number(flops, "repeated"))
        self.accounted.append((*row, *work, *(number(memory, name) for name in MEMORY)))
