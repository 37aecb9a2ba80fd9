"""The cases that are verified: a run made small enough for ranks of one machine, and the same run for one process. A small model keeps the
parts of its family (grouped queries, latent attention, experts, …). Its sizes are as odd as the layout allows, because odd
sizes reveal sharding errors."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from phalanx.data.dataset import open_dataset
from phalanx.launch.model_check import measure
from phalanx.planning.planner import plan_run
from phalanx.recovery.relayout import with_valid_settings
from phalanx.spec.adapted_layers import adapted_layers, is_target, linear_layers
from phalanx.spec.check import check
from phalanx.spec.engine import Engine
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout, Schedule
from phalanx.spec.model import Mla, ModelSpec, Moe
from phalanx.spec.plan import Gpu, Machine, Plan, Size
from phalanx.spec.run import Checkpoint, Cluster, Data, Memory, Optimizer, Precision, Run, Source, Train
from phalanx.spec.sources import kind

TINY = 2_000_000
"""Number of parameters up to which a model is verified unchanged."""
_VOCABULARY = 257
_LAYERS = 5
_FFN = 43
_WINDOW = 5
Gpus = tuple[Gpu, ...]
"""The GPUs of this machine that ranks are on; none: ranks are on CPU."""
_INIT_STD = 0.1  # larger weights than usual make attention and routing depend on their inputs, so that errors in them show


def gpus_of(machine: Machine, device: str) -> Gpus:
    """The GPUs of a machine that ranks on such a device use. Raises RunError if there are none."""
    if device not in ("cpu", "cuda"):
        raise RunError(f'--device {device} is not known: use "cpu" or "cuda".')
    if device == "cuda" and not machine.gpus:
        raise RunError(
            "--device cuda needs a GPU, but this machine has none that nvidia-smi lists; remove it to verify on CPU ranks, or run "
            "`phalanx doctor` to see why."
        )
    return machine.gpus if device == "cuda" else ()


def shrink(spec: ModelSpec, layout: Layout, length: int) -> ModelSpec:
    """A small model of the family of `spec`, for a layout and a sequence length."""
    heads, kv = _heads(spec, layout)
    head = 8 if heads <= 8 else 4
    stages = layout.pipeline * layout.stages_per_rank if layout.pipeline > 1 else 1
    layers = max(_LAYERS, stages + 1)  # enough for every stage, and below a different number per stage
    small = replace(
        spec,
        preset=None,
        from_=None,
        layers=layers + 1 if stages > 1 and layers % stages == 0 else layers,
        heads=heads,
        kv_heads=None if spec.kv_heads is None else kv,
        dim=heads * head,
        ffn=_FFN,
        vocab=_VOCABULARY,
        context=length,
        mtp_depth=min(spec.mtp_depth, 2),
        init_std=max(spec.init_std, _INIT_STD),
    )
    if spec.head_dim is not None:  # keeps attention wider or narrower than the residual stream
        wider = spec.heads * spec.head > spec.dim
        small = replace(small, head_dim=head, dim=head * (max(1, heads - 2) if wider else heads))
    if spec.window is not None:  # shorter than a rank's part of the sequence, and some blocks of either kind
        small = replace(small, window=min(spec.window, _WINDOW), window_from=min(spec.window_from, 1))
        small = replace(small, global_every=None if spec.global_every is None else min(spec.global_every, 3))
    if spec.rope_scaling is not None:  # so short that only some frequencies of these heads are scaled
        small = replace(small, rope_scaling=replace(spec.rope_scaling, original_context=16))
    if spec.mla is not None:
        ranks = Mla(kv_rank=16, q_rank=None if spec.mla.q_rank is None else 12, nope_dim=8, rope_dim=4, value_dim=6)
        small = replace(small, mla=ranks)
    return replace(small, moe=None if spec.moe is None else _experts(spec.moe, layout))


def _heads(spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """Query and key heads: the ratio of the family, in the fewest heads that the layout divides."""
    unit = layout.tensor * (layout.context if layout.context_method == "ulysses" else 1)
    if spec.mla is not None or spec.kv == spec.heads:
        heads = 3 * unit
        return (heads, heads)
    ratio = min(8, max(2, spec.heads // spec.kv))
    ratio = 6 if ratio == 7 else ratio  # 7, as of Qwen2.5, would take 28 heads on 4 ranks
    kv = min(spec.kv, 2)
    return math.lcm(kv * ratio, unit), kv


def _experts(moe: Moe, layout: Layout) -> Moe:
    groups = min(moe.groups, 4)
    each = math.lcm(groups, layout.expert)
    experts = each * max(2, -(-6 // each))
    active_groups = min(moe.active_groups, groups)
    return replace(
        moe,
        experts=experts,
        groups=groups,
        active_groups=active_groups,
        active=min(moe.active, 3, experts // groups * active_groups),
        ffn=12 * layout.expert_tensor,
        shared=min(moe.shared, 1),
        dense_layers=min(moe.dense_layers, 1),
    )


def fit_layout(layout: Layout, most: int) -> tuple[Layout, list[str]]:
    """The layout reduced to at most `most` ranks, and notes on the reduced degrees. Degrees stay above 1 as long as possible."""
    degrees: dict[str, Any] = {name: getattr(layout, name) or 1 for name in ("data", "shard", "context", "tensor", "pipeline")}
    for least in (2, 1):
        for name in degrees:
            while math.prod(degrees.values()) > most and degrees[name] > least:
                degrees[name] = max(least, degrees[name] // _smallest_factor(degrees[name]))
    fitted = _fit_experts(with_valid_settings(layout, replace(layout, **degrees)))
    before, after = asdict(replace(layout, data=layout.data or 1)), asdict(fitted)
    names = (*degrees, "expert", "expert_tensor", "schedule_file")
    shrunk = [f"layout.{name} {before[name]} → {after[name]}" for name in names if after[name] != before[name]]
    if not shrunk:
        return fitted, []
    return fitted, [f"The layout has {layout.ranks} ranks and this case {fitted.ranks}, at most {most}: {', '.join(shrunk)}."]


def _fit_experts(layout: Layout) -> Layout:
    """Reduces the expert degrees until they divide the ranks of a stage."""
    expert, tensor = layout.expert, layout.expert_tensor
    while layout.ranks // layout.pipeline % (expert * tensor):
        if expert > 1 and (expert >= tensor or tensor == 1):
            expert //= _smallest_factor(expert)
        else:
            tensor //= _smallest_factor(tensor)
    return replace(layout, expert=expert, expert_tensor=tensor)


def _smallest_factor(number: int) -> int:
    return next((factor for factor in range(2, math.isqrt(number) + 1) if number % factor == 0), max(number, 1))


MAX_RANKS = 8
"""Default maximum of ranks, which a laptop can run."""
EPS = 1e-4
"""Adam's eps. With the usual 1e-8, a gradient close to zero becomes a full step in a direction that rounding chose: gradients
that agree to 6e-7 then give parameters 4.5e-4 apart after 3 steps. With 1e-4 they stay 2e-6 apart."""
COARSE_EPS = 1e-2
"""Adam's eps for 16 bits and fewer, where gradients agree to 1e-2 at best: biases start at zero and would differ by a full step
after the first."""
_LEARNING_RATE = 1e-3
"""Learning rate of all cases: a step moves parameters by far more than the tolerance, so that a wrong step shows, and by so little
that the next step does not amplify rounding."""
_TOKENS = 4096  # tokens of a batch up to which it is kept
_LENGTH = 24
_MACHINE = Machine(host="proof", cpu="any", cores=64, memory=1 << 50)  # any layout fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run to verify, and its reference."""

    run: Run
    plan: Plan
    reference: Run
    """The same run for one process, without memory-saving techniques and not compiled."""
    reference_plan: Plan
    steps: int
    gpus: int = 0
    """GPUs that the ranks are on; 0: they are on CPU."""
    folder: str = "."
    """Folder for files of offloading."""
    notes: tuple[str, ...] = ()
    """Differences from the given run, a sentence each."""

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def numbers(self) -> str:
        """The coarsest number format of the run: a key of `tolerance.ROUNDING`."""
        precision, numbers = self.run.precision, str(self.plan.compute)
        return "bf16" if numbers == "fp32" and "bf16" in (precision.reduce, precision.optimizer) else numbers

    @property
    def coarsest(self) -> str:
        """What determines the tolerance: a key of `tolerance.TOLERANCES`."""
        return "experts" if self.run.model.moe is not None and self.numbers != "fp32" else self.numbers


