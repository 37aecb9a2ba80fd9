"""The text of a new run file, with comments, from a few answers. `phalanx init` asks for them and checks the result; nothing here reads a file
except the first line of the text, to tell conversations from documents."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Literal

from phalanx.spec.errors import toml
from phalanx.spec.model import PRESETS
from phalanx.spec.run import Data
from phalanx.spec.sources import kind

Goal = Literal["try", "pretrain", "finetune"]
GOALS: dict[Goal, str] = {
    "try": "see a small model learn from Python's own source code",
    "pretrain": "train a model on your text, from scratch",
    "finetune": "go on from the weights of a Hugging Face model",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What a person has decided. None: not yet; a default is taken."""

    goal: Goal
    model: str | None = None
    """A preset, or with "finetune" a folder with a Hugging Face model or a run directory."""
    data: tuple[str, ...] = ()
    """Paths, patterns or URLs of text; none with "try"."""
    tokenizer: str | None = None
    cluster: str | None = None
    """A cluster in the catalogue; None: the machine that trains is this one."""
    gpus: bool = False
    """Whether the machine has GPUs."""
    steps: int | None = None


def default_model(goal: Goal, gpus: bool) -> str | None:
    """What suits the machine; None where only the person can know."""
    return None if goal == "finetune" else "gpt2-124m" if gpus else "tiny-dense"


def run_file(answers: Answers, name: str) -> str:
    """The run file. `name`: of the file, for the commands in its comments."""
    conversations = _holds_conversations(answers.data)
    tables = [
        _heading(answers, name),
        _model(answers),
        _data(answers, conversations),
        _train(answers),
        _optimizer(answers),
        _cluster(answers),
        _checkpoint(answers),
    ]
    return "\n\n".join(tables) + "\n"


def _heading(answers: Answers, name: str) -> str:
    return "\n".join(
        (
            f"# A run to {GOALS[answers.goal]}.",
            "#",
            f"#   phalanx train {name} --dry-run   shows what it would read, and how it would run",
            f"#   phalanx train {name}             trains; after a stop or a crash, the same command resumes",
            f"#   phalanx generate runs/{Path(name).stem}",
            "#",
            "# Every other key has a default: see docs/run-file.md. A key can be set on the command line too: train.steps=20",
        )
    )


def _model(answers: Answers) -> str:
    if answers.goal == "finetune":
        return _table("model", ("from", answers.model, "weights, sizes and tokenizer come from there"))
    model = answers.model or default_model(answers.goal, answers.gpus)
    rows: list[tuple[str, Any, str]] = [("preset", model, "`phalanx models` lists all; any key below overrides the preset")]
    if model == "tiny-dense":
        rows += [("dim", 128, "width"), ("layers", 4, ""), ("heads", 4, "")]
    return _table("model", *rows)


def _data(answers: Answers, conversations: bool) -> str:
    rows: list[tuple[str, Any, str]] = []
    if answers.goal == "try":
        rows.append(("source", "stdlib", "Python's own source code: nothing to download"))
    elif conversations:
        rows.append(("source", "chat", 'conversations: one object with "messages" per line'))
    if answers.data:
        rows.append(
            ("paths", list(answers.data), "files, folders, patterns or URLs; `phalanx data preview` shows what is read")
        )
    if answers.goal != "finetune" or answers.tokenizer is not None:
        known = answers.tokenizer or "byte"
        rows.append(("tokenizer", known, "every byte is a token; or a folder with a tokenizer.json" if known == "byte" else ""))
        if conversations and known == "byte":
            rows.append(("template", "plain", "bytes have no chat template; or a Jinja file"))
    if conversations:
        rows.append(("packing", "best-fit", "no conversation is cut in two"))
    return _table("data", *rows)


def _train(answers: Answers) -> str:
    length, batch, steps = _amounts(answers)
    return _table(
        "train",
        ("batch", batch, "sequences per step, over all ranks"),
        ("sequence_length", length, "tokens per sequence"),
        ("steps", steps, ""),
        ("eval_every", max(1, steps // 5), "measure the loss on held-out text"),
    )


def _amounts(answers: Answers) -> tuple[int, int, int]:
    """Sequence length, batch, steps: minutes on a laptop, or what a GPU is busy with."""
    large = answers.gpus or answers.cluster is not None
    preset = PRESETS.get(answers.model or "")
    length = min(1024 if large else 128, preset.context if preset is not None else 1024)
    steps = answers.steps if answers.steps is not None else 1000 if large else 300
    return length, 32 if large else 16, steps


def _optimizer(answers: Answers) -> str:
    _, _, steps = _amounts(answers)
    small = answers.goal == "try" or (answers.model or default_model(answers.goal, answers.gpus)) in (
        "tiny-dense",
        "tiny-moe",
        "tiny-mla",
    )
    rate = 2e-5 if answers.goal == "finetune" else 3e-3 if small else 6e-4
    return _table(
        "optimizer",
        ("learning_rate", rate, "lower it if the loss jumps"),
        ("warmup_steps", max(1, steps // 20), ""),
        ("schedule", "cosine", 'or "wsd", "linear", "constant"'),
    )


def _cluster(answers: Answers) -> str:
    if answers.cluster is not None:
        return _table("cluster", ("name", answers.cluster, "what `phalanx plan` plans for; `phalanx clusters` lists all"))
    if answers.gpus:
        return "# [cluster]: all GPUs of this machine, unless it says otherwise."
    return _table("cluster", ("cpu_ranks", 2, "processes, as there are no GPUs here; with GPUs, all of them are used"))


def _checkpoint(answers: Answers) -> str:
    _, _, steps = _amounts(answers)
    return _table("checkpoint", ("every", max(1, steps // 5), "steps; the last step is always saved"))


def _table(name: str, *rows: tuple[str, Any, str]) -> str:
    settings = [(f"{key} = {toml(value)}", comment) for key, value, comment in rows]
    width = max((len(setting) for setting, comment in settings if comment), default=0)
    lines = [f"{setting:<{width}}  # {comment}" if comment else setting for setting, comment in settings]
    return "\n".join((f"[{name}]", *lines))


def _holds_conversations(paths: tuple[str, ...]) -> bool:
    """Whether the first line of the first file is an object with messages."""
    if not paths or kind(Data(paths=paths)) != "jsonl":
        return False
    path = os.path.expanduser(paths[0])
    files = (
        sorted(glob(os.path.join(path, "**"), recursive=True)) if os.path.isdir(path) else sorted(glob(path, recursive=True))
    )
    first = next((file for file in files if os.path.isfile(file)), None)
    if first is None:
        return False
    with suppress(OSError, ValueError, EOFError):
        with gzip.open(first, "rt") if first.endswith(".gz") else open(first, encoding="utf-8") as lines:
            record = json.loads(next(iter(lines), "null"))
        return isinstance(record, dict) and isinstance(record.get("messages"), list)
    return False
