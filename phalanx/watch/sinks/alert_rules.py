"""Which records of a run are worth a message to people, and what the message says. Sees records, the clock and free disk space; sends nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from phalanx.events.records import (
    Event,
    ExportFailed,
    FailureNoticed,
    Finished,
    NotFinite,
    Recovered,
    Rewound,
    RunStarted,
    Saved,
    SaveFailed,
    Step,
    StepSkipped,
    Stopped,
    Straggling,
    UploadFailed,
    WorkerFailed,
)
from phalanx.spec.alerts import AlertKind, Alerts

ENDS: tuple[AlertKind, ...] = ("finished", "stopped", "failed")
"""Alerts that are always sent: there is one for each launch."""
_RECENT, _HISTORY = 10, 100
"""Steps whose median is compared, and steps whose medians it is compared with."""
_WARM_UP = 3
"""First steps of a launch, whose speed says nothing."""
_SPREADS = 5.0
"""A loss has risen if it differs by this many median deviations, too."""
_LEAST_STALL = 60.0
"""Seconds without a step that may be a long evaluation or save."""
_DISK_SECONDS = 30.0
_KEPT_SAVES = 4
_GIB = 2**30
_SENTENCE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A message to people."""

    kind: AlertKind
    sentence: str
    """What happened."""
    remedy: str
    """What to do."""
    time: float
    step: int | None = None
    more: int = 0
    """Others of the kind since the last message, which were not sent."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system that the run writes to."""

    name: str
    """What is there, such as "the run directory runs/a"."""
    free: Callable[[], int | None]
    """Bytes; None: unknown."""


class Rules:
    """Turns records into alerts of the kinds that are wanted, with the limits of [watch.alerts]."""

    def __init__(self, alerts: Alerts, disks: tuple[Disk, ...] = ()):
        self._alerts = alerts
        self._disks = {disk.name: _DiskRule(disk, alerts) for disk in disks}
        self._sent: dict[AlertKind, float] = {}
        self._more: dict[AlertKind, int] = {}
        self._begin_launch(None)

    def _begin_launch(self, promised: float | None) -> None:
        self._step: int | None = None
        self._planned = 0
        self.ended = False
        """The launch has said how it ended."""
        self._loss, self._speed, self._stall = (
            _LossRule(self._alerts),
            _SpeedRule(self._alerts, promised),
            _StallRule(self._alerts),
        )

    def on_event(self, event: Event) -> list[Alert]:
        """Alerts about a record."""
        if isinstance(event, RunStarted):
            self._begin_launch(None if event.promise is None else event.promise.tokens_per_second)
            self._planned = event.steps
        self.ended = isinstance(event, Finished | Stopped | WorkerFailed) or (self.ended and not isinstance(event, RunStarted))
        self._step = getattr(event, "step", None) or self._step
        self._stall.on_event(event)
        found = list(self._judge(event))
        return self._limit(found, event.time)

    def on_time(self, now: float) -> list[Alert]:
        """Alerts about what has not happened, and about the disk. All records are read."""
        if self.ended:
            return []
        found = list(self._stall.judge(now))
        for rule in self._disks.values():
            found += rule.judge(now)
        return self._limit(found, now)

    def on_close(self, now: float) -> list[Alert]:
        """The launcher has ended: alerts about a launch that has not said how it ended."""
        if self.ended:
            return []
        sentence = f"The run has ended without saying how, {self._position()}: it was killed, or its launcher was."
        return self._limit(
            [_Found("failed", sentence, "Look at logs/ in the run directory; the same command resumes the run.")], now
        )

    def _position(self) -> str:
        return "before its first step" if self._step is None else f"after step {self._step:,}"

    def _judge(self, event: Event) -> Iterator[_Found]:
        match event:
            case Finished():
                yield _Found("finished", f"All {event.step:,} steps are complete{self._loss.words()}.", "Nothing to do.")
            case Stopped():
                resume = "The same command resumes it." if event.saved else "It saved nothing and starts again from step 0."
                yield _Found("stopped", f"The run was stopped after step {event.step:,}: {event.reason}.", resume)
            case WorkerFailed():
                rank = "" if event.rank is None else f"Rank {event.rank} failed: "
                sentence = f"The run has failed {self._position()}: {rank}{event.reason}"
                yield _Found(
                    "failed",
                    sentence,
                    "Look at logs/ in the run directory; the same command resumes the run from its checkpoint.",
                )
            case FailureNoticed():
                where = "" if event.rank is None else f" If it repeats, look at logs/rank-{event.rank}.log and at its host."
                yield _Found("failure", f"{event.cause}: {event.message}", f"The run recovers by itself.{where}")
            case Recovered() if event.failures:
                ways = {"live": "the survivors", "memory": "copies in memory", "disk": "a checkpoint"}
                sentence = (
                    f"The run has recovered in {event.seconds:.1f} s ({event.action}): it continues from step {event.step:,} on {event.ranks} "
                    f"rank{'s' if event.ranks != 1 else ''} with the state of {ways.get(event.source, event.source)}; {event.steps_lost} steps are repeated."
                )
                yield _Found("recovered", sentence, "Nothing to do.")
            case Straggling():
                yield _Found(
                    "waits", event.message, f"Look at the host of rank {event.rank}: clocks, temperature, other programs on it."
                )
            case SaveFailed() | UploadFailed() | ExportFailed():
                yield _save_failed(event)
            case Saved():
                for rule in self._disks.values():
                    rule.on_saved(event)
            case Step() | StepSkipped() | NotFinite() | Rewound():
                yield from self._loss.judge(event)
                if isinstance(event, Step):
                    yield from self._speed.judge(event)

    def _limit(self, found: list[_Found], now: float) -> list[Alert]:
        """The alerts that are sent; the others of their kind are counted."""
        sent = []
        for each in found:
            if each.kind not in self._alerts.on:
                continue
            if each.kind not in ENDS and now - self._sent.get(each.kind, -math.inf) < self._alerts.every:
                self._more[each.kind] = self._more.get(each.kind, 0) + 1
                continue
            self._sent[each.kind] = now
            more = self._more.pop(each.kind, 0)
            sentence = each.sentence if len(each.sentence) <= _SENTENCE else f"{each.sentence[: _SENTENCE - 1]}…"
            sent.append(Alert(kind=each.kind, sentence=sentence, remedy=each.remedy, time=now, step=self._step, more=more))
        return sent