def make_case(run: Run, *, ranks: int | None = None, steps: int = 8, gpus: Gpus = ()) -> Case:
    """The case of a run with at most `ranks` ranks and `steps` optimizer steps, on CPU or on these GPUs. Raises RunError if the run is
    invalid."""
    notes: list[str] = []
    layout = _layout(run, ranks, notes)
    cluster = Cluster(device="cuda" if gpus else "cpu", threads=1)
    run = replace(run, layout=layout, cluster=cluster, checkpoint=Checkpoint())
    run = _adapters(_data(_sizes(run, notes), notes), notes)
    run = replace(run, optimizer=_optimizer(run, notes), precision=_precision(run, notes))
    run = replace(
        run, train=replace(run.train, steps=steps, tokens=None, eval_every=None, sample_every=None, sample_prompts=())
    )
    if problems := check(run):
        raise RunError(problems)
    open_dataset(run.data, run.train.sequence_length, run.train.seed)  # reports problems with the text before ranks start
    reference = replace(run, layout=Layout(data=1), memory=Memory(), engine=Engine())
    size = measure(run, trace=False)  # that of the reference too
    _, reference_plan = _planned(reference, gpus, size)
    run, plan = _planned(run, gpus, size)
    notes += _gpu_notes(run, gpus)
    return Case(
        run=run,
        plan=plan,
        reference=reference,
        reference_plan=reference_plan,
        steps=steps,
        gpus=min(len(gpus), layout.ranks),
        notes=tuple(notes),
    )


