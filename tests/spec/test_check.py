"""Problems between keys: one table of conflicts with the sentence's value, limit and remedy, and the places they are told at."""

import re
from dataclasses import replace
from typing import Any

import pytest

from phalanx.spec.check import check, findings
from phalanx.spec.errors import RunError
from phalanx.spec.keys import find_key, is_table
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.model import Mla, ModelSpec, Moe, RopeScaling
from phalanx.spec.run import Checkpoint, Cluster, Data, Lora, Memory, MixedSource, Optimizer, Precision, Resilience, Run, Train

BASE = Run(train=Train(batch=8, steps=10, sequence_length=64))


def train(**keys: object) -> Run:
    return replace(BASE, train=Train(**({"batch": 8, "steps": 10, "sequence_length": 64} | keys)))


def model(**keys: object) -> Run:
    return replace(BASE, model=ModelSpec(**keys))


def layout(run: Run = BASE, **keys: Any) -> Run:
    return replace(run, layout=Layout(**keys))


def optimizer(**keys: object) -> Run:
    return replace(BASE, optimizer=Optimizer(**keys))


def moe(run: Run = BASE, **keys: object) -> Run:
    return replace(run, model=replace(run.model, moe=Moe(**({"experts": 8, "active": 2, "ffn": 64} | keys))))


def mla(run: Run = BASE, **keys: object) -> Run:
    return replace(run, model=replace(run.model, mla=Mla(**({"kv_rank": 16} | keys))))


def data(**keys: object) -> Run:
    return replace(BASE, data=Data(**keys))


def mix(*sources: MixedSource, **keys: object) -> Run:
    return data(mix=sources, **keys)


WIKI, CODE = MixedSource(name="wiki", paths=("a.jsonl",)), MixedSource(name="code", source="stdlib")

