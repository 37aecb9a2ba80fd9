"""The spans that a collector gets by OTLP over HTTP, decoded from the protobuf on the wire."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from alert_receiver import Receiver, receiving
from happened import a_step, evaluated, failed, finished, recovered, run_started, saved

from phalanx.events.records import Event
from phalanx.events.rundir import RunDir
from phalanx.spec.load import loads
from phalanx.watch.sinks.sink import SINKS, Sink, SinkSettings

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")


def open_sink(folder: Path, url: str, warned: list[str]) -> Sink:
    run = loads(f"[train]\nbatch = 8\nsteps = 10\n[watch]\notlp = '{url}'\n")
    return SINKS["otlp"].open(SinkSettings(run=run, rundir=RunDir(folder / "tiny"), warn=warned.append))


def spans(receiver: Receiver) -> list[Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found = []
    for body in receiver.bodies:
        request = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        for resource in request.resource_spans:
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            assert names["service.name"] == "phalanx" and names["phalanx.run"] == "tiny"
            found += [span for scope in resource.scope_spans for span in scope.spans]
    return found


def values(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


EVENTS: list[Event] = [
    run_started(1000.0), a_step(1), a_step(2), a_step(3), evaluated(3), saved(3), failed(1, 1004.0), recovered(1, 1006.0), a_step(4, 1006.0), a_step(5, 1007.0),
    finished(10),
]  # fmt: skip


def test_a_launch_with_a_failure_is_one_trace(tmp_path: Path) -> None:
    warned: list[str] = []
    with receiving() as receiver:
        sink = open_sink(tmp_path, receiver.url, warned)
        sink.receive(EVENTS[:5])
        sink.receive(EVENTS[5:])
        sink.close()
        found = spans(receiver)
        assert set(receiver.paths) == {"/v1/traces"} and not warned
    assert len({span.trace_id for span in found}) == 1
    by_name = {span.name: span for span in found}
    assert Counter(span.name for span in found) == {
        "run tiny": 1, "generation 0": 1, "generation 1": 1, "step": 5, "evaluation": 1, "save": 1, "recovery": 1,
    }  # fmt: skip
    root, first, second = by_name["run tiny"], by_name["generation 0"], by_name["generation 1"]
    assert not root.parent_span_id and values(root)["phalanx.end"] == "finished" and root.status.code == 1
    assert {by_name[name].parent_span_id for name in ("generation 0", "generation 1", "recovery")} == {root.span_id}
    parents = {values(span)["phalanx.step"]: span.parent_span_id for span in found if span.name == "step"}
    assert parents == {1: first.span_id, 2: first.span_id, 3: first.span_id, 4: second.span_id, 5: second.span_id}
    recovery = by_name["recovery"]
    assert (recovery.start_time_unix_nano, recovery.end_time_unix_nano) == (1004 * 10**9, 1006 * 10**9)
    assert values(recovery) | {"phalanx.cause": "died", "phalanx.rank": 1, "phalanx.action": "restart"} == values(recovery)
    assert first.status.code == 2 and first.events[0].name == "failure_noticed" and first.end_time_unix_nano == 1004 * 10**9
    step = next(span for span in found if span.name == "step" and values(span)["phalanx.step"] == 2)
    assert (step.start_time_unix_nano, step.end_time_unix_nano) == (1001 * 10**9, 1002 * 10**9)
    assert values(step)["phalanx.loss"] == 3.0 and values(by_name["save"])["phalanx.bytes"] == 1000
    assert by_name["evaluation"].end_time_unix_nano - by_name["evaluation"].start_time_unix_nano == 250_000_000


def test_of_a_long_run_steps_are_sampled_and_long_ones_kept(tmp_path: Path) -> None:
    with receiving() as receiver:
        sink = open_sink(tmp_path, receiver.url, [])
        sink.receive([run_started(steps=50_000)])
        for begin in range(1, 3001, 500):
            sink.receive([a_step(n, seconds=5.0 if n == 1234 else 1.0) for n in range(begin, begin + 500)])
        sink.receive([finished(3000)])
        sink.close()
        steps = [values(span)["phalanx.step"] for span in spans(receiver) if span.name == "step"]
    assert steps == sorted([*range(1, 11), 1234, *range(50, 3001, 50)])


def test_a_collector_that_is_away_gets_the_spans_later(tmp_path: Path) -> None:
    warned: list[str] = []
    with receiving() as receiver:
        receiver.answers = [400]
        sink = open_sink(tmp_path, receiver.url, warned)
        sink.receive(EVENTS[:4])
        assert spans(receiver) == [] and "The run goes on" in warned[0] and receiver.url in warned[0]
        sink.receive(EVENTS[4:])
        sink.close()
        assert len(spans(receiver)) == 11
