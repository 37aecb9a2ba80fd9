"""What someone probably meant by a name that is not known. Called where `spec/load` and `spec/typed` have found a
problem."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from phalanx.spec.keys import FREE, KEYS, NAMED, TABLES, keys_of
from phalanx.spec.words import either

# What other trainers call the same thing, where spelling alone would not lead there.
_ELSEWHERE = {
    "lr": "optimizer.learning_rate",
    "max_lr": "optimizer.learning_rate",
    "min_lr": "optimizer.final_fraction",
    "optimizer": "optimizer.name",
    "lr_scheduler": "optimizer.schedule",
    "warmup": "optimizer.warmup_steps",
    "grad_clip": "train.clip",
    "gradient_clipping": "train.clip",
    "max_grad_norm": "train.clip",
    "max_norm": "train.clip",
    "batch_size": "train.batch",
    "global_batch_size": "train.batch",
    "micro_batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "seq_len": "train.sequence_length",
    "seq_length": "train.sequence_length",
    "max_seq_len": "train.sequence_length",
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "dtype": "precision.compute",
    "hidden_size": "model.dim",
    "n_embd": "model.dim",
    "n_layer": "model.layers",
    "n_head": "model.heads",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "n_kv_heads": "model.kv_heads",
    "intermediate_size": "model.ffn",
    "vocab_size": "model.vocab",
    "max_position_embeddings": "model.context",
    "num_experts": "model.moe.experts",
    "num_local_experts": "model.moe.experts",
    "n_routed_experts": "model.moe.experts",
    "num_experts_per_tok": "model.moe.active",
    "moe_intermediate_size": "model.moe.ffn",
    "n_shared_experts": "model.moe.shared",
    "kv_lora_rank": "model.mla.kv_rank",
    "q_lora_rank": "model.mla.q_rank",
    "init_from": "model.from",
    "pretrained": "model.from",
    "text_field": "data.field",
    "text_column": "data.field",
    "chat_template": "data.template",
    "dp": "layout.data",
    "tp": "layout.tensor",
    "pp": "layout.pipeline",
    "cp": "layout.context",
    "ep": "layout.expert",
    "fsdp": "layout.shard",
    "tensor_parallel_size": "layout.tensor",
    "pipeline_parallel_size": "layout.pipeline",
}


def near(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Known names spelled almost like this one, best first."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)


def near_keys(path: str) -> list[str]:
    """Keys that an unknown dotted key may stand for: misspelled in its table, standing in another, or named otherwise."""
    table, _, name = path.rpartition(".")
    if name in _ELSEWHERE:
        here = [key.path for key in keys_of(table) if key.name == _ELSEWHERE[name].rpartition(".")[2]]
        return here or [_ELSEWHERE[name]]
    found = [f"{table}.{match}" for match in near(name, (key.name for key in keys_of(table)))]
    found += _elsewhere([name])
    return list(dict.fromkeys(found or _elsewhere(near(name, {key.name for key in KEYS.values()}, cutoff=0.75))))[:3]


def _elsewhere(names: list[str]) -> list[str]:
    """Keys of these names in any table; in those that the person names only where no other has one."""
    paths = [key.path for key in KEYS.values() if key.name in names]
    return [path for path in paths if "*" not in path] or [_readable(path) for path in paths]


def _readable(path: str) -> str:
    return path.replace("*", "NAME")


def _known_tables() -> list[str]:
    """Every table as a person would write it, a free one behind the table it belongs to."""
    return [
        _readable(name) for table in TABLES for name in (table, *(free for free in FREE if free.rpartition(".")[0] == table))
    ]


def unknown_key(path: str) -> tuple[str, list[str]]:
    """The sentence about an unknown key, and the keys it may stand for."""
    table, _, name = path.rpartition(".")
    guesses = near_keys(path)
    if table and name == "model":  # TOML gives a bare key to the table above it
        return f'{path} is not a key of the run file: model = "…" must stand above the first [table] header.', ["model"]
    if guesses:
        return f"{path} is not a key of the run file: did you mean {either(guesses)}?", guesses
    if not table:
        return f"{path} is not a key of the run file: its tables are {', '.join(_known_tables())}.", []
    accepted = ", ".join(key.name for key in keys_of(table))
    return f"{path} is not a key of the run file: [{table}] accepts {accepted}.", []


def unknown_table(path: str) -> tuple[str, list[str]]:
    """The sentence about an unknown table, and the tables it may stand for."""
    siblings = [table for table in (*TABLES, *FREE, *NAMED) if table.rpartition(".")[0] == path.rpartition(".")[0]]
    guesses = near(path, siblings)
    remedy = (
        f"did you mean [{guesses[0]}{'.NAME' if guesses[0] in NAMED else ''}]?"
        if guesses
        else f"the tables are {', '.join(_known_tables())}."
    )
    return f"[{path}] is not a table of the run file: {remedy}", guesses


def did_you_mean(known: Iterable[str], name: str) -> str:
    """The end of a sentence that has named the choices already; empty where none is near."""
    guesses = near(name, known)
    return f", did you mean {guesses[0]}?" if guesses else ""
