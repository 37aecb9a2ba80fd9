"""Opens a trained model from a run directory, a checkpoint or a Hugging Face folder, and makes what evaluates it. Called by
`phalanx generate`, `phalanx chat`, `phalanx eval` and the harness adapter."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx import accelerator
from phalanx.checkpointing.directory import DamagedCheckpoint
from phalanx.checkpointing.find_checkpoint import FoundCheckpoint, find, is_url, path_or_url, pin_model
from phalanx.checkpointing.restore import load as load_tensors
from phalanx.data.chat_turns import GENERATION_CONFIG
from phalanx.data.tokenizer import Tokenizer, open_tokenizer
from phalanx.evaluation.adapters import SavedWeights, saved_weights
from phalanx.evaluation.score import Scorer
from phalanx.events.rundir import RunDir
from phalanx.models import hf_mapping
from phalanx.models.init import build, reset_buffers
from phalanx.spec import hf_config
from phalanx.spec.check import check
from phalanx.spec.errors import RunError, RunFailed, either
from phalanx.spec.hub import model_folder
from phalanx.spec.load import loads
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Plan
from phalanx.spec.run import Data, Run, Train
from phalanx.training.hf_weights import open_weights

_BATCH = 8  # if no plan gives the micro-batch of training


@dataclass(frozen=True, slots=True)
class Opened:
    """A model with its tokenizer and its run."""

    model: nn.Module
    """On its device, in evaluation mode."""
    tokenizer: Tokenizer
    run: Run
    """The run that trained it; for a Hugging Face folder, only `model` and `data.tokenizer` are meaningful."""
    path: Path | str
    """The checkpoint or folder that was opened; a string if it is a URL."""
    stops: frozenset[int]
    """Tokens that end a generated text: those of generation_config.json, as in transformers, or the end token."""
    step: int | None = None
    """Step of the checkpoint; None: a Hugging Face folder."""
    damaged: tuple[DamagedCheckpoint, ...] = ()
    """Newer checkpoints of the run that were skipped because they are damaged."""
    tokenizer_folder: Path | None = None
    """The run directory's folder of tokenizer files, if there is one."""

    @property
    def compute(self) -> str:
        """The compute format of training, or the default of the device."""
        return self.run.precision.compute or accelerator.of(next(self.model.parameters()).device).compute


def open_model(path: Path | str, device: str | torch.device | None = None) -> Opened:
    """Open the model at `path`, which may be a name of the Hugging Face hub, on `device`; None: the GPU if there is one."""
    where = choose_device(device)
    path = pin_model(path)
    if not is_url(path):
        path = model_folder(str(path))
    if not is_url(path) and hf_config.is_folder(Path(path)):
        return _open_folder(Path(path), where)
    found = find(path)
    checkpoint, run = found.checkpoint, run_of(found)
    tokenizer = open_tokenizer(run.data.tokenizer, run.data.end_token)
    model = _empty(run, where)
    try:
        if run.lora.rank is None:
            load_tensors(checkpoint, {f"model/{name}": tensor for name, tensor in _state(model).items()})
        else:
            _fill_merged(_state(model), saved_weights(found, run))
    except RunFailed as why:  # a shape or a name differs
        raise RunError(f"{checkpoint} does not fit the model of {found.source} ({why}): undo the changes there.") from None
    stops = _stops(found.tokenizer, tokenizer)
    return Opened(model, tokenizer, run, path_or_url(checkpoint), stops, found.step, found.damaged, found.tokenizer)


def run_of(found: FoundCheckpoint) -> Run:
    """The run that wrote a checkpoint, even if the folder of its `model.from` is gone: all sizes are in the run file. The run
    directory's copy of the tokenizer takes precedence."""
    text = re.sub(r"(?m)^from = .*\n", "", found.run)
    copy = found.tokenizer
    overrides = [f"data.tokenizer={copy}"] if copy is not None and (copy / "tokenizer.json").is_file() else []
    return loads(text, name=found.source, overrides=overrides)


