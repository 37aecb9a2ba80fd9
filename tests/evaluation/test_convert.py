"""Import and export: the same tensors bit for bit, the same logits both ways, and nothing left behind when a folder is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import saved
from hf_models import CONFIGS, logits, make, save, save_tokenizer, tokens
from ranks import ALONE
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.evaluation.convert import export_checkpoint, import_folder
from phalanx.evaluation.open_model import open_model
from phalanx.models.init import build, materialize
from phalanx.spec import hf_config
from phalanx.spec.dump import dump
from phalanx.spec.errors import PhalanxError, RunError
from phalanx.spec.model import PRESETS, Mla, ModelSpec, Moe
from phalanx.spec.run import Run, Train

transformers = pytest.importorskip("transformers")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype is other[name].dtype for name in one
    )


def ours(path: Path, ids: Tensor) -> Tensor:
    with torch.no_grad():
        got: Tensor = open_model(path, "cpu").model(ids, torch.arange(ids.shape[1]).expand(ids.shape))
    return got


def trained(folder: Path, spec: ModelSpec) -> Path:
    """A run directory as training leaves it, of random weights."""
    folder.mkdir()
    (folder / "run.toml").write_text(dump(Run(model=spec, train=Train(batch=2, steps=10, sequence_length=16))))
    model = materialize(build(spec), 3, torch.device("cpu"))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(5)))
        for parameter in model.parameters():
            parameter.mul_(4)
    state = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    saved(folder / "checkpoints", 10, state, {"progress": {}, "version": "0"}, ALONE)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    theirs = save(tmp_path / "hf", name)
    ids = tokens()
    expected = logits(theirs, ids)
    torch.testing.assert_close(ours(tmp_path / "hf", ids), expected, atol=1e-4, rtol=0)
    done = import_folder(tmp_path / "hf", tmp_path / "run")
    assert done.notes == () and done.dtype == "fp32"
    assert done.parameters == sum(parameter.numel() for parameter in theirs.parameters())
    torch.testing.assert_close(ours(tmp_path / "run", ids), expected, atol=1e-4, rtol=0)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert equal(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "out"))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(back, ids), expected, atol=1e-4, rtol=0)
    assert (back.config.bos_token_id, back.config.eos_token_id) == (0, 0)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words.decode(words("the lazy dog")["input_ids"]) == "the lazy dog"


LATENT = Mla(kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, value_dim=6)
ROUTED = Moe(experts=8, active=2, ffn=16, shared=2, dense_layers=1, router="sigmoid", groups=4, active_groups=2, scale=1.5)
SMALL = ModelSpec(vocab=257, dim=32, heads=4, kv_heads=2, layers=3, context=128)
TRAINED = {
    "llama": SMALL,
    "mistral": replace(SMALL, dim=30, head_dim=8, window=10),
    "qwen2": replace(SMALL, qkv_bias=True, window=6, window_from=1),
    "phi3": replace(SMALL, rope_fraction=0.5, window=10),
    "gemma2": replace(PRESETS["tiny-gemma2"], vocab=257, context=128),
    "gemma3_text": replace(PRESETS["tiny-gemma3"], vocab=257, context=128),
    "qwen3": replace(SMALL, qk_norm=True, tied=True),
    "mixtral": replace(SMALL, moe=Moe(experts=4, active=2, ffn=24)),
    "qwen3_moe": replace(SMALL, qk_norm=True, moe=Moe(experts=4, active=2, ffn=24, normalize=False, balance_loss=0.01)),
    "gpt2": replace(SMALL, kv_heads=None, norm="layer", activation="gelu", positions="learned", bias=True, tied=True),
    "deepseek_v3": replace(SMALL, kv_heads=None, mla=LATENT, moe=replace(ROUTED, bias_rate=0.001)),
}


@pytest.mark.parametrize("family", TRAINED)
def test_a_trained_model_of_every_family_goes_to_transformers(tmp_path: Path, family: str) -> None:
    run = trained(tmp_path / "run", TRAINED[family])
    done = export_checkpoint(run, tmp_path / "out")
    assert done.family == family and done.notes == ()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.model_type == family
    ids = torch.randint(257, (2, 40), generator=torch.Generator().manual_seed(4))
    got = ours(run, ids)
    assert got.std() > 0.1
    torch.testing.assert_close(logits(theirs, ids), got, atol=1e-4, rtol=0)
    import_folder(tmp_path / "out", tmp_path / "again")
    assert torch.equal(ours(tmp_path / "again", ids), got)


def test_the_byte_tokenizer_means_the_same_to_transformers(tmp_path: Path) -> None:
    export_checkpoint(trained(tmp_path / "run", SMALL), tmp_path / "out")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Grüße,\tWelt!\r\n  \x00 日本 🙂 <|end|x <|end|>"
    assert words(text)["input_ids"] == list(text.encode())
    assert words.decode(list(text.encode())) == text
    assert (words.eos_token_id, len(words)) == (256, 257)


def test_multi_token_prediction_goes_along_with_deepseek(tmp_path: Path) -> None:
    spec = replace(TRAINED["deepseek_v3"], mtp_depth=1)
    export_checkpoint(trained(tmp_path / "run", spec), tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    assert torch.equal(found["model.layers.3.embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found["model.layers.3.shared_head.head.weight"], found["lm_head.weight"])
    assert found["model.layers.3.eh_proj.weight"].shape == (32, 64)
    assert hf_config.model_spec(tmp_path / "out").mtp_depth == 1
    import_folder(tmp_path / "out", tmp_path / "again")
    one, other = (open_model(tmp_path / name, "cpu").model.state_dict() for name in ("run", "again"))
    assert any(name.startswith("mtp.0.block.mlp.experts") for name in one)
    assert equal(one, other)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_modules_that_serve_training_only_are_left_out_elsewhere(tmp_path: Path) -> None:
    done = export_checkpoint(trained(tmp_path / "run", replace(SMALL, mtp_depth=2)), tmp_path / "out")
    assert "its 2 modules are not exported" in done.notes[0]
    assert hf_config.model_spec(tmp_path / "out").mtp_depth == 0


def test_weights_keep_their_format_unless_another_is_asked_for(tmp_path: Path) -> None:
    model = make("deepseek").to(torch.bfloat16)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias.float()
    model.save_pretrained(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    assert import_folder(tmp_path / "hf", tmp_path / "run").dtype == "bf16+fp32"  # a router's bias is always fp32
    export_checkpoint(tmp_path / "run", tmp_path / "same")
    assert equal(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "same"))
    assert json.loads((tmp_path / "same" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    export_checkpoint(tmp_path / "run", tmp_path / "half", dtype="fp16")
    formats = {name: tensor.dtype for name, tensor in tensors_of(tmp_path / "half").items()}
    assert {dtype for name, dtype in formats.items() if not name.endswith("e_score_correction_bias")} == {torch.float16}
    assert {dtype for name, dtype in formats.items() if name.endswith("e_score_correction_bias")} == {torch.float32}


def test_shards_in_and_out(tmp_path: Path) -> None:
    save(tmp_path / "hf", "mixtral", max_shard_size="100KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    done = import_folder(tmp_path / "hf", tmp_path / "run")
    assert done.files == len(list((tmp_path / "hf").glob("*.safetensors")))
    done = export_checkpoint(tmp_path / "run", tmp_path / "out", shard_size=150_000)
    assert done.files == len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert equal(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "out"))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek"])
def test_fused_experts_are_read_too(tmp_path: Path, name: str) -> None:
    save(tmp_path / "apart", name)
    shutil.copytree(tmp_path / "apart", tmp_path / "fused")
    save_file(
        {key: tensor.contiguous() for key, tensor in make(name).state_dict().items()}, tmp_path / "fused" / "model.safetensors"
    )
    assert any(key.endswith("experts.gate_up_proj") for key in tensors_of(tmp_path / "fused"))
    assert torch.equal(ours(tmp_path / "fused", tokens()), ours(tmp_path / "apart", tokens()))


def test_names_as_the_published_gpt2_has_them(tmp_path: Path) -> None:
    theirs = save(tmp_path, "gpt2")
    published = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(tmp_path).items()}
    published |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 96, 96).tril() for layer in range(3)}
    save_file(published, tmp_path / "model.safetensors")
    torch.testing.assert_close(ours(tmp_path, tokens()), logits(theirs, tokens()), atol=1e-4, rtol=0)


def test_a_head_that_is_declared_tied_may_be_there(tmp_path: Path) -> None:
    theirs = save(tmp_path, "llama-tied")
    found = tensors_of(tmp_path)
    save_file(found | {"lm_head.weight": found["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    torch.testing.assert_close(ours(tmp_path, tokens()), logits(theirs, tokens()), atol=1e-4, rtol=0)


def test_rotated_channels_that_are_not_interleaved(tmp_path: Path) -> None:
    theirs = save(tmp_path, "deepseek", rope_interleave=False)
    torch.testing.assert_close(ours(tmp_path, tokens()), logits(theirs, tokens()), atol=1e-4, rtol=0)


def _edit(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        save_file(
            {name: tensor.contiguous() for name, tensor in change(tensors_of(folder)).items()}, folder / "model.safetensors"
        )

    return edit


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _words(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "tokenizer.json"
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    return edit


def _folder_instead(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def _index(folder: Path) -> None:
    where = {name: "model-00001-of-00002.safetensors" for name in tensors_of(folder)}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    where["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


NORM, QUERY, EXPERT = (
    "model.norm.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.2.block_sparse_moe.experts.3.w2.weight",
)
CORRUPTED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "tensor missing": (_edit(lambda t: {name: t[name] for name in t if name != QUERY}), (f"lacks the tensor {QUERY}",)),
    "expert missing": (_edit(lambda t: {name: t[name] for name in t if name != EXPERT}), (f"lacks the tensor {EXPERT}",)),
    "unknown tensor": (_edit(lambda t: t | {"model.extra.weight": torch.ones(2)}), ("model.extra.weight", "model.safetensors")),
    "layer too many": (_edit(lambda t: t | {"model.layers.3.input_layernorm.weight": torch.ones(48)}), ("model.layers.3.input_layernorm",)),
    "bias": (_edit(lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}), ("model.layers.0.self_attn.q_proj.bias",)),
    "wrong shape": (_edit(lambda t: t | {QUERY: t[QUERY][:-1]}), (QUERY, "[47, 48]", "[48, 48]")),
    "turned": (_edit(lambda t: t | {EXPERT: t[EXPERT].T}), (EXPERT, "[80, 48]", "[48, 80]")),
    "integers": (_edit(lambda t: t | {NORM: t[NORM].to(torch.int8)}), (NORM, "I8")),
    "formats mixed": (_edit(lambda t: t | {EXPERT: t[EXPERT].half()}), (EXPERT, "F16", "F32")),
    "file cut": (_cut, ("model.safetensors", "cut short")),
    "header broken": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"x" * 40), ("header",)),
    "file empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), ("model.safetensors",)),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ("model.safetensors.index.json",)),
    "shard missing": (_index, ("model-00002-of-00002.safetensors is missing",)),
    "config broken": (lambda folder: (folder / "config.json").write_text("{"), ("config.json",)),
    "config missing": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "architecture": (_config(architectures=["BertModel"]), ("BertModel", "MixtralForCausalLM")),
    "more active than there are": (_config(num_experts_per_tok=9), ("model.moe.active = 9",)),
    "far too many layers": (_config(num_hidden_layers=10**12), ("config.json", "1000000000000 layers")),
    "far too many experts": (_config(num_local_experts=10**12), ("config.json", "1000000000000 experts", "has 4")),
    "tokenizer of no known kind": (_words(lambda table: table["model"].update(type="Foo")), ("tokenizer.json", "no tokenizer")),
    "tokenizer settings broken": (lambda folder: (folder / "tokenizer_config.json").write_text("{"), ("tokenizer_config.json",)),
    "weights a folder": (_folder_instead, ("model.safetensors is not a file",)),
    "experts changed": (_config(num_local_experts=5), ("block_sparse_moe.experts.4.w1.weight",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save(folder, "mixtral")
    return folder


@pytest.mark.parametrize("damage", CORRUPTED)
def test_a_damaged_folder_is_refused_by_name_and_leaves_nothing(tmp_path: Path, good: Path, damage: str) -> None:
    change, said = CORRUPTED[damage]
    shutil.copytree(good, tmp_path / "hf")
    change(tmp_path / "hf")
    for attempt in (lambda: import_folder(tmp_path / "hf", tmp_path / "run"), lambda: open_model(tmp_path / "hf", "cpu")):
        with pytest.raises(PhalanxError) as refused:
            attempt()
        assert all(word in str(refused.value) for word in said), refused.value
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_texts_end_where_transformers_ends_them(tmp_path: Path, good: Path) -> None:
    shutil.copytree(good, tmp_path / "hf")
    settings = tmp_path / "hf" / "generation_config.json"
    for said, stops in (({"eos_token_id": [5, 9]}, {5, 9}), ({"eos_token_id": 7}, {7}), ({}, {0}), ([], {0})):
        settings.write_text(json.dumps(said))
        assert open_model(tmp_path / "hf", "cpu").stops == stops
    settings.write_text('{"eos_token_id": [5, 9]}')
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert open_model(tmp_path / "run", "cpu").stops == {5, 9}


def test_an_end_that_only_the_model_names(tmp_path: Path, good: Path) -> None:
    shutil.copytree(good, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer_config.json").unlink()
    _words(lambda table: table["added_tokens"][0].update(content="<stop>"))(tmp_path / "hf")
    _words(lambda table: table["model"]["vocab"].update({"<stop>": table["model"]["vocab"].pop("<|endoftext|>")}))(
        tmp_path / "hf"
    )
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert open_model(tmp_path / "run", "cpu").tokenizer.end == 0
    _config(eos_token_id=None)(tmp_path / "hf")
    with pytest.raises(RunError, match="does not say which token ends a document"):
        import_folder(tmp_path / "hf", tmp_path / "again")


def test_a_tokenizer_that_leads_nowhere_is_not_taken_for_none(tmp_path: Path, good: Path) -> None:
    shutil.copytree(good, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    (tmp_path / "hf" / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(RunError, match=r"tokenizer\.json is not a file"):
        import_folder(tmp_path / "hf", tmp_path / "run")


def test_a_model_without_tokenizer_is_imported_with_a_word_about_it(tmp_path: Path, good: Path) -> None:
    shutil.copytree(good, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    done = import_folder(tmp_path / "hf", tmp_path / "run")
    assert "has no tokenizer.json" in done.notes[0]
    assert torch.equal(ours(tmp_path / "run", tokens()), ours(good, tokens()))


def test_a_failure_halfway_leaves_nothing(tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.checkpointing.hf_folder import WeightsFolder

    read = WeightsFolder.rows

    def fail(self: WeightsFolder, name: str, first: int, last: int) -> Tensor:
        if name == NORM:
            raise OSError(28, "No space left on device")
        return read(self, name, first, last)

    monkeypatch.setattr(WeightsFolder, "rows", fail)
    with pytest.raises(PhalanxError, match="No space left on device"):
        import_folder(good, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path: Path, good: Path) -> None:
    (tmp_path / "run").mkdir()
    import_folder(good, tmp_path / "run")  # empty, so it may be filled
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(RunError, match="link already exists"):
        import_folder(good, tmp_path / "link")
    for goal in (lambda: import_folder(good, tmp_path / "run"), lambda: export_checkpoint(tmp_path / "run", tmp_path / "run")):
        with pytest.raises(RunError, match="already exists"):
            goal()


def test_an_import_can_be_moved_and_its_source_removed(tmp_path: Path, good: Path) -> None:
    shutil.copytree(good, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    shutil.rmtree(tmp_path / "hf")
    (tmp_path / "run").rename(tmp_path / "moved")
    opened = open_model(tmp_path / "moved", "cpu")
    assert opened.tokenizer.decode(opened.tokenizer.encode("the lazy dog")) == "the lazy dog"
    export_checkpoint(tmp_path / "moved", tmp_path / "out")
    assert equal(tensors_of(good), tensors_of(tmp_path / "out"))
