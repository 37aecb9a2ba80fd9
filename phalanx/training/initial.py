"""Weights to start training from: `model.from`, a Hugging Face folder or a run directory. The trainer calls it once, after the
model was built and before the first step."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from phalanx.checkpointing.find import find
from phalanx.checkpointing.hf import Folder
from phalanx.checkpointing.load import load as load_tensors
from phalanx.checkpointing.stream import Saved
from phalanx.models import layout, names
from phalanx.spec import hf
from phalanx.spec.errors import RunError


def load(model: nn.Module, folder: Path) -> None:
    """Fill a model that is already on its device, tensor by tensor, casting where formats differ.

    What serves training only and is not in the folder keeps its initial values: modules of multi-token prediction, a router's
    bias. Anything else that does not fit is refused by name before a value is changed.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    if hf.is_folder(folder):
        spec = hf.model_spec(folder)
        files = Folder(folder)
        table = names.match(files, spec, hf.interleaved(hf.read_config(folder)))
        _fit(folder, state, {entry.name: entry.shape for entry in table})
        layout.fill(state, tuple(entry for entry in table if entry.name in state), files.rows)
        return
    checkpoint, _ = find(folder)
    saved = Saved(checkpoint)
    shapes = {name: shape for name in state if (shape := saved.shape(f"model/{name}")) is not None}
    _fit(checkpoint, state, shapes)
    load_tensors(checkpoint, {f"model/{name}": state[name] for name in shapes}, alone=True)


def _fit(folder: Path, state: dict[str, Tensor], found: dict[str, tuple[int, ...]]) -> None:
    problems = []
    for name, tensor in state.items():
        if name not in found and not _optional(name):
            problems.append(
                f"model.from = {folder} lacks {name}, which the model of this run has, of shape {list(tensor.shape)}."
            )
        elif name in found and found[name] != tuple(tensor.shape):
            problems.append(
                f"model.from = {folder} has {name} of shape {list(found[name])}; the model of this run has {list(tensor.shape)}: "
                "take back the sizes that were changed in [model]."
            )
    extra = [name for name in found if name not in state and not _optional(name)]
    problems += [f"model.from = {folder} has {name}, which the model of this run lacks." for name in extra]
    if problems:
        raise RunError(problems[:10])


def _optional(name: str) -> bool:
    return name.startswith("ahead.") or name.endswith("router.bias")