def choose_device(device: str | torch.device | None) -> torch.device:
    """A device by name; None: the GPU if there is one. Raises RunError if this machine does not have it."""
    if device is None:
        return torch.device(accelerator.default().type)
    kind = str(device).partition(":")[0]
    choices = [name for name in accelerator.kinds() if name != "meta"]
    if kind not in choices:
        raise RunError(f"--device {device}: choose {either(choices)}.")
    if not accelerator.of(kind).available():
        raise RunError(f"--device {device}: torch sees no such device here; remove the option, or look at `phalanx doctor`.")
    return torch.device(device)


def run_for(spec: ModelSpec, data: Data, folder: Path) -> Run:
    """A run for a model that `folder` describes and no run has trained, with placeholders for batch and duration; raises RunError if
    the description is inconsistent."""
    train = Train(batch=8, steps=1000, sequence_length=max(2, min(1024, spec.context)))
    run = Run(model=spec, data=data, train=train)
    problems = check(run)
    if problems:
        raise RunError([f"{folder} does not describe a model that can be used: {problem}" for problem in problems])
    return run


def tokenizer_of(folder: Path) -> tuple[Tokenizer, Data]:
    """The tokenizer of a Hugging Face folder, and the [data] keys that name it."""
    name, end_id = str(folder), hf_config.read_config(folder).get("eos_token_id")
    try:
        return open_tokenizer(name), Data(tokenizer=name)
    except RunError:
        end = _token_text(folder / "tokenizer.json", end_id)  # if the tokenizer has no end token, the model may name one
        if end is None:
            raise
        return open_tokenizer(name, end), Data(tokenizer=name, end_token=end)


def _token_text(file: Path, token: object) -> str | None:
    from tokenizers import Tokenizer as Library

    try:
        text: str | None = Library.from_file(str(file)).id_to_token(token) if isinstance(token, int) else None
    except Exception:  # the library raises nothing more specific
        return None
    return text


def _stops(folder: Path | None, tokenizer: Tokenizer) -> frozenset[int]:
    try:
        given = None if folder is None else json.loads((folder / GENERATION_CONFIG).read_text())["eos_token_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        given = None
    ids = given if isinstance(given, list) else [given]
    return frozenset(number for number in ids if type(number) is int) or frozenset((tokenizer.end,))


def _open_folder(path: Path, device: torch.device) -> Opened:
    files, spec, table = open_weights(path)
    tokenizer, data = tokenizer_of(path)
    run = run_for(spec, data, path)
    model = _empty(run, device)
    hf_mapping.fill(_state(model), table, files.rows)
    return Opened(model, tokenizer, run, path, _stops(path, tokenizer))


@torch.no_grad()
def _fill_merged(state: dict[str, Tensor], weights: SavedWeights) -> None:
    """Fill a model whose checkpoint holds LoRA adapters: with each adapter added to its matrix."""
    for name, tensor in state.items():
        for first, last in weights.row_ranges(f"model/{name}"):
            tensor[first:last] = weights.read(f"model/{name}", first, last)


def _empty(run: Run, device: torch.device) -> nn.Module:
    model = build(run.model).to_empty(device=device).eval()
    reset_buffers(model)
    return model


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, to be filled in place."""
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def scorer(opened: Opened, batch: int | None = None) -> Scorer:
    """Computes log-likelihoods of continuations, with the settings of training."""
    context = opened.run.model.context
    return Scorer(opened.model, opened.tokenizer, context=context, batch=batch or _BATCH, compute=opened.compute)


def usual_batch(opened: Opened) -> int:
    """Sequences per batch: the micro-batch of training, so that results are bit-identical."""
    plan = RunDir(Path(opened.path).parent.parent).plan_file
    try:
        return Plan.from_json(plan.read_text()).micro_batch
    except (OSError, ValueError, TypeError, KeyError):  # not in a run directory, or in one of another version
        return opened.run.train.micro_batch or _BATCH
