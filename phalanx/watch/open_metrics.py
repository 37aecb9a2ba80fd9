"""The figures of runs as OpenMetrics text, which Prometheus and compatible agents read. `page_server` serves it under /metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.spec.json_value import JsonObject
from phalanx.watch.followed_run import FollowedRun
from phalanx.watch.record_values import number, table, text, whole
from phalanx.watch.run_digest import CAUSES, Digest

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_STATES = ("running", "finished", "stopped", "failed", "interrupted", "reading")
_STEP_FIGURES = {
    "loss": "phalanx_loss", "tokens_per_second": "phalanx_tokens_per_second", "mfu": "phalanx_mfu_ratio", "seconds": "phalanx_step_seconds",
    "grad_norm": "phalanx_grad_norm", "learning_rate": "phalanx_learning_rate", "memory": "phalanx_memory_bytes",
    "expert_load": "phalanx_expert_load_ratio",
}  # fmt: skip
_ALSO_INFINITE = ("loss", "grad_norm")
"""Figures whose NaN and infinity mean something. Others are absent then."""

Sample = tuple[str, Mapping[str, str], float]
"""Suffix of the name, labels, value."""


@dataclass(slots=True)
class Family:
    """A metric with its samples."""

    name: str
    kind: str
    help: str
    unit: str = ""
    samples: list[Sample] = field(default_factory=list)

    def add(self, run: str, value: float | None, /, **labels: str) -> None:
        """Add a sample, unless there is no value."""
        if value is not None:
            suffix = "_total" if self.kind == "counter" else "_info" if self.kind == "info" else ""
            self.samples.append((suffix, {"run": run, **labels}, value))

    def lines(self) -> Iterator[str]:
        if not self.samples:
            return
        yield f"# TYPE {self.name} {self.kind}"
        if self.unit:
            yield f"# UNIT {self.name} {self.unit}"
        yield f"# HELP {self.name} {_escaped(self.help)}"
        for suffix, labels, value in self.samples:
            words = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            yield f"{self.name}{suffix}{{{words}}} {_number(value)}"


def metric_families() -> dict[str, Family]:
    """Every metric, in the order of the text."""
    gauge, counter = "gauge", "counter"
    listed = [
        Family("phalanx_run", "info", "What runs: version, device, format, layout."),
        Family("phalanx_run_state", "stateset", "The state of the run; reading: the events are not all read yet."),
        Family("phalanx_step", gauge, "The last step reached."),
        Family("phalanx_planned_steps", gauge, "Steps of the whole run."),
        Family("phalanx_ranks", gauge, "Ranks of the newest generation."),
        Family("phalanx_parameters", gauge, "Parameters of the model."),
        Family("phalanx_loss", gauge, "Training loss of the last step, in nats."),
        Family("phalanx_eval_loss", gauge, "Held-out loss of the last evaluation, in nats."),
        Family("phalanx_tokens_processed", counter, "Target tokens of all steps, repeated ones included."),
        Family("phalanx_tokens_trained", gauge, "Target tokens of the steps that count."),
        Family("phalanx_tokens_per_second", gauge, "Throughput of the last step, over all ranks."),
        Family("phalanx_mfu_ratio", gauge, "Model FLOPS utilization of the last step.", "ratio"),
        Family("phalanx_step_seconds", gauge, "Duration of the last step.", "seconds"),
        Family("phalanx_promised_step_seconds", gauge, "Duration of a step as planned: expected, P10 and P90.", "seconds"),
        Family("phalanx_grad_norm", gauge, "Gradient norm of the last step, before clipping."),
        Family("phalanx_learning_rate", gauge, "Learning rate of the last step."),
        Family("phalanx_memory_bytes", gauge, "Peak memory of the fullest rank in the last step.", "bytes"),
        Family("phalanx_expert_load_ratio", gauge, "Load of the fullest expert divided by the mean.", "ratio"),
        Family("phalanx_steps_skipped", counter, "Steps without an update: loss or gradient was not finite, or a spike."),
        Family("phalanx_rollbacks", counter, "Times the run returned to a good checkpoint after bad steps."),
        Family("phalanx_failures", counter, "Failures of ranks and nodes, by cause."),
        Family("phalanx_recoveries", counter, "Recoveries from failures, and nodes that joined."),
        Family("phalanx_lost_steps", counter, "Complete steps that recoveries repeated."),
        Family("phalanx_lost_seconds", counter, "Time from failures to the first step after each.", "seconds"),
        Family("phalanx_stragglers", counter, "Times a rank was reported as slower than the others."),
        Family("phalanx_warnings", counter, "Warnings of the run."),
        Family("phalanx_launches", counter, "Launches of the run."),
        Family("phalanx_checkpoints_saved", counter, "Checkpoints that were saved."),
        Family("phalanx_checkpoints_failed", counter, "Checkpoints that could not be saved, uploaded or exported."),
        Family("phalanx_checkpoint_step", gauge, "Step of the newest checkpoint."),
        Family("phalanx_checkpoint_bytes", gauge, "Size of the newest checkpoint.", "bytes"),
        Family("phalanx_checkpoint_seconds", gauge, "Duration of the last save.", "seconds"),
        Family(
            "phalanx_checkpoint_timestamp_seconds", gauge, "When the newest checkpoint was complete, since 1970.", "seconds"
        ),
        Family("phalanx_checkpoint_age_seconds", gauge, "Time since the newest checkpoint was complete.", "seconds"),
        Family("phalanx_last_record_timestamp_seconds", gauge, "When the newest record was written, since 1970.", "seconds"),
    ]
    return {family.name: family for family in listed}


def exposition(runs: Sequence[FollowedRun], clock: Callable[[], float] = time.time) -> str:
    """The text of a scrape."""
    families = metric_families()
    for run in runs:
        with run.lock:
            _add_run(families, run, clock())
    lines = [line for family in families.values() for line in family.lines()]
    return "\n".join([*lines, "# EOF", ""])


def _add_run(families: dict[str, Family], run: FollowedRun, now: float) -> None:
    name, digest, launch, state = run.name, run.digest, run.digest.launch, run.state
    for each in _STATES:
        families["phalanx_run_state"].add(name, float(each == state), phalanx_run_state=each)
    families["phalanx_last_record_timestamp_seconds"].add(name, _finite(digest.last_time))
    if not launch:
        return
    words = {key: text(launch, key, 80) for key in ("version", "device", "compute")}
    families["phalanx_run"].add(name, 1.0, **words, layout=_layout(table(launch, "layout")))
    families["phalanx_step"].add(name, digest.last_step)
    for metric, key in (("planned_steps", "steps"), ("ranks", "ranks"), ("parameters", "parameters")):
        families[f"phalanx_{metric}"].add(name, whole(launch, key))
    promise = table(launch, "promise")
    for key, bound in (("seconds", "expected"), ("low", "p10"), ("high", "p90")):
        families["phalanx_promised_step_seconds"].add(name, _finite(number(promise, key)), bound=bound)
    _add_steps(families, name, digest)
    _add_counts(families, name, digest)
    _add_checkpoints(families, name, digest.saves, now)


def _add_steps(families: dict[str, Family], name: str, digest: Digest) -> None:
    families["phalanx_tokens_processed"].add(name, digest.tokens_processed)
    families["phalanx_tokens_trained"].add(name, _finite(float(np.nansum(digest.steps["tokens"]))))
    if len(digest.steps):
        (last,) = digest.steps.rows(len(digest.steps) - 1)
        for column, metric in _STEP_FIGURES.items():
            value = float(last[column])
            families[metric].add(name, value if column in _ALSO_INFINITE else _finite(value))
    if digest.evaluations:
        evaluation = digest.evaluations[-1]
        families["phalanx_eval_loss"].add(name, _finite(number(evaluation, "loss")), source="all")
        sources = table(evaluation, "sources")
        for source in sources if len(sources) > 1 else ():
            families["phalanx_eval_loss"].add(name, _finite(number(table(sources, source), "loss")), source=source)


def _add_counts(families: dict[str, Family], name: str, digest: Digest) -> None:
    counts = {
        "steps_skipped": "step_skipped", "rollbacks": "rewound", "recoveries": "recovered", "stragglers": "straggling", "warnings": "warned",
        "launches": "run_started", "checkpoints_saved": "saved",
    }  # fmt: skip
    for metric, kind in counts.items():
        families[f"phalanx_{metric}"].add(name, digest.kinds[kind])
    failed = sum(digest.kinds[kind] for kind in ("save_failed", "upload_failed", "export_failed"))
    families["phalanx_checkpoints_failed"].add(name, failed)
    for cause in CAUSES:
        families["phalanx_failures"].add(name, digest.causes[cause], cause=cause)
    families["phalanx_lost_steps"].add(name, digest.steps_lost)
    families["phalanx_lost_seconds"].add(name, digest.seconds_lost)


def _add_checkpoints(families: dict[str, Family], name: str, saves: Iterable[JsonObject], now: float) -> None:
    saved = next((save for save in reversed(list(saves)) if save["kind"] == "saved"), None)
    if saved is None:
        return
    when = _finite(number(saved, "time"))
    families["phalanx_checkpoint_step"].add(name, whole(saved, "step"))
    families["phalanx_checkpoint_bytes"].add(name, _finite(number(saved, "bytes")))
    families["phalanx_checkpoint_seconds"].add(name, _finite(number(saved, "seconds")))
    families["phalanx_checkpoint_timestamp_seconds"].add(name, when)
    families["phalanx_checkpoint_age_seconds"].add(name, None if when is None else max(0.0, now - when))


def _layout(layout: JsonObject) -> str:
    """The degrees above 1, such as "data=2 tensor=4"."""
    return " ".join(f"{key}={degree}" for key, degree in layout.items() if type(degree) is int and degree > 1)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escaped(words: str) -> str:
    clean = words.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent
    return clean.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
