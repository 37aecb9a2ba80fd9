"""Frozen matrices in int8 and nf4 on one device: the numbers against bitsandbytes and a search, slices against the whole, products and gradients, and
what is kept for the backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from phalanx.models.decoder import AXES
from phalanx.models.init import build, fill, reset_buffers
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Lora
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.transforms import compile, lora, quantize, recompute
from phalanx.transforms.quantize import LEVELS, Format, Packing, QuantizedTensor, level_pairs, pack, rounded, unpack
from phalanx.verification.cases import MODELS

CPU = torch.device("cpu")
FORMATS: tuple[Format, ...] = ("int8", "nf4")


def values(rows: int = 24, columns: int = 192) -> Tensor:
    drawn = 0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    drawn[3] = 0.0
    return drawn


def test_nf4_is_the_nearest_level_of_each_block() -> None:
    matrix = values()
    blocks = matrix.view(-1, 3, 64)
    scales = blocks.abs().amax(-1, keepdim=True)
    distances = (blocks[..., None] - scales[..., None] * torch.tensor(LEVELS)).abs()
    expected = scales * torch.tensor(LEVELS)[distances.argmin(-1)]
    torch.testing.assert_close(rounded(matrix, "nf4"), expected.view_as(matrix), rtol=0, atol=0)


def test_int8_is_the_nearest_of_255_steps_of_each_row() -> None:
    matrix = values()
    steps = matrix.abs().amax(1, keepdim=True) / 127
    assert ((rounded(matrix, "int8") - matrix).abs() <= 0.5001 * steps).all()
    assert torch.equal(rounded(matrix, "int8")[3], matrix[3])


def test_the_numbers_of_bitsandbytes() -> None:
    library = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes: pip install bitsandbytes")
    matrix = values()
    assert torch.equal(
        library.dequantize_4bit(*library.quantize_4bit(matrix, blocksize=64, quant_type="nf4")), rounded(matrix, "nf4")
    )
    codes, scales, _ = library.int8_vectorwise_quant(matrix.half())
    torch.testing.assert_close(codes * scales[:, None] / 127, rounded(matrix.half(), "int8"), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("first", "columns"), [(0, 192), (0, 96), (96, 96), (50, 33), (191, 1)])
def test_a_slice_of_columns_has_the_numbers_of_the_whole(format: Format, first: int, columns: int) -> None:
    matrix, how = values(), Packing(format, 192, first, columns)
    stored = pack(matrix[:, slice(*how.source)], how)
    assert stored.shape[1] == 2 * how.width
    part = unpack(stored.view(torch.bfloat16), how, level_pairs(CPU), torch.float32)
    assert torch.equal(part, rounded(matrix, format)[:, first : first + columns])


def test_bytes_of_an_element() -> None:
    assert 2 * Packing("nf4", 4096, 1024, 1024).width == 1024 * (0.5 + 4 / 64)
    assert 2 * Packing("int8", 4096, 1024, 1024).width == 1024 + 4


def model(
    spec: ModelSpec, format: Format | None, targets: tuple[str, ...] = ()
) -> tuple[nn.Module, dict[str, QuantizedTensor]]:
    """With random weights and adapters that have left zero."""
    made = build(spec)
    adapters = lora.apply([made], Lora(rank=3, targets=targets), AXES)
    slices = {name: TensorSlice.full(parameter.shape) for name, parameter in made.named_parameters()}
    matrices = quantize.apply([made], slices, format, AXES, torch.bfloat16, CPU) if format else {}
    made.to_empty(device=CPU)
    reset_buffers(made)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name in matrices:
                matrices[name].bind(parameter.data, TensorSlice.full(parameter.shape))
                matrices[name].fill(lambda into, part, name=name: fill(into, 0, name, spec, part))
            elif name in adapters.names:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=dice))
            else:
                fill(parameter, 0, name, spec)
    return made, matrices


def outputs(made: nn.Module, length: int = 12) -> Tensor:
    tokens = torch.arange(2 * length).view(2, length) % 257
    return made(tokens, torch.arange(length).expand(2, length))


def gradients(made: nn.Module) -> dict[str, Tensor]:
    outputs(made).square().mean().backward()
    return {name: parameter.grad for name, parameter in made.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["gpt", "moe"])  # biases; routed and shared experts
def test_a_model_computes_with_the_dequantized_matrices(name: str, format: Format) -> None:
    targets = ("query", "up", "down")
    made, matrices = model(MODELS[name], format, targets)
    plain, _ = model(MODELS[name], None, targets)
    kinds = {path.rpartition(".")[2] for path in matrices}
    assert kinds == ({"weight"} if name == "gpt" else {"weight", "gate", "up", "down"})
    with torch.no_grad():
        for path, parameter in plain.named_parameters():
            if path in matrices:
                assert not torch.equal(matrices[path].read(), parameter)
                parameter.copy_(matrices[path].read())
    expected = gradients(plain)
    for path, gradient in gradients(made).items():
        torch.testing.assert_close(gradient, expected[path])
    torch.testing.assert_close(outputs(made), outputs(plain))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_gives_the_same(mode: str) -> None:
    made, _ = model(MODELS["moe"], "nf4", ("query", "experts.up"))
    expected = gradients(model(MODELS["moe"], "nf4", ("query", "experts.up"))[0])
    recompute.apply([made], mode, 1, compiled=False)  # type: ignore[arg-type]
    for path, gradient in gradients(made).items():
        torch.testing.assert_close(gradient, expected[path])


def kept(made: nn.Module) -> tuple[int, dict[str, Tensor]]:
    """Bytes that a forward keeps for its backward besides parameters, and the gradients."""
    own = {parameter.untyped_storage()._cdata for parameter in made.parameters()}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = outputs(made).square().mean()
    loss.backward()
    return sum(sizes.values()), {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


LARGE = replace(MODELS["dense"], layers=2, dim=192, ffn=384)


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_dequantized_is_kept_for_the_backward(format: Format) -> None:
    made, matrices = model(LARGE, format)
    size, elements = kept(made)[0], sum(matrix.cut.numel for matrix in matrices.values())
    assert size < elements, f"{size} bytes next to {elements} elements"


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_compiler_keeps_nothing_dequantized(format: Format) -> None:
    """Although it sees that forward and backward compute the same. One graph per block, without a break."""
    expected = kept(model(LARGE, format)[0])[1]
    made, matrices = model(LARGE, format)
    torch._dynamo.utils.counters.clear()
    compile.apply([made], "aot_eager", pytest.fail)
    size, found = kept(made)
    elements = sum(matrix.cut.numel for matrix in matrices.values())
    assert not torch._dynamo.utils.counters["graph_break"]
    assert size < elements, f"{size} bytes next to {elements} elements"
    for path, gradient in expected.items():
        torch.testing.assert_close(found[path], gradient)
