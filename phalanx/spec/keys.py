"""Every table and key that the run file accepts, read off the dataclasses once; what each key accepts; and what an unknown name
may stand for. Load, check, dump and schema walk these tables, so that a new field needs no line anywhere else.

Tables that the person names are patterns here: `data.mix.*.weight` is the key `data.mix.wiki.weight` of a run that has a
`[data.mix.wiki]`. Functions take and return such concrete paths; only TABLES and KEYS themselves hold patterns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from keyword import iskeyword
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from phalanx.spec.errors import did_you_mean, either, near, noun, quote, toml
from phalanx.spec.run import Run

PLAIN = object
"""`Key.kind` of a key in a free table, which takes a string, an integer, a float or a boolean."""
BARE = re.compile(r"[A-Za-z0-9_-]+")
"""Names a person may give: those that TOML writes without quotes, so that they can be part of a dotted override too."""

_ACCEPTED: dict[type, tuple[type, ...]] = {float: (int, float), PLAIN: (bool, int, float, str)}
_EXPECTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    PLAIN: "a plain value (a string, a number, true or false)",
}
_NUMBERS = {int: re.compile(r"[+-]?\d+"), float: re.compile(r"[+-]?(\d+(\.\d+)?(e[+-]?\d+)?|inf)")}

_MENTION = re.compile(r"\$\(([\w.-]+)\)|\$([a-z]+(?:\.[\w-]+)+)")

# What other trainers call the same thing, where spelling alone would not lead there.
_ALIASES = {
    "optimizer.learning_rate": "lr max_lr",
    "optimizer.final_fraction": "min_lr",
    "optimizer.name": "optimizer",
    "optimizer.schedule": "lr_scheduler",
    "optimizer.warmup_steps": "warmup",
    "train.clip": "grad_clip gradient_clipping max_grad_norm max_norm",
    "train.batch": "batch_size global_batch_size",
    "train.micro_batch": "micro_batch_size per_device_train_batch_size",
    "train.sequence_length": "seq_len seq_length max_seq_len",
    "resilience.restarts": "max_restarts",
    "model.mtp_depth": "mtp_num_layers",
    "train.steps": "max_steps train_iters",
    "checkpoint.every": "save_interval save_steps",
    "checkpoint.save": "enable_checkpoint enable_checkpointing save_strategy",
    "precision.compute": "dtype",
    "model.dim": "hidden_size n_embd",
    "model.layers": "n_layer num_layers num_hidden_layers",
    "model.heads": "n_head num_attention_heads",
    "model.kv_heads": "num_key_value_heads n_kv_heads",
    "model.ffn": "intermediate_size",
    "model.vocab": "vocab_size",
    "model.context": "max_position_embeddings",
    "model.window": "sliding_window",
    "model.rope_fraction": "partial_rotary_factor",
    "model.rope_local_theta": "rope_local_base_freq",
    "model.query_scalar": "query_pre_attn_scalar",
    "model.attention_cap": "attn_logit_softcapping",
    "model.logit_cap": "final_logit_softcapping",
    "model.moe.experts": "num_experts num_local_experts n_routed_experts",
    "model.moe.active": "num_experts_per_tok",
    "model.moe.ffn": "moe_intermediate_size",
    "model.moe.shared": "n_shared_experts",
    "model.mla.kv_rank": "kv_lora_rank",
    "model.mla.q_rank": "q_lora_rank",
    "model.from": "init_from pretrained",
    "lora.rank": "r lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules lora_target_modules",
    "lora.base": "quantize_base quantization load_in_4bit load_in_8bit",
    "lora.dropout": "lora_dropout",
    "train.objective": "loss_type",
    "data.field": "text_field text_column",
    "data.template": "chat_template",
    "layout.data": "dp",
    "layout.tensor": "tp tensor_parallel_size",
    "layout.pipeline": "pp pipeline_parallel_size",
    "layout.context": "cp",
    "layout.expert": "ep",
    "layout.shard": "fsdp",
}
_BY_ALIAS = {alias: path for path, aliases in _ALIASES.items() for alias in aliases.split()}


class Finding(NamedTuple):
    """One problem between keys of the run file. The rules in `spec/check*` make it, `spec/load` reports it."""

    keys: tuple[str, ...]
    """The keys involved, the likeliest mistake first. The problem is reported at that key's line, and not at all if one of the
    keys has a problem of its own."""
    sentence: str
    not_if_resolved: bool = False
    """Not reported for a resolved file, which no longer needs the folders its values came from."""
    absent: bool = False
    """What the first key names is not on this machine. The loader adds why the Hugging Face hub does not have it either."""


def apply_rules(run: Run, *rules: Callable[[Run], Iterable[str | Finding]]) -> Iterator[Finding]:
    """The problems that rules find. A rule words a problem as a sentence that names its keys: `$train.steps` becomes
    "train.steps = 20", and `$(train.steps)` becomes nothing but counts the key as involved."""
    for rule in rules:
        for problem in rule(run):
            yield problem if isinstance(problem, Finding) else _fill_in(run, problem)


def _fill_in(run: Run, sentence: str) -> Finding:
    keys: dict[str, None] = {}

    def render(mention: re.Match[str]) -> str:
        path = mention[1] or mention[2]
        if mention[2] and find_key(path) is None:
            return mention[0]  # part of a value
        keys[path] = None
        value = run.model.computed_defaults.get(path, _value(run, path))
        return "" if mention[1] else f"{path} = {toml(value)}"

    text = _MENTION.sub(render, sentence)
    return Finding(tuple(keys), text)


class Wrong(ValueError):
    """A value that its key does not accept; the text is the sentence without its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the run file."""

    path: str
    """Dotted, such as "train.steps"."""
    kind: type
    """bool, int, float, str or PLAIN; the type of one element if the key takes a list."""
    many: bool
    """Whether it takes a list."""
    optional: bool
    """Whether None stands for "not given"."""
    choices: tuple[str, ...]
    """The only accepted strings; empty: any string."""
    default: Any
    """MISSING if the key must be given."""
    metadata: Mapping[str, Any]
    """What `spec/fields` attached."""

    @property
    def table(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def attribute(self) -> str:
        """The dataclass field: the key's name, with an underscore if it is a Python keyword."""
        return _attribute(self.name)

    def of(self, run: Run) -> Any:
        """The key's value in a run; None if its table is absent."""
        return _value(run, self.path)

    def read(self, value: Any, bare: str | None = None) -> Any:
        """The value as the dataclass holds it, or `Wrong`; `bare` is its spelling on the command line, for keys that take text."""
        if bare is not None and self.kind is str and not self.choices:
            value = bare
        if not self.many:
            return self._read_one(self.path, value)
        if not isinstance(value, list | tuple):
            return (self._read_one(self.path, value),)
        return tuple(self._read_one(f"{self.path}[{i}]", item) for i, item in enumerate(value))

    def _read_one(self, path: str, value: Any) -> Any:
        accepted = _ACCEPTED.get(self.kind, (self.kind,))
        if type(value) not in accepted:  # not isinstance: true is not an integer here
            expected = either(map(toml, self.choices)) if self.choices else _EXPECTED[self.kind]
            if "secret" in self.metadata:
                raise Wrong(f"{path} is {noun(value)}, but {expected} is expected.")
            raise Wrong(f"{path} = {quote(value)} is {noun(value)}, but {expected} is expected{self._hint(value)}.")
        if type(value) is str:
            self._check_text(path, value)
            return value
        if type(value) is bool:
            return value
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise Wrong(f"{path} = {quote(value)} is out of range: an integer must fit into 64 bits.")
        if self.kind is PLAIN:
            if value != value:  # NaN differs from itself, so that the run would not equal itself
                raise Wrong(f"{path} = nan is not a number: remove it.")
            return value
        value = self.kind(value)
        self._check_range(path, value)
        return value

    def _check_text(self, path: str, value: str) -> None:
        if self.choices and value not in self.choices:
            guess = did_you_mean([toml(choice) for choice in self.choices], toml(value))
            raise Wrong(f"{path} = {quote(value)} is unknown: it must be {either(map(toml, self.choices))}{guess or '.'}")
        if any("\ud800" <= char <= "\udfff" for char in value):  # undecodable bytes of a command line; no TOML can hold them
            value_shown = "" if "secret" in self.metadata else f" = {value!a}"
            raise Wrong(f"{path}{value_shown} is not valid Unicode: rename the file or quote the text as UTF-8.")

    def _check_range(self, path: str, value: float) -> None:
        low, high, above = (self.metadata.get(limit) for limit in ("low", "high", "above"))
        fits = (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)
        finite = math.isfinite(value) or (value > 0 and self.metadata.get("infinite", False))
        if fits and finite:
            return
        rules = []
        if low is not None and high is not None:
            rules.append(f"between {low} and {high}")
        elif low is not None:
            rules.append(f"at least {low}")
        elif above is not None:
            rules.append(f"greater than {above}")
        if not finite:
            rules.append("finite")
        remedy = self.metadata.get("below") if low is not None and value < low else None
        instead = f"; {self.table}.{remedy}" if remedy else ""
        raise Wrong(f"{path} = {quote(value)} is out of range: it must be {' and '.join(rules)}{instead}.")

    def _hint(self, value: Any) -> str:
        """What to write instead, where that is obvious."""
        spelled = value.strip().lower() if isinstance(value, str) else ""
        if self.kind in _NUMBERS and len(spelled) < 20 and _NUMBERS[self.kind].fullmatch(spelled):
            return f": write {spelled} without quotes"
        if self.kind is bool and (spelled in ("true", "false") or value in (0, 1)):
            return f": write {spelled or toml(bool(value))}"
        if self.kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
            return f": write {int(value)}"
        if self.kind is str and not self.choices and isinstance(value, bool | int | float):
            return f": write it in quotes, {toml(toml(value))}"
        return ""


