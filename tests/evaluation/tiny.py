"""Tiny models and tokenizers for the tests of evaluation: the same random weights here and in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.models.init import build
from phalanx.spec.model import ModelSpec

CONTEXT = 64
_NAMES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def spec(vocab: int) -> ModelSpec:
    return ModelSpec(vocab=vocab, dim=32, ffn=48, layers=2, heads=4, kv_heads=2, context=CONTEXT)


@dataclass(frozen=True)
class Pair:
    """One set of weights in two programs."""

    ours: Any
    hf_name: Any

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        found: Tensor = self.hf_name(input_ids=torch.tensor([list(tokens)])).logits[0]
        return found

    def logprob(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Log-likelihood of one continuation by transformers, and whether it is the likeliest; no batch, no padding."""
        logits = self.logits([*context, *continuation])[len(context) - 1 : -1]
        targets = torch.tensor(list(continuation))
        chosen = logits.log_softmax(-1)[torch.arange(len(targets)), targets]
        return float(chosen.double().sum()), bool((logits.argmax(-1) == targets).all())

    def greedy(self, start: Sequence[int], count: int) -> list[int]:
        tokens = list(start)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(start) :]


def twins(vocab: int) -> Pair:
    """A tiny Llama with weights large enough that every part of it tells."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=dice))
    state = theirs.state_dict()
    ours = build(spec(vocab)).to_empty(device="cpu").eval()
    ours.load_state_dict({name: state[_their_name(name)] for name, _ in ours.named_parameters()})
    return Pair(ours, theirs)


def _their_name(name: str) -> str:
    *where, kind = name.split(".")
    if where[0] != "blocks":
        return f"{_OUTSIDE[where[0]]}.{kind}"
    return f"model.layers.{where[1]}.{_NAMES['.'.join(where[2:])]}.{kind}"


def bpe(folder: Path, around: str | None = None) -> Path:
    """A byte-level BPE tokenizer.json of a few words, with <s> and </s>; `around`: what it puts around texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat sat on the mat and the dog ran in the sun"] * 20, trainer)
    if around is not None:
        ids = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path
