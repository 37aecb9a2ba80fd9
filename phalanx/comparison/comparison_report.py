"""The result of `phalanx bench step`: the steps of every trainer, whether all compute the same, and the ratio to the best peer. As JSON, and
as a table for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, pstdev, quantiles
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from phalanx.comparison.step_messages import PHALANX, PHALANX_XLA
from phalanx.dashboard.numbers import UNKNOWN, count, flops, percent, short_duration, size

CONVENTION = (
    "FLOPs of a token: 6 per weight of a matrix that the token passes through (the head counts, the embedding look-up does not; of "
    "experts the active ones), plus 12·layers·width·sequence for attention in full, or half of that where MFU is called causal. MFU is "
    "relative to the peak of the trainer's own number format."
)
COMPARED_STEPS = 3
"""Steps whose losses are compared: they also show whether all trainers update alike."""
_TABLE_WIDTH = 150
"""Characters of the table at most."""
_AGREEING = 0.75
"""With experts, this part of the tokens must agree: rounding decides between two nearly equal experts."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Differences of losses that rounding explains."""

    tokens: float
    """Root mean square of the differences of single tokens' losses before the first step, relative to the standard deviation of these losses. Two
    fresh models with other weights differ by about 1.4, so this tells them apart where the mean loss does not. Not in nats: logits of a wider model
    spread more, and so does their rounding (bf16 against fp32, 16 layers, width 256 to 1024: 0.004 to 0.013 nats, 0.012 to 0.022 of the deviation;
    two trainers on a GPU, width 4096: 0.054 nats)."""
    steps: float
    """Relative difference of the mean loss of each of the first steps."""


