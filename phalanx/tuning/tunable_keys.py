"""The keys that `phalanx tune` varies. None of them changes what a run computes, beyond the order of sums; what each is worth depends on the
machine. A dimension proposes values next to those of the best side so far, and is asked again when one of them wins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from phalanx.planning.request import PlanRequest
from phalanx.planning.search.search import find
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine
from phalanx.tuning.trial_run import Changes, Side, Value

_LAYOUTS = 3
"""Layouts of the plan that are tried besides the one that trains."""
_BUCKETS = (1, 4, 16, 64, 256)
"""MiB."""
_LARGE_VOCABULARY = 4096
_WAITS = 0.02
"""Part of a step spent waiting for the batch, from which on more prefetching can help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What a dimension looks at."""

    base: Side
    """The best so far."""
    machine: Machine
    fixed: frozenset[str]
    """Keys that keep their value."""
    loading: float | None = None
    """Part of the base's step spent waiting for the batch; None: not measured."""

    @property
    def on_gpu(self) -> bool:
        return self.base.plan.device == "cuda"


Values = Callable[[Situation], Iterator[Changes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """A key, or keys that mean something together only."""

    key: str
    """The dotted name; "layout" for the whole table."""
    values: Values
    """Changes of the base to try, the most promising first. The caller drops those that it has tried."""


def _layouts(now: Situation) -> Iterator[Changes]:
    """The plan's best layouts on these devices; on CPUs also other numbers of ranks."""
    base, run = now.base, now.base.run
    if not run.model.is_builtin or run.optimizer.sync_every > 1:
        return  # the plan does not cut a custom module, and each replica of local SGD trains alone
    free = replace(run, layout=Layout(), train=replace(run.train, micro_batch=None))
    if "train.micro_batch" in now.fixed:
        free = replace(free, train=run.train)
    for key, value in {"recompute": "auto", "offload": "auto", "compile": None}.items():
        if f"memory.{key}" not in now.fixed:
            free = replace(free, memory=replace(free.memory, **{key: value}))  # type: ignore[arg-type]
    request = PlanRequest(free, now.machine)
    counts = [base.plan.ranks]
    if not now.on_gpu and "cluster.cpu_ranks" not in now.fixed:
        counts += [now.machine.cores >> half for half in range(now.machine.cores.bit_length())]
    candidates = []
    for ranks in dict.fromkeys(counts):
        try:
            found = find(free, request.devices(ranks), most=_LAYOUTS + 1, gpus=ranks)
        except RunError:
            continue
        candidates += [] if found is None else [found.best, *found.runners_up]
    tried = 0
    for candidate in sorted(candidates, key=lambda candidate: candidate.seconds):
        if candidate.layout == base.plan.layout:
            continue
        if (tried := tried + 1) > _LAYOUTS:
            return
        changes: dict[str, Value] = {
            "layout": candidate.layout,
            "train.micro_batch": candidate.micro_batch,
            "memory.recompute": candidate.recompute,
            "memory.recompute_every": candidate.recompute_every,
            "memory.offload": candidate.offload,
        }
        changes |= {"memory.compile": candidate.compiled} if now.on_gpu else {}
        yield _differing(base, changes)


def _micro_batches(now: Situation) -> Iterator[Changes]:
    size, share = now.base.plan.micro_batch, now.base.run.batch // now.base.plan.layout.replicas
    larger = next((number for number in range(2 * size, share + 1) if share % number == 0), None)
    smaller = next((number for number in range(size // 2, 0, -1) if share % number == 0), None)
    for value in (larger, smaller):
        if value is not None:
            yield {"train.micro_batch": value}


def _recompute(now: Situation) -> Iterator[Changes]:
    """Less recomputation first; more of it only helps by what else then fits."""
    if not now.base.run.model.is_builtin:
        return
    for mode in ("none", "selective", "full"):
        yield {"memory.recompute": mode}


def _offload(now: Situation) -> Iterator[Changes]:
    if now.base.run.memory.offloads:
        yield {"memory.offload": "none"}


def _compile(now: Situation) -> Iterator[Changes]:
    if "memory.compile" not in now.base.changes:
        yield {"memory.compile": not now.base.run.memory.compile}


def _cuda_graphs(now: Situation) -> Iterator[Changes]:
    unset = now.base.run.memory.cuda_graphs is None  # its default depends on the size of the blocks
    if unset and now.on_gpu and now.base.plan.ranks == 1 and now.base.plan.accumulation == 1:
        yield {"memory.cuda_graphs": True}
        yield {"memory.cuda_graphs": False}


def _loss_chunks(now: Situation) -> Iterator[Changes]:
    run, plan = now.base.run, now.base.plan
    if not run.model.is_builtin or run.train.objective == "dpo" or run.model.rows < _LARGE_VOCABULARY:
        return
    tokens = plan.micro_batch * run.train.sequence_length // plan.layout.context
    chunk = min(run.memory.loss_chunk or tokens, tokens)
    for value in (2 * chunk, chunk // 2, chunk // 4):
        if value >= 256:
            yield {"memory.loss_chunk": 0 if value >= tokens else value}


def _buckets(now: Situation) -> Iterator[Changes]:
    """Sizes that give another number of buckets, where ranks exchange gradients in buckets."""
    plan, layout = now.base.plan, now.base.plan.layout
    exchanged = (layout.shard > 1 and layout.zero < 3) or (layout.shard == 1 and (layout.data or 1) * layout.context > 1)
    if not exchanged:
        return
    parameters = (plan.trained or plan.parameters) / (layout.pipeline * layout.tensor)
    total = parameters * (2 if now.base.run.precision.reduce == "bf16" else 4) / 2**20
    now_size = now.base.run.memory.bucket_size or (32 if now.on_gpu else 64)
    sizes = sorted(_BUCKETS, key=lambda size: abs(size.bit_length() - now_size.bit_length()))
    for size in sizes:
        if -(-total // size) != -(-total // now_size):
            yield {"memory.bucket_size": size}


def _threads(now: Situation) -> Iterator[Changes]:
    if now.on_gpu:
        return
    threads, ranks = now.base.plan.threads, now.base.plan.ranks
    if 2 * threads * ranks <= now.machine.cores:
        yield {"cluster.threads": 2 * threads}
    if threads > 1:
        yield {"cluster.threads": threads // 2}


def _stage_split(now: Situation) -> Iterator[Changes]:
    if now.base.plan.layout.pipeline > 1 and now.base.run.layout.stage_split == "counted":
        yield {"layout": replace(now.base.run.layout, stage_split="measured")}


def _prefetch(now: Situation) -> Iterator[Changes]:
    if now.loading is None or now.loading >= _WAITS:
        for factor in (2, 4):
            yield {"data.prefetch": factor * now.base.run.data.prefetch}


DIMENSIONS = (
    Dimension(key="layout", values=_layouts),
    Dimension(key="train.micro_batch", values=_micro_batches),
    Dimension(key="memory.offload", values=_offload),
    Dimension(key="memory.cuda_graphs", values=_cuda_graphs),
    Dimension(key="cluster.threads", values=_threads),
    Dimension(key="memory.loss_chunk", values=_loss_chunks),
    Dimension(key="memory.bucket_size", values=_buckets),
    Dimension(key="layout.stage_split", values=_stage_split),
    Dimension(key="data.prefetch", values=_prefetch),
    Dimension(key="memory.compile", values=_compile),
    Dimension(key="memory.recompute", values=_recompute),
)
"""In the order in which they are tried: what decides about the others first, what the plan knows best last."""
KEYS = tuple(dimension.key for dimension in DIMENSIONS)


def fixed_keys(given: frozenset[str], vary: frozenset[str]) -> frozenset[str]:
    """Of the keys that the run file sets, those that keep their value. `vary`: keys to vary although they are set. RunError for names that
    are none of KEYS."""
    known = {*KEYS, "cluster.cpu_ranks"}
    if unknown := sorted(vary - known):
        raise RunError([f"{name} is not a key that tune varies: choose from {', '.join(sorted(known))}." for name in unknown])
    return frozenset(key for key in given if key not in vary and not ("layout" in vary and key.startswith("layout.")))


def obeyed(dimension: Dimension, fixed: frozenset[str]) -> list[str]:
    """The keys of the run file that a dimension must not change."""
    if dimension.key == "layout":
        return sorted(key for key in fixed if key.startswith("layout."))
    return [dimension.key] if dimension.key in fixed else []


def _differing(base: Side, changes: Changes) -> Changes:
    """The changes that are some."""

    def value(key: str) -> Value:
        table, _, name = key.partition(".")
        found: Value = getattr(getattr(base.run, table), name) if name else getattr(base.run, table)
        return found

    return {key: new for key, new in changes.items() if value(key) != new}