def _attribute(name: str) -> str:
    return f"{name}_" if iskeyword(name) else name


def _key(path: str, hint: Any, optional: bool, default: Any, metadata: Mapping[str, Any]) -> Key:
    many = get_origin(hint) is tuple
    if many:
        hint = get_args(hint)[0]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    kind = str if choices else hint
    assert kind in (bool, int, float, str), f"{path}: the run file has no way to write {hint}"
    return Key(path=path, kind=kind, many=many, optional=optional, choices=choices, default=default, metadata=metadata)


def _walk(cls: type, prefix: str) -> None:
    hints = get_type_hints(cls)
    for field in fields(cls):
        if field.metadata.get("named_by_table") or field.metadata.get("not_a_key"):
            continue
        path, hint = prefix + field.name.removesuffix("_"), hints[field.name]
        optional = NoneType in get_args(hint)
        if optional:
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
        element = get_args(hint)[0] if get_origin(hint) is tuple else None
        if get_origin(element) is tuple:  # pairs of a name and a plain value
            FREE[path] = cls
        elif is_dataclass(element):
            assert isinstance(element, type)
            NAMED[path] = cls
            TABLES[f"{path}.*"] = element
            _walk(element, f"{path}.*.")
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            TABLES[path] = hint
            if optional:
                OPTIONAL.append(path)
            _walk(hint, path + ".")
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            KEYS[path] = _key(path, hint, optional, default, field.metadata)


