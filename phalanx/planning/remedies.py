"""What would make a run fit that fits nowhere: one sentence on what is missing, and the smallest changes that help, each of
them tried. `planning/planner` raises them. `scaled` makes larger and smaller models of one family; `planning/solve` uses it
too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

from phalanx.planning.cost.footprint import COMPONENTS
from phalanx.planning.machines.catalogue import GpuEntry
from phalanx.planning.machines.catalogue import gpus as catalogue
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.hardware import hardware as cluster_of
from phalanx.planning.report import MEMORY_LABELS
from phalanx.planning.search.bounds import smallest
from phalanx.planning.search.candidate import candidate_at
from phalanx.planning.search.search import capacity_of, possible, rates_of
from phalanx.planning.search.space import space
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec, Moe
from phalanx.spec.run import Cluster, Memory, Run

_MOST = 3
_DOUBLINGS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """Why nothing fits, and what would."""

    sentence: str
    changes: tuple[str, ...]
    """Each makes the run fit by itself, the smallest change first."""

    @property
    def sentences(self) -> list[str]:
        """All sentences, for a RunError."""
        return [self.sentence, *self.changes]


_Fits = Callable[[Run, Hardware], bool]


def remedies(run: Run, hardware: Hardware, fits_in: float | None = None) -> Remedies:
    """Remedies for a run of which no layout fits, or none is legal, on this cluster."""

    def fits(other: Run, on: Hardware) -> bool:
        return possible(other, on, fits_in)

    every = chain(_allowed(run, hardware, fits_in), _changes(run, hardware, fits), _allowed_and_more(run, hardware, fits_in))
    return Remedies(sentence=_missing(run, hardware, fits_in), changes=tuple(islice(every, _MOST)))


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
    devices = f"{hardware.gpus:,} × {hardware.gpu.name or hardware.gpu.key}"
    return (
        f"Nothing fits on {devices}: the fullest rank of the smallest layout needs {_gib(need)} of {_gib(limit)}, of which "
        f"{_gib(memory[largest])} are {MEMORY_LABELS[largest]}."
    )


def _changes(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    yield from _settings(run, hardware, fits)
    yield from _more_devices(run, hardware, fits)
    yield from _larger_device(run, hardware, fits)
    yield from _shorter(run, hardware, fits)
    yield from _smaller_model(run, hardware, fits)
    yield from _other_batch(run, hardware, fits)
    yield from _larger_and_more(run, hardware, fits)
    yield from _shorter_and_more(run, hardware, fits)


def _settings(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    """Changes to the run file that keep the run what it is."""
    memory, plain = run.memory, Memory()
    free = replace(memory, recompute=plain.recompute, recompute_every=plain.recompute_every, offload=plain.offload)
    muon = run.optimizer.name == "muon"
    if free != memory and not muon and fits(replace(run, memory=free), hardware):
        yield "Leave memory.recompute and memory.offload out: the plan then recomputes and offloads as much as it must."
    if run.layout != Layout() and fits(replace(run, layout=Layout()), hardware):
        yield "Leave [layout] out: the plan then chooses all of it."
    if run.train.micro_batch not in (None, 1) and fits(replace(run, train=replace(run.train, micro_batch=None)), hardware):
        yield "Leave train.micro_batch out: smaller micro-batches fit."
    if memory.loss_chunk is None and fits(replace(run, memory=replace(memory, loss_chunk=1024)), hardware):
        yield "Set memory.loss_chunk = 1024: logits of so few tokens at a time fit."
    if memory.activations == "device" and fits(replace(run, memory=replace(memory, activations="cpu")), hardware):
        yield 'Set memory.activations = "cpu": activations wait in the host\'s memory.'
    if run.data.document_mask and fits(replace(run, data=replace(run.data, document_mask=False)), hardware):
        yield "Set data.document_mask = false: attention then keeps no masks between documents."
    precision = replace(run.precision, optimizer="bf16")
    if run.precision.optimizer == "fp32" and fits(replace(run, precision=precision), hardware):
        yield 'Set precision.optimizer = "bf16": optimizer states of half the size fit.'


def _more_devices(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    count = fewest(run, hardware, fits, hardware.gpus + 1)
    if count is not None:
        yield f"Take {count:,} devices of this kind instead of {hardware.gpus:,}."


def fewest(run: Run, hardware: Hardware, fits: _Fits, least: int = 1) -> int | None:
    """The smallest number of these devices, at least `least`, that the run fits on; whole nodes once there is more than
    one."""

    def on(number: int) -> bool:
        return number >= least and fits(run, hardware.sized(number))

    size = 1
    for _ in range(_DOUBLINGS + hardware.gpus.bit_length()):
        if on(size):
            break
        size *= 2
    else:
        return None
    step = max(1, size // 16) if size <= hardware.node else max(hardware.node, size // 16)
    between = range(size // 2 + step, size, step)
    return next((number for number in between if number % step == 0 and on(number)), size)


def _larger_device(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    for gpu in _larger(hardware):
        if fits(run, _cluster_with(run, gpu, hardware.gpus)):
            yield f"Take devices with more memory: {hardware.gpus:,} × {_device_name(gpu)}."
            return


def _larger_and_more(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    """The largest device of the catalogue, and as many as the run needs."""
    for gpu in _larger(hardware)[-1:]:
        count = fewest(run, _cluster_with(run, gpu, hardware.gpus), fits, hardware.gpus + 1)
        if count is not None:
            yield f"Take {count:,} × {_device_name(gpu)} instead."


def _larger(hardware: Hardware) -> list[GpuEntry]:
    """Devices with noticeably more memory, the smallest of them first."""
    larger = [gpu for gpu in catalogue() if gpu.memory > hardware.gpu.memory * 1.05 and gpu.device == hardware.device]
    return sorted(larger, key=lambda gpu: gpu.memory)


def _cluster_with(run: Run, gpu: GpuEntry, gpus: int) -> Hardware:
    """This many of another device, in the nodes it usually comes in."""
    plain = Cluster(device=run.cluster.device, gpu=gpu.key, gpus=gpus)
    return cluster_of(replace(run, cluster=plain), None)


def _device_name(gpu: GpuEntry) -> str:
    return f'{gpu.name or gpu.key} ({_gib(gpu.memory)}), cluster.gpu = "{gpu.key}"'


def _shorter_and_more(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    length = run.train.sequence_length // 4
    count = fewest(with_sequence(run, length), hardware, fits, hardware.gpus + 1) if length >= 64 else None
    if count is not None:
        yield f"Take {count:,} devices and set train.sequence_length = {length}."


def _shorter(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    length = run.train.sequence_length
    while length >= 256 and length % 2 == 0:
        length //= 2
        if fits(with_sequence(run, length), hardware):
            yield f"Set train.sequence_length = {length} instead of {run.train.sequence_length}."
            return


def with_sequence(run: Run, length: int) -> Run:
    """The same number of sequences with another length."""
    tokens = None if run.train.batch_tokens is None else run.batch * length
    return replace(run, train=replace(run.train, sequence_length=length, batch_tokens=tokens))


def _smaller_model(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    """A model with fewer layers; where almost none would be left, also narrower."""
    if run.model.module is not None:
        return
    low, high = max(1, run.model.layers // 4, run.model.dense_layers + 1 if run.model.moe else 1), run.model.layers
    smaller = replace(run.model, layers=low)
    if low < high and fits(replace(run, model=smaller), hardware):
        while high - low > 1:
            middle = (low + high) // 2
            fewer = replace(run.model, layers=middle)
            if fits(replace(run, model=fewer), hardware):
                low, smaller = middle, fewer
            else:
                high = middle
    else:
        narrower = _narrower(run, hardware, fits)
        if narrower is None:
            return
        smaller = narrower
    yield f"Take a smaller model: {changed_keys(run.model, smaller)}, {smaller.parameters() / 1e9:,.2f} B parameters instead of {run.model.parameters() / 1e9:,.2f}."


def _narrower(run: Run, hardware: Hardware, fits: _Fits) -> ModelSpec | None:
    """The largest model of the family that fits, to within a tenth."""
    low, high, best = 1.0, 1.0, None
    for _ in range(_DOUBLINGS):
        low = low / 4 if best is None else low
        scale = low if best is None else (low * high) ** 0.5
        smaller = scaled(run.model, scale)
        if fits(replace(run, model=smaller), hardware):
            low, best = scale, smaller
        else:
            high = scale
        if best is not None and high / low < 1.1:
            break
    return best


def _other_batch(run: Run, hardware: Hardware, fits: _Fits) -> Iterator[str]:
    for batch in (1 << (run.batch.bit_length() - 1), 1 << run.batch.bit_length(), hardware.gpus):
        train = replace(run.train, batch=batch, batch_tokens=None)
        if batch != run.batch and fits(replace(run, train=train), hardware):
            yield f"Set train.batch = {batch} instead of {run.batch}."
            return


def _allowed(run: Run, hardware: Hardware, fits_in: float | None) -> Iterator[str]:
    """Raising the user's own limit is a smaller change than any other."""
    if (needed := _allowance(run, hardware, fits_in)) is not None:
        yield f"Allow --fits-in {needed:.1f}GiB, which the device has."


