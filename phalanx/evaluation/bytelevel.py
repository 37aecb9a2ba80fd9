"""The byte tokenizer as files that transformers reads: the same ids for the same text. Written by `phalanx export`."""

from __future__ import annotations

import json
from typing import Any

END = 256
_END_TEXT = "<|end|>"


def files(context: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json: 256 tokens, one per byte in the order of bytes, and the end."""
    vocabulary = {letter: byte for byte, letter in enumerate(_alphabet())}
    added = {
        "id": END,
        "content": _END_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": _END_TEXT,
        "eos_token": _END_TEXT,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # the end's name in a text is text, as it is here
    }
    return {
        name: json.dumps(table, indent=2).encode()
        for name, table in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config))
    }


def _alphabet() -> list[str]:
    """A printable letter for every byte, as GPT-2 chose them: itself where it can be seen, else one from U+0100 on."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256))
    return [chr(byte) if byte in shown else chr(256 + next(others)) for byte in range(256)]