@dataclass(frozen=True, slots=True)
class _Found:
    kind: AlertKind
    sentence: str
    remedy: str


def _save_failed(event: SaveFailed | UploadFailed | ExportFailed) -> _Found:
    what = {"save_failed": "saved", "upload_failed": "uploaded", "export_failed": "exported"}[event.kind]
    sentence = f"The checkpoint of step {event.step:,} could not be {what}: {event.reason}"
    return _Found(
        "save", sentence, "The run continues; free space or restore access to the storage before the next checkpoint."
    )


class _LossRule:
    """A loss that is not finite, is skipped, or rises."""

    def __init__(self, alerts: Alerts):
        self._factor = alerts.diverged_above
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._lowest = math.inf
        self._risen = False

    def words(self) -> str:
        return f"; the loss is {self._losses[-1]:.4f}" if self._losses else ""

    def judge(self, event: Step | StepSkipped | NotFinite | Rewound) -> Iterator[_Found]:
        look = "Look at the data of these steps (`phalanx data preview`), lower the learning rate, or set resilience.rollback_after."
        match event:
            case StepSkipped() if event.in_a_row == 1:
                yield _Found("diverged", f"Step {event.step:,} was skipped: {event.reason} (loss {event.loss:g}).", look)
            case NotFinite():
                yield _Found("diverged", event.message, look)
            case Rewound():
                yield _Found(
                    "diverged", f"The run rolled back from step {event.step:,} to step {event.to_step:,} after bad steps.", look
                )
            case Step() if not math.isfinite(event.loss):
                yield _Found("diverged", f"The loss of step {event.step:,} is {event.loss}.", look)
            case Step():
                yield from self._rises(event, look)

    def _rises(self, event: Step, remedy: str) -> Iterator[_Found]:
        self._losses.append(event.loss)
        if len(self._losses) < 2 * _RECENT:
            return
        recent = median(list(self._losses)[-_RECENT:])
        before = list(self._losses)[:-_RECENT]
        middle = median(before)
        spread = median(abs(loss - middle) for loss in before)
        risen = recent > self._factor * self._lowest and recent - self._lowest > _SPREADS * spread
        if risen and not self._risen:
            sentence = f"The loss rises: {recent:.4f} in the last {_RECENT} steps, after {self._lowest:.4f} at its lowest."
            yield _Found("diverged", sentence, remedy)
        self._risen = risen
        if recent > 0:
            self._lowest = min(self._lowest, recent)


