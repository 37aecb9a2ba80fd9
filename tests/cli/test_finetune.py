"""Fine-tuning: a Hugging Face model is imported, learns the answers of a set of instructions, and is asked for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import Workshop

from phalanx.data.dataset import open_dataset
from phalanx.data.pack import IGNORED
from phalanx.events.records import Step
from phalanx.models.init import build, materialize
from phalanx.spec.load import load
from phalanx.training.micro_batch import summed_loss

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNTRIES = ["alba", "brig", "corva", "dunn", "elm", "fara", "gost", "hale", "ister", "jor", "kelp", "lund"]
CAPITALS = ["mora", "nest", "oxford", "pell", "quay", "rove", "sand", "tarn", "umber", "vale", "wick", "yarrow"]

RUN = """\
[model]
from = "base"

[data]
source = "chat"
paths = ["capitals.jsonl"]
packing = "best-fit"
cache = "cache"
eval_fraction = 0

[train]
batch = 8
sequence_length = 64
steps = 150

[optimizer]
learning_rate = 3e-3
weight_decay = 0.0
warmup_steps = 10

[cluster]
device = "cpu"
cpu_ranks = 2
threads = 1

[watch]
log_every = 50
"""


@pytest.fixture
def shop(workshop: Workshop) -> Workshop:
    """A folder with an imported model, its chat tokenizer and the instructions."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    words.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words.train_from_iterator(["The capital of " + name for name in COUNTRIES + CAPITALS], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>", chat_template=TEMPLATE)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(workshop.path / "hf")
    tokenizer.save_pretrained(workshop.path / "hf")
    records = [
        {
            "messages": [
                {"role": "user", "content": f"The capital of {country}?"},
                {"role": "assistant", "content": f"It is {capital}."},
            ]
        }
        for country, capital in zip(COUNTRIES, CAPITALS, strict=True)
    ]
    (workshop.path / "capitals.jsonl").write_text("\n".join(map(json.dumps, records)))
    (workshop.path / "tune.toml").write_text(RUN)
    ended = workshop.run("import", "hf", "base")
    assert ended.code == 0, ended
    return workshop


@pytest.mark.slow
def test_an_imported_model_learns_the_answers(shop: Workshop) -> None:
    ended = shop.run("train", "tune.toml", "--run-dir", "tuned", "--json")
    assert ended.code == 0, ended
    last = [event for event in shop.events("tuned") if isinstance(event, Step)][-1]
    assert last.loss < 0.02, "near-zero loss on the answers"
    measured = shop.run("eval", "tuned", "--source", "chat", "--path", "capitals.jsonl", "--json")
    assert measured.json["loss"] < 0.02, "conversations stay whole where they are measured, too"
    for country, capital in zip(COUNTRIES, CAPITALS, strict=True):
        prompt = f"<|user|>The capital of {country}?<|end|><|assistant|>"
        if country not in COUNTRIES[:3]:
            continue  # three stand for all: each is a process of its own
        told = shop.run("generate", "tuned", prompt, "--temperature", 0, "--tokens", 12, "--json")
        assert told.code == 0, told
        assert told.json["text"].startswith(f"It is {capital}."), told


def test_masked_prompts_contribute_nothing_to_the_loss(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shop.path)
    run = load("tune.toml")
    batch = open_dataset(run.data, run.train.sequence_length, 0).train.batch(np.arange(4))
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    decode = open_dataset(run.data, run.train.sequence_length, 0).tokenizer.decode
    trained_on = decode(batch.targets[0][batch.targets[0] != IGNORED])
    assert "It is" in trained_on and "capital" not in trained_on
    model = materialize(build(run.model), 0, torch.device("cpu"))
    inputs = (tokens, torch.from_numpy(batch.positions), torch.from_numpy(batch.documents))
    summed_loss(model(*inputs), targets).backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    # The same from the answers' log-probabilities alone, picked out by hand.
    model.zero_grad()
    rows, columns = np.nonzero(batch.targets != IGNORED)
    chosen = F.log_softmax(model(*inputs)[rows, columns], dim=-1)
    (-chosen[torch.arange(len(rows)), targets[rows, columns]]).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-5, atol=1e-6)
    # And no gradient reaches the logits of a prompt at all.
    logits = model(*inputs).detach().requires_grad_()
    summed_loss(logits, targets).backward()
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad[targets == IGNORED]) == 0


@pytest.mark.slow
def test_a_hugging_face_folder_is_trained_from_directly(shop: Workshop) -> None:
    ended = shop.run("train", "tune.toml", "model.from=hf", "train.steps=2", "--run-dir", "direct", "--json")
    assert ended.code == 0, ended
    imported = shop.run("train", "tune.toml", "train.steps=2", "--run-dir", "imported", "--json")
    assert imported.code == 0, imported
    first = {name: next(e.loss for e in shop.events(name) if isinstance(e, Step)) for name in ("direct", "imported")}
    assert first["direct"] == first["imported"]
    assert Path(shop.path / "direct" / "tokenizer" / "tokenizer.json").is_file()
