"""Small real tokenizers for tests, trained on the spot and saved as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chat_templates import Family

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "What is asked? This is answered. User and assistant take turns.",
    "naïve – 語 – 🜁 déjà vu, 42 × 17 = 714!",
    "def add(a, b):\n    return a + b\n",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_bpe(folder: Path, *, template: str | None = None, eos: str | None = "<|endoftext|>", bos: bool = False) -> Path:
    """A byte-level BPE, as GPT-2 and Llama 3 have; `bos`: every text begins with <|im_start|>."""
    from tokenizers import processors

    words = _byte_level(SPECIAL)
    if bos:
        start = "<|im_start|>"
        words.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, words.token_to_id(start))]
        )
    return _save(words, folder, template, eos)


def _byte_level(special: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    return words


def save_family(folder: Path, family: Family) -> Path:
    """A byte-level BPE with the special tokens and the template of a model family."""
    words = _byte_level(list(family.special))
    _save(words, folder, family.template, family.eos)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({"bos_token": family.bos} if family.bos else {})))
    return folder


def save_unigram(folder: Path, *, template: str | None = None, eos: str | None = "<|endoftext|>") -> Path:
    """A Unigram model over metaspaces, as SentencePiece makes them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.Unigram())
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    words.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(vocab_size=150, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False),
    )
    return _save(words, folder, template, eos)


def _save(words: object, folder: Path, template: str | None, eos: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    words.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({key: value for key, value in config.items() if value}))
    return folder
