"""What a model said to a fixed prompt at the moment of a save, as a small file: whoever makes something else of the checkpoint can
compare. Training writes it, `phalanx export --check` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.spec.errors import RunError


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A prompt and the logits at some of its places."""

    tokens_S: Tensor
    places_K: Tensor
    """Where in the prompt: some places are enough, as a vocabulary is large."""
    logits_KV: Tensor
    """In fp32, whatever they were computed in."""
    compute: str
    """The number format of matrix products that they were computed in: fp32, bf16, fp16 or fp8."""
    scaling: str = "tensor"
    """fp8: what one scale is for."""

    def write(self, file: Path) -> None:
        tensors = {"tokens": self.tokens_S, "places": self.places_K, "logits": self.logits_KV}
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            file,
            {"compute": self.compute, "scaling": self.scaling},
        )


def read(file: Path) -> Reference:
    """RunError where it is no such file."""
    try:
        with safe_open(file, "pt") as inside:
            tokens, places, logits = (inside.get_tensor(name) for name in ("tokens", "places", "logits"))
            told = inside.metadata()
        return Reference(tokens, places, logits, told["compute"], told["scaling"])
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise RunError([f"{file} is no file of logits to compare with ({error}): name one that a run has written."]) from None
