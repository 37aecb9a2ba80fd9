"""The command that `launch/model_check` starts: builds a run's model without memory, tries it, and says what it comes to. Not for people.

    python -m phalanx.worker.measure_process < RUN.toml

The last line it prints is a JSON object: parameters, active, flops_per_token; or problems, each a sentence.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.checkpointing.hf_folder import WeightsFolder
from phalanx.models import hf_names
from phalanx.models.init import build, reset_buffers
from phalanx.spec import hf_config
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.origin import origin_folder
from phalanx.spec.run import Run
from phalanx.transforms.precision import computing

_TRIED = 1 << 30  # parameters up to which a forward is tried: 4 GiB of memory for a moment


def main() -> None:
    try:
        answer = measured(loads(sys.stdin.read()))
    except RunError as error:
        answer = {"problems": [problem.rstrip(".") + _place(error.__cause__) for problem in error.problems]}
    print("\n" + json.dumps(answer), flush=True)


def measured(run: Run) -> dict[str, Any]:
    """Counts of the run's model, after all that could be tried of it has been."""
    model = build(run.model)
    if run.model.module is not None:
        try_forward(run, model)
    elif run.model.from_ is not None:
        match_folder(origin_folder(run.model.from_))
    parameters = sum(p.numel() for p in model.parameters())
    looked_up = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in looked_up)
    if not any(isinstance(m, nn.Linear) and m.out_features == run.model.rows for m in model.modules()):
        # No layer of its own gives the logits: the embedding of the tokens does, and that is a product too.
        multiplied += sum(w.numel() for w in looked_up.values() if w.shape[0] == run.model.rows)
    return {"parameters": parameters, "active": parameters, "flops_per_token": 6.0 * multiplied}


def match_folder(folder: Path) -> None:
    """Every tensor that the model of a Hugging Face folder has, found there in its shape; from the headers alone."""
    hf_names.match(WeightsFolder(folder), hf_config.model_spec(folder), hf_config.interleaved(hf_config.read_config(folder)))


def try_forward(run: Run, model: nn.Module) -> None:
    """One forward as training will call it, on the device it will train on: what fails there is told before anything starts."""
    if sum(p.numel() for p in model.parameters()) > _TRIED:
        return
    device = torch.device("cuda" if run.cluster.device != "cpu" and torch.cuda.is_available() else "cpu")
    tokens_BS, places_BS, documents_BS = _example(run, device)
    compute = run.precision.compute or ("bf16" if device.type == "cuda" else "fp32")
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
        return  # with two sequences; training may take one
    except Exception as error:  # whatever a stranger's forward raises is the user's to read
        raise RunError(
            [f"{named} failed on tokens of shape {list(tokens_BS.shape)}: {type(error).__name__}: {error}."]
        ) from error
    expected = f"but must give logits of shape {[*tokens_BS.shape, run.model.rows]}, a value for each token of the vocabulary."
    if not isinstance(logits, torch.Tensor):
        raise RunError([f"{named} gives {type(logits).__name__}, {expected}"])
    if logits.shape != (*tokens_BS.shape, run.model.rows):
        raise RunError([f"{named} gives a tensor of shape {list(logits.shape)}, {expected}"])
    if not logits.requires_grad:
        raise RunError([f"{named} gives logits that depend on no parameter, so there is nothing to train."])


def _example(run: Run, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens, positions and documents of the shapes that training gives."""
    places_BS = torch.arange(run.train.sequence_length, device=device).repeat(min(2, run.batch), 1)
    return places_BS % run.model.rows, places_BS, torch.zeros_like(places_BS) if run.data.document_mask else None


def _place(error: BaseException | None) -> str:
    """The file and line of the user's own code that an error came out of: what a traceback is read for."""
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