def _planned(run: Run, gpus: Gpus, size: Size | None) -> tuple[Run, Plan]:
    """The run as it would train on as many devices as it has ranks, and its plan. On GPUs the plan resolves what [memory] leaves open."""
    ranks = run.layout.ranks
    machine = replace(_MACHINE, gpus=tuple(gpus[rank % len(gpus)] for rank in range(ranks)) if gpus else ())
    planned = plan_run(run, machine, ranks, size)
    return planned.run if gpus else run, planned.plan


def _gpu_notes(run: Run, gpus: Gpus) -> list[str]:
    """How ranks on GPUs differ from those of a real run."""
    notes, ranks = [], run.layout.ranks
    if gpus and ranks > len(gpus):
        which = "one GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        notes.append(
            f"{ranks} ranks share {which}: gloo carries their messages through host memory, because NCCL needs a GPU per rank."
        )
    if gpus and run.memory.compile:
        notes.append("Blocks of the ranks are compiled; those of the reference are not.")
    return notes


def _layout(run: Run, ranks: int | None, notes: list[str]) -> Layout:
    layout, most = run.layout, ranks or MAX_RANKS
    if layout.data is None:
        wanted = max(1, most // layout.ranks) if ranks else (2 if layout.ranks == 1 else 1)
        layout = replace(layout, data=wanted)
        notes.append(f"layout.data is not set; the case uses {wanted}.")
    fitted, reduced = fit_layout(layout, most)
    notes += reduced
    return fitted


def _sizes(run: Run, notes: list[str]) -> Run:
    """Replaces model and batch by small ones that the layout divides, unless they are small already."""
    layout, model = run.layout, run.model
    tiny = not model.is_builtin or model.parameters() <= TINY
    unit = 2 * layout.context * layout.tensor  # two pieces per context rank, each split over the tensor ranks
    stages = layout.pipeline * layout.stages_per_rank if layout.pipeline > 1 else 2
    micro = run.train.micro_batch or (1 if run.batch % (2 * stages * layout.replicas) else 2)
    given = replace(run, model=replace(model, from_=None), train=replace(run.train, micro_batch=micro))
    if tiny and run.batch_tokens <= _TOKENS and not check(given):
        return given
    micro = min(micro, 2)
    smallest = layout.replicas * micro * stages
    length = -(-min(_LENGTH, run.train.sequence_length) // unit) * unit
    if not tiny:
        small = shrink(model, layout, length)
        notes.append(
            f"A model of the same family with {small.parameters():,} parameters replaces the {model.parameters():,} of the run."
        )
        model = small
    notes.append(f"Batches have {smallest} sequences of {length} tokens.")
    train = replace(run.train, sequence_length=length, batch=smallest, batch_tokens=None, micro_batch=micro)
    return replace(run, model=replace(model, from_=None), train=train)


def _adapters(run: Run, notes: list[str]) -> Run:
    """LoRA adapters that suit the small model: its matrices may be too small for their rank, or lack some of the targets."""
    lora, rank = run.lora, run.lora.rank
    if rank is None or not run.model.is_builtin:
        return run
    targets = tuple(target for target in lora.targets if any(is_target(name, (target,)) for name in linear_layers(run.model)))
    if targets != lora.targets:
        notes.append(f"Adapters are on {', '.join(targets) or 'all linear layers'}: the small model lacks other targets.")
    lora = replace(lora, targets=targets)
    smallest = min(min(shape[-2:]) for shape in adapted_layers(run.model, lora).values())
    if rank > smallest:
        notes.append(f"lora.rank is {smallest} instead of {rank}, for matrices as small as these.")
        lora = replace(lora, rank=smallest, alpha=lora.scale * smallest)
    return replace(run, lora=lora)


def _data(run: Run, notes: list[str]) -> Run:
    data = replace(run.data, eval_fraction=0.0)
    if run.train.objective == "dpo":
        if not data.documents:
            notes.append("Random pairs of texts replace its preferences.")
            data = Data(source="preferences", documents=random_pairs(run.train.seed), eval_fraction=0.0)
        return replace(run, data=data)
    is_local = kind(data) in ("stdlib", "memory", "text") and not any("://" in path for path in data.paths)
    if data.tokenizer == "byte" and is_local and not data.mix:
        return replace(run, data=data)
    notes.append("Its text is not local or has another tokenizer: random documents replace it.")
    plain = {name: getattr(Source(), name) for name in ("paths", "split", "config", "streaming", "template", "epochs", "field")}
    data = replace(
        data, source="memory", documents=random_documents(run.train.seed), tokenizer="byte", end_token=None, mix=(), **plain
    )
    return replace(run, data=data)


def random_documents(seed: int, count: int = 300) -> tuple[str, ...]:
    """Random texts of uneven lengths. Most windows hold several, so that masks and ignored targets are exercised."""
    dice = random.Random(seed)
    return tuple("".join(chr(dice.randrange(32, 127)) for _ in range(dice.choice([2, 5, 9, 17, 60]))) for _ in range(count))


def random_pairs(seed: int, count: int = 120) -> tuple[str, ...]:
    """Chosen and rejected texts in turn, of uneven lengths, so that some windows hold several pairs."""
    dice = random.Random(seed)
    lengths = [length for _ in range(count) for length in (dice.choice([2, 3, 5, 9]), dice.choice([2, 4, 7, 10]))]
    return tuple("".join(chr(dice.randrange(32, 127)) for _ in range(length)) for length in lengths)


def _optimizer(run: Run, notes: list[str]) -> Optimizer:
    given = run.optimizer
    eps = max(COARSE_EPS if _is_coarse(run) else EPS, given.eps)
    notes.append(
        f"The learning rate is {_LEARNING_RATE:g} from the first step on. optimizer.eps is {eps:g} instead of {given.eps:g}: "
        "with less, Adam turns rounding errors of tiny gradients into steps."
    )
    return replace(given, eps=eps, learning_rate=_LEARNING_RATE, warmup_steps=0, schedule="constant", decay_steps=None)


def _is_coarse(run: Run) -> bool:
    precision = run.precision
    compute = precision.compute or ("bf16" if run.cluster.device == "cuda" else "fp32")
    return compute != "fp32" or "bf16" in (precision.reduce, precision.optimizer)


def _precision(run: Run, notes: list[str]) -> Precision:
    """Newton–Schulz iterations in fp32 where everything else is. In bf16, a gradient that differs in its last bit may round to the
    neighboring bf16 number, and the iterations multiply small singular values by up to 485: gradients 1e-7 apart give parameters 1.6e-2
    apart after 8 steps, whatever the size of the difference. In fp32 they stay 2e-6 apart."""
    precision = run.precision
    if not run.optimizer.traits.newton_schulz or precision.newton_schulz == "fp32" or _is_coarse(run):
        return precision
    notes.append(
        'precision.newton_schulz is "fp32" instead of "bf16": in bf16, the iterations turn rounding errors of gradients into steps.'
    )
    return replace(precision, newton_schulz="fp32")


_DENSE = ModelSpec(dim=48, layers=5, heads=6, kv_heads=2, ffn=43, vocab=257, context=96, init_std=0.1)
_EXPERTS = Moe(experts=8, active=2, ffn=12, shared=1, dense_layers=1, bias_rate=0.01, balance_loss=0.01)
_GROUPED = Moe(
    experts=8, active=3, ffn=12, router="sigmoid", scale=2.5, groups=4, active_groups=2, bias_rate=0.01, balance_loss=0.001
)
MODELS = {
    "dense": _DENSE,
    "window": replace(_DENSE, window=7, global_every=3),
    "gpt": replace(_DENSE, kv_heads=None, norm="layer", activation="gelu", positions="learned", bias=True, tied=True),
    "moe": replace(_DENSE, qk_norm=True, moe=_EXPERTS),
    "mla": replace(
        _DENSE,
        kv_heads=None,
        mla=Mla(kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, value_dim=6),
        moe=replace(_GROUPED, dense_layers=1),
    ),
    "mla-dense": replace(_DENSE, kv_heads=None, tied=True, mla=Mla(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6)),
}
"""Models of odd sizes: 5 layers, 6 query heads and 2 key heads, a vocabulary of 257."""
_TRIES = 200  # per requested layout


def generate_layouts(run: Run, ranks: int, *, count: int = 40, seed: int = 0, gpus: Gpus = ()) -> list[Run]:
    """Draws `count` different valid runs for exactly `ranks` ranks, or fewer if there are not as many. They keep the precision and
    the optimizer of `run`. On GPUs their blocks are compiled only if `run` sets it: compiling takes far longer than the proof."""
    dice = random.Random(seed)
    base = replace(
        run,
        data=Data(source="memory", documents=random_documents(seed), eval_fraction=0.0),
        train=Train(batch=8, sequence_length=48, steps=8, seed=seed, clip=run.train.clip),
        memory=Memory(compile=bool(run.memory.compile) if gpus else None),
    )
    runs: dict[tuple[str, Layout], Run] = {}
    kinds = list(MODELS)
    for _ in range(_TRIES * count):
        if len(runs) == count:
            break
        kind = kinds[len(runs) % len(kinds)]  # equal shares, however few layouts of a kind are valid
        drawn = _draw(base, kind, ranks, dice, sum(layout.pipeline > 1 for _, layout in runs))
        if (kind, drawn.layout) not in runs and _is_valid(drawn, ranks, gpus):
            runs[kind, drawn.layout] = drawn
    return list(runs.values())


def _is_valid(run: Run, ranks: int, gpus: Gpus) -> bool:
    try:
        return make_case(run, ranks=ranks, gpus=gpus).layout.ranks == ranks
    except RunError:
        return False


def _draw(base: Run, kind: str, ranks: int, dice: random.Random, pipelines: int) -> Run:
    """`pipelines`: number of pipeline layouts so far. Schedules take turns, because few layouts allow some of them."""
    degrees: dict[str, Any] = dict(
        zip(("pipeline", "data", "shard", "context", "tensor"), dice.choice(list(_factored(ranks, 5))), strict=True)
    )
    model = MODELS[kind]
    layout = Layout(
        **degrees,
        zero=dice.choice([1, 2, 3]) if degrees["shard"] > 1 else 3,
        sequence=degrees["tensor"] > 1 and dice.random() < 0.5,
        context_method=dice.choice(["ring", "gather", "ulysses"]) if degrees["context"] > 1 else "ring",
        schedule=get_args(Schedule)[pipelines % len(get_args(Schedule))] if degrees["pipeline"] > 1 else "1f1b",
    )
    if model.moe:
        expert, slices, _ = dice.choice(list(_factored(ranks // layout.pipeline, 3)))
        layout = replace(layout, expert=expert, expert_tensor=slices)
    memory = replace(
        base.memory, recompute=dice.choice(["none", "none", "full", "selective"]), loss_chunk=dice.choice([None, None, 7, 64])
    )
    if memory.recompute != "none":
        memory = replace(memory, recompute_every=dice.choice([1, 2]))
    micro_batch = dice.choice([1, 2])
    return replace(base, model=model, layout=layout, memory=memory, train=replace(base.train, micro_batch=micro_batch))


def _factored(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            yield from ((factor, *rest) for rest in _factored(number // factor, parts - 1))