TOLERANCES = {"fp32": Tolerance(1e-4, 1e-4), "bf16": Tolerance(0.06, 0.005), "fp8": Tolerance(0.3, 0.02)}
"""By the coarser format of the two trainers."""
_EXPERT_STEPS = 10
"""With experts, factor of `Tolerance.steps`: families define their balancing losses differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerResult:
    """The steps of one trainer, or why there are none."""

    name: str
    reason: str | None = None
    """Why it did not run; None: it did."""
    version: str = ""
    settings: str = ""
    compute: str = ""
    seconds: tuple[float, ...] = ()
    """Of each measured step."""
    first_step: float = 0.0
    """Seconds of the first step of its first process, which compiles. Phalanx keeps what it has compiled for later processes, and so do its peers."""
    cpu_seconds: tuple[float, ...] = ()
    """Time that all threads of the process computed, of each measured step."""
    token_losses: tuple[float, ...] = ()
    """Of one sequence, before the first step."""
    losses: tuple[float, ...] = ()
    """Of the first steps."""
    memory: int = 0
    reserved: int | None = None

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether a peer computes what Phalanx computes."""

    same: bool
    tokens: float
    """See `Tolerance`."""
    steps: float | None
    """None: the steps are not comparable, because Phalanx masks documents and peers do not."""
    tolerance: Tolerance

    @property
    def sentence(self) -> str:
        if self.same:
            return "same loss"
        if not self.tokens <= self.tolerance.tokens:
            return f"OTHER LOSS: tokens differ by {self.tokens:.2g} of their spread, allowed {self.tolerance.tokens:g}"
        return f"OTHER LOSS: the first steps differ by {self.steps or 0:.2%}, allowed {self.tolerance.steps:.2%}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepComparison:
    """Trainers on one shape."""

    model: str
    parameters: int
    active: int
    """Parameters that a token passes through."""
    has_experts: bool
    micro_batch: int
    sequence: int
    device: str
    text: str
    """Where the tokens come from, in words."""
    masked: bool
    """Phalanx keeps attention within documents."""
    fresh: bool
    """Each turn was a process of its own, because the trainers do not fit in memory together; else the processes stayed and took turns."""
    rounds: int
    warmup: int
    flops: float
    """Model FLOPs of a token."""
    causal_flops: float | None
    """The same with half of attention; None for a custom module, whose attention is not known."""
    peaks: dict[str, float]
    """Peak FLOP/s of the device by number format, where known."""
    load: float
    """Processes that wanted a core at the end, on average over a minute."""
    results: tuple[TrainerResult, ...]

    @property
    def ran(self) -> tuple[TrainerResult, ...]:
        return tuple(result for result in self.results if result.reason is None)

    @property
    def comparable(self) -> tuple[TrainerResult, ...]:
        """Trainers that ran and compute what Phalanx computes."""
        return tuple(result for result in self.ran if self._counts(result))

    @property
    def phalanx(self) -> TrainerResult | None:
        return next((result for result in self.ran if result.name == PHALANX), None)

    @property
    def best_peer(self) -> TrainerResult | None:
        """The fastest peer that computes the same. Phalanx's other engine is none."""
        peers = [result for result in self.comparable if result.name not in (PHALANX, PHALANX_XLA)]
        return min(peers, key=lambda peer: peer.median, default=None)

    @property
    def ratio(self) -> float | None:
        """Phalanx's speed divided by that of the best peer."""
        ours, best = self.phalanx, self.best_peer
        return None if ours is None or best is None else best.median / ours.median

    @property
    def xla_ratio(self) -> float | None:
        """Speed of the XLA engine divided by that of the torch engine, if both compute the same."""
        torch, xla = self.phalanx, next((result for result in self.comparable if result.name == PHALANX_XLA), None)
        return None if torch is None or xla is None else torch.median / xla.median

    def agreement(self, result: TrainerResult) -> Agreement | None:
        """Of a peer with Phalanx; None where Phalanx did not run."""
        ours = self.phalanx
        if ours is None or result is ours:
            return None
        tolerance = max((TOLERANCES[ours.compute], TOLERANCES[result.compute]), key=lambda one: one.tokens)
        if self.has_experts:
            tolerance = replace(tolerance, steps=_EXPERT_STEPS * tolerance.steps)
        tokens = _difference(ours.token_losses, result.token_losses, _AGREEING if self.has_experts else 1.0)
        steps = None if self.masked else _largest(ours.losses, result.losses)
        return Agreement(tokens <= tolerance.tokens and (steps is None or steps <= tolerance.steps), tokens, steps, tolerance)

    def _counts(self, result: TrainerResult) -> bool:
        agreement = self.agreement(result)
        return agreement is None or agreement.same

    def tokens_per_second(self, result: TrainerResult) -> float:
        return self.micro_batch * self.sequence / result.median

    def mfu(self, result: TrainerResult, *, causal: bool = False) -> float | None:
        peak, flops = self.peaks.get(result.compute), self.causal_flops if causal else self.flops
        return None if peak is None or flops is None else self.tokens_per_second(result) * flops / peak

    # For programs.

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "parameters": self.parameters,
            "active_parameters": self.active,
            "micro_batch": self.micro_batch,
            "sequence_length": self.sequence,
            "device": self.device,
            "text": self.text,
            "documents_masked": self.masked,
            "processes": "fresh for each round" if self.fresh else "alive together, in turns",
            "rounds": self.rounds,
            "warmup": self.warmup,
            "flops_per_token": self.flops,
            "causal_flops_per_token": self.causal_flops,
            "peak_flops": self.peaks,
            "load": self.load,
            "convention": CONVENTION,
            "best_peer": None if self.best_peer is None else self.best_peer.name,
            "ratio": self.ratio,
            "xla_ratio": self.xla_ratio,
            "trainers": {result.name: self._json(result) for result in self.results},
        }

    def _json(self, result: TrainerResult) -> dict[str, Any]:
        if result.reason is not None:
            return {"ran": False, "reason": result.reason}
        low, high = result.quartiles
        agreement = self.agreement(result)
        return {
            "ran": True,
            "version": result.version,
            "settings": result.settings,
            "compute": result.compute,
            "first_step_seconds": result.first_step,
            "step_seconds": {"median": result.median, "q1": low, "q3": high, "all": list(result.seconds)},
            "cpu_seconds": median(result.cpu_seconds),
            "tokens_per_second": self.tokens_per_second(result),
            "flops_per_second": self.tokens_per_second(result) * self.flops,
            "mfu": self.mfu(result),
            "causal_mfu": self.mfu(result, causal=True),
            "peak_bytes": result.memory,
            "reserved_bytes": result.reserved,
            "losses": list(result.losses),
            "same_loss": None if agreement is None else agreement.same,
            "token_loss_difference": None if agreement is None else agreement.tokens,
            "step_loss_difference": None if agreement is None else agreement.steps,
        }

    # For people.

    def render(self, console: Console) -> None:
        sparse = f", {count(self.active)} active" if self.active < self.parameters else ""
        shape = f"{self.micro_batch} × {self.sequence:,} tokens a step"
        console.print(
            escape(f"{self.model} ({count(self.parameters)} parameters{sparse}), {shape}, on {self.device}"), soft_wrap=True
        )
        table = self._table()
        natural = Measurement.get(console, console.options.update(width=_TABLE_WIDTH), table).maximum
        table.width = natural if natural > console.width else None  # figures are not cut: a narrow terminal wraps the lines
        console.print(table, soft_wrap=True)
        best, ratio = self.best_peer, self.ratio
        if best is not None and ratio is not None:
            console.print(f"phalanx: {ratio:.3f} × the speed of the best peer ({best.name})", style="bold", soft_wrap=True)
        if self.xla_ratio is not None:
            console.print(f"{PHALANX_XLA}: {self.xla_ratio:.3f} × the speed of the torch engine", style="bold", soft_wrap=True)
        for result in self.ran:
            console.print(
                escape(f"{result.name} {result.version}: {result.compute}, {result.settings}"), style="dim", soft_wrap=True
            )
        for note in self.notes():
            console.print(escape(note), style="dim", soft_wrap=True)
        different = [result.name for result in self.ran if not self._counts(result)]
        if different:
            warning = f"warning: {', '.join(different)} computes something else than phalanx, so its speed is not compared."
            console.print(warning, style="yellow", soft_wrap=True)

    def notes(self) -> list[str]:
        """How it was measured, in sentences."""
        each = min((len(result.seconds) for result in self.ran), default=0)
        alive = "a fresh process for each turn" if self.fresh else "all processes alive, one computing at a time"
        on_gpu = bool(self.ran) and self.ran[0].reserved is not None
        kind = "peak bytes of tensors on the GPU" if on_gpu else "peak resident memory of the process, libraries included"
        cpu = ", ".join(f"{result.name} {short_duration(median(result.cpu_seconds))}" for result in self.ran)
        busy = f"CPU time of a step, which other programs affect least (load {self.load:.1f}): {cpu}."
        masks = " Phalanx masks documents and peers do not: losses are compared without masks, before the first step."
        first = ", ".join(f"{result.name} {short_duration(result.first_step)}" for result in self.ran)
        return [
            f"Medians and quartiles of {each} steps in {self.rounds} turns ({alive}, order reversed every turn), after "
            f"{self.warmup} steps of warm-up of each process. Tokens: {self.text}; peers have them in memory. AdamW, fp32 master "
            f"weights, the same initial weights and learning rate.{masks if self.masked else ''}",
            f"First step of each, which compiles what is not kept from an earlier run: {first}.",
            *([] if on_gpu or not cpu else [busy]),
            f"memory: {kind}, from the first step on. {CONVENTION}",
        ]

    def _table(self) -> Table:
        table = Table(box=None, header_style="bold")
        titles = ("trainer", "step", "quartiles", "tokens/s", "model FLOPs", "MFU", "causal", "memory", "ratio", "")
        for place, title in enumerate(titles):
            table.add_column(
                title, justify="left" if place in (0, len(titles) - 1) else "right", no_wrap=place < len(titles) - 1
            )
        best = self.best_peer
        for result in self.results:
            if result.reason is not None:
                table.add_row(result.name, *[UNKNOWN] * 8, escape(result.reason), style="dim")
                continue
            low, high = result.quartiles
            speed, agreement = self.tokens_per_second(result), self.agreement(result)
            table.add_row(
                result.name,
                short_duration(result.median),
                f"{short_duration(low)}–{short_duration(high)}",
                f"{speed:,.0f}",
                flops(speed * self.flops),
                percent(self.mfu(result)),
                percent(self.mfu(result, causal=True)),
                size(result.memory),
                UNKNOWN if best is None or not self._counts(result) else f"{best.median / result.median:.3f}",
                "" if agreement is None else agreement.sentence,
                style="bold" if result.name == PHALANX else "",
            )
        return table


def _difference(ours: Sequence[float], theirs: Sequence[float], part: float) -> float:
    """Root mean square of the differences, over this part of the tokens, those that agree best; relative to the standard deviation of ours."""
    if len(ours) != len(theirs) or not ours:
        return math.inf
    squares = sorted((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))
    kept = squares[: math.ceil(part * len(squares))]
    deviation = math.sqrt(sum(kept) / len(kept))
    result = deviation / spread if (spread := pstdev(ours)) else 0.0 if deviation == 0 else math.inf
    return math.inf if math.isnan(result) else result


def _largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two sequences."""
    differences = [abs(a - b) / abs(a) if a else math.inf for a, b in zip(ours, theirs, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=math.inf)
