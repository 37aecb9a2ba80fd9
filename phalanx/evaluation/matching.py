"""Compares an exported folder with the model in training: both compute the logits of the prompt of a `ReferenceLogits`. The folder is
opened on one CPU in fp32, by transformers if it is installed. `phalanx export --check` and background exports call it.

The tolerance follows from the compute format of training. For fp32 it is a bound on the rounding of sums in another order. For other
formats it is measured: our own one-device model, filled from the folder, computes the prompt in fp32 and in that format; the difference,
a few times over, is what the format may change in training. That model is filled and run one block at a time, so that the whole model
never has to fit in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.checkpointing.hf_folder import ReferenceLogits, WeightsFolder
from phalanx.models import hf_mapping
from phalanx.models.decoder import Decoder
from phalanx.models.init import build, reset_buffers
from phalanx.spec import hf_config
from phalanx.spec.errors import RunFailed
from phalanx.spec.safetensors_index import SIZES
from phalanx.transforms import fp8
from phalanx.transforms.precision import computing

EXACT = 1e-4
"""Tolerance of fp32, as a fraction of the largest logit: sums of a few thousand terms, layer upon layer, in another order."""
TIMES = 3.0
"""Factor of the measured rounding of a coarser format: another device and another order round differently, but not more coarsely. Over
all layouts, with bf16, the largest difference was 0.8 to 1.4 times the largest rounding."""
AGREEING = 0.75
"""With experts, this fraction of the positions must agree: rounding decides between two nearly equal experts, and a token that goes to
another expert than in training differs although the weights are right."""
_ROOM = 1.5  # times the weights in fp32: what transformers needs to open them, with a margin
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The result of a comparison. A difference is the largest of a position's logits, as a fraction of the largest logit of all."""

    opened: str
    """What opened the folder: "transformers" or "phalanx"."""
    difference: float
    """Difference at the deciding position: the worst, or with experts the worst of those that must agree."""
    allowed: float
    position: int
    """The deciding position in the prompt."""
    token: int
    """The token whose logit differs most there."""


def check(folder: Path, reference: ReferenceLogits) -> Match:
    """Compare; raises RunFailed with the position and size of the difference if they do not agree."""
    match = compare(folder, reference)
    if not match.difference <= match.allowed:  # also if a number is not finite
        raise RunFailed(
            f"opened by {match.opened} it differs from the model in training: at position {match.position} of the fixed prompt the "
            f"logit of token {match.token} by {match.difference:.3g} of the largest logit, where {reference.compute} allows "
            f"{match.allowed:.3g}"
        )
    return match


@torch.no_grad()
def compare(folder: Path, reference: ReferenceLogits) -> Match:
    exact_KV, rounded_KV = _ours(folder, reference)
    opened, answer_KV = "phalanx", exact_KV
    if find_spec("transformers") is not None and _fits(folder):
        opened, answer_KV = "transformers", _theirs(folder, reference)
    if answer_KV.shape != reference.logits_KV.shape:
        raise RunFailed(
            f"opened by {opened} it has {answer_KV.shape[1]} logits, and the model in training has {reference.logits_KV.shape[1]}"
        )
    scale = answer_KV.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    worst_K, tokens_K = ((reference.logits_KV - answer_KV).abs() / scale).nan_to_num(torch.inf).max(1)
    rounding_K = ((rounded_KV - exact_KV).abs() / scale).amax(1)
    decisive = math.ceil((1.0 if hf_config.model_spec(folder).moe is None else AGREEING) * len(worst_K)) - 1
    place = int(worst_K.argsort()[decisive])
    return Match(
        opened=opened,
        difference=float(worst_K[place]),
        # At the same rank among the positions, so that an outlier counts as little.
        allowed=max(EXACT, TIMES * float(rounding_K.sort().values[decisive])),
        position=int(reference.positions_K[place]),
        token=int(tokens_K[place]),
    )


def _ours(folder: Path, reference: ReferenceLogits) -> tuple[Tensor, Tensor]:
    """The logits of our own model with the folder's weights, in fp32 and in the format of the reference."""
    spec, files = hf_config.model_spec(folder), WeightsFolder(folder)
    table = hf_mapping.match(files, spec)
    model = build(spec)
    assert isinstance(model, Decoder)
    exact = rounded = reference.tokens_S[None]
    positions = torch.arange(exact.shape[1])[None]
    for index in range(spec.layers):
        part = model.part(index, index + 1).eval().to_empty(device=_CPU)
        reset_buffers(part)
        state = {name: tensor for name, tensor in part.state_dict().items() if isinstance(tensor, Tensor)}
        hf_mapping.fill(state, tuple(entry for entry in table if entry.name in state), files.rows)
        exact = part(exact, positions)
        if reference.compute != "fp32":
            rounded = _in_format(part, rounded, positions, reference)
        part.to_empty(device=torch.device("meta"))  # frees the block's memory
    exact_KV = exact[0, reference.positions_K].float()
    return exact_KV, exact_KV if reference.compute == "fp32" else rounded[0, reference.positions_K].float()


def _in_format(part: nn.Module, x: Tensor, positions: Tensor, reference: ReferenceLogits) -> Tensor:
    if reference.compute == "fp8":
        fp8.apply([part], "row" if reference.scaling == "row" else "tensor", _CPU)
    with computing(reference.compute, _CPU):
        answer: Tensor = part(x, positions)
    return answer


def _theirs(folder: Path, reference: ReferenceLogits) -> Tensor:
    """The logits of transformers, in fp32."""
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
        logits_SV: Tensor = model(input_ids=reference.tokens_S[None]).logits[0]
    except Exception as error:  # versions of transformers raise different errors
        raise RunFailed(f"transformers {transformers.__version__} cannot open it: {error}") from error
    return logits_SV[reference.positions_K].float()


def _fits(folder: Path) -> bool:
    """Whether transformers, which loads the whole model, has enough memory next to training."""
    values = sum((tensor.end - tensor.begin) // SIZES[tensor.dtype] for tensor in WeightsFolder(folder).tensors.values())
    try:
        with open("/proc/meminfo") as file:
            available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return True
    return _ROOM * 4 * values < available
