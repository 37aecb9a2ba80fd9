"""The search space: every legal layout of a run on a cluster, as columns of `cost/job_table`. Keys that the run file gives are
fixed, the others are enumerated. A layout is legal if `spec/check_layout` and `planning/planner` accept it: a test compares
them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from phalanx.planning.cost.job_table import METHODS, OFFLOAD, RECOMPUTE, SCHEDULES, JobTable, machine_columns, model_columns
from phalanx.planning.cost.schedule_cost import SPLITS_BACKWARD
from phalanx.planning.machines.cluster import Hardware
from phalanx.spec.adapted_layers import STORED_BYTES, adapter_parameters, copies_experts
from phalanx.spec.check_engine import engine_takes
from phalanx.spec.check_layout import leaves_empty_part
from phalanx.spec.engine import Engine
from phalanx.spec.errors import divisors as divisors_of
from phalanx.spec.layout import FIXED_STAGES, Layout, Schedule, default_stages
from phalanx.spec.run import Memory, Run

Columns = dict[str, npt.NDArray[np.int64]]
Dimension = Literal["micro_batches", "experts", "orders", "spreads", "savings"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
"""What is chosen after the degrees, with the columns that each adds: micro_batch; expert and expert_tensor; schedule and stages; data,
shard and zero; recompute, recompute_every and offload."""
divisors = cache(divisors_of)

_DEFAULT, _MEMORY = Layout(), Memory()
_XLA_COLUMNS: dict[str, Any] = {
    "on_xla": 1, "wire": 4, "gathered": 4, "activations_on_host": 0,
}  # fmt: skip
"""What the XLA engine does on every device: gradients and parameters are in fp32 on their way. The constants of TPUs were fitted to compiled programs."""
_HOPPER = ("h", "b", "gb")
_MASKED = ("v", "t", "p", "mi")
"""Prefixes of the catalogue's names of Hopper GPUs and later ones."""
_NONE, SELECTIVE, _FULL = (RECOMPUTE.index(mode) for mode in ("none", "selective", "full"))
_LEVELS = ((_NONE, 1), (SELECTIVE, 1), (_FULL, 4), (_FULL, 3), (_FULL, 2), (_FULL, 1))
"""(recompute, recompute_every) that a search tries, the one that costs least time first."""
DEGREES = ("pipeline", "data", "shard", "context", "tensor", "zero", "expert", "expert_tensor")
"""Columns that are keys of [layout] of the same name."""
_DIVIDED = {"pipeline", "data", "shard", "context", "tensor", "expert", "expert_tensor", "micro_batch"}
"""Columns that the equations divide by many times. As floats from the beginning, that takes half the time."""
_LOGITS, _MIN_CHUNK = 2.0 * 2**30, 1024
"""Bytes of logits of one chunk of the loss, by default, and the fewest tokens in it. Larger products are not faster."""
_FEW = 64
"""Most devices for which recomputing only some of the blocks is tried. With more, stages have too few blocks for it to be
even, and there are too many layouts: it would take most of a search's time."""


