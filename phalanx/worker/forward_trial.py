"""Tries the forward of a model that was not written for Phalanx, on the device that it will train on, so that errors and logits that cannot be
trained appear before a run starts. `worker/measure_process` asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from phalanx import accelerator
from phalanx.models.init import reset_buffers
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.run import Run
from phalanx.transforms.precision import computing

_MAX_TRIED = 1 << 30  # parameters up to which the forward is tried: 4 GiB of memory for a moment
_LENGTH = 32
"""Positions of the calls that are compared."""
_PERIOD = 4099  # values that repeat; prime, so that rows of a matrix differ
_AGAIN, _LATER = {"fp32": 1e-5}, {"fp32": 1e-3}
"""Differences of logits, in parts of the largest, that are no rounding: of two calls alike, and of two with other tokens after the position."""
_COARSE = 3e-2
"""The same in other formats."""


def try_forward(run: Run, model: nn.Module) -> None:
    """Runs the forward as training will call it. Raises RunError."""
    if sum(p.numel() for p in model.parameters()) > _MAX_TRIED:
        return
    device = accelerator.default().device() if run.cluster.device != "cpu" else torch.device("cpu")
    places_BS = torch.arange(run.train.sequence_length, device=device).repeat(min(2, run.batch), 1)
    tokens_BS, documents_BS = places_BS % run.model.rows, torch.zeros_like(places_BS) if run.data.document_mask else None
    compute = run.precision.compute or accelerator.of(device).compute
    named = f"{run.model.custom_key}: its forward"
    try:
        model.to_empty(device=device)
        _fill(model)
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
    with torch.no_grad(), computing(compute, device):
        refuse(list(_compared(run, model, device, compute)))


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Values of the sizes of initial ones, other than zero, so that what a forward reads shows in its logits."""
    values = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(7))
    for parameter in model.parameters():
        count = parameter.numel()
        flat = values.to(parameter.device, parameter.dtype).repeat(-(-count // _PERIOD))[:count]
        parameter.copy_((1 + 0.1 * flat if parameter.ndim < 2 else flat * parameter.shape[-1] ** -0.5).view(parameter.shape))


def _compared(run: Run, model: nn.Module, device: torch.device, compute: str) -> Iterator[str]:
    """Sentences on logits that the same tokens do not give again, or that later tokens change."""
    length = min(_LENGTH, run.train.sequence_length)
    tokens_BS = torch.arange(3, 3 + length, device=device)[None] * 7 % run.model.rows
    half = length // 2
    other_BS = torch.cat((tokens_BS[:, :half], (tokens_BS[:, half:] + 1) % run.model.rows), dim=1)
    places_BS = torch.arange(length, device=device)[None]
    documents_BS = torch.zeros_like(places_BS) if run.data.document_mask else None
    try:
        first, again, other = (model(x, places_BS, documents_BS) for x in (tokens_BS, tokens_BS, other_BS))
    except Exception:
        return  # a module may need windows of another length
    scale, key = float(first.abs().max()), run.model.custom_key
    if _largest(first - again) > _AGAIN.get(compute, _COARSE) * scale:
        if replace(run.layout, data=1).ranks > 1:
            yield (
                f"{key}: its forward gives other logits when it is called with the same tokens again, so that ranks that share a replica would not "
                "agree: it draws random numbers (dropout?), or reads something that changes, such as a counter or the time. Remove that, or set every "
                "layout key but layout.data to 1."
            )
    elif half and _largest(first[:, :half] - other[:, :half]) > _LATER.get(compute, _COARSE) * scale:
        yield (
            f"{key}: its logits at a position depend on later tokens, so that it would be trained to predict tokens that it sees. Make its attention "
            f"causal{', with is_decoder = true in the config,' if run.model.config is not None else ''} and mix no later positions into earlier ones."
        )


def _largest(difference: Tensor) -> float:
    """0 where a logit is not finite: values like these prove nothing then."""
    largest = float(difference.abs().max())
    return largest if largest < float("inf") else 0.0
