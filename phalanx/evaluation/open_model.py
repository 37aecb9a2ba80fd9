"""A trained model, ready to be asked: from a run directory, a checkpoint or a Hugging Face folder. Generate, eval and the
harness adapter open theirs here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.checkpointing.find_checkpoint import FoundCheckpoint, find, is_url, path_or_url
from phalanx.checkpointing.hf_folder import WeightsFolder
from phalanx.checkpointing.restore import load as load_tensors
from phalanx.data.tokenizer import Tokenizer, open_tokenizer
from phalanx.models import hf_mapping, hf_names
from phalanx.models.init import build, reset_buffers
from phalanx.spec import hf_config
from phalanx.spec.check import check
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.load import loads
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Data, Run, Train


@dataclass(frozen=True, slots=True)
class Opened:
    """A model with what is needed to talk to it."""

    model: nn.Module
    """On its device, in evaluation mode."""
    tokenizer: Tokenizer
    run: Run
    """What it was trained by; of a Hugging Face folder only `model` and `data.tokenizer` mean something."""
    path: Path | str
    """The checkpoint that a run directory stood for, or what was named; a text where it is a URL."""
    stops: frozenset[int]
    """Tokens that end a generated text: those of generation_config.json where one came along, as in transformers, or the end token."""


def open_model(path: Path | str, device: str | torch.device | None = None) -> Opened:
    """The model at `path`, on `device`; None: the GPU if there is one."""
    where = choose_device(device)
    if not is_url(path) and hf_config.is_folder(Path(path)):
        return _open_folder(Path(path), where)
    found = find(path)
    checkpoint, run = found.checkpoint, run_of(found)
    words = open_tokenizer(run.data.tokenizer, run.data.end_token)
    model = _empty(run, where)
    try:
        load_tensors(checkpoint, {f"model/{name}": tensor for name, tensor in _state(model).items()})
    except RunFailed as why:  # a size or a name that differs
        raise RunError(
            [f"{checkpoint} does not fit the model of {found.source} ({why}): undo what was changed there."]
        ) from None
    return Opened(model, words, run, path_or_url(checkpoint), _stops(found.tokenizer, words))


def run_of(found: FoundCheckpoint) -> Run:
    """The run that made a checkpoint, whether or not what it was started from still lies where it did.

    The sizes are all in the file, so `model.from` is not asked again; the tokenizer kept beside it goes before the one it names.
    """
    text = re.sub(r"(?m)^from = .*\n", "", found.run)
    kept = found.tokenizer
    here = [f"data.tokenizer={kept}"] if kept is not None and (kept / "tokenizer.json").is_file() else []
    return loads(text, name=found.source, overrides=here)


def choose_device(device: str | torch.device | None) -> torch.device:
    """A device by name, or RunError where there is none; None: the GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise RunError([f"--device {device}: choose cpu or cuda."])
    if kind == "cuda" and not torch.cuda.is_available():
        raise RunError(["--device cuda: torch sees no GPU here; leave the option out, or look at `phalanx doctor`."])
    return torch.device(device)


def run_for(spec: ModelSpec, data: Data, folder: Path) -> Run:
    """A run around a model that no run has made but `folder` describes; a RunError says what does not fit together in it.

    A run file says how long it trains. Nobody has asked for that here, so those numbers stand for themselves.
    """
    train = Train(batch=8, steps=1000, sequence_length=max(2, min(1024, spec.context)))
    run = Run(model=spec, data=data, train=train)
    problems = check(run)
    if problems:
        raise RunError([f"{folder} does not describe a model that can be used: {problem}" for problem in problems])
    return run


def words_of(folder: Path) -> tuple[Tokenizer, Data]:
    """The tokenizer of a Hugging Face folder, and the keys of a run file that name it."""
    name, own = str(folder), hf_config.read_config(folder).get("eos_token_id")
    try:
        return open_tokenizer(name), Data(tokenizer=name)
    except RunError:
        end = _text(folder / "tokenizer.json", own)  # where the tokenizer does not say what ends a text, the model may
        if end is None:
            raise
        return open_tokenizer(name, end), Data(tokenizer=name, end_token=end)


def _text(file: Path, token: object) -> str | None:
    from tokenizers import Tokenizer as Library

    try:
        found: str | None = Library.from_file(str(file)).id_to_token(token) if isinstance(token, int) else None
    except Exception:  # the library raises nothing more specific, of a negative number too
        return None
    return found


def _stops(folder: Path | None, words: Tokenizer) -> frozenset[int]:
    try:
        found = None if folder is None else json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        found = None
    ids = found if isinstance(found, list) else [found]
    return frozenset(number for number in ids if type(number) is int) or frozenset((words.end,))


def _open_folder(path: Path, where: torch.device) -> Opened:
    spec = hf_config.model_spec(path)
    files = WeightsFolder(path)
    table = hf_names.match(files, spec, hf_config.interleaved(hf_config.read_config(path)))
    words, data = words_of(path)
    run = run_for(spec, data, path)
    model = _empty(run, where)
    hf_mapping.fill(_state(model), table, files.rows)
    return Opened(model, words, run, path, _stops(path, words))


def _empty(run: Run, where: torch.device) -> nn.Module:
    model = build(run.model).to_empty(device=where).eval()
    reset_buffers(model)
    return model


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and the buffers that are saved with them, to be filled in place."""
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
