from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from gathering import wholes
from ranks import ALONE, run_ranks
from sharded import replicated
from torch import Tensor, nn
from transforms.small import kept

from phalanx.models.attention import Scope
from phalanx.models.decoder import AXES
from phalanx.models.init import build, fill, reset_buffers
from phalanx.models.layers import rotary
from phalanx.models.moe import routers
from phalanx.parallel import expert, tensor, vocab_parallel
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard, ShardedModel, extract
from phalanx.parallel.tensor import KvSelect
from phalanx.spec.layout import Layout
from phalanx.spec.model import Mla, ModelSpec, Moe
from phalanx.training.micro_batch import MicroBatch, objective, summed_loss
from phalanx.transforms import recompute
from phalanx.transforms.precision import computing

ODD = ModelSpec(vocab=257, dim=24, layers=2, heads=6, kv_heads=2, ffn=171, head_dim=8, qk_norm=True, init_std=0.2)
GPT = ModelSpec(
    vocab=257,
    dim=24,
    layers=2,
    heads=12,
    head_dim=4,
    ffn=97,
    norm="layer",
    activation="gelu",
    positions="learned",
    context=16,
    bias=True,
    tied=True,
    init_std=0.2,
)
LATENT = ModelSpec(
    vocab=257,
    dim=24,
    layers=2,
    heads=12,
    ffn=61,
    mla=Mla(kv_rank=10, q_rank=14, nope_dim=6, rope_dim=4, value_dim=5),
    init_std=0.2,
)
SPARSE = ModelSpec(
    vocab=257,
    dim=24,
    layers=3,
    heads=6,
    kv_heads=2,
    ffn=53,
    moe=Moe(experts=5, active=2, ffn=11, shared=1, dense_layers=1, balance_loss=0.1),
    init_std=0.2,
)
AHEAD = ModelSpec(vocab=257, dim=24, layers=1, heads=6, kv_heads=2, head_dim=8, ffn=53, mtp_depth=2, tied=True, init_std=0.2)

LENGTH = 12
SEED = 5
INITIAL = {"*norm.weight": "ones", "*": "normal"}  # biases too: one that is added twice must show


def batch() -> MicroBatch:
    """Two windows; the first holds two documents, and some targets are ignored."""
    tokens = torch.randint(257, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, 6], targets[1, -2:] = -100, -100
    documents = (torch.arange(LENGTH).expand(2, LENGTH) > 6).long() * torch.tensor([[1], [0]])
    positions = torch.arange(LENGTH).expand(2, LENGTH) - 7 * documents
    return MicroBatch(tokens[:, :-1], targets, positions, documents, counted=int((targets >= 0).sum()), digest=0)


def place(
    parts: list[nn.Module], mesh: Mesh, axes: Mapping[str, tuple[str, ...]], *, sequence: bool, chunk: int | None = None
) -> ShardedModel:
    """As `parallel/apply` does it: tensor parallelism, the routers of experts and the loss."""
    spots = {name: ParamShard.full(parameter) for part in parts for name, parameter in part.named_parameters()}
    spots = tensor.split(parts, spots, axes, mesh, sequence=sequence)
    spots = expert.split(parts, spots, axes, mesh)
    loss = vocab_parallel.swap(parts, mesh.group("tensor", use="tensor"), chunk=chunk, sequence=sequence, loss=summed_loss)
    held = {}
    for part in parts:
        part.to_empty(device=mesh.device)
        reset_buffers(part)
    for part in parts:
        for name, parameter in part.named_parameters():
            spot = spots[name]
            assert tuple(parameter.shape) == spot.slice.shape
            with torch.no_grad():
                fill(parameter, SEED, name, part.spec, spot.slice, INITIAL)
            held[name] = OwnedParam(name, parameter, spot)
    engine = replicated(held.values(), mesh)
    return ShardedModel(parts, mesh, engine, loss)


def losses(placed: ShardedModel, compute: str = "fp32") -> tuple[Tensor, Tensor]:
    """The reported loss and the one to go backward from; the parts run one after the other."""
    given = batch()
    x = given.tokens
    with computing(compute, torch.device("cpu")):
        for part in placed.parts:
            x = part(x, given.positions, given.documents)
    first, *ahead = x if type(x) is tuple else (x,)
    loss = placed.loss(first, given.targets)
    return loss, objective(loss, ahead, given, 0.3, placed.loss)


def train(placed: ShardedModel, compute: str = "fp32") -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, every parameter's whole gradient, and what every router counted on all ranks."""
    for part in placed.parts:
        for router in routers(part).values():
            router.loss_scale = 0.5
    placed.engine.begin(1)
    loss, whole = losses(placed, compute)
    (0.5 * whole).backward()
    placed.engine.after_backward()
    placed.finish()
    gradients = wholes({one.name: (one.gradient, one.shard) for one in placed.owned if one.gradient is not None}, placed.mesh)
    for one in placed.owned:  # what several ranks hold is alike on all
        torch.testing.assert_close(one.gradient, extract(one.shard.slice, gradients[one.name]), rtol=1e-5, atol=1e-6)
    counts = {name: placed.mesh.all_reduce(router.counts.clone()) for name, router in routers(placed.parts[-1]).items()}
    return loss.item(), gradients, counts