class _SpeedRule:
    """Throughput below a fraction of the median, or of the promise, for many steps."""

    def __init__(self, alerts: Alerts, promised: float | None):
        self._fraction, self._steps, self._promised = alerts.slow_below, alerts.slow_steps, promised
        self._speeds: deque[float] = deque(maxlen=10 * _HISTORY)
        self._seen = self._slow = 0
        self._usual = math.nan

    def judge(self, event: Step) -> Iterator[_Found]:
        self._seen += 1
        speed = event.tokens_per_second
        if self._seen <= _WARM_UP or not math.isfinite(speed):
            return
        if len(self._speeds) >= 2 * _RECENT and (self._usual != self._usual or self._seen % _RECENT == 0) and not self._slow:
            self._usual = median(self._speeds)
        limit, what = self._usual, "the median of this launch"
        if self._promised and not limit >= self._promised:  # also before there is a median
            limit, what = self._promised, "the plan's promise"
        if speed >= self._fraction * limit or limit != limit:
            self._slow = 0
            self._speeds.append(speed)
            return
        self._slow += 1
        if self._promised and limit == self._promised:
            self._speeds.append(speed)  # a run that never was as fast as promised has a median all the same
        if self._slow == self._steps:
            sentence = (
                f"Throughput is {speed:,.0f} tokens/s, {speed / limit:.0%} of {what} ({limit:,.0f} tokens/s), and was low for {self._steps} steps up "
                f"to step {event.step:,}."
            )
            yield _Found(
                "slow", sentence, "`phalanx watch` shows what ranks wait for; look at clocks, network and data loading."
            )


class _StallRule:
    """No step for much longer than a step takes."""

    def __init__(self, alerts: Alerts):
        self._factor = alerts.stalled_after
        self._seconds: deque[float] = deque(maxlen=_HISTORY)
        self._last: float | None = None
        self._step = 0
        self._failed: str | None = None
        self._told = False

    def on_event(self, event: Event) -> None:
        if isinstance(event, Step | StepSkipped):
            if isinstance(event, Step) and math.isfinite(event.seconds):
                self._seconds.append(event.seconds)
            self._last, self._step, self._failed, self._told = event.time, event.step, None, False
        elif isinstance(event, FailureNoticed):
            self._failed = event.cause

    def judge(self, now: float) -> Iterator[_Found]:
        if self._last is None or self._told or len(self._seconds) < _WARM_UP:
            return
        usual = median(self._seconds)
        if now - self._last < max(_LEAST_STALL, self._factor * usual):
            return
        self._told = True
        after = f" after a failure ({self._failed})" if self._failed else ""
        sentence = f"There was no step for {now - self._last:.0f} s{after}, and a step takes {usual:.2g} s; the last one was step {self._step:,}."
        yield _Found("waits", sentence, "`phalanx status` and `phalanx logs` show what the ranks do.")


class _DiskRule:
    """Too little space, now or after the next checkpoints."""

    def __init__(self, disk: Disk, alerts: Alerts):
        self._disk, self._count, self._reserve = disk, alerts.disk_checkpoints, alerts.disk_gib * _GIB
        self._after_saves: deque[int] = deque(maxlen=_KEPT_SAVES)
        """Free bytes after the newest checkpoints."""
        self._bytes = 0
        self._looked = -math.inf
        self._full = False

    def on_saved(self, event: Saved) -> None:
        self._bytes = event.bytes
        free = self._disk.free()
        if free is not None:
            self._after_saves.append(free)
        self._looked = -math.inf

    def judge(self, now: float) -> Iterator[_Found]:
        if now - self._looked < _DISK_SECONDS:
            return
        self._looked = now
        free = self._disk.free()
        if free is None:
            return
        why = self._problem(free)
        if why is not None and not self._full:
            sentence = f"The disk of {self._disk.name} is filling: {free / _GIB:.1f} GiB are free, and {why}."
            yield _Found("disk", sentence, "Free space, lower checkpoint.keep, or save elsewhere with checkpoint.url.")
        self._full = why is not None

    def _problem(self, free: int) -> str | None:
        if free < self._reserve + self._bytes:
            one = (
                f"a checkpoint takes {self._bytes / _GIB:.1f} GiB"
                if self._bytes
                else f"{self._reserve / _GIB:g} GiB are to be left"
            )
            return one
        if len(self._after_saves) < 2:
            return None
        # Old checkpoints are removed, so that what each one really takes is seen from one save to the next.
        each = (self._after_saves[0] - self._after_saves[-1]) / (len(self._after_saves) - 1)
        if each > 0 and free < self._count * each:
            return f"each checkpoint takes {each / _GIB:.1f} GiB more: there is space for {int(free / each)}"
        return None
