"""Custom modules are counted as they are, and what a layout cannot cut is found before any rank starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from phalanx.models import custom
from phalanx.planning import planner
from phalanx.planning.machines.hardware import hardware
from phalanx.planning.request import PlanRequest
from phalanx.planning.search.search import judge
from phalanx.rehearsal.fake_gpu import RehearsalDevice, card
from phalanx.rehearsal.module_process import traced
from phalanx.rehearsal.rehearse import rehearsal_job, rehearse
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Machine, Size
from phalanx.spec.run import Run
from phalanx.worker.measure_process import fewest_replicas, measure

GPU = "a100-sxm-40gb"
HERE = Machine(host="here", cpu="a core", cores=4, memory=16 << 30)
MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn

AXES = {
    "embed.weight": ("vocab", "model"),
    "blocks.*.attention.out.weight": ("model", "heads"),
    "blocks.*.attention.*.weight": ("heads", "model"),
    "blocks.*.mlp.up.weight": ("ffn", "model"),
    "blocks.*.mlp.down.weight": ("model", "ffn"),
    "head.weight": ("vocab", "model"),
    "*norm.weight": ("model",),
    "tower.*.weight": ("whole", "model"),
}


class Attention(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(spec.dim, spec.dim, bias=False) for _ in range(4))
        # A rank of a tensor group has fewer heads: a module that insists on all of them cannot be cut.
        self.shape = (spec.heads if spec.option("whole_heads", False) else -1, spec.dim // spec.heads)

    def forward(self, x_BSD):
        q, k, v = (layer(x_BSD).unflatten(-1, self.shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.up, self.down = nn.Linear(spec.dim, 3 * spec.dim, bias=False), nn.Linear(3 * spec.dim, spec.dim, bias=False)

    def forward(self, x_BSD):
        return self.down(F.gelu(self.up(x_BSD)))


class Block(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(spec.dim), nn.RMSNorm(spec.dim)
        self.attention, self.mlp = Attention(spec), Mlp(spec)

    def forward(self, x_BSD):
        x_BSD = x_BSD + self.attention(self.first_norm(x_BSD))
        return x_BSD + self.mlp(self.second_norm(x_BSD))


class Model(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.embed = nn.Embedding(spec.rows, spec.dim)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm, self.head = nn.RMSNorm(spec.dim), nn.Linear(spec.dim, spec.rows, bias=False)

    def forward(self, tokens_BS, positions_BS, documents_BS=None):
        x_BSD = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD))


class Reading(Model):
    def forward(self, tokens_BS, positions_BS, documents_BS=None):
        assert len(tokens_BS.unique()) > 0
        return super().forward(tokens_BS, positions_BS)


class Plain(Model):
    # One layer, in no list.
    def __init__(self, spec):
        super().__init__(spec)
        layers, self.blocks = self.blocks, nn.Module()
        self.blocks.add_module("0", layers[0])

    def forward(self, tokens_BS, positions_BS, documents_BS=None):
        return self.head(self.norm(self.blocks.get_submodule("0")(self.embed(tokens_BS))))
"""
DIM, LAYERS, VOCAB, LENGTH = 512, 6, 8000, 512
PARAMETERS = 2 * VOCAB * DIM + LAYERS * (4 * DIM**2 + 6 * DIM**2 + 2 * DIM) + DIM