CONFLICTS = {
    "no batch": (train(batch=None), ["neither train.batch nor train.batch_tokens", "train.batch = 8"]),
    "two batches": (train(batch_tokens=64), ["train.batch = 8 and train.batch_tokens = 64", "remove one"]),
    "broken sequence": (
        train(batch=None, batch_tokens=100),
        ["train.batch_tokens = 100", "train.sequence_length = 64", "take 64 or 128"],
    ),
    "part of a sequence": (train(batch=None, batch_tokens=10), ["train.batch_tokens = 10", "take 64."]),
    "nothing to go back to": (
        replace(BASE, resilience=Resilience(rollback_after=3)),
        ["resilience.rollback_after = 3", "checkpoint.every is not given", "checkpoint.every = 100"],
    ),
    "going back without checkpoints": (
        replace(BASE, resilience=Resilience(rollback_after=3), checkpoint=Checkpoint(save=False, every=5)),
        ["resilience.rollback_after = 3 returns to a checkpoint", "checkpoint.save = false saves none", "remove one"],
    ),
    "exporting nothing": (
        replace(BASE, checkpoint=Checkpoint(save=False, export_hf=True)),
        ["checkpoint.export_hf = true exports checkpoints", "checkpoint.save = false saves none", "remove one"],
    ),
    "going back too late": (
        replace(BASE, resilience=Resilience(rollback_after=3, max_skipped=2), checkpoint=Checkpoint(every=5)),
        ["resilience.rollback_after = 3", "after 3 bad steps", "at most resilience.max_skipped = 2"],
    ),
    "spares of one node": (
        replace(BASE, resilience=Resilience(spares=1)),
        ["resilience.spares = 1 of cluster.nodes = 1", "remove it, or raise cluster.nodes to at least 2"],
    ),
    "nothing but spares": (
        replace(BASE, cluster=Cluster(nodes=3), resilience=Resilience(spares=4)),
        ["resilience.spares = 4 of cluster.nodes = 3", "set it to at most 2, or raise cluster.nodes to at least 5"],
    ),
    "no duration": (train(steps=None), ["neither train.steps nor train.tokens", "train.steps = 1000"]),
    "two durations": (train(tokens=512), ["train.steps = 10 and train.tokens = 512", "remove one"]),
    "replicas": (
        layout(train(batch=30), data=8),
        ["train.batch = 30", "8 replicas", "set train.batch to 24 or 32", "layout.data to 6 or 10"],
    ),
    "replicas by tokens": (
        layout(train(batch=None, batch_tokens=30 * 64), data=8),
        ["train.batch_tokens = 1920 (30 sequences)", "set train.batch_tokens to 1536 or 2048"],
    ),
    "more replicas than sequences": (layout(data=9), ["train.batch = 8", "set train.batch to 9, or layout.data to 8."]),
    "absurd batch": (layout(train(batch=2**61 - 1), data=8), ["8 replicas", "or layout.data to 1 or 2305843009213693951"]),
    "micro-batch": (train(micro_batch=3), ["train.micro_batch = 3", "8 sequences", "1, 2, 4 or 8"]),
    "micro-batch of a replica": (
        layout(train(micro_batch=8), data=2),
        ["train.micro_batch = 8", "4 sequences that each replica", "1, 2 or 4"],
    ),
    "micro-batch of many": (
        train(batch=5040, micro_batch=11),
        ["train.micro_batch = 11", "set it to 10 or 12, or remove it"],
    ),
    "key heads": (model(heads=8, kv_heads=3), ["model.kv_heads = 3", "model.heads = 8", "2 or 4"]),
    "heads": (model(dim=100, heads=8), ["model.heads = 8", "model.dim = 100", "5 or 10", "model.head_dim"]),
    "odd head": (model(head_dim=33), ["model.head_dim = 33 is odd", "take 32 or 34"]),
    "odd derived head": (model(dim=60, heads=4), ["model.dim / model.heads = 15 is odd", "take 14 or 16"]),
    "learned positions": (
        model(positions="learned", context=32),
        ["train.sequence_length = 64", "model.context = 32", "at most 32", "enlarge model.context"],
    ),
    "scaling of learned positions": (
        model(positions="learned", rope_scaling=RopeScaling(factor=8.0)),
        ["model.rope_scaling", 'model.positions = "learned"', 'set model.positions to "rope"'],
    ),
    "scaling upside down": (
        model(rope_scaling=RopeScaling(factor=8.0, low_freq_factor=4.0)),
        ["low_freq_factor = 4.0", "high_freq_factor = 4.0", "lower the one or raise the other"],
    ),
    "vocabulary": (model(vocab=256), ["model.vocab = 256", "257 tokens", "at least 257"]),
    "decay": (
        optimizer(schedule="wsd", warmup_steps=4, decay_steps=7),
        ["optimizer.warmup_steps + optimizer.decay_steps = 11", "10 steps", "at most 6"],
    ),
    "decay of another schedule": (
        optimizer(decay_steps=2),
        ["optimizer.decay_steps = 2", 'the schedule is "cosine"', 'set optimizer.schedule to "wsd"'],
    ),
    "evaluation of nothing": (
        replace(train(eval_every=5), data=Data(eval_fraction=0.0)),
        ["train.eval_every = 5", "data.eval_fraction = 0", "data.eval_fraction = 0.01"],
    ),
    "tensor and heads": (layout(tensor=3), ["layout.tensor = 3", "model.heads = 4", "2 or 4"]),
    "tensor and ffn": (layout(model(ffn=5), tensor=4), ["layout.tensor = 4", "model.ffn = 5", "at most 3"]),
    "zero without shards": (
        layout(zero=2, data=4),
        ["layout.zero = 2", "layout.shard = 1", "layout.shard = 4 and layout.data = 1"],
    ),
    "sequence without tensor": (layout(sequence=True), ["layout.sequence = true", "layout.tensor = 1"]),
    "ulysses and heads": (
        layout(context=8, context_method="ulysses"),
        ['layout.context_method = "ulysses"', "4 heads", "layout.context = 8", "set layout.context to 4", '"ring"'],
    ),
    "schedule without pipeline": (layout(schedule="zbv"), ['layout.schedule = "zbv"', "layout.pipeline = 1"]),
    "stages and schedule": (layout(pipeline=2, stages=2), ["layout.stages = 2", '"1f1b"', "interleaved-1f1b"]),
    "stages without layers": (
        layout(pipeline=3, schedule="zbv"),
        ["layout.pipeline = 3 with 2 stages each", "model.layers = 4", "at most 2"],
    ),
    "ahead and pipeline": (
        layout(model(mtp_depth=1), pipeline=2),
        ["layout.pipeline = 2", "model.mtp_depth = 1", "layout.pipeline = 1 or model.mtp_depth = 0"],
    ),
    "experts of a dense model": (layout(expert=2), ["layout.expert = 2", "has none", "[model.moe]"]),
    "uneven experts": (layout(moe(), expert=3), ["layout.expert = 3", "model.moe.experts = 8", "2 or 4"]),
    "experts and ranks": (
        layout(moe(), data=2, expert=4),
        ["layout.expert × layout.expert_tensor = 4", "2 ranks", "layout.expert to 2"],
    ),
    "local steps alone": (
        layout(replace(BASE, optimizer=replace(BASE.optimizer, sync_every=4)), data=1),
        ["optimizer.sync_every = 4", "layout.data = 1"],
    ),
    "yarn upside down": (
        model(rope_scaling=RopeScaling(factor=8.0, kind="yarn", beta_fast=1.0, low_freq_factor=9.0)),
        ["beta_fast = 1.0", "beta_slow = 1.0", "raise the one or lower the other"],
    ),
    "too many experts for a token": (moe(active=9), ["model.moe.active = 9", "model.moe.experts = 8", "at most 8"]),
    "uneven groups": (moe(groups=3, router="sigmoid"), ["model.moe.groups = 3", "model.moe.experts = 8", "2 or 4"]),
    "more active groups than groups": (
        moe(groups=4, active_groups=5, router="sigmoid"),
        ["model.moe.active_groups = 5", "model.moe.groups = 4", "at most 4"],
    ),
    "more experts than the groups hold": (
        moe(groups=4, active=3, router="sigmoid"),
        ["model.moe.active = 3", "the 2 experts of model.moe.active_groups = 1", "at most 2"],
    ),
    "more dense layers than layers": (moe(dense_layers=5), ["model.moe.dense_layers = 5", "model.layers = 4", "at most 4"]),
    "experts of gelu": (moe(model(activation="gelu")), ['model.activation = "gelu"', 'set it to "swiglu"']),
    "experts with biases": (moe(model(bias=True)), ["model.bias = true", "[model.moe]", "remove one"]),
    "latent attention without rotation": (mla(model(positions="learned")), ['model.positions = "learned"', "[model.mla]"]),
    "odd latent rotation": (mla(rope_dim=7), ["model.mla.rope_dim = 7 is odd", "take 6 or 8"]),
    "latent attention with key heads": (mla(model(kv_heads=2)), ["model.kv_heads = 2", "[model.mla]", "remove one"]),
    "latent attention with head widths": (mla(model(head_dim=32)), ["model.head_dim = 32", "[model.mla]"]),
    "latent attention with normed heads": (mla(model(qk_norm=True)), ["model.qk_norm = true", "[model.mla]"]),
    "latent attention with biases": (mla(model(bias=True)), ["model.bias = true", "[model.mla]"]),
    "tensor and latent heads": (layout(mla(), tensor=3), ["layout.tensor = 3", "model.heads = 4", "2 or 4"]),
    "module without a class": (model(module="mymodel"), ['model.module = "mymodel"', '"package.module:Class"']),
    "module that is a path": (model(module="my/model.py:Mine"), ['model.module = "my/model.py:Mine"', "does not name a class"]),
    "options of nobody": (model(options=(("x", 1),)), ["model.options.x", "model.module is not given", "set model.module"]),
    "module and ahead": (model(module="a.b:C", mtp_depth=2), ["model.mtp_depth = 2", "remove model.mtp_depth"]),
    "preset and module": (
        model(preset="tiny-dense", module="a.b:C"),
        ['model.module = "a.b:C" and model.preset = "tiny-dense"', "remove one"],
    ),
    "source beside a mixture": (
        mix(WIKI, CODE, paths=("b.txt",)),
        ['data.paths = ["b.txt"]', "[data.mix.wiki]", "data.mix.wiki.paths, or remove it"],
    ),
    "epochs beside a mixture": (mix(WIKI, epochs=2.0), ["data.epochs = 2.0", "data.mix.wiki.epochs"]),
    "half the weights": (
        mix(replace(WIKI, weight=1.0), CODE),
        ["data.mix.code has no weight", "data.mix.wiki has one", "give data.mix.code.weight"],
    ),
    "template for a source of a mixture": (
        mix(replace(WIKI, template="plain"), CODE),
        ["data.mix.wiki.template is set", 'data.mix.wiki.source = "jsonl" (inferred from its paths)', 'to "chat"'],
    ),
    "source of a mixture without paths": (
        mix(CODE, MixedSource(name="x", source="parquet")),
        ['data.mix.x.source = "parquet" but data.mix.x.paths names nothing', "at least one file, folder or glob"],
    ),
    "two kinds in one source": (
        data(paths=("a.txt", "b.jsonl.gz")),
        ["data.paths names files of 2 kinds (text, jsonl)", 'data.source = "text"', "[data.mix.NAME]"],
    ),
    "paths that nobody reads": (data(source="stdlib", paths=("a",)), ["data.paths is set", '"stdlib"', '"text", "jsonl"']),
    "documents that nobody reads": (data(source="stdlib", documents=("a",)), ["data.documents is set", '"memory"']),
    "no paths": (data(source="text"), ['data.source = "text" but data.paths names nothing']),
    "no conversations": (data(source="chat"), ['data.source = "chat" but data.paths names nothing']),
    "no dataset": (data(source="hf"), ['data.source = "hf" but data.paths names nothing']),
    "no documents": (data(source="memory"), ["data.documents is empty", "at least one text"]),
    "empty documents": (data(documents=("", "")), ["data.documents holds 2 empty texts"]),
    "field of a text": (data(paths=("a.txt",), field="body"), ["data.field", '"jsonl", "parquet", "hf" or "chat"']),
    "field of nothing": (data(field="body"), ["data.field", 'data.source = "stdlib" (it has no paths)']),
    "split of a file": (data(paths=("a.jsonl",), split="test"), ["data.split", 'set data.source to "hf"']),
    "configuration of a file": (data(paths=("a.jsonl",), config="en"), ["data.config", '"hf"']),
    "stream of a file": (data(paths=("a.jsonl",), streaming=True), ["data.streaming", '"hf"']),
    "question in a file": (data(paths=("a.jsonl",), prompt_field="q"), ["data.prompt_field", '"chat"']),
    "answer in a file": (data(paths=("a.jsonl",), answer_field="a"), ["data.answer_field", '"chat"']),
    "best fit of one text": (
        data(packing="best-fit", document_mask=False),
        ["data.document_mask = false", 'data.packing = "best-fit"', 'set data.packing to "stream"'],
    ),
    "tokenizer that is not there": (data(tokenizer="gone"), ['data.tokenizer = "gone" does not exist', "tokenizer.json"]),
    "pipeline": (layout(pipeline=5), ["layout.pipeline = 5", "model.layers = 4", "at most 4"]),
    "schedule beside a file": (
        layout(pipeline=2, schedule="zbv", schedule_file=__file__),
        ['layout.schedule = "zbv" and layout.schedule_file', "remove one of them"],
    ),
    "stages beside a file": (
        layout(pipeline=2, stages=3, schedule_file=__file__),
        ["layout.stages = 3 and layout.schedule_file", "remove one of them"],
    ),
    "experts that no block has": (
        layout(moe(dense_layers=4), data=2, expert_tensor=2),
        ["layout.expert_tensor = 2", "model.moe.dense_layers = 4", "model.layers = 4", "at most 3"],
    ),
    "experts of one's own module": (
        layout(moe(model(module="mypackage.my_model:Mine")), data=2, expert_tensor=2),
        ["layout.expert_tensor = 2", "model.module", "set layout.expert_tensor = 1"],
    ),
    "schedule that is not there": (
        layout(pipeline=2, schedule_file="gone.csv"),
        ['layout.schedule_file = "gone.csv" is not a file', "--csv", "layout.schedule."],
    ),
    "graphs of messages": (
        replace(layout(tensor=2), memory=Memory(cuda_graphs=True)),
        ["memory.cuda_graphs = true", "layout.tensor = 2", "remove memory.cuda_graphs"],
    ),
    "graphs of experts": (
        replace(moe(), memory=Memory(cuda_graphs=True)),
        ["memory.cuda_graphs = true", "experts", "remove memory.cuda_graphs"],
    ),
    "graphs and recomputation": (
        replace(layout(), memory=Memory(cuda_graphs=True, recompute="full")),
        ["memory.cuda_graphs = true", 'memory.recompute = "full"', "remove memory.cuda_graphs"],
    ),
    "blocks in bf16 without fp8": (
        replace(BASE, precision=Precision(compute="bf16", bf16_first=1)),
        ["precision.bf16_first = 1", 'precision.compute = "bf16"', "remove precision.bf16_first"],
    ),
    "no block for fp8": (
        replace(BASE, precision=Precision(compute="fp8", bf16_first=2, bf16_last=2)),
        ["precision.bf16_first = 2", "the model has 4 of them", 'precision.compute = "bf16"'],
    ),
    "experts in fp8 without fp8": (
        replace(moe(), precision=Precision(compute="bf16", fp8_experts=True)),
        ["precision.fp8_experts = true", 'precision.compute = "bf16"', "remove precision.fp8_experts"],
    ),
    "no experts for fp8": (
        replace(BASE, precision=Precision(compute="fp8", fp8_experts=True)),
        ["precision.fp8_experts = true", "this model has none", "remove precision.fp8_experts"],
    ),
    "experts in fp8 with adapters": (
        replace(moe(), precision=Precision(compute="fp8", fp8_experts=True), lora=Lora(rank=4)),
        ["precision.fp8_experts = true", "lora.rank = 4", "remove precision.fp8_experts"],
    ),
    "gathering in fp8 without fp8": (
        replace(BASE, precision=Precision(compute="bf16", fp8_gather=True)),
        ["precision.fp8_gather = true", 'precision.compute = "bf16"', "remove precision.fp8_gather"],
    ),
    "gathering in fp8 by rows": (
        replace(BASE, precision=Precision(compute="fp8", fp8_scaling="row", fp8_gather=True)),
        ["precision.fp8_gather = true", 'precision.fp8_scaling = "row"', 'precision.fp8_scaling = "tensor"'],
    ),
    "gathering in fp8 without gathering": (
        replace(layout(shard=2, zero=1), precision=Precision(compute="fp8", fp8_gather=True)),
        ["precision.fp8_gather = true", "layout.zero = 1", "layout.zero = 3"],
    ),
    "context": (layout(context=3), ["train.sequence_length = 64", "2 × layout.context = 6", "60 or 66"]),
}


