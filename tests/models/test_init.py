from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from phalanx.models import init
from phalanx.models.init import build, fill, materialize
from phalanx.spec.model import ModelSpec
from phalanx.spec.tensor_slice import TensorSlice

CPU = torch.device("cpu")
SPEC = ModelSpec(vocab=50, dim=32, layers=3, heads=4, ffn=64, init_std=0.05)
MANY = 1_000_000


def normal(seed: int, name: str, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Elements first … first + count - 1 of the named stream."""
    return init._drawn(seed, name, torch.arange(first, first + count, dtype=torch.int64, device=device))


def parameters(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in materialize(build(spec), seed, CPU).named_parameters()}


def test_any_slice_of_a_stream_equals_that_part_of_the_whole() -> None:
    whole = normal(1, "embed.weight", 0, 1000, CPU)
    for first, count in ((0, 1), (0, 1000), (1, 7), (513, 256), (999, 1)):
        assert torch.equal(normal(1, "embed.weight", first, count, CPU), whole[first : first + count])
    # Far out, where an index no longer fits 32 bits: the largest models have tensors of that size.
    far = 2**33 - 5
    assert torch.equal(normal(1, "x", far, 10, CPU)[4:], normal(1, "x", far + 4, 6, CPU))


def test_the_first_numbers_of_a_stream_stay_what_they_are() -> None:
    # SplitMix64 and Box–Muller in Python's own integers and floats: another layout of the bits would be another model.
    def one(index: int) -> float:
        key = init._key(9, "blocks.0.mlp.up.weight")
        z = (index * 0x9E3779B97F4A7C15 + key) % 2**64
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
        z ^= z >> 31
        radius, angle = ((z & 0xFFFFFF) + 0.5) / 2**24, (z >> 40) / 2**24
        return math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * angle)

    got = normal(9, "blocks.0.mlp.up.weight", 0, 200, CPU)
    torch.testing.assert_close(got, torch.tensor([one(i) for i in range(200)]), atol=2e-6, rtol=1e-5)


def test_values_depend_on_seed_and_name_and_nothing_else() -> None:
    values = parameters(SPEC, 11)
    assert all(torch.equal(values[name], again) for name, again in parameters(SPEC, 11).items())
    # A deeper, wider-headed model has other parameters besides; those of the same name and size are the same.
    other = parameters(replace(SPEC, layers=3, tied=True, qk_norm=True), 11)
    shared = values.keys() & other.keys()
    assert len(shared) == len(values) - 1
    assert all(torch.equal(values[name], other[name]) for name in shared)
    drawn = [name for name, tensor in values.items() if tensor.std() > 0]
    for name, tensor in parameters(SPEC, 12).items():
        assert torch.equal(values[name], tensor) == (name not in drawn)
    # And no two parameters are the same numbers.
    firsts = {tuple((values[name] / values[name].std()).flatten()[:8].mul(1000).round().tolist()) for name in drawn}
    assert len(firsts) == len(drawn)


def test_the_global_generator_does_not_matter_and_is_not_touched() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = parameters(SPEC, 4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(torch.equal(one[name], again) for name, again in parameters(SPEC, 4).items())


def test_the_distribution_is_standard_normal() -> None:
    x = normal(3, "embed.weight", 0, MANY, CPU).double()
    five = 5 / math.sqrt(MANY)  # five standard errors of a mean of unit variance
    assert abs(x.mean()) < five
    assert abs(x.var() - 1) < five * math.sqrt(2)
    assert abs((x**3).mean()) < five * math.sqrt(15)
    assert abs((x**4).mean() - 3) < five * math.sqrt(96)
    ordered = x.sort().values
    exact = 0.5 * (1 + torch.erf(ordered / math.sqrt(2)))
    assert (exact - (torch.arange(MANY) + 0.5) / MANY).abs().max() < 2.0 / math.sqrt(MANY)  # Kolmogorov–Smirnov


def test_neighbours_and_streams_are_unrelated() -> None:
    x = normal(3, "a", 0, MANY, CPU).double()
    five = 5 / math.sqrt(MANY)
    for lag in (1, 2, 3, 4, 64, 1024, 4096):
        assert abs((x[lag:] * x[:-lag]).mean()) < five
        assert abs(((x[lag:] ** 2 - 1) * (x[:-lag] ** 2 - 1)).mean()) < 2 * five  # nor in size
    for seed, name in ((4, "a"), (3, "b"), (3, "a.")):
        assert abs((x * normal(seed, name, 0, MANY, CPU).double()).mean()) < five
    # 24 bits of radius and 24 of angle: among a million there is hardly a pair that falls together in fp32.
    assert len(torch.unique(x)) > 0.9 * MANY


def test_a_parameter_drawn_in_pieces_is_the_one_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.empty(100, 13)
    fill(whole, 5, "embed.weight", SPEC)
    monkeypatch.setattr(init, "_CHUNK", 64)
    pieces = torch.empty(100, 13)
    fill(pieces, 5, "embed.weight", SPEC)
    assert torch.equal(pieces, whole)
    rows = torch.empty(30, 13)  # what a rank that owns rows 40 to 69 would do
    fill(rows, 5, "embed.weight", SPEC, TensorSlice.of((100, 13), (40, 0), rows.shape))
    assert torch.equal(rows, whole[40:70])
    inner = torch.empty(17, 4)
    fill(inner, 5, "embed.weight", SPEC, TensorSlice.of((100, 13), (80, 7), inner.shape))
    assert torch.equal(inner, whole[80:97, 7:11])


def test_a_box_of_three_dimensions_has_the_numbers_of_the_whole() -> None:
    whole, box, nothing = torch.empty(6, 5, 8), torch.empty(2, 3, 4), torch.empty(0, 5, 8)
    fill(whole, 5, "blocks.0.mlp.experts.up", SPEC)
    fill(box, 5, "blocks.0.mlp.experts.up", SPEC, TensorSlice.of((6, 5, 8), (3, 1, 4), box.shape))
    assert torch.equal(box, whole[3:5, 1:4, 4:8])
    fill(
        nothing, 5, "blocks.0.mlp.experts.up", SPEC, TensorSlice.of((6, 5, 8), (6, 0, 0), nothing.shape)
    )  # a rank that got none


def test_sizes_follow_the_spec_and_what_writes_into_the_residual_is_smaller_with_depth() -> None:
    values = parameters(replace(SPEC, layers=8, bias=True, norm="layer"), 0)
    residual = 0.05 / math.sqrt(16)
    for name, tensor in values.items():
        if name.endswith("norm.weight"):
            assert (tensor == 1).all()
        elif name.endswith(".bias"):
            assert (tensor == 0).all()
        else:
            expected = residual if name.endswith(("output.weight", "down.weight")) else 0.05
            assert tensor.std() == pytest.approx(expected, rel=6 / math.sqrt(2 * tensor.numel())), name
            assert torch.equal(tensor.flatten(), normal(0, name, 0, tensor.numel(), CPU) * expected)


def test_renamed_parameters_keep_their_initial_bits() -> None:
    spec = ModelSpec(vocab=41, dim=16, layers=2, heads=2, positions="learned", context=32, mtp_depth=1)
    model = dict(materialize(build(spec), 7, torch.device("cpu")).named_parameters())
    for old, new in (("places.weight", "position_embed.weight"), ("ahead.0.join.weight", "mtp.0.join.weight")):
        drawn = normal(7, old, 0, model[new].numel(), torch.device("cpu")).mul_(spec.init_std)
        assert torch.equal(model[new].flatten(), drawn)