@dataclass(frozen=True, slots=True)
class Space:
    """All layouts of a run on this many devices."""

    run: Run
    hardware: Hardware
    gpus: int
    exact: bool = False
    """The layout is the run file's, with its defaults; only micro-batch, recomputation and offload are open."""
    _tables: dict[Any, Columns] = field(default_factory=dict, repr=False)

    @property
    def on_xla(self) -> bool:
        return engine_of(self.run, self.hardware) == "xla"

    @property
    def compute(self) -> str:
        return compute_of(self.run, self.hardware)

    def degrees(self) -> Columns:
        """Columns pipeline, replicas (data × shard), context, tensor, method and sequence_parallel of the combinations that
        divide the run."""
        rows = []
        for tensor in filter(self._tensor_legal, self._free("tensor", divisors(self.gpus))):
            for context in self._free("context", divisors(self.gpus // tensor)):
                if self.gpus % (tensor * context):
                    continue
                views = [(m, s) for m in self._methods(tensor, context) for s in self._sequence(tensor, context)]
                for pipeline in self._free("pipeline", divisors(self.gpus // tensor // context)) if views else ():
                    replicas, rest = divmod(self.gpus // tensor // context, pipeline)
                    if not rest and self._pipeline_legal(pipeline) and self.run.batch % replicas == 0:
                        rows += [(pipeline, replicas, context, tensor, *view) for view in views]
        return columns_of(("pipeline", "replicas", "context", "tensor", "method", "sequence_parallel"), rows)

    def joined(self, columns: Columns, *dimensions: Dimension) -> Columns:
        """Each row joined with every choice in these dimensions."""
        for dimension in dimensions:
            tables, kind = self._choices(columns, dimension)
            counts = np.array([row_count(table) for table in tables])
            starts, repeats = np.cumsum(counts) - counts, counts[kind]
            rows = np.repeat(np.arange(len(kind)), repeats)
            inside = np.arange(len(rows)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            columns = pick(columns, rows) | pick(stack(tables), starts[kind][rows] + inside)
        return columns

    def count(self, columns: Columns) -> int:
        """Number of candidates that these rows, with micro-batches and nothing else joined, stand for."""
        counts = np.ones_like(columns["pipeline"])
        for dimension in DIMENSIONS[1:]:
            tables, kind = self._choices(columns, dimension)
            counts *= np.array([row_count(table) for table in tables], dtype=np.int64)[kind]
        return int(counts.sum())

    def _choices(self, columns: Columns, dimension: Dimension) -> tuple[list[Columns], npt.NDArray[np.int64]]:
        """The tables of a dimension's choices, which depend on one key of a row alone, and the number of each row's table."""
        pipeline, replicas = columns["pipeline"], columns["replicas"]
        keys = {"micro_batches": replicas, "experts": self.gpus // pipeline, "orders": pipeline, "spreads": replicas}
        kinds, kind = np.unique(keys.get(dimension, np.zeros_like(pipeline)), return_inverse=True)
        return [self._table(dimension, int(key)) for key in (kinds if len(kinds) else (1,))], kind

    def jobs(self, columns: Columns, **more: Any) -> JobTable:
        """The columns as a job table. Fields that are not in them come from the run, the machine and `more`. A column
        "level" is an index into `levels` and sets recompute and recompute_every."""
        run, model, memory = self.run, self.run.model, self.run.memory
        known: dict[str, Any] = {
            **model_columns(model, run.layout.tensor, 4 if self.compute == "fp32" else 2),
            **machine_columns(self.hardware, self.compute, _fp8_share(run)),
            "sequence": run.train.sequence_length,
            "attended": model.attended(run.train.sequence_length) / run.train.sequence_length,
            "batch": run.batch,
            "ranks": self.gpus,
            "activations_on_host": int(memory.activations == "cpu"),
            "loss_chunk": memory.loss_chunk or 0,
            "compiled": int(memory.compile or False),
            "residual_bytes": 2 if self.hardware.device == "cuda" and self.compute in ("bf16", "fp8") else 4,
            "compute_bytes": 4 if self.compute == "fp32" else 2,
            "fp8_experts": _fp8_share(run) if run.precision.fp8_experts and self.compute == "fp8" else 0,
            "fp8_gather": _fp8_share(run) if run.precision.fp8_gather and self.compute == "fp8" else 0,
            # Only memory depends on these.
            "latent": model.mla.kv_rank + (model.mla.q_rank or 0) if model.mla else 0,
            "kv_rank": model.mla.kv_rank if model.mla else 0,
            "rotated": model.rotated if model.positions == "rope" else 0,
            "qk_norm": int(model.qk_norm),
            "reference": int(run.train.objective == "dpo"),
            "adapters": adapter_parameters(model, run.lora) / model.parameters(),
            "base_bytes": 0.0 if run.lora.base is None else STORED_BYTES[run.lora.base],
            "expert_copies": int(copies_experts(model, run.lora)),
            "recompute_every": memory.recompute_every,
            "moments": (2 if run.precision.optimizer == "bf16" else 4)
            * run.optimizer.traits.moments,  # of the matrices at least
            "wire": 2 if run.precision.reduce == "bf16" else 4,
            **({} if memory.bucket_size is None else {"bucket": memory.bucket_size << 20}),
            "scores": kept_scores(run, self.hardware),
            "on_cpu": int(self.hardware.device == "cpu"),
            **(_XLA_COLUMNS | {"compiled": int(self.hardware.device != "tpu")} if self.on_xla else {}),
        }
        mine = {name: column for name, column in columns.items() if name != "replicas"} | more
        if "level" in mine:
            mine |= self.of_level(mine.pop("level"))
        known |= self._defaults(mine.get("tensor", 1), mine.get("schedule", 0))
        known["fp8"] = int(self.compute == "fp8") * (2 + known["compiled"])
        for name in _DIVIDED & mine.keys():
            mine[name] = np.asarray(mine[name], np.float64)
        return JobTable(**(known | mine))

    def _defaults(self, tensor: Any, schedule: Any) -> dict[str, Any]:
        """Compilation and the loss chunk on GPUs, where the run leaves them open. Compiled blocks keep the gathered inputs of tensor parallelism,
        and cannot split their backward. A custom module computes its own logits."""
        run, memory = self.run, self.run.memory
        if self.hardware.device != "cuda" or not run.model.is_builtin:
            return {}
        open_: dict[str, Any] = {}
        degrees = np.asarray(tensor, np.int64)
        if memory.compile is None and not self.on_xla:
            open_["compiled"] = ((degrees == 1) & ~SPLITS_BACKWARD[np.asarray(schedule, np.int64)]).astype(np.int64)
        if memory.loss_chunk is None and run.train.objective != "dpo":  # which needs the loss of every token
            rows = _LOGITS / (2.0 * run.model.rows) * np.arange(1, degrees.max(initial=1) + 1)
            open_["loss_chunk"] = np.maximum(2 ** np.floor(np.log2(rows)), _MIN_CHUNK)[degrees - 1]
        return open_

    @property
    def levels(self) -> list[tuple[int, int]]:
        """Codes of recompute with recompute_every that the run allows, the one that costs least time first."""
        memory = self.run.memory
        if memory.recompute != _MEMORY.recompute:
            return [(RECOMPUTE.index(memory.recompute), memory.recompute_every)]
        whole, every = memory.activations == "cpu", memory.recompute_every
        model = self.run.model
        modes = [level for level in _LEVELS if not (whole and level[0] == SELECTIVE)]
        if self.on_xla and self.hardware.device == "cuda" and model.is_builtin:  # `planning/machine_fit` says why
            modes = [level for level in modes if level[0] != _NONE]
        if (
            not model.is_builtin
        ):  # what selective recomputation stores of it is unknown, and without blocks nothing is recomputed
            has_blocks = model.measured is not None and model.measured.recomputed_activations is not None
            modes = [level for level in modes if level[0] == _NONE or (level[0] == _FULL and has_blocks)]
        if every > 1:
            return [(mode, every) for mode, often in modes if mode != _NONE and often == 1]
        most = self.run.model.layers if self.exact or self.gpus <= _FEW else 1
        return [level for level in modes if level[1] <= most]

    def of_level(self, level: Any) -> dict[str, Any]:
        """recompute and recompute_every of indices into `levels`."""
        table = np.array(self.levels, dtype=np.int64)
        return {"recompute": table[level, 0], "recompute_every": table[level, 1]}

    @property
    def savings(self) -> Columns:
        """Combinations of recompute, recompute_every and offload that the run allows, as codes."""
        return self._table("savings", 0)

    def _savings(self, _: int) -> Columns:
        memory = self.run.memory
        if self.on_xla:
            return columns_of(("recompute", "recompute_every", "offload"), [(*level, 0) for level in self.levels])
        open_ = [0, 2] if self.hardware.device == "cpu" else [0, 1, 2]  # cores compute where "cpu" would put things
        offload = [OFFLOAD.index(memory.offload)] if memory.offload != _MEMORY.offload else open_
        if self.run.optimizer.traits.no_offload:
            offload = [place for place in offload if not place]
        if memory.offload_path is not None:
            offload = [place for place in offload if place == OFFLOAD.index("nvme")]
        rows = [(*level, place) for level in self.levels for place in offload]
        return columns_of(("recompute", "recompute_every", "offload"), rows)

    def _micro_batches(self, replicas: int) -> Columns:
        share, given = self.run.batch // replicas, self.run.train.micro_batch
        sizes = divisors(share) if given is None else ([given] if share % given == 0 else [])
        return columns_of(("micro_batch",), [(size,) for size in sizes])

    def _experts(self, ranks: int) -> Columns:
        model, moe = self.run.model, self.run.model.moe
        pairs = [(1, 1)]
        shared = moe is not None and model.is_builtin and model.dense_layers < model.layers
        if moe is not None and shared and self.run.optimizer.sync_every == 1:
            pairs = [
                (expert, slices)
                for expert in divisors(ranks)
                for slices in divisors(ranks // expert)
                if (expert == slices == 1) or (moe.experts % expert == 0 and not leaves_empty_part(moe.ffn, slices))
            ]
        if self.on_xla:
            pairs = [pair for pair in pairs if self.takes(expert=pair[0]) and self.takes(expert_tensor=pair[1])]
        pairs = [pair for pair in pairs if self._may("expert", pair[0]) and self._may("expert_tensor", pair[1])]
        return columns_of(("expert", "expert_tensor"), pairs)

    def _orders(self, pipeline: int) -> Columns:
        given = self.run.layout
        if pipeline == 1 or given.schedule_file is not None:  # how a file's stages lie is known when it is read
            return columns_of(("schedule", "stages"), [(SCHEDULES.index("1f1b"), 1)] if self._pipeline_legal(pipeline) else [])
        most = self.run.model.layers // pipeline
        rows = [
            (SCHEDULES.index(kind), stages)
            for kind in SCHEDULES
            for stages in ((FIXED_STAGES[kind],) if kind in FIXED_STAGES else range(1, most + 1))
            if stages <= most and self._may("schedule", kind) and self._stages_may(kind, stages)
        ]
        return columns_of(("schedule", "stages"), rows)

    def _spreads(self, replicas: int) -> Columns:
        given, apart = self.run.layout, self.run.optimizer.sync_every > 1
        rows = [
            (replicas // shard, shard, zero)
            for shard in self._free("shard", divisors(replicas))
            if replicas % shard == 0 and given.data in (None, replicas // shard) and not (apart and replicas // shard == 1)
            for zero in ((1, 2, 3) if shard > 1 else (3,))
            if self._may("zero", zero)
        ]
        return columns_of(("data", "shard", "zero"), rows)

    def _tensor_legal(self, tensor: int) -> bool:
        model = self.run.model
        if not model.is_builtin:  # only what the run file says was tried
            return tensor == self.run.layout.tensor and self.gpus % tensor == 0
        if tensor == 1:
            return True
        shared = model.moe.shared * model.moe.ffn if model.moe is not None and model.moe.shared else None
        sizes = (model.hidden, model.vocab, shared)
        empty = any(size is not None and leaves_empty_part(size, tensor) for size in sizes)
        return self.gpus % tensor == 0 and model.heads % tensor == 0 and not empty

    def _methods(self, tensor: int, context: int) -> list[int]:
        """Context-parallel methods that this many ranks of a sequence allow; with one rank there is nothing to choose."""
        model, length = self.run.model, self.run.train.sequence_length
        if context == 1:
            return [METHODS.index(self.run.layout.context_method)]
        if model.whole_sequences is not None or not model.is_builtin:
            return []
        legal = [method for method in METHODS if length % (context * (1 if method == "ulysses" else 2)) == 0]
        if (model.heads // tensor) % context:
            legal = [method for method in legal if method != "ulysses"]
        if self.on_xla:  # a method that the run file leaves open is the engine's own
            legal = [method for method in legal if self.takes(context=context, context_method=method)]
        return [METHODS.index(method) for method in legal if self._may("context_method", method)]

    def _sequence(self, tensor: int, context: int) -> list[int]:
        model, given = self.run.model, self.run.layout.sequence
        if tensor == 1:
            return [] if given else [0]
        even = self.run.train.sequence_length % (tensor * context) == 0
        if not model.is_builtin:  # only what the run file says was tried
            return [int(given)] if even or not given else []
        whole = even or model.moe is None
        return [int(on) for on in (False, True) if self._may("sequence", on) and (even if on else whole)]

    def _pipeline_legal(self, pipeline: int) -> bool:
        model, given = self.run.model, self.run.layout
        if pipeline == 1:
            return given.schedule == _DEFAULT.schedule and given.stages is None and given.schedule_file is None
        if self.on_xla and not self.takes(pipeline=pipeline):
            return False
        return pipeline <= model.layers and not model.mtp_depth and model.is_builtin

    def takes(self, **layout: Any) -> bool:
        """Whether the XLA engine has these keys of [layout]."""
        return engine_takes(replace(self.run, engine=Engine(name="xla")), **layout)

    def _free(self, name: str, values: Iterable[int]) -> list[int]:
        """The given value of a layout key, or all of these values."""
        given = getattr(self.run.layout, name)
        return [given] if self.exact or given != getattr(_DEFAULT, name) else list(values)

    def _may(self, name: str, value: object) -> bool:
        """Whether a layout key is open, or given with this value."""
        given = getattr(self.run.layout, name)
        return given == value or (not self.exact and given == getattr(_DEFAULT, name))

    def _stages_may(self, kind: str, stages: int) -> bool:
        given = self.run.layout.stages
        return stages == (given or default_stages(kind)) if self.exact else given in (None, stages)

    def _table(self, dimension: Dimension, key: int) -> Columns:
        if (dimension, key) not in self._tables:
            self._tables[dimension, key] = getattr(self, f"_{dimension}")(key)
        return self._tables[dimension, key]


def space(run: Run, hardware: Hardware, gpus: int | None = None) -> Space:
    """The space of the whole cluster, or of this many of its devices."""
    return Space(run, hardware, hardware.gpus if gpus is None else gpus)


def given_space(run: Run, hardware: Hardware) -> Space:
    """The space of the run file's own layout, with as many replicas as fit on the cluster where `data` is not given."""
    layout = run.layout
    if layout.data is None:
        others = replace(layout, data=1).ranks
        most = max(1, hardware.gpus // others)
        data = next((n for n in range(most, 0, -1) if run.batch % (n * layout.shard) == 0), 1)
        layout = replace(layout, data=data)
    return Space(replace(run, layout=layout), hardware, layout.ranks, exact=True)


def all_columns(layouts: Space) -> Columns:
    """All candidates at once: for given layouts, and for tests of the search."""
    return layouts.joined(layouts.degrees(), *DIMENSIONS)


def engine_of(run: Run, hardware: Hardware) -> Literal["torch", "xla"]:
    """What computes the run there: nothing but XLA has programs for TPUs."""
    return "xla" if hardware.device == "tpu" else run.engine.name


def compute_of(run: Run, hardware: Hardware) -> str:
    """The run's number format, with the default filled in."""
    return run.precision.compute or ("fp32" if hardware.device == "cpu" else "bf16")


def at(column: Any, row: int) -> Any:
    """The value of one row; a column may be one value for all rows."""
    return column[row] if np.ndim(column) else column


def layout_columns(layouts: Sequence[Layout], **others: Sequence[int]) -> Columns:
    """The columns of these layouts, and further columns."""
    values: dict[str, Sequence[int]] = {name: [getattr(layout, name) or 1 for layout in layouts] for name in DEGREES}
    values |= {
        "sequence_parallel": [int(layout.sequence) for layout in layouts],
        "method": [METHODS.index(layout.context_method) for layout in layouts],
        "schedule": [SCHEDULES.index(layout.schedule) for layout in layouts],
        "stages": [layout.stages_per_rank if layout.pipeline > 1 else 1 for layout in layouts],
    }
    return {name: np.array(column, dtype=np.int64) for name, column in (values | others).items()}


def layout_of(run: Run, jobs: JobTable, row: int) -> Layout:
    """The layout of one job as the run file would write it, without defaults."""

    def code(name: str) -> int:
        return int(at(getattr(jobs, name), row))

    schedule = cast(Schedule, SCHEDULES[code("schedule")])
    pipelined = code("pipeline") > 1 and run.layout.schedule_file is None
    degrees: dict[str, Any] = {name: code(name) for name in DEGREES}
    return Layout(
        **degrees,
        sequence=bool(code("sequence_parallel")),
        context_method=cast(Literal["ring", "gather", "ulysses"], METHODS[code("method")]),
        schedule=schedule if pipelined else _DEFAULT.schedule,
        schedule_file=run.layout.schedule_file,
        stages=code("stages") if pipelined and code("stages") != default_stages(schedule) else None,
        stage_split=run.layout.stage_split,
    )


def kept_scores(run: Run, hardware: Hardware) -> int:
    """What attention keeps of the scores, by the kernel that is selected. In 16 bits, NVIDIA's GPUs since Ampere need no mask between
    documents or for a window. Hopper and later have a fused kernel for masks and grouped heads alike; older GPUs have one for either, and none for
    both at once or for grouped heads in fp32. No kernel caps scores. The XLA engine has kernels for TPUs and GPUs, and keeps tables on CPUs."""
    if engine_of(run, hardware) == "xla":
        return 2 if hardware.device == "cpu" or run.model.attention_cap is not None else 0
    if run.model.attention_cap is not None:
        return 3
    model, half = run.model, compute_of(run, hardware) != "fp32"
    without = half and hardware.device == "cuda" and not hardware.gpu.key.startswith(_MASKED)
    limited = model.window is not None and model.window < run.train.sequence_length
    masked = (run.data.document_mask and not without) or (limited and not (without and run.data.document_mask))
    grouped = model.mla is None and model.kv != model.heads
    fused = hardware.device != "cuda" or (half and hardware.gpu.key.startswith(_HOPPER))
    if not fused and grouped and (masked or not half or hardware.family.startswith("v100")):
        return 2
    return int(masked)


def _fp8_share(run: Run) -> float:
    """Of the blocks, that compute in fp8 where the run does."""
    numbers = run.fp8_blocks
    return 1.0 if numbers is None else sum(number < run.model.layers for number in numbers) / run.model.layers


def row_count(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def pick(columns: Columns, index: Any) -> Columns:
    """Some of the rows."""
    return {name: column[index] for name, column in columns.items()}


def stack(parts: Sequence[Columns]) -> Columns:
    """The rows of all parts."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def columns_of(names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> Columns:
    """Columns from rows."""
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(names))
    return {name: np.ascontiguousarray(table[:, place]) for place, name in enumerate(names)}


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`; 1 where `most` is less."""
    return next(n for n in range(max(1, min(number, most)), 0, -1) if number % n == 0)
