"""What a folder says against what a model said: agreement in every number format, and errors planted in the weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SIX, VOCAB, logits, save
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.checkpointing.hf_folder import ReferenceLogits, read_reference
from phalanx.evaluation import convert
from phalanx.evaluation.open_model import open_model
from phalanx.spec.errors import RunError, RunFailed
from phalanx.transforms import fp8
from phalanx.transforms.precision import computing

TOKENS = torch.randint(VOCAB, (16,), generator=torch.Generator().manual_seed(4))
PLACES = torch.arange(16)


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened by our own model, unless a test says otherwise."""
    monkeypatch.setattr(convert, "find_spec", lambda name: None)


Saved = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A family's folder and the model that transformers saved there, made once."""
    found: dict[str, tuple[Path, Any]] = {}

    def make_once(family: str) -> tuple[Path, Any]:
        if family not in found:
            folder = tmp_path_factory.mktemp(family)
            found[family] = folder, save(folder, family)
        return found[family]

    return make_once


def reference(theirs: Any, compute: str = "fp32") -> ReferenceLogits:
    """What a model of transformers says, in the format that training has."""
    with computing(compute, torch.device("cpu")):
        return ReferenceLogits(TOKENS, PLACES, logits(theirs, TOKENS[None])[0].float(), compute)


@pytest.mark.parametrize("family", SIX)
def test_transformers_own_answer_is_ours(made: Saved, family: str) -> None:
    folder, theirs = made(family)
    match = convert.check(folder, reference(theirs))
    assert match.opened == "phalanx" and match.difference < 1e-5 and match.allowed == convert.EXACT


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek"])
def test_a_coarser_format_is_allowed_its_own_rounding(made: Saved, family: str, compute: str) -> None:
    folder, theirs = made(family)
    match = convert.check(folder, reference(theirs, compute))
    assert 1e-4 < match.difference <= match.allowed < 0.1


def test_eight_bits(made: Saved) -> None:
    folder, _ = made("llama")
    model = open_model(folder, "cpu").model
    fp8.apply([model], "row", torch.device("cpu"))
    with torch.no_grad(), computing("fp8", torch.device("cpu")):
        said = model(TOKENS[None], torch.arange(16)[None])[0].float()
    match = convert.check(folder, ReferenceLogits(TOKENS, PLACES, said, "fp8", "row"))
    assert 1e-2 < match.difference <= match.allowed < 1


def test_eight_bits_between_blocks_in_sixteen(made: Saved) -> None:
    """A file of logits says which blocks computed in fp8; with others, the logits are further away."""
    folder, _ = made("llama")
    model = open_model(folder, "cpu").model
    fp8.apply([model], "tensor", torch.device("cpu"), range(1, 2))
    with torch.no_grad(), computing("fp8", torch.device("cpu")):
        said = model(TOKENS[None], torch.arange(16)[None])[0].float()
    known = ReferenceLogits(TOKENS, PLACES, said, "fp8", "tensor", range(1, 2))
    match = convert.check(folder, known)
    assert match.difference <= match.allowed < 1
    file = folder / "some.logits"
    known.write(file)
    assert read_reference(file).fp8_blocks == range(1, 2)


def test_eight_bits_in_experts(made: Saved) -> None:
    folder, _ = made("mixtral")
    model = open_model(folder, "cpu").model
    fp8.apply([model], "tensor", torch.device("cpu"), experts=True)
    with torch.no_grad(), computing("fp8", torch.device("cpu")):
        said = model(TOKENS[None], torch.arange(16)[None])[0].float()
    known = ReferenceLogits(TOKENS, PLACES, said, "fp8", "tensor", fp8_experts=True)
    match = convert.check(folder, known)
    assert match.difference <= match.allowed < 1
    file = folder / "some.logits"
    known.write(file)
    assert read_reference(file).fp8_experts