@pytest.fixture(scope="module", autouse=True)
def own_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("module")
    (folder / "own_decoder.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def run(*settings: str, name: str = "Model") -> Run:
    text = (
        f'[model]\nmodule = "own_decoder:{name}"\ndim = {DIM}\nlayers = {LAYERS}\nheads = 8\nvocab = {VOCAB}\n'
        f'[data]\ndocument_mask = false\n[train]\nbatch = 64\nsequence_length = {LENGTH}\nsteps = 10\n[cluster]\ngpu = "{GPU}"\n'
    )
    return loads(text, overrides=settings)


def trace(given: Run) -> Size:
    return traced(given, measure(given), "bf16", RehearsalDevice(card=card(GPU)))


@pytest.fixture(scope="module")
def sizes() -> dict[int, Size]:
    return {tensor: trace(run(f"layout.tensor={tensor}")) for tensor in (1, 2)}


def test_a_custom_module_is_counted_by_itself(sizes: dict[int, Size]) -> None:
    one, two = sizes[1], sizes[2]
    weights = PARAMETERS - VOCAB * DIM - DIM - LAYERS * 2 * DIM  # the embedding is looked up, norms are no products
    assert one.parameters == PARAMETERS and one.flops_per_token == 6 * weights
    # Matrix products, and attention: 4 products of the length and the width in the forward, 10 in the flash kernel's backward.
    assert one.traced_flops_per_token == pytest.approx(6 * weights + LAYERS * 14 * LENGTH * DIM)
    assert one.rank_parameters == PARAMETERS and (one.width, one.blocks) == (DIM, LAYERS)
    norms = DIM + LAYERS * 2 * DIM
    assert two.rank_parameters == (PARAMETERS - norms) // 2 + norms
    assert one.recomputed_activations is not None and one.activations is not None and two.activations is not None
    assert one.recomputed_activations < one.activations and two.activations < one.activations


@pytest.mark.parametrize(
    "settings",
    [
        ("layout.data=8",),
        ("layout.data=1", "layout.shard=8", "layout.zero=1"),
        ("layout.data=1", "layout.shard=8"),
        ("layout.data=4", "layout.tensor=2"),
        ("layout.data=8", "memory.recompute=full"),
    ],
)
def test_planned_memory_of_a_custom_module_equals_that_of_its_program(
    settings: tuple[str, ...], sizes: dict[int, Size]
) -> None:
    """The plan computes with one traced number per token; the rehearsal runs the program of this very layout."""
    given = run("train.micro_batch=8", "memory.offload=none", *settings)
    size = sizes[given.layout.tensor]
    judged = judge(replace(given, model=replace(given.model, measured=size)), hardware(given, None))
    job = rehearsal_job(given, HERE, size)
    peak = rehearse(job.run, job.plan, 0, job.device).peak
    assert judged.bytes - judged.memory["fixed"] == pytest.approx(peak, rel=0.1)


def test_sequence_parallelism_of_a_custom_module_keeps_less(sizes: dict[int, Size]) -> None:
    settings = "layout.data=4", "layout.tensor=2", "layout.sequence=true", "train.micro_batch=8", "memory.offload=none"
    given = run(*settings)
    size = trace(given)
    assert size.activations is not None and sizes[2].activations is not None and size.activations < sizes[2].activations
    report = planner.plan(PlanRequest(given, module_size=size))
    assert report.best.layout.sequence
    custom._plans.clear()  # a rehearsal of its own finds out how ranks divide the module
    judged = judge(replace(given, model=replace(given.model, measured=size)), hardware(given, None))
    job = rehearsal_job(given, HERE, size)
    peak = rehearse(job.run, job.plan, 0, job.device).peak
    assert judged.bytes - judged.memory["fixed"] == pytest.approx(peak, rel=0.1)


def test_plan_searches_what_a_custom_module_allows(sizes: dict[int, Size]) -> None:
    report = planner.plan(PlanRequest(run(), module_size=sizes[1]))
    tried = [report.best, *report.runners_up, *(other.candidate for other in report.alternatives if other.candidate)]
    assert all(found.layout.tensor == found.layout.pipeline == found.layout.context == 1 for found in tried)
    assert report.to_json()["model"]["parameters"] == PARAMETERS
    said = "\n".join(report.assumptions)
    assert f"{PARAMETERS:,} parameters" in said and "not known" in said and "decoder of the sizes in the run file" not in said
    cut = planner.plan(PlanRequest(run("layout.tensor=2"), module_size=sizes[2]))
    assert cut.best.layout.tensor == 2 and cut.best.split["tensor"] > 0


def test_a_cut_that_the_forward_does_not_allow_is_refused_in_one_sentence() -> None:
    given = run("layout.tensor=2", "model.options.whole_heads=true")
    with pytest.raises(RunError) as caught:
        trace(given)
    (sentence,) = caught.value.problems
    for part in ("own_decoder:Model", "layout.tensor = 2", "forward of blocks.0.attention", "[8, 64]", "set layout.tensor = 1"):
        assert part in sentence, sentence
    assert trace(run("model.options.whole_heads=true")).activations is not None, "one device computes it"


def test_a_module_that_cannot_be_traced_is_not_refused() -> None:
    size = trace(run(name="Reading"))
    assert size.activations is None and size.untraced is not None and "reads the values" in size.untraced
    assert size.parameters == PARAMETERS
    report = planner.plan(PlanRequest(run(name="Reading"), module_size=size))
    said = "\n".join(report.assumptions)
    assert "could not be traced" in said and "estimated from the number of parameters" in said
    assert report.to_json()["model"]["parameters"] == PARAMETERS


@pytest.mark.parametrize(
    ("settings", "name", "parts"),
    [
        (("layout.tensor=3", "layout.data=1"), "Model", ("layout.tensor = 3 does not divide model.heads = 8",)),
        (("memory.recompute=full",), "Plain", ('memory.recompute = "full"', "holds no list of layers")),
        (("memory.compile=true",), "Plain", ("memory.compile = true", "holds no list of layers")),
    ],
)
def test_what_ranks_would_refuse_is_refused_when_the_module_is_measured(
    settings: tuple[str, ...], name: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(RunError) as caught:
        measure(run(*settings, name=name))
    (sentence,) = caught.value.problems
    assert all(part in sentence for part in parts), sentence


def test_the_fewest_replicas_have_a_rank_for_each_part_of_the_experts() -> None:
    assert fewest_replicas(Layout(pipeline=2, expert=8)) == Layout(data=8, pipeline=2, expert=8)
    assert fewest_replicas(Layout(shard=4, expert=8)) == Layout(data=2, shard=4, expert=8)
    assert fewest_replicas(Layout(data=6, tensor=2)) == Layout(data=1, tensor=2)