def cut_decoder(spec: ModelSpec, stages: int) -> list[nn.Module]:
    model = build(spec)
    if stages == 1:
        return [model]
    edges = [spec.layers * stage // stages for stage in range(stages + 1)]
    return [model.part(first, stop) for first, stop in pairwise(edges)]


def on_rank(mesh: Mesh, spec: ModelSpec, cases: list[tuple[bool, int | None, int]]) -> list[tuple]:
    """(sequence, chunk, stages) after the other, on the same ranks."""
    results = []
    for sequence, chunk, stages in cases:
        placed = place(cut_decoder(spec, stages), mesh, AXES, sequence=sequence, chunk=chunk)
        results.append((*train(placed), tensor.applied(placed.parts, {one.name: one.shard for one in placed.owned})))
    return results


@cache
def alone(spec: ModelSpec) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    return train(place([build(spec)], ALONE, AXES, sequence=False))


def check(got: tuple, want: tuple) -> None:
    """The ranks' loss, gradients and counts are those of one process."""
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    assert got[1].keys() == want[1].keys()
    largest = max(gradient.abs().max().item() for gradient in want[1].values())
    for name, gradient in want[1].items():
        if name.endswith("key.bias"):  # it moves all scores of a query alike: its gradient is zero, but for rounding
            assert max(got[1][name].abs().max().item(), gradient.abs().max().item()) <= 1e-6 * largest, name
        else:
            assert (got[1][name] - gradient).abs().max().item() <= 1e-5 * gradient.abs().max().item(), name
    assert got[2].keys() == want[2].keys()
    assert all(torch.equal(got[2][name], counts) for name, counts in want[2].items())


FAMILIES = {"odd": ODD, "gpt": GPT, "latent": LATENT, "sparse": SPARSE, "ahead": AHEAD}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_matrices_compute_what_one_process_does(family: str, ranks: int) -> None:
    spec = FAMILIES[family]
    cases = [(False, None, 1), (True, 7, 1), *([(True, None, 1), (False, 7, 1)] if ranks == 2 else [])]
    for results in run_ranks(on_rank, ranks, spec, cases, layout=Layout(tensor=ranks)):
        for got in results:
            check(got, alone(spec))


@pytest.mark.parametrize("family", ["gpt", "latent"])
def test_four_ranks(family: str) -> None:
    for results in run_ranks(on_rank, 4, FAMILIES[family], [(False, None, 1), (True, 5, 1)], layout=Layout(tensor=4)):
        for got in results:
            check(got, alone(FAMILIES[family]))


def test_fewer_key_value_heads_than_ranks() -> None:
    spec = ModelSpec(vocab=257, dim=24, layers=1, heads=8, kv_heads=2, head_dim=6, ffn=50, qk_norm=True, init_std=0.2)
    for results in run_ranks(on_rank, 4, spec, [(False, None, 1), (True, None, 1)], layout=Layout(tensor=4)):
        for got in results:
            check(got, alone(spec))


def test_replicas_and_stages_of_shared_matrices() -> None:
    """Two replicas see the same samples here, so every gradient is twice that of one."""
    for family, stages in (("gpt", 2), ("sparse", 3)):
        spec = FAMILIES[family]
        want = alone(spec)
        cases = [(False, None, stages), (True, 7, stages)]
        for results in run_ranks(on_rank, 4, spec, cases, layout=Layout(data=2, tensor=2)):
            for loss, gradients, _, _ in results:
                check((loss, {name: found / 2 for name, found in gradients.items()}, want[2]), (*want[:2], want[2]))


def shared_by_two_parts(mesh: Mesh) -> tuple:
    """One rank with the first and the last stage, as V-shaped schedules have it: the tied embedding is in both."""
    model = build(GPT)
    placed = place([model.part(0, 1), model.part(1, 2)], mesh, AXES, sequence=True)
    assert placed.parts[0].embed is placed.parts[1].embed
    return train(placed)


def test_a_module_of_two_stages_is_cut_once() -> None:
    for got in run_ranks(shared_by_two_parts, 2, layout=Layout(tensor=2)):
        check(got, alone(GPT))


def messages(mesh: Mesh, sequence: bool) -> list[str]:
    """Messages of one block's forward and backward, in order."""
    placed = place([build(replace(ODD, layers=1))], mesh, AXES, sequence=sequence)
    block = placed.parts[0].blocks["0"]
    x = torch.randn(2, LENGTH // 2 if sequence else LENGTH, 24, requires_grad=True)
    sent: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            send = getattr(Group, name)
            patch.setattr(Group, name, lambda *args, send=send, name=name: sent.append(name) or send(*args))
        block(x, Scope(None), rotary(ODD, torch.arange(LENGTH).expand(2, LENGTH))).sum().backward()
    return sent


def test_projections_share_one_message() -> None:
    """Two regions: one message into each and one out of it, and the same backward."""
    assert run_ranks(messages, 2, False, layout=Layout(tensor=2)) == [["all_reduce"] * 4] * 2
    assert run_ranks(messages, 2, True, layout=Layout(tensor=2)) == [["all_gather", "reduce_scatter"] * 4] * 2


def recomputed(mesh: Mesh, family: str, compute: str) -> list[tuple]:
    """Training with nothing, everything, and all but products recomputed, with the whole sequence and with slices of it."""
    results = []
    for sequence in (False, True):
        for mode in ("none", "full", "selective"):
            placed = place([build(FAMILIES[family])], mesh, AXES, sequence=sequence)
            if mode != "none":
                recompute.apply(placed.parts, mode)  # type: ignore[arg-type]
            results.append(train(placed, compute))
    return results


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_blocks_give_the_same_bits(family: str, compute: str) -> None:
    for results in run_ranks(recomputed, 2, family, compute, layout=Layout(tensor=2)):
        for plain, *others in (results[:3], results[3:]):
            for loss, gradients, counts in others:
                assert loss == plain[0]
                assert [name for name, gradient in gradients.items() if not torch.equal(gradient, plain[1][name])] == []
                assert all(torch.equal(counts[name], count) for name, count in plain[2].items())


def selective_messages(mesh: Mesh, sequence: bool) -> tuple[list[str], int]:
    """Messages of a selectively recomputed block, and the bytes that it stores."""
    placed = place([build(replace(ODD, layers=1))], mesh, AXES, sequence=sequence)
    recompute.apply(placed.parts, "selective")
    block = placed.parts[0].blocks["0"]
    x = torch.randn(2, LENGTH // 2 if sequence else LENGTH, 24, requires_grad=True)
    rotation = rotary(ODD, torch.arange(LENGTH).expand(2, LENGTH))
    y, size = kept(lambda: block(x, Scope(None), rotation))
    sent: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            send = getattr(Group, name)
            patch.setattr(Group, name, lambda *args, send=send, name=name: sent.append(name) or send(*args))
        y.sum().backward()
    return sent, size - y.nbytes


@pytest.mark.parametrize("sequence", [False, True])
def test_selective_recomputation_stores_sums_and_does_not_repeat_them(sequence: bool) -> None:
    tokens, spec = 2 * LENGTH, ODD
    # A rank's half of queries, keys, values, attention (with the logarithm of each sum), gates and inner products.
    inner = (spec.heads + 2 * spec.kv + spec.heads) * spec.head // 2 + spec.heads // 2 + 2 * ((spec.hidden + 1) // 2)
    # The sum after attention: a slice of the sequence, or all of it. Nothing of the sum after the feed-forward.
    total = spec.dim // 2 if sequence else spec.dim
    gathered = ["all_gather"] * 2 if sequence else []  # both regions read their inputs again
    back = ["all_gather", "reduce_scatter"] * 2 if sequence else ["all_reduce"] * 2
    for sent, size in run_ranks(selective_messages, 2, sequence, layout=Layout(tensor=2)):
        assert size <= 4 * tokens * (inner + total) + 4  # one element stands for the product that was added up
        assert sorted(sent) == sorted(gathered + back)


def in_bf16(mesh: Mesh) -> list[tuple]:
    return [
        train(place([build(SPARSE)], mesh, AXES, sequence=sequence, chunk=chunk), "bf16")
        for sequence, chunk in ((False, None), (True, 7))
    ]


def test_bf16() -> None:
    """As far from fp32 as one process in bf16 is, give or take."""
    exact, plain = alone(SPARSE), train(place([build(SPARSE)], ALONE, AXES, sequence=False), "bf16")

    def distance(gradients: dict[str, Tensor]) -> float:
        return math.sqrt(sum((gradients[name] - want).square().sum().item() for name, want in exact[1].items()))

    for results in run_ranks(in_bf16, 2, layout=Layout(tensor=2)):
        for loss, gradients, _ in results:
            assert loss == pytest.approx(exact[0], rel=5e-3)
            assert distance(gradients) < 2 * distance(plain[1])


def test_what_was_done_is_read_off_the_model() -> None:
    [told, _] = run_ranks(on_rank, 2, ODD, [(True, None, 1)], layout=Layout(tensor=2))
    assert told[0][3] == (
        "blocks.0.attention.query.weight: 24 of 48 rows; 16 of 25 parameters are cut; sums go to slices of the sequence"
    )


def test_query_heads_find_their_keys() -> None:
    """Even groups stay groups, and others get a copy per query head; whoever computes attention may be replaced."""
    seen = {}

    def inner(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
        seen["k"], seen["v"], seen["rest"] = k[0, :, 0, 0].tolist(), v[0, :, 0, 0].tolist(), rest
        return q

    k = torch.arange(4.0).view(1, 4, 1, 1)
    for heads, want in ((range(0, 2), [0.0]), (range(4, 8), [2.0, 3.0]), (range(3, 6), [1.0, 2.0, 2.0])):
        select = KvSelect(lambda *_: torch.zeros(()), heads, 2)
        select.inner = inner
        select(torch.zeros(1, len(heads), 1, 1), k, k + 1, "scope", 0.5)
        assert seen == {"k": want, "v": [one + 1 for one in want], "rest": ("scope", 0.5)}