@pytest.mark.parametrize(("run", "parts"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict(run: Run, parts: list[str]) -> None:
    (finding,) = findings(run)
    for part in parts:
        assert part in finding.sentence
    assert finding.sentence.endswith(".")
    assert not re.search(r"[.?!] +[A-Z]", finding.sentence)
    assert all(find_key(path) or is_table(path) for path in finding.keys)
    assert finding.sentence in check(run)


@pytest.mark.parametrize(
    "run",
    [
        BASE,
        train(batch=None, batch_tokens=512),
        train(steps=None, tokens=1),
        layout(data=4),
        layout(train(micro_batch=2), data=4),
        model(heads=8, kv_heads=2),
        model(dim=100, heads=8, head_dim=32),
        model(dim=60, heads=4, positions="learned"),
        model(positions="learned", context=64),
        model(vocab=257),
        optimizer(warmup_steps=9),
        optimizer(warmup_steps=100),
        optimizer(schedule="wsd", warmup_steps=4, decay_steps=6),
        optimizer(schedule="wsd"),
        replace(BASE, data=Data(eval_fraction=0.0)),
        moe(),
        moe(active=8, dense_layers=4, shared=2),
        moe(router="sigmoid", groups=4, active_groups=2, active=4),
        moe(groups=4, active_groups=2),
        mla(),
        mla(moe(), q_rank=8),
        mla(model(dim=100, heads=3)),
        model(module="mypackage.my_model:Mine", options=(("x", 1), ("y", "z")), heads=3),
        model(rope_scaling=RopeScaling(factor=8.0, kind="yarn", low_freq_factor=9.0)),
        replace(BASE, cluster=Cluster(nodes=3), resilience=Resilience(spares=2, restarts=0)),
        mix(WIKI, CODE, packing="best-fit", tokenizer="byte"),
        mix(replace(WIKI, weight=1.0, epochs=2.0, seed=3), replace(CODE, weight=2.0)),
        data(documents=("text",)),
        data(source="chat", paths=("a.jsonl", "b.txt"), template="plain", field="turns", prompt_field="q"),
        data(source="hf", paths=("name",), split="test", config="en", streaming=True, field="body"),
        data(paths=("there/is/nothing/here",), field="body", template="x"),
    ],
)
def test_legal(run: Run) -> None:
    assert check(run) == []


def test_check_finds_everything_at_once() -> None:
    run = replace(BASE, train=Train(), model=ModelSpec(vocab=3, heads=3))
    assert len(check(run)) == 4


def test_check_reads_values_of_runs_made_in_python() -> None:
    run = Run(
        model=ModelSpec(heads=0),
        train=Train(batch=8, steps="ten"),
        optimizer=Optimizer(name="sgd"),
    )  # type: ignore[arg-type]
    heads, steps, name = check(run)
    assert heads == "model.heads = 0 is out of range: it must be at least 1."
    assert steps.startswith('train.steps = "ten" is a string')
    assert name.startswith('optimizer.name = "sgd" is unknown')
    (missing,) = check(replace(BASE, train=replace(BASE.train, seed=None)))  # type: ignore[arg-type]
    assert missing.startswith("train.seed = None is a Python NoneType")


def test_names_that_no_run_file_can_write() -> None:
    (unnamed,) = check(mix(MixedSource(source="stdlib")))
    assert unnamed == "'' is no name for an entry of data.mix: use letters, digits, _ and - only."
    (twice,) = check(mix(CODE, CODE))
    assert twice == 'data.mix has 2 entries of the name "code": rename all but one.'
    (dotted,) = check(model(module="a.b:C", options=(("x.y", 1),)))
    assert dotted.startswith("'x.y' is no name for an entry of model.options")
    (listed,) = check(model(module="a.b:C", options=(("x", [1]),)))
    assert listed.startswith("model.options.x = [1] is a list, but a plain value")
    (weight,) = check(mix(replace(CODE, weight=0.0)))
    assert weight.startswith("data.mix.code.weight = 0.0 is out of range")


def test_a_mixtures_problems_are_told_at_their_lines() -> None:
    text = "train.batch = 8\ntrain.steps = 1\n[data]\nseed = 3\n[data.mix.a]\nsource = 'text'\nweight = 1\n[data.mix.b]\n"
    assert places(text) == ["run.toml:4", "run.toml:6", "run.toml:8"]
    assert places(text, "data.mix.a.paths=x", "data.mix.b.field=y") == ["run.toml:4", "run.toml:8", "command line"]


def places(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RunError) as caught:
        loads(text, name="run.toml", overrides=overrides)
    return [problem.partition(": ")[0] for problem in caught.value.problems]


def test_a_conflict_is_told_at_its_likeliest_key() -> None:
    text = "[train]\nsteps = 5\nbatch = 8\nmicro_batch = 3\n[optimizer]\nschedule = 'wsd'\nwarmup_steps = 3\ndecay_steps = 3\n"
    assert places(text) == ["run.toml:4", "run.toml:8"]
    assert places(text, "train.micro_batch=8", "train.steps=4") == ["command line"]


def test_a_missing_key_is_told_at_its_table() -> None:
    assert places("\n[train]\nbatch = 8\n") == ["run.toml:2"]
    assert places("train.batch = 8\n") == ["run.toml:1"]
    assert places("") == ["run.toml", "run.toml"]


def test_what_rests_on_another_mistake_is_not_told() -> None:
    assert places("[train]\nbatch = 8\nsteps = 'x'\n") == ["run.toml:3"]
    assert places("[trian]\nbatch = 8\nsteps = 9\n") == ["run.toml:1"]
    assert places("[train]\nbatch = 8\nsteps = 5\n[model]\nheads = 'x'\ndim = 3\n[watch]\nlog_every = 0\n") == [
        "run.toml:5",
        "run.toml:8",
    ]
