from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.models.decoder import mtp_targets, mtp_tokens
from phalanx.models.init import build, materialize
from phalanx.spec.model import ModelSpec, Moe

CPU = torch.device("cpu")
SPEC = ModelSpec(vocab=41, dim=24, layers=2, heads=2, ffn=40, context=64, mtp_depth=2, init_std=0.3)
SPARSE = replace(SPEC, tied=True, moe=Moe(experts=4, active=2, ffn=16, dense_layers=1))
PLACES = torch.arange(12)[None]
TOKENS = torch.randint(41, (1, 12), generator=torch.Generator().manual_seed(1))


def model(spec: ModelSpec) -> Any:
    return materialize(build(spec), 5, CPU).train()


@pytest.mark.parametrize("spec", [SPEC, SPARSE], ids=["dense", "experts"])
def test_training_sees_every_depth_and_nobody_else_does(spec: ModelSpec) -> None:
    decoder = model(spec)
    assert [tuple(logits.shape) for logits in decoder(TOKENS, PLACES)] == [(1, 12, 41)] * 3
    first = decoder(TOKENS, PLACES)[0]
    with torch.no_grad():
        assert torch.equal(decoder(TOKENS, PLACES), first)
    assert torch.equal(decoder.eval()(TOKENS, PLACES), first)
    alone = model(replace(spec, mtp_depth=0))  # weights follow from their names, so the model proper is the same
    assert torch.equal(alone(TOKENS, PLACES), first)


def test_the_modules_are_like_the_last_block() -> None:
    names = dict(model(SPARSE).named_parameters())
    of_block = {name.removeprefix("blocks.1.") for name in names if name.startswith("blocks.1.")}
    for depth in range(2):
        mine = {name.removeprefix(f"mtp.{depth}.") for name in names if name.startswith(f"mtp.{depth}.")}
        outside = {"token_norm.weight", "state_norm.weight", "join.weight", "norm.weight"}
        assert mine == outside | {f"block.{name}" for name in of_block}
        assert names[f"mtp.{depth}.join.weight"].shape == (24, 48)


def test_depth_d_knows_the_tokens_up_to_d_ahead_and_no_further() -> None:
    decoder = model(SPEC)
    before = decoder(TOKENS, PLACES)
    changed = TOKENS.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 41
    for depth, (one, other) in enumerate(zip(before, decoder(changed, PLACES), strict=True)):
        differs = (one - other)[0].abs().amax(-1) > 1e-4
        assert differs.nonzero().flatten().tolist() == list(range(7 - depth, 12))


def test_a_depth_is_the_published_formula() -> None:
    decoder = model(replace(SPEC, mtp_depth=1))
    states: list[Tensor] = []
    list(decoder.blocks.values())[-1].register_forward_hook(lambda *a: states.append(a[-1]))
    _, further = decoder(TOKENS, PLACES)
    module = decoder.mtp[0]

    def rms(x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()

    following = decoder.embed.weight[TOKENS[:, 1:]]
    joined = torch.cat((rms(following), rms(states[0][:, :-1])), dim=-1) @ module.join.weight.T
    # The block is an ordinary one: a decoder of that one block, whose embedding is `joined`, gives the same.
    lone = model(replace(SPEC, layers=1, mtp_depth=0))
    lone.blocks["0"].load_state_dict(module.block.state_dict())
    lone.head.load_state_dict(decoder.head.state_dict())
    lone.embed = torch.nn.Embedding.from_pretrained(joined[0].detach())
    torch.testing.assert_close(further[:, :-1], lone(torch.arange(11)[None], PLACES[:, :11]), atol=1e-5, rtol=1e-5)


def test_targets_stay_in_window_and_document() -> None:
    #                        doc 4         doc 7      doc 8
    documents = torch.tensor([[4, 4, 4, 4, 7, 7, 7, 8, 8]])
    targets = torch.tensor([[1, 2, 3, -100, 5, 6, -100, 8, 9]])
    no = -100
    assert mtp_targets(targets, documents, 1).tolist() == [[2, 3, no, no, 6, no, no, 9, no]]
    assert mtp_targets(targets, documents, 2).tolist() == [[3, no, no, no, no, no, no, no, no]]
    assert mtp_targets(targets, None, 1).tolist() == [[2, 3, no, 5, 6, no, 8, 9, no]]
    assert mtp_targets(targets, None, 9).tolist() == mtp_targets(targets, documents, 20).tolist() == [[no] * 9]
    # The target of depth d at position i is the main target at position i + d: token i + 1 + d.
    tokens = torch.arange(10)[None]
    assert mtp_targets(tokens[:, 1:], None, 2)[0, :7].tolist() == tokens[0, 3:].tolist()
    assert mtp_tokens(tokens, 3)[0, :7].tolist() == tokens[0, 3:].tolist()
    assert mtp_tokens(tokens, 12).shape == (1, 10)


def objective(decoder: Any, tokens: Tensor, documents: Tensor | None, positions: Tensor) -> Tensor:
    """Losses of all depths, each position by itself, [depth, S]; 0 where nothing is to be predicted."""
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    if documents is not None:
        targets = targets.masked_fill(torch.nn.functional.pad(documents[:, 1:], (0, 1), value=-1) != documents, -100)
    return torch.stack(
        [
            torch.nn.functional.cross_entropy(logits[0], mtp_targets(targets, documents, depth)[0], reduction="none")
            for depth, logits in enumerate(decoder(tokens, positions, documents))
        ]
    )


def test_packed_documents_lose_as_if_alone() -> None:
    decoder = model(SPEC)
    lengths = (7, 1, 4)
    documents = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = objective(decoder, TOKENS, documents, positions)
    for text, losses in zip(TOKENS.split(lengths, dim=1), packed.split(lengths, dim=1), strict=True):
        alone = objective(decoder, text, None, torch.arange(text.shape[1])[None])
        torch.testing.assert_close(losses, alone, atol=1e-5, rtol=1e-5)
        counted = [max(text.shape[1] - 1 - depth, 0) for depth in range(3)]
        assert (losses > 0).sum(1).tolist() == counted


@pytest.mark.parametrize("spec", [SPEC, SPARSE], ids=["own head", "tied"])
def test_their_loss_teaches_embedding_head_and_blocks(spec: ModelSpec) -> None:
    decoder = model(spec)
    objective(decoder, TOKENS, None, PLACES)[1:].sum().backward()
    for name, parameter in decoder.named_parameters():
        if name != "norm.weight":  # the model's own last norm is not on their way
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
