"""Inverse questions: the smallest cluster for a model, the largest model for a cluster, the batch that pays; what more devices or a slower
network would change; and, for a run that fits nowhere, the smallest changes that help. Every answer has been tried by a search.
`planning/planner` calls it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

from phalanx.planning.cost.footprint import COMPONENTS
from phalanx.planning.machines.catalogue import GpuEntry
from phalanx.planning.machines.catalogue import gpus as catalogue
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.hardware import hardware as cluster_of
from phalanx.planning.report import MEMORY_LABELS, PlanReport, report_of
from phalanx.planning.request import free_run
from phalanx.planning.search.bounds import smallest
from phalanx.planning.search.candidate import SearchResult, candidate_at
from phalanx.planning.search.search import NO_LIMITS, Limits, beyond, capacity_of, find, possible, rates_of
from phalanx.planning.search.space import space
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Cluster, Run

What = Literal["gpus", "model", "batch"]

_PAYS = 0.97
"""A batch pays if it reaches this fraction of the highest tokens per second of any batch."""
_MOST = 3
"""Changes that are proposed where nothing fits."""
_DOUBLINGS = 16

_Fits = Callable[[Run, Hardware], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The same run on a changed cluster."""

    name: str
    """Such as "twice the devices"."""
    sentence: str
    faster: float
    """Tokens per second on the changed cluster, over those on the given one; 0 where nothing fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolveReport:
    """The smallest cluster, the largest model or the best batch, with the plan that the answer rests on."""

    what: What
    value: int
    """Devices, parameters or sequences."""
    sentence: str
    plan: PlanReport
    tried: tuple[tuple[int, float], ...] = ()
    """(value, tokens per second) of all values that were tried."""
    what_if: tuple[WhatIf, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "value": self.value,
            "sentence": self.sentence,
            "tried": [list(pair) for pair in self.tried],
            "what_if": [asdict(change) for change in self.what_if],
            "plan": self.plan.to_json(),
        }


def solve(run: Run, hardware: Hardware, what: What = "gpus", limits: Limits = NO_LIMITS) -> SolveReport:
    """The answer to one question. RunError where there is none."""
    if what == "model" and not run.model.is_builtin:
        raise RunError(
            f"--solve model scales a built-in decoder, but {run.model.custom_key} has the size that it has: remove --solve, or "
            "name a preset."
        )
    answers = {"gpus": _cluster, "model": _model, "batch": _batch}
    return answers[what](run, hardware, limits)


def what_if(run: Run, hardware: Hardware) -> list[WhatIf]:
    """What twice the devices, half the devices and half the network bandwidth would change."""
    before = _best_within(run, hardware, NO_LIMITS)
    if before is None:
        return []
    changed = [
        ("twice the devices", hardware.sized(2 * hardware.gpus)),
        ("half the network", replace(hardware, network=hardware.network / 2)),
    ]
    if hardware.gpus > 1:
        changed.insert(1, ("half the devices", hardware.sized(hardware.gpus // 2)))
    return [_compared(name, run, other, before) for name, other in changed]


def _compared(name: str, run: Run, other: Hardware, before: SearchResult) -> WhatIf:
    after = _best_within(run, other, NO_LIMITS)
    if after is None:
        return WhatIf(name=name, sentence=f"With {name} nothing fits.", faster=0.0)
    faster = after.best.tokens_per_second / before.best.tokens_per_second
    days = f"{after.best.expected_days:,.1f} instead of {before.best.expected_days:,.1f} days"
    price = ""
    if after.best.price is not None and before.best.price:
        price = f", {after.best.price / before.best.price - 1:+.0%} dollars"
    return WhatIf(name=name, sentence=f"With {name}: {faster:.2f} × the tokens a second, {days}{price}.", faster=faster)


def _best_within(run: Run, hardware: Hardware, limits: Limits) -> SearchResult | None:
    """The best candidate within the limits."""
    result = find(run, hardware, limits.fits_in, 1)
    return result if result is not None and not beyond(result.best, limits) else None


def _cluster(run: Run, hardware: Hardware, limits: Limits) -> SolveReport:
    def fits(other: Run, on: Hardware) -> bool:
        if not possible(other, on, limits.fits_in):
            return False
        return (limits.deadline is None and limits.budget is None) or _best_within(other, on, limits) is not None

    count = _fewest(run, hardware, fits)
    result = None if count is None else _best_within(run, hardware.sized(count), limits)
    if count is None or result is None:
        raise RunError(
            f"No number of {hardware.gpu.name} can train this run within the limits: "
            "use devices with more memory, a smaller model, a later deadline or a larger budget."
        )
    sentence = (
        f"The smallest cluster for this run is {count:,} × {hardware.gpu.name}: "
        f"{result.best.expected_days:,.1f} days, {result.best.bytes / 2**30:.1f} GiB a device."
    )
    return SolveReport(what="gpus", value=count, sentence=sentence, plan=report_of(run, hardware.sized(count), result))


def _model(run: Run, hardware: Hardware, limits: Limits) -> SolveReport:
    results: dict[float, tuple[Run, SearchResult]] = {}

    def fits(scale: float) -> bool:
        grown = replace(run, model=scaled(run.model, scale))
        result = _best_within(grown, hardware, limits)
        if result is not None:
            results[scale] = grown, result
        return result is not None

    scale = _largest_scale(fits, first=1.0, precision=1.02)
    if scale is None:
        raise RunError("No model of this kind fits on this cluster within the limits: take more devices or a later deadline.")
    grown, result = results[scale]
    count = grown.model.parameters()
    sentence = (
        f"The largest model of this kind on {hardware.gpus:,} × {hardware.gpu.name} has {count / 1e9:,.2f} B parameters: "
        f"{_changed_keys(run.model, grown.model) or 'the one of the run file'}."
    )
    return SolveReport(what="model", value=count, sentence=sentence, plan=report_of(grown, hardware, result))


def _largest_scale(
    fits: Callable[[float], bool], *, first: float, precision: float, too_large: float | None = None
) -> float | None:
    """The largest factor that fits, to within a factor of `precision`, by bisection; None where none does."""
    fitting, scale = None, first
    for _ in range(_DOUBLINGS + 1):
        if fits(scale):
            fitting = scale
        else:
            too_large = scale
        if fitting is None:
            scale /= 4
        elif too_large is None:
            scale *= 4
        elif too_large / fitting < precision:
            break
        else:
            scale = (fitting * too_large) ** 0.5
    return fitting


def _batch(run: Run, hardware: Hardware, limits: Limits) -> SolveReport:
    """The smallest batch that keeps the cluster about as busy as any."""
    tried: dict[int, tuple[Run, SearchResult]] = {}
    for power in range(-6, 7):
        batch = int(run.batch * 2.0**power)
        if batch < 1 or batch in tried:
            continue
        train = replace(run.train, batch=batch, batch_tokens=None, micro_batch=None)
        if run.train.steps is not None:  # the same text in other portions
            train = replace(train, steps=None, tokens=run.steps * run.batch_tokens)
        other = replace(run, train=train)
        result = _best_within(other, hardware, limits)
        if result is not None:
            tried[batch] = other, result
    if not tried:
        raise RunError(
            "No batch size makes this run fit on this cluster within the limits: see what `phalanx plan` says is missing."
        )
    speeds = {size: result.best.tokens_per_second for size, (_, result) in tried.items()}
    most = max(speeds.values())
    value = min(size for size, speed in speeds.items() if speed >= _PAYS * most)
    sentence = (
        f"The batch that pays is {value:,} sequences ({value * run.train.sequence_length:,} tokens): "
        f"{speeds[value]:,.0f} tokens a second, {speeds[value] / most:.0%} of what any batch brings."
    )
    chosen, result = tried[value]
    plan = report_of(chosen, hardware, result)
    return SolveReport(what="batch", value=value, sentence=sentence, plan=plan, tried=tuple(sorted(speeds.items())))


# What would make a run fit that fits nowhere.


def remedies(run: Run, hardware: Hardware, fits_in: float | None = None) -> list[str]:
    """For a run of which no layout fits, or none is legal: a sentence on what is missing, and one on each of the smallest changes that make
    it fit by themselves."""
    more, length = 2 * hardware.gpus, run.train.sequence_length // 2
    shorter = with_sequence(run, length)
    changes = chain(
        _allow_more(run, hardware, fits_in, ", which the device has."),  # a smaller change than any other
        _changes(run, hardware, partial(possible, fits_in=fits_in)),
        # Where no number of devices is enough for the limit: a smaller change of both.
        _allow_more(run, hardware.sized(more), fits_in, f" and take {more:,} devices of this kind."),
        _allow_more(shorter, hardware, fits_in, f" and set train.sequence_length = {length}.") if length >= 64 else (),
    )
    return [_missing(run, hardware, fits_in), *islice(changes, _MOST)]


def _missing(run: Run, hardware: Hardware, fits_in: float | None) -> str:
    layouts, limit = space(run, hardware), capacity_of(hardware, fits_in)
    need, row = smallest(layouts)
    if not row and run.layout != Layout():
        return f"The run file's [layout] does not fit {hardware.gpus:,} devices with a batch of {run.batch:,} sequences."
    if not row:
        return (
            f"No layout divides this run among {hardware.gpus:,} devices: a batch of {run.batch:,} sequences, {run.model.heads} heads and "
            f"{run.model.layers} layers have no common division with them."
        )
    memory = candidate_at(layouts, rates_of(run, hardware), row, 0).memory
    largest = max(COMPONENTS, key=lambda name: memory[name])
    return (
        f"Nothing fits on {hardware.gpus:,} × {hardware.gpu.name}: the fullest rank of the smallest layout needs {_gib(need)} of {_gib(limit)}, "
        f"of which {_gib(memory[largest])} are {MEMORY_LABELS[largest]}."
    )


def _changes(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    """Changes that make the run fit, those of the run file's settings first and combined ones last."""
    gpus, length, larger = hardware.gpus, run.train.sequence_length, _larger(hardware)

    def first(changes: Iterable[tuple[str, Run, Hardware]]) -> Iterator[str]:
        return islice((sentence for sentence, changed, devices in changes if fits(changed, devices)), 1)

    def more_devices(sentence: str, changed: Run, devices: Hardware) -> Iterator[str]:
        if (count := _fewest(changed, devices, fits, gpus + 1)) is not None:
            yield sentence.format(f"{count:,}")

    yield from (sentence for sentence, changed in _settings(run).items() if changed != run and fits(changed, hardware))
    yield from more_devices(f"Take {{}} devices of this kind instead of {gpus:,}.", run, hardware)
    yield from first(
        (f"Use devices with more memory: {gpus:,} × {_device_name(gpu)}.", run, _cluster_with(run, gpu, gpus)) for gpu in larger
    )
    yield from first(
        (f"Set train.sequence_length = {part} instead of {length}.", with_sequence(run, part), hardware)
        for part in _halves(length)
    )
    yield from _smaller_model(run, hardware, fits)
    batches = (1 << (run.batch.bit_length() - 1), 1 << run.batch.bit_length(), gpus)
    yield from first(
        (f"Set train.batch = {batch} instead of {run.batch}.", with_batch(run, batch), hardware)
        for batch in batches
        if batch != run.batch
    )
    for gpu in larger[-1:]:
        yield from more_devices(f"Take {{}} × {_device_name(gpu)} instead.", run, _cluster_with(run, gpu, gpus))
    if (part := length // 4) >= 64:
        yield from more_devices(
            f"Take {{}} devices and set train.sequence_length = {part}.", with_sequence(run, part), hardware
        )


def _settings(run: Run) -> dict[str, Run]:
    """Changes to the run file that do not change what is trained."""
    memory = run.memory
    return {
        "Remove memory.recompute and memory.offload: the plan then recomputes and offloads as much as it must.": replace(
            run, memory=memory if run.optimizer.traits.no_offload else free_run(run).memory
        ),
        "Remove [layout]: the plan then chooses all of it.": replace(run, layout=Layout()),
        "Remove train.micro_batch: smaller micro-batches fit.": replace(run, train=replace(run.train, micro_batch=None)),
        "Set memory.loss_chunk = 1024: logits of 1024 tokens at a time fit.": replace(
            run, memory=replace(memory, loss_chunk=memory.loss_chunk or 1024)
        ),
        'Set memory.activations = "cpu": activations wait in the host\'s memory.': replace(
            run, memory=replace(memory, activations="cpu")
        ),
        "Set data.document_mask = false: attention then keeps no masks between documents.": replace(
            run, data=replace(run.data, document_mask=False)
        ),
        'Set precision.optimizer = "bf16": optimizer states of half the size fit.': replace(
            run, precision=replace(run.precision, optimizer="bf16")
        ),
    }


def _halves(length: int) -> Iterator[int]:
    while length >= 256 and length % 2 == 0:
        length //= 2
        yield length


def _fewest(run: Run, hardware: Hardware, fits: _Fits, least: int = 1) -> int | None:
    """The smallest number of these devices, at least `least`, that the run fits on; whole nodes once there is more than
    one."""

    def on(number: int) -> bool:
        return number >= least and fits(run, hardware.sized(number))

    sizes = (1 << power for power in range(_DOUBLINGS + hardware.gpus.bit_length()))
    size = next(filter(on, sizes), None)
    if size is None:
        return None
    step = max(1, size // 16) if size <= hardware.node else max(hardware.node, size // 16)
    between = range(size // 2 + step, size, step)
    return next((number for number in between if number % step == 0 and on(number)), size)


def _larger(hardware: Hardware) -> list[GpuEntry]:
    """Devices with noticeably more memory, the smallest of them first."""
    larger = [gpu for gpu in catalogue() if gpu.memory > hardware.gpu.memory * 1.05 and gpu.device == hardware.device]
    return sorted(larger, key=lambda gpu: gpu.memory)


def _cluster_with(run: Run, gpu: GpuEntry, gpus: int) -> Hardware:
    """This many of another device, in the nodes it usually comes in."""
    plain = Cluster(device=run.cluster.device, gpu=gpu.key, gpus=gpus)
    return cluster_of(replace(run, cluster=plain), None)


def _device_name(gpu: GpuEntry) -> str:
    return f'{gpu.name} ({_gib(gpu.memory)}), cluster.gpu = "{gpu.key}"'


def with_sequence(run: Run, length: int) -> Run:
    """The same number of sequences with another length."""
    tokens = None if run.train.batch_tokens is None else run.batch * length
    return replace(run, train=replace(run.train, sequence_length=length, batch_tokens=tokens))


def with_batch(run: Run, batch: int) -> Run:
    return replace(run, train=replace(run.train, batch=batch, batch_tokens=None))


def _smaller_model(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    """A model with fewer layers; where almost none would be left, also narrower."""
    model = run.model
    if not model.is_builtin:
        return

    def carries(smaller: ModelSpec) -> bool:
        return fits(replace(run, model=smaller), hardware)

    low, high = max(1, model.layers // 4, model.dense_layers + 1 if model.moe else 1), model.layers
    if low < high and carries(replace(model, layers=low)):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if carries(replace(model, layers=middle)) else (low, middle)
        smaller = replace(model, layers=low)
    else:
        scale = _largest_scale(lambda scale: carries(scaled(model, scale)), first=0.25, too_large=1.0, precision=1.1)
        if scale is None:
            return
        smaller = scaled(model, scale)
    sizes = f"{smaller.parameters() / 1e9:,.2f} B parameters instead of {model.parameters() / 1e9:,.2f}"
    yield f"Use a smaller model: {_changed_keys(model, smaller)}, {sizes}."


def _allow_more(run: Run, hardware: Hardware, fits_in: float | None, rest: str) -> Iterator[str]:
    """Raising the user's own limit to what the smallest layout takes, where the limit is what keeps it from fitting."""
    if fits_in is not None and possible(run, hardware):
        need = math.ceil(smallest(space(run, hardware))[0] / 2**30 * 10) / 10
        if possible(run, hardware, need * 2**30):
            yield f"Allow --fits-in {need:.1f}GiB{rest}"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


# Larger and smaller models of one family.

_KEYS = ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn")


def scaled(model: ModelSpec, factor: float) -> ModelSpec:
    """A model of the same family with about `factor` times its parameters: deeper and wider alike with heads of the same
    width, as in published families. Widths stay multiples of 128, and heads multiples of what they were."""
    side = factor ** (1 / 3)
    per = model.heads // model.kv if model.mla is None else 8
    heads = _multiple(model.heads * side, max(per, 2))
    kv = model.kv_heads if model.kv_heads is None or model.kv_heads <= 8 else max(1, heads // per)
    if kv is not None and heads % kv:
        heads = _multiple(heads, kv)
    moe = None if model.moe is None else replace(model.moe, ffn=_multiple(model.moe.ffn * side, 64))
    wider = replace(
        model,
        dim=_multiple(model.dim * side, 128 if model.dim >= 128 else model.head),
        heads=heads,
        kv_heads=kv,
        head_dim=model.head,
        ffn=_multiple(model.hidden * side, 64),
        moe=moe,
        preset=None,
    )
    # Depth compensates for the rounding of the widths.
    sparse = replace(wider, moe=None if moe is None else replace(moe, dense_layers=0))
    single, double = (replace(sparse, layers=layers).parameters() for layers in (1, 2))
    layers = round((factor * model.parameters() - (2 * single - double)) / (double - single))
    return replace(wider, layers=max(1 if moe is None else moe.dense_layers + 1, layers))


def _multiple(size: float, unit: int) -> int:
    """The nearest multiple of `unit`, at least one."""
    return max(unit, round(size / unit) * unit)


def _changed_keys(model: ModelSpec, other: ModelSpec) -> str:
    """The keys that turn a run file's model into the other: "model.dim = 512, model.layers = 8"."""
    keys = [key for key in _KEYS if key != "head_dim" or other.mla is None]  # latent attention has widths of its own
    changes = [f"model.{key} = {getattr(other, key)}" for key in keys if getattr(other, key) != getattr(model, key)]
    if other.moe is not None and model.moe is not None and other.moe.ffn != model.moe.ffn:
        changes.append(f"model.moe.ffn = {other.moe.ffn}")
    return ", ".join(changes)