def _allowed_and_more(run: Run, hardware: Hardware, fits_in: float | None) -> Iterator[str]:
    """Where no number of devices is enough for the limit: a smaller change of both."""
    more = 2 * hardware.gpus
    if (needed := _allowance(run, hardware.sized(more), fits_in)) is not None:
        yield f"Allow --fits-in {needed:.1f}GiB and take {more:,} devices of this kind."
    length = run.train.sequence_length // 2
    if (needed := _allowance(with_sequence(run, length), hardware, fits_in) if length >= 64 else None) is not None:
        yield f"Allow --fits-in {needed:.1f}GiB and set train.sequence_length = {length}."


def _allowance(run: Run, hardware: Hardware, fits_in: float | None) -> float | None:
    """GiB that the smallest layout takes, rounded up; None where the limit is not what keeps it from fitting."""
    if fits_in is None:
        return None
    need = math.ceil(smallest(space(run, hardware))[0] / 2**30 * 10) / 10 if possible(run, hardware) else math.inf
    return need if math.isfinite(need) and possible(run, hardware, need * 2**30) else None


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


_KEYS = ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn")


def scaled(model: ModelSpec, factor: float) -> ModelSpec:
    """A model of the same family with about `factor` times its parameters: deeper and wider alike with heads of the same
    width, as in published families. Widths stay multiples of 128, and heads multiples of what they were."""
    side = factor ** (1 / 3)
    head = model.head
    per = model.heads // model.kv if model.mla is None else 8
    unit = max(per, 2)
    heads = max(unit, round(model.heads * side / unit) * unit)
    dim = (
        max(128, round(model.dim * side / 128) * 128) if model.dim >= 128 else max(head, round(model.dim * side / head) * head)
    )
    kv = model.kv_heads if model.kv_heads is None or model.kv_heads <= 8 else max(1, heads // per)
    if kv is not None and heads % kv:
        heads = max(kv, round(heads / kv) * kv)
    moe = model.moe
    if moe is not None:
        moe = replace(moe, ffn=max(64, round(moe.ffn * side / 64) * 64))
    matrices = replace(
        model, dim=dim, heads=heads, kv_heads=kv, head_dim=head, ffn=max(64, round(model.hidden * side / 64) * 64), moe=moe
    )
    # Depth compensates for the rounding of the widths.
    wanted = factor * model.parameters()
    double = replace(matrices, layers=2, preset=None, moe=_all_sparse(matrices)).parameters()
    single = replace(matrices, layers=1, preset=None, moe=_all_sparse(matrices)).parameters()
    least = 1 if moe is None else moe.dense_layers + 1
    layers = max(least, round((wanted - (2 * single - double)) / (double - single)))
    return replace(matrices, layers=layers, preset=None)


def _all_sparse(model: ModelSpec) -> Moe | None:
    return None if model.moe is None else replace(model.moe, dense_layers=0)


def changed_keys(model: ModelSpec, other: ModelSpec) -> str:
    """The keys that turn a run file's model into the other: "model.dim = 512, model.layers = 8"."""
    keys = [key for key in _KEYS if key != "head_dim" or other.mla is None]  # latent attention has widths of its own
    changes = [f"model.{key} = {getattr(other, key)}" for key in keys if getattr(other, key) != getattr(model, key)]
    if other.moe is not None and model.moe is not None and other.moe.ffn != model.moe.ffn:
        changes.append(f"model.moe.ffn = {other.moe.ffn}")
    return ", ".join(changes)
