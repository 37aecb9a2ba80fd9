"""Counts the parameters of a run's model and tries its forward pass. Started by `launch/model_check`, because only torch can build a model.

    python -m phalanx.worker.measure_process < RUN.toml

It prints a JSON object on the last line: the fields of `Size`, without those of a trace; or problems, a list of sentences. A custom
module is also built as rank 0 of the run's layout, without memory, so that what cannot be cut is found before any rank starts.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx import accelerator
from phalanx.checkpointing.hf_folder import WeightsFolder
from phalanx.models import hf_mapping
from phalanx.models.custom import axes
from phalanx.models.init import build, reset_buffers
from phalanx.spec import hf_config
from phalanx.spec.adapted_layers import is_target
from phalanx.spec.errors import RunError, refuse, toml
from phalanx.spec.load import loads
from phalanx.spec.origin import origin_folder
from phalanx.spec.plan import Size
from phalanx.spec.run import Run
from phalanx.transforms import lora
from phalanx.transforms.blocks import blocks
from phalanx.transforms.precision import computing

_MAX_TRIED = 1 << 30  # parameters up to which the forward is tried: 4 GiB of memory for a moment


def main() -> None:
    print_size(lambda: measure(loads(sys.stdin.read())))


def print_size(ask: Callable[[], Size]) -> None:
    """Prints the size that a process was asked for, or the problems in its way with the user's line that caused them."""
    try:
        shown: dict[str, Any] = asdict(ask())
    except RunError as error:
        shown = {"problems": [problem.rstrip(".") + _place(error.__cause__) for problem in error.problems]}
    print("\n" + json.dumps(shown), flush=True)


def measure(run: Run) -> Size:
    """Check the run's model and count its parameters."""
    model = build(run.model)
    trained = _adapters(run, model)
    if run.model.module is not None:
        try_cuts(run, model)
        try_forward(run, model)
    elif run.model.from_ is not None:
        folder = origin_folder(run.model.from_)
        hf_mapping.match(WeightsFolder(folder), hf_config.model_spec(folder))  # every tensor in the right shape, by the headers
    parameters = sum(p.numel() for p in model.parameters())
    looked_up = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in looked_up)
    if not any(isinstance(m, nn.Linear) and m.out_features == run.model.rows for m in model.modules()):
        # Tied embeddings: the token embedding also computes the logits.
        multiplied += sum(w.numel() for w in looked_up.values() if w.shape[0] == run.model.rows)
    return Size(
        parameters=parameters,
        active=parameters,
        flops_per_token=6.0 * multiplied if trained is None else 4.0 * multiplied + 6.0 * trained,
        trained=trained,
        width=max((w.shape[1] for w in looked_up.values()), default=run.model.dim),
        blocks=len(list(getattr(model, "blocks", nn.ModuleList()).children())),
    )


def try_cuts(run: Run, model: nn.Module) -> None:
    """Raise RunError if the run's layout cannot cut the model, or a setting needs blocks that it does not have."""
    memory = run.memory
    for setting, is_set in (
        ('precision.compute = "fp8"', run.precision.compute == "fp8"),
        ("memory.compile = true", memory.compile),
        (f'memory.recompute = "{memory.recompute}"', memory.recomputes),
        ('memory.activations = "cpu"', memory.activations == "cpu"),
    ):
        if is_set:
            blocks([model], setting)
    layout = replace(run.layout, data=run.layout.data or 1)
    if replace(layout, data=1).ranks > 1:
        from phalanx.training.build import dry_build  # seconds of imports that other runs need not wait for

        with dry_build(run, layout, 0):
            pass


def _adapters(run: Run, model: nn.Module) -> int | None:
    """Parameters of the LoRA adapters of a model; None without LoRA. Raises RunError if one of its targets is no layer of the model."""
    if run.lora.rank is None:
        return None
    known, targets = lora.layers(model, axes(run.model.module)), run.lora.targets or ("blocks.*",)
    problems = [
        f"lora.targets: {toml(target)} is no linear layer of the model; its layers are {', '.join(list(known)[:8]) or 'none'}"
        for target in targets
        if not any(is_target(name, (target,)) for name in known)
    ]
    refuse(problems)
    adapters = lora.apply([copy := build(run.model)], run.lora, axes(run.model.module))
    return sum(parameter.numel() for name, parameter in copy.named_parameters() if name in adapters.names)


def try_forward(run: Run, model: nn.Module) -> None:
    """Run one forward pass as training will call it, on the device it will train on, so that errors appear before the run starts."""
    if sum(p.numel() for p in model.parameters()) > _MAX_TRIED:
        return
    device = accelerator.default().device() if run.cluster.device != "cpu" else torch.device("cpu")
    places_BS = torch.arange(run.train.sequence_length, device=device).repeat(min(2, run.batch), 1)
    tokens_BS, documents_BS = places_BS % run.model.rows, torch.zeros_like(places_BS) if run.data.document_mask else None
    compute = run.precision.compute or accelerator.of(device).compute
    named = f"model.module = {run.model.module!r}: its forward"
    try:
        model.to_empty(device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        reset_buffers(model)
        with computing(compute, device):
            logits = model(tokens_BS, places_BS, documents_BS)
    except torch.OutOfMemoryError:
        return  # two sequences do not fit; training may use one
    except Exception as error:  # a custom forward may raise anything
        raise RunError(
            f"{named} failed on tokens of shape {list(tokens_BS.shape)}: {type(error).__name__}: {error}."
        ) from error
    expected = f"but must give logits of shape {[*tokens_BS.shape, run.model.rows]}, a value for each token of the vocabulary."
    if not isinstance(logits, torch.Tensor):
        raise RunError(f"{named} gives {type(logits).__name__}, {expected}")
    if logits.shape != (*tokens_BS.shape, run.model.rows):
        raise RunError(f"{named} gives a tensor of shape {list(logits.shape)}, {expected}")
    if not logits.requires_grad:
        raise RunError(f"{named} gives logits that depend on no parameter, so there is nothing to train.")


def _place(error: BaseException | None) -> str:
    """The file and line of the user's code that raised an error."""
    libraries = (str(Path(file).parent) for module in (torch, importlib) if (file := module.__file__))
    passed = (str(Path(__file__).parents[1]), *libraries)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__ if error else None)
        if not frame.filename.startswith(("<", *passed))
    ]
    return f"; it came from {frames[-1].filename}, line {frames[-1].lineno}." if frames else "."


if __name__ == "__main__":
    main()
