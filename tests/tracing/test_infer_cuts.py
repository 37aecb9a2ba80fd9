from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import cut_threads
import hf_zoo
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.decoder import AXES, Decoder
from phalanx.parallel.inferred_tensor import stays_whole
from phalanx.spec.cut_plan import CutPlan, Enter, Leave
from phalanx.spec.errors import RunError
from phalanx.spec.model import Mla, ModelSpec, Moe
from phalanx.tracing import cut_search
from phalanx.tracing.axes_text import axes_text
from phalanx.tracing.infer_cuts import infer, part_graphs

GPT = ModelSpec(
    vocab=42, dim=24, layers=2, heads=4, ffn=40, context=32,
    norm="layer", activation="gelu", positions="learned", bias=True, tied=True,
)  # fmt: skip
LLAMA = ModelSpec(vocab=42, dim=24, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=40, context=32)
LATENT = Mla(kv_rank=14, q_rank=18, nope_dim=6, rope_dim=4, value_dim=7)
DEEPSEEK = replace(
    LLAMA, kv_heads=None, head_dim=None, layers=3, mla=LATENT,
    moe=Moe(experts=6, active=2, ffn=20, shared=2, dense_layers=1, router="sigmoid", groups=3, active_groups=2, scale=2.5),
)  # fmt: skip
RECURRENT = {
    "embed.weight": ("vocab", "model"),
    "blocks.*.into.weight": ("inner", "model"),
    "blocks.*.out.weight": ("model", "inner"),
    "*norm.weight": ("model",),
}
"""A table for the example of the documentation, as it could be written by hand."""
FAMILIES = {
    "gpt": GPT,
    "llama": LLAMA,
    "qwen": replace(LLAMA, qk_norm=True, head_dim=10, tied=True),
    "biased": replace(LLAMA, bias=True),
    "mixtral": replace(LLAMA, moe=Moe(experts=5, active=2, ffn=36)),
    "deepseek": DEEPSEEK,
    "latent, queries without a rank": replace(DEEPSEEK, mla=replace(LATENT, q_rank=None), moe=None),
}
CUT = ("heads", "kv_heads", "ffn", "vocab")


def decoder(spec: ModelSpec) -> Decoder:
    """On meta. Routed experts are parallelized by `dispatch`, never by tensor parallelism: something traceable stands for them."""
    with torch.device("meta"):
        model = Decoder(spec)
    module: Any
    for module in model.modules():
        if hasattr(module, "dispatch"):
            module.dispatch = lambda x_TD, chosen_TK, weights_TK, experts: x_TD * weights_TK.sum(-1, keepdim=True)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_the_decoder_is_inferred(family: str) -> None:
    model = decoder(FAMILIES[family])
    plan = infer(model, 2)
    for name, _ in model.named_parameters():
        dims = next(dims for pattern, dims in AXES.items() if fnmatchcase(name, pattern))
        known = [(dim, (role,)) for dim, role in enumerate(dims) if role in CUT and "expert" not in dims]
        cut = plan.params.get(name)
        assert ([(cut.dim, tuple(s.role for s in cut.segments))] if cut else []) == known, name
    assert not plan.rewritten and not plan.divided
    assert all(count <= 2 for count in plan.sums.values())


class Block(nn.Module):
    """Norms over all heads are not here: the plainest layer with a fused matrix."""

    def __init__(self, dim: int, act: Callable[[Tensor], Tensor] = F.silu, wide: int = 48):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.into = nn.Linear(dim, 2 * wide, bias=False)
        self.out = nn.Linear(wide, dim, bias=True)
        self.act, self.wide = act, wide

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.into(self.norm(x)).chunk(2, -1)
        return x + self.out(self.act(gate) * up)


class Sized(Block):
    """Reads its width."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.into(self.norm(x)).split((self.wide, self.wide), -1)
        return x + self.out(self.act(gate) * up)


class Literal(Block):
    """Has its width in its code, and a mean over it: no attribute helps, so that its graph is rewritten."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.into(self.norm(x)).split((41, 41), -1)
        y = self.act(gate) * up
        return x + self.out(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-3).expand(-1, -1, 41))


