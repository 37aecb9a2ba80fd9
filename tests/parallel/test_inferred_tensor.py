"""A plan of cuts is applied to a module that knows nothing of it: the rank's part computes what the whole would."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gathering import wholes
from ranks import ALONE, run_ranks
from sharded import replicated
from torch import Tensor, nn

from phalanx.models.init import fill
from phalanx.parallel import inferred_tensor, tensor, vocab_parallel
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard, ShardedModel
from phalanx.spec.cut_plan import CutPlan, DividedAttribute, Enter, Leave, ParamCut, Segment
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.training.micro_batch import summed_loss

SPEC = ModelSpec(vocab=37, dim=12, layers=1, heads=4, kv_heads=2, init_std=0.3)
TOKENS = torch.randint(37, (2, 7), generator=torch.Generator().manual_seed(3))
HEADS, KV, WIDE, FFN = 4, 2, 3, 10


class Conv1D(nn.Module):
    """As in transformers: a linear layer whose weight is [inputs, outputs]."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.empty(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class Attention(nn.Module):
    """Reads its number of heads from a config that all modules share; positions come by name."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.dim, (HEADS + 2 * KV) * WIDE)
        self.out = nn.Linear(HEADS * WIDE, config.dim)
        self.temper = nn.Parameter(torch.empty(WIDE))
        self.attend = lambda q, k, v, **more: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, *, states: Tensor, shift: Tensor) -> Tensor:
        q, k = self.config.heads * WIDE, self.config.kv * WIDE
        parts = [x.unflatten(-1, (-1, WIDE)).transpose(1, 2) for x in self.qkv(states).split((q, k, k), -1)]
        y = self.attend(parts[0] * self.temper + shift, parts[1], parts[2], scope=None)
        return self.out(y.transpose(1, 2).flatten(2))


class Foreign(nn.Module):
    def __init__(self, spec: ModelSpec, kv: int = KV):
        super().__init__()
        self.spec = spec
        config = SimpleNamespace(dim=spec.dim, heads=HEADS, kv=kv)
        self.config = config
        self.words = nn.Embedding(spec.rows, spec.dim)
        self.attention = Attention(config)
        self.up, self.down = Conv1D(FFN, spec.dim), Conv1D(spec.dim, FFN)
        self.shift = nn.Parameter(torch.empty(WIDE))
        self.head = nn.Linear(spec.dim, spec.rows, bias=False)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        x = self.words(tokens_BS)
        x = x + self.attention(states=x.tanh(), shift=self.shift.sin())
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(x)


def one(role: str, size: int, dim: int = 0) -> ParamCut:
    return ParamCut(dim, (Segment(role, size),))


QKV = (Segment("heads", HEADS * WIDE), Segment("kv_heads", KV * WIDE), Segment("kv_heads", KV * WIDE))
PLAN = CutPlan(
    ranks=2,
    params={
        "words.weight": one("vocab", SPEC.rows),
        "head.weight": one("vocab", SPEC.rows),
        "attention.qkv.weight": ParamCut(0, QKV),
        "attention.qkv.bias": ParamCut(0, QKV),
        "attention.out.weight": one("heads", HEADS * WIDE, 1),
        "up.weight": one("ffn", FFN, 1),
        "up.bias": one("ffn", FFN),
        "down.weight": one("ffn", FFN),
    },
    partial=frozenset({"attention.temper"}),
    enters=(Enter("attention", "states"), Enter("attention", "shift"), Enter("up", 0), Enter("head", 0)),
    leaves=(Leave("attention.out"), Leave("down")),
    divided=(
        DividedAttribute("attention", "config.heads", HEADS // 2),
        DividedAttribute("attention", "config.kv", KV // 2),
    ),
)


def cut(model: nn.Module, mesh: Mesh, plan: CutPlan) -> dict[str, ParamShard]:
    shards = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    return inferred_tensor.split([model], shards, plan, mesh) if mesh.ranks > 1 else shards


def train(mesh: Mesh, plan: CutPlan) -> tuple[float, dict[str, Tensor], str]:
    with torch.device("meta"):
        model = Foreign(SPEC)
    shards = cut(model, mesh, plan)
    loss = vocab_parallel.swap([model], mesh.group("tensor", use="tensor"), chunk=None, sequence=False, loss=summed_loss)
    model.to_empty(device="cpu")
    held = [OwnedParam(name, parameter, shards[name]) for name, parameter in model.named_parameters()]
    with torch.no_grad():
        for param in held:
            fill(param.value, 1, param.name, SPEC, param.shard.slice, {"*": "normal"})
    placed = ShardedModel([model], mesh, replicated(held, mesh), loss)
    placed.engine.begin(1)
    total = loss(model(TOKENS, torch.arange(7).expand(2, 7)), TOKENS.roll(1))
    total.backward()
    placed.engine.after_backward()
    placed.finish()
    assert model.config.heads == HEADS, "the model's own config is not changed"
    words = tensor.applied([model], shards) if mesh.ranks > 1 else ""
    return total.item(), wholes({param.name: (param.gradient, param.shard) for param in placed.owned}, mesh), words


def apart(plan: CutPlan) -> tuple[float, list[str]]:
    """How far the loss on two ranks is from that of one process, and the parameters whose gradients differ."""
    loss, gradients, _ = train(ALONE, plan)
    far, names = 0.0, []
    for got_loss, got, words in run_ranks(train, 2, plan, layout=Layout(tensor=2)):
        assert words.endswith("8 of 12 parameters are cut")
        far = max(far, abs(got_loss - loss) / loss)
        names = [
            name
            for name, want in gradients.items()
            if not torch.allclose(got[name], want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
        ]
    return far, names


def test_the_parts_compute_what_the_whole_does() -> None:
    """Fused and transposed matrices, arguments by name, biases added once, an uneven vocabulary, and a shared config."""
    far, names = apart(PLAN)
    assert far < 1e-6 and names == []


@pytest.mark.parametrize(
    "wrong",
    [
        replace(PLAN, enters=PLAN.enters[1:]),
        replace(PLAN, enters=(*PLAN.enters[:1], *PLAN.enters[2:])),
        replace(PLAN, partial=frozenset()),
        replace(PLAN, leaves=PLAN.leaves[:1]),
        replace(PLAN, leaves=(*PLAN.leaves, PLAN.leaves[1])),
        replace(PLAN, params=PLAN.params | {"attention.qkv.weight": one("heads", (HEADS + 2 * KV) * WIDE)}),
    ],
    ids=["no enter", "no enter by name", "no partial", "no leave", "two leaves", "one run"],
)
def test_each_seam_of_the_plan_matters(wrong: CutPlan) -> None:
    far, names = apart(wrong)
    assert names and (far > 1e-6 or wrong.leaves == PLAN.leaves)


class Biased(nn.Module):
    """A module of its own whose result is a sum, and that adds a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4))


def refused(mesh: Mesh) -> str:
    with torch.device("meta"):
        model = nn.ModuleDict({"mine": Biased()})
    with pytest.raises(RunError) as caught:
        cut(model, mesh, CutPlan(2, {"mine.weight": one("ffn", 4, 1)}, leaves=(Leave("mine"),)))
    return str(caught.value)


def test_a_bias_that_nobody_knows_is_refused() -> None:
    said = run_ranks(refused, 2, layout=Layout(tensor=2))[0]
    assert "the results of mine, a Biased, are summed over the ranks, and how it adds its bias is not known" in said
