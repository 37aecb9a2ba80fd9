"""From a model that was opened to what measures it, with the settings it was trained under. The CLI and the harness call it."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.evaluation.open_model import Opened
from phalanx.evaluation.perplexity import Meter
from phalanx.evaluation.score import Scorer
from phalanx.events.rundir import RunDir
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

_BATCH = 8  # where no plan tells what training took


def meter(opened: Opened) -> Meter:
    """For losses on text."""
    compute = compute_of(opened.run, _device(opened))
    return Meter(opened.model, opened.tokenizer, compute=compute, document_mask=opened.run.data.document_mask)


def scorer(opened: Opened, batch: int | None = None) -> Scorer:
    """For log-likelihoods of continuations."""
    compute = compute_of(opened.run, _device(opened))
    context = opened.run.model.context
    return Scorer(opened.model, opened.tokenizer, context=context, batch=batch or _BATCH, compute=compute)


def compute_of(run: Run, device: torch.device) -> str:
    """The number format of a run on this device, as planning chooses it."""
    return run.precision.compute or ("bf16" if device.type == "cuda" else "fp32")


def usual_batch(opened: Opened) -> int:
    """Sequences at a time: as many as training took, so that the numbers are the same to the last digit."""
    plan = RunDir(Path(opened.path).parent.parent).plan_file
    try:
        return Plan.from_json(plan.read_text()).micro_batch
    except (OSError, ValueError, TypeError, KeyError):  # no run directory, or one of another version
        return opened.run.train.micro_batch or _BATCH


def _device(opened: Opened) -> torch.device:
    return next(opened.model.parameters()).device