class Small(nn.Module):
    def __init__(
        self, *, twice: bool = False, tied: bool = False, rows: int = 50, wide: int = 48, kind: type[Block] = Block,
        act: Callable[[Tensor], Tensor] = F.silu,
    ):  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(rows, 20)
        self.blocks = nn.ModuleList(kind(20, act, wide) for _ in range(3))
        self.head = nn.Linear(20, rows, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.twice = twice

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        x = self.embed(tokens_BS)
        for block in self.blocks:
            x = block(x)
            if self.twice:
                x = block(x)
        return self.head(x)


def compare(model: nn.Module, plan: CutPlan, tokens: Tensor, targets: Tensor) -> None:
    """Loss and gradients on every rank against the whole module."""
    logits = model(tokens, cut_threads.positions(tokens))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    losses, gradients, sums = cut_threads.losses(model, plan, tokens, targets)
    assert sums == sum(plan.sums.values())
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for rank, (own, found) in enumerate(zip(losses, gradients, strict=True)):
        assert abs(float(own - loss.detach())) <= 1e-5 * float(loss.detach())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                whole = parameter.grad
                due = cut_threads.own_part(whole, plan.params[name], rank, plan.ranks) if name in plan.params else whole
                scale = max(float(due.abs().max()), 0.01 * largest)
                assert float((found[name] - due).abs().max()) <= 1e-4 * scale, (name, rank)


def small_batch(rows: int = 50) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(rows, (2, 14), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_module_on_two_ranks(tied: bool) -> None:
    torch.manual_seed(0)
    model = Small(tied=tied)
    plan = infer(model, 2)
    assert plan.params["blocks.2.into.weight"].sizes == (48, 48)
    assert plan.params["embed.weight"].segments[0].role == "vocab"
    assert Leave("blocks.1.out") in plan.leaves and Enter("blocks.1.into", 0) in plan.enters
    compare(model, plan, *small_batch())


def test_a_layer_that_is_called_twice_is_cut_as_ever() -> None:
    torch.manual_seed(0)
    model = Small(twice=True)
    plan = infer(model, 2)
    assert "blocks.0.into.weight" in plan.params and plan.sums["blocks.0"] == 2
    compare(model, plan, *small_batch())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("kind", "tied"), [(Block, False), (Sized, True), (Literal, False)])
def test_uneven_sizes_leave_the_last_rank_a_smaller_part(kind: type[Block], tied: bool, ranks: int) -> None:
    """A vocabulary of 51 and two segments of 41, in one matrix."""
    torch.manual_seed(0)
    model = Small(rows=51, wide=41, kind=kind, tied=tied)
    plan = infer(model, ranks)
    assert plan.params["embed.weight"].sizes == (51,) and plan.params["blocks.0.into.weight"].sizes == (41, 41)
    assert plan.params["blocks.0.out.weight"].dim == 1
    parts = -(-41 // ranks), 41 - (ranks - 1) * -(-41 // ranks)
    assert {(one.value, one.last) for one in plan.divided} == ({parts} if kind is Sized else set())
    assert plan.rewritten == (tuple(f"blocks.{n}" for n in range(3)) if kind is Literal else ())
    compare(model, plan, *small_batch(51))


def test_a_size_that_leaves_a_rank_without_a_part_stays_whole_and_says_why() -> None:
    """Parts of two, two and none."""
    plan = infer(Small(rows=4, wide=4), 3)
    assert not plan.params
    assert "its 4 rows would leave one of 3 ranks without any" in plan.whole["embed.weight"]
    assert "4 + 4 rows would leave one of 3 ranks without any" in plan.whole["blocks.0.into.weight"]


def test_heads_that_the_ranks_cannot_share_stay_whole_and_say_why() -> None:
    torch.manual_seed(0)
    model = Decoder(replace(LLAMA, vocab=44, ffn=41))
    plan = infer(model, 3)
    name = "blocks.0.attention.query.weight"
    assert name not in plan.params and plan.params["blocks.1.mlp.gate.weight"].sizes == (41,)
    assert "4 groups (heads) of 8 elements cannot be divided evenly by 3, only by 2 or 4" in plan.whole[name]
    assert f"such as {name}: 4 groups (heads)" in stays_whole(plan)
    assert stays_whole(infer(model, 2)) == ""
    compare(model, plan, *small_batch(44))


class Fused(nn.Module):
    """A layer that computes with its own weights: attention and feed-forward in two matrices, and its residual connection too."""

    def __init__(self, dim: int, ffn: int):
        super().__init__()
        self.norm, self.sizes = nn.LayerNorm(dim), (48, 48, 48, ffn, ffn)
        self.into, self.out = nn.Linear(dim, 144 + 2 * ffn), nn.Linear(48 + ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate, up = self.into(self.norm(x)).split(self.sizes, -1)
        q, k, v = (each.unflatten(-1, (4, 12)).transpose(1, 2) for each in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat((seen, F.silu(gate) * up), -1))


def test_layers_of_two_kinds_that_need_rewritten_graphs() -> None:
    torch.manual_seed(0)
    model = Small()
    model.blocks = nn.ModuleList((Fused(20, 32), Fused(20, 40)))
    plan = infer(model, 2)
    assert plan.rewritten == ("blocks.0", "blocks.1")
    assert plan.params["blocks.1.into.weight"].sizes == (48, 48, 48, 40, 40) and plan.sums["blocks.1"] == 1
    compare(model, plan, *small_batch())


class Biased(nn.Module):
    """Scores of which a matrix computes the mask: alone it could be divided by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Linear(20, 4)
        self.out = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, 5)).transpose(1, 2)
        bias = self.mask(x).transpose(1, 2)[:, :, None].expand(-1, -1, x.shape[1], -1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        bias = bias.masked_fill(later, -1e9)
        return x + self.out(F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2))


def test_a_mask_that_could_be_cut_alone_ends_the_search() -> None:
    model = Small()
    model.blocks = nn.ModuleList((Biased(), Biased()))
    plan = infer(model, 2)
    assert "blocks.0.mask.weight" not in plan.params and "a mask only some are cut" in plan.whole["blocks.0.mask.weight"]


def test_a_search_of_too_many_choices_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small()
    assert infer(model, 2).uncompared == 0
    for limit in ("_TRIES", "_OPERATIONS"):
        with monkeypatch.context() as patch:
            patch.setattr(cut_search, limit, 1)
            plan = infer(model, 2)
        assert plan.params and plan.uncompared > 0
        assert f"# {plan.uncompared} choices were not compared" in axes_text(plan, model)
    monkeypatch.setattr(cut_search, "_WALKS", 1)
    with pytest.raises(RunError, match="was not found after 1 walks over its graph"):
        infer(model, 2)


def test_the_same_plan_every_time() -> None:
    assert infer(Small(), 2) == infer(Small(), 2)


def test_more_ranks_than_key_value_heads() -> None:
    """Each rank has all keys and values, computes a part of their gradient, and attends to those that its queries read."""
    torch.manual_seed(0)
    model = Decoder(replace(LLAMA, vocab=44, heads=8, kv_heads=2))
    plan = infer(model, 4)
    assert plan.selects == ("blocks.0.attention", "blocks.1.attention")
    assert plan.params["blocks.0.attention.query.weight"].segments[0].role == "heads"
    assert "blocks.0.attention.key.weight" not in plan.params
    assert {"blocks.0.attention.key.weight", "blocks.1.attention.value.weight"} <= plan.partial
    compare(model, plan, *small_batch(44))


# A table by hand.


def recurrent() -> tuple[nn.Module, dict[str, tuple[Any, ...]]]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import own_model

    with torch.device("meta"):
        return own_model.Recurrent(ModelSpec(vocab=64, dim=48, layers=3)), RECURRENT


def test_the_recurrence_of_the_documentation_is_cut() -> None:
    model, _ = recurrent()
    plan = infer(model, 2)
    assert plan.params["blocks.1.into.weight"].sizes == (48, 48, 48)
    assert plan.params["blocks.1.out.weight"].dim == 1
    assert plan.sums == {"blocks.0": 1, "blocks.1": 1, "blocks.2": 1}


def test_a_fused_matrix_named_as_one_run_is_refused() -> None:
    model, table = recurrent()
    wrong = table | {"blocks.*.into.weight": ("ffn", "model"), "blocks.*.out.weight": ("model", "ffn")}
    with pytest.raises(RunError, match=re.escape("blocks.0.into.weight")) as refused:
        infer(model, 2, given=wrong)
    assert '"ffn"' in str(refused.value) and "segments of 48, 48, 48" in str(refused.value)


def test_a_table_with_segments_is_taken_and_other_names_stay_whole() -> None:
    model, table = recurrent()
    fused = (("ffn", 48), ("ffn", 48), ("ffn", 48))
    right = table | {"blocks.*.into.weight": (fused, "model"), "blocks.*.out.weight": ("model", "ffn")}
    assert set(infer(model, 2, given=right).params) == {
        f"blocks.{n}.{part}.weight" for n in range(3) for part in ("into", "out")
    }
    assert not infer(model, 2, given=table).params


def test_a_dimension_that_cannot_be_cut_as_named_is_refused() -> None:
    model = Small()
    table = {"*.norm.weight": ("model",), "*.into.weight": ("model", "ffn"), "*": ("whole",)}
    table |= {"embed.weight": ("vocab", "model"), "head.weight": ("vocab", "model"), "*.out.weight": ("model", "inner")}
    ordered = {
        name: table[name] for name in ("embed.weight", "head.weight", "*.norm.weight", "*.into.weight", "*.out.weight", "*")
    }
    with pytest.raises(RunError, match=re.escape("dimension 1 of blocks.0.into.weight")):
        infer(model, 2, given=ordered)


def test_the_tables_of_the_decoder_hold_against_its_graph() -> None:
    model = decoder(LLAMA)
    assert infer(model, 2, given=AXES).params == infer(model, 2).params


# What cannot be traced.


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import os

        return x * float(os.environ.get("FACTOR", "1"))


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda x: F.silu(x) if x.sum() > 0 else x, r"blocks.0 \(Block\) decides by the values of tensors"),
        (lambda x: Twice.apply(x), "Twice, a torch.autograd.Function of its own"),
        (nn.Dropout(0.1), r"blocks.0.act draws random numbers \(dropout 0.1\)"),
        (lambda x: F.dropout(x, 0.25), r"blocks.0 draws random numbers \(dropout 0.25\)"),
        (lambda x: x + torch.rand_like(x), r"blocks.0 draws random numbers \(rand_like\)"),
        (Reads(), r"blocks.0.act \(Reads\) reads environment variables"),
    ],
)
def test_a_module_without_one_graph_is_refused(act: Callable[[Tensor], Tensor], sentence: str) -> None:
    with pytest.raises(RunError, match=sentence):
        infer(Small(act=act), 2)


class Adapts(nn.Module):
    """Replaces its table at its first call, as BigBird does with its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = x.new_zeros(x.shape[-1]) + torch.arange(x.shape[-2]).sum()
        return x + self.table


def test_a_module_that_changes_at_its_first_call_is_refused() -> None:
    with pytest.raises(RunError, match=r"Small has no one graph: its blocks.0.act .* layout.tensor = 1"):
        infer(Small(act=Adapts()), 2)


def test_an_operation_without_a_rule_keeps_its_matrices_whole() -> None:
    plan = infer(Small(act=lambda x: torch.linalg.matrix_exp(x[..., None, None]).squeeze(-1).squeeze(-1)), 2)
    assert "linalg_matrix_exp" in plan.whole["blocks.0.into.weight"] or "matrix_exp" in plan.whole["blocks.0.into.weight"]


# Hugging Face.

QUICK = ("llama", "phi3", "gpt_neox", "olmo2", "gpt2", "mixtral", "bloom")
MORE = {"olmo2": 2, "olmo3": 2, "olmoe": 2, "qwen2_moe": 1, "deepseek_v3": 1}
"""Sums beyond two in a layer: for norms over heads, for shared experts."""
WHOLE = ("opt", "gpt_oss")
"""OPT is refused. The layers of gpt-oss stay whole here, where its attention is not behind the seam that takes sinks; as it is trained, it is divided
(`tests/parallel/test_inferred_families`)."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in hf_zoo.ZOO if n not in WHOLE]
)
def test_a_family_on_two_ranks_equals_one(name: str) -> None:
    model = hf_zoo.make(name, "cpu")
    plan = infer(model, 2)
    layers = [count for layer, count in plan.sums.items() if layer]
    assert layers and max(layers) <= 2 + MORE.get(name, 0)
    compare(model, plan, *hf_zoo.batch())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "mixtral", "gpt2"])
def test_a_family_on_four_ranks_equals_one(name: str) -> None:
    model = hf_zoo.make(name, "cpu")
    compare(model, infer(model, 4), *hf_zoo.batch())


def test_a_model_that_draws_whether_to_run_a_layer_is_refused() -> None:
    with pytest.raises(RunError, match="decides by the values of tensors"):
        infer(hf_zoo.make("opt"), 2)


@pytest.mark.slow
def test_a_model_of_seventy_billion_parameters_needs_no_memory() -> None:
    resource = pytest.importorskip("resource")
    model = hf_zoo.make(
        "llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, vocab_size=128256,
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = infer(model, 8)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 4 * 2**30
    assert len(plan.params) == 80 * 7 + 2 and plan.sums["model.model.layers.79"] == 2


class Masked(nn.Module):
    """Reads a second tensor only where there is one, and states its number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(20, 48), nn.Linear(48, 20)

    def forward(self, x: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        y = self.into(x).view(*x.shape[:2], 4, 12)
        y = y if documents_BS is None else y * (documents_BS == 0)[..., None, None]
        return x + self.out(F.silu(y).flatten(2))


class WithDocuments(Small):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Masked(), Masked()))

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        x = self.embed(tokens_BS)
        for block in self.blocks:
            x = block(x, documents_BS)
        return self.head(x)


def test_a_rewritten_graph_does_not_ignore_a_tensor_that_it_was_not_traced_with() -> None:
    model = WithDocuments()
    plan = infer(model, 2)
    assert plan.rewritten == ("blocks.0", "blocks.1")
    forward = part_graphs(model, plan)["blocks.0"].forward(model.blocks[0], 0, lambda x: x, lambda x: x)
    with pytest.raises(RunError, match=r"blocks.0 is called with a tensor .argument 1. that it did not get"):
        forward(torch.zeros(2, 5, 20), torch.zeros(2, 5, dtype=torch.int64))


class Holder:
    def __init__(self, mask: Tensor | None):
        self.mask = mask


class WithHolder(WithDocuments):
    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        x = self.embed(tokens_BS)
        for block in self.blocks:
            x = block(x, Holder(documents_BS).mask) if documents_BS is not None else block(x, documents_BS=Kept(None))
        return self.head(x)


class Kept(Holder):
    """Compares like a tensor of zeros, and holds documents."""

    def __eq__(self, other: object) -> Any:
        return torch.ones(1, 1, dtype=torch.bool)

    __hash__ = None  # type: ignore[assignment]


def test_a_module_that_is_given_an_object_is_not_rewritten() -> None:
    plan = infer(WithHolder(), 2)
    assert not plan.rewritten and "is given a Kept" in plan.whole["blocks.0.into.weight"]
