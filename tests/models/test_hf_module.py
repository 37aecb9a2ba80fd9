"""Any decoder of transformers: it computes what transformers computes, keeps documents apart, and has transformers' names and initial values."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hf_families import FAMILIES, ONE_DOCUMENT, QUICK, batch, config, marked, ours, spec, theirs
from torch import Tensor

from phalanx.models import hf_module, init
from phalanx.models.attention import attend_locally
from phalanx.spec.errors import RunError

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
CPU = torch.device("cpu")
SPLIT = 9
"""Length of the first of two documents."""


def close(got: Tensor, expected: Tensor, bound: float, floor: float = 0.0) -> None:
    scale = max(float(expected.abs().max()), floor)
    assert float((got - expected).abs().max()) <= bound * scale


def compare(model: Any, reference: Any, got: Tensor, expected: Tensor) -> None:
    """Logits and the gradients of a random function of them, within the bounds of `phalanx verify` in fp32."""
    close(got, expected, 1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
    for logits in (got, expected):
        (logits * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    top = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    for name, parameter in model.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None, name
        else:
            close(parameter.grad, gradients[name], 1e-4, 0.01 * top)


@pytest.mark.parametrize("name", marked(FAMILIES))
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    reference = theirs(name)
    model, tokens = ours(name, reference), batch()
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in reference.named_parameters()]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    assert model.training, "dropout and skipped layers are off in training too"
    compare(model, reference, model(tokens, positions), reference(input_ids=tokens, use_cache=False).logits)


@pytest.mark.parametrize("name", marked(sorted(set(FAMILIES) - set(ONE_DOCUMENT))))
def test_documents_of_a_sequence_are_computed_as_if_they_were_alone(name: str) -> None:
    reference = theirs(name)
    model, tokens = ours(name, reference), batch()
    rest = tokens.shape[1] - SPLIT
    positions = torch.cat((torch.arange(SPLIT), torch.arange(rest))).repeat(len(tokens), 1)
    documents = (torch.arange(tokens.shape[1]) >= SPLIT).long().repeat(len(tokens), 1)
    parts = [reference(input_ids=part, use_cache=False).logits for part in (tokens[:, :SPLIT], tokens[:, SPLIT:])]
    assert hf_module.one_document(model) is None
    compare(model, reference, model(tokens, positions, documents), torch.cat(parts, 1))


@pytest.mark.parametrize("name", ONE_DOCUMENT)
def test_models_that_cannot_keep_documents_apart_say_why(name: str) -> None:
    reason = hf_module.one_document(hf_module.build(spec(name)))
    assert reason is not None
    assert ("only 1 of its 2 layers" if name == "jamba" else "does not use the attention interface") in reason


@pytest.mark.parametrize("name", ["phi3", "mistral", "deepseek_v3", "olmoe"])
def test_every_layer_attends_by_its_own_attribute(name: str) -> None:
    model, calls = ours(name, theirs(name)), []

    def counted(path: str) -> Callable[..., Tensor]:
        def attend(*arguments: Any) -> Tensor:
            calls.append(path)
            return attend_locally(*arguments)

        return attend

    for path in model.attentions:
        model.get_submodule(path).attend = counted(path)
    tokens = batch()
    model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    assert calls == [f"model.layers.{layer}.self_attn" for layer in range(2)]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "falcon"])
def test_a_tied_weight_is_one_parameter_whatever_becomes_of_it(name: str) -> None:
    model = hf_module.build(spec(name))
    assert "lm_head.weight" not in model.state_dict()
    assert all(parameter.is_meta for parameter in model.parameters()) and all(buffer.is_meta for buffer in model.buffers())
    init.materialize(model, 0, CPU)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert all(tensor.device == CPU for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("name", marked([*QUICK, "apertus", "gemma", "gpt_bigcode"]))
def test_initial_values_are_distributed_as_in_transformers(name: str) -> None:
    import transformers

    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config(name))
    model = init.materialize(hf_module.build(spec(name)), 0, CPU)
    for key, expected in reference.named_parameters():
        got = model.get_parameter(key)
        if expected.numel() > 1 and float(expected.detach().std()) > 0:
            ratio = float(got.detach().std() / expected.detach().std())
            assert abs(ratio - 1) < 6 / expected.numel() ** 0.5 + 0.05, (
                key,
                ratio,
            )  # one row of a padding token is zero in theirs
        else:
            assert torch.equal(got, expected), key
    for key, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    first, again, other = (init.materialize(hf_module.build(spec("phi3")), seed, CPU) for seed in (0, 0, 1))
    name = "model.layers.1.mlp.gate_up_proj.weight"
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), first.get_parameter(name.replace(".1.", ".0.")))


def test_model_init_std_changes_the_initial_weights() -> None:
    wider = init.materialize(hf_module.build(replace(spec("phi3"), init_std=0.5)), 0, CPU)
    assert abs(float(wider.get_parameter("lm_head.weight").detach().std()) - 0.5) < 0.02


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "phi77"}, ('model_type = "phi77"', "unknown to transformers")),
        ({"model_type": "vit"}, ("no causal language model", '"vit"', "decoder")),
        ({"pad_token_id": 1000}, ("cannot build Phi3ForCausalLM", "Padding_idx")),
        ({"hidden_act": "nonsense"}, ("cannot build Phi3ForCausalLM", "nonsense")),
    ],
)
def test_what_transformers_cannot_build_is_refused_in_a_sentence(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    values = json.loads(spec("phi3").config or "") | changes
    with pytest.raises(RunError) as refused:
        hf_module.build(replace(spec("phi3"), config=json.dumps(values)))
    assert all(word in str(refused.value) for word in words), refused.value


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given = spec("phi3")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RunError, match=r"transformers 5 or newer.*pip install phalanx\[hf\]"):
        hf_module.build(given)
