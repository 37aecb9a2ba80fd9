"""Arguments and options that several verbs share, and amounts with units: 80GiB, 30d, $2M."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.spec.errors import RunError, toml

RunFile = Annotated[Path, Argument(help="The run file.", metavar="RUN.toml")]
Overrides = Annotated[
    list[str] | None, Argument(help="Settings that override the run file, for example train.steps=20 layout.data=2.")
]
AsJson = Annotated[
    bool, Option("--json", help="Print one JSON object on standard output; everything else goes to standard error.")
]
Hosts = Annotated[Path | None, Option(help="--on ssh: a file with one host per line. Sets cluster.hosts. See docs/ssh.md.")]
Change = Annotated[
    bool,
    Option(
        "--change",
        help="Resume a run with another learning rate, schedule, weight decay, clipping, number of steps, data or evaluation.",
    ),
]
SweptKeys = Annotated[
    list[str] | None,
    Option(help="Train a run for each value: optimizer.learning_rate=1e-4,3e-4. May be repeated for every combination."),
]
Parallel = Annotated[int, Option(min=1, help="--sweep: runs side by side, each with its part of the machine.")]
Device = Annotated[str | None, Option(help="cpu or cuda. Default: the GPU if there is one.")]
Field = Annotated[str | None, Option(help='Field or column with the text. Default: "text", or "messages" for chat.')]
Template = Annotated[str | None, Option(help='chat: a Jinja file, or "plain". Default: the chat template of the tokenizer.')]
Model = Annotated[
    str,
    Argument(
        help="A checkpoint, a run directory for its newest checkpoint, or a Hugging Face model: a folder, or its name on the hub.",
        metavar="CKPT",
    ),
]
MaxTokens = Annotated[int, Option("--tokens", min=1, help="Maximum number of tokens to generate.")]
Temperature = Annotated[float, Option(min=0.0, help="Sampling temperature; 0 always takes the most likely token.")]
TopK = Annotated[int | None, Option(min=1, help="Sample only from this many most likely tokens.")]
TopP = Annotated[float, Option(min=0.0, max=1.0, help="Sample only from the most likely tokens with this total probability.")]
Seed = Annotated[int, Option(help="Seed of the sampling.")]
CHECKPOINT = "A checkpoint, or a run directory for its newest checkpoint; a path or a URL."
TEXT_KINDS = ("text", "jsonl", "parquet", "hf", "chat", "stdlib")
SOURCE_KINDS = (*TEXT_KINDS, "tokens")

_BYTES = {
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
}  # fmt: skip
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_THOUSANDS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
_AMOUNT = re.compile(r"([+-]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)$")


def check_source_kind(kind: str | None, kinds: tuple[str, ...] = SOURCE_KINDS) -> list[str]:
    """The problem with the value of --source, if there is one."""
    return [] if kind is None or kind in kinds else [f"--source {kind} is not known: choose one of {', '.join(kinds)}."]


def launcher_settings(on: str | None, hosts: Path | None) -> list[str]:
    """--on and --hosts as overrides of the run file."""
    if hosts is not None and on is None:
        on = "ssh"
    given = {"cluster.launcher": on, "cluster.hosts": hosts}
    return [f"{key}={toml(str(value))}" for key, value in given.items() if value is not None]


def check_folders(*paths: Path | None) -> list[str]:
    """Problems with files to write whose folder does not exist."""
    missing = [path for path in paths if path is not None and not path.parent.is_dir()]
    return [f"{path}: cannot be written: there is no folder {path.parent}" for path in missing]


def _amount(units: Mapping[str, float], example: str, option: str, text: str, *, prefix: str = "", zero: bool = False) -> float:
    shown = f'{option} "{text}"'
    match = _AMOUNT.match(text.strip().removeprefix(prefix))
    if match is None:
        raise RunError(f"{shown} is not an amount: write it like {example}.")
    number, unit = float(match[1].replace(",", "").replace("_", "")), match[2]
    if unit not in units:
        # The case may differ if there is only one such unit.
        close = [name for name in units if name.lower() == unit.lower()]
        if len(close) != 1:
            known = ", ".join(name for name in units if name)
            problem = "has no unit" if not unit else f"has the unit {unit}"
            raise RunError(f"{shown} {problem}: write it like {example}, in one of {known}.")
        unit = close[0]
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise RunError(f"{shown} must be positive and finite: write it like {example}.")
    return number * units[unit]


parse_memory = partial(_amount, _BYTES, "80GiB or 80GB")
"""Bytes, with a unit. The unit is required: GB and GiB differ by 7 %, which decides whether a run fits."""
parse_seconds = partial(_amount, _SECONDS, "30d or 12h")
"""Seconds, with a unit."""
parse_duration = partial(_amount, {"": 1.0, "m": 60.0} | _SECONDS, "90s, 5min, 4h or 7d", zero=True)
"""Seconds, with or without a unit; 0 is allowed."""
parse_dollars = partial(_amount, _THOUSANDS, "2e6 or $2M", prefix="$")
"""US dollars."""


def parse_size(option: str, text: str) -> int:
    """Bytes, with or without a unit."""
    return int(_amount({"": 1.0, "B": 1.0} | _BYTES, "5GB or 500MB", option, text))
