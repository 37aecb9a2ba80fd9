"""Sends spans of a run to an OpenTelemetry collector: launch, generations, steps, evaluations, saves, uploads, failures and recoveries.

One launch is one trace. A span is sent when it ends; the spans of a launch and of its last generation end with it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from phalanx._version import __version__
from phalanx.events.records import (
    Evaluated,
    Event,
    Exported,
    FailureNoticed,
    Finished,
    Recovered,
    Restored,
    Rewound,
    RunStarted,
    Saved,
    SaveFailed,
    Step,
    StepSkipped,
    Stopped,
    Straggling,
    Uploaded,
    UploadFailed,
    Warned,
    WorkerFailed,
)
from phalanx.watch.sinks.outbox import Outbox
from phalanx.watch.sinks.sink import SinkSettings

Attributes = Mapping[str, str | int | float | bool]
_WAITING, _BATCH = 4096, 512
"""Spans that wait for the collector, and spans of one request, at most."""
_STEPS = 1000
"""Steps of a run that are sent, nearly; besides the first ones of a generation, and those that took long."""
_FIRST_STEPS = 10
_LONG = 2.0
"""A step that takes this many times the median is sent in any case."""
_TIMEOUT = 10.0


class OtlpSink:
    """The trace of one launch."""

    def __init__(self, settings: SinkSettings, exporter: OTLPSpanExporter):
        self._settings, self._exporter = settings, exporter
        self._outbox = Outbox[ReadableSpan](self._send, limit=_WAITING, batch=_BATCH)
        resource = Resource.create({"service.name": "phalanx", "service.version": __version__, "phalanx.run": settings.name})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(_Collect(self._outbox)))
        self._tracer = provider.get_tracer("phalanx", __version__)
        self._launch: Span | None = None
        self._generation: Span | None = None
        self._number = 0
        self._failures: dict[int, FailureNoticed] = {}
        self._every = 1
        self._seconds: deque[float] = deque(maxlen=100)
        self._steps_since = 0
        self._last = 0.0

    def receive(self, events: Sequence[Event]) -> None:
        for event in events:
            self._take(event)
            self._last = event.time
        self._deliver()

    def close(self) -> None:
        self._end(self._last)
        self._deliver(at_once=True)
        self._exporter.shutdown()

    def _deliver(self, *, at_once: bool = False) -> None:
        if (error := self._outbox.deliver(at_once=at_once)) is not None:
            self._settings.warn(
                f'watch.otlp = "{self._settings.run.watch.otlp}": {error}. The run goes on, and the newest {_WAITING:,} spans are sent again later.'
            )

    def _send(self, spans: list[ReadableSpan]) -> None:
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise OSError("the collector does not take spans")

    def _take(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._begin_launch(event)
            case Step() | StepSkipped():
                self._take_step(event)
            case Evaluated():
                self._span("evaluation", event, event.seconds, {"step": event.step, "loss": event.loss, "tokens": event.tokens})
            case Saved():
                more: Attributes = {"stall_seconds": event.stall, "path": event.path}
                self._span("save", event, event.seconds, {"step": event.step, "bytes": event.bytes, **more})
            case Uploaded():
                self._span("upload", event, event.seconds, {"step": event.step, "bytes": event.bytes, "url": event.url})
            case Exported():
                self._span("export", event, event.seconds, {"step": event.step, "path": event.path})
            case Restored():
                self._span("restore", event, event.seconds, {"step": event.step, "path": event.path})
            case FailureNoticed():
                self._fail(event)
            case Recovered():
                self._recover(event)
            case SaveFailed() | UploadFailed() | Warned() | Straggling() | Rewound():
                self._note(event)
            case Finished() | Stopped() | WorkerFailed():
                self._end(event.time, event)

    def _begin_launch(self, event: RunStarted) -> None:
        self._end(event.time)
        names: dict[str, str | int | float | bool] = {
            name: getattr(event, name) for name in ("version", "ranks", "device", "steps", "parameters", "compute")
        }
        if event.promise is not None:
            names["promised_step_seconds"] = event.promise.seconds
        self._every, self._number = max(1, event.steps // _STEPS), 0
        root = Context()
        self._launch = self._tracer.start_span(
            f"run {self._settings.name}", root, attributes=_named(names), start_time=_nanoseconds(event.time)
        )
        self._begin_generation(event.time, {"ranks": event.ranks})

    def _begin_generation(self, time: float, attributes: Attributes) -> None:
        self._steps_since = 0
        self._generation = self._child(
            f"generation {self._number}", time, _named({"generation": self._number, **attributes}), self._launch
        )

    def _take_step(self, event: Step | StepSkipped) -> None:
        self._steps_since += 1
        if isinstance(event, StepSkipped):
            lost: Attributes = {"step": event.step, "loss": event.loss, "grad_norm": event.grad_norm, "reason": event.reason}
            self._span("step skipped", event, 0.0, lost, failed=event.reason)
            return
        usual = median(self._seconds) if self._seconds else event.seconds
        self._seconds.append(event.seconds)
        is_long = event.seconds > _LONG * usual
        if self._steps_since > _FIRST_STEPS and event.step % self._every and not is_long:
            return
        names = ("step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "memory")
        values: dict[str, str | int | float | bool] = {name: getattr(event, name) for name in names}
        optional = {"mfu": event.mfu, "expert_load": event.expert_load}
        values |= {name: value for name, value in optional.items() if value is not None}
        self._span("step", event, event.seconds, values | {"sampled_every": self._every, "long": is_long})

    def _fail(self, event: FailureNoticed) -> None:
        self._failures[event.number] = event
        if self._generation is not None:
            self._generation.set_status(Status(StatusCode.ERROR, f"{event.cause}: {event.message}"))
            self._note(event)
            self._generation.end(_nanoseconds(event.time))
            self._generation = None

    def _recover(self, event: Recovered) -> None:
        failures = [self._failures.pop(number) for number in event.failures if number in self._failures]
        attributes = {
            name: getattr(event, name) for name in ("action", "generation", "ranks", "source", "step", "steps_lost", "seconds")
        }
        for failure in failures[:1]:
            where = {} if failure.rank is None else {"rank": failure.rank}
            attributes |= {"cause": failure.cause, "message": failure.message, **where}
        span = self._child("recovery", event.noticed, _named(attributes), self._launch)
        for name in ("decided", "restarted"):
            span.add_event(name, timestamp=_nanoseconds(getattr(event, name)))
        span.end(_nanoseconds(event.first_step))
        if self._generation is not None:  # nodes joined, without a failure
            self._generation.end(_nanoseconds(event.noticed))
        self._number = event.generation
        self._begin_generation(event.restarted, {"ranks": event.ranks})

    def _end(self, time: float, event: Event | None = None) -> None:
        """End the spans of a launch."""
        if self._launch is None:
            return
        if self._generation is not None:
            self._generation.end(_nanoseconds(time))
        if isinstance(event, WorkerFailed):
            self._launch.set_status(Status(StatusCode.ERROR, event.reason))
        elif isinstance(event, Finished):
            self._launch.set_status(Status(StatusCode.OK))
        self._launch.set_attribute("phalanx.end", "interrupted" if event is None else event.kind)
        self._launch.end(_nanoseconds(time))
        self._launch = self._generation = None
        self._failures.clear()

    def _note(self, event: Event) -> None:
        """An event of the generation's span, or of the launch's."""
        span = self._generation or self._launch
        if span is not None:
            words = str(getattr(event, "message", "") or getattr(event, "reason", ""))
            values = {name: value for name in ("step", "rank", "cause") if (value := getattr(event, name, None)) is not None}
            span.add_event(event.kind, _named({"message": words, **values}), _nanoseconds(event.time))

    def _span(self, name: str, event: Event, seconds: float, attributes: Attributes, failed: str = "") -> None:
        """A span that ends with its record."""
        span = self._child(name, event.time - seconds, _named(attributes), self._generation or self._launch)
        if failed:
            span.set_status(Status(StatusCode.ERROR, failed))
        span.end(_nanoseconds(event.time))

    def _child(self, name: str, begin: float, attributes: Attributes, parent: Span | None) -> Span:
        context = Context() if parent is None else set_span_in_context(parent, Context())
        return self._tracer.start_span(name, context, attributes=attributes, start_time=_nanoseconds(begin))


class _Collect:
    """An exporter that puts spans into the outbox, which sends them again if the collector is away; the SDK's own processors drop them."""

    def __init__(self, outbox: Outbox[ReadableSpan]):
        self._outbox = outbox

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._outbox.add(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None: ...


def _named(attributes: Attributes) -> Attributes:
    return {f"phalanx.{name}": value for name, value in attributes.items()}


def _nanoseconds(time: float) -> int:
    return int(time * 1e9)


def open_sink(settings: SinkSettings) -> OtlpSink:
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what fails is said once, in the records of the run
    address = (settings.run.watch.otlp or "").rstrip("/")
    endpoint = address if address.endswith("/v1/traces") else f"{address}/v1/traces"
    return OtlpSink(settings, OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT))
