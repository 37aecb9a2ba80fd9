"""A run's events in few bytes: numbers of steps and ranks in columns, everything rare as small tables. `followed_run` feeds it, the views read it.

After a failure steps are repeated. Of two records of one step the later one counts, and `restored` undoes what is after its step; undone steps
are kept apart, because a picture of the run shows them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from operator import itemgetter

import numpy as np

from phalanx.events.records import ClockAligned
from phalanx.spec.json_value import Json, JsonObject
from phalanx.watch.columns import Columns
from phalanx.watch.executed_step import clock_of
from phalanx.watch.expert_digest import ExpertDigest
from phalanx.watch.rank_digest import RankDigest
from phalanx.watch.record_values import Record, count, entries, known, number, numbers_of, parse, table, text, whole

STEP_COLUMNS = (
    "time", "loss", "tokens", "samples", "learning_rate", "grad_norm", "seconds", "tokens_per_second", "flops_per_second", "mfu", "memory",
    "expert_load", "preferred", "reward",
)  # fmt: skip
"""Fields of a `step` record with a column each, after `step` itself."""
ENDINGS = {"finished": "finished", "stopped": "stopped", "worker_failed": "failed"}
"""Records that end a launch, and the state of the run then."""
CAUSES = ("died", "hung", "failed", "node lost", "connection lost", "corrupt", "other")
"""Causes of failures that are counted, each by itself."""
_GENERATIONS = ("run_started", "failure_noticed")
"""Records after which ranks report anew."""
_STEP = b'{"event": "step", '
_STEP_VALUES = itemgetter(*STEP_COLUMNS)
MAX_ROWS = 5000
"""Newest records of one rare kind that are kept."""
_MAX_UNDONE = 100_000
_MAX_SAMPLES = 500
_STACK = 20_000
"""Characters of a traceback that are kept."""


class Digest:
    """What is known of a run."""

    def __init__(self) -> None:
        self.version = 0
        """Changes with every record."""
        self.broken = 0
        """Lines that are no record."""
        self.kinds: Counter[str] = Counter()
        self.steps = Columns({"step": "i8"} | dict.fromkeys(STEP_COLUMNS, "f8"))
        """The steps that count, in increasing order."""
        self.undone = Columns({"step": "i8", "loss": "f8", "cut": "i4"})
        self.progress = Columns({"time": "f8", "step": "i8"})
        """Every record of a step, in the order of the file."""
        self.ranks = RankDigest()
        self.experts = ExpertDigest()
        self.launches: deque[JsonObject] = deque(maxlen=MAX_ROWS)
        self.cuts: deque[JsonObject] = deque(maxlen=MAX_ROWS)
        """Where steps were undone."""
        self.skipped: list[JsonObject] = []
        self.evaluations: list[JsonObject] = []
        self.failures: deque[JsonObject] = deque(maxlen=MAX_ROWS)
        self.recoveries: deque[JsonObject] = deque(maxlen=MAX_ROWS)
        self.happenings: deque[JsonObject] = deque(maxlen=MAX_ROWS)
        """Warnings, stragglers, faults and other single sentences."""
        self.saves: deque[JsonObject] = deque(maxlen=MAX_ROWS)
        """Saves, exports and uploads, and those that failed."""
        self.copies = Columns(
            {"step": "i8", "time": "f8", "bytes": "f8", "seconds": "f8", "stall": "f8", "peer": "i1", "skipped": "i8"}
        )
        self.samples: deque[JsonObject] = deque(maxlen=_MAX_SAMPLES)
        self.data: JsonObject = {}
        self.hosts: JsonObject = {}
        self.clocks: dict[int, ClockAligned] = {}
        """The newest comparison of each node's clock, of this launch."""
        self.ended: JsonObject | None = None
        """How the last launch has ended; None if it has not said so."""
        self.tokens_processed = 0.0
        """Of all steps, those that were undone included: it never falls."""
        self.causes: Counter[str] = Counter()
        """Failures by cause."""
        self.steps_lost = 0
        self.seconds_lost = 0.0
        self.first_time = self.last_time = math.nan
        self.last_step = 0
        """The last step reached."""
        self._fresh = False
        """The next step is the first of a launch: it says where the launch begins."""
        self._ranks_too = True

    @property
    def launch(self) -> JsonObject:
        """The newest launch; empty if there is none."""
        return self.launches[-1] if self.launches else {}

    @property
    def elapsed(self) -> float:
        """Seconds from the start of each launch to its last record, over all launches."""
        return sum(max(0.0, number(launch, "last") - number(launch, "time")) for launch in self.launches)

    def feed(self, lines: Iterable[bytes], *, ranks: bool = True) -> None:
        """Add lines. Without `ranks`, the records that each rank writes are left for `feed_ranks`: there are thousands, and most of a
        page needs none of them."""
        self._ranks_too = ranks
        for line in lines:
            if line.startswith(_STEP):
                if (record := parse(line)) is not None:
                    if not self._add_usual_step(record):
                        self._add(record, _step)
                    continue
            elif not line or self.ranks.is_own(line):
                if ranks and line and not self.ranks.add_line(line):
                    self.broken += 1
                continue
            elif (record := parse(line)) is not None:
                kind = text(record, "event", 40)
                if kind in self.ranks.kinds:
                    if ranks:
                        self.ranks.add(record)
                else:
                    self._add(record, _HANDLERS.get(kind, _ignore))
                continue
            self.broken += 1
        self.version += 1

    def feed_ranks(self, lines: Iterable[bytes]) -> None:
        """Add the records of ranks that `feed` has left."""
        for line in lines:
            if self.ranks.is_own(line):
                self.ranks.add_line(line)
            elif line and not line.startswith(_STEP):
                self._feed_rare(line)
        self.version += 1

    def _feed_rare(self, line: bytes) -> None:
        record = parse(line)
        if record is not None and not self.ranks.add(record) and text(record, "event", 40) in _GENERATIONS:
            self.ranks.begin_generation()

    def _add_usual_step(self, record: Record) -> bool:
        """Add the record of a step as a run writes it; False if it is not quite like that. The same as `_add`, in a third of the time."""
        try:
            step, values = record["step"], _STEP_VALUES(record)
            time = values[0]
            if type(step) is not int or type(time) is not float or not 0 <= step < 1 << 53 or not math.isfinite(time):
                return False
            if step <= self.last_step or self._fresh or not self.launches or self.first_time != self.first_time:
                return False
            self.steps.append((step, *values))  # None becomes NaN
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        self.progress.append((time, step))
        self.count_tokens(values[2])
        self.last_step, self.last_time, self.launches[-1]["last"] = step, time, time
        self.kinds["step"] += 1
        return True

    def _add(self, record: Record, handler: Callable[[Digest, Record], None]) -> None:
        time = number(record, "time")
        self.kinds[text(record, "event", 40)] += 1
        if len(self.kinds) > MAX_ROWS:
            self.kinds.clear()
        if math.isfinite(time):
            if not math.isfinite(self.first_time):
                self.first_time = time
            self.last_time = time
        handler(self, record)
        if self.launches and math.isfinite(time):
            self.launches[-1]["last"] = time

    def count_tokens(self, tokens: float) -> None:
        """Count the tokens of a step."""
        if isinstance(tokens, int | float) and 0 < tokens < math.inf:
            self.tokens_processed += tokens

    def undo(self, step: int, why: str, time: float) -> None:
        """Forget what happened from this step on."""
        steps = self.steps["step"]
        begin = int(np.searchsorted(steps, step, "left"))
        if begin < len(steps):
            number_of_cut = count(self.cuts[-1], "number") + 1 if self.cuts else 1
            for row in self.steps.rows(begin):
                self.undone.append((int(row["step"]), float(row["loss"]), number_of_cut))
            cut: JsonObject = {"number": number_of_cut, "from": int(steps[-1]), "to": step - 1, "time": known(time), "why": why}
            self.cuts.append(cut)
            self.steps.cut(begin)
            if len(self.undone) > _MAX_UNDONE:
                self.undone.drop_first(_MAX_UNDONE // 2)
        for rows in (self.skipped, self.evaluations):
            while rows and count(rows[-1], "step") >= step:
                rows.pop()
        self.experts.cut(step)
        skipped = count(self.skipped[-1], "step") if self.skipped else 0
        self.last_step = max(int(steps[begin - 1]) if begin else 0, skipped)

    def begin_step(self, step: int, time: float) -> None:
        """A record of this step follows. A launch or a recovery without a checkpoint writes no `restored` record: its first step says where
        it begins."""
        if self._fresh or step <= self.last_step:
            self.undo(step, "launch" if self._fresh else "repeated", time)
            if self._fresh and self.launches:
                self.launches[-1]["first_step"] = step
            self._fresh = False
        self.progress.append((time, step))
        self.last_step = step

    def begin_launch(self) -> None:
        self._fresh, self.ended = True, None
        self.clocks.clear()
        self.begin_generation()

    def begin_generation(self) -> None:
        """The records of ranks from here on are of other processes than those before."""
        if self._ranks_too:
            self.ranks.begin_generation()

    def note(self, record: Record, words: str, *, severe: bool = False) -> None:
        """Keep a sentence about a rank or a step."""
        where: JsonObject = {"step": whole(record, "step"), "rank": whole(record, "rank"), "node": whole(record, "node")}
        self.happenings.append(
            {"kind": text(record, "event", 40), "time": _time(record), "severe": severe, "text": words} | where
        )


def _step(digest: Digest, record: Record) -> None:
    step = whole(record, "step")
    if step is None:
        digest.broken += 1
        return
    digest.begin_step(step, number(record, "time"))
    digest.count_tokens(number(record, "tokens"))
    digest.steps.append((step, *(number(record, name) for name in STEP_COLUMNS)))


def _step_skipped(digest: Digest, record: Record) -> None:
    step = whole(record, "step")
    if step is None:
        digest.broken += 1
        return
    digest.begin_step(step, number(record, "time"))
    values: JsonObject = {name: known(number(record, name)) for name in ("loss", "grad_norm")}
    reason = text(record, "reason", 80) or "not finite"
    digest.skipped.append(
        values | {"step": step, "time": _time(record), "in_a_row": count(record, "in_a_row"), "reason": reason}
    )
    del digest.skipped[: -2 * MAX_ROWS]


def _run_started(digest: Digest, record: Record) -> None:
    digest.begin_launch()
    names = ("ranks", "steps", "parameters", "micro_batch", "accumulation", "adapters")
    launch: JsonObject = {name: whole(record, name) for name in names}
    launch |= {name: text(record, name, 80) for name in ("version", "device", "compute")}
    launch |= {"time": known(number(record, "time")), "last": known(number(record, "time")), "step": digest.last_step}
    launch |= {
        "layout": _plain(table(record, "layout")),
        "program": [str(word)[:200] for word in entries(record, "program", 50)],
    }
    promise = record.get("promise")
    digest.launches.append(launch | {"promise": _promise(promise) if isinstance(promise, dict) else None})


def _promise(record: Record) -> JsonObject:
    names = ("seconds", "low", "high", "tokens_per_second", "total_memory", "mfu", "days", "price")
    values: JsonObject = {name: known(number(record, name)) for name in names}
    return values | {"memory": numbers_of(record, "memory"), "split": numbers_of(record, "split")}


def _restored(digest: Digest, record: Record) -> None:
    step = whole(record, "step")
    if step is not None:
        digest.undo(step + 1, "restored", number(record, "time"))
        where = text(record, "path").rpartition("/")[2]
        digest.note(record, f"restored step {step} from {where or text(record, 'path')} in {number(record, 'seconds'):.1f} s")


def _evaluated(digest: Digest, record: Record) -> None:
    sources = table(record, "sources")
    by_source: JsonObject = {str(name)[:120]: numbers_of(sources, name) for name in list(sources)[:64]}
    values: JsonObject = {name: known(number(record, name)) for name in ("loss", "perplexity", "tokens", "seconds")}
    digest.evaluations.append(values | {"step": count(record, "step"), "time": _time(record), "sources": by_source})
    del digest.evaluations[: -4 * MAX_ROWS]


def _expert_loads(digest: Digest, record: Record) -> None:
    if not digest.experts.add(record):
        digest.broken += 1


def _sampled(digest: Digest, record: Record) -> None:
    words: JsonObject = {"prompt": text(record, "prompt", 2000), "text": text(record, "text", 8000)}
    numbers: JsonObject = {
        "step": count(record, "step"),
        "tokens": count(record, "tokens"),
        "seconds": known(number(record, "seconds")),
    }
    digest.samples.append(words | numbers | {"time": _time(record)})


def _save(digest: Digest, record: Record) -> None:
    names = ("bytes", "seconds", "stall", "write_seconds", "bytes_per_second", "difference")
    values: JsonObject = {name: known(number(record, name)) for name in names if name in record}
    words: JsonObject = {name: text(record, name, 1000) for name in ("path", "url", "reason") if name in record}
    digest.saves.append(
        values | words | {"kind": text(record, "event", 40), "step": whole(record, "step"), "time": _time(record)}
    )


def _copied(digest: Digest, record: Record) -> None:
    skipped = record.get("skipped", record.get("passed_over"))
    row = (count(record, "step"), *(number(record, name) for name in ("time", "bytes", "seconds", "stall")))
    digest.copies.append(
        (*row, record.get("peer") is True, skipped if isinstance(skipped, int) and 0 <= skipped < 1 << 53 else 0)
    )


def _failure_noticed(digest: Digest, record: Record) -> None:
    digest.begin_generation()
    where: JsonObject = {name: whole(record, name) for name in ("number", "rank", "node", "step")}
    words: JsonObject = {"cause": text(record, "cause", 80), "message": text(record, "message", 2000)}
    digest.causes[str(words["cause"]) if words["cause"] in CAUSES else "other"] += 1
    stack: JsonObject = {"traceback": text(record, "traceback", _STACK), "time": _time(record), "launch": len(digest.launches)}
    digest.failures.append({"id": digest.kinds["failure_noticed"]} | where | words | stack | {"recovery": None})


def _recovered(digest: Digest, record: Record) -> None:
    names = ("noticed", "decided", "restarted", "first_step", "seconds")
    values: JsonObject = {name: known(number(record, name)) for name in names}
    counts: JsonObject = {name: whole(record, name) for name in ("generation", "ranks", "step", "steps_lost")}
    words: JsonObject = {name: text(record, name, 80) for name in ("action", "source")}
    ends = len(digest.recoveries) + 1
    recovery = values | counts | words | {"time": _time(record), "layout": _plain(table(record, "layout")), "number": ends}
    numbers = entries(record, "failures", 1000)
    for failure in reversed(digest.failures):
        if failure["launch"] != len(digest.launches):
            break
        if failure["number"] in numbers:
            failure["recovery"] = recovery
    digest.recoveries.append(recovery | {"failures": len(numbers)})
    if numbers:
        digest.steps_lost += count(record, "steps_lost")
        digest.seconds_lost += known(number(record, "seconds")) or 0.0
    if digest.launches and counts["ranks"]:
        digest.launches[-1] |= {"ranks": counts["ranks"], "layout": recovery["layout"] or digest.launches[-1]["layout"]}


def _ended(digest: Digest, record: Record) -> None:
    kind = text(record, "event", 40)
    reason: JsonObject = {"reason": text(record, "reason", 2000), "traceback": text(record, "traceback", _STACK)}
    digest.ended = reason | {
        "state": ENDINGS[kind],
        "step": whole(record, "step"),
        "rank": whole(record, "rank"),
        "time": _time(record),
    }


def _data_opened(digest: Digest, record: Record) -> None:
    digest.data = {name: count(record, name) for name in ("documents", "tokens", "run_tokens", "parameters")}


def _hosts_checked(digest: Digest, record: Record) -> None:
    names = table(record, "hosts")
    digest.hosts = {
        "hosts": {str(node)[:20]: text(names, node, 200) for node in list(names)[:MAX_ROWS]},
        "links": dict[str, Json](numbers_of(record, "links", MAX_ROWS)),
        "flops": dict[str, Json](numbers_of(record, "flops", MAX_ROWS)),
    }


def _sentence(digest: Digest, record: Record) -> None:
    severe = text(record, "event", 40) in ("corrupted", "not_finite", "host_rejected")
    digest.note(record, text(record, "message", 2000), severe=severe)


def _rewound(digest: Digest, record: Record) -> None:
    to_step = record.get("to_step", record.get("to"))
    digest.note(record, f"rolled back from step {count(record, 'step')} to step {to_step if isinstance(to_step, int) else '?'}")


def _fault(digest: Digest, record: Record) -> None:
    digest.note(record, f"chaos: {text(record, 'fault')}")


def _changed(digest: Digest, record: Record) -> None:
    for key, change in list(table(record, "changes").items())[:50]:
        old, new = change if isinstance(change, list) and len(change) == 2 else ("?", "?")
        digest.note(record, f"settings changed: {key[:80]}: {str(old)[:80]} → {str(new)[:80]}")


def _clock_aligned(digest: Digest, record: Record) -> None:
    if (clock := clock_of(record)) is not None and len(digest.clocks) < MAX_ROWS:
        digest.clocks[clock.node] = clock


def _controller(digest: Digest, record: Record) -> None:
    digest.note(record, f"node {count(record, 'node')} is now the controller")


def _refused(digest: Digest, record: Record) -> None:
    digest.note(
        record,
        f"node {count(record, 'node')} refused a connection from {text(record, 'address', 80)}: {text(record, 'reason')}",
    )


def _request_started(digest: Digest, record: Record) -> None:
    first, steps, ranks = count(record, "step"), count(record, "steps"), len(entries(record, "ranks", 1 << 20))
    digest.note(record, f"asked for a {text(record, 'what', 40)} of steps {first} to {first + steps - 1} on {ranks} ranks")


def _request_failed(digest: Digest, record: Record) -> None:
    digest.note(record, f"request for a {text(record, 'what', 40)} not carried out: {text(record, 'reason')}")


def _ignore(digest: Digest, record: Record) -> None:
    """A kind that no picture shows, or that this version does not know."""


def _time(record: Record) -> float | None:
    return known(number(record, "time"))


def _plain(values: Record) -> JsonObject:
    """The short values of a table."""
    return {
        key[:80]: value if not isinstance(value, str) else value[:200]
        for key, value in values.items()
        if not isinstance(value, dict | list)
    }


_HANDLERS: dict[str, Callable[[Digest, Record], None]] = {
    "step": _step, "step_skipped": _step_skipped, "run_started": _run_started, "restored": _restored, "evaluated": _evaluated,
    "sampled": _sampled, "expert_loads": _expert_loads, "copied": _copied, "failure_noticed": _failure_noticed, "recovered": _recovered, "data_opened": _data_opened,
    "hosts_checked": _hosts_checked, "rewound": _rewound, "fault_injected": _fault, "settings_changed": _changed,
    "clock_aligned": _clock_aligned, "controller_changed": _controller, "stranger_refused": _refused,
    "request_started": _request_started, "request_failed": _request_failed,
    **dict.fromkeys(("saved", "save_failed", "exported", "export_failed", "uploaded", "upload_failed", "checkpoint_damaged"), _save),
    **dict.fromkeys(("warned", "straggling", "corrupted", "not_finite", "host_rejected"), _sentence),
    **dict.fromkeys(ENDINGS, _ended),
}  # fmt: skip
