from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transforms.small import CPU, KINDS, batch, differing, distance, flops, kept, learned, learned_plainly, loss, made

from phalanx.models.init import build
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.model import Mla, ModelSpec
from phalanx.transforms import compile, recompute

DEEP = ModelSpec(vocab=257, dim=64, layers=16, heads=4, kv_heads=2, context=256)
TOKENS, POSITIONS, _ = batch(256, 1)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_counts_are_the_same_bits(kind: str, mode: str, compute: str) -> None:
    again = learned(made(KINDS[kind], lambda parts: recompute.apply(parts, mode, 1)), compute)  # type: ignore[arg-type]
    assert differing(learned_plainly(kind, compute), again) == []
    counts = [value for name, value in again.items() if name.endswith("counts")]
    assert all(count.sum() == 2 * 2 * 2 * 48 for count in counts)  # backwards × rows × experts of each token × tokens
    assert bool(counts) == (kind in ("moe", "mla"))


def test_memory_and_compute_of_sixteen_layers() -> None:
    bytes_kept, work = {}, {}
    for mode in ("none", "full", "selective"):
        model = made(DEEP, *([] if mode == "none" else [lambda parts, mode=mode: recompute.apply(parts, mode, 1)]))
        _, bytes_kept[mode] = kept(lambda model=model: model(TOKENS, POSITIONS))
        found = flops(lambda model=model: model(TOKENS, POSITIONS).logsumexp(-1).sum().backward(), [model])
        work[mode] = found.flops
        assert found.repeated == work[mode] - work["none"]  # what a run reports
    assert bytes_kept["none"] >= 4 * bytes_kept["full"]
    assert bytes_kept["full"] < bytes_kept["selective"] < bytes_kept["none"]
    assert 1.25 <= work["full"] / work["none"] <= 1.40
    assert work["selective"] == work["none"]  # it repeats no matrix product and no attention


@pytest.mark.parametrize("kind", ["moe", "mla"])
def test_experts_repeat_no_product_and_stop_before_the_last(kind: str) -> None:
    work = {}
    for mode in ("none", "full", "selective"):
        model = made(KINDS[kind], *([] if mode == "none" else [lambda parts, mode=mode: recompute.apply(parts, mode, 1)]))
        work[mode] = flops(lambda model=model: loss(model).backward(), [model])
    assert work["selective"].flops == work["none"].flops
    spec = KINDS[kind]
    assert spec.moe is not None
    # A block's last product, that of its experts, is not repeated: nothing needs its result.
    routed = 2 * spec.dim * spec.moe.ffn * spec.moe.active * 2 * 48
    blocks = spec.layers - spec.dense_layers + spec.mtp_depth
    dense = 2 * spec.dim * spec.hidden * 2 * 48 * spec.dense_layers
    forward = flops(lambda: loss(made(spec)), []).flops
    head = (1 + spec.mtp_depth) * 2 * spec.dim * spec.rows * 2 * 48
    assert work["full"].repeated <= forward - head - blocks * routed - dense


@pytest.mark.parametrize("compiled", [False, True])
def test_wide_keys_and_values_are_expanded_again(compiled: bool) -> None:
    """Of 8 heads of 8 + 8 channels, from 4 channels: 32 times as wide."""
    spec = ModelSpec(
        vocab=257, dim=32, layers=2, heads=8, ffn=16, context=256,
        mla=Mla(kv_rank=4, q_rank=None, nope_dim=8, rope_dim=4, value_dim=8),
    )  # fmt: skip
    stored = {}
    for rank in (4, 5):
        model = made(replace(spec, mla=replace(spec.mla, kv_rank=rank)), lambda parts: recompute.apply(parts, "selective", 1))  # type: ignore[type-var]
        _, stored[rank] = kept(lambda model=model: model(TOKENS, POSITIONS))
    if not compiled:
        expanded, latent = 2 * 256 * 8 * (8 + 8) * 4, 2 * 256 * 4
        assert stored[5] - stored[4] == expanded + latent
    else:
        model = made(spec, lambda parts: compile.apply(parts, "aot_eager_decomp_partition", pytest.fail))
        assert distance(learned(model), learned(made(spec))) <= 1e-6


def test_what_is_kept_is_freed_by_the_backward() -> None:
    model = made(DEEP, lambda parts: recompute.apply(parts, "selective", 1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    _, left = kept(lambda: model(TOKENS, POSITIONS).logsumexp(-1).sum().backward())
    assert left == 0


def test_every_so_manieth_block_of_the_whole_model() -> None:
    whole = build(DEEP)
    sentence = recompute.apply([whole.part(3, 9)], "full", 4)  # type: ignore[operator]
    changed = [name for name, block in whole.blocks.named_children() if "forward" in vars(block)]  # type: ignore[union-attr]
    assert changed == ["4", "8"]
    assert sentence == "full: blocks.4 and blocks.8 recomputed in the backward"
    assert recompute.apply([build(DEEP).part(1, 3)], "full", 4) == "full: no block of this rank"  # type: ignore[operator]


def test_a_block_ahead_counts_behind_the_last() -> None:
    model = build(KINDS["mla"])  # three blocks and one ahead
    assert "blocks.0 and mtp.0.block" in recompute.apply([model], "full", 3)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_backward_in_two_passes(mode: str) -> None:
    """Inputs first, weights later, as pipelines without bubbles do."""
    plain = learned_in_two_passes(made(KINDS["moe"]))
    again = learned_in_two_passes(made(KINDS["moe"], lambda parts: recompute.apply(parts, mode, 1)))  # type: ignore[arg-type]
    assert differing(plain, again) == []


def learned_in_two_passes(model: nn.Module) -> dict[str, Tensor]:
    stage = model.part(1, 2)  # type: ignore[operator]
    x = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    _, positions, documents = batch()
    value = stage(x, positions, documents).logsumexp(-1).sum()
    (x_grad,) = torch.autograd.grad(value, x, retain_graph=True)
    names, weights = zip(*((name, p) for name, p in stage.named_parameters()), strict=True)
    gradients = torch.autograd.grad(value, weights)
    counts = {"counts": stage.blocks["1"].mlp.router.counts}
    return {"x": x_grad} | dict(zip(names, gradients, strict=True)) | counts


def test_evaluation_forgets_nothing_and_repeats_nothing() -> None:
    model = made(KINDS["dense"], lambda parts: recompute.apply(parts, "full", 1))
    with torch.no_grad():
        assert flops(lambda: loss(model)).flops == flops(lambda: loss(made(KINDS["dense"]))).flops


def test_dropout_of_an_own_block_is_repeated() -> None:
    def gradient(again: bool) -> Tensor:
        torch.manual_seed(0)
        model = Own(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)))
        if again:
            recompute.apply([model], "full", 1)
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()
        return model.blocks[0][0].weight.grad

    assert torch.equal(gradient(True), gradient(False))


def test_a_result_changed_in_place_is_noticed() -> None:
    model = Own(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)))
    recompute.apply([model], "selective", 1)
    with pytest.raises(RunFailed, match="in place"):
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(RunError, match="works block by block, but Linear holds no list of layers"):
        recompute.apply([nn.Linear(2, 2)], "full", 1)


class Own(nn.Module):
    """A model of a stranger's, of one block."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def test_kept_counts_what_waits_and_nothing_else() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    x = torch.ones(16, 64, device=CPU)
    _, size = kept(lambda: (x @ weight).exp())
    assert size == 16 * 64 * 4  # the result of exp, which is its own gradient; not the product, not the weight