TABLES: dict[str, type] = {}
"""Dotted path of each table, such as "model.moe" or "data.mix.*", to its dataclass; in the order of the run file."""
KEYS: dict[str, Key] = {}
"""Dotted path of each key; in the order of the run file."""
NAMED: dict[str, type] = {}
"""Tables that hold tables which the person names, such as "data.mix", to the dataclass that they are a field of."""
FREE: dict[str, type] = {}
"""Tables of plain values under any name, such as "model.options", to the dataclass that they are a field of."""
OPTIONAL: list[str] = []
"""Tables whose absence means something, such as "model.moe": their keys are set together or not at all."""
_walk(Run, "")
_BY_TABLE = {table: [key for key in KEYS.values() if key.table == table] for table in TABLES}


def pattern(path: str) -> str:
    """A concrete path as TABLES and KEYS have it."""
    for named in NAMED:
        if path.startswith(f"{named}."):
            _, dot, rest = path[len(named) + 1 :].partition(".")
            return f"{named}.*{dot}{rest}"
    return path


def find_key(path: str) -> Key | None:
    """The key that a concrete path names, if there is one."""
    if path.rpartition(".")[0] in FREE:
        return Key(path=path, kind=PLAIN, many=False, optional=False, choices=(), default=MISSING, metadata={})
    key = KEYS.get(pattern(path))
    return key if key is None or key.path == path else replace(key, path=path)