def test_the_library_opens_it_where_it_is_installed_and_fits(made: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, theirs = made("qwen3")
    monkeypatch.undo()
    assert convert.check(folder, reference(theirs)).opened == "transformers"
    monkeypatch.setattr(convert, "_ROOM", 1e9)
    assert convert.check(folder, reference(theirs)).opened == "phalanx", "not where it would take the memory of the run"


def swapped(one: str, other: str) -> Callable[[dict[str, Tensor]], None]:
    def plant(tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()

    return plant


def lost(name: str) -> Callable[[dict[str, Tensor]], None]:
    def plant(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones_like(tensors[name])

    return plant


def other_pairs(name: str, heads: int) -> Callable[[dict[str, Tensor]], None]:
    """Rotary pairs in the order of another library: the commonest mistake of all."""

    def plant(tensors: dict[str, Tensor]) -> None:
        weight = tensors[name]
        rows, width = weight.shape
        tensors[name] = weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width).contiguous()

    return plant


def one_row(name: str) -> Callable[[dict[str, Tensor]], None]:
    def plant(tensors: dict[str, Tensor]) -> None:
        tensors[name][7] = tensors[name][8]

    return plant


def query_and_key(tensors: dict[str, Tensor]) -> None:
    """GPT-2 has them side by side in one matrix."""
    whole = tensors["transformer.h.1.attn.c_attn.weight"]
    query, key, value = whole.chunk(3, dim=1)
    tensors["transformer.h.1.attn.c_attn.weight"] = torch.cat((key, query, value), dim=1)


def other_experts(tensors: dict[str, Tensor]) -> None:
    name = f"{LAYER}.mlp.gate.weight"
    tensors[name] = tensors[name].roll(1, 0)


LAYER = "model.layers.1"
PLANTED: list[tuple[str, str, Callable[[dict[str, Tensor]], None]]] = [
    ("query and output", "llama", swapped(f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.o_proj.weight")),
    ("key and value", "llama", swapped(f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.v_proj.weight")),
    ("gate and up", "llama", swapped(f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight")),
    ("a norm lost", "llama", lost(f"{LAYER}.input_layernorm.weight")),
    ("the last norm lost", "llama", lost("model.norm.weight")),
    ("norms of heads swapped", "qwen3", swapped(f"{LAYER}.self_attn.q_norm.weight", f"{LAYER}.self_attn.k_norm.weight")),
    ("rotary pairs", "llama", other_pairs(f"{LAYER}.self_attn.k_proj.weight", 2)),
    ("layers in another order", "llama", swapped(f"{LAYER}.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight")),
    ("one row of the head", "llama", one_row("lm_head.weight")),
    ("positions", "gpt2", one_row("transformer.wpe.weight")),
    ("query and key", "gpt2", query_and_key),
    ("experts numbered otherwise", "deepseek", other_experts),
    ("the shared expert lost", "deepseek", lost(f"{LAYER}.mlp.shared_experts.up_proj.weight")),
]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize(("family", "plant"), [pytest.param(*rest, id=what) for what, *rest in PLANTED])
def test_planted_errors_are_caught(
    made: Saved, tmp_path: Path, family: str, plant: Callable[[dict[str, Tensor]], None], compute: str
) -> None:
    folder, theirs = made(family)
    tensors = load_file(folder / "model.safetensors")
    plant(tensors)
    shutil.copy(folder / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunFailed, match=rf"at position \d+ of the fixed prompt .* {compute} allows"):
        convert.check(tmp_path, reference(theirs, compute))


def test_numbers_that_are_none_never_agree(made: Saved) -> None:
    folder, theirs = made("llama")
    said = reference(theirs)
    said.logits_KV[3, 5] = torch.nan
    with pytest.raises(RunFailed, match=r"position 3 .* token 5 by inf"):
        convert.check(folder, said)


def test_another_vocabulary(made: Saved) -> None:
    folder, theirs = made("llama")
    said = reference(theirs)
    with pytest.raises(RunFailed, match=f"{VOCAB} logits, and the model in training has 300"):
        convert.check(folder, ReferenceLogits(TOKENS, PLACES, said.logits_KV[:, :300], "fp32"))


def test_with_experts_a_few_tokens_may_go_another_way(made: Saved) -> None:
    folder, theirs = made("mixtral")
    said = reference(theirs)
    said.logits_KV[[2, 9, 15]] += 1.0
    convert.check(folder, said)
    said.logits_KV[[3, 4]] += 1.0
    with pytest.raises(RunFailed):
        convert.check(folder, said)


def test_a_file_of_logits_and_one_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "said"
    ReferenceLogits(TOKENS, PLACES[:3], torch.randn(3, 9), "fp8", "row").write(file)
    back = read_reference(file)
    assert torch.equal(back.tokens_S, TOKENS) and (back.compute, back.scaling) == ("fp8", "row")
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(RunError, match="is no file of logits"):
        read_reference(file)
