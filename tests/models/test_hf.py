"""The decoder computes what the published models compute: logits against transformers, for the same random weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hf_models import CONFIGS, logits, make, save, tokens
from torch import Tensor

from phalanx.models import hf_mapping
from phalanx.models.decoder import Decoder
from phalanx.models.init import build
from phalanx.spec import hf_config, hf_config_write
from phalanx.spec.errors import RunError
from phalanx.spec.model import PRESETS, Mla, ModelSpec, Moe


def rows_of(state: dict[str, Tensor]) -> hf_mapping.Rows:
    """Their tensors in memory, read as a folder would be."""
    matrices = {name: tensor.flatten(0, -2) if tensor.ndim > 1 else tensor[:, None] for name, tensor in state.items()}
    return lambda name, first, last: matrices[name][first:last]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    # Straight from their module: experts are in the fused form that transformers 5 holds in memory.
    theirs = make(name)
    folder = tmp_path_factory.mktemp("config")
    theirs.config.architectures = [type(theirs).__name__]
    theirs.config.save_pretrained(folder)
    spec = hf_config.model_spec(folder)
    state = theirs.state_dict()
    ours = Decoder(spec).eval()
    hf_mapping.fill(ours.state_dict(), hf_mapping.table(spec, state), rows_of(state))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    ids = tokens()
    expected = logits(theirs, ids)
    with torch.no_grad():
        got = ours(ids, torch.arange(60).expand(2, 60))
    assert expected.std() > 0.5  # there is something to compare
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("stretched", ["llama-3.1", "qwen3-yarn", "deepseek-yarn"])
def test_a_stretched_context_tells(stretched: str) -> None:
    # Guards the comparison above: a setting without effect would compare nothing.
    with_it, without = make(stretched), make(stretched, rope_scaling=None, rope_parameters=None)
    assert (logits(with_it, tokens()) - logits(without, tokens())).abs().max() > 1e-2


def test_the_stretched_llama_keeps_blends_and_slows_frequencies() -> None:
    # Were no frequency in one of the three ranges, the comparison would not test that range.
    theirs = make("llama-3.1")
    ratios = theirs.model.rotary_emb.inv_freq / 5000.0 ** -(torch.arange(0, 16, 2) / 16)
    kept, slowed = torch.isclose(ratios, torch.tensor(1.0)), torch.isclose(ratios, torch.tensor(1 / 8))
    assert kept.any()
    assert slowed.any()
    assert (~kept & ~slowed).any()


def _expressible(spec: ModelSpec) -> bool:
    try:
        hf_config_write.family(spec)
    except RunError:
        return False
    return True


SMALL = ModelSpec(vocab=64, dim=32, heads=4, layers=3)
LATENT = Mla(kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, value_dim=6)
ROUTED = Moe(experts=8, active=2, ffn=16, shared=2, dense_layers=1, router="sigmoid", groups=2)
SPECS = {name: replace(spec, vocab=spec.vocab or 257) for name, spec in PRESETS.items()} | {
    "two-ahead": replace(SMALL, mla=LATENT, moe=ROUTED, mtp_depth=2),
    "latent-dense": replace(SMALL, mla=LATENT, tied=True),
}


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if _expressible(spec)])
def test_the_table_has_every_tensor_of_the_model_once(name: str) -> None:
    spec = SPECS[name]
    entries = hf_mapping.table(spec)
    ours = {key: tuple(tensor.shape) for key, tensor in build(spec).state_dict().items()}
    if spec.mla is None:
        ours = {key: shape for key, shape in ours.items() if not key.startswith("mtp.")}
    assert {entry.name: entry.shape for entry in entries} == ours
    assert len(entries) == len(ours)


@pytest.mark.parametrize("most", [64, 1000, 1 << 20])
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "deepseek"])
def test_blocks_of_any_size_give_the_same_tensors(name: str, most: int) -> None:
    theirs = make(name)
    theirs.config.architectures = [type(theirs).__name__]
    state = theirs.state_dict()
    config = hf_config.FAMILIES[type(theirs).__name__]
    spec = config[0](hf_config.Config(theirs.config.to_dict(), config[1]))  # type: ignore[arg-type]
    for entry in hf_mapping.table(spec, state):
        whole, small = torch.empty(entry.shape), torch.full(entry.shape, torch.nan)
        hf_mapping.fill({entry.name: whole}, (entry,), rows_of(state))
        for block in hf_mapping.blocks(entry, 4, most):
            small[block.box.index].copy_(hf_mapping.read(block, rows_of(state)))
        assert torch.equal(whole, small)


def test_weights_saved_by_transformers_have_the_names_of_the_table(tmp_path_factory: pytest.TempPathFactory) -> None:
    safetensors = pytest.importorskip("safetensors")
    for name in CONFIGS:
        folder = tmp_path_factory.mktemp(name)
        save(folder, name, words=False)
        with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
            theirs = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  # it is no dict
        table = hf_mapping.table(hf_config.model_spec(folder), theirs)
        assert {piece.hf_name: piece.shape for entry in table for piece in entry.parts} == theirs, name