def is_table(path: str) -> bool:
    """Whether a concrete path is that of a table, including those that hold named or free tables."""
    return pattern(path) in TABLES or path in NAMED or path in FREE


def keys_of(table: str) -> list[Key]:
    """The keys directly in a table; those of a free table are known only from a run."""
    keys = _BY_TABLE.get(pattern(table), [])
    return list(keys) if pattern(table) == table else [replace(key, path=f"{table}.{key.name}") for key in keys]


def tables_in(run: Run) -> list[str]:
    """The tables in which a run has values, in the order of the run file."""
    tables = [table for table in TABLES if table not in OPTIONAL or _value(run, table) is not None]
    for named in NAMED:
        at = tables.index(f"{named}.*")
        tables[at : at + 1] = [f"{named}.{entry.name}" for entry in _value(run, named)]
    for free in FREE:
        if _value(run, free):
            tables.insert(tables.index(free.rpartition(".")[0]) + 1, free)
    return tables


def keys_in(run: Run, table: str) -> list[Key]:
    """The keys of one of a run's tables."""
    if table not in FREE:
        return keys_of(table)
    return [key for name, _ in _value(run, table) if (key := find_key(f"{table}.{name}"))]


def _value(run: Run, path: str) -> Any:
    """The value at a path; None if a table on the way is absent."""
    value: Any = run
    for name in path.split("."):
        if isinstance(value, tuple):  # of a table whose entries the person names: dataclasses or pairs
            named: dict[str, Any] = dict(pair if isinstance(pair, tuple) else (pair.name, pair) for pair in value)
            value = named.get(name)
        elif value is not None:
            value = getattr(value, _attribute(name))
    return value


def near_keys(path: str) -> list[str]:
    """Keys that an unknown dotted key may stand for: misspelled, in the wrong table, or by another trainer's name."""
    table, _, name = path.rpartition(".")
    if name in _BY_ALIAS:
        here = [key.path for key in keys_of(table) if key.name == _BY_ALIAS[name].rpartition(".")[2]]
        return here or [_BY_ALIAS[name]]
    guesses = [f"{table}.{match}" for match in near(name, (key.name for key in keys_of(table)))]
    guesses += _in_any_table([name])
    return list(dict.fromkeys(guesses or _in_any_table(near(name, {key.name for key in KEYS.values()}, cutoff=0.75))))[:3]


def _in_any_table(names: list[str]) -> list[str]:
    """Keys of these names in any table; those in named tables only if no other table has one."""
    paths = [key.path for key in KEYS.values() if key.name in names]
    return [path for path in paths if "*" not in path] or [_readable(path) for path in paths]


def _readable(path: str) -> str:
    return path.replace("*", "NAME")


def _known_tables() -> list[str]:
    """Every table as a person would write it; free tables follow the table they belong to."""
    return [
        _readable(name) for table in TABLES for name in (table, *(free for free in FREE if free.rpartition(".")[0] == table))
    ]


def unknown_key(path: str) -> tuple[str, list[str]]:
    """The sentence about an unknown key, and the keys it may stand for."""
    table, _, name = path.rpartition(".")
    guesses = near_keys(path)
    if table and name == "model":  # TOML assigns a bare key to the table above it
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
    written = [f"{table}.NAME" if table in NAMED else table for table in guesses]
    remedy = f"did you mean [{written[0]}]?" if written else f"the tables are {', '.join(_known_tables())}."
    return f"[{path}] is not a table of the run file: {remedy}", guesses
